"""Rows of numbers into pages on the host, as the pages store them (spec: write path, storage).

A row (one head of one token) is a piece of memory, and all rows of a pool begin at multiples of one unit, mostly the row itself. So the
pool is seen as a list of units, and one indexed copy by all of torch's threads puts each row where it belongs. It goes element by
element, so elements are as wide as there are: three to four times as fast as in half precision.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from kvtier.kernels.nvfp4 import quantise_nvfp4_reference, quantise_nvfp4_torch
from kvtier.kernels.places import Numbers
from kvtier.kernels.quantise import to_storage
from kvtier.kernels.storage import Storage

_ELEMENTS: Final = (torch.complex128, torch.int64)   # 16 and 8 bytes; below, torch's assignment is as good


def write_rows(pages: torch.Tensor, block_scales: torch.Tensor | None, storage: Storage, scale: float, numbers: Numbers, inside: Numbers,
               rows: torch.Tensor) -> None:
    """Write ``rows[i]`` to entry ``inside[i]`` of page ``numbers[i]``.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, stored_dim]`` on the CPU, changed in place.
        block_scales: uint8 ``[num_pages, heads, tokens_per_block, dim / 16]``, changed in place; None but for NVFP4.
        storage, scale: how numbers are stored.
        numbers, inside: int64 and any whole numbers ``[rows]``, each within its axis.
        rows: ``[rows, heads, dim]``.
    """
    if not len(numbers):
        return
    if storage is Storage.SAME:
        _assign(pages, numbers, inside, rows)
    elif storage is Storage.NVFP4:
        assert block_scales is not None
        codes, scales = quantise_nvfp4_torch(rows, scale)
        _assign(pages, numbers, inside, codes)
        _assign(block_scales, numbers, inside, scales)
    else:
        _assign(pages, numbers, inside, to_storage(rows, pages.dtype, scale))


def _assign(pages: torch.Tensor, numbers: Numbers, inside: Numbers, rows: torch.Tensor) -> None:
    num_pages, heads, tokens_per_block, dim = pages.shape
    page_stride, head_stride, token_stride, dim_stride = pages.stride()
    rows, size = rows.contiguous(), pages.element_size()
    unit = math.gcd(page_stride, head_stride, token_stride, dim)
    # The widest element that a unit, and where it begins, are multiples of.
    element = next((kind for kind in _ELEMENTS
                    if math.gcd(unit, pages.storage_offset(), rows.storage_offset()) * size % kind.itemsize == 0), None)
    if dim_stride != 1 or element is None:
        target = pages.view(torch.uint8) if size == 1 else pages
        target[torch.from_numpy(numbers), :, torch.from_numpy(inside)] = rows.view(target.dtype)
        return
    extent = (num_pages - 1) * page_stride + (heads - 1) * head_stride + (tokens_per_block - 1) * token_stride + dim
    units = pages.as_strided((extent,), (1,)).view(torch.uint8).view(element).view(-1, unit * size // element.itemsize)
    places = (numbers * (page_stride // unit) + inside * (token_stride // unit))[:, None] + np.arange(heads) * (head_stride // unit)
    if unit != dim:
        places = places[..., None] + np.arange(dim // unit)
    units.index_copy_(0, torch.from_numpy(places.reshape(-1)), rows.view(-1).view(torch.uint8).view(element).view(-1, units.shape[1]))


def write_row_reference(pages: torch.Tensor, block_scales: torch.Tensor | None, storage: Storage, scale: float, page: int, inside: int,
                        row: torch.Tensor) -> None:
    """One row ``[heads, dim]`` to one entry, on any device, to be read and compared with."""
    if storage is Storage.SAME:
        pages[page, :, inside] = row
    elif storage is Storage.NVFP4:
        assert block_scales is not None
        pages[page, :, inside], block_scales[page, :, inside] = quantise_nvfp4_reference(row, scale)
    else:
        pages[page, :, inside] = to_storage(row, pages.dtype, scale)

"""Rows of numbers into pages on the host, as the pages store them (spec: write path, storage).

In the compiled build rows are copied as they are, by ``kvtier.kernels.host_copy``. Without it torch copies them. A token's rows, one of
each head, lie at the same distances from one another wherever they begin, and they begin at multiples of one unit, mostly a row. So the
pool is seen as a list of tokens that overlap, one beginning at each unit, and one indexed copy by all of torch's threads puts each token
where it belongs. It goes element by element, so elements are as wide as there are: three to four times as fast as in half precision.

Tokens go in the order in which they come: what is read far apart costs more than what is written.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from kvtier.kernels.compiled_copy import CopyRuns, copy_runs
from kvtier.kernels.nvfp4 import quantise_nvfp4_reference, quantise_nvfp4_torch
from kvtier.kernels.places import Numbers, PageRuns, spread
from kvtier.kernels.quantise import to_storage
from kvtier.kernels.storage import Storage

_PAST_CACHE: Final = 256 << 10
"""Bytes from which on rows are written past the cache. Whoever read them next, attention among them, took no longer for that."""

_ELEMENTS: Final = (torch.complex128, torch.int64)   # 16 and 8 bytes; below, torch's assignment is as good

_MANY: Final = 512   # tokens from which on numbering their rows costs less than it saves


def write_rows(pages: torch.Tensor, block_scales: torch.Tensor | None, storage: Storage, scale: float, numbers: Numbers, runs: PageRuns,
               rows: torch.Tensor) -> None:
    """Write the rows of one run of tokens after the other to its entries of page ``numbers[run]``.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, stored_dim]`` on the CPU, changed in place.
        block_scales: uint8 ``[num_pages, heads, tokens_per_block, dim / 16]``, changed in place; None but for NVFP4.
        storage, scale: how numbers are stored.
        numbers: int64 ``[runs]``: one of the two that ``runs`` has.
        runs: within their pages.
        rows: ``[tokens, heads, dim]``, any strides.
    """
    if not len(numbers):
        return
    if storage is Storage.SAME:
        _assign(pages, numbers, runs, rows)
    elif storage is Storage.NVFP4:
        assert block_scales is not None
        codes, scales = quantise_nvfp4_torch(rows, scale)
        _assign(pages, numbers, runs, codes)
        _assign(block_scales, numbers, runs, scales)
    else:
        _assign(pages, numbers, runs, to_storage(rows, pages.dtype, scale))


def _assign(pages: torch.Tensor, numbers: Numbers, runs: PageRuns, rows: torch.Tensor) -> None:
    if copy_runs is not None and pages.stride(3) == 1 and pages.data_ptr() and rows.data_ptr():   # a tensor that wraps one has no address
        _copy(copy_runs, pages, numbers, runs, rows)
        return
    num_pages, heads, tokens_per_block, dim = pages.shape
    page_stride, head_stride, token_stride, dim_stride = pages.stride()
    size, unit = pages.element_size(), math.gcd(page_stride, head_stride, token_stride, dim)
    # The widest element that all rows begin and end at in the pages; rows that do not come so are copied.
    alignment = math.gcd(unit * size, _alignment(pages))
    element = next((kind for kind in _ELEMENTS if alignment % kind.itemsize == 0), None)
    if dim_stride != 1 or element is None:
        target = pages.view(torch.uint8) if size == 1 else pages
        numbers, inside = np.repeat(numbers, runs.lengths), spread(runs.inside, runs.lengths, len(rows))
        target[torch.from_numpy(numbers), :, torch.from_numpy(inside)] = rows.contiguous().view(target.dtype)
        return
    if rows.stride(2) != 1 or math.gcd(_alignment(rows), *(stride * size for stride in rows.stride()[:2])) % element.itemsize:
        rows = rows.clone(memory_format=torch.contiguous_format)
    first = numbers * (page_stride // unit) + runs.inside * (token_stride // unit)
    places = torch.from_numpy(spread(first, runs.lengths, len(rows), token_stride // unit))
    begins = ((num_pages - 1) * page_stride + (tokens_per_block - 1) * token_stride) // unit + 1
    if len(rows) >= _MANY and head_stride != dim and rows.is_contiguous():   # each row by itself: a dimension less to count through
        places = (places[:, None] + torch.arange(heads) * (head_stride // unit)).view(-1)
        begins += (heads - 1) * head_stride // unit
        rows, heads = rows.view(-1, 1, dim), 1
    beginning = pages.as_strided((begins, heads, dim), (unit, head_stride, 1))
    _as(beginning, element).index_copy_(0, places, _as(rows, element))


def _copy(copy_runs: CopyRuns, pages: torch.Tensor, numbers: Numbers, runs: PageRuns, rows: torch.Tensor) -> None:
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    size, heads, dim = pages.element_size(), pages.shape[1], pages.shape[3]
    page_step, head_step, token_step = (stride * size for stride in pages.stride()[:3])
    row_step, piece_step = (stride * size for stride in rows.stride()[:2])
    table = np.empty((len(numbers), 3), np.int64)
    table[:, 0] = numbers * page_step + runs.inside * token_step
    table[:, 1] = (runs.lengths.cumsum() - runs.lengths) * row_step
    table[:, 2] = runs.lengths
    copy_runs(pages.data_ptr(), rows.data_ptr(), table, token_step, row_step, heads, head_step, piece_step, dim * size,
              torch.get_num_threads(), len(rows) * heads * dim * size >= _PAST_CACHE)


def _alignment(rows: torch.Tensor) -> int:
    """Bytes that the first number lies at a multiple of, in the process's memory and in the storage. Memory that is not torch's own (an
    array's slice, a mapped file) may begin anywhere, and wide elements that are not aligned may end the process."""
    return math.gcd(rows.data_ptr(), rows.storage_offset() * rows.element_size())


def _as(rows: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    return rows.view(torch.uint8).view(element)


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

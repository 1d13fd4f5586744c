"""Rows of numbers into pages, in torch, as the pages store them (spec: write path, storage)."""

from __future__ import annotations

import torch

from kvtier.kernels.nvfp4 import quantise_nvfp4_torch
from kvtier.kernels.quantise import to_storage
from kvtier.kernels.storage import Storage


def write_rows(pages: torch.Tensor, block_scales: torch.Tensor | None, storage: Storage, scale: float, numbers: torch.Tensor,
               inside: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows[i]`` to entry ``inside[i]`` of page ``numbers[i]``.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, stored_dim]``, changed in place.
        block_scales: uint8 ``[num_pages, heads, tokens_per_block, dim / 16]``, changed in place; None but for NVFP4.
        storage, scale: how numbers are stored.
        numbers, inside: int64 ``[rows]``, each within its axis.
        rows: ``[rows, heads, dim]``.
    """
    if storage is Storage.SAME:
        pages[numbers, :, inside] = rows
    elif storage is Storage.NVFP4:
        assert block_scales is not None
        pages[numbers, :, inside], block_scales[numbers, :, inside] = quantise_nvfp4_torch(rows, scale)
    else:
        pages.view(torch.uint8)[numbers, :, inside] = to_storage(rows, pages.dtype, scale).view(torch.uint8)

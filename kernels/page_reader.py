"""Reading pages piece by piece on a CPU: a few pages of one sequence become a block of numbers that stays in the cache.

No call holds a sequence's whole context: a piece has at most ``PIECE_NUMBERS`` numbers, is used where it was put, and is overwritten by
the next one. That costs a copy inside the cache and buys what a matrix product wants: each head's tokens in a row.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch
from kvtier.kernels.storage import Storage

PIECE_NUMBERS: Final = 1 << 18
"""Numbers of a piece, over all heads: a mebibyte in float32, about what a core's own cache holds."""

_MOST_TOKENS: Final = 1024


def tokens_per_piece(context: PagedContext) -> int:
    """Tokens of a piece, a multiple of the page size. Nothing but shapes decides: results must not depend on anything else."""
    width = context.heads * max(context.stored.key_dim, context.value_dim)
    fitting = PIECE_NUMBERS // width
    tokens = 1 << max(0, fitting.bit_length() - 1)
    return max(context.tokens_per_block, min(tokens, _MOST_TOKENS))


class PageView:
    """Pages seen as one list of ``[unit, dim]`` tiles, where a unit is a page's tokens or a single one.

    Whatever the strides, every tile starts at a multiple of the greatest common divisor of the strides between them. A strided
    view with that step holds them all (and meaningless ones in between, which nobody asks for), so one ``index_select`` fetches
    tiles in any order: no loop over pages, no second copy to bring heads in front.
    """

    def __init__(self, pages: torch.Tensor, unit: int) -> None:
        num_pages, heads, tokens_per_block, dim = pages.shape
        page_stride, head_stride, token_stride, dim_stride = pages.stride()
        strides = (page_stride, head_stride) if unit == tokens_per_block else (page_stride, head_stride, token_stride)
        step = math.gcd(*strides) or 1
        last_token = 0 if unit == tokens_per_block else tokens_per_block - 1
        count = ((num_pages - 1) * page_stride + (heads - 1) * head_stride + last_token * token_stride) // step + 1
        self.tiles = pages.as_strided((count, unit, dim), (step, token_stride, dim_stride))
        self._page_step, self._token_step = page_stride // step, token_stride // step
        self._heads = torch.arange(heads, device=pages.device)[:, None] * (head_stride // step)

    def numbers(self, pages: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Tile numbers int64 ``[..., heads, n]`` of pages ``[..., n]``, of single tokens ``inside`` them where a unit is one."""
        first = pages.long() * self._page_step   # 64 bits: pages times heads are many
        if inside is not None:
            first = first + inside * self._token_step
        return first[..., None, :] + self._heads


class PageReader:
    """Reads the keys or the values of one layer, piece by piece, as numbers of one dtype.

    Args:
        context: where they lie.
        is_value: values; else keys.
        dtype: of what :meth:`read` returns.
        unit: tokens of a tile: ``tokens_per_block``, or 1 where neighbours may lie in different pages.
        most_tokens: of the largest piece.
    """

    def __init__(self, context: PagedContext, is_value: bool, dtype: torch.dtype, unit: int, most_tokens: int) -> None:
        stored = context.stored
        pages = stored.values if is_value else stored.keys
        scales = stored.value_block_scales if is_value else stored.key_block_scales
        self._storage, self._field = stored.storage, int(is_value)
        self._scale = stored.value_scale if is_value else stored.key_scale
        self._stored_dtype, self._dtype, self._offset = pages.dtype, dtype, context.layer_pages.offset
        self._unit, self._heads, self._dim = unit, context.heads, stored.value_dim if is_value else stored.key_dim
        # FP8 as bytes: copying is no arithmetic, and not every operation knows it.
        data = pages.view(torch.uint8) if self._storage is Storage.FP8 else pages
        self._views = [PageView(tensor, unit) for tensor in (data, scales) if tensor is not None]
        rows = context.heads * most_tokens
        self._buffers = [view.tiles.new_empty(rows * view.tiles.shape[2]) for view in self._views]
        self._wide = None if pages.dtype == dtype else torch.empty(rows * self._dim, dtype=dtype, device=pages.device)

    def addresses(self, entries: torch.Tensor, inside: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What :meth:`read` needs to know of table entries ``[..., n]``, before the layer is added: int64 ``[..., heads, n]`` each."""
        return [view.numbers(entries.long() + self._offset, inside) for view in self._views]

    def read(self, addresses: list[torch.Tensor]) -> torch.Tensor:
        """The tokens of ``[heads, n]`` addresses: ``[heads, n * unit, dim]``, overwritten by the next call."""
        rows = addresses[0].numel() * self._unit
        for view, buffer, numbers in zip(self._views, self._buffers, addresses, strict=True):
            dim = view.tiles.shape[2]
            torch.index_select(view.tiles, 0, numbers.reshape(-1), out=buffer[:rows * dim].view(-1, self._unit, dim))
        data = self._buffers[0][:rows * self._views[0].tiles.shape[2]].view(self._heads, rows // self._heads, -1)
        if self._wide is None:
            return data
        wide = self._wide[:rows * self._dim].view(self._heads, -1, self._dim)
        if self._storage is Storage.NVFP4:
            scales = self._buffers[1].view(torch.uint8)[:rows * self._views[1].tiles.shape[2]].view(self._heads, rows // self._heads, -1)
            return wide.copy_(dequantise_nvfp4_torch(data, scales, self._scale, torch.float32))
        wide.copy_(data.view(self._stored_dtype))
        return wide if self._storage is Storage.SAME else wide.mul_(self._scale)

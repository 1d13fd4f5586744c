"""Reading one sequence's pages piece by piece on a CPU, as numbers that a matrix product can take.

No call holds a sequence's whole context. A page that is large enough by itself is read where it lies. Of smaller pages some are brought
together in a buffer that stays in the cache, is used there and overwritten by the next piece: a product for each page would cost more
than the copy. How much fits is a compromise: the less, the nearer it is, and the more often a product starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch
from kvtier.kernels.storage import Storage

PIECE_NUMBERS: Final = 1 << 18
"""Numbers of a piece, over all heads, that many queries share or that is widened first: a mebibyte in float32, what a core's own cache
holds."""

DECODE_BYTES: Final = 2 << 20
"""Bytes of a piece, over all heads, that is used once and as it is stored. Beyond a core's own cache, but half as many products start."""

PAGE_NUMBERS: Final = 1 << 16
"""Numbers from which on a page, over all heads, may be read where it lies: so many keep a product busy for longer than its start takes."""

_TILE_NUMBERS: Final = 1 << 15
"""Numbers of one head's tokens from which on torch's ``index_select`` is so slow that pages had better be read where they lie. Below,
pages four times as large are still better brought together."""

_MOST_TOKENS: Final = 1024


def tokens_per_piece(context: PagedContext, once_as: torch.dtype | None = None) -> int:
    """Tokens of a piece, a multiple of the page size. Nothing but shapes and types decides: results must not depend on anything else.

    Args:
        context: whose tokens.
        once_as: the type in which a piece is used, where each is used once; None: by many queries.
    """
    stored = context.stored
    numbers = DECODE_BYTES // stored.keys.element_size() if stored.keys.dtype == once_as else PIECE_NUMBERS
    fitting = numbers // (context.heads * max(stored.key_dim, context.value_dim))
    tokens = 1 << max(0, fitting.bit_length() - 1)
    return max(context.tokens_per_block, min(tokens, _MOST_TOKENS))


def is_read_in_place(context: PagedContext, is_half: bool) -> bool:
    """Whether decode reads this layer's pages one by one where they lie. With ``is_half``, for torch's own attention over numbers of 16
    bits, which starts slower than a product."""
    tile = context.tokens_per_block * min(context.stored.key_dim, context.value_dim)
    least = PAGE_NUMBERS * (4 if tile < _TILE_NUMBERS else 2 if is_half else 1)
    return context.source_rows is None and tile * context.heads >= least


class _Tiles:
    """Pages seen as one list of ``[unit, dim]`` tiles, where a unit is a page's tokens or a single one.

    Whatever the strides, every tile starts at a multiple of the greatest common divisor of the strides between them. A strided
    view with that step holds them all (and meaningless ones in between, which nobody asks for), so one ``index_select`` fetches
    tiles in any order: no loop over pages, no second copy to bring heads in front.
    """

    def __init__(self, pages: torch.Tensor, unit: int, most: int) -> None:
        num_pages, heads, tokens_per_block, dim = pages.shape
        page_stride, head_stride, token_stride, dim_stride = pages.stride()
        strides = (page_stride, head_stride) if unit == tokens_per_block else (page_stride, head_stride, token_stride)
        step = math.gcd(*strides) or 1
        last_token = 0 if unit == tokens_per_block else tokens_per_block - 1
        count = ((num_pages - 1) * page_stride + (heads - 1) * head_stride + last_token * token_stride) // step + 1
        self._tiles = pages.as_strided((count, unit, dim), (step, token_stride, dim_stride))
        self._page_step, self._token_step = page_stride // step, token_stride // step
        self._heads = torch.arange(heads, device=pages.device)[:, None] * (head_stride // step)
        self._buffer = pages.new_empty(heads * most, unit, dim)

    def numbers(self, pages: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Tile numbers int64 ``[..., heads, n]`` of pages ``[..., n]``, of single tokens ``inside`` them where a unit is one."""
        first = pages * self._page_step   # 64 bits: pages times heads are many
        return self._heads + (first if inside is None else first + inside * self._token_step)[..., None, :]

    def fetch(self, numbers: torch.Tensor) -> torch.Tensor:
        """Tiles ``[heads, n]`` as ``[heads, n * unit, dim]``, overwritten by the next call."""
        heads, count = numbers.shape
        found = self._buffer[:heads * count]
        torch.index_select(self._tiles, 0, numbers.reshape(-1), out=found)
        return found.view(heads, -1, found.shape[2])


class PageReader:
    """Reads the keys or the values of one layer, piece by piece, as numbers of one dtype.

    Attributes:
        is_view: pieces may be the pages themselves: whoever changes one copies it first.

    Args:
        context: where they lie.
        is_value: values; else keys.
        dtype: of the pieces.
        unit: ``tokens_per_block``, or 1 where neighbours may lie in different pages.
        piece_tokens: tokens of a piece; as many as ``unit``: pages are read where they lie.
        most_tokens: tokens of a sequence; no buffer is larger.
    """

    def __init__(self, context: PagedContext, is_value: bool, dtype: torch.dtype, unit: int, piece_tokens: int, most_tokens: int) -> None:
        stored = context.stored
        pages = stored.values if is_value else stored.keys
        scales = stored.value_block_scales if is_value else stored.key_block_scales
        self._storage, self._scale = stored.storage, stored.value_scale if is_value else stored.key_scale
        self._offset, self._piece_units = context.layer_pages.offset, piece_tokens // unit
        most = min(self._piece_units, max(1, -(-most_tokens // unit)))
        dim = stored.value_dim if is_value else stored.key_dim
        self._dtype, self._pages, self._scales = pages.dtype, pages, scales
        self._wide = None if pages.dtype == dtype else torch.empty(context.heads * most * unit * dim, dtype=dtype, device=pages.device)
        self._tiles: list[_Tiles] = []
        self._is_paged = piece_tokens == context.tokens_per_block == unit
        self.is_view = self._is_paged and self._wide is None
        if not self._is_paged:
            # FP8 as bytes: copying is no arithmetic, and not every operation knows it.
            data = pages.view(torch.uint8) if self._storage is Storage.FP8 else pages
            self._tiles = [_Tiles(tensor, unit, most) for tensor in (data, scales) if tensor is not None]

    def locate(self, entries: torch.Tensor, inside: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What :meth:`pieces` needs to know of table entries ``[..., n]`` before the layer is added, of tokens with their places ``inside``
        pages: tensors ``[..., n]``. Worked out for a whole batch at once, and then cut."""
        pages = entries.long() + self._offset
        return [pages] if self._is_paged else [tiles.numbers(pages, inside) for tiles in self._tiles]

    def pieces(self, located: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tokens of one sequence, piece after piece: ``[heads, tokens, dim]``, overwritten by the next one."""
        if self._is_paged:
            for page in located[0].tolist():
                yield self._widen(self._pages[page], None if self._scales is None else self._scales[page])
            return
        for first in range(0, located[0].shape[-1], self._piece_units):
            last = first + self._piece_units
            found = [tiles.fetch(numbers[:, first:last]) for tiles, numbers in zip(self._tiles, located, strict=True)]
            yield self._widen(found[0].view(self._dtype), found[1] if len(found) > 1 else None)

    def _widen(self, data: torch.Tensor, block_scales: torch.Tensor | None) -> torch.Tensor:
        """Stored numbers ``[heads, tokens, stored_dim]`` as what they stand for."""
        if self._wide is None:
            return data
        if block_scales is not None:
            numbers = dequantise_nvfp4_torch(data, block_scales, self._scale, torch.float32)
            return self._wide[:numbers.numel()].view(numbers.shape).copy_(numbers)
        wide = self._wide[:data.numel()].view(data.shape).copy_(data)
        return wide if self._storage is Storage.SAME else wide.mul_(self._scale)

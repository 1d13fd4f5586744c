"""Paged prefill in torch operations: chunks of queries, with what is before them in pages (spec: read path).

A sequence's queries are cut into tiles and its keys into pieces, both at absolute multiples, and every tile meets every piece that
it sees with a running maximum and sum (the online softmax of Milakov and Gimelshein, 2018, as in FlashAttention). A query is always
the same row of products of the same shapes, wherever its chunk began or ended, and what it does not see is exactly 0: so its result
depends, to the last bit, on nothing but itself, its position and the keys before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import Chunk, PrefillPlan
from kvtier.kernels.page_reader import PageReader, tokens_per_piece
from kvtier.kernels.visibility import Span

TILE: Final = 32
"""Queries per tile. A small tile wastes little on a chunk of few tokens; larger ones were not faster on two cores."""


def prefill_torch(query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None) -> torch.Tensor:
    """The path in torch operations of :func:`kvtier.kernels.attention.attention_prefill_batch`."""
    out = query.new_zeros(query.shape[0], query.shape[1], context.value_dim)
    dtype, width = context.compute_dtype(query), tokens_per_piece(context)
    keys, values = (PageReader(context, is_value, dtype, context.tokens_per_block, width, width) for is_value in (False, True))
    for chunk in plan.chunks:
        if chunk.length:
            tokens = slice(chunk.begin, chunk.end)
            drafts = None if draft_mask is None else draft_mask[tokens, :chunk.end - chunk.begin]
            out[tokens] = _ChunkAttention(query[tokens].to(dtype) * context.scale, context, chunk, drafts, width).run(keys, values)
    return out


@dataclass(frozen=True)
class _Piece:
    """A piece of one sequence's context, in the readers' buffers.

    Attributes:
        begin: its first place.
        keys, values: ``[heads, width, dim]``; what no query of the chunk sees is 0.
        tokens: int64 ``[width]``, the token at each place, -1 for none.
        oldest, newest: of these tokens; ``oldest`` is -1 when there is a place without a token.
    """

    begin: int
    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor
    oldest: int
    newest: int


class _ChunkAttention:
    """The queries of one sequence ``[tokens, query_heads, head_dim]``, scaled, and what they have seen so far."""

    def __init__(self, query: torch.Tensor, context: PagedContext, chunk: Chunk, drafts: torch.Tensor | None, width: int) -> None:
        tokens, query_heads, head_dim = query.shape
        heads = context.heads
        self._context, self._chunk, self._drafts, self._width = context, chunk, drafts, width
        self._heads, self._group, self._tokens = heads, query_heads // heads, tokens
        visibility = context.visibility
        first = chunk.past if visibility.is_causal else 0
        # Position of the first row of the first tile, and of the first query in it.
        self._start = first // TILE * TILE
        self._shift = first - self._start
        self._num_tiles = -(-(self._shift + tokens) // TILE)
        # What lies behind a tile is seen by none of its rows.
        self._is_cut_by_tile = visibility.is_causal and visibility.ring is None and drafts is None
        self._drafts_depths = None if drafts is None else drafts.sum(1) - 1
        rows = query.new_zeros(self._num_tiles * TILE, heads, self._group, head_dim)
        rows[self._shift:self._shift + tokens] = query.view(tokens, heads, self._group, head_dim)
        self._rows = rows.view(self._num_tiles, TILE, heads, self._group, head_dim).permute(0, 2, 3, 1, 4).reshape(
            self._num_tiles, heads, self._group * TILE, head_dim)
        self._largest = query.new_full((self._num_tiles, heads, self._group * TILE, 1), -math.inf)
        self._sums = torch.zeros_like(self._largest)
        self._values = query.new_zeros(self._num_tiles, heads, self._group * TILE, context.value_dim)
        tokens_per_block = context.tokens_per_block
        self._spans = visibility.place_spans(first, chunk.length, tokens_per_block)
        self._num_places = visibility.num_places(chunk.length, tokens_per_block)
        # A tile's products reach to its last row, which may lie behind the last query.
        reached = max(chunk.length, self._start + self._num_tiles * TILE) if self._is_cut_by_tile else chunk.length
        self._reached = -(-visibility.num_places(reached, tokens_per_block) // tokens_per_block) * tokens_per_block
        self._token_of_place = visibility.token_of_place(chunk.length, self._reached, tokens_per_block, query.device)

    def run(self, keys: PageReader, values: PageReader) -> torch.Tensor:
        """``[tokens, query_heads, value_dim]``."""
        for begin in range(0, self._num_places, self._width):
            spans = [(max(first, begin) - begin, min(end, begin + self._width) - begin) for first, end in self._spans
                     if first < begin + self._width and end > begin]
            if spans:
                piece = self._read(begin, spans, keys, values)
                for tile in range(self._num_tiles):
                    self._meet(tile, piece)
        # A row that has seen no key has a sum of 0 and values of 0.
        out = self._values / torch.where(self._sums == 0, 1, self._sums)
        out = out.view(self._num_tiles, self._heads, self._group, TILE, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(self._num_tiles * TILE, self._heads * self._group, -1)[self._shift:self._shift + self._tokens]

    def _read(self, begin: int, spans: list[Span], keys: PageReader, values: PageReader) -> _Piece:
        """The piece from place ``begin`` on, of which ``spans`` are seen. Only pages with such places are read."""
        unit = self._context.tokens_per_block
        width = min(self._width, self._reached - begin)
        blocks = torch.arange(begin // unit, (begin + width) // unit, device=self._token_of_place.device)
        stand_in = (begin + spans[0][0]) // unit   # where a page must not be read, or is not there, another one is, and then zeroed
        needed = torch.zeros(len(blocks), dtype=torch.bool, device=blocks.device)
        for first, end in spans:
            needed[first // unit:-(-end // unit)] = True
        entries = self._context.table[self._chunk.sequence][:, torch.where(needed, blocks, stand_in)]
        read = [next(reader.pieces(reader.locate(entries[field]))) for field, reader in enumerate((keys, values))]
        read = [data.clone() if reader.is_view else data for data, reader in zip(read, (keys, values), strict=True)]
        hidden_from = 0
        for first, end in [*spans, (width, width)]:
            for data in read:   # nobody has written these rows: they may hold NaN, and 0 * NaN is NaN
                data[:, hidden_from:first].zero_()
            hidden_from = end
        tokens = self._token_of_place[begin:begin + width]
        return _Piece(begin, read[0], read[1], tokens, int(tokens.min()), int(tokens.max()))

    def _meet(self, tile: int, piece: _Piece) -> None:
        """Let the rows of a tile see the keys of a piece."""
        visibility, context = self._context.visibility, self._context
        first = self._start + tile * TILE   # position of the tile's first row
        end = visibility.num_places(first + TILE, context.tokens_per_block) if self._is_cut_by_tile else self._num_places
        width = min(self._width, end - piece.begin)
        if width <= 0 or self._is_out_of_sight(first, piece):
            return
        scores = torch.bmm(self._rows[tile], piece.keys[:, :width].transpose(1, 2))
        if context.soft_cap is not None:
            scores.div_(context.soft_cap).tanh_().mul_(context.soft_cap)
        if not self._is_in_full_view(first, piece):
            hidden = ~self._seen(tile, piece.tokens[:width])
            scores.view(self._heads, self._group, TILE, width).masked_fill_(hidden, -math.inf)
        largest = torch.maximum(self._largest[tile], scores.amax(-1, keepdim=True))
        shift = torch.where(largest == -math.inf, 0, largest)   # of a row that has seen nothing yet
        faded = torch.exp(self._largest[tile] - shift)
        scores.sub_(shift).exp_()
        self._largest[tile] = largest
        self._sums[tile].mul_(faded).add_(scores.sum(-1, keepdim=True))
        self._values[tile].mul_(faded).baddbmm_(scores, piece.values[:, :width])

    def _is_out_of_sight(self, first: int, piece: _Piece) -> bool:
        """No row of the tile sees any key of the piece. (False where that is not plain.)"""
        visibility = self._context.visibility
        if self._drafts is not None or not visibility.is_causal or visibility.reach is None:
            return False
        holds_sinks = piece.begin < visibility.sinks
        return not holds_sinks and piece.newest <= max(first, self._chunk.past) - visibility.reach

    def _is_in_full_view(self, first: int, piece: _Piece) -> bool:
        """Every row of the tile sees every key of the piece."""
        visibility = self._context.visibility
        if piece.oldest < 0:
            return not visibility.is_causal   # cut at the last key
        if self._drafts is not None:
            return piece.newest < self._chunk.past and visibility.reach is None
        if not visibility.is_causal:
            return True
        return piece.newest <= first and (visibility.reach is None or piece.oldest > first + TILE - 1 - visibility.reach)

    def _seen(self, tile: int, keys: torch.Tensor) -> torch.Tensor:
        """bool ``[TILE, width]``: which of the keys the tile's rows see."""
        first, past, visibility = self._start + tile * TILE, self._chunk.past, self._context.visibility
        queries = torch.arange(first, first + TILE, device=keys.device)[:, None]
        if self._drafts is None:
            return visibility.sees(queries, keys)
        # Drafts lie side by side but are counted by their depth: what a draft sees of the others is the mask's business.
        assert self._drafts_depths is not None
        present = (queries >= past) & (queries < past + self._tokens)
        draft = (queries - past).clamp(0, self._tokens - 1)
        is_draft = keys >= past
        key = (keys - past).clamp(0, self._tokens - 1)
        query_positions = past + self._drafts_depths[draft]
        key_positions = torch.where(is_draft, past + self._drafts_depths[key], keys)
        return present & visibility.sees(query_positions, key_positions) & (~is_draft | self._drafts[draft, key])

"""Paged decode in torch operations: one query for each sequence (spec: read path).

Sequence by sequence, so that a result does not depend on the rest of the batch. The grouped query heads are the rows of one batched
product over KV heads. First the scores of all pieces of the context, then the weights, then the values: a piece is read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.page_reader import PageReader, tokens_per_piece
from kvtier.kernels.visibility import Span


def decode_torch(query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
    """The path in torch operations of :func:`kvtier.kernels.attention.attention_decode`. A CPU needs no plan."""
    sequences, query_heads, head_dim = query.shape
    heads, unit = context.heads, context.tokens_per_block if context.source_rows is None else 1
    dtype = context.compute_dtype(query)
    counts: list[int] = lengths.tolist()
    width = tokens_per_piece(context)
    most = max(context.visibility.num_places(length, context.tokens_per_block) for length in counts)
    buffered = min(width, max(unit, -(-most // unit) * unit))
    keys, values = (PageReader(context, is_value, dtype, unit, buffered) for is_value in (False, True))
    batch = _Batch(context, counts, keys, values)
    rows = query.reshape(sequences, heads, query_heads // heads, head_dim).to(dtype) * context.scale
    out = rows.new_zeros(sequences, heads, query_heads // heads, context.value_dim)
    for sequence, length in enumerate(counts):
        if length > 0:
            places = batch.places_of(sequence, length)
            _attend(rows[sequence], keys, values, places, width // unit, context.soft_cap, out[sequence])
    return out.view(sequences, query_heads, context.value_dim).to(query.dtype)


@dataclass(frozen=True)
class _Places:
    """Where one sequence's visible tokens lie.

    Attributes:
        keys, values: addresses of its units, one after the other.
        num_units: units.
        unit: tokens of one.
        hidden: runs of tokens in these units that the query does not see.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_units: int
    unit: int
    hidden: list[Span]


class _Batch:
    """Addresses for the sequences of a call, worked out for all of them at once where pages are read whole."""

    def __init__(self, context: PagedContext, counts: list[int], keys: PageReader, values: PageReader) -> None:
        self._context, self._readers = context, (keys, values)
        self._addresses: list[list[torch.Tensor]] = []
        if context.source_rows is None:
            unit = context.tokens_per_block
            most = -(-max(context.visibility.num_places(length, unit) for length in counts) // unit)
            self._addresses = [reader.addresses(context.table[:, field, :most]) for field, reader in enumerate((keys, values))]

    def places_of(self, sequence: int, length: int) -> _Places:
        """What the query behind ``length`` - 1 others sees."""
        context = self._context
        if context.source_rows is not None:
            return self._scattered(context.source_rows[sequence], sequence, length)
        unit = context.tokens_per_block
        first = length - 1
        runs, hidden = _whole_pages(context.visibility.place_spans(first, length, unit), unit)
        keys, values = ([_cut(numbers[sequence], runs) for numbers in field] for field in self._addresses)
        return _Places(keys, values, sum(end - begin for begin, end in runs), unit, hidden)

    def _scattered(self, source: torch.Tensor, sequence: int, length: int) -> _Places:
        """Token by token: neighbours may lie in the pages of different rows."""
        context, tokens_per_block = self._context, self._context.tokens_per_block
        tokens = torch.cat([torch.arange(*span) for span in context.visibility.token_spans(length - 1, length)]).to(source.device)
        places = context.visibility.places(tokens, tokens_per_block)
        owners = source[tokens].long()
        owners = torch.where(owners < 0, sequence, owners)
        entries = context.table[owners, :, places // tokens_per_block]
        keys, values = (reader.addresses(entries[:, field], places % tokens_per_block) for field, reader in enumerate(self._readers))
        return _Places(keys, values, len(tokens), 1, [])


def _whole_pages(spans: Sequence[Span], unit: int) -> tuple[list[Span], list[Span]]:
    """Runs of blocks that cover the places, and what in these blocks is none of them, counted from the first run's first place."""
    runs: list[Span] = []
    hidden: list[Span] = []
    shift = end_of_last = 0   # a place is at place + shift once only the runs' blocks are left
    for begin, end in spans:
        first, last = begin // unit, -(-end // unit)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], last)
        else:
            covered = runs[-1][1] * unit + shift if runs else 0
            runs.append((first, last))
            shift = covered - first * unit
        if begin + shift > end_of_last:
            hidden.append((end_of_last, begin + shift))
        end_of_last = end + shift
    covered = sum(end - begin for begin, end in runs) * unit
    if covered > end_of_last:
        hidden.append((end_of_last, covered))
    return runs, hidden


def _cut(numbers: torch.Tensor, runs: Sequence[Span]) -> torch.Tensor:
    parts = [numbers[:, begin:end] for begin, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(rows: torch.Tensor, keys: PageReader, values: PageReader, places: _Places, piece_units: int, soft_cap: float | None,
            out: torch.Tensor) -> None:
    """Scaled rows ``[heads, group, head_dim]`` of one sequence to ``out`` ``[heads, group, value_dim]``."""
    heads, group, _ = rows.shape
    pieces = [(first, min(first + piece_units, places.num_units)) for first in range(0, places.num_units, piece_units)]
    width = min(piece_units, places.num_units) * places.unit
    scores = rows.new_empty(len(pieces), heads, group, width)
    for number, (first, last) in enumerate(pieces):
        piece = keys.read([numbers[:, first:last] for numbers in places.keys]).transpose(1, 2)
        if piece.shape[2] == width:
            torch.bmm(rows, piece, out=scores[number])
        else:
            scores[number, ..., :piece.shape[2]] = torch.bmm(rows, piece)
            scores[number, ..., piece.shape[2]:] = -math.inf
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    for number, begin, end in _by_piece(places.hidden, width):
        scores[number, ..., begin:end] = -math.inf
    scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    for number, (first, last) in enumerate(pieces):
        piece = values.read([numbers[:, first:last] for numbers in places.values])
        for hidden_piece, begin, end in _by_piece(places.hidden, width):
            if hidden_piece == number:
                piece[:, begin:end].zero_()   # nobody has written these rows: they may hold NaN, and 0 * NaN is NaN
        weights = scores[number, ..., :piece.shape[1]]
        if number == 0:
            torch.bmm(weights, piece, out=out)
        else:
            out.baddbmm_(weights, piece)
    out.div_(scores.sum((0, 3)).unsqueeze(-1))


def _by_piece(hidden: Sequence[Span], width: int) -> list[tuple[int, int, int]]:
    """Hidden runs cut at the ends of pieces: (piece, begin, end) inside it."""
    found: list[tuple[int, int, int]] = []
    for begin, end in hidden:
        for number in range(begin // width, -(-end // width)):
            found.append((number, max(begin - number * width, 0), min(end - number * width, width)))
    return found

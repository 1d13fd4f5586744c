"""Paged decode in torch operations: one query for each sequence (spec: read path).

Sequence by sequence, so that a result does not depend on the rest of the batch. The grouped query heads are the rows of one batched
product over KV heads. First the scores of all pieces of the context, then the weights, then the values: a piece is read once.

Numbers of 16 bits would have to be widened for that, which takes longer than the products. Where queries and pages have them alike,
torch's own attention sees to one piece after the other, and the parts are joined by their log-sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.page_reader import PageReader, is_read_in_place, tokens_per_piece
from kvtier.kernels.storage import Storage
from kvtier.kernels.visibility import Span


def decode_torch(query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
    """The path in torch operations of :func:`kvtier.kernels.attention.attention_decode`. A CPU needs no plan."""
    sequences, query_heads, head_dim = query.shape
    heads, unit = context.heads, context.tokens_per_block
    is_half = _is_attended_in_half_precision(query, context)
    dtype = query.dtype if is_half else context.compute_dtype(query)
    counts: list[int] = lengths.tolist()
    width = unit if is_read_in_place(context, is_half) else tokens_per_piece(context, dtype)
    most = max(context.visibility.num_places(length, unit) for length in counts)
    readers = [PageReader(context, is_value, dtype, unit if context.source_rows is None else 1, width, most) for is_value in (False, True)]
    pages: list[list[torch.Tensor]] = []
    if context.source_rows is None:
        entries = context.table[:, :, :-(-most // unit)]
        pages = [reader.locate(entries[:, field]) for field, reader in enumerate(readers)]
    rows = query.reshape(sequences, heads, query_heads // heads, head_dim)
    if not is_half:
        rows = rows.to(dtype) * context.scale
    out = rows.new_zeros(sequences, heads, query_heads // heads, context.value_dim)
    for sequence, length in enumerate(counts):
        if length > 0:
            seen = _whole_pages(context, pages, sequence, length) if pages else _single_tokens(context, readers, sequence, length)
            if is_half:
                _attend_in_half_precision(rows[sequence], readers[0], readers[1], seen, width, context.scale, out[sequence])
            else:
                _attend(rows[sequence], readers[0], readers[1], seen, width, context.soft_cap, out[sequence])
    return out.view(sequences, query_heads, context.value_dim).to(query.dtype)


@dataclass(frozen=True)
class _Seen:
    """What one query sees, and where it lies.

    Attributes:
        keys, values: of its units one after the other, as the readers located them.
        tokens: up to the last one that it sees, counted from the first unit's first.
        hidden: runs among them that it does not see.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    tokens: int
    hidden: list[Span]

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """What it sees from token ``begin`` to ``end``."""
        end = min(end, self.tokens)
        for first, last in self.hidden:
            if begin < min(first, end):
                yield begin, min(first, end)
            begin = max(begin, last)
        if begin < end:
            yield begin, end


def _whole_pages(context: PagedContext, pages: Sequence[Sequence[torch.Tensor]], sequence: int, length: int) -> _Seen:
    """The pages of what the query behind ``length`` - 1 others sees."""
    unit = context.tokens_per_block
    runs: list[Span] = []
    hidden: list[Span] = []
    shift = tokens = 0   # a place is at place + shift once only the runs' pages are left
    for begin, end in context.visibility.place_spans(length - 1, length, unit):
        first, last = begin // unit, -(-end // unit)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], last)
        else:
            shift += (runs[-1][1] if runs else 0) * unit - first * unit
            runs.append((first, last))
        if begin + shift > tokens:
            hidden.append((tokens, begin + shift))
        tokens = end + shift
    keys, values = ([_cut(numbers[sequence], runs) for numbers in field] for field in pages)
    return _Seen(keys, values, tokens, hidden)


def _cut(numbers: torch.Tensor, runs: Sequence[Span]) -> torch.Tensor:
    parts = [numbers[..., first:last] for first, last in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _single_tokens(context: PagedContext, readers: Sequence[PageReader], sequence: int, length: int) -> _Seen:
    """The same token by token: neighbours may lie in the pages of different rows."""
    assert context.source_rows is not None
    source, unit = context.source_rows[sequence], context.tokens_per_block
    tokens = torch.cat([torch.arange(*span) for span in context.visibility.token_spans(length - 1, length)]).to(source.device)
    places = context.visibility.places(tokens, unit)
    owners = torch.where(source[tokens] < 0, sequence, source[tokens].long())
    entries = context.table[owners, :, places // unit]
    keys, values = (reader.locate(entries[:, field], places % unit) for field, reader in enumerate(readers))
    return _Seen(keys, values, len(tokens), [])


def _attend(rows: torch.Tensor, keys: PageReader, values: PageReader, seen: _Seen, width: int, soft_cap: float | None,
            out: torch.Tensor) -> None:
    """Scaled rows ``[heads, group, head_dim]`` of one sequence to ``out`` ``[heads, group, value_dim]``, pieces of ``width`` tokens."""
    tokens = seen.tokens
    if tokens <= width:   # most sequences of a small model: one piece, and one call less for everything
        piece = next(keys.pieces(seen.keys))[:, :tokens]   # what lies behind was never written
        scores = torch.bmm(rows, piece.transpose(1, 2))
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        for begin, end in seen.hidden:
            scores[..., begin:end] = -math.inf
        piece = _without(next(values.pieces(seen.values))[:, :tokens], seen.hidden, values)
        torch.bmm(torch.softmax(scores, dim=-1), piece, out=out)
        return
    scores = rows.new_empty(-(-tokens // width), *rows.shape[:2], width)
    of_piece = list(scores.unbind(0))
    for target, piece in zip(of_piece, keys.pieces(seen.keys), strict=True):
        torch.bmm(rows, piece.transpose(1, 2), out=target[..., :piece.shape[1]])
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    covered = len(of_piece) * width
    hidden_of_piece: dict[int, list[Span]] = {}
    for begin, end in [*seen.hidden, (tokens, covered)] if tokens < covered else seen.hidden:
        for number in range(begin // width, -(-end // width)):
            first, last = max(begin - number * width, 0), min(end - number * width, width)
            hidden_of_piece.setdefault(number, []).append((first, last))
            of_piece[number][..., first:last] = -math.inf
    scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    for number, piece in enumerate(values.pieces(seen.values)):
        piece = _without(piece, hidden_of_piece.get(number, ()), values)
        if number == 0:
            torch.bmm(of_piece[number], piece, out=out)
        else:
            out.baddbmm_(of_piece[number][..., :piece.shape[1]], piece)
    out.div_(scores.sum((0, 3)).unsqueeze(-1))


def _is_attended_in_half_precision(query: torch.Tensor, context: PagedContext) -> bool:
    """Whether torch's attention for CPUs takes query and pages as they are. It knows no cap, one width, and rows without gaps."""
    stored = context.stored
    return (stored.storage is Storage.SAME and query.dtype == stored.keys.dtype and query.dtype.itemsize == 2 and context.soft_cap is None
            and stored.key_dim == stored.value_dim and stored.keys.stride(3) == stored.values.stride(3) == 1)


def _attend_in_half_precision(rows: torch.Tensor, keys: PageReader, values: PageReader, seen: _Seen, width: int, scale: float,
                              out: torch.Tensor) -> None:
    """The same by torch's attention, which keeps sums in float32, and weights in 16 bits. What is hidden it does not get to see."""
    parts: list[torch.Tensor] = []
    log_sums: list[torch.Tensor] = []
    for number, (key, value) in enumerate(zip(keys.pieces(seen.keys), values.pieces(seen.values), strict=True)):
        first = number * width
        for begin, end in seen.spans(first, first + key.shape[1]):
            run = slice(begin - first, end - first)
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows[None], key[None, :, run], value[None, :, run],
                                                                                       scale=scale)
            parts.append(part[0])
            log_sums.append(log_sum[0])
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    weights = torch.softmax(torch.stack(log_sums), dim=0)
    out.copy_((torch.stack(parts) * weights.unsqueeze(-1)).sum(0))


def _without(piece: torch.Tensor, hidden: Sequence[Span], reader: PageReader) -> torch.Tensor:
    """A piece of values with zeros where nobody has written: there may be NaN, and 0 * NaN is NaN."""
    if hidden and reader.is_view:
        piece = piece.clone()
    for begin, end in hidden:
        piece[:, begin:end].zero_()
    return piece

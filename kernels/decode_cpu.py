"""Paged decode in torch operations: one query for each sequence (spec: read path).

Sequence by sequence, so that a result does not depend on the rest of the batch. The grouped query heads are the rows of one batched
product over KV heads. First the scores of all pieces of the context, then the weights, then the values: a piece is read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.page_reader import PageReader, is_read_in_place, tokens_per_piece
from kvtier.kernels.visibility import Span


def decode_torch(query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
    """The path in torch operations of :func:`kvtier.kernels.attention.attention_decode`. A CPU needs no plan."""
    sequences, query_heads, head_dim = query.shape
    heads, unit = context.heads, context.tokens_per_block
    dtype = context.compute_dtype(query)
    counts: list[int] = lengths.tolist()
    width = unit if is_read_in_place(context) else tokens_per_piece(context)
    most = max(context.visibility.num_places(length, unit) for length in counts)
    keys, values = (PageReader(context, is_value, dtype, unit if context.source_rows is None else 1, width, most)
                    for is_value in (False, True))
    rows = query.reshape(sequences, heads, query_heads // heads, head_dim).to(dtype) * context.scale
    out = rows.new_zeros(sequences, heads, query_heads // heads, context.value_dim)
    for sequence, length in enumerate(counts):
        if length > 0:
            locate = _whole_pages if context.source_rows is None else _single_tokens
            entries, inside, hidden = locate(context, sequence, length)
            _attend(rows[sequence], keys, values, entries, inside, hidden, width, context.soft_cap, out[sequence])
    return out.view(sequences, query_heads, context.value_dim).to(query.dtype)


_Located = tuple[torch.Tensor, torch.Tensor | None, list[Span]]
"""Table entries ``[2, units]`` of what a query sees, the tokens' places inside pages where units are tokens, and runs of tokens in these
units that it does not see, counted from the first unit's first token."""


def _whole_pages(context: PagedContext, sequence: int, length: int) -> _Located:
    """The pages of what the query behind ``length`` - 1 others sees."""
    unit = context.tokens_per_block
    runs: list[Span] = []
    hidden: list[Span] = []
    shift = end_of_last = 0   # a place is at place + shift once only the runs' pages are left
    for begin, end in context.visibility.place_spans(length - 1, length, unit):
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
    covered = runs[-1][1] * unit + shift
    if covered > end_of_last:
        hidden.append((end_of_last, covered))
    parts = [context.table[sequence, :, first:last] for first, last in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None, hidden


def _single_tokens(context: PagedContext, sequence: int, length: int) -> _Located:
    """The same token by token: neighbours may lie in the pages of different rows."""
    assert context.source_rows is not None
    source, unit = context.source_rows[sequence], context.tokens_per_block
    tokens = torch.cat([torch.arange(*span) for span in context.visibility.token_spans(length - 1, length)]).to(source.device)
    places = context.visibility.places(tokens, unit)
    owners = torch.where(source[tokens] < 0, sequence, source[tokens].long())
    return context.table[owners, :, places // unit].t(), places % unit, []


def _attend(rows: torch.Tensor, keys: PageReader, values: PageReader, entries: torch.Tensor, inside: torch.Tensor | None,
            hidden: Sequence[Span], width: int, soft_cap: float | None, out: torch.Tensor) -> None:
    """Scaled rows ``[heads, group, head_dim]`` of one sequence to ``out`` ``[heads, group, value_dim]``, pieces of ``width`` tokens."""
    tokens = entries.shape[1] * (1 if inside is not None else keys.unit)
    width = min(width, tokens)
    scores_of_all = rows.new_empty(-(-tokens // width), *rows.shape[:2], width)
    scores = list(scores_of_all.unbind(0))
    for target, piece in zip(scores, keys.pieces(entries[0], inside), strict=True):
        if piece.shape[1] == width:
            torch.bmm(rows, piece.transpose(1, 2), out=target)
        else:
            target[..., :piece.shape[1]] = torch.bmm(rows, piece.transpose(1, 2))
            target[..., piece.shape[1]:] = -math.inf
    if soft_cap is not None:
        scores_of_all.div_(soft_cap).tanh_().mul_(soft_cap)
    hidden_of_piece: dict[int, list[Span]] = {}
    for begin, end in hidden:
        for number in range(begin // width, -(-end // width)):
            span = (max(begin - number * width, 0), min(end - number * width, width))
            hidden_of_piece.setdefault(number, []).append(span)
            scores[number][..., span[0]:span[1]] = -math.inf
    scores_of_all.sub_(scores_of_all.amax((0, 3), keepdim=True)).exp_()
    for number, piece in enumerate(values.pieces(entries[1], inside)):
        if number in hidden_of_piece:
            piece = piece.clone() if values.is_view else piece
            for begin, end in hidden_of_piece[number]:
                piece[:, begin:end].zero_()   # nobody has written these rows: they may hold NaN, and 0 * NaN is NaN
        weights = scores[number] if piece.shape[1] == width else scores[number][..., :piece.shape[1]]
        if number == 0:
            torch.bmm(weights, piece, out=out)
        else:
            out.baddbmm_(weights, piece)
    out.div_(scores_of_all.sum((0, 3)).unsqueeze(-1))

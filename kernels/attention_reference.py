"""Paged attention in float64, to be read and compared with: token by token, head by head, every page looked up and checked on its own.

``dispatch.use_reference(True)`` lets it run in the place of the fast paths, to find out whether a wrong answer of an engine comes from
them or from what they were given.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention_context import ContextKeywords, PagedContext
from kvtier.kernels.attention_plan import DecodePlan, PrefillPlan
from kvtier.kernels.gather import number_of_page, read_token


def attention_reference(query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, *, layer: int,
                        draft_mask: torch.Tensor | None = None, **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """What :func:`kvtier.kernels.attention.attention_prefill` computes, float64 ``[tokens, query_heads, value_dim]``.

    Decode of a sequence with ``length`` keys is a chunk of one query with ``past = length - 1``.
    """
    context = PagedContext.of("attention_reference", query, pages, table_row[None], layer=layer, **how)
    return _attend_chunk(query, context, 0, past, draft_mask)


def decode_reference(query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
    """The reference of :func:`kvtier.kernels.attention.attention_decode`."""
    causal = context.visibility.is_causal
    rows = [_attend_chunk(query[sequence:sequence + 1], context, sequence, int(length) - 1 if causal else int(length), None)
            for sequence, length in enumerate(lengths.tolist())]
    return torch.cat(rows).to(query)


def prefill_reference(query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None) -> torch.Tensor:
    """The reference of :func:`kvtier.kernels.attention.attention_prefill_batch`."""
    out = query.new_zeros(query.shape[0], query.shape[1], context.value_dim)
    for chunk in plan.chunks:
        tokens = slice(chunk.begin, chunk.end)
        mask = None if draft_mask is None else draft_mask[tokens, :chunk.end - chunk.begin]
        out[tokens] = _attend_chunk(query[tokens], context, chunk.sequence, chunk.past, mask).to(query)
    return out


def _attend_chunk(query: torch.Tensor, context: PagedContext, sequence: int, past: int, draft_mask: torch.Tensor | None) -> torch.Tensor:
    tokens, query_heads, _ = query.shape
    group = query_heads // context.heads
    out = torch.zeros(tokens, query_heads, context.value_dim, dtype=torch.float64)
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}   # key and value [heads, dim] of each token that is seen
    for token in range(tokens):
        seen = _tokens_seen(context, past, token, tokens, draft_mask)
        for key in seen:
            if key not in rows:
                rows[key] = _row(context, sequence, key, past + tokens)
        if not seen:
            continue
        all_keys, all_values = (torch.stack([rows[key][field] for key in seen], dim=1) for field in (0, 1))
        for head in range(query_heads):
            keys, values = all_keys[head // group], all_values[head // group]
            scores = keys @ query[token, head].double().cpu() * context.scale
            if context.soft_cap is not None:
                scores = context.soft_cap * torch.tanh(scores / context.soft_cap)
            out[token, head] = torch.softmax(scores, dim=0) @ values
    return out


def _tokens_seen(context: PagedContext, past: int, token: int, tokens: int, draft_mask: torch.Tensor | None) -> list[int]:
    """The rule, in plain numbers: which tokens of its sequence query ``token`` of the chunk sees."""
    window, sinks = context.visibility.window, context.visibility.sinks
    if not context.visibility.is_causal:
        return list(range(past))
    if draft_mask is None:
        depths = list(range(tokens))
        candidates = list(range(past + token + 1))
    else:
        depths = [int(row.sum()) - 1 for row in draft_mask]
        candidates = [*range(past), *(past + other for other in range(tokens) if draft_mask[token, other])]
    position = past + depths[token]
    seen: list[int] = []
    for key in candidates:
        key_position = key if key < past else past + depths[key - past]
        if window is None or key_position < sinks or position - key_position < window - sinks:
            seen.append(key)
    return seen


def _row(context: PagedContext, sequence: int, token: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of one token, float64 ``[heads, dim]``.

    Raises:
        RequestError: it has no page.
    """
    visibility, unit = context.visibility, context.tokens_per_block
    place = int(visibility.places(torch.tensor([token]), unit))
    if visibility.ring is not None and visibility.sinks <= token < length - visibility.ring.ring:
        raise RequestError(f"{context.layer_pages.kernel}: token {token} of sequence {sequence} is no longer in the ring")
    row = sequence
    if context.source_rows is not None and int(context.source_rows[sequence, token]) >= 0:
        row = int(context.source_rows[sequence, token])
    block, inside = divmod(place, unit)
    found = []
    for field in (0, 1):
        page = number_of_page(context, row, field, block)
        if page is None:
            raise context.layer_pages.entry_error("table", row, field, block, -1)
        found.append(read_token(context, bool(field), page, inside))
    if any(math.isnan(float(numbers.sum())) for numbers in found):
        raise RequestError(f"{context.layer_pages.kernel}: token {token} of sequence {sequence}: NaN in its key or value (page entry "
                           f"{inside} of block {block}): it was never written, or the model computed it")
    return found[0], found[1]

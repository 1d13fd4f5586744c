"""Paged attention: queries against keys and values where they lie, found through a block table (spec: read path).

Prefill takes chunks of queries, causal against what was there before and the chunk itself, or with a mask for drafts that branch;
decode takes one query for each sequence of a batch. The operations are FlashInfer's ``BatchPrefillWithPagedKVCache`` and
``BatchDecodeWithPagedKVCache``, over TensorRT-LLM's offset tables.

A result must not depend on things that have nothing to do with it, or reuse would change a model's answers. In the torch paths a row
depends on its query, the keys it sees and its position, to the last bit (float32, same number of threads). It does not depend on the
chunk it came in, the other sequences of the batch, the width of the table or the slots of its blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention_checks import check_keys, check_lengths, check_source_rows
from kvtier.kernels.attention_context import ContextKeywords, PagedContext
from kvtier.kernels.attention_plan import DecodePlan, PrefillPlan, is_same_device
from kvtier.kernels.checks import INDEX_TYPES, check_dtype, check_same_device, check_shape, check_table, check_whole, checks_values
from kvtier.kernels.dispatch import kernel_paths


def attention_prefill(query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, *, layer: int,
                      draft_mask: torch.Tensor | None = None, **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """Attention of a chunk of one sequence, whose keys and values have been written before (``write_kv``).

    Query i is at position ``past + i`` and sees the keys at positions 0 to ``past + i``, as far as ``visibility`` allows.

    Args:
        query: ``[tokens, query_heads, head_dim]``; query_heads is a multiple of the pages' heads.
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides.
        table_row: int32 ``[2, max_blocks]``: this sequence's row of the block table; -1 is null.
        past: tokens of the sequence in the pool before this chunk; without causality (cross-attention) all the keys there are.
        layer: position of the layer in its group's blocks.
        draft_mask: bool ``[tokens, tokens]`` where the chunk's tokens branch: which of them a query sees, itself included. What is
            before the chunk all of them see. :func:`kvtier.kernels.draft_mask.mask_of_parents` makes one.
        how: ``num_layers``, ``kv_factor``, ``scale``, ``visibility``, ``soft_cap``, ``value_pages``, ``value_dim``, ``scale_pages``,
            ``value_scale_pages``, ``key_scale``, ``value_scale``: :meth:`~kvtier.kernels.attention_context.PagedContext.of`.
            ``check_values``: whether table entries are checked. None: yes on a CPU, no on a GPU, where it makes the host wait.
            Unchecked entries are trusted.

    Returns:
        ``[tokens, query_heads, value_dim]`` in the query's dtype, accumulated in float32 (float64 for float64). 0 for a query that
        sees no key.

    Raises:
        RequestError: a wrong shape, dtype or device, a negative ``past``, a chunk that ends beyond the table, or (with
            ``check_values``) a visible position without a page.
    """
    kernel = "attention_prefill"
    check_table(kernel, "table_row", table_row, with_sequences=False)
    past, = check_whole(kernel, past=past)
    context = PagedContext.of(kernel, query, pages, table_row[None], layer=layer, **how)
    length = past + query.shape[0] if context.visibility.is_causal else past
    if past < 0 or context.visibility.num_places(length, context.tokens_per_block) > context.capacity:
        raise RequestError(f"{kernel}: past={past} and {query.shape[0]} queries: the table's {table_row.shape[1]} blocks "
                           f"of {context.tokens_per_block} tokens allow positions 0 to {context.capacity - 1}; "
                           "allocate more blocks, or make a wider table")
    plan = PrefillPlan([0, query.shape[0]], [past], is_causal=context.visibility.is_causal, device=query.device)
    return _prefill(kernel, query, context, plan, draft_mask, how.get("check_values"))


def attention_prefill_batch(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, plan: PrefillPlan, *, layer: int,
                            draft_mask: torch.Tensor | None = None, **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """Attention of chunks of several sequences, behind one another in ``query``.

    Args:
        query: ``[tokens of all sequences, query_heads, head_dim]``.
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        plan: whose the queries are, made once for all layers of a step.
        draft_mask: bool ``[tokens of all sequences, tokens of the longest chunk]``: row i says which tokens of its own chunk query i
            sees, counted from the chunk's first.
        pages, layer, how: as for :func:`attention_prefill`.

    Returns:
        ``[tokens, query_heads, value_dim]``, as :func:`attention_prefill`.

    Raises:
        RequestError: as :func:`attention_prefill`; a plan for other queries or sequences.
    """
    kernel = "attention_prefill_batch"
    context = PagedContext.of(kernel, query, pages, table, layer=layer, **how)
    if (plan.num_queries, plan.num_sequences) != (query.shape[0], table.shape[0]):
        raise RequestError(f"{kernel}: the plan was made for {plan.num_queries} queries of {plan.num_sequences} sequences, this is "
                           f"{query.shape[0]} queries and a table of {table.shape[0]}; make a plan for every batch")
    if plan.is_causal != context.visibility.is_causal:
        raise RequestError(f"{kernel}: a plan with is_causal={plan.is_causal} and visibility.is_causal={context.visibility.is_causal}: "
                           "pass the same to both")
    if not is_same_device(plan.device, query.device):
        raise RequestError(f"{kernel}: the plan is on {plan.device}, the query on {query.device}")
    for chunk in plan.chunks:
        if context.visibility.num_places(chunk.length, context.tokens_per_block) > context.capacity:
            raise RequestError(f"{kernel}: past={chunk.past} and {chunk.end - chunk.begin} queries of sequence {chunk.sequence}: the "
                               f"table's {table.shape[2]} blocks of {context.tokens_per_block} tokens allow positions 0 to "
                               f"{context.capacity - 1}; allocate more blocks, or make a wider table")
    return _prefill(kernel, query, context, plan, draft_mask, how.get("check_values"))


def attention_decode(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *, layer: int,
                     source_rows: torch.Tensor | None = None, plan: DecodePlan | None = None,
                     **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """Attention of one query for each sequence, whose keys and values have been written before (``write_kv``).

    Args:
        query: ``[sequences, query_heads, head_dim]``; query_heads is a multiple of the pages' heads.
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides.
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        lengths: int32 or int64 ``[sequences]``: keys of the sequence, the new token included (cross-attention: all keys); a
            ``visibility`` with a window lets the query see the last of them. 0: a row of zeros.
        layer: position of the layer in its group's blocks.
        source_rows: int32 ``[sequences, max_tokens]``, for beams that share pages: the row of the table in whose pages each token
            lies, -1 for the sequence's own.
        plan: how sequences are split over a GPU; made once for all layers and steps. None: one for this call.
        how: as for :func:`attention_prefill`; ``check_values`` is about lengths and ``source_rows`` too.

    Returns:
        ``[sequences, query_heads, value_dim]`` in the query's dtype, accumulated in float32 (float64 for float64).

    Raises:
        RequestError: a wrong shape, dtype or device, a plan for other sizes, or (with ``check_values``) a length outside the table
            or a visible position without a page.
    """
    kernel = "attention_decode"
    context = PagedContext.of(kernel, query, pages, table, layer=layer, **how)
    sequences = table.shape[0]
    check_shape(kernel, "query", query, (sequences, None, None), "sequences, query_heads, head_dim")
    check_shape(kernel, "lengths", lengths, (sequences,), "sequences")
    check_dtype(kernel, "lengths", lengths, INDEX_TYPES)
    if source_rows is not None:
        check_shape(kernel, "source_rows", source_rows, (sequences, None), "sequences, max_tokens")
        check_dtype(kernel, "source_rows", source_rows, (torch.int32,))
        context = replace(context, source_rows=source_rows)
    check_same_device(kernel, pages, lengths=lengths, source_rows=source_rows)
    if plan is not None:
        plan.check(kernel, query, context)
    if not sequences:
        return query.new_empty(0, query.shape[1], context.value_dim)
    if checks_values(pages, how.get("check_values")):
        check_lengths(kernel, context, lengths)
        if source_rows is None:
            check_keys(context, (lengths - 1).clamp(min=0), lengths)
        else:
            check_source_rows(kernel, context, source_rows, lengths)
    return kernel_paths(pages.device.type).decode(query.detach(), context, lengths, plan)


def _prefill(kernel: str, query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None,
             check_values: bool | None) -> torch.Tensor:
    longest = max((chunk.end - chunk.begin for chunk in plan.chunks), default=0)
    if draft_mask is not None:
        if not plan.is_causal:
            raise RequestError(f"{kernel}: draft_mask without causality: cross-attention sees all keys; pass one of them")
        check_shape(kernel, "draft_mask", draft_mask, (query.shape[0], None), "tokens, tokens of the longest chunk")
        check_dtype(kernel, "draft_mask", draft_mask, (torch.bool,))
        check_same_device(kernel, query, draft_mask=draft_mask)
        if draft_mask.shape[1] < longest:
            raise RequestError(f"{kernel}: draft_mask has shape {tuple(draft_mask.shape)}: the longest chunk has {longest} tokens")
    ring = context.visibility.ring
    if ring is not None and context.visibility.reach is not None and longest > ring.ring - context.visibility.reach + 1:
        raise RequestError(f"{kernel}: a chunk of {longest} queries over a ring of {ring.ring} places and a window that reaches "
                           f"{context.visibility.reach}: its last tokens have overwritten what its first ones see (allowed: up to "
                           f"{ring.ring - context.visibility.reach + 1}); use smaller chunks")
    if not plan.chunks:
        return query.new_zeros(query.shape[0], query.shape[1], context.value_dim)
    if checks_values(context.stored.keys, check_values):
        bounds = torch.zeros(2, plan.num_sequences, dtype=torch.int64)
        for chunk in plan.chunks:
            bounds[:, chunk.sequence] = torch.tensor([chunk.past, chunk.length])
        first, lengths = bounds.to(query.device)
        check_keys(context, first, lengths)
    return kernel_paths(query.device.type).prefill(query.detach(), context, plan, draft_mask)

"""Paged attention for GPUs, in Triton: one kernel for prefill and for the parts of split decode, and one that joins parts.

A program has a tile of rows, which are queries of one sequence times the query heads of one KV head, so any ratio of heads fills it.
It goes over the tokens that its queries see, block by block, with the online softmax of FlashAttention (Dao et al., 2022); in decode
it has one part of them, and the parts are joined by their log-sum-exp (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvtier.kernels.triton_pages import capped, num_left_out, pages_of, place_of, read_rows
from kvtier.kernels.triton_rows import jit


def _attention_kernel(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, key_scales: torch.Tensor, value_scales: torch.Tensor,
    table: torch.Tensor, source_rows: torch.Tensor, tiles: torch.Tensor, sequences: torch.Tensor, draft_mask: torch.Tensor,
    draft_depths: torch.Tensor, out: tl.tensor, log_sums: torch.Tensor,
    score_scale: float, value_scale: float, soft_cap: float, num_pages: int, max_blocks: int, layer_offset: int, split_tokens: int,
    query_token_stride: int, query_head_stride: int, out_token_stride: int, out_part_stride: int, out_head_stride: int,
    key_page_stride: int, key_head_stride: int, key_token_stride: int, key_dim_stride: int,
    value_page_stride: int, value_head_stride: int, value_token_stride: int, value_dim_stride: int,
    key_scale_page_stride: int, key_scale_head_stride: int, key_scale_token_stride: int, key_scale_dim_stride: int,
    value_scale_page_stride: int, value_scale_head_stride: int, value_scale_token_stride: int, value_scale_dim_stride: int,
    table_sequence_stride: int, table_field_stride: int, table_block_stride: int, source_stride: int, draft_stride: int,
    DECODE: tl.constexpr, CAUSAL: tl.constexpr, DRAFTS: tl.constexpr, HAS_SOURCE: tl.constexpr, SHARED_ROW: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_PART: tl.constexpr, STORAGE: tl.constexpr, NATIVE: tl.constexpr,
    SINKS: tl.constexpr, REACH: tl.constexpr, BUBBLE: tl.constexpr, RING: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_REST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Grid: (tiles, KV heads, parts). ``*_REST`` is the width of what is left of a head behind its largest power of two, 0 for nothing."""
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    if DECODE:   # ``sequences`` are lengths, a sequence has one query
        tiles_of_one: tl.constexpr = (GROUP + BLOCK_ROWS - 1) // BLOCK_ROWS
        sequence = (tl.program_id(0) // tiles_of_one).to(tl.int64)
        first_row = tl.program_id(0) % tiles_of_one * BLOCK_ROWS
        begin = sequence
        num_queries = 1
        length = tl.load(sequences + sequence).to(tl.int32)
        past = length - 1
    else:
        sequence = tl.load(tiles + tl.program_id(0) * 2).to(tl.int64)
        first_row = tl.load(tiles + tl.program_id(0) * 2 + 1)
        begin = tl.load(sequences + sequence * 4).to(tl.int64)
        num_queries = (tl.load(sequences + sequence * 4 + 1) - begin).to(tl.int32)
        past = tl.load(sequences + sequence * 4 + 2)
        length = tl.load(sequences + sequence * 4 + 3)

    row = first_row + tl.arange(0, BLOCK_ROWS)
    number = row // GROUP   # of the query in its chunk
    is_row = number < num_queries
    position = past + number
    lowest = past + first_row // GROUP
    if DRAFTS:
        position = past + tl.load(draft_depths + begin + number, mask=is_row, other=0)
        lowest = past
    end = length
    if CAUSAL and not DECODE and not DRAFTS:
        end = tl.minimum(length, past + tl.minimum((first_row + BLOCK_ROWS - 1) // GROUP + 1, num_queries))
    # Tokens are counted without those that the tile does not see: sinks first, then from its first window on.
    left_out = num_left_out(lowest, SINKS, REACH, BLOCK_TOKENS)
    count = end - left_out
    start = part * split_tokens
    # The last part has all that is left: a ring's blocks may count a few tokens more than the table has places.
    stop = tl.where(part == tl.num_programs(2) - 1, count, tl.minimum(count, start + split_tokens))
    if DECODE & (part > 0) & (start >= count):
        return   # nobody reads this part

    head = kv_head * GROUP + row % GROUP
    token_of_row = begin + number
    query_row = query + token_of_row * query_token_stride + head * query_head_stride
    dim = tl.arange(0, KEY_WIDTH)
    rows = tl.load(query_row[:, None] + dim[None, :], mask=is_row[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
    if KEY_REST > 0:
        rest = KEY_WIDTH + tl.arange(0, KEY_REST)
        rows_rest = tl.load(query_row[:, None] + rest[None, :], mask=is_row[:, None] & (rest < KEY_DIM)[None, :], other=0.0)

    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    values = tl.zeros([BLOCK_ROWS, VALUE_WIDTH], tl.float32)
    if VALUE_REST > 0:
        values_rest = tl.zeros([BLOCK_ROWS, VALUE_REST], tl.float32)
    for block_start in range(start, stop, BLOCK_TOKENS):
        index = block_start + tl.arange(0, BLOCK_TOKENS)
        token = tl.where(index < SINKS, index, index + left_out).to(tl.int64)
        wanted = index < stop
        if REACH > 0:
            wanted = wanted & ((token < SINKS) | (token > lowest - REACH))
        place = place_of(token, SINKS, BUBBLE, RING)
        inside = place % TOKENS_PER_BLOCK
        key_page = pages_of(table, source_rows, sequence, token, place, wanted, 0, num_pages, max_blocks, layer_offset,
                            table_sequence_stride, table_field_stride, table_block_stride, source_stride, TOKENS_PER_BLOCK, HAS_SOURCE)
        value_page = key_page
        if not SHARED_ROW:
            value_page = pages_of(table, source_rows, sequence, token, place, wanted, 1, num_pages, max_blocks, layer_offset,
                                  table_sequence_stride, table_field_stride, table_block_stride, source_stride, TOKENS_PER_BLOCK,
                                  HAS_SOURCE)
        keys = read_rows(key_pages, key_scales, key_page, kv_head, inside, key_page_stride, key_head_stride, key_token_stride,
                         key_dim_stride, key_scale_page_stride, key_scale_head_stride, key_scale_token_stride, key_scale_dim_stride,
                         0, KEY_WIDTH, KEY_DIM, STORAGE, NATIVE).to(rows.dtype)
        scores = tl.dot(rows, tl.trans(keys), input_precision="ieee")
        if KEY_REST > 0:
            keys_rest = read_rows(key_pages, key_scales, key_page, kv_head, inside, key_page_stride, key_head_stride, key_token_stride,
                                  key_dim_stride, key_scale_page_stride, key_scale_head_stride, key_scale_token_stride,
                                  key_scale_dim_stride, KEY_WIDTH, KEY_REST, KEY_DIM, STORAGE, NATIVE).to(rows.dtype)
            scores += tl.dot(rows_rest, tl.trans(keys_rest), input_precision="ieee")
        scores = scores * score_scale
        if HAS_CAP:
            scores = capped(scores, soft_cap)
        scores = scores * 1.4426950408889634   # from here on powers of 2
        seen = (wanted & (key_page >= 0) & (value_page >= 0))[None, :] & is_row[:, None]
        if CAUSAL and not DECODE:
            key_position = token
            if DRAFTS:
                is_draft = wanted & (token >= past)
                depth = tl.load(draft_depths + begin + token - past, mask=is_draft, other=0)
                key_position = tl.where(is_draft, past + depth, token)
                path = draft_mask + token_of_row[:, None] * draft_stride + (token - past)[None, :]
                on_path = tl.load(path, mask=is_row[:, None] & is_draft[None, :], other=1)
                seen = seen & (on_path != 0)
            seen = seen & (key_position[None, :] <= position[:, None])
            if REACH > 0:
                seen = seen & ((key_position < SINKS)[None, :] | (key_position[None, :] > position[:, None] - REACH))
        scores = tl.where(seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)   # of a row that has seen nothing yet
        faded = tl.exp2(largest - shift)
        weights = tl.exp2(scores - shift[:, None])
        sums = sums * faded + tl.sum(weights, 1)
        largest = new_largest
        if SHARED_ROW:
            row_values = keys
        else:
            row_values = read_rows(value_pages, value_scales, value_page, kv_head, inside, value_page_stride, value_head_stride,
                                   value_token_stride, value_dim_stride, value_scale_page_stride, value_scale_head_stride,
                                   value_scale_token_stride, value_scale_dim_stride, 0, VALUE_WIDTH, VALUE_DIM, STORAGE,
                                   NATIVE).to(rows.dtype)
        weights = weights.to(rows.dtype)
        values = values * faded[:, None] + tl.dot(weights, row_values, input_precision="ieee")
        if VALUE_REST > 0:
            rest_values = read_rows(value_pages, value_scales, value_page, kv_head, inside, value_page_stride, value_head_stride,
                                    value_token_stride, value_dim_stride, value_scale_page_stride, value_scale_head_stride,
                                    value_scale_token_stride, value_scale_dim_stride, VALUE_WIDTH, VALUE_REST, VALUE_DIM, STORAGE,
                                    NATIVE).to(rows.dtype)
            values_rest = values_rest * faded[:, None] + tl.dot(weights, rest_values, input_precision="ieee")

    share = value_scale / tl.where(sums == 0, 1.0, sums)   # a row that has seen no key has values of 0
    out_row = out + token_of_row * out_token_stride + part.to(tl.int64) * out_part_stride + head * out_head_stride
    dim = tl.arange(0, VALUE_WIDTH)
    tl.store(out_row[:, None] + dim[None, :], (values * share[:, None]).to(out.dtype.element_ty),
             mask=is_row[:, None] & (dim < VALUE_DIM)[None, :])
    if VALUE_REST > 0:
        rest = VALUE_WIDTH + tl.arange(0, VALUE_REST)
        tl.store(out_row[:, None] + rest[None, :], (values_rest * share[:, None]).to(out.dtype.element_ty),
                 mask=is_row[:, None] & (rest < VALUE_DIM)[None, :])
    if IS_PART:
        log_sum = tl.where(sums == 0, float("-inf"), largest + tl.log2(tl.where(sums == 0, 1.0, sums)))
        # Parts lie without gaps, [queries, parts, query heads, VALUE_DIM], and so do their sums.
        place_of_sum = (token_of_row * out_token_stride + part.to(tl.int64) * out_part_stride + head * out_head_stride) // VALUE_DIM
        tl.store(log_sums + place_of_sum, log_sum, mask=is_row)


def _join_kernel(
    parts: torch.Tensor, log_sums: torch.Tensor, lengths: torch.Tensor, out: tl.tensor, split_tokens: int, num_splits: int,
    out_token_stride: int, out_head_stride: int,
    SINKS: tl.constexpr, REACH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERY_HEADS: tl.constexpr, DECODE: tl.constexpr,
) -> None:
    """One row from its parts. Grid: (queries, query heads). The torch twin is :func:`kvtier.kernels.split_kv.join_parts`."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    used = num_splits
    if DECODE:   # parts behind a sequence's end have not been written
        length = tl.load(lengths + sequence).to(tl.int32)
        count = length - num_left_out(length - 1, SINKS, REACH, BLOCK_TOKENS)
        used = tl.maximum(tl.minimum((count + split_tokens - 1) // split_tokens, num_splits), 1)
    dim = tl.arange(0, WIDTH)
    largest = tl.full([1], float("-inf"), tl.float32)
    sums = tl.zeros([1], tl.float32)
    values = tl.zeros([WIDTH], tl.float32)
    for part in range(used):
        row = (sequence * num_splits + part) * QUERY_HEADS + head
        log_sum = tl.load(log_sums + row + tl.arange(0, 1))
        new_largest = tl.maximum(largest, log_sum)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        faded, weight = tl.exp2(largest - shift), tl.exp2(log_sum - shift)
        sums = sums * faded + weight
        values = values * faded + tl.load(parts + row * VALUE_DIM + dim, mask=dim < VALUE_DIM, other=0.0) * weight
        largest = new_largest
    values = values / tl.where(sums == 0, 1.0, sums)
    tl.store(out + sequence * out_token_stride + head * out_head_stride + dim, values.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


# Applied as functions: as decorators they would take the kernels' types away from the type checker.
attention_kernel = jit(_attention_kernel)
join_kernel = jit(_join_kernel)

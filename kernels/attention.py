"""Paged attention: queries against keys and values where they lie, found through a block table (spec: read path).

Prefill takes a chunk of one sequence's queries, causal against what was there before and the chunk itself; decode takes
one query for each sequence of a batch. Grouped query heads (GQA, MQA) become rows of one product per KV head.

A result must not depend on things that have nothing to do with it, or reuse would change a model's answers. In the
torch paths a row depends on its query, the keys it sees and its position, to the last bit (float32, same number of
threads). It does not depend on the chunk it came in, the other sequences of the batch, the width of the table or the
slots of its blocks:

* prefill cuts the sequence into tiles at absolute multiples of ``TILE``. A row is always the same row of a product of
  the same shape, wherever its chunk began or ended; places of absent rows and keys are filled with zeros.
* decode computes each sequence by itself.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import (
    FLOAT_TYPES,
    INDEX_TYPES,
    LayerPages,
    check_dtype,
    check_same_device,
    check_shape,
    check_table,
    checks_values,
)
from kvtier.kernels.dispatch import kernel_paths

TILE: Final = 32
"""Queries per tile. A small tile wastes little on a chunk of few tokens; larger ones were not faster on two cores."""


def attention_prefill(query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, *, layer: int,
                      num_layers: int | None = None, kv_factor: int = 2, scale: float | None = None,
                      check_values: bool | None = None) -> torch.Tensor:
    """Attention of a chunk of one sequence, whose keys and values have been written before (``write_kv``).

    Query i is at position ``past + i`` and sees the keys at positions 0 to ``past + i``.

    Args:
        query: ``[tokens, query_heads, head_dim]``; query_heads is a multiple of the pages' heads.
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides.
        table_row: int32 ``[2, max_blocks]``: this sequence's row of the block table; -1 is null.
        past: tokens of the sequence in the pool before this chunk.
        layer: position of the layer in its group's blocks.
        num_layers: layers in a block; when given, the layer and the table are checked against it.
        kv_factor: 2, or 1 where one row serves as key and value (both rows of the table are equal then).
        scale: factor on the scores; None: 1 / sqrt(head_dim).
        check_values: whether table entries are checked. None: yes on a CPU, no on a GPU, where it makes the host wait.
            Unchecked entries are trusted.

    Returns:
        ``[tokens, query_heads, head_dim]`` in the query's dtype, accumulated in float32 (float64 for float64).

    Raises:
        RequestError: a wrong shape, dtype or device, a negative ``past``, a chunk that ends beyond the table, or (with
            ``check_values``) a visible position without a page.
    """
    kernel = "attention_prefill"
    layer_pages = LayerPages.of(kernel, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    check_table(kernel, "table_row", table_row, with_sequences=False)
    _check_heads(kernel, query, pages)
    check_same_device(kernel, pages, query=query, table_row=table_row)
    capacity, length = table_row.shape[1] * layer_pages.tokens_per_block, past + query.shape[0]
    if past < 0 or length > capacity:
        raise RequestError(f"{kernel}: past={past} and {query.shape[0]} queries: the table's {table_row.shape[1]} blocks "
                           f"of {layer_pages.tokens_per_block} tokens allow positions 0 to {capacity - 1}; "
                           "allocate more blocks, or make a wider table")
    if not query.shape[0]:
        return torch.empty_like(query)
    if checks_values(pages, check_values):
        layer_pages.check_visible("table", table_row[None], torch.tensor([length], device=pages.device))
    prefill = kernel_paths(pages.device.type).prefill
    return prefill(query.detach(), pages, table_row, past, layer_pages.offset, _scale(scale, query))


def attention_decode(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *,
                     layer: int, num_layers: int | None = None, kv_factor: int = 2, scale: float | None = None,
                     check_values: bool | None = None) -> torch.Tensor:
    """Attention of one query for each sequence, whose keys and values have been written before (``write_kv``).

    Args:
        query: ``[sequences, query_heads, head_dim]``; query_heads is a multiple of the pages' heads.
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides.
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        lengths: int32 or int64 ``[sequences]``: keys that the query sees, the new token included. 0: a row of zeros.
        layer, num_layers, kv_factor, scale: as for :func:`attention_prefill`.
        check_values: whether lengths and table entries are checked, as for :func:`attention_prefill`.

    Returns:
        ``[sequences, query_heads, head_dim]`` in the query's dtype, accumulated in float32 (float64 for float64).

    Raises:
        RequestError: a wrong shape, dtype or device, or (with ``check_values``) a length outside the table or a visible
            position without a page.
    """
    kernel = "attention_decode"
    layer_pages = LayerPages.of(kernel, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    check_table(kernel, "table", table, with_sequences=True)
    _check_heads(kernel, query, pages)
    sequences, _, max_blocks = table.shape
    check_shape(kernel, "query", query, (sequences, None, None), "sequences, query_heads, head_dim")
    check_shape(kernel, "lengths", lengths, (sequences,), "sequences")
    check_dtype(kernel, "lengths", lengths, INDEX_TYPES)
    check_same_device(kernel, pages, query=query, table=table, lengths=lengths)
    if not sequences:
        return torch.empty_like(query)
    if checks_values(pages, check_values):
        capacity = max_blocks * layer_pages.tokens_per_block
        wrong = (lengths < 0) | (lengths > capacity)
        if bool(wrong.any()):
            sequence = int(wrong.nonzero()[0])
            raise RequestError(f"{kernel}: lengths[{sequence}]={int(lengths[sequence])} (sequence {sequence}): the table's "
                               f"{max_blocks} blocks of {layer_pages.tokens_per_block} tokens allow 0 to {capacity}; "
                               "allocate more blocks, or make a wider table")
        layer_pages.check_visible("table", table, lengths)
    decode = kernel_paths(pages.device.type).decode
    return decode(query.detach(), pages, table, lengths, layer_pages.offset, _scale(scale, query))


def _check_heads(kernel: str, query: torch.Tensor, pages: torch.Tensor) -> None:
    heads, head_dim = pages.shape[1], pages.shape[3]
    check_shape(kernel, "query", query, (None, None, head_dim), "tokens, query_heads, head_dim")
    check_dtype(kernel, "query", query, FLOAT_TYPES)
    check_dtype(kernel, "pages", pages, FLOAT_TYPES)
    if not query.shape[1] or query.shape[1] % heads:
        raise RequestError(f"{kernel}: query has {query.shape[1]} heads: pass a multiple of the pool's {heads} KV heads")


def _scale(scale: float | None, query: torch.Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[2]) if scale is None else scale


def _compute_dtype(query: torch.Tensor, pages: torch.Tensor) -> torch.dtype:
    """At least float32: half precision is for storage, sums are not kept in it."""
    return torch.promote_types(torch.promote_types(query.dtype, pages.dtype), torch.float32)


class _HeadTiles:
    """The pool seen as one list of ``[tokens_per_block, head_dim]`` tiles, one for each (page, head).

    Whatever the strides, every tile starts at a multiple of ``gcd(page stride, head stride)``. A strided view with that
    step holds them all (and meaningless ones in between, which nobody asks for), so one ``index_select`` fetches a
    sequence's keys with each head's tokens in a row: no second copy to bring heads in front, no loop over pages.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        num_pages, heads, tokens_per_block, head_dim = pages.shape
        page_stride, head_stride, token_stride, dim_stride = pages.stride()
        step = math.gcd(page_stride, head_stride) or 1
        count = ((num_pages - 1) * page_stride + (heads - 1) * head_stride) // step + 1
        self._tiles = pages.as_strided((count, tokens_per_block, head_dim), (step, token_stride, dim_stride))
        self._page_step = page_stride // step
        self._heads = torch.arange(heads, device=pages.device)[:, None] * (head_stride // step)

    def numbers(self, entries: torch.Tensor, layer_offset: int) -> torch.Tensor:
        """Tile numbers ``[..., heads, blocks]`` of table entries ``[..., blocks]``; int64: pages times heads are many."""
        return (entries.long() + layer_offset)[..., None, :] * self._page_step + self._heads

    def fetch(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Copy tiles ``[..., heads, blocks]`` to ``out`` ``[..., heads, blocks * tokens_per_block, head_dim]``."""
        torch.index_select(self._tiles, 0, numbers.reshape(-1), out=out.view(-1, *self._tiles.shape[1:]))


def prefill_torch(query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, layer_offset: int,
                  scale: float) -> torch.Tensor:
    """The path in torch operations: fetch the sequence's pages of this layer once, then go tile by tile, head by head."""
    tokens, query_heads, head_dim = query.shape
    _, heads, tokens_per_block, _ = pages.shape
    group, length, dtype = query_heads // heads, past + tokens, _compute_dtype(query, pages)
    first, end = past // TILE * TILE, -(-length // TILE) * TILE
    num_tiles = (end - first) // TILE

    used, wanted = -(-length // tokens_per_block), -(-end // tokens_per_block)
    entries = table_row[:, :used]
    if wanted > used:   # pages smaller than a tile: a page of this sequence stands in for each missing one, zeroed below
        entries = torch.cat([entries, entries[:, :1].expand(2, wanted - used)], dim=1)
    tiles = _HeadTiles(pages)
    context = pages.new_empty(2, heads, wanted * tokens_per_block, head_dim)
    tiles.fetch(tiles.numbers(entries, layer_offset), context)
    # Nobody has written these rows: they may hold NaN, and 0 * NaN is NaN.
    context[:, :, length:].zero_()
    keys, values = context.to(dtype)

    rows = torch.zeros(end - first, heads, group, head_dim, dtype=dtype, device=query.device)
    rows[past - first:length - first] = query.reshape(tokens, heads, group, head_dim).to(dtype) * scale
    grouped = rows.view(num_tiles, TILE, heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_tiles, heads, group * TILE, head_dim)
    out = torch.empty_like(grouped)
    hidden = torch.full((TILE, TILE), -math.inf, dtype=dtype, device=query.device).triu(1)
    for tile in range(num_tiles):
        begin = first + tile * TILE
        visible = begin + TILE
        for head in range(heads):
            # One product per head: its scores stay in the cache, and it is split evenly over threads.
            scores = torch.mm(grouped[tile, head], keys[head, :visible].t())
            scores.view(group, TILE, visible)[:, :, begin:] += hidden
            torch.mm(torch.softmax(scores, dim=-1), values[head, :visible], out=out[tile, head])
    ordered = out.view(num_tiles, heads, group, TILE, head_dim).permute(0, 3, 1, 2, 4)
    ordered = ordered.reshape(end - first, query_heads, head_dim)
    return ordered[past - first:length - first].to(query.dtype)


def decode_torch(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
                 layer_offset: int, scale: float) -> torch.Tensor:
    """The path in torch operations: sequence by sequence, one batched product, grouped query heads as its rows."""
    sequences, query_heads, head_dim = query.shape
    _, heads, tokens_per_block, _ = pages.shape
    dtype = _compute_dtype(query, pages)
    counts: list[int] = lengths.tolist()
    tiles = _HeadTiles(pages)
    most = -(-max(counts) // tokens_per_block)
    numbers = tiles.numbers(table[:, :, :most], layer_offset)
    # One buffer for every sequence, for its keys and then for its values: it stays in the cache.
    buffer = pages.new_empty(heads * most * tokens_per_block * head_dim)
    rows = query.reshape(sequences, heads, query_heads // heads, head_dim).to(dtype) * scale
    out = torch.zeros_like(rows)
    for sequence, length in enumerate(counts):
        if length <= 0:
            continue
        blocks = -(-length // tokens_per_block)
        context = buffer[:heads * blocks * tokens_per_block * head_dim].view(heads, blocks * tokens_per_block, head_dim)
        seen = context[:, :length]   # what lies behind was never written
        tiles.fetch(numbers[sequence, 0, :, :blocks], context)
        weights = torch.softmax(torch.bmm(rows[sequence], seen.to(dtype).transpose(1, 2)), dim=-1)
        tiles.fetch(numbers[sequence, 1, :, :blocks], context)
        torch.bmm(weights, seen.to(dtype), out=out[sequence])
    return out.view(sequences, query_heads, head_dim).to(query.dtype)


def attention_reference(query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, *, layer: int,
                        kv_factor: int = 2, scale: float | None = None) -> torch.Tensor:
    """The same in float64, query by query and head by head, to be read and compared with.

    Returns float64 ``[tokens, query_heads, head_dim]``. Decode of a sequence with ``length`` keys is a chunk of one
    query with ``past = length - 1``.
    """
    tokens, query_heads, head_dim = query.shape
    _, heads, tokens_per_block, _ = pages.shape
    out = torch.zeros(tokens, query_heads, head_dim, dtype=torch.float64)

    def row(field: int, kv_head: int, position: int) -> torch.Tensor:
        page = int(table_row[field, position // tokens_per_block]) + layer * kv_factor
        return pages[page, kv_head, position % tokens_per_block].double()

    for token in range(tokens):
        visible = past + token + 1
        for head in range(query_heads if visible else 0):
            kv_head = head // (query_heads // heads)
            keys = torch.stack([row(0, kv_head, position) for position in range(visible)])
            values = torch.stack([row(1, kv_head, position) for position in range(visible)])
            weights = torch.softmax(keys @ query[token, head].double() * _scale(scale, query), dim=0)
            out[token, head] = weights @ values
    return out

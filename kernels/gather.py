"""Gather: a sequence's keys or values out of its pages, for debugging and for comparing with what is computed again (spec: gather).

Attention never gathers: it reads pages in place.
"""

from __future__ import annotations

from typing import Unpack

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention_context import ContextKeywords, PagedContext
from kvtier.kernels.checks import NULL_ENTRY, check_plain, check_same_device, check_table, check_whole
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch
from kvtier.kernels.quantise import from_storage
from kvtier.kernels.storage import Storage


def gather_tokens(pages: torch.Tensor, table_row: torch.Tensor, num_tokens: int, *, layer: int, is_value: bool = False,
                  **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """Keys or values of the first tokens of one sequence.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides.
        table_row: int32 ``[2, max_blocks]``; -1 is null.
        num_tokens: 0 or more.
        layer: position of the layer in its group's blocks.
        is_value: values; else keys.
        how: as for :func:`kvtier.kernels.attention.attention_prefill`, as far as it says how tokens are stored and where.

    Returns:
        ``[num_tokens, heads, dim]``, in the pages' dtype, or float32 where numbers are stored in 8 or 4 bits. A view, no copy, where
        all tokens lie in one page that holds numbers as they are. Zeros for tokens without a page, or that left their ring.

    Raises:
        RequestError: a wrong shape, dtype or device, more tokens than the table holds, an entry outside the pool, which is always
            looked for: on a GPU the host waits.
    """
    kernel = "gather_tokens"
    check_table(kernel, "table_row", table_row, with_sequences=False)
    num_tokens, = check_whole(kernel, num_tokens=num_tokens)
    check_plain(kernel, "pages", pages)
    check_same_device(kernel, pages, table_row=table_row)
    context = PagedContext.of(kernel, None, pages, table_row[None], layer=layer, **how)
    visibility, unit = context.visibility, context.tokens_per_block
    if num_tokens < 0 or visibility.num_places(num_tokens, unit) > context.capacity:
        raise RequestError(f"{kernel}: num_tokens={num_tokens}: the table's {table_row.shape[1]} blocks of {unit} tokens hold 0 to "
                           f"{context.capacity}")
    field, stored = int(is_value), context.stored
    entries = table_row[field, :-(-visibility.num_places(num_tokens, unit) // unit)]
    bad = context.layer_pages.is_bad(table_row[:, :len(entries)], field_axis=0)[field] & (entries != NULL_ENTRY)
    if bool(bad.any()):
        block = int(bad.nonzero()[0])
        raise context.layer_pages.entry_error("table", 0, field, block, int(entries[block]))
    if 0 < num_tokens <= unit and stored.storage is Storage.SAME and visibility.ring is None and not visibility.sinks:
        page = number_of_page(context, 0, field, 0)
        if page is not None:
            return (stored.values if is_value else stored.keys)[page, :, :num_tokens].transpose(0, 1)
    tokens = torch.arange(num_tokens, device=pages.device)
    places = visibility.places(tokens, unit)
    entry = entries[places // unit].long()
    is_there = entry != NULL_ENTRY
    if visibility.ring is not None:
        is_there &= visibility.ring.is_kept(tokens, torch.full_like(tokens, num_tokens))
    return _gather(context, is_value, torch.where(is_there, entry + context.layer_pages.offset, -1), places % unit)


def _gather(context: PagedContext, is_value: bool, page_of_token: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """What is stored for single tokens as the numbers that it stands for. A token of a negative page is 0."""
    stored, paths = context.stored, kernel_paths(page_of_token.device.type)

    def rows_of(pages: torch.Tensor) -> torch.Tensor:
        if not len(page_of_token):
            return pages.new_empty(0, pages.shape[1], pages.shape[3])
        return paths.gather(pages, page_of_token, inside)

    data = stored.values if is_value else stored.keys
    scale = stored.value_scale if is_value else stored.key_scale
    if stored.storage is Storage.NVFP4:
        block_scales = stored.value_block_scales if is_value else stored.key_block_scales
        assert block_scales is not None
        return paths.dequantise_nvfp4(rows_of(data), rows_of(block_scales), scale, torch.float32)
    if stored.storage is Storage.FP8:   # as bytes: copying is no arithmetic, and not every operation knows it
        return from_storage(rows_of(data.view(torch.uint8)).view(data.dtype), scale)
    return rows_of(data) if stored.storage is Storage.SAME else from_storage(rows_of(data), scale)


def gather_torch(pages: torch.Tensor, page_of_token: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The path in torch operations."""
    rows = pages[page_of_token.clamp(min=0), :, inside]
    rows[page_of_token < 0] = 0
    return rows


def gather_reference(pages: torch.Tensor, page_of_token: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The same, token by token, to be read and compared with."""
    rows = torch.zeros(len(inside), pages.shape[1], pages.shape[3], dtype=pages.dtype, device=pages.device)
    for token, (page, entry) in enumerate(zip(page_of_token.tolist(), inside.tolist(), strict=True)):
        if page >= 0:
            rows[token] = pages[page, :, entry]
    return rows


def number_of_page(context: PagedContext, row: int, field: int, block: int) -> int | None:
    """The page of a block, None where the entry is null.

    Raises:
        RequestError: the entry is outside the table or the pool, or is not this field's.
    """
    layer_pages = context.layer_pages
    if not 0 <= block < context.table.shape[2]:
        raise RequestError(f"{layer_pages.kernel}: block {block} of sequence {row}: the table has {context.table.shape[2]} (allowed: 0 to "
                           f"{context.table.shape[2] - 1})")
    entry = int(context.table[row, field, block])
    if entry == NULL_ENTRY:
        return None
    if bool(layer_pages.is_bad(context.table[row, :, block], field_axis=0)[field]):
        raise layer_pages.entry_error("table", row, field, block, entry)
    return entry + layer_pages.offset


def read_page(context: PagedContext, is_value: bool, page: int) -> torch.Tensor:
    """The numbers of one page, ``[heads, tokens_per_block, dim]``: a view where they are stored as they are, else float32."""
    stored = context.stored
    data = (stored.values if is_value else stored.keys)[page]
    if stored.storage is Storage.SAME:
        return data
    scale = stored.value_scale if is_value else stored.key_scale
    if stored.storage is not Storage.NVFP4:
        return from_storage(data, scale)
    block_scales = stored.value_block_scales if is_value else stored.key_block_scales
    assert block_scales is not None
    return dequantise_nvfp4_torch(data, block_scales[page], scale, torch.float32)


def read_token(context: PagedContext, is_value: bool, page: int, inside: int) -> torch.Tensor:
    """The numbers of one token, float64 ``[heads, dim]`` on the CPU."""
    return read_page(context, is_value, page)[:, inside].double().cpu()

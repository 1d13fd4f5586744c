"""Paged append: keys and values of new tokens go into the pages that a block table names (spec: write path, append).

One call serves prefill (many tokens of a few sequences) and decode (one token of many sequences); the layout is given
by strides, never by a name. The operation is FlashInfer's ``append_paged_kv_cache``, over TensorRT-LLM's offset tables.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import (
    INDEX_TYPES,
    LayerPages,
    check_dtype,
    check_same_device,
    check_shape,
    check_table,
    checks_values,
)
from kvtier.kernels.dispatch import kernel_paths

_KERNEL = "write_kv"


def write_kv(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
             sequence_of_token: torch.Tensor, positions: torch.Tensor, *, layer: int, num_layers: int | None = None,
             kv_factor: int = 2, check_values: bool | None = None) -> None:
    """Write the keys and values of one layer for ``nnz`` tokens into their pages.

    Token i of sequence ``s = sequence_of_token[i]`` goes to entry ``positions[i] % tokens_per_block`` of the page
    ``table[s, field, positions[i] // tokens_per_block] + layer * kv_factor``. Two tokens of one call must not have the
    same place.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides, changed in place.
        key: ``[nnz, heads, head_dim]``, any strides, the dtype of the pages.
        value: like ``key``; None exactly where ``kv_factor`` is 1 (one latent row serves as key and value).
        table: int32 ``[sequences, 2, max_blocks]``: each block's first page of keys and of values; -1 is null.
        sequence_of_token: int32 or int64 ``[nnz]``: row of the table, or -1 to skip the token.
        positions: int32 or int64 ``[nnz]``: position in the sequence, from 0 (chunked prefill: ``past + i``).
        layer: position of the layer in its group's blocks.
        num_layers: layers in a block. When given, a layer beyond it, or a table filled with other factors, is an error
            as well.
        kv_factor: 2, or 1 where one row serves as key and value.
        check_values: whether sequences, positions and table entries are checked. None: yes on a CPU, no on a GPU, where
            it would make the host wait. With checks off a token that has no page is left out; it never lands elsewhere.

    Raises:
        RequestError: a wrong shape, dtype or device, or (with ``check_values``) a sequence or position outside the
            table, a null entry or one that names no page of this pool. Nothing has been written then.
    """
    layer_pages = LayerPages.of(_KERNEL, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    if (value is None) != (kv_factor == 1):
        given = "None" if value is None else "a tensor"
        raise RequestError(f"{_KERNEL}: value is {given} with kv_factor={kv_factor}: pass values with 2, None with 1")
    for name, rows in (("key", key), ("value", value)):
        if rows is not None:
            check_shape(_KERNEL, name, rows, (key.shape[0], layer_pages.heads, layer_pages.head_dim), "nnz, heads, head_dim")
            check_dtype(_KERNEL, name, rows, (pages.dtype,))
    check_table(_KERNEL, "table", table, with_sequences=True)
    for name, index in (("sequence_of_token", sequence_of_token), ("positions", positions)):
        check_shape(_KERNEL, name, index, (key.shape[0],), "nnz")
        check_dtype(_KERNEL, name, index, INDEX_TYPES)
    check_same_device(_KERNEL, pages, key=key, value=value, table=table, sequence_of_token=sequence_of_token,
                      positions=positions)
    if checks_values(pages, check_values):
        _check_places(layer_pages, table, sequence_of_token, positions)
    if key.shape[0]:
        values = None if value is None else value.detach()
        kernel_paths(pages.device.type).append(pages, key.detach(), values, table, sequence_of_token, positions,
                                               layer_pages.offset)


def _check_places(layer_pages: LayerPages, table: torch.Tensor, sequence_of_token: torch.Tensor,
                  positions: torch.Tensor) -> None:
    """Every token that is not skipped has a page."""
    sequences, _, max_blocks = table.shape
    capacity = max_blocks * layer_pages.tokens_per_block
    wrong = (sequence_of_token < -1) | (sequence_of_token >= sequences)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise RequestError(f"{_KERNEL}: sequence_of_token[{token}]={int(sequence_of_token[token])}: the table has "
                           f"{sequences} sequences (allowed: 0 to {sequences - 1}, or -1 to skip the token)")
    active = (sequence_of_token >= 0).nonzero().flatten()
    rows, places = sequence_of_token[active], positions[active]
    wrong = (places < 0) | (places >= capacity)
    if bool(wrong.any()):
        found = int(wrong.nonzero()[0])
        raise RequestError(f"{_KERNEL}: positions[{int(active[found])}]={int(places[found])} (sequence "
                           f"{int(rows[found])}): the table's {max_blocks} blocks of {layer_pages.tokens_per_block} tokens "
                           f"hold positions 0 to {capacity - 1}; allocate more blocks, or make a wider table")
    if not active.numel():
        return
    blocks = places // layer_pages.tokens_per_block
    entries = table[rows, :, blocks]
    bad = layer_pages.is_bad(entries, field_axis=1)
    if bool(bad.any()):
        found, field = bad.nonzero()[0].tolist()
        raise layer_pages.entry_error("table", int(rows[found]), field, int(blocks[found]), int(entries[found, field]))


def append_torch(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
                 sequence_of_token: torch.Tensor, positions: torch.Tensor, layer_offset: int) -> None:
    """The path in torch operations: one indexed assignment for the keys and one for the values."""
    num_pages, _, tokens_per_block, _ = pages.shape
    sequences, _, max_blocks = table.shape
    if not table.numel():
        return
    blocks = positions >> (tokens_per_block.bit_length() - 1)
    inside = positions & (tokens_per_block - 1)
    placed = (sequence_of_token >= 0) & (sequence_of_token < sequences) & (blocks >= 0) & (blocks < max_blocks)
    entries = table[sequence_of_token.clamp(0, sequences - 1), :, blocks.clamp(0, max_blocks - 1)]
    # Both fields decide together: half a token would be worse than none.
    placed &= ((entries >= 0) & (entries < num_pages - layer_offset)).all(1)
    if not bool(placed.all()):
        entries, inside, key = entries[placed], inside[placed], key[placed]
        value = None if value is None else value[placed]
    numbers = entries.long() + layer_offset
    pages[numbers[:, 0], :, inside] = key
    if value is not None:
        pages[numbers[:, 1], :, inside] = value


def append_reference(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
                     sequence_of_token: torch.Tensor, positions: torch.Tensor, *, layer: int,
                     kv_factor: int = 2) -> None:
    """The same, token by token, to be read and compared with. Refuses a bad page before it writes anything."""
    num_pages, _, tokens_per_block, _ = pages.shape
    sequences, _, max_blocks = table.shape
    writes: list[tuple[int, int, torch.Tensor]] = []
    for token, (sequence, position) in enumerate(zip(sequence_of_token.tolist(), positions.tolist(), strict=True)):
        if sequence == -1:
            continue
        block, inside = divmod(position, tokens_per_block)
        if not 0 <= sequence < sequences or not 0 <= block < max_blocks:
            raise RequestError(f"token {token}: sequence {sequence}, position {position} is outside the table "
                               f"{tuple(table.shape)}")
        for field, source in enumerate((key,) if value is None else (key, value)):
            entry = int(table[sequence, field, block])
            page = entry + layer * kv_factor
            if entry < 0 or page >= num_pages:
                raise RequestError(f"token {token}: entry {entry} of sequence {sequence}, block {block} names no page "
                                   f"(allowed: 0 to {num_pages - 1 - layer * kv_factor})")
            writes.append((page, inside, source[token]))
    for page, inside, row in writes:
        pages[page, :, inside] = row

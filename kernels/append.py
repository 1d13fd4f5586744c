"""Paged append: keys and values of new tokens go into the pages that a block table names (spec: write path, append).

One call serves prefill (many tokens of a few sequences) and decode (one token of many sequences); the layout is given
by strides, never by a name. The operation is FlashInfer's ``append_paged_kv_cache``, over TensorRT-LLM's offset tables.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import FLOAT_TYPES, LayerPages, check_dtype, check_plain, check_same_device, check_shape, checks_values
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.storage import Storage, StoredPages
from kvtier.kernels.stored_rows import write_row_reference, write_rows

_KERNEL = "write_kv"


def write_kv(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
             sequence_of_token: torch.Tensor, positions: torch.Tensor, *, layer: int, num_layers: int | None = None,
             kv_factor: int = 2, check_values: bool | None = None, value_pages: torch.Tensor | None = None,
             scale_pages: torch.Tensor | None = None, value_scale_pages: torch.Tensor | None = None, key_scale: float = 1.0,
             value_scale: float = 1.0, first_writable: torch.Tensor | None = None) -> None:
    """Write the keys and values of one layer for ``nnz`` tokens into their pages.

    Token i of sequence ``s = sequence_of_token[i]`` goes to entry ``positions[i] % tokens_per_block`` of the page
    ``table[s, field, positions[i] // tokens_per_block] + layer * kv_factor``. Two tokens of one call must not have the
    same place, and what is written must not lie in the memory of the pages: tokens are written in no order.

    Args:
        pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides, changed in place. A floating-point dtype;
            float8_e4m3fn or int8, which are quantised with a scale; or uint8 of half the width with ``scale_pages``, which is NVFP4
            (:func:`kvtier.kernels.nvfp4.quantise_nvfp4`).
        key: ``[nnz, heads, head_dim]``, any strides, the dtype of the pages; any floating-point dtype where they are quantised.
        value: like ``key``; None exactly where one row serves as key and value (``kv_factor`` 1 and no ``value_pages``).
        table: int32 ``[sequences, 2, max_blocks]``: each block's first page of keys and of values; -1 is null.
        sequence_of_token: int32 or int64 ``[nnz]``: row of the table, or -1 to skip the token.
        positions: int32 or int64 ``[nnz]``: position in the sequence, from 0 (chunked prefill: ``past + i``).
        layer: position of the layer in its group's blocks.
        num_layers: layers in a block. When given, a layer beyond it, or a table filled with other factors, is an error
            as well.
        kv_factor: 2, or 1 where one row serves as key and value or values have a tensor of their own.
        check_values: whether sequences, positions and table entries are checked. None: yes on a CPU, no on a GPU, where
            it would make the host wait. With checks off a token that has no page is left out; it never lands elsewhere.
        value_pages: ``[num_pages, heads, tokens_per_block, value_dim]`` where values are not in ``pages``.
        scale_pages: uint8 ``[num_pages, heads, tokens_per_block, head_dim / 16]``: NVFP4's block scales, changed in place.
        value_scale_pages: the same beside ``value_pages``.
        key_scale, value_scale: what stored keys and stored values are multiplied by to be read: FP8, INT8 and NVFP4.
        first_writable: int32 or int64 ``[sequences]``: positions before it lie in blocks shared with others, and are never written.

    Raises:
        RequestError: a wrong shape, dtype, scale or device, or (with ``check_values``) a sequence or position outside the
            table, a position in a shared block, a null entry or one that names no page of this pool. Nothing has been written then.
    """
    layer_pages = LayerPages.of(_KERNEL, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    stored = StoredPages.of(_KERNEL, pages, value_pages=value_pages, scale_pages=scale_pages, value_scale_pages=value_scale_pages,
                            key_scale=key_scale, value_scale=value_scale, kv_factor=kv_factor)
    stored.check_written(_KERNEL)
    if (value is None) != (kv_factor == 1 and value_pages is None):
        given = "None" if value is None else "a tensor"
        raise RequestError(f"{_KERNEL}: value is {given} with kv_factor={kv_factor} and {'no ' if value_pages is None else ''}value_pages: "
                           "pass None where one row serves as key and value, and only there")
    check_plain(_KERNEL, "key", key)
    allowed = (pages.dtype,) if stored.storage is Storage.SAME else FLOAT_TYPES
    for name, rows, dim in (("key", key, stored.key_dim), ("value", value, stored.value_dim)):
        if rows is not None:
            check_shape(_KERNEL, name, rows, (key.shape[0], layer_pages.heads, dim), "nnz, heads, head_dim")
            check_dtype(_KERNEL, name, rows, allowed)
    places = TokenPlaces(table, sequence_of_token, positions, first_writable)
    places.check_shapes(_KERNEL, key.shape[0])
    check_same_device(_KERNEL, pages, key=key, value=value, table=table, sequence_of_token=sequence_of_token,
                      positions=positions, first_writable=first_writable)
    if checks_values(pages, check_values):
        places = places.checked(layer_pages)
    if key.shape[0]:
        values = None if value is None else value.detach()
        with torch.inference_mode():   # pages may have been made in it, and cannot be written outside then
            kernel_paths(pages.device.type).append(stored, key.detach(), values, places, layer_pages.offset)


def append_host(stored: StoredPages, key: torch.Tensor, value: torch.Tensor | None, places: TokenPlaces, layer_offset: int) -> None:
    """The path for pages on the host: places in numpy, whose calls cost less for few numbers, then whole rows."""
    runs = places.resolve(stored.keys.shape[0], stored.keys.shape[2], layer_offset)
    if runs.tokens is not None:
        kept = torch.from_numpy(runs.tokens)
        key, value = key[kept], None if value is None else value[kept]
    write_rows(stored.keys, stored.key_block_scales, stored.storage, stored.key_scale, runs.key_pages, runs, key)
    if value is not None:
        write_rows(stored.values, stored.value_block_scales, stored.storage, stored.value_scale, runs.value_pages, runs, value)


def append_reference(stored: StoredPages, key: torch.Tensor, value: torch.Tensor | None, places: TokenPlaces, layer_offset: int) -> None:
    """The same, token by token, to be read and compared with. Refuses a bad place before it writes anything."""
    for token, place in enumerate(places.list_reference(stored.keys.shape[0], stored.keys.shape[2], layer_offset)):
        if place is None:
            continue
        key_page, value_page, inside = place
        write_row_reference(stored.keys, stored.key_block_scales, stored.storage, stored.key_scale, key_page, inside, key[token])
        if value is not None:
            write_row_reference(stored.values, stored.value_block_scales, stored.storage, stored.value_scale, value_page, inside,
                                value[token])

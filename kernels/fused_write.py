"""Fused write: bias, rotation, quantisation and the append of one layer in one pass (spec: write path, fused write).

What a model's QKV projection gives becomes queries in a buffer of their own, never in the pool, and keys and values in their pages.
The operation is TensorRT-LLM's ``applyBiasRopeUpdateKVCache``.
"""

from __future__ import annotations

from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.kernels.append import append_host, append_reference
from kvtier.kernels.checks import (
    INDEX_TYPES,
    LayerPages,
    check_apart,
    check_dtype,
    check_plain,
    check_same_device,
    check_shape,
    check_whole,
    checks_values,
)
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.quantise import to_storage
from kvtier.kernels.rotary import Rotary
from kvtier.kernels.storage import Storage, StoredPages, check_scale
from kvtier.kernels.write_plan import WritePlan

_KERNEL = "fused_write"
_INPUT_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def fused_write(qkv: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, plan: WritePlan, *, query_heads: int, layer: int,
                num_layers: int | None = None, kv_factor: int = 2, rotary: Rotary | None = None, bias: torch.Tensor | None = None,
                out: torch.Tensor | None = None, query_scale: float = 1.0, update_kv_cache: bool = True,
                check_values: bool | None = None, value_pages: torch.Tensor | None = None, scale_pages: torch.Tensor | None = None,
                value_scale_pages: torch.Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
                first_writable: torch.Tensor | None = None) -> torch.Tensor:
    """Prepare the queries of ``tokens`` new tokens of one layer and write their keys and values.

    Bias, then rotation of queries and keys, all in float32 and rounded once, then storage as of
    :func:`~kvtier.kernels.append.write_kv`.

    Args:
        qkv: ``[tokens, (query_heads + kv_heads) * head_dim + kv_heads * value_dim]``, queries, then keys, then values, head by head;
            float32, bfloat16 or float16, last axis contiguous. The other numbers are the pages'. With ``update_kv_cache=False`` the
            queries alone are enough: ``[tokens, query_heads * head_dim]``.
        pages: as of ``write_kv``; changed in place unless ``update_kv_cache`` is False.
        table: int32 ``[sequences, 2, max_blocks]``.
        plan: where the tokens go, of :func:`~kvtier.kernels.write_plan.plan_write`; the same for all layers of a step.
        query_heads: 0 or more; it need not be a multiple of the KV heads here.
        rotary: the rotation; None: none.
        bias: one row like ``qkv``'s, of the same dtype.
        out: ``[tokens, query_heads, head_dim]``, contiguous, qkv's dtype or float8_e4m3fn, in memory of its own; None: a new tensor in
            qkv's dtype. A captured graph needs one that stays.
        query_scale: what stored queries are multiplied by to be read; for queries in FP8.
        update_kv_cache: False: only the queries are prepared (cross-attention, verification); pages, table and plan are not written to.
        check_values: whether the plan's places, the table's entries and rotary positions are checked. None: yes on a CPU, no on a GPU.
            Unchecked, a token without a page is left out (its query is prepared all the same), and a rotary position without a row of
            cosines is taken as the nearest that has one.
        layer, num_layers, kv_factor, value_pages, scale_pages, value_scale_pages, key_scale, value_scale, first_writable: as of
            ``write_kv``.

    Returns:
        The queries: ``out``, or the new tensor.

    Raises:
        RequestError: a wrong shape, dtype, scale, stride or device, or (with ``check_values``) what ``write_kv`` refuses, or a rotary
            position outside the tables. Nothing has been written then, not even ``out``.
    """
    layer_pages = LayerPages.of(_KERNEL, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    stored = StoredPages.of(_KERNEL, pages, value_pages=value_pages, scale_pages=scale_pages, value_scale_pages=value_scale_pages,
                            key_scale=key_scale, value_scale=value_scale, kv_factor=kv_factor)
    stored.check_written(_KERNEL)
    if kv_factor == 1 and value_pages is None:
        raise RequestError(f"{_KERNEL}: kv_factor=1 without value_pages: latent rows have no heads of queries; use append_mla")
    query_heads, = check_whole(_KERNEL, query_heads=query_heads)
    if query_heads < 0:
        raise RequestError(f"{_KERNEL}: query_heads={query_heads}: pass 0 or more")
    check_plain(_KERNEL, "qkv", qkv)
    check_dtype(_KERNEL, "qkv", qkv, _INPUT_TYPES if stored.storage is not Storage.SAME else (pages.dtype,))
    check_dtype(_KERNEL, "qkv", qkv, _INPUT_TYPES)
    key_columns, value_columns = layer_pages.heads * stored.key_dim, layer_pages.heads * stored.value_dim
    query_columns = query_heads * stored.key_dim
    columns = query_columns + key_columns + value_columns
    if not update_kv_cache and qkv.dim() == 2 and qkv.shape[1] == query_columns:
        columns = query_columns
    check_shape(_KERNEL, "qkv", qkv, (None, columns), f"tokens, {query_heads} query heads, {layer_pages.heads} of keys and of values")
    tokens = qkv.shape[0]
    if out is not None:
        check_plain(_KERNEL, "out", out)
    if qkv.stride(1) != 1 or (out is not None and not out.is_contiguous()):
        raise RequestError(f"{_KERNEL}: qkv has strides {qkv.stride()}{'' if out is None else f', out {out.stride()}'}: the last axis of "
                           "qkv, and all of out, must be contiguous")
    if bias is not None:
        check_shape(_KERNEL, "bias", bias, (columns,), "one row of qkv")
        check_dtype(_KERNEL, "bias", bias, (qkv.dtype,))
    if out is not None:
        for name, tensor in (("qkv", qkv), ("pages", stored.keys), ("value_pages", stored.values)):
            check_apart(_KERNEL, "out", out, name, tensor)
    else:
        out = qkv.new_empty(tokens, query_heads, stored.key_dim)
    check_shape(_KERNEL, "out", out, (tokens, query_heads, stored.key_dim), "tokens, query_heads, head_dim")
    check_dtype(_KERNEL, "out", out, (qkv.dtype, torch.float8_e4m3fn))
    check_scale(_KERNEL, "query_scale", query_scale, Storage.SAME if out.dtype == qkv.dtype else Storage.FP8)
    places = TokenPlaces(table, plan.sequence_of_token, plan.positions, first_writable)
    places.check_shapes(_KERNEL, tokens)
    check_same_device(_KERNEL, pages, qkv=qkv, table=table, bias=bias, out=out, first_writable=first_writable,
                      **{"plan.sequence_of_token": plan.sequence_of_token, "plan.positions": plan.positions,
                         "plan.rotary_positions": plan.rotary_positions})
    if rotary is not None:
        rotary.check(_KERNEL, qkv, stored.key_dim)
        check_shape(_KERNEL, "plan.rotary_positions", plan.rotary_positions, (tokens,), "tokens")
        check_dtype(_KERNEL, "plan.rotary_positions", plan.rotary_positions, INDEX_TYPES)
    if checks_values(pages, check_values):
        if rotary is not None:
            rotary.check_positions(_KERNEL, plan.rotary_positions)
        if update_kv_cache:
            places = places.checked(layer_pages)
    if tokens:
        with torch.inference_mode():   # pages may have been made in it, and cannot be written outside then
            kernel_paths(pages.device.type).fused_write(
                qkv.detach(), None if bias is None else bias.detach(), rotary, plan.rotary_positions, out.detach(), query_scale,
                stored if update_kv_cache else None, places, layer_pages.heads, layer_pages.offset)
    return out


def _with_bias(qkv: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return qkv.float() if bias is None else qkv.float() + bias.float()


def fused_write_torch(qkv: torch.Tensor, bias: torch.Tensor | None, rotary: Rotary | None, rotary_positions: torch.Tensor,
                      out: torch.Tensor, query_scale: float, stored: StoredPages | None, places: TokenPlaces, kv_heads: int,
                      layer_offset: int) -> None:
    """The path in torch operations. Not one pass: torch has none."""
    tokens, query_heads, head_dim = out.shape
    rows = _with_bias(qkv, bias)
    num_rotated = query_heads + (kv_heads if stored is not None else 0)
    rotated = rows[:, :num_rotated * head_dim].view(tokens, num_rotated, head_dim)
    if rotary is not None:
        rotated = rotary.rotate(rotated, rotary_positions)
    queries = rotated[:, :query_heads]
    out.copy_(queries if out.dtype == qkv.dtype else to_storage(queries, out.dtype, query_scale))
    if stored is None:
        return
    keys, values = rotated[:, query_heads:], rows[:, num_rotated * head_dim:].view(tokens, kv_heads, -1)
    if stored.storage is Storage.SAME:
        keys, values = keys.to(qkv.dtype), values.to(qkv.dtype)
    append_host(stored, keys, values, places, layer_offset)


def fused_write_reference(qkv: torch.Tensor, bias: torch.Tensor | None, rotary: Rotary | None, rotary_positions: torch.Tensor,
                          out: torch.Tensor, query_scale: float, stored: StoredPages | None, places: TokenPlaces, kv_heads: int,
                          layer_offset: int) -> None:
    """The same, token by token and head by head in float64, to be read and compared with."""
    tokens, query_heads, head_dim = out.shape
    rows = qkv.double() if bias is None else qkv.double() + bias.double()
    num_rotated = query_heads + (kv_heads if stored is not None else 0)
    rotated = rows[:, :num_rotated * head_dim].view(tokens, num_rotated, head_dim).clone()
    if rotary is not None:
        for token, position in enumerate(rotary_positions.tolist()):
            heads = [rotary.rotate_reference(head, position) for head in rotated[token].tolist()]
            rotated[token] = rows.new_tensor(heads)
    values = rows[:, num_rotated * head_dim:].view(tokens, kv_heads, -1) if stored is not None else rotated
    if stored is not None:   # first: it refuses bad places before anything is written
        dtype = qkv.dtype if stored.storage is Storage.SAME else torch.float32
        append_reference(stored, rotated[:, query_heads:].to(dtype), values.to(dtype), places, layer_offset)
    queries = rotated[:, :query_heads]
    out.copy_(queries if out.dtype == qkv.dtype else to_storage(queries, out.dtype, query_scale))

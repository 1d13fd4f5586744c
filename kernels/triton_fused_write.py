"""Fused write for GPUs, in Triton: what :func:`kvtier.kernels.fused_write.fused_write_torch` does, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.rotary import Rotary
from kvtier.kernels.storage import Storage, StoredPages
from kvtier.kernels.triton_append import find_place
from kvtier.kernels.triton_numbers import float_to_e4m3, has_e4m3_instructions
from kvtier.kernels.triton_rows import (
    aligned_arguments,
    block_shape,
    jit,
    page_arguments,
    storage_cases,
    store_rows,
    unit_strides,
)


def _load_heads(row: tl.tensor, bias: tl.tensor, head: tl.tensor, dim: tl.tensor, mask: tl.tensor, HAS_BIAS: tl.constexpr,
                DIM: tl.constexpr) -> tl.tensor:
    """Numbers of heads with their bias, float32."""
    numbers = tl.load(row + head * DIM + dim, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        numbers += tl.load(bias + head * DIM + dim, mask=mask, other=0.0).to(tl.float32)
    return numbers


load_heads = triton.jit(_load_heads)


def _load_rotated(row: tl.tensor, bias: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, is_head: tl.tensor,
                  HAS_BIAS: tl.constexpr, STYLE: tl.constexpr, ROTARY_DIM: tl.constexpr, DIM: tl.constexpr,
                  BLOCK_DIM: tl.constexpr) -> tl.tensor:
    """The same, rotated. ``cos`` and ``sin`` point at the rows of the token's position; ROTARY_DIM 0: no rotation."""
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    numbers = load_heads(row, bias, head, dim, is_head & (dim < DIM), HAS_BIAS, DIM)
    if ROTARY_DIM > 0:
        # The other number of each pair is loaded once more, out of the cache, which costs less than to exchange it between threads.
        if STYLE == 0:
            is_first = dim < ROTARY_DIM // 2
            pair = tl.where(is_first, dim, dim - ROTARY_DIM // 2)
            other = tl.where(is_first, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)
        else:
            is_first = dim % 2 == 0
            pair = dim // 2
            other = tl.where(is_first, dim + 1, dim - 1)
        is_rotated = dim < ROTARY_DIM
        partner = load_heads(row, bias, head, other, is_head & is_rotated, HAS_BIAS, DIM)
        partner = tl.where(is_first, -partner, partner)
        turned = numbers * tl.load(cos + pair, mask=is_rotated, other=0.0) + partner * tl.load(sin + pair, mask=is_rotated, other=0.0)
        numbers = tl.where(is_rotated, turned, numbers)
    return numbers


load_rotated = triton.jit(_load_rotated)


def _fused_write_kernel(
    qkv: tl.tensor, bias: torch.Tensor, cos: tl.tensor, sin: tl.tensor, rotary_positions: torch.Tensor, max_position: int, out: tl.tensor,
    query_scale: float, table: torch.Tensor, sequence_of_token: torch.Tensor, positions: torch.Tensor, first_writable: torch.Tensor,
    num_pages: int, sequences: int, max_blocks: int, layer_offset: int, key_scale: float, value_scale: float, qkv_token_stride: int,
    table_sequence_stride: int, table_field_stride: int, table_block_stride: int,
    key_pages: tl.tensor, key_page_stride: int, key_pages_head_stride: int, key_pages_token_stride: int, key_pages_dim_stride: int,
    key_scales: torch.Tensor, key_scales_page_stride: int, key_scales_head_stride: int, key_scales_token_stride: int,
    key_scales_dim_stride: int,
    value_pages: tl.tensor, value_page_stride: int, value_pages_head_stride: int, value_pages_token_stride: int,
    value_pages_dim_stride: int,
    value_scales: torch.Tensor, value_scales_page_stride: int, value_scales_head_stride: int, value_scales_token_stride: int,
    value_scales_dim_stride: int,
    HAS_BIAS: tl.constexpr, STYLE: tl.constexpr, ROTARY_DIM: tl.constexpr, QUERY_FP8: tl.constexpr, HAS_FIRST: tl.constexpr,
    STORAGE: tl.constexpr, NATIVE: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, QUERY_GROUPS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """One program does ``BLOCK_HEADS`` heads of one token: of queries, or behind them of keys and values. Grid: (tokens, groups)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * qkv_token_stride
    if ROTARY_DIM > 0:
        position = tl.load(rotary_positions + token).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), max_position)
        cos += position * (ROTARY_DIM // 2)
        sin += position * (ROTARY_DIM // 2)
    if group < QUERY_GROUPS:
        head = group.to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        numbers = load_rotated(row, bias, cos, sin, head, head < QUERY_HEADS, HAS_BIAS, STYLE, ROTARY_DIM, DIM, BLOCK_DIM)
        dim = tl.arange(0, BLOCK_DIM)[None, :]
        target = out + token * (QUERY_HEADS * DIM) + head * DIM + dim
        mask = (head < QUERY_HEADS) & (dim < DIM)
        if QUERY_FP8:
            scaled = tl.div_rn(numbers, query_scale + tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32))
            tl.store(target, float_to_e4m3(scaled, NATIVE), mask=mask)
        else:
            tl.store(target, numbers.to(out.dtype.element_ty), mask=mask)
    else:
        sequence = tl.load(sequence_of_token + token).to(tl.int64)
        place = tl.load(positions + token).to(tl.int64)
        placed, key_page, value_page = find_place(
            sequence, place, table, first_writable, sequences, max_blocks, num_pages, layer_offset, table_sequence_stride,
            table_field_stride, table_block_stride, HAS_FIRST, TOKENS_PER_BLOCK)
        inside = place % TOKENS_PER_BLOCK
        head = (group - QUERY_GROUPS).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        is_head = (head < KV_HEADS) & placed
        key_row, key_bias = row + QUERY_HEADS * DIM, bias + QUERY_HEADS * DIM
        numbers = load_rotated(key_row, key_bias, cos, sin, head, is_head, HAS_BIAS, STYLE, ROTARY_DIM, DIM, BLOCK_DIM)
        store_rows(numbers, head, placed, key_page, inside, key_scale, key_pages, key_page_stride, key_pages_head_stride,
                   key_pages_token_stride, key_pages_dim_stride, key_scales, key_scales_page_stride, key_scales_head_stride,
                   key_scales_token_stride, key_scales_dim_stride, STORAGE, NATIVE, KV_HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
        value_dim = tl.arange(0, BLOCK_VALUE)[None, :]   # not ``dim``: Triton wants a name to have one shape in both branches
        columns = KV_HEADS * DIM
        values = load_heads(key_row + columns, key_bias + columns, head, value_dim, is_head & (value_dim < VALUE_DIM), HAS_BIAS, VALUE_DIM)
        store_rows(values, head, placed, value_page, inside, value_scale, value_pages, value_page_stride,
                   value_pages_head_stride, value_pages_token_stride, value_pages_dim_stride, value_scales, value_scales_page_stride,
                   value_scales_head_stride, value_scales_token_stride, value_scales_dim_stride, STORAGE, NATIVE, KV_HEADS, VALUE_DIM,
                   BLOCK_HEADS, BLOCK_VALUE)


# Applied as functions: as decorators they would take the kernels' types away from the type checker.
fused_write_kernel = jit(_fused_write_kernel)


def fused_write_triton(qkv: torch.Tensor, bias: torch.Tensor | None, rotary: Rotary | None, rotary_positions: torch.Tensor,
                       out: torch.Tensor, query_scale: float, stored: StoredPages | None, places: TokenPlaces, kv_heads: int,
                       layer_offset: int) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors). A token without a page is left out, but for its queries."""
    tokens, query_heads, head_dim = out.shape
    block_heads, block_dim = block_shape(max(query_heads, kv_heads), head_dim)
    query_groups = triton.cdiv(query_heads, block_heads)
    groups = query_groups if stored is None else query_groups + triton.cdiv(kv_heads, block_heads)
    sequences, _, max_blocks = places.table.shape
    first = places.positions if places.first_writable is None else places.first_writable.contiguous()
    queries = out.view(torch.uint8) if out.dtype == torch.float8_e4m3fn else out
    cos, sin = (out, out) if rotary is None else (rotary.cos, rotary.sin)   # never read without a rotation
    if stored is None:   # nor are pages, where nothing is written
        stored = StoredPages(Storage.SAME, out[None], out[None], None, None, 1.0, 1.0)
    with torch.cuda.device(qkv.get_device()):
        fused_write_kernel[(tokens, groups)](
            qkv, qkv if bias is None else bias.contiguous(), cos, sin, rotary_positions.contiguous(), cos.shape[0] - 1, queries,
            query_scale, places.table, places.sequence_of_token.contiguous(), places.positions.contiguous(), first,
            stored.keys.shape[0], sequences, max_blocks, layer_offset, stored.key_scale, stored.value_scale, qkv.stride(0),
            *places.table.stride(),
            *page_arguments(stored.keys, stored.key_block_scales), *page_arguments(stored.values, stored.value_block_scales),
            HAS_BIAS=bias is not None, STYLE=0 if rotary is None else int(rotary.style),
            ROTARY_DIM=0 if rotary is None else rotary.rotary_dim, QUERY_FP8=out.dtype == torch.float8_e4m3fn,
            HAS_FIRST=places.first_writable is not None, STORAGE=int(stored.storage), NATIVE=has_e4m3_instructions(qkv),
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, DIM=head_dim, VALUE_DIM=stored.value_dim, TOKENS_PER_BLOCK=stored.keys.shape[2],
            QUERY_GROUPS=query_groups, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim,
            BLOCK_VALUE=block_shape(kv_heads, stored.value_dim)[1])


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: each storage type, both styles of rotation, odd numbers of heads, two widths."""
    for number, (storage, native, dtype, architectures) in enumerate(storage_cases()):
        yield _case(storage, native, dtype, architectures, 32, 8, 128, 128, number % 2, 128)
    yield _case(Storage.SAME, False, "bf16", (80, 90, 100), 71, 1, 64, 64, 0, 64)
    yield _case(Storage.SAME, False, "bf16", (80, 90, 100), 6, 3, 192, 64, 0, 64)   # values of another number of columns than keys
    yield _case(Storage.NVFP4, True, "u8", (90, 100), 16, 2, 256, 192, 1, 64)


def _case(storage: Storage, native: bool, dtype: str, architectures: tuple[int, ...], query_heads: int, kv_heads: int, dim: int,
          value_dim: int, style: int, rotary_dim: int) -> CompileCase:
    block_heads, block_dim = block_shape(max(query_heads, kv_heads), dim)
    constants = {"HAS_BIAS": True, "STYLE": style, "ROTARY_DIM": rotary_dim, "QUERY_FP8": storage is not Storage.SAME, "HAS_FIRST": True,
                 "STORAGE": int(storage), "NATIVE": native, "QUERY_HEADS": query_heads, "KV_HEADS": kv_heads, "DIM": dim,
                 "VALUE_DIM": value_dim, "TOKENS_PER_BLOCK": 32, "QUERY_GROUPS": triton.cdiv(query_heads, block_heads),
                 "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim, "BLOCK_VALUE": block_shape(kv_heads, value_dim)[1]}
    constants |= unit_strides(fused_write_kernel.arg_names)
    signature = {name: "constexpr" if name in constants else "i64" for name in fused_write_kernel.arg_names}
    number = "*bf16" if dtype == "u8" else f"*{dtype}"
    signature |= dict.fromkeys(("qkv", "bias"), number) | {"out": "*u8" if storage is not Storage.SAME else number}
    signature |= dict.fromkeys(("key_pages", "value_pages"), f"*{dtype}") | dict.fromkeys(("key_scales", "value_scales"), "*u8")
    signature |= dict.fromkeys(("table", "sequence_of_token", "first_writable"), "*i32")
    signature |= dict.fromkeys(("positions", "rotary_positions"), "*i64") | dict.fromkeys(("cos", "sin"), "*fp32")
    signature |= dict.fromkeys(("key_scale", "value_scale", "query_scale"), "fp32")
    stored = dtype if storage is Storage.SAME else storage.name.lower()
    return CompileCase(f"fused_write/{stored}/{query_heads}+{kv_heads}x{dim}", fused_write_kernel, signature, constants, architectures,
                       aligned_arguments(signature))

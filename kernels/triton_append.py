"""Paged append for GPUs, in Triton: the same places and the same rules as :func:`kvtier.kernels.append.append_host`.

Imported only when a CUDA tensor asks for it. Under ``TRITON_INTERPRET=1`` (set before triton is imported) the kernel
runs on CPU tensors, which is how it is tested without a GPU; ``compile_check`` compiles it for the GPUs we support.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.storage import Storage, StoredPages
from kvtier.kernels.triton_numbers import has_e4m3_instructions
from kvtier.kernels.triton_rows import (
    aligned_arguments,
    block_shape,
    jit,
    page_arguments,
    storage_cases,
    store_rows,
    unit_strides,
)


def _find_place(
    sequence: tl.tensor, position: tl.tensor, table: tl.tensor, first_writable: tl.tensor, sequences: tl.tensor, max_blocks: tl.tensor,
    num_pages: tl.tensor, layer_offset: tl.tensor, sequence_stride: tl.tensor, field_stride: tl.tensor, block_stride: tl.tensor,
    HAS_FIRST: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether a token (both int64) has a place that may be written, and its pages of keys and of values, int64."""
    block = position // TOKENS_PER_BLOCK
    placed = (sequence >= 0) & (sequence < sequences) & (position >= 0) & (block < max_blocks)
    if HAS_FIRST:
        placed = placed & (position >= tl.load(first_writable + sequence, mask=placed, other=0))
    place = table + sequence * sequence_stride + block * block_stride
    key_entry = tl.load(place, mask=placed, other=-1).to(tl.int64)
    value_entry = tl.load(place + field_stride, mask=placed, other=-1).to(tl.int64)
    # Compared before the layer is added: -1 plus an offset would be somebody else's page. Both fields decide together.
    placed = placed & (key_entry >= 0) & (key_entry + layer_offset < num_pages)
    placed = placed & (value_entry >= 0) & (value_entry + layer_offset < num_pages)
    return placed, key_entry + layer_offset, value_entry + layer_offset


# Applied as functions: as decorators they would take the kernels' types away from the type checker.
find_place = triton.jit(_find_place)


def _append_kernel(
    key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, sequence_of_token: torch.Tensor, positions: torch.Tensor,
    first_writable: torch.Tensor, num_pages: int, sequences: int, max_blocks: int, layer_offset: int, key_scale: float, value_scale: float,
    key_token_stride: int, key_head_stride: int, key_dim_stride: int,
    value_token_stride: int, value_head_stride: int, value_dim_stride: int,
    table_sequence_stride: int, table_field_stride: int, table_block_stride: int,
    key_pages: torch.Tensor, key_page_stride: int, key_pages_head_stride: int, key_pages_token_stride: int, key_pages_dim_stride: int,
    key_scales: torch.Tensor, key_scales_page_stride: int, key_scales_head_stride: int, key_scales_token_stride: int,
    key_scales_dim_stride: int,
    value_pages: torch.Tensor, value_page_stride: int, value_pages_head_stride: int, value_pages_token_stride: int,
    value_pages_dim_stride: int,
    value_scales: torch.Tensor, value_scales_page_stride: int, value_scales_head_stride: int, value_scales_token_stride: int,
    value_scales_dim_stride: int,
    HAS_VALUE: tl.constexpr, HAS_FIRST: tl.constexpr, STORAGE: tl.constexpr, NATIVE: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
) -> None:
    """One program writes one token's key and value for ``BLOCK_HEADS`` heads. Grid: (tokens, head groups)."""
    token = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_of_token + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    placed, key_page, value_page = find_place(
        sequence, position, table, first_writable, sequences, max_blocks, num_pages, layer_offset, table_sequence_stride,
        table_field_stride, table_block_stride, HAS_FIRST, TOKENS_PER_BLOCK)
    inside = position % TOKENS_PER_BLOCK
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_KEY).to(tl.int64)[None, :]
    mask = (head < HEADS) & (dim < KEY_DIM) & placed
    rows = tl.load(key + token * key_token_stride + head * key_head_stride + dim * key_dim_stride, mask=mask, other=0.0)
    store_rows(rows, head, placed, key_page, inside, key_scale, key_pages, key_page_stride, key_pages_head_stride, key_pages_token_stride,
               key_pages_dim_stride, key_scales, key_scales_page_stride, key_scales_head_stride, key_scales_token_stride,
               key_scales_dim_stride, STORAGE, NATIVE, HEADS, KEY_DIM, BLOCK_HEADS, BLOCK_KEY)
    if HAS_VALUE:
        dim = tl.arange(0, BLOCK_VALUE).to(tl.int64)[None, :]
        mask = (head < HEADS) & (dim < VALUE_DIM) & placed
        rows = tl.load(value + token * value_token_stride + head * value_head_stride + dim * value_dim_stride, mask=mask, other=0.0)
        store_rows(rows, head, placed, value_page, inside, value_scale, value_pages, value_page_stride, value_pages_head_stride,
                   value_pages_token_stride, value_pages_dim_stride, value_scales, value_scales_page_stride, value_scales_head_stride,
                   value_scales_token_stride, value_scales_dim_stride, STORAGE, NATIVE, HEADS, VALUE_DIM, BLOCK_HEADS, BLOCK_VALUE)


append_kernel = jit(_append_kernel)


def append_triton(stored: StoredPages, key: torch.Tensor, value: torch.Tensor | None, places: TokenPlaces, layer_offset: int) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors). A token without a page is left out, whole."""
    tokens, heads, key_dim = key.shape
    values = key if value is None else value
    sequences, _, max_blocks = places.table.shape
    first = places.positions if places.first_writable is None else places.first_writable.contiguous()
    block_heads, block_key = block_shape(heads, key_dim)
    # Triton launches on the current device, which need not be the tensors'. (A CPU tensor's is -1, which changes nothing.)
    with torch.cuda.device(key.get_device()):
        append_kernel[(tokens, triton.cdiv(heads, block_heads))](
            key, values, places.table, places.sequence_of_token.contiguous(), places.positions.contiguous(), first,
            stored.keys.shape[0], sequences, max_blocks, layer_offset, stored.key_scale, stored.value_scale,
            *key.stride(), *values.stride(), *places.table.stride(),
            *page_arguments(stored.keys, stored.key_block_scales), *page_arguments(stored.values, stored.value_block_scales),
            HAS_VALUE=value is not None, HAS_FIRST=places.first_writable is not None, STORAGE=int(stored.storage),
            NATIVE=has_e4m3_instructions(key), HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=values.shape[2],
            TOKENS_PER_BLOCK=stored.keys.shape[2], BLOCK_HEADS=block_heads, BLOCK_KEY=block_key,
            BLOCK_VALUE=block_shape(heads, values.shape[2])[1])


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: usual models in each storage type, and rows of latent attention."""
    for storage, native, dtype, architectures in storage_cases():
        yield _case(storage, native, dtype, architectures, 3 if dtype == "fp32" else 8, 64 if dtype == "fp32" else 128, 128)
    yield _case(Storage.SAME, False, "bf16", (80, 90, 100), 1, 576, None)   # a latent row without values
    yield _case(Storage.SAME, False, "bf16", (80, 90, 100), 1, 512, 64)     # MLA: two parts of one row
    yield _case(Storage.NVFP4, True, "u8", (90, 100), 4, 256, 192)


def _case(storage: Storage, native: bool, dtype: str, architectures: tuple[int, ...], heads: int, key_dim: int,
          value_dim: int | None) -> CompileCase:
    block_heads, block_key = block_shape(heads, key_dim)
    width = key_dim if value_dim is None else value_dim
    constants = {"HAS_VALUE": value_dim is not None, "HAS_FIRST": True, "STORAGE": int(storage), "NATIVE": native, "HEADS": heads,
                 "KEY_DIM": key_dim, "VALUE_DIM": width, "TOKENS_PER_BLOCK": 32, "BLOCK_HEADS": block_heads, "BLOCK_KEY": block_key,
                 "BLOCK_VALUE": block_shape(heads, width)[1]}
    constants |= unit_strides(append_kernel.arg_names)
    signature = {name: "constexpr" if name in constants else "i64" for name in append_kernel.arg_names}
    signature |= dict.fromkeys(("key", "value"), "*bf16" if dtype == "u8" else f"*{dtype}")
    signature |= dict.fromkeys(("key_pages", "value_pages"), f"*{dtype}") | dict.fromkeys(("key_scales", "value_scales"), "*u8")
    signature |= dict.fromkeys(("table", "sequence_of_token", "positions", "first_writable"), "*i32")
    signature |= dict.fromkeys(("key_scale", "value_scale"), "fp32")
    shape = f"{heads}x{key_dim}" + ("/latent" if value_dim is None else "" if value_dim == key_dim else f"+{value_dim}")
    stored = dtype if storage is Storage.SAME else storage.name.lower()
    return CompileCase(f"append/{stored}/{shape}", append_kernel, signature, constants, architectures,
                       aligned_arguments(signature))

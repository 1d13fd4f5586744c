"""Paged append for GPUs, in Triton: the same places and the same rules as :func:`kvtier.kernels.append.append_torch`.

Imported only when a CUDA tensor asks for it. Under ``TRITON_INTERPRET=1`` (set before triton is imported) the kernel
runs on CPU tensors, which is how it is tested without a GPU; ``compile_check`` compiles it for the GPUs we support.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase


def _append_kernel(
    pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, sequence_of_token: torch.Tensor,
    positions: torch.Tensor, num_pages: int, sequences: int, max_blocks: int, layer_offset: int,
    page_stride: int, head_stride: int, token_stride: int, dim_stride: int,
    key_token_stride: int, key_head_stride: int, key_dim_stride: int,
    value_token_stride: int, value_head_stride: int, value_dim_stride: int,
    table_sequence_stride: int, table_field_stride: int, table_block_stride: int,
    HAS_VALUE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """One program writes one token's key and value for ``BLOCK_HEADS`` heads. Grid: (tokens, head groups)."""
    token = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_of_token + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    block = position // TOKENS_PER_BLOCK
    inside = position % TOKENS_PER_BLOCK
    placed = (sequence >= 0) & (sequence < sequences) & (position >= 0) & (block < max_blocks)
    place = sequence * table_sequence_stride + block * table_block_stride
    key_entry = tl.load(table + place, mask=placed, other=-1).to(tl.int64)
    value_entry = tl.load(table + place + table_field_stride, mask=placed, other=-1).to(tl.int64)
    # Compared before the layer is added: -1 plus an offset would be somebody else's page. Both fields decide together.
    placed = placed & (key_entry >= 0) & (key_entry + layer_offset < num_pages)
    placed = placed & (value_entry >= 0) & (value_entry + layer_offset < num_pages)

    # 64 bits in every product: a pool has more than 2**31 elements, and a small stride comes in as 32 bits.
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM) & placed
    target = head * head_stride + inside * token_stride + dim * dim_stride
    row = tl.load(key + token * key_token_stride + head * key_head_stride + dim * key_dim_stride, mask=mask)
    tl.store(pages + (key_entry + layer_offset) * page_stride + target, row, mask=mask)
    if HAS_VALUE:
        row = tl.load(value + token * value_token_stride + head * value_head_stride + dim * value_dim_stride, mask=mask)
        tl.store(pages + (value_entry + layer_offset) * page_stride + target, row, mask=mask)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
append_kernel = triton.jit(_append_kernel)


def append_triton(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
                  sequence_of_token: torch.Tensor, positions: torch.Tensor, layer_offset: int) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors). A token without a page is left out, whole."""
    tokens, heads, head_dim = key.shape
    sequences, _, max_blocks = table.shape
    values = key if value is None else value
    block_heads, block_dim = _block_shape(heads, head_dim)
    # Triton launches on the current device, which need not be the tensors'. (A CPU tensor's is -1, which changes nothing.)
    with torch.cuda.device(pages.get_device()):
        append_kernel[(tokens, triton.cdiv(heads, block_heads))](
            pages, key, values, table, sequence_of_token.contiguous(), positions.contiguous(),
            pages.shape[0], sequences, max_blocks, layer_offset, *pages.stride(), *key.stride(), *values.stride(), *table.stride(),
            HAS_VALUE=value is not None, HEADS=heads, HEAD_DIM=head_dim, TOKENS_PER_BLOCK=pages.shape[2],
            BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim)


def _block_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads and dimensions of one program: powers of two, about 1,024 elements, a whole row of a head at least."""
    block_dim = int(triton.next_power_of_2(head_dim))
    return max(1, min(int(triton.next_power_of_2(heads)), 1024 // block_dim)), block_dim


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: usual models in each storage type, and a latent row without values."""
    models = (("bf16", 8, 128, True), ("fp16", 8, 128, True), ("fp32", 3, 64, True), ("bf16", 1, 576, False))
    for dtype, heads, head_dim, has_value in models:
        block_heads, block_dim = _block_shape(heads, head_dim)
        constants = {"HAS_VALUE": has_value, "HEADS": heads, "HEAD_DIM": head_dim, "TOKENS_PER_BLOCK": 32,
                     "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
        signature = {name: "constexpr" if name in constants else "i64" for name in append_kernel.arg_names}
        signature |= dict.fromkeys(("pages", "key", "value"), f"*{dtype}")
        signature |= dict.fromkeys(("table", "sequence_of_token", "positions"), "*i32")
        name = f"append/{dtype}/{heads}x{head_dim}{'' if has_value else '/latent'}"
        yield CompileCase(name, append_kernel, signature, constants)

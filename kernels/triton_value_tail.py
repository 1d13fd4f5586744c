"""V tail zeroing for GPUs, in Triton: the same as :func:`kvtier.kernels.value_tail.zero_tail_torch`, in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.triton_rows import jit


def _zero_tail_kernel(
    values: tl.tensor, table: torch.Tensor, lengths: torch.Tensor, num_pages: int, max_blocks: int, first_offset: int, offset_step: int,
    page_stride: int, head_stride: int, token_stride: int, dim_stride: int,
    table_sequence_stride: int, table_field_stride: int, table_block_stride: int,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """One program zeroes one sequence's tail in one layer, for ``BLOCK_HEADS`` heads. Grid: (sequences, layers, head groups)."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int64)
    block = length // TOKENS_PER_BLOCK
    first = length % TOKENS_PER_BLOCK
    has_tail = (length > 0) & (first > 0) & (block < max_blocks)
    place = table + sequence * table_sequence_stride + table_field_stride + block * table_block_stride
    entry = tl.load(place, mask=has_tail, other=-1).to(tl.int64)
    page = entry + first_offset + tl.program_id(1).to(tl.int64) * offset_step
    if (entry >= 0) & (page < num_pages):   # judged before the layer is added
        head = tl.program_id(2).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
        mask = (head < HEADS) & (dim < DIM)
        target = values + page * page_stride + head * head_stride + dim * dim_stride
        zero = tl.zeros((BLOCK_HEADS, BLOCK_DIM), values.dtype.element_ty)
        for inside in range(first, TOKENS_PER_BLOCK):
            tl.store(target + inside * token_stride, zero, mask=mask)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
zero_tail_kernel = jit(_zero_tail_kernel)


def zero_tail_triton(values: torch.Tensor, block_scales: torch.Tensor | None, table: torch.Tensor, lengths: torch.Tensor,
                     layer_offsets: range) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors). A row without a tail or a page is left out."""
    for tensor in (values, block_scales):
        if tensor is None:
            continue
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        num_pages, heads, tokens_per_block, dim = data.shape
        block_heads, block_dim = _block_shape(heads, dim)
        with torch.cuda.device(data.get_device()):
            zero_tail_kernel[(table.shape[0], len(layer_offsets), triton.cdiv(heads, block_heads))](
                data, table, lengths.contiguous(), num_pages, table.shape[2], layer_offsets.start, layer_offsets.step,
                *data.stride(), *table.stride(), HEADS=heads, DIM=dim, TOKENS_PER_BLOCK=tokens_per_block, BLOCK_HEADS=block_heads,
                BLOCK_DIM=block_dim)


def _block_shape(heads: int, dim: int) -> tuple[int, int]:
    block_dim = int(triton.next_power_of_2(dim))
    return max(1, min(int(triton.next_power_of_2(heads)), 1024 // block_dim)), block_dim


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles."""
    for dtype, dim in (("bf16", 128), ("u8", 128), ("fp32", 256)):
        block_heads, block_dim = _block_shape(8, dim)
        constants = {"HEADS": 8, "DIM": dim, "TOKENS_PER_BLOCK": 32, "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
        signature = {name: "constexpr" if name in constants else "i64" for name in zero_tail_kernel.arg_names}
        signature |= {"values": f"*{dtype}", "table": "*i32", "lengths": "*i32"}
        yield CompileCase(f"value_tail/{dtype}/8x{dim}", zero_tail_kernel, signature, constants)

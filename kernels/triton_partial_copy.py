"""Partial block copy for GPUs, in Triton: all pairs, layers, fields and heads in one launch, out of device or pinned host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.partial_copy import partial_copy_torch
from kvtier.kernels.triton_rows import jit

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy_kernel(
    destination: torch.Tensor, source: torch.Tensor, pairs: torch.Tensor, fields: int, tokens: int,
    to_block_stride: int, to_layer_stride: int, to_field_stride: int, to_head_stride: int, to_token_stride: int, to_dim_stride: int,
    block_stride: int, layer_stride: int, field_stride: int, head_stride: int, token_stride: int, dim_stride: int,
    DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """One program copies the first tokens of one head. Grid: (pairs, layers * fields, heads)."""
    pair = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) // fields).to(tl.int64)
    field = (tl.program_id(1) % fields).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    from_slot = tl.load(pairs + 2 * pair)
    to_slot = tl.load(pairs + 2 * pair + 1)
    start = source + from_slot * block_stride + layer * layer_stride + field * field_stride + head * head_stride
    target = destination + to_slot * to_block_stride + layer * to_layer_stride + field * to_field_stride + head * to_head_stride
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    for first in range(0, tokens, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS).to(tl.int64)[:, None]
        mask = (token < tokens) & (dim < DIM)
        rows = tl.load(start + token * token_stride + dim * dim_stride, mask=mask)
        tl.store(target + token * to_token_stride + dim * to_dim_stride, rows, mask=mask)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
copy_kernel = jit(_copy_kernel)


def partial_copy_triton(destination: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]], tokens: int) -> None:
    """The path for a destination on a GPU (and, interpreted, on the CPU). What a GPU cannot read itself is copied pair by pair."""
    if destination.is_cuda and source.device != destination.device and not (source.device.type == "cpu" and source.is_pinned()):
        partial_copy_torch(destination, source, pairs, tokens)
        return
    bits = _BITS[destination.element_size()]
    to, start = destination.view(bits), source.view(bits)
    _, layers, fields, heads, tokens_per_block, dim = to.shape
    numbers = torch.tensor(pairs, dtype=torch.int64)
    if destination.is_cuda:   # pinned, so that the host need not wait; torch keeps the memory until it has been read
        numbers = numbers.pin_memory().to(destination.device, non_blocking=True)
    # Not by the number of tokens: another one would be another kernel.
    block_tokens, block_dim = _block_shape(tokens_per_block, dim)
    with torch.cuda.device(destination.get_device()):
        copy_kernel[(len(pairs), layers * fields, heads)](
            to, start, numbers, fields, tokens, *to.stride(), *start.stride(), DIM=dim, BLOCK_TOKENS=block_tokens, BLOCK_DIM=block_dim)


def _block_shape(tokens: int, dim: int) -> tuple[int, int]:
    """Tokens and dimensions of one round: powers of two, about 2,048 elements."""
    block_dim = int(triton.next_power_of_2(dim))
    return max(1, min(int(triton.next_power_of_2(tokens)), 2048 // block_dim)), block_dim


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: elements of each size."""
    for bits, dim in (("i8", 64), ("i16", 128), ("i32", 256), ("i64", 64)):
        block_tokens, block_dim = _block_shape(32, dim)
        constants = {"DIM": dim, "BLOCK_TOKENS": block_tokens, "BLOCK_DIM": block_dim}
        signature = {name: "constexpr" if name in constants else "i64" for name in copy_kernel.arg_names}
        signature |= {"destination": f"*{bits}", "source": f"*{bits}", "pairs": "*i64"}
        yield CompileCase(f"partial_copy/{bits}/{dim}", copy_kernel, signature, constants)

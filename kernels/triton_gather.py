"""Gather for GPUs, in Triton: the same bytes as :func:`kvtier.kernels.gather.gather_torch`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.triton_rows import aligned_arguments, block_shape, jit, unit_strides


def _gather_kernel(
    pages: torch.Tensor, page_stride: int, head_stride: int, token_stride: int, dim_stride: int, page_of_token: torch.Tensor,
    inside: torch.Tensor, out: torch.Tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """One program reads ``BLOCK_HEADS`` heads of one token. Grid: (tokens, heads / BLOCK_HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(page_of_token + token)
    entry = tl.load(inside + token)
    # 64 bits in every product: a pool has more than 2**31 elements, and a small stride comes in as 32 bits.
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    place = page * page_stride + head * head_stride + entry * token_stride + dim * dim_stride
    rows = tl.load(pages + place, mask=mask & (page >= 0), other=0)
    tl.store(out + (token * HEADS + head) * DIM + dim, rows, mask=mask)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
gather_kernel = jit(_gather_kernel)


def gather_triton(pages: torch.Tensor, page_of_token: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The path for CUDA tensors (and, interpreted, for CPU tensors)."""
    tokens, (_, heads, _, dim) = len(inside), pages.shape
    out = pages.new_empty(tokens, heads, dim)
    block_heads, block_dim = block_shape(heads, dim)
    with torch.cuda.device(pages.get_device()):
        gather_kernel[(tokens, triton.cdiv(heads, block_heads))](
            pages, *pages.stride(), page_of_token.contiguous(), inside.contiguous(), out,
            HEADS=heads, DIM=dim, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim)
    return out


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: numbers as they are, and bytes; a latent row."""
    for dtype, heads, dim in (("bf16", 8, 128), ("fp32", 8, 128), ("u8", 8, 64), ("bf16", 1, 576)):
        block_heads, block_dim = block_shape(heads, dim)
        constants = {"HEADS": heads, "DIM": dim, "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
        constants |= unit_strides(gather_kernel.arg_names)
        signature = {name: "constexpr" if name in constants else "i64" for name in gather_kernel.arg_names}
        signature |= dict.fromkeys(("pages", "out"), f"*{dtype}") | dict.fromkeys(("page_of_token", "inside"), "*i64")
        yield CompileCase(f"gather/{dtype}/{heads}x{dim}", gather_kernel, signature, constants, aligned=aligned_arguments(signature))

"""Paged decode for GPUs: every sequence is split over programs, and its parts are joined (spec: read path, split over pages)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.decode_cpu import decode_torch
from kvtier.kernels.storage import Storage
from kvtier.kernels.triton_attention import join_kernel
from kvtier.kernels.triton_launch import TileShape, compile_case_of, compute_dtype, head_constants, launch


def decode_triton(query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
    """The path for CUDA tensors (and, interpreted, for CPU tensors) of :func:`kvtier.kernels.attention.attention_decode`."""
    if compute_dtype(query, context) == torch.float64:
        return decode_torch(query, context, lengths, plan)   # for tests alone: right everywhere, not fast
    plan = DecodePlan.of(query, context) if plan is None else plan
    sequences, query_heads, _ = query.shape
    constants = head_constants(context, query_heads) | {"DECODE": True}
    shape = tile_shape(constants["GROUP"], max(context.stored.key_dim, context.value_dim), compute_dtype(query, context).itemsize)
    out = query.new_empty(sequences, query_heads, context.value_dim)
    launch(query, context, shape, constants, num_tiles=sequences * -(-constants["GROUP"] // shape.rows), sequences=lengths, tiles=lengths,
           out=out, split_tokens=plan.split_tokens, parts=plan.parts() if plan.num_splits > 1 else None)
    return out


def tile_shape(group: int, dim: int, element_bytes: int) -> TileShape:
    """Rows for the query heads of one KV head; as many keys as keep registers free."""
    rows = 16 if group <= 16 or dim > 256 else 32 if group <= 32 else 64
    tokens = 64 if dim * element_bytes <= 256 else 32 if element_bytes < 4 else 16
    return TileShape(rows, tokens, warps=8 if rows == 64 or dim * element_bytes > 512 else 4)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: usual models in each storage, latent rows, an odd ratio over a window, and the join."""
    part = {"DECODE": True, "IS_PART": True}

    def shape(group: int, dim: int, element_bytes: int = 2) -> TileShape:
        return tile_shape(group, dim, element_bytes)

    yield compile_case_of("decode/bf16/4x128", shape(4, 128), "bf16", "bf16", 128, 128, 4, part)
    for native, architectures in ((True, (90, 100)), (False, (80,))):
        fp8, nvfp4 = (part | {"STORAGE": int(storage), "NATIVE": native} for storage in (Storage.FP8, Storage.NVFP4))
        yield compile_case_of("decode/fp8/4x128", shape(4, 128), "bf16", "u8", 128, 128, 4, fp8, architectures)
        yield compile_case_of("decode/nvfp4/8x128", shape(8, 128), "bf16", "u8", 128, 128, 8, nvfp4, architectures)
    yield compile_case_of("decode/int8/16x192+128", shape(16, 192), "fp16", "i8", 192, 128, 16, part | {"STORAGE": int(Storage.INT8)})
    yield compile_case_of("decode/bf16/128x512+64", shape(128, 576), "bf16", "bf16", 576, 512, 128, part | {"SHARED_ROW": True})
    window = {"SINKS": 4, "REACH": 1020, "BUBBLE": 28, "HAS_CAP": True, "HAS_SOURCE": True}
    yield compile_case_of("decode/fp16/71x64/window", shape(71, 64), "fp16", "fp16", 64, 64, 71, part | window)
    yield compile_case_of("decode/fp32/4x128", shape(4, 128, 4), "fp32", "fp32", 128, 128, 4, part)
    constants = {"SINKS": 0, "REACH": 0, "BLOCK_TOKENS": 64, "VALUE_DIM": 128, "WIDTH": 128, "QUERY_HEADS": 32, "DECODE": True}
    signature = {name: "constexpr" if name in constants else "i64" for name in join_kernel.arg_names}
    signature |= {"parts": "*fp32", "log_sums": "*fp32", "lengths": "*i32", "out": "*bf16", "split_tokens": "i32", "num_splits": "i32"}
    yield CompileCase("decode/join/bf16/128", join_kernel, signature, constants)

"""Paged decode for GPUs: every sequence is split over programs, and its parts are joined (spec: read path, split over pages)."""

from __future__ import annotations

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.decode_cpu import decode_torch
from kvtier.kernels.triton_launch import TileShape, compute_dtype, head_constants, launch


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
    tokens = 64 if dim * element_bytes <= 256 else 32
    return TileShape(rows, tokens, warps=8 if dim * element_bytes > 512 else 4)

"""Paged prefill for GPUs: tiles of queries over pages; few queries behind a long past are split like decode (spec: read path)."""

from __future__ import annotations

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import PrefillPlan
from kvtier.kernels.prefill_cpu import prefill_torch
from kvtier.kernels.triton_launch import TileShape, compute_dtype, head_constants, launch


def prefill_triton(query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None) -> torch.Tensor:
    """The path for CUDA tensors (and, interpreted, for CPU tensors) of :func:`kvtier.kernels.attention.attention_prefill_batch`."""
    if compute_dtype(query, context) == torch.float64:
        return prefill_torch(query, context, plan, draft_mask)   # for tests alone: right everywhere, not fast
    tokens, query_heads, _ = query.shape
    constants = head_constants(context, query_heads) | {"DECODE": False}
    shape = tile_shape(max(context.stored.key_dim, context.value_dim), compute_dtype(query, context).itemsize)
    tiles = plan.tiles(shape.rows, constants["GROUP"])
    out = query.new_empty(tokens, query_heads, context.value_dim)
    split_tokens = plan.split_tokens(len(tiles) * context.heads)
    parts = None
    if split_tokens < plan.longest:
        rows = query.new_empty(tokens, -(-plan.longest // split_tokens), query_heads, context.value_dim, dtype=torch.float32)
        parts = rows, torch.empty(rows.shape[:3], dtype=torch.float32, device=query.device)
    launch(query, context, shape, constants, num_tiles=len(tiles), sequences=plan.sequences(), tiles=tiles, out=out, draft_mask=draft_mask,
           split_tokens=split_tokens, parts=parts)
    return out


def tile_shape(dim: int, element_bytes: int) -> TileShape:
    """Tiles that leave registers free: half as many keys for wide heads, and for float32."""
    if dim > 256:
        return TileShape(16, 32, warps=8)
    if element_bytes > 2:
        return TileShape(32, 32, warps=4)
    return TileShape(64, 64 if dim <= 128 else 32, warps=8)

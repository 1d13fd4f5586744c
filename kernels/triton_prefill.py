"""Paged prefill for GPUs: tiles of queries over pages; few queries behind a long past are split like decode (spec: read path)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.attention_plan import PrefillPlan
from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.prefill_cpu import prefill_torch
from kvtier.kernels.storage import Storage
from kvtier.kernels.triton_launch import TileShape, compile_case_of, compute_dtype, head_constants, launch


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
    drafts = None if draft_mask is None else _of_own_chunk(draft_mask, plan)
    launch(query, context, shape, constants, num_tiles=len(tiles), sequences=plan.sequences(), tiles=tiles, out=out, draft_mask=drafts,
           split_tokens=split_tokens, parts=parts)
    return out


def _of_own_chunk(draft_mask: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
    """The mask without what lies behind a shorter chunk's last token, whatever is there: it would count for a draft's depth."""
    columns = torch.arange(draft_mask.shape[1], device=draft_mask.device)
    return (draft_mask & (columns < plan.chunk_lengths()[:, None])).contiguous()


def tile_shape(dim: int, element_bytes: int) -> TileShape:
    """Tiles that leave registers free: half as many keys for wide heads, and for float32."""
    if dim > 256:
        return TileShape(16, 32, warps=8)
    if element_bytes > 2:
        return TileShape(32, 32, warps=4 if dim <= 64 else 8) if dim <= 128 else TileShape(16, 16, warps=8)
    return TileShape(64, 64 if dim <= 128 else 32, warps=8)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: usual models, drafts, keys and values of different widths, latent rows, 4-bit pages."""
    whole = {"DECODE": False, "IS_PART": False}
    yield compile_case_of("prefill/bf16/4x128", tile_shape(128, 2), "bf16", "bf16", 128, 128, 4, whole)
    yield compile_case_of("prefill/bf16/71x64/drafts", tile_shape(64, 2), "bf16", "bf16", 64, 64, 71, whole | {"DRAFTS": True})
    window = {"REACH": 1024, "HAS_CAP": True}
    yield compile_case_of("prefill/fp16/3x192+128/window", tile_shape(192, 2), "fp16", "fp16", 192, 128, 3, whole | window)
    yield compile_case_of("prefill/bf16/128x512+64", tile_shape(576, 2), "bf16", "bf16", 576, 512, 128, whole | {"SHARED_ROW": True})
    for dim in (64, 128, 256):
        yield compile_case_of(f"prefill/fp32/3x{dim}", tile_shape(dim, 4), "fp32", "fp32", dim, dim, 3, whole)
    for native, architectures in ((True, (90, 100)), (False, (80,))):
        nvfp4 = whole | {"STORAGE": int(Storage.NVFP4), "NATIVE": native}
        yield compile_case_of("prefill/nvfp4/8x128", tile_shape(128, 2), "bf16", "u8", 128, 128, 8, nvfp4, architectures)

"""How the Triton attention kernel is launched: what its arguments are for a context, and the shapes of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.compile_check import ARCHITECTURES, CompileCase
from kvtier.kernels.storage import Storage
from kvtier.kernels.triton_attention import attention_kernel, join_kernel
from kvtier.kernels.triton_numbers import has_e4m3_instructions

Constants = Mapping[str, int | bool]


@dataclass(frozen=True)
class TileShape:
    """What one program works on at a time.

    Attributes:
        rows: queries times query heads.
        tokens: keys.
        warps: of a program.
        stages: blocks of keys that are loaded ahead.
    """

    rows: int
    tokens: int
    warps: int
    stages: int = 2


def widths_of(dim: int) -> tuple[int, int]:
    """The largest power of two in a head and what covers the rest of it, 0 for nothing; tensor cores want 16 at least."""
    width = max(16, 1 << (dim.bit_length() - 1))
    return (width, 0) if width >= dim else (width, max(16, int(triton.next_power_of_2(dim - width))))


def compute_dtype(query: torch.Tensor, context: PagedContext) -> torch.dtype:
    """What products are made of; sums are float32. Half precision only where queries and pages have the same, or pages have fewer bits.
    Not on a CPU: Triton's interpreter takes the bits of bfloat16 for integers when it multiplies."""
    if query.device.type == "cpu":
        return torch.promote_types(query.dtype, torch.float32)
    if context.stored.storage is not Storage.SAME:
        return query.dtype
    return torch.promote_types(query.dtype, context.stored.keys.dtype)


def head_constants(context: PagedContext, query_heads: int) -> dict[str, int | bool]:
    """Constants that the pages and the visibility decide."""
    stored, visibility, unit = context.stored, context.visibility, context.tokens_per_block
    key_width, key_rest = widths_of(stored.key_dim)
    value_width, value_rest = widths_of(stored.value_dim)
    one_row = (stored.values.data_ptr(), stored.values.stride()) == (stored.keys.data_ptr(), stored.keys.stride())
    return {
        "SHARED_ROW": context.layer_pages.kv_factor == 1 and one_row and stored.value_dim == key_width,
        "STORAGE": int(stored.storage), "NATIVE": has_e4m3_instructions(stored.keys), "CAUSAL": visibility.is_causal,
        "SINKS": visibility.sinks, "REACH": visibility.reach or 0, "BUBBLE": visibility.bubble(unit),
        "RING": 0 if visibility.ring is None else visibility.ring.ring, "TOKENS_PER_BLOCK": unit, "GROUP": query_heads // context.heads,
        "KEY_DIM": stored.key_dim, "KEY_WIDTH": key_width, "KEY_REST": key_rest,
        "VALUE_DIM": stored.value_dim, "VALUE_WIDTH": value_width, "VALUE_REST": value_rest,
        "HAS_CAP": context.soft_cap is not None}


def launch(query: torch.Tensor, context: PagedContext, shape: TileShape, constants: Constants, *, num_tiles: int, sequences: torch.Tensor,
           tiles: torch.Tensor, out: torch.Tensor, draft_mask: torch.Tensor | None = None, split_tokens: int = 1 << 30,
           parts: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Run the kernel for all tiles, and join the parts where there are any.

    Args:
        query: ``[queries, query_heads, head_dim]``.
        context: where keys and values lie.
        shape: of a program's tiles.
        constants: ``DECODE``, and those of :func:`head_constants`.
        num_tiles: programs for each KV head and part.
        sequences: lengths of the sequences (decode), or ``PrefillPlan.sequences()``.
        tiles: ``PrefillPlan.tiles()``; not read in decode.
        out: ``[queries, query_heads, value_dim]``, written.
        draft_mask: who sees whom among a chunk's queries; contiguous, False behind the chunk's last.
        split_tokens: tokens of a part.
        parts: buffers float32 ``[queries or more, parts, query_heads, value_dim]`` and, without the last axis, for log-sums.
    """
    stored, table, unused = context.stored, context.table, out
    query = query.to(compute_dtype(query, context)).contiguous()
    key_pages, value_pages = (pages.view(torch.uint8) if stored.storage is Storage.FP8 else pages for pages in (stored.keys, stored.values))
    key_scales, value_scales = (unused if scales is None else scales for scales in (stored.key_block_scales, stored.value_block_scales))
    scale_strides = [(0,) * 4 if scales is None else scales.stride() for scales in (stored.key_block_scales, stored.value_block_scales)]
    drafts, depths = unused, unused
    if draft_mask is not None:
        drafts, depths = draft_mask.view(torch.uint8), (draft_mask.sum(1) - 1).int()
    # The kernel goes over numbers of one row, and over lengths, without strides.
    sequences = sequences.contiguous()
    source = None if context.source_rows is None else context.source_rows.contiguous()
    target, log_sums = (out, unused) if parts is None else parts
    out_strides = (out.stride(0), 0, out.stride(1)) if parts is None else target.stride()[:3]
    num_parts = 1 if parts is None else target.shape[1]
    # Triton launches on the current device, which need not be the tensors'. (A CPU tensor's is -1, which changes nothing.)
    with torch.cuda.device(query.get_device()):
        attention_kernel[(num_tiles, context.heads, num_parts)](
            query, key_pages, value_pages, key_scales, value_scales, table, unused if source is None else source, tiles, sequences, drafts,
            depths, target, log_sums, context.scale * stored.key_scale, stored.value_scale, context.soft_cap or 1.0,
            context.layer_pages.num_pages, table.shape[2], context.layer_pages.offset, split_tokens,
            query.stride(0), query.stride(1), *out_strides, *key_pages.stride(), *value_pages.stride(), *scale_strides[0],
            *scale_strides[1], *table.stride(), 0 if source is None else source.stride(0),
            0 if draft_mask is None else draft_mask.stride(0),
            DRAFTS=draft_mask is not None, HAS_SOURCE=source is not None, IS_PART=parts is not None, BLOCK_ROWS=shape.rows,
            BLOCK_TOKENS=shape.tokens, num_warps=shape.warps, num_stages=shape.stages, **constants)
        if parts is not None:
            join_kernel[(out.shape[0], out.shape[1])](
                target, log_sums, sequences, out, split_tokens, num_parts, out.stride(0), out.stride(1), SINKS=constants["SINKS"],
                REACH=constants["REACH"], BLOCK_TOKENS=shape.tokens, VALUE_DIM=context.value_dim,
                WIDTH=int(triton.next_power_of_2(context.value_dim)), QUERY_HEADS=out.shape[1], DECODE=constants["DECODE"])


def compile_case_of(name: str, shape: TileShape, numbers: str, pages: str, key_dim: int, value_dim: int, group: int,
                    constants: Constants, architectures: tuple[int, ...] = ARCHITECTURES) -> CompileCase:
    """One case for ``compile_check``, with what Triton sees at a launch: contiguous heads, and addresses of whole rows of 16.

    Args:
        name: of the case.
        shape: of its tiles.
        numbers, pages: Triton's names of the dtypes of queries and results, and of the pages ("bf16").
        key_dim, value_dim, group: of the model.
        constants: what differs from full attention over pages of 32 tokens that hold numbers as they are.
        architectures: those it is for.
    """
    (key_width, key_rest), (value_width, value_rest) = widths_of(key_dim), widths_of(value_dim)
    known = {
        "CAUSAL": True, "DRAFTS": False, "HAS_SOURCE": False, "SHARED_ROW": False, "HAS_CAP": False, "STORAGE": int(Storage.SAME),
        "NATIVE": False, "SINKS": 0, "REACH": 0, "BUBBLE": 0, "RING": 0, "TOKENS_PER_BLOCK": 32, "GROUP": group, "KEY_DIM": key_dim,
        "KEY_WIDTH": key_width, "KEY_REST": key_rest, "VALUE_DIM": value_dim, "VALUE_WIDTH": value_width, "VALUE_REST": value_rest,
        "BLOCK_ROWS": shape.rows, "BLOCK_TOKENS": shape.tokens, "key_dim_stride": 1, "value_dim_stride": 1, "key_scale_dim_stride": 1,
        "value_scale_dim_stride": 1, "table_block_stride": 1} | dict(constants)
    names = tuple(attention_kernel.arg_names)
    signature = {name: "constexpr" if name in known else "i64" for name in names}
    signature |= {"query": f"*{numbers}", "out": "*fp32" if known["IS_PART"] else f"*{numbers}", "log_sums": "*fp32"}
    signature |= dict.fromkeys(("key_pages", "value_pages"), f"*{pages}")
    signature |= dict.fromkeys(("key_scales", "value_scales", "draft_mask"), "*u8")
    signature |= dict.fromkeys(("table", "source_rows", "tiles", "sequences", "draft_depths"), "*i32")
    signature |= dict.fromkeys(("score_scale", "value_scale", "soft_cap"), "fp32")
    signature |= dict.fromkeys(("split_tokens", "max_blocks", "num_pages", "layer_offset"), "i32")
    aligned = frozenset(name for name in names if name not in known and (signature[name][0] == "*" or name.endswith("_stride")))
    return CompileCase(name, attention_kernel, signature, known, architectures, aligned,
                       {"num_warps": shape.warps, "num_stages": shape.stages})

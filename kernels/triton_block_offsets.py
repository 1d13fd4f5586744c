"""Offset table copy for GPUs, in Triton: the same entries as :func:`kvtier.kernels.block_offsets.fill_offsets_host`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.block_offsets import ScratchWindow
from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.triton_rows import jit

_BLOCK: Final = 128   # block positions of one program


def _fill_kernel(
    table: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, rows: int, max_blocks: int, num_blocks: int, pages_per_block: int,
    value_field: int, row_stride: int, field_stride: int, block_stride: int, scratch_begin: torch.Tensor, scratch_end: torch.Tensor,
    scratch_slots: torch.Tensor, scratch_count: int, scratch_row_stride: int, scratch_slot_stride: int, HAS_SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes ``BLOCK`` positions of one row, both fields. Grid: (rows of the table, positions / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    start = tl.load(indptr + row, mask=is_row, other=0).to(tl.int64)
    length = tl.load(indptr + row + 1, mask=is_row, other=0).to(tl.int64) - start
    slot = tl.load(slots + start + position, mask=position < length, other=-1).to(tl.int64)
    if HAS_SCRATCH:
        begin = tl.load(scratch_begin + row, mask=is_row, other=0).to(tl.int64)
        end = tl.load(scratch_end + row, mask=is_row, other=0).to(tl.int64)
        is_scratch = (position >= begin) & (position < end) & (position < length)
        place = row * scratch_row_stride + (position - begin) * scratch_slot_stride
        redirected = tl.load(scratch_slots + place, mask=is_scratch & (position - begin < scratch_count), other=-1).to(tl.int64)
        slot = tl.where(is_scratch, redirected, slot)
    is_there = (slot >= 0) & (slot < num_blocks)
    entry = slot * pages_per_block
    target = table + row * row_stride + position * block_stride
    tl.store(target, tl.where(is_there, entry, -1).to(tl.int32), mask=position < max_blocks)
    tl.store(target + field_stride, tl.where(is_there, entry + value_field, -1).to(tl.int32), mask=position < max_blocks)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
fill_kernel = jit(_fill_kernel)


def fill_offsets_triton(tables: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, pages_per_block: tuple[int, ...],
                        value_fields: tuple[int, ...], num_blocks: int, scratch: ScratchWindow | None) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors): one launch for each pool, nothing that the host waits for."""
    _, max_rows, _, max_blocks = tables.shape
    if not tables.numel():
        return
    begin, end, scratch_slots = (indptr, indptr, slots[None]) if scratch is None else (
        scratch.begin.contiguous(), scratch.end.contiguous(), scratch.slots)
    with torch.cuda.device(tables.get_device()):
        for table, pages, field in zip(tables, pages_per_block, value_fields, strict=True):
            fill_kernel[(max_rows, triton.cdiv(max_blocks, _BLOCK))](
                table, indptr.contiguous(), slots.contiguous(), indptr.shape[0] - 1, max_blocks, num_blocks, pages, field, *table.stride(),
                begin, end, scratch_slots, scratch_slots.shape[1], *scratch_slots.stride(), HAS_SCRATCH=scratch is not None, BLOCK=_BLOCK)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles."""
    for has_scratch in (False, True):
        constants = {"HAS_SCRATCH": has_scratch, "BLOCK": _BLOCK}
        signature = {name: "constexpr" if name in constants else "i64" for name in fill_kernel.arg_names}
        signature |= dict.fromkeys(("table", "indptr", "slots", "scratch_begin", "scratch_end", "scratch_slots"), "*i32")
        yield CompileCase(f"block_offsets/{'scratch' if has_scratch else 'plain'}", fill_kernel, signature, constants)

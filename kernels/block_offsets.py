"""Offset table copy: slots of the active sequences' blocks become the page numbers that kernels read (spec: offset table copy).

Applies each pool's scale and field offset; rows without a sequence become null. The operation is TensorRT-LLM's
``copyBatchBlockOffsets``. A sliding window's scratch (spec) is a redirection on the way: positions whose blocks a chunk needs for a
moment only are given shared pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import (
    INDEX_TYPES,
    NULL_ENTRY,
    check_dtype,
    check_own_memory,
    check_same_device,
    check_shape,
    check_whole,
    checks_values,
)
from kvtier.kernels.dispatch import kernel_paths

MAX_PAGES: Final = 2**31 - 1
"""What an int32 entry counts to."""

_KERNEL = "fill_block_offsets"


@dataclass(frozen=True)
class ScratchWindow:
    """Block positions that are redirected: position p in ``begin[i] <= p < end[i]`` of row i has slot ``slots[i, p - begin[i]]``.

    Args:
        begin, end: int32 ``[rows]``; an empty range redirects nothing.
        slots: int32 ``[rows, count]``, scratch pages; rows that do not run at the same time may have the same.
    """

    begin: torch.Tensor
    end: torch.Tensor
    slots: torch.Tensor


def fill_block_offsets(tables: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, *, pages_per_block: Sequence[int],
                       value_fields: Sequence[int], num_blocks: int, scratch: ScratchWindow | None = None,
                       check_values: bool | None = None) -> None:
    """Fill the block tables of one batch, one for each pool, from the slots of its sequences' blocks.

    Entry of pool p, row i, field f, position b = ``slots[indptr[i] + b] * pages_per_block[p] + f * value_fields[p]``; null (-1) where
    the slot is negative, the row is shorter, or there is no such row.

    Args:
        tables: int32 ``[pools, max_rows, 2, max_blocks]``, any strides, wholly overwritten.
        indptr: int32 or int64 ``[rows + 1]``: where each row begins in ``slots``; from 0, never falling.
        slots: int32 or int64 ``[blocks]``: slots of all rows, one row after the other; negative: no block.
        pages_per_block: for each pool layers * kv_factor (kv_factor alone in a layer-first pool).
        value_fields: for each pool 1 where values lie behind keys, 0 where both rows are the same page.
        num_blocks: slots of the pools; they are numbered alike.
        scratch: block positions to redirect.
        check_values: whether pointers and slots are checked. None: yes on a CPU, no on a GPU. Unchecked, a slot outside is null;
            pointers of tables on a CPU are always checked.

    Raises:
        RequestError: a wrong shape, dtype or device, too many rows or pages, or (with ``check_values``) pointers that fall, a row longer
            than the table, a slot or a scratch range outside its limits. The tables have not changed then.
    """
    check_shape(_KERNEL, "tables", tables, (len(pages_per_block), None, 2, None), "pools, max_rows, fields, max_blocks")
    check_dtype(_KERNEL, "tables", tables, (torch.int32,))
    check_shape(_KERNEL, "indptr", indptr, (None,), "rows + 1")
    check_shape(_KERNEL, "slots", slots, (None,), "blocks")
    for name, index in (("indptr", indptr), ("slots", slots)):
        check_dtype(_KERNEL, name, index, INDEX_TYPES)
    check_same_device(_KERNEL, tables, indptr=indptr, slots=slots)
    rows, max_rows = indptr.shape[0] - 1, tables.shape[1]
    check_own_memory(_KERNEL, "tables", tables)
    if not 0 <= rows <= max_rows:
        raise RequestError(f"{_KERNEL}: indptr has {indptr.shape[0]} numbers, so {rows} rows: the tables have {max_rows} (allowed: 1 to "
                           f"{max_rows + 1} numbers)")
    if len(value_fields) != len(pages_per_block):
        raise RequestError(f"{_KERNEL}: {len(value_fields)} value_fields for {len(pages_per_block)} pools: pass one for each")
    num_blocks, = check_whole(_KERNEL, num_blocks=num_blocks)
    pages_per_block, value_fields = (check_whole(_KERNEL, **{f"{name}[{pool}]": number for pool, number in enumerate(numbers)})
                                     for name, numbers in (("pages_per_block", pages_per_block), ("value_fields", value_fields)))
    for pool, (pages, field) in enumerate(zip(pages_per_block, value_fields, strict=True)):
        if pages < 1 or not 0 <= field < 2 or num_blocks * pages > MAX_PAGES:
            raise RequestError(f"{_KERNEL}: pool {pool}: pages_per_block={pages}, value_field={field} with {num_blocks} blocks: allowed "
                               f"are at least 1, 0 or 1, and {MAX_PAGES} pages")
    if scratch is not None:
        check_shape(_KERNEL, "scratch.slots", scratch.slots, (rows, None), "rows, count")
        for name, index in (("scratch.begin", scratch.begin), ("scratch.end", scratch.end)):
            check_shape(_KERNEL, name, index, (rows,), "rows")
        for name, index in (("scratch.begin", scratch.begin), ("scratch.end", scratch.end), ("scratch.slots", scratch.slots)):
            check_dtype(_KERNEL, name, index, (torch.int32,))
            check_same_device(_KERNEL, tables, **{name: index})
    checked = checks_values(tables, check_values)
    if checked or tables.device.type == "cpu":   # there numpy would stop in the middle of a table
        starts, lengths = _checked_rows(tables.shape[3], indptr, slots)
        if checked:
            _check_slots(starts, lengths, slots, num_blocks, scratch)
    kernel_paths(tables.device.type).fill_offsets(tables, indptr, slots, tuple(pages_per_block), tuple(value_fields), num_blocks, scratch)


def _checked_rows(max_blocks: int, indptr: torch.Tensor, slots: torch.Tensor) -> tuple[list[int], list[int]]:
    """Where rows begin, and their lengths."""
    starts = indptr.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != slots.shape[0] or min(lengths, default=0) < 0:
        row = next((row for row, length in enumerate(lengths) if length < 0), len(lengths))
        raise RequestError(f"{_KERNEL}: indptr[{row}:{row + 2}]={starts[row:row + 2]}: pointers begin at 0, never fall, and end at the "
                           f"number of slots, {slots.shape[0]}")
    if max(lengths, default=0) > max_blocks:
        row = next(row for row, length in enumerate(lengths) if length > max_blocks)
        raise RequestError(f"{_KERNEL}: row {row} has {lengths[row]} blocks: the tables were made for {max_blocks}")
    return starts, lengths


def _check_slots(starts: list[int], lengths: list[int], slots: torch.Tensor, num_blocks: int, scratch: ScratchWindow | None) -> None:
    if slots.numel() and int(slots.max()) >= num_blocks:
        place = int((slots >= num_blocks).nonzero()[0])
        row = next(row for row, end in enumerate(starts[1:]) if place < end)
        raise RequestError(f"{_KERNEL}: slots[{place}]={int(slots[place])} (row {row}, block {place - starts[row]}): allowed are 0 to "
                           f"{num_blocks - 1}, or a negative number where there is no block")
    if scratch is None:
        return
    count = scratch.slots.shape[1]
    for row, (begin, end) in enumerate(zip(scratch.begin.tolist(), scratch.end.tolist(), strict=True)):
        if begin >= end:
            continue
        if begin < 0 or end > lengths[row] or end - begin > count:
            raise RequestError(f"{_KERNEL}: scratch range {begin} to {end} of row {row}: allowed are block positions 0 to {lengths[row]}, "
                               f"and {count} of them, as many as it has scratch slots")
        used = scratch.slots[row, :end - begin]
        if int(used.min()) < 0 or int(used.max()) >= num_blocks:
            raise RequestError(f"{_KERNEL}: scratch.slots[{row}] names slots {used.tolist()}: allowed are 0 to {num_blocks - 1}")


def fill_offsets_host(tables: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, pages_per_block: tuple[int, ...],
                      value_fields: tuple[int, ...], num_blocks: int, scratch: ScratchWindow | None) -> None:
    """The path for a table on the host, in numpy: before every step, for few numbers, torch's calls would cost more than the work."""
    view, joined = tables.numpy(), slots.numpy()
    lengths = np.diff(indptr.numpy())
    num_rows = len(lengths)
    longest = int(lengths.max()) if num_rows else 0
    is_filled = np.arange(longest) < lengths[:, None]
    if scratch is not None:
        joined = joined.copy()
        starts = indptr.tolist()
        for row, (begin, end) in enumerate(zip(scratch.begin.tolist(), scratch.end.tolist(), strict=True)):
            if begin < end:
                joined[starts[row] + begin:starts[row] + end] = scratch.slots[row, :end - begin].numpy()
    missing = (joined < 0) | (joined >= num_blocks)
    for pool, (pages, field) in enumerate(zip(pages_per_block, value_fields, strict=True)):
        keys = joined.astype(np.int32)
        keys *= pages
        values = keys + np.int32(field)
        if missing.any():
            keys[missing] = values[missing] = NULL_ENTRY
        view[pool] = NULL_ENTRY
        view[pool, :num_rows, 0, :longest][is_filled] = keys
        view[pool, :num_rows, 1, :longest][is_filled] = values


def fill_offsets_reference(tables: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, pages_per_block: tuple[int, ...],
                           value_fields: tuple[int, ...], num_blocks: int, scratch: ScratchWindow | None) -> None:
    """The same, entry by entry, to be read and compared with."""
    starts, joined = indptr.tolist(), slots.tolist()
    filled = torch.full(tables.shape, NULL_ENTRY, dtype=torch.int32)
    for row, start in enumerate(starts[:-1]):
        for position, slot in enumerate(joined[start:starts[row + 1]]):
            if scratch is not None and int(scratch.begin[row]) <= position < int(scratch.end[row]):
                slot = int(scratch.slots[row, position - int(scratch.begin[row])])
            for pool, (pages, field) in enumerate(zip(pages_per_block, value_fields, strict=True)):
                if 0 <= slot < num_blocks:
                    filled[pool, row, 0, position] = slot * pages
                    filled[pool, row, 1, position] = slot * pages + field
    tables.copy_(filled)

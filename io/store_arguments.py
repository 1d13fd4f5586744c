"""What callers hand to an ``NvmeStore``: does it fit?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvtier.errors import TransferError
from kvtier.io.manifest_rows import Place
from kvtier.io.slab import SlabFile
from kvtier.io.store_messages import BlockTarget, BlockWrite
from kvtier.pools.nvme_geometry import NvmeGeometry


def slab_of(slabs: Sequence[SlabFile], group: int, slot: int) -> SlabFile:
    """The slab that has this slot.

    Raises:
        TransferError: there is no such group or slot.
    """
    if not 0 <= group < len(slabs):
        raise TransferError(f"group {group}: the store has groups 0..{len(slabs) - 1}")
    slab = slabs[group]
    if not 0 <= slot < slab.geometry.num_slots:
        raise TransferError(f"group {group}, slot {slot}: the slab has {slab.geometry.num_slots} slots, counted from 0")
    return slab


def misfit(buffer: BlockTarget, geometry: NvmeGeometry) -> str | None:
    """Why a buffer cannot take or give one block of this shape; ``None`` when it can."""
    if not isinstance(buffer, np.ndarray):
        return None if buffer.nbytes == geometry.payload_bytes else (f"a direct row of {buffer.nbytes} bytes: a block of this group "
                                                                     f"takes {geometry.payload_bytes}")
    fits = (buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
            and buffer.nbytes in (geometry.block_bytes, geometry.payload_bytes))
    if fits:
        return None
    return (f"{'' if buffer.flags.c_contiguous else 'strided '}{buffer.dtype} {list(buffer.shape)}: a block is contiguous uint8 of "
            f"{geometry.block_bytes} or {geometry.payload_bytes} bytes")


def unreadable_into(out: BlockTarget, geometry: NvmeGeometry) -> str | None:
    """Why a block of this shape cannot be read into ``out``; ``None`` when it can."""
    reason = misfit(out, geometry)
    if reason is None and isinstance(out, np.ndarray) and not out.flags.writeable:
        return f"{out.dtype} {list(out.shape)} that is read-only"
    return reason


def objection(item: BlockWrite, geometry: NvmeGeometry) -> str | None:
    """Why a block of a group of this shape cannot be stored as it is; ``None`` when it can."""
    if len(item.key) != 32:
        return f"key has {len(item.key)} bytes; a chain key has 32"
    if not math.isfinite(item.expiry):
        return f"expiry={item.expiry}; must be finite seconds, 0.0 for none"
    if not -(1 << 31) <= item.priority < 1 << 31:
        return f"priority={item.priority}; must fit 32 bits"
    return misfit(item.data, geometry)


def runs_of_different_slots(items: Sequence[BlockWrite]) -> list[list[int]]:
    """Positions in runs without a slot twice: between two writes of one slot the first one's row must be deleted."""
    runs: list[list[int]] = []
    places: set[Place] = set()
    for position, item in enumerate(items):
        place = (item.group, item.slot)
        if not runs or place in places:
            runs.append([])
            places = set()
        runs[-1].append(position)
        places.add(place)
    return runs

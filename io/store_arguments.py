"""What callers hand to an ``NvmeStore``: does it fit?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvtier.io.direct_file import Buffer
from kvtier.io.manifest_rows import Place
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import NvmeGeometry


def misfit(buffer: Buffer, geometry: NvmeGeometry) -> str | None:
    """Why a buffer cannot take or give one block of this shape; ``None`` when it can."""
    fits = (buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
            and buffer.nbytes in (geometry.block_bytes, geometry.payload_bytes))
    if fits:
        return None
    return (f"{'' if buffer.flags.c_contiguous else 'strided '}{buffer.dtype} {list(buffer.shape)}: a block is contiguous uint8 of "
            f"{geometry.block_bytes} or {geometry.payload_bytes} bytes")


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

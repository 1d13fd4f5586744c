"""Which way copies on CUDA take, by direction and size of their units (design: copy engine). Pure decisions, from measured times.

DMA engines do what they are given beside the engine's kernels, one descriptor for each unit; a kernel copies small units faster, and
takes multiprocessors from the engine for it. Where one overtakes the other differs from device to device, so it is measured.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

UNIT_SIZES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""What is measured: from one layer of a small block to a whole one."""

KERNEL_ADVANTAGE: Final = 1.25
"""How many times as fast as DMA the kernel has to be: an engine that decodes meanwhile pays for its multiprocessors."""


class CopyPath(enum.Enum):
    """A way to copy many units."""

    RUNS = "a call for each"  #: ``cudaMemcpyAsync``, two-dimensional where there are gaps
    BATCH = "one batch"       #: ``cuMemcpyBatchAsync``
    KERNEL = "kernel"         #: gather and scatter by ``kvtier.kernels.row_moves``


class Direction(enum.Enum):
    """Between which kinds of memory."""

    UP = "host to device"
    DOWN = "device to host"
    WITHIN = "within the device"


Timings = Mapping[Direction, Mapping[int, Mapping[CopyPath, float]]]
"""Seconds for the same bytes, by direction, unit size and path. What does not work is absent."""


@dataclass(frozen=True)
class CopyPaths:
    """The choice for one device.

    Attributes:
        chosen: by direction, (smallest unit in bytes, path), ascending; the first one counts for smaller units, too.
        reason: why nothing was measured; empty where it was.
    """

    chosen: Mapping[Direction, tuple[tuple[int, CopyPath], ...]] = field(default_factory=lambda: MappingProxyType({}))
    reason: str = ""

    def path(self, direction: Direction | None, unit_bytes: int) -> CopyPath:
        """How to copy units of this size; ``RUNS`` where nothing was measured, and within the host (None)."""
        found = CopyPath.RUNS
        if direction is not None:
            for number, (smallest, path) in enumerate(self.chosen.get(direction, ())):
                if number == 0 or unit_bytes >= smallest:
                    found = path
        return found

    def describe(self) -> dict[str, str]:
        """By direction, in words: ``{"host to device": "kernel, one batch from 64 KiB"}``. Empty where nothing was measured."""
        return {direction.value: ", ".join([path.value if number == 0 else f"{path.value} from {smallest >> 10} KiB"
                                            for number, (smallest, path) in enumerate(choices)])
                for direction, choices in self.chosen.items()}


def decide(timings: Timings) -> CopyPaths:
    """For each direction and size the fastest DMA path, or the kernel where it is much faster than that.

    Once DMA has kept up with the kernel, larger units never use it: that they should is noise.
    """
    chosen: dict[Direction, tuple[tuple[int, CopyPath], ...]] = {}
    for direction, by_size in timings.items():
        choices: list[tuple[int, CopyPath]] = []
        may_use_kernel = True
        for size, seconds in sorted(by_size.items()):
            by_dma = {path: taken for path, taken in seconds.items() if path is not CopyPath.KERNEL}
            best: CopyPath | None = min(by_dma, key=by_dma.__getitem__, default=None)
            kernel = seconds.get(CopyPath.KERNEL) if may_use_kernel else None
            if kernel is not None and kernel * KERNEL_ADVANTAGE < min(by_dma.values(), default=math.inf):
                best = CopyPath.KERNEL
            else:
                may_use_kernel = False
            if best is not None and (not choices or choices[-1][1] is not best):
                choices.append((size, best))
        if choices:
            chosen[direction] = tuple(choices)
    return CopyPaths(MappingProxyType(chosen))

"""``StagingPool``: where blocks from NVMe arrive and are verified before they enter a slot (design: transfer rules)."""

from __future__ import annotations

import queue
from collections.abc import Iterable

from kvtier.io.direct_file import Buffer
from kvtier.io.direct_row import DirectRow
from kvtier.io.gds import GdsGroup
from kvtier.pools.host_arena import HostArena


class Staging:
    """A fixed number of aligned buffers of one group's block size, outside the secondary level.

    A buffer is taken by a file thread and given back when the copy out of it, or the write from it, is over. A reader takes one
    only for a Move whose copy can be submitted at once, so buffers always come back and waiting for one cannot deadlock.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def target(self, slot: int) -> Buffer | DirectRow:
        """What a file is read into, or written from."""
        raise NotImplementedError

    def take(self, timeout: float) -> int | None:
        """A buffer's slot in the arena; None when none came back within ``timeout`` seconds."""
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def give_back(self, slot: int) -> None:
        """The bytes of this buffer are no longer needed."""
        self._free.put(slot)


class StagingPool(Staging):
    """Buffers in host memory."""

    def __init__(self, num_buffers: int, block_bytes: int, pin: bool) -> None:
        self.arena = HostArena(num_buffers, block_bytes, pin)
        super().__init__(range(num_buffers))

    def target(self, slot: int) -> Buffer:
        row: Buffer = self.arena.padded_rows[slot]
        return row


class DirectStaging(Staging):
    """Some of the slots of the direct way's memory, on the device."""

    def __init__(self, group: GdsGroup, slots: Iterable[int]) -> None:
        self._rows = group.rows
        super().__init__(slots)

    def target(self, slot: int) -> DirectRow:
        return self._rows[slot]

"""``StagingPool``: where blocks from NVMe arrive and are verified before they enter a slot (design: transfer rules)."""

from __future__ import annotations

import queue

from kvtier.pools.host_arena import HostArena


class StagingPool:
    """A fixed number of aligned buffers of one group's block size, outside the secondary level.

    A buffer is taken by a reader thread and given back when the copy out of it is over. A reader takes one only for a
    Move whose copy can be submitted at once, so buffers always come back and waiting for one cannot deadlock.
    """

    def __init__(self, num_buffers: int, block_bytes: int, pin: bool) -> None:
        self.arena = HostArena(num_buffers, block_bytes, pin)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_buffers):
            self._free.put(slot)

    def take(self, timeout: float) -> int | None:
        """A buffer's slot in the arena; None when none came back within ``timeout`` seconds."""
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def give_back(self, slot: int) -> None:
        """The bytes of this buffer are no longer needed."""
        self._free.put(slot)

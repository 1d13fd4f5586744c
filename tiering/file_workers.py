"""``FileWorkers``: the threads that read and write the NVMe level for the transfer manager (design: transfer rules).

Reads have their own threads, so they never stand behind writes. The threads know neither the ledger nor the order of
Moves: they take nodes whose turn it is, and hand them back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.io.threads import start_thread
from kvtier.tiering import file_lane, hang_watch
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.read_lane import Read, ReadLane
from kvtier.tiering.staging import DirectStaging, StagingPool
from kvtier.tiering.transfer_graph import TransferNode, Work
from kvtier.tiering.write_lane import WriteLane


class FileWorkers:
    """Reader threads, one writer thread, and one that looks after them.

    Args:
        store: the NVMe store.
        staging: buffers by group.
        secondary: the secondary level's slots by group, uint8 ``[slots, padded block bytes]``; None where it has none.
        read_threads: how many reads run at once.
        reads_over: called by reader threads, no lock held, with nodes of one group (their errors set if they failed) and their staging
            buffers (-1: none). Takes the buffers over.
        writes_over: called by the writer thread, no lock held, with nodes whose errors are set where they failed.
        direct: buffers of the direct way by group, for reads.
        direct_writes: the direct way for writes.
        write_seconds: by group, how long the store's rate lets one write of a block take; empty without a rate.

    Raises:
        ConfigError: a thread cannot be started.
    """

    def __init__(self, store: BlockStore, staging: Sequence[StagingPool],
                 secondary: Sequence[npt.NDArray[np.uint8] | None], read_threads: int,
                 reads_over: Callable[[list[Read]], None],
                 writes_over: Callable[[list[TransferNode]], None], direct: Sequence[DirectStaging] = (),
                 direct_writes: DirectWrites | None = None, write_seconds: Sequence[float] = ()) -> None:
        self._reads = ReadLane(store, staging, direct, read_threads, reads_over)
        self._writes = WriteLane(store, secondary, writes_over, direct_writes, write_seconds)
        self._lanes = (self._reads, self._writes)
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(read_threads):
                self._threads.append(start_thread(self._reads.run, f"kvtier-read-{number}"))
            self._threads.append(start_thread(self._writes.run, "kvtier-write"))
            self._threads.append(start_thread(self._run_watch, "kvtier-watch"))
        except BaseException:
            self.close(1.0)
            raise

    def put(self, node: TransferNode) -> None:
        """Queue a node. Never blocks."""
        if node.work is Work.READ:
            self._reads.put(node)
        else:
            self._writes.put(node)

    @property
    def writes_hang(self) -> bool:
        """The writer has been in one call for so long that it may never come back."""
        return self._writes.is_stuck

    @property
    def failed_discards(self) -> int:
        """Slots whose rows could not be deleted."""
        return self._writes.failed_discards

    def cancel_queued(self) -> list[TransferNode]:
        """Stop beginning file operations, and give back what was queued. What runs goes on."""
        for lane in self._lanes:
            lane.closing = True
        return [node for lane in self._lanes for node in lane.take_queued()]

    def close(self, timeout: float) -> bool:
        """End the threads; False when one of them is still inside a file operation after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        self._ends.set()
        for lane in self._lanes:
            lane.closing = True
            lane.end()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def let_go(self) -> None:
        """Of the slots and of the manager, once ``close`` has returned True: in a cycle with it the slots' memory would stay mapped until
        the garbage collector comes by."""
        self._writes.let_go()
        self._reads.over = self._writes.over = _tell_nobody

    def _run_watch(self) -> None:
        while not self._ends.wait(file_lane.LOOK_UP if any(lane.is_stuck for lane in self._lanes) else hang_watch.HANG_SECONDS / 4):
            for lane in self._lanes:
                lane.give_up_hanging()


def _tell_nobody(*_: object) -> None:
    """Everything has been handed back."""

"""``FileWorkers``: the threads that read and write the NVMe level for the transfer manager (design: transfer rules).

Reads have their own threads, so they never stand behind writes. The threads know neither the ledger nor the order of
Moves: they take nodes whose turn it is, and hand them back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.io.copiers import DIRECT
from kvtier.io.direct_row import DirectRow
from kvtier.pools.pool_index import PoolIndex, slot_of
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.staging import DirectStaging, Staging, StagingPool
from kvtier.tiering.transfer_graph import TransferNode, Work

if TYPE_CHECKING:
    from kvtier.io.nvme_store import BlockWrite

_log = logging.getLogger(__name__)

MAX_WRITE_BATCH: Final = 64
"""Writes handed to the store in one call: their manifest rows are one transaction."""

PATIENCE: Final = 60.0
"""Seconds a file operation waits for memory it depends on (a staging buffer, the copy into its source slot) before it
fails. These are memory copies; one that takes longer hangs."""

_LOOK_UP: Final = 0.1
"""Seconds between two looks at whether the manager is being closed, while waiting."""


class BlockStore(Protocol):
    """What the transfer manager needs of the NVMe store. All calls may block on the disk; no lock is held around them."""

    @property
    def accepts_writes(self) -> bool:
        """False for a while after the disk was full or failing: stores are shed, loads are not."""

    def read_block(self, group: int, slot: int, key: bytes, out: npt.NDArray[np.uint8] | DirectRow) -> None:
        """Fill ``out`` (uint8, a padded row of a ``HostArena``, or a direct row) with the verified block. Thread-safe.

        Raises:
            CorruptBlock, TransferError: ``out`` is garbage.
        """

    def write_blocks(self, items: Sequence[BlockWrite]) -> Sequence[Exception | None]:
        """Write blocks and commit their rows; an error or None for each."""

    def discard(self, group: int, slots: Sequence[int]) -> None:
        """Commit the deletion of these slots' rows."""

    def quarantine(self, group: int, slot: int, reason: str) -> None:
        """Never use this slot again, and remember why."""


class FileWorkers:
    """Reader threads and one writer thread.

    Args:
        store: the NVMe store.
        staging: buffers by group.
        secondary: the secondary level's slots by group, uint8 ``[slots, padded block bytes]``; None where it has none.
        read_threads: how many reads run at once.
        read_over: called by a reader thread, no lock held, with the node (its error set if it failed) and its staging
            buffer (-1: none). Takes the buffer over.
        writes_over: called by the writer thread, no lock held, with nodes whose errors are set where they failed.
        direct: buffers of the direct way by group, for reads.
        direct_writes: the direct way for writes.
    """

    def __init__(self, store: BlockStore, staging: Sequence[StagingPool],
                 secondary: Sequence[npt.NDArray[np.uint8] | None], read_threads: int,
                 read_over: Callable[[TransferNode, int], None],
                 writes_over: Callable[[list[TransferNode]], None], direct: Sequence[DirectStaging] = (),
                 direct_writes: DirectWrites | None = None) -> None:
        # Not at the top: it brings SQLite with it, and a cache without an NVMe level needs none.
        from kvtier.io.nvme_store import BlockWrite
        self._block_write = BlockWrite
        self._store = store
        self._staging = staging
        self._direct = direct
        self._direct_writes = direct_writes
        self._secondary = secondary
        self._read_over = read_over
        self._writes_over = writes_over
        self._closing = False
        self._reads: SimpleQueue[TransferNode | None] = SimpleQueue()
        self._writes: SimpleQueue[TransferNode | None] = SimpleQueue()
        self.failed_discards = 0
        self._threads = [threading.Thread(target=self._run_reader, name=f"kvtier-read-{number}", daemon=True)
                         for number in range(read_threads)]
        self._threads.append(threading.Thread(target=self._run_writer, name="kvtier-write", daemon=True))
        for thread in self._threads:
            thread.start()

    def put(self, node: TransferNode) -> None:
        """Queue a node. Never blocks."""
        if node.work is Work.READ:
            self._reads.put(node)
        else:
            self._writes.put(node)

    def cancel_queued(self) -> list[TransferNode]:
        """Stop beginning file operations, and give back what was queued. What runs goes on."""
        self._closing = True
        cancelled: list[TransferNode] = []
        for waiting in (self._reads, self._writes):
            while True:
                try:
                    node = waiting.get_nowait()
                except Empty:
                    break
                if node is not None:
                    cancelled.append(node)
        return cancelled

    def close(self, timeout: float) -> bool:
        """End the threads; False when one of them is still inside a file operation after ``timeout`` seconds."""
        self._closing = True
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # -- reading --------------------------------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        while (node := self._reads.get()) is not None:
            buffer = -1
            try:
                buffer = self._read(node)
            except Exception as error:
                node.error = error
            self._hand_back(self._read_over, node, buffer)
            del node

    def _read(self, node: TransferNode) -> int:
        """Read one block into a staging buffer; returns the buffer, also after a failed read."""
        failure = node.source_failure()
        if failure is not None:
            raise failure
        staging: Staging = self._direct[node.group] if node.via == DIRECT else self._staging[node.group]
        buffer = self._take_buffer(staging, node)
        move = node.move
        assert move is not None
        slot = slot_of(move.source)
        start = time.perf_counter()
        try:
            self._store.read_block(node.group, slot, move.key, staging.target(buffer))
        except Exception as error:
            node.error = error
            self._quarantine(node.group, slot, error)
        node.seconds = time.perf_counter() - start
        return buffer

    def _take_buffer(self, staging: Staging, node: TransferNode) -> int:
        deadline = time.monotonic() + PATIENCE
        while not self._closing:
            buffer = staging.take(_LOOK_UP)
            if buffer is not None:
                return buffer
            if time.monotonic() > deadline:
                raise TransferError(f"{node.move}: no staging buffer came free within {PATIENCE:.0f} s; a copy hangs")
        raise cancelled(node)

    def _quarantine(self, group: int, slot: int, error: Exception) -> None:
        try:
            self._store.quarantine(group, slot, f"{type(error).__name__}: {error}")
        except Exception as second:
            error.add_note(f"the slot could not be quarantined either: {second}")
            _log.warning("group %d, NVMe slot %d: could not be quarantined: %s", group, slot, second)

    # -- writing --------------------------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        first: TransferNode | None = None
        while True:
            node = first if first is not None else self._writes.get()
            if node is None:
                return
            batch, first = self._take_batch(node)
            try:
                self._write(batch)
            except Exception as error:
                for failed in batch:
                    failed.error = failed.error or error
            self._hand_back(self._writes_over, batch)
            del batch, node

    def _take_batch(self, first: TransferNode) -> tuple[list[TransferNode], TransferNode | None]:
        """What is queued, up to the limit or to the next record for a slot that is written in this batch.

        In a batch discards go first, so a discard before a write of its slot may share its batch. Returns the batch,
        and the node that begins the next one.
        """
        batch = [first]
        written = {(first.group, first.destination)} if first.work is Work.WRITE else set()
        while len(batch) < MAX_WRITE_BATCH:
            try:
                node = self._writes.get_nowait()
            except Empty:
                break
            if node is None:
                self._writes.put(None)  # the end mark is for the next round
                break
            if (node.group, node.destination) in written:
                return batch, node
            if node.work is Work.WRITE:
                written.add((node.group, node.destination))
            batch.append(node)
        return batch, None

    def _write(self, batch: list[TransferNode]) -> None:
        if self._closing:
            for node in batch:
                node.error = cancelled(node)
            return
        self._discard([node for node in batch if node.work is Work.DISCARD])
        writes = [node for node in batch if node.work is Work.WRITE and node.via != DIRECT]
        if self._direct_writes is not None:
            self._direct_writes.write([node for node in batch if node.work is Work.WRITE and node.via == DIRECT])
        if not writes:
            return
        if not self._store.accepts_writes:
            for node in writes:
                node.error = TransferError(f"{node.move}: not stored: the NVMe store takes no writes for a while, "
                                           "because the disk is full or failing")
            return
        ready: list[TransferNode] = []
        items: list[BlockWrite] = []
        for node in writes:
            node.error = self._wait_for_source(node)
            if node.error is None:
                ready.append(node)
                items.append(self._item(node))
        if not ready:
            return
        start = time.perf_counter()
        errors = self._store.write_blocks(items)
        seconds = (time.perf_counter() - start) / len(ready)
        for node, error in zip(ready, errors, strict=True):
            node.error = error
            node.seconds = seconds

    def _discard(self, nodes: list[TransferNode]) -> None:
        slots: dict[int, list[int]] = {}
        for node in nodes:
            slots.setdefault(node.group, []).append(slot_of(PoolIndex(node.destination)))
        for group, members in slots.items():
            try:
                self._store.discard(group, members)
            except Exception as error:
                # The rows stay: after a restart these blocks are found again and are right, but nobody wanted them.
                self.failed_discards += len(members)
                _log.warning("group %d: %d NVMe rows could not be deleted: %s", group, len(members), error)

    def _wait_for_source(self, node: TransferNode) -> TransferError | None:
        """Wait on the host for the copy into the source slot; why the source cannot be written, or None."""
        writer = node.writer
        event = writer.event if writer is not None else None
        if event is not None:
            deadline = time.monotonic() + PATIENCE
            while not event.wait(_LOOK_UP):
                if self._closing:
                    return cancelled(node)
                if time.monotonic() > deadline:
                    return TransferError(f"{node.move}: the copy into its source was not over within {PATIENCE:.0f} s")
            if event.error is not None:  # an error of the device reaches the event before it reaches the node
                return TransferError(f"{node.move}: the copy into its source failed: {event.error}")
        return node.source_failure()

    def _item(self, node: TransferNode) -> BlockWrite:
        move = node.move
        rows = self._secondary[node.group]
        assert move is not None
        assert rows is not None
        return self._block_write(group=node.group, slot=slot_of(move.destination), key=move.key,
                                 data=rows[slot_of(move.source)], priority=move.priority, expiry=move.expiry)

    @staticmethod
    def _hand_back(call: Callable[..., None], *arguments: object) -> None:
        """An error in the manager's own code must not end the thread: every later Move would hang."""
        try:
            call(*arguments)
        except Exception:
            _log.exception("handing back a file operation failed")


def cancelled(node: TransferNode) -> TransferError:
    """The error of a file operation that was not begun because the manager is being closed."""
    return TransferError(f"{node.move}: cancelled, because the cache is being closed")

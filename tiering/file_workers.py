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
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, TransferError
from kvtier.io.copiers import DIRECT
from kvtier.io.direct_row import DirectRow
from kvtier.io.incident import Incident
from kvtier.io.threads import start_thread
from kvtier.pools.pool_index import PoolIndex, slot_of
from kvtier.tiering import hang_watch
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.hang_watch import HangWatch
from kvtier.tiering.run_queue import RunQueue
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

    def most_ahead(self, group: int) -> int:
        """How many neighbouring slots ``read_ahead`` may take at once, at least 1."""

    def read_ahead(self, group: int, first_slot: int, outs: Sequence[npt.NDArray[np.uint8]]) -> Sequence[npt.NDArray[np.uint8]]:
        """Read neighbouring slots with one call and without a check; for each what ``read_block`` wants as ``arrived``.

        Raises:
            TransferError: nothing is known of any of the blocks.
        """

    def read_block(self, group: int, slot: int, key: bytes, out: npt.NDArray[np.uint8] | DirectRow,
                   arrived: npt.NDArray[np.uint8] | None = None) -> None:
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


class _Arrival(NamedTuple):
    """What a call for several slots brought for one of them: the block in its staging buffer, its header page, its share of the time."""

    buffer: int
    page: npt.NDArray[np.uint8]
    seconds: float


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
        write_seconds: by group, how long the store's rate lets one write of a block take; empty without a rate.

    Raises:
        ConfigError: a thread cannot be started.
    """

    def __init__(self, store: BlockStore, staging: Sequence[StagingPool],
                 secondary: Sequence[npt.NDArray[np.uint8] | None], read_threads: int,
                 read_over: Callable[[TransferNode, int], None],
                 writes_over: Callable[[list[TransferNode]], None], direct: Sequence[DirectStaging] = (),
                 direct_writes: DirectWrites | None = None, write_seconds: Sequence[float] = ()) -> None:
        # Not at the top: it brings SQLite with it, and a cache without an NVMe level needs none.
        from kvtier.io.nvme_store import BlockWrite
        self._block_write = BlockWrite
        self._store = store
        self._staging = staging
        self._direct = direct
        self._direct_writes = direct_writes
        self._secondary = secondary
        self._write_seconds = write_seconds
        self._read_over = read_over
        self._writes_over = writes_over
        self._closing = False
        self._reads = RunQueue()
        self._most_ahead = [store.most_ahead(group) for group in range(len(staging))]
        self._writes: SimpleQueue[TransferNode | None] = SimpleQueue()
        self.failed_discards = 0
        self._failed_discard, self._failed_quarantine = Incident(_log), Incident(_log)
        self._reading, self._writing = HangWatch(read_threads), HangWatch(1)
        self._hanging_reads, self._hanging_writes = Incident(_log), Incident(_log)
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(read_threads):
                self._threads.append(start_thread(self._run_reader, f"kvtier-read-{number}"))
            self._threads.append(start_thread(self._run_writer, "kvtier-write"))
            self._threads.append(start_thread(self._run_watch, "kvtier-watch"))
        except ConfigError:
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
        return self._writing.is_stuck

    def cancel_queued(self) -> list[TransferNode]:
        """Stop beginning file operations, and give back what was queued. What runs goes on."""
        self._closing = True
        return [*take_all(self._reads), *take_all(self._writes)]

    def close(self, timeout: float) -> bool:
        """End the threads; False when one of them is still inside a file operation after ``timeout`` seconds."""
        self._closing = True
        deadline = time.monotonic() + timeout
        self._ends.set()
        for _ in self._threads:
            self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def let_go(self) -> None:
        """Of the slots and of the manager, once ``close`` has returned True: in a cycle with it the slots' memory would stay mapped until
        the garbage collector comes by."""
        self._secondary, self._direct_writes = (), None
        self._read_over = self._writes_over = _tell_nobody

    # -- reading --------------------------------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        while run := self._reads.get_run(self._most_ahead):
            self._read_run(run)
            del run  # an idle thread keeps nothing alive

    def _read_run(self, run: list[TransferNode]) -> None:
        """Read what was taken together, and hand back each as soon as it is over."""
        arrivals = self._arrivals(run)
        for position, (node, arrival) in enumerate(arrivals):
            buffer: int | None = -1
            try:
                buffer = self._read(node, arrival, run[position + 1:len(arrivals)])
            except Exception as error:
                node.error = error
            if buffer is None:  # it hung, and those behind it have been handed back, too
                self._give_back(arrivals[position + 1:])
                return
            self._hand_back(self._read_over, node, buffer)

    def _arrivals(self, run: list[TransferNode]) -> list[tuple[TransferNode, _Arrival | None]]:
        """Read a run of neighbours with one call, as far as there are buffers; the rest waits again. Each node with what came of it:
        None where it is to be read on its own, because it is alone or because the call failed and each needs its own answer."""
        if len(run) == 1 or self._closing or any(node.source_failure() is not None or node.via == DIRECT for node in run):
            return [(node, None) for node in run]
        group = run[0].group
        staging = self._staging[group]
        buffers: list[int] = []
        while len(buffers) < len(run) and (buffer := staging.take(0.0)) is not None:
            buffers.append(buffer)
        if len(buffers) < 2:
            for buffer in buffers:
                staging.give_back(buffer)
            self._reads.put_back(run[1:])
            return [(run[0], None)]
        self._reads.put_back(run[len(buffers):])
        run = run[:len(buffers)]
        self._reading.begin(run[0], len(run), run[1:])
        start = time.perf_counter()
        pages: Sequence[npt.NDArray[np.uint8]] = ()
        try:
            first = slot_of(PoolIndex(run[0].source))
            pages = self._store.read_ahead(group, first, [staging.arena.padded_rows[buffer] for buffer in buffers])
        except Exception as error:
            _log.debug("group %d: %d slots could not be read at once: %s", group, len(run), error)
        share = (time.perf_counter() - start) / len(run)
        if not self._reading.end(run[0]):  # it hung, and all have been handed back long since
            pages, run = (), []
        if pages:
            return [(node, _Arrival(buffer, page, share)) for node, buffer, page in zip(run, buffers, pages, strict=True)]
        for buffer in buffers:
            staging.give_back(buffer)
        return [(node, None) for node in run]

    def _give_back(self, arrivals: list[tuple[TransferNode, _Arrival | None]]) -> None:
        for node, arrival in arrivals:
            if arrival is not None:
                self._staging[node.group].give_back(arrival.buffer)

    def _read(self, node: TransferNode, arrival: _Arrival | None, behind: list[TransferNode]) -> int | None:
        """Read one block into a staging buffer, or only verify it there; returns the buffer, also after a failed read. None after
        one that hung: the node and those behind it have been handed back long since."""
        lost = node.source_failure()
        if lost is not None:
            if arrival is not None:
                self._staging[node.group].give_back(arrival.buffer)
            raise lost
        staging: Staging = self._direct[node.group] if node.via == DIRECT else self._staging[node.group]
        buffer = arrival.buffer if arrival is not None else self._take_buffer(staging, node)
        move = node.move
        assert move is not None
        slot = slot_of(move.source)
        start = time.perf_counter()
        failure: Exception | None = None
        self._reading.begin(node, behind=behind)
        try:
            out = staging.target(buffer)
            if arrival is None:
                self._store.read_block(node.group, slot, move.key, out)
            else:
                self._store.read_block(node.group, slot, move.key, out, arrival.page)
        except Exception as error:
            failure = error
            if self._reading.is_awaited(node):  # otherwise the slot may hold something else by now
                self._quarantine(node.group, slot, error)
        if not self._reading.end(node):
            staging.give_back(buffer)
            return None
        node.error = failure
        node.seconds = time.perf_counter() - start + (arrival.seconds if arrival is not None else 0.0)
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
            self._failed_quarantine.warn("group %d, NVMe slot %d: could not be quarantined: %s", group, slot, second)

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
        self._writing.begin(batch[0])
        self._discard([node for node in batch if node.work is Work.DISCARD])
        self._writing.end(batch[0])
        direct = [node for node in batch if node.work is Work.WRITE and node.via == DIRECT]
        if self._direct_writes is not None and direct:
            self._writing.begin(batch[0], len(direct), on_purpose=self._spread(direct))
            try:
                self._direct_writes.write(direct)
            finally:
                self._writing.end(batch[0])
        writes = [node for node in batch if node.work is Work.WRITE and node.via != DIRECT]
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
        self._writing.begin(batch[0], len(items), on_purpose=self._spread(ready))
        try:
            errors = self._store.write_blocks(items)
        finally:
            self._writing.end(batch[0])
        seconds = (time.perf_counter() - start) / len(ready)
        for node, error in zip(ready, errors, strict=True):
            node.error = error
            node.seconds = seconds

    def _spread(self, nodes: list[TransferNode]) -> float:
        """Seconds that the rate may spread these writes over, behind the last write before them."""
        if not self._write_seconds:
            return 0.0
        return sum(self._write_seconds[node.group] for node in nodes) + max(self._write_seconds)

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
                self._failed_discard.warn("group %d: %d NVMe rows could not be deleted: %s", group, len(members), error)

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

    # -- operations that hang ---------------------------------------------------------------------------------------------

    def _run_watch(self) -> None:
        while not self._ends.wait(_LOOK_UP if self._reading.is_stuck or self._writing.is_stuck else hang_watch.HANG_SECONDS / 4):
            for node in self._reading.overdue():
                self._hanging_reads.warn("%s: an NVMe read hangs; what it was to bring is computed again", node.move)
                node.error = hung(node)
                self._hand_back(self._read_over, node, -1)
            for node in self._writing.overdue():
                # It is not handed back: the call may still take its bytes from the source slot.
                self._hanging_writes.warn("%s: an NVMe write hangs; nothing more is stored until it comes back", node.move or "discard")
            if self._reading.is_stuck:
                for node in take_all(self._reads):
                    node.error = hung(node)
                    self._hand_back(self._read_over, node, -1)
            if self._writing.is_stuck:
                waiting = take_all(self._writes)
                for node in waiting:
                    node.error = hung(node)
                    self.failed_discards += node.work is Work.DISCARD
                if waiting:
                    self._hand_back(self._writes_over, waiting)

    @staticmethod
    def _hand_back(call: Callable[..., None], *arguments: object) -> None:
        """An error in the manager's own code must not end the thread: every later Move would hang."""
        try:
            call(*arguments)
        except Exception:
            _log.exception("handing back a file operation failed")


def _tell_nobody(*_: object) -> None:
    """Everything has been handed back."""


def take_all(waiting: SimpleQueue[TransferNode | None] | RunQueue) -> list[TransferNode]:
    """What is queued. The marks that end threads stay."""
    taken: list[TransferNode] = []
    marks = 0
    while True:
        try:
            node = waiting.get_nowait()
        except Empty:
            break
        if node is None:
            marks += 1
        else:
            taken.append(node)
    for _ in range(marks):
        waiting.put(None)
    return taken


def hung(node: TransferNode) -> TransferError:
    """The error of a file operation that hangs, or is queued behind those that do."""
    return TransferError(f"{node.move or 'discard'}: given up, because file operations hang for more than {hang_watch.HANG_SECONDS:.0f} s")


def cancelled(node: TransferNode) -> TransferError:
    """The error of a file operation that was not begun because the manager is being closed."""
    return TransferError(f"{node.move}: cancelled, because the cache is being closed")

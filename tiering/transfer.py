"""``TransferManager``: carries out the ledger's Moves and reports what finished (design: transfer rules).

Moves between memories go to two streams, ordered by events. Moves with an NVMe end go to file threads and are confirmed
on the host before any stream may depend on them. Nothing here knows blocks, queues or the tree.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError, TransferError
from kvtier.io.copiers import DIRECT
from kvtier.io.device import Device, EngineStream
from kvtier.io.incident import Incident
from kvtier.io.streams import Event, Stream
from kvtier.pools.group_pools import GroupMemory
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import NVME, PRIMARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.tiering.copy_batch import CopyBatch, FaultPoint
from kvtier.tiering.debug_path import DebugPath
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.file_workers import BlockStore, FileWorkers, cancelled
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.order_check import OrderCheck
from kvtier.tiering.routes import Routes
from kvtier.tiering.transfer_graph import NodeState, TransferGraph, TransferNode, Work
from kvtier.tiering.transfer_results import CompletionQueue, MoveResult, TransferCounters
from kvtier.tiering.transfer_waiting import as_exception, deadline_of, is_over, is_past_files, seconds_left, waits_for_file

if TYPE_CHECKING:
    from kvtier.io.gds import GdsPath

__all__ = ["MoveResult", "TransferCounters", "TransferManager"]

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 128 << 20
"""A batch of copies ends here, so that what waits for one of its first blocks does not wait for a gigabyte."""


class TransferManager:
    """Two copy streams, reader threads, a writer thread, and the order between them.

    Thread-safe. One lock guards the order; nothing is copied, read, written or waited for while it is held.

    Args:
        device: where the primary pool is.
        pools: by group number.
        store: the NVMe level; None without one.
        faults: injected into copies. The store has its own for files.
        read_threads: file reads at once.
        staging_blocks, staging_bytes: what may be between file and slot at once, per group; of small blocks, so many bytes.
        gds: the direct way between primary level and NVMe, with memory for ``staging_blocks + WRITE_ROWS`` blocks of each group; None
            without one. The caller closes it after this.
        debug: the way through files of a request's own; None without one. It is started and closed here.
        check_order: look at the order of all accesses a second time; LedgerError where nothing orders two of them.
        write_bytes_per_second: to which the store spreads its writes out: taking that long is not hanging. None: it does not.

    Raises:
        ConfigError: fewer than one read thread or staging block, no memory for the staging blocks, or no thread to be had.
    """

    def __init__(self, device: Device, pools: Sequence[GroupMemory], store: BlockStore | None, *,
                 faults: FaultPoint | None = None, read_threads: int = 2, staging_blocks: int = 4, staging_bytes: int = 0,
                 gds: GdsPath | None = None, debug: DebugPath | None = None, check_order: bool = False,
                 write_bytes_per_second: float | None = None) -> None:
        if read_threads < 1 or staging_blocks < 1:
            raise ConfigError(f"read_threads={read_threads}, staging_blocks={staging_blocks}: both must be at least 1, "
                              "or nothing would ever be read from NVMe")
        self._device = device
        self._block_bytes = [pool.group.block_bytes for pool in pools]
        self._faults = faults
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._graph = TransferGraph(len(pools))
        self._check = OrderCheck() if check_order else None
        self._open: dict[int, CopyBatch] = {}
        self._ready: list[TransferNode] = []
        self._completed = CompletionQueue([pool.group for pool in pools])
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._outstanding = 0
        self._sequence = 0
        self._closing = False
        self._abandoned = False
        self._failed_copies = Incident(_log)
        self._files: FileWorkers | None = None
        self._debug = debug
        with ExitStack() as undo:  # pinned memory and threads do not go away by themselves
            self._routes = Routes(device.name, pools, store is not None, staging_blocks, staging_bytes, gds, debug)
            undo.callback(self._routes.close)
            self._offload = device.stream("offload")
            undo.callback(self._offload.close, 1.0)
            self._onboard = device.stream("onboard")
            undo.callback(self._onboard.close, 1.0)
            if debug is not None:
                undo.callback(debug.close, 1.0)
                debug.start(self._read_over)
            if store is not None:
                secondary = [pool.secondary.padded_rows if pool.secondary is not None else None for pool in pools]
                rows = self._routes.direct_write_rows
                writes = DirectWrites(store, rows, self._copy_out) if rows else None
                seconds = [] if write_bytes_per_second is None else [NvmeGeometry(size, 0).stride / write_bytes_per_second
                                                                     for size in self._block_bytes]
                self._files = FileWorkers(store, self._routes.staging, secondary, read_threads, self._read_over,
                                          self._writes_over, self._routes.direct, writes, seconds)
            undo.pop_all()

    # -- issuing ---------------------------------------------------------------------------------------------------------

    def issue(self, records: Sequence[Move | Discard]) -> None:
        """Queue records, in the order of their numbers. Never waits for a copy or a file.

        Raises:
            TransferError: the manager is closed, or a record asks for a route that does not exist (no such group, no NVMe
                store, no secondary level in this group, from or to NVMe without staging). Nothing has been queued then.
        """
        nodes = [self._node(record) for record in records]
        with self._lock:
            if self._check is not None:
                self._check.raise_if_violated()
            if self._closing:
                raise TransferError("transfers are closed; no Move can be issued any more")
            self._outstanding += len(nodes)
            for node in nodes:
                self._graph.add(node)
                if node.blockers == 0:
                    self._start(node)
            self._submit_all()

    def _node(self, record: Move | Discard) -> TransferNode:
        if not 0 <= record.group < len(self._block_bytes):
            raise TransferError(f"record {record.number}: group {record.group}; there are groups 0 to {len(self._block_bytes) - 1}")
        if isinstance(record, Discard):
            if self._files is None:
                raise TransferError(f"discard of NVMe slot {record.slot}: there is no NVMe store")
            return TransferNode(Work.DISCARD, record.number, record.group, -1, pool_index(NVME, record.slot), None)
        return self._routes.node(record)

    def _start(self, node: TransferNode) -> None:
        """Nothing holds the node back: batch a copy, queue a file operation. Lock held."""
        for earlier in node.depends:
            if earlier.state is NodeState.OPEN and earlier.batch is not None:
                self._submit(earlier.batch)
        if node.work is Work.COPY:
            self._batch(node)
            return
        node.state = NodeState.QUEUED
        files = self._debug if node.is_debugged else self._files
        assert files is not None
        if not self._closing:
            if self._check is not None:
                self._check.file(node)
            files.put(node)
            return
        node.error = cancelled(node)
        if node.work is Work.READ:
            self._submit_read(node, -1)
        else:
            self._finish(node)

    def _batch(self, node: TransferNode) -> None:
        """Put a copy with others that have the same route and are independent of it. Lock held."""
        move = node.move
        assert move is not None
        source, destination = level_of(move.source), level_of(move.destination)
        route = node.group << 4 | destination << 2 | source
        batch = self._open.get(route)
        if batch is None or move.num_tokens:
            batch = CopyBatch(route, self._offload if destination > source else self._onboard,
                              self._routes.copier(node.group, source, destination), self._faults, move.num_tokens)
            batch.add(node)
            if move.num_tokens:
                self._submit(batch)
            else:
                self._open[route] = batch
            return
        batch.add(node)
        if len(batch.nodes) * self._block_bytes[node.group] >= MAX_BATCH_BYTES:
            self._submit(batch)

    def _submit(self, batch: CopyBatch) -> None:
        """Give a batch to its stream; what was held back for these nodes may start. Lock held."""
        if self._open.get(batch.route) is batch:
            del self._open[batch.route]
        if self._abandoned:  # the pools may be gone
            for node in batch.nodes:
                node.error = node.error or cancelled(node)
                self._finish(node)
            return
        self._sequence += 1
        batch.plan()
        event = batch.stream.submit(batch.run, tuple(batch.after), lambda event: self._copies_over(batch, event))
        if self._check is not None:
            self._check.copies(batch, event)
        for node in batch.nodes:
            node.event = event
            node.stream = batch.stream
            node.sequence = self._sequence
            node.state = NodeState.SUBMITTED
            if node.dependents:
                self._hold_no_longer(node)

    def _submit_read(self, node: TransferNode, buffer: int) -> None:
        """Submit the copy out of a staging buffer. Lock held.

        Also after a failed read, when the stream has nothing to copy: the node is then over only when what it was ordered
        behind is over, and whoever writes the slot next may rely on that.
        """
        move = node.move
        assert move is not None
        assert buffer >= 0 or node.error is not None
        destination = level_of(move.destination)
        batch = CopyBatch(node.group << 4 | destination << 2 | NVME, self._onboard, self._routes.copier_behind_file(node), self._faults,
                          move.num_tokens, buffer)
        batch.add(node)
        self._submit(batch)

    def _copy_out(self, node: TransferNode, buffer: int) -> Event:
        """Copy a primary slot into the direct way's memory, for the writer thread, behind what wrote the slot."""
        with self._lock:
            if self._abandoned:
                raise cancelled(node)
            copier = self._routes.copier(node.group, PRIMARY, DIRECT)
            pairs = [(slot_of(PoolIndex(node.source)), buffer)]
            after = tuple([earlier.event for earlier in node.depends if earlier.event is not None and not earlier.event.is_done()])
            return self._offload.submit(lambda: copier.copy(pairs), after)

    def _hold_no_longer(self, node: TransferNode) -> None:
        for dependent in self._graph.release(node):
            heapq.heappush(self._ready, dependent)

    def _submit_all(self) -> None:
        """Start what became free, lowest number first, and submit what is still open. Lock held."""
        while self._ready or self._open:
            if self._ready:
                self._start(heapq.heappop(self._ready))
            else:
                self._submit(next(iter(self._open.values())))

    # -- finishing, called by streams and file threads -------------------------------------------------------------------

    def _copies_over(self, batch: CopyBatch, event: Event) -> None:
        with self._lock:
            share = batch.seconds / len(batch.nodes)
            for node in batch.nodes:
                if event.error is not None and node.error is None:
                    node.error = as_exception(event.error)
                node.seconds += share
                self._finish(node)
            if batch.staging_slot >= 0:
                self._routes.staging_of(batch.nodes[0]).give_back(batch.staging_slot)
            self._changed.notify_all()
        if batch.failure is not None:
            self._failed_copies.warn("copies between memories fail, what they carried is computed again: %s", batch.failure)
        self._tell_listeners()

    def _read_over(self, node: TransferNode, buffer: int) -> None:
        with self._lock:
            self._submit_read(node, buffer)
            self._submit_all()
            self._changed.notify_all()
        self._tell_listeners()  # not over yet, but confirmed: whoever asked pending_files may ask again

    def _writes_over(self, nodes: list[TransferNode]) -> None:
        with self._lock:
            for node in nodes:
                self._finish(node)
            self._submit_all()
            self._changed.notify_all()
        self._tell_listeners()

    def _finish(self, node: TransferNode) -> None:
        """Report a node. Lock held. The result is in the queue before anybody who waits for the node can go on."""
        if node.dependents:
            self._hold_no_longer(node)
        self._graph.finish(node)
        self._outstanding -= 1
        if node.move is not None:
            self._completed.add(node.move, node.error, node.seconds)

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                _log.exception("a transfer listener failed")

    # -- reporting and waiting ---------------------------------------------------------------------------------------------

    def drain(self) -> list[MoveResult]:
        """What has finished since the last call, in order of completion; each Move exactly once."""
        return self._completed.drain()

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever something finished: from our threads, no lock held; it must be quick."""
        with self._lock:
            self._listeners += (callback,)

    def remove_listener(self, callback: Callable[[], None]) -> None:
        """Undo ``add_listener``; a call that is under way may still come."""
        with self._lock:
            self._listeners = tuple(listener for listener in self._listeners if listener != callback)

    def pending_files(self, group: int, indices: Iterable[PoolIndex]) -> bool:
        """Whether a file has to be read (or written) before what is pending on these slots can be put on a stream.

        While this is True no stream may be ordered behind these slots.
        """
        with self._lock:
            return any(waits_for_file(node) for node in self._graph.pending(group, indices))

    def wait(self, group: int, indices: Iterable[PoolIndex], timeout: float | None) -> bool:
        """Wait until the writes pending on these slots now are over, file reads included, and their results can be drained.

        Returns:
            False when ``timeout`` seconds were not enough, or when the manager was closed without them.
        """
        with self._lock:
            return self._wait_locked(self._graph.pending_writes(group, indices), is_over, deadline_of(timeout))

    def wait_for_files(self, group: int, indices: Iterable[PoolIndex], timeout: float | None) -> bool:
        """Wait until ``pending_files`` is False: a copy out of such a slot that is held behind a file keeps the engine from
        writing to it, too.

        Returns:
            False when ``timeout`` seconds were not enough, or when the manager was closed without that.
        """
        with self._lock:
            return self._wait_locked(self._graph.pending(group, indices), is_past_files, deadline_of(timeout))

    def order_before_engine(self, engine_stream: EngineStream | None, group: int, indices: Iterable[PoolIndex],
                            timeout: float | None) -> bool:
        """Let the engine use these slots only after every read and write pending on them now.

        On CUDA the engine's stream waits; on the CPU this call does, and the results can be drained when it returns. What
        still waits for a file is waited for on the host (``pending_files`` says so before).

        Returns:
            False when ``timeout`` seconds were not enough; the engine must not use the slots then.
        """
        deadline = deadline_of(timeout)
        with self._lock:
            indices = list(indices)
            nodes = self._graph.pending(group, indices)
            since = 0 if self._check is None else self._check.num_uses
            if not nodes:
                self._engine_begins((), group, indices, since)
                return True
            if not self._wait_locked(nodes, is_past_files, deadline):
                return False
            # On one stream the last event stands for all before it.
            last: dict[Stream, TransferNode] = {}
            for node in nodes:
                if node.stream is not None and node.state is not NodeState.DONE \
                        and (node.stream not in last or last[node.stream].sequence < node.sequence):
                    last[node.stream] = node
            events = [node.event for node in last.values() if node.event is not None]
            self._engine_begins(events, group, indices, since)
        if not self._device.engine_waits(engine_stream, events, seconds_left(deadline)):
            return False
        if not all(event.is_done() for event in events):
            return True  # the device waits for them
        with self._lock:
            return self._wait_locked(nodes, is_over, deadline)

    def order_after_engine(self, engine_stream: EngineStream | None) -> None:
        """Copies issued from now on wait for what the engine has enqueued so far."""
        event = self._device.engine_event(engine_stream)
        if self._check is not None:
            with self._lock:
                self._check.engine_ends((self._offload.name, self._onboard.name), event.is_done())
        if event.is_done():
            return
        with self._lock:
            if not self._closing:
                for stream in (self._offload, self._onboard):
                    stream.submit(_nothing, (event,))

    def _engine_begins(self, events: Iterable[Event], group: int, indices: Iterable[PoolIndex], since: int) -> None:
        if self._check is not None:
            self._check.engine_begins(events, [(group, index) for index in indices], since)
            self._check.raise_if_violated()

    def _wait_locked(self, nodes: list[TransferNode], reached: Callable[[TransferNode], bool], deadline: float | None) -> bool:
        """Wait until all nodes have reached a state. Lock held, and given up while waiting."""
        while True:
            nodes = [node for node in nodes if not reached(node)]
            if not nodes:
                return True
            left = seconds_left(deadline)
            if self._abandoned or (left is not None and left <= 0.0):
                return False
            self._changed.wait(left)

    def idle(self, timeout: float | None) -> bool:
        """Wait until everything issued has finished; False when ``timeout`` seconds were not enough."""
        deadline = deadline_of(timeout)
        with self._lock:
            while self._outstanding:
                left = seconds_left(deadline)
                if self._abandoned or (left is not None and left <= 0.0):
                    return False
                self._changed.wait(left)
            return True

    def stats(self) -> dict[str, TransferCounters]:
        """Counters by "source->destination" level names, such as ``"secondary->primary"``; routes never used are absent."""
        with self._lock:
            return self._completed.counters()

    def verify(self) -> None:
        """With ``check_order``, raise LedgerError when nothing ordered two uses of a slot."""
        if self._check is not None:
            with self._lock:
                self._check.raise_if_violated()

    @property
    def failed_discards(self) -> int:
        """NVMe slots whose rows could not be deleted. The next write of such a slot deletes its row first."""
        return self._files.failed_discards if self._files is not None else 0

    @property
    def writes_hang(self) -> bool:
        """NVMe writes do not come back: further ones would only hold their source slots."""
        return self._files is not None and self._files.writes_hang

    # -- closing -----------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> bool:
        """Take no more Moves, fail the file operations that have not begun, and wait for what runs.

        Returns:
            True when nothing runs any more. False when something was still running after ``timeout`` seconds: the memory
            of the pools must not be freed then, because a copy or a read may still be using it. Moves that hang are not
            reported. May be called again.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closing = True
        if self._files is not None or self._debug is not None:
            waiting = [node for files in (self._files, self._debug) if files is not None for node in files.cancel_queued()]
            with self._lock:
                for node in waiting:
                    node.error = cancelled(node)
                    if node.work is Work.READ:
                        self._submit_read(node, -1)
                    else:
                        self._finish(node)
                self._submit_all()
                self._changed.notify_all()
            if waiting:
                self._tell_listeners()
        is_idle = self.idle(timeout)
        with self._lock:
            self._abandoned = True
            self._changed.notify_all()
        self._tell_listeners()  # also of what will never be reported
        # Idle threads end at once; a little time is theirs even when the copies took all of it.
        spare = 0.5 if is_idle else 0.0
        ended = [worker.close(max(deadline - time.monotonic(), spare))
                 for worker in (self._files, self._debug, self._offload, self._onboard) if worker is not None]
        if is_idle and all(ended):
            self._routes.close()
            if self._debug is not None:
                self._debug.let_go()
                self._debug = None
            return True
        return False


def _nothing() -> None:
    """Work that only marks a place in a stream."""

"""``TransferManager``: carries out the ledger's Moves and reports what finished (design: transfer rules).

Moves between memories go to two streams, ordered by events; loads in pieces by layers, where that is worth it. Moves with an NVMe
end go to file threads and are confirmed on the host before any stream may depend on them. Nothing here knows blocks, queues or the
tree.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from kvtier.errors import ConfigError, TransferError
from kvtier.io.copiers import DIRECT
from kvtier.io.device import Device
from kvtier.io.gds import GdsPath
from kvtier.io.incident import Incident
from kvtier.io.streams import Event
from kvtier.pools.group_pools import GroupMemory
from kvtier.pools.layout import LayerGroup
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.copy_batch import CopyBatch, FaultPoint
from kvtier.tiering.debug_path import DebugPath
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.file_lane import cancelled
from kvtier.tiering.file_workers import FileWorkers
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.read_lane import Read
from kvtier.tiering.routes import Routes
from kvtier.tiering.transfer_graph import NodeState, TransferNode, Work
from kvtier.tiering.transfer_results import CompletionQueue, MoveResult, TransferCounters
from kvtier.tiering.transfer_waiting import TransferWaiting

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 128 << 20
"""A batch of copies ends here, so that what waits for one of its first blocks does not wait for a gigabyte."""


class TransferManager(TransferWaiting):
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
        layer_pieces: into how many pieces, by layers, a copy from the secondary to the primary level is cut at most.

    Raises:
        ConfigError: fewer than one read thread or staging block, no memory for the staging blocks, or no thread to be had.
    """

    def __init__(self, device: Device, pools: Sequence[GroupMemory], store: BlockStore | None, *,
                 faults: FaultPoint | None = None, read_threads: int = 2, staging_blocks: int = 4, staging_bytes: int = 0,
                 gds: GdsPath | None = None, debug: DebugPath | None = None, check_order: bool = False,
                 write_bytes_per_second: float | None = None, layer_pieces: int = 1) -> None:
        if read_threads < 1 or staging_blocks < 1:
            raise ConfigError(f"read_threads={read_threads}, staging_blocks={staging_blocks}: both must be at least 1, "
                              "or nothing would ever be read from NVMe")
        super().__init__(device, len(pools), check_order)
        self._block_bytes = [pool.group.block_bytes for pool in pools]
        self._layers = [pool.group.layers if isinstance(pool.group, LayerGroup) else range(1) for pool in pools]  # of the model
        self._faults = faults
        self._layer_pieces = layer_pieces
        self._open: dict[int, CopyBatch] = {}
        self._full: list[CopyBatch] = []
        self._ready: list[TransferNode] = []
        self._completed = CompletionQueue([pool.group for pool in pools])
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._sequence = 0
        self._failed_copies = Incident(_log)
        self._files: FileWorkers | None = None
        self._debug = debug
        undo = ExitStack()
        try:  # pinned memory and threads do not go away by themselves
            self._routes = Routes(device.name, pools, store is not None, staging_blocks, staging_bytes, gds, debug)
            undo.callback(self._routes.close)
            self._offload = device.stream("offload")
            undo.callback(self._offload.close, 1.0)
            self._onboard = device.stream("onboard")
            undo.callback(self._onboard.close, 1.0)
            if debug is not None:
                undo.callback(debug.close, 1.0)
                debug.start(self._reads_over)
            if store is not None:
                secondary = [pool.secondary.padded_rows if pool.secondary is not None else None for pool in pools]
                rows = self._routes.direct_write_rows
                writes = DirectWrites(store, rows, self._copy_out) if rows else None
                seconds = [] if write_bytes_per_second is None else [NvmeGeometry(size, 0).stride / write_bytes_per_second
                                                                     for size in self._block_bytes]
                self._files = FileWorkers(store, self._routes.staging, secondary, read_threads, self._reads_over,
                                          self._writes_over, self._routes.direct, writes, seconds)
        except BaseException:
            undo.close()
            raise

    # -- issuing ---------------------------------------------------------------------------------------------------------

    def issue(self, records: Sequence[Move | Discard]) -> None:
        """Queue records, in the order of their numbers. Never waits for a copy or a file.

        Raises:
            TransferError: the manager is closed, or a record asks for a route that does not exist (no such group, no NVMe
                store, no secondary level in this group, from or to NVMe without staging). Nothing has been queued then.
        """
        self._check_open()  # a closed one has no routes either
        nodes = [self._node(record) for record in records]
        with self._lock:
            if self._check is not None:
                self._check.raise_if_violated()
            self._check_open()
            self._outstanding += len(nodes)
            for node in nodes:
                self._graph.add(node)
                if node.blockers == 0:
                    self._start(node)
            self._submit_all()

    def let_begin(self) -> None:
        """Make way for what was just issued (``Stream.let_begin``). Called with no lock held."""
        self._offload.let_begin()
        self._onboard.let_begin()

    def _check_open(self) -> None:
        if self._closing:
            raise TransferError("transfers are closed; no Move can be issued any more")

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
            self._submit_reads([(node, -1)])
        else:
            self._finish(node)

    def _batch(self, node: TransferNode) -> None:
        """Put a copy with others that have the same route and are independent of it. Lock held."""
        move = node.move
        assert move is not None
        source, destination = level_of(move.source), level_of(move.destination)
        route = move.num_tokens << 32 | node.group << 4 | destination << 2 | source  # those of as many tokens go together
        batch = self._open.get(route)
        if batch is None:
            batch = CopyBatch(route, self._offload if destination > source else self._onboard,
                              self._routes.copier(node.group, source, destination), self._faults, move.num_tokens)
            batch.add(node)
            self._open[route] = batch
            return
        batch.add(node)
        if len(batch.nodes) * self._block_bytes[node.group] >= MAX_BATCH_BYTES:
            if self._is_cut(batch):  # submitted with what follows in this call: first the front layers of all
                self._full.append(self._open.pop(route))
            else:
                self._submit(batch)

    def _is_cut(self, batch: CopyBatch) -> bool:
        """Whether a batch may go in pieces: loads from the secondary level, for which a forward pass may be waiting."""
        return self._layer_pieces > 1 and batch.route & 15 == PRIMARY << 2 | SECONDARY

    def _submit(self, batch: CopyBatch) -> None:
        """Give a batch to its stream; what was held back for these nodes may start. Lock held."""
        if self._open.get(batch.route) is batch:
            del self._open[batch.route]
        elif batch in self._full:
            self._full.remove(batch)
        self._submit_together([batch])

    def _submit_together(self, batches: Sequence[CopyBatch]) -> None:
        """Give batches to their streams, piece by piece in the order in which the model will use their layers. Lock held."""
        if self._abandoned:  # the pools may be gone
            for node in [node for batch in batches for node in batch.nodes]:
                node.error = node.error or cancelled(node)
                self._finish(node)
            return
        pieces: list[tuple[int, int, int]] = []
        for position, batch in enumerate(batches):
            batch.plan(self._layer_pieces if self._is_cut(batch) else 1)
            layers = self._layers[batch.nodes[0].group]
            firsts = (0, *batch.layer_ends[:-1])
            pieces += [(layers[first], position, number) for number, first in enumerate(firsts)]
        for _layer, position, number in sorted(pieces):
            self._submit_piece(batches[position], number)

    def _submit_piece(self, batch: CopyBatch, number: int) -> None:
        self._sequence += 1
        event = batch.stream.submit(partial(batch.run, number), () if number else tuple(batch.after),
                                    lambda _event: self._piece_over(batch, number))
        batch.submitted(self._sequence, event)
        if self._check is not None:
            self._check.copies(batch)
        if number + 1 < len(batch.layer_ends):
            return
        for node in batch.nodes:
            node.event = event
            node.stream = batch.stream
            node.sequence = self._sequence
            node.state = NodeState.SUBMITTED
            if node.dependents:
                self._hold_no_longer(node)

    def _submit_reads(self, reads: Sequence[Read]) -> None:
        """Submit the copies out of staging buffers, in as few batches as their ways allow: none depends on another, for a read is begun
        only when what it depends on is over or on a stream. Lock held.

        Also after a failed read, when the stream has nothing to copy: the node is then over only when what it was ordered
        behind is over, and whoever writes the slot next may rely on that.
        """
        batch: CopyBatch | None = None
        for node, buffer in reads:
            move = node.move
            assert move is not None
            assert buffer >= 0 or node.error is not None
            route = node.group << 4 | level_of(move.destination) << 2 | NVME
            copier = self._routes.copier_behind_file(node)
            if batch is None or not batch.joins(route, copier, move.num_tokens):
                if batch is not None:
                    self._submit(batch)
                batch = CopyBatch(route, self._onboard, copier, self._faults, move.num_tokens)
            batch.add(node, buffer)
        if batch is not None:
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
        while self._ready or self._open or self._full:
            if self._ready:
                self._start(heapq.heappop(self._ready))
                continue
            batch = next((batch for batch in self._open.values() if not self._is_cut(batch)), None)
            if batch is not None:
                self._submit(batch)
                continue
            loads = [*self._full, *self._open.values()]
            self._full.clear()
            self._open.clear()
            self._submit_together(loads)

    # -- finishing, called by streams and file threads -------------------------------------------------------------------

    def _piece_over(self, batch: CopyBatch, number: int) -> None:
        with self._lock:
            is_last = number + 1 == len(batch.layer_ends)
            batch.over(number)
            if is_last:
                share = batch.seconds / len(batch.nodes)
                for node in batch.nodes:
                    node.seconds += share
                    self._finish(node)
                for buffer in batch.staging_slots:
                    if buffer >= 0:
                        self._routes.staging_of(batch.nodes[0]).give_back(buffer)
            self._changed.notify_all()
        if is_last and batch.failure is not None:
            self._failed_copies.warn("copies between memories fail, what they carried is computed again: %s", batch.failure)
        self.tell_listeners()

    def _reads_over(self, reads: list[Read]) -> None:
        with self._lock:
            self._submit_reads(reads)
            self._submit_all()
            self._changed.notify_all()
        self.tell_listeners()  # not over yet, but confirmed: whoever asked pending_files may ask again

    def _writes_over(self, nodes: list[TransferNode]) -> None:
        with self._lock:
            for node in nodes:
                self._finish(node)
            self._submit_all()
            self._changed.notify_all()
        self.tell_listeners()

    def _finish(self, node: TransferNode) -> None:
        """Report a node. Lock held. The result is in the queue before anybody who waits for the node can go on."""
        if node.dependents:
            self._hold_no_longer(node)
        self._graph.finish(node)
        self._outstanding -= 1
        if node.move is not None:
            self._completed.add(node.move, node.error, node.seconds)

    def tell_listeners(self) -> None:
        """Call them all: something has finished, or whoever waits is to look again."""
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                _log.exception("a transfer listener failed")

    # -- reporting -------------------------------------------------------------------------------------------------------

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

    def stats(self) -> dict[str, TransferCounters]:
        """Counters by "source->destination" level names, such as ``"secondary->primary"``; routes never used are absent."""
        with self._lock:
            return self._completed.counters()

    @property
    def copy_paths(self) -> Mapping[str, str]:
        """By direction ("host to device"), how copies of many units go on this device; empty where there is nothing to choose."""
        return self._routes.copy_paths

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
            reported. May be called again: that waits, for as long as it is given, for what ran on.
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
                        self._submit_reads([(node, -1)])
                    else:
                        self._finish(node)
                self._submit_all()
                self._changed.notify_all()
            if waiting:
                self.tell_listeners()
        is_idle = self.idle(timeout)
        with self._lock:
            self._abandoned = True
            self._changed.notify_all()
        self.tell_listeners()  # also of what will never be reported
        # Idle threads end at once; a little time is theirs even when the copies took all of it.
        spare = 0.5 if is_idle else 0.0
        ended = [worker.close(max(deadline - time.monotonic(), spare))
                 for worker in (self._files, self._debug, self._offload, self._onboard) if worker is not None]
        if all(ended) and self._outstanding == 0:  # also of what an earlier call has given up: it has ended with its threads
            self._routes.close()
            if self._files is not None:
                self._files.let_go()
            if self._debug is not None:
                self._debug.let_go()
                self._debug = None
            return True
        return False


"""``ReadLane``: blocks read from NVMe, by a few threads, into staging buffers (design: transfer rules).

A thread takes neighbouring slots together: one call reads them, each is verified, and they are handed back together, so that what
follows (a copy, its event, its report) is done once for all of them. A run is no more than a megabyte: the first block of it waits for
little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvtier.io.copiers import DIRECT
from kvtier.io.direct_file import Buffer
from kvtier.io.incident import Incident
from kvtier.pools.pool_index import PoolIndex, slot_of
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.file_lane import hand_back, hung, take_all, take_buffer
from kvtier.tiering.hang_watch import HangWatch
from kvtier.tiering.run_queue import RunQueue
from kvtier.tiering.staging import DirectStaging, Staging, StagingPool
from kvtier.tiering.transfer_graph import TransferNode

_log = logging.getLogger(__name__)

Read: TypeAlias = tuple[TransferNode, int]
"""A node whose read is over (its error set if it failed), and its staging buffer; -1 for none."""


class ReadLane:
    """What waits to be read, and what its threads do.

    Args:
        store: the NVMe store.
        staging: buffers by group.
        direct: buffers of the direct way by group; empty without one.
        num_threads: how many threads call :meth:`run`.
        over: called by them, no lock held, with what was read together: nodes of one group. Takes the buffers over.
    """

    def __init__(self, store: BlockStore, staging: Sequence[StagingPool], direct: Sequence[DirectStaging], num_threads: int,
                 over: Callable[[list[Read]], None]) -> None:
        self.closing = False
        self.over = over
        self._store = store
        self._staging = staging
        self._direct = direct
        self._num_threads = num_threads
        self._waiting = RunQueue()
        self._most_ahead = [store.most_ahead(group) for group in range(len(staging))]
        self._watch = HangWatch(num_threads)
        self._failed_quarantine, self._hanging = Incident(_log), Incident(_log)

    def put(self, node: TransferNode) -> None:
        """Queue a node. Never blocks."""
        self._waiting.put(node)

    def take_queued(self) -> list[TransferNode]:
        """What no thread has begun."""
        return take_all(self._waiting)

    def end(self) -> None:
        """Let each thread end with what is queued."""
        for _ in range(self._num_threads):
            self._waiting.put(None)

    @property
    def is_stuck(self) -> bool:
        """All threads are in calls that do not come back."""
        return self._watch.is_stuck

    def run(self) -> None:
        """A thread's life."""
        while run := self._waiting.get_run(self._most_ahead):
            self._read_run(run)
            del run  # an idle thread keeps nothing alive

    def give_up_hanging(self) -> None:
        """Hand back what hangs; with no thread left, also what is queued."""
        for node in self._watch.overdue():
            self._hanging.warn("%s: an NVMe read hangs; what it was to bring is computed again", node.move)
            self._give_up(node)
        if self._watch.is_stuck:
            for node in take_all(self._waiting):
                self._give_up(node)

    def _give_up(self, node: TransferNode) -> None:
        node.error = hung(node)
        hand_back(self.over, [(node, -1)])

    def _read_run(self, run: list[TransferNode]) -> None:
        """Read what was taken together and hand it back: together, or each on its own where each needs its own answer."""
        if len(run) > 1 and not self.closing and all(node.via != DIRECT and node.source_failure() is None for node in run):
            buffers = self._buffers_for(run)
            if buffers:
                self._waiting.put_back(run[len(buffers):])
                run = run[:len(buffers)]
                if self._read_together(run, buffers):
                    return
            else:
                self._waiting.put_back(run[1:])
                run = run[:1]
        for position, node in enumerate(run):
            buffer: int | None = -1
            try:
                buffer = self._read(node, run[position + 1:])
            except Exception as error:
                node.error = error
            if buffer is None:  # it hung, and those behind it have been handed back, too
                return
            hand_back(self.over, [(node, buffer)])

    def _buffers_for(self, run: list[TransferNode]) -> list[int]:
        """Buffers for the first nodes of a run, as many as are free; none where there are not even two."""
        staging = self._staging[run[0].group]
        buffers: list[int] = []
        while len(buffers) < len(run) and (buffer := staging.take(0.0)) is not None:
            buffers.append(buffer)
        if len(buffers) == 1:
            staging.give_back(buffers.pop())
        return buffers

    def _read_together(self, run: list[TransferNode], buffers: list[int]) -> bool:
        """Read a run of neighbours with one call, verify each and hand them back. False when the call failed and each is to be read on
        its own; the buffers are free again."""
        group = run[0].group
        staging = self._staging[group]
        start = time.perf_counter()
        has_arrived = True
        self._watch.begin(run[0], len(run), run[1:])
        try:
            targets = [staging.target(buffer) for buffer in buffers]
            pages = self._store.read_ahead(group, slot_of(PoolIndex(run[0].source)), targets)
            errors = [self._verify(run[0], node, target, page) for node, target, page in zip(run, targets, pages, strict=True)]
        except Exception as error:
            _log.debug("group %d: %d slots could not be read at once: %s", group, len(run), error)
            has_arrived = False
        is_awaited = self._watch.end(run[0])
        if not is_awaited or not has_arrived:
            for buffer in buffers:
                staging.give_back(buffer)
            return not is_awaited  # otherwise it hung, and all have been handed back long since
        share = (time.perf_counter() - start) / len(run)
        for node, failure in zip(run, errors, strict=True):
            node.error = failure
            node.seconds = share
        hand_back(self.over, list(zip(run, buffers, strict=True)))
        return True

    def _verify(self, first: TransferNode, node: TransferNode, target: Buffer, page: Buffer) -> Exception | None:
        """Whether a block that was read together with ``first`` is what it must be: None, or why not."""
        move = node.move
        assert move is not None
        slot = slot_of(move.source)
        try:
            self._store.read_block(node.group, slot, move.key, target, page)
        except Exception as error:
            if self._watch.is_awaited(first):  # otherwise the slot may hold something else by now
                self._quarantine(node.group, slot, error)
            return error
        return None

    def _read(self, node: TransferNode, behind: list[TransferNode]) -> int | None:
        """Read one block into a staging buffer; returns the buffer, also after a failed read. None after one that hung: the node and those
        behind it have been handed back long since."""
        lost = node.source_failure()
        if lost is not None:
            raise lost
        staging: Staging = self._direct[node.group] if node.via == DIRECT else self._staging[node.group]
        buffer = take_buffer(staging, node, lambda: self.closing)
        move = node.move
        assert move is not None
        slot = slot_of(move.source)
        start = time.perf_counter()
        failure: Exception | None = None
        self._watch.begin(node, behind=behind)
        try:
            self._store.read_block(node.group, slot, move.key, staging.target(buffer))
        except Exception as error:
            failure = error
            if self._watch.is_awaited(node):  # otherwise the slot may hold something else by now
                self._quarantine(node.group, slot, error)
        if not self._watch.end(node):
            staging.give_back(buffer)
            return None
        node.error = failure
        node.seconds = time.perf_counter() - start
        return buffer

    def _quarantine(self, group: int, slot: int, error: Exception) -> None:
        try:
            self._store.quarantine(group, slot, f"{type(error).__name__}: {error}")
        except Exception as second:
            error.add_note(f"the slot could not be quarantined either: {second}")
            self._failed_quarantine.warn("group %d, NVMe slot %d: could not be quarantined: %s", group, slot, second)

"""``WriteLane``: blocks written to NVMe and rows deleted, by one thread, in batches (design: transfer rules)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.io.copiers import DIRECT
from kvtier.io.incident import Incident
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.pool_index import PoolIndex, slot_of
from kvtier.tiering import file_lane
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.direct_writes import DirectWrites
from kvtier.tiering.file_lane import cancelled, hand_back, hung, take_all
from kvtier.tiering.hang_watch import HangWatch
from kvtier.tiering.transfer_graph import TransferNode, Work

_log = logging.getLogger(__name__)

MAX_WRITE_BATCH: Final = 64
"""Writes handed to the store in one call: their manifest rows are one transaction."""


class WriteLane:
    """What waits to be written or deleted, and what its thread does.

    Args:
        store: the NVMe store.
        secondary: the secondary level's slots by group, uint8 ``[slots, padded block bytes]``; None where it has none.
        over: called by the thread, no lock held, with nodes whose errors are set where they failed.
        direct: the direct way; None without one.
        seconds: by group, how long the store's rate lets one write of a block take; empty without a rate.

    Attributes:
        failed_discards: slots whose rows could not be deleted.
    """

    def __init__(self, store: BlockStore, secondary: Sequence[npt.NDArray[np.uint8] | None],
                 over: Callable[[list[TransferNode]], None], direct: DirectWrites | None, seconds: Sequence[float]) -> None:
        self.closing = False
        self.over = over
        self.failed_discards = 0
        self._store = store
        self._secondary = secondary
        self._direct_writes = direct
        self._seconds = seconds
        self._waiting: SimpleQueue[TransferNode | None] = SimpleQueue()
        self._watch = HangWatch(1)
        self._failed_discard, self._hanging = Incident(_log), Incident(_log)

    def put(self, node: TransferNode) -> None:
        """Queue a node. Never blocks."""
        self._waiting.put(node)

    def take_queued(self) -> list[TransferNode]:
        """What the thread has not begun."""
        return take_all(self._waiting)

    def end(self) -> None:
        """Let the thread end with what is queued."""
        self._waiting.put(None)

    def let_go(self) -> None:
        """Of the slots, once the thread has ended."""
        self._secondary, self._direct_writes = (), None

    @property
    def is_stuck(self) -> bool:
        """The thread has been in one call for so long that it may never come back."""
        return self._watch.is_stuck

    def give_up_hanging(self) -> None:
        """Say what hangs, and hand back what is queued behind it. It is not handed back itself: the call may still take its bytes from
        the source slot."""
        for node in self._watch.overdue():
            self._hanging.warn("%s: an NVMe write hangs; nothing more is stored until it comes back", node.move or "discard")
        if self._watch.is_stuck:
            waiting = take_all(self._waiting)
            for node in waiting:
                node.error = hung(node)
                self.failed_discards += node.work is Work.DISCARD
            if waiting:
                hand_back(self.over, waiting)

    def run(self) -> None:
        """The thread's life."""
        first: TransferNode | None = None
        while True:
            node = first if first is not None else self._waiting.get()
            if node is None:
                return
            batch, first = self._take_batch(node)
            try:
                self._write(batch)
            except Exception as error:
                for failed in batch:
                    failed.error = failed.error or error
            hand_back(self.over, batch)
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
                node = self._waiting.get_nowait()
            except Empty:
                break
            if node is None:
                self._waiting.put(None)  # the end mark is for the next round
                break
            if (node.group, node.destination) in written:
                return batch, node
            if node.work is Work.WRITE:
                written.add((node.group, node.destination))
            batch.append(node)
        return batch, None

    def _write(self, batch: list[TransferNode]) -> None:
        if self.closing:
            for node in batch:
                node.error = cancelled(node)
            return
        self._watch.begin(batch[0])
        self._discard([node for node in batch if node.work is Work.DISCARD])
        self._watch.end(batch[0])
        direct = [node for node in batch if node.work is Work.WRITE and node.via == DIRECT]
        if self._direct_writes is not None and direct:
            self._watch.begin(batch[0], len(direct), on_purpose=self._spread(direct))
            try:
                self._direct_writes.write(direct)
            finally:
                self._watch.end(batch[0])
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
        self._watch.begin(batch[0], len(items), on_purpose=self._spread(ready))
        try:
            errors = self._store.write_blocks(items)
        finally:
            self._watch.end(batch[0])
        seconds = (time.perf_counter() - start) / len(ready)
        for node, error in zip(ready, errors, strict=True):
            node.error = error
            node.seconds = seconds

    def _spread(self, nodes: list[TransferNode]) -> float:
        """Seconds that the rate may spread these writes over, behind the last write before them."""
        if not self._seconds:
            return 0.0
        return sum(self._seconds[node.group] for node in nodes) + max(self._seconds)

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
            deadline = time.monotonic() + file_lane.PATIENCE
            while not event.wait(file_lane.LOOK_UP):
                if self.closing:
                    return cancelled(node)
                if time.monotonic() > deadline:
                    return TransferError(f"{node.move}: the copy into its source was not over within {file_lane.PATIENCE:.0f} s")
            if event.error is not None:  # an error of the device reaches the event before it reaches the node
                return TransferError(f"{node.move}: the copy into its source failed: {event.error}")
        return node.source_failure()

    def _item(self, node: TransferNode) -> BlockWrite:
        move = node.move
        rows = self._secondary[node.group]
        assert move is not None
        assert rows is not None
        return BlockWrite(group=node.group, slot=slot_of(move.destination), key=move.key,
                          data=rows[slot_of(move.source)], priority=move.priority, expiry=move.expiry)

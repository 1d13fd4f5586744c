"""``DirectWrites``: primary blocks to NVMe without the host (design: NVMe rules). Part of the writer thread's work.

A block is copied within the device into a row that KvikIO writes from. So the slot's next writer need not wait for a file, a row
is whole pages on a page boundary whatever the block's size is, and the checksum is of the very bytes that are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvtier.errors import TransferError
from kvtier.io.store_messages import BlockWrite
from kvtier.io.streams import Event
from kvtier.pools.pool_index import slot_of
from kvtier.tiering.staging import DirectStaging
from kvtier.tiering.transfer_graph import TransferNode

WRITE_ROWS: Final = 4
"""Rows of each group that writes have to themselves, so that a store never keeps a load waiting."""

PATIENCE: Final = 60.0
"""Seconds a copy within the device may take before it is taken to hang."""


class WritingStore(Protocol):
    """What is used of the NVMe store here."""

    @property
    def accepts_writes(self) -> bool: ...

    def write_blocks(self, items: Sequence[BlockWrite]) -> Sequence[Exception | None]: ...


class DirectWrites:
    """The direct way for writes. Used by one thread.

    Args:
        store: the NVMe store.
        rows: by group.
        copy_out: enqueue the copy of a node's source slot into a row; its event.
    """

    def __init__(self, store: WritingStore, rows: Sequence[DirectStaging], copy_out: Callable[[TransferNode, int], Event]) -> None:
        self._store = store
        self._rows = rows
        self._copy_out = copy_out

    def write(self, nodes: Sequence[TransferNode]) -> None:
        """Write the blocks of these nodes, as many at a time as there are rows. Those that could not be stored have their errors."""
        for start in range(0, len(nodes), WRITE_ROWS):
            part = nodes[start:start + WRITE_ROWS]
            if not self._store.accepts_writes:
                for node in part:
                    node.error = TransferError(f"{node.move}: not stored: the NVMe store takes no writes for a while, because the disk is "
                                               "full or failing")
                continue
            self._write(part)

    def _write(self, nodes: Sequence[TransferNode]) -> None:
        begun = time.perf_counter()
        staged = self._stage(nodes)
        try:
            for node, _row, event in staged:
                node.error = _wait(node, event)
            ready = [(node, row) for node, row, _event in staged if node.error is None]
            errors = self._store.write_blocks([self._item(node, row) for node, row in ready]) if ready else []
            for (node, _row), error in zip(ready, errors, strict=True):
                node.error = error
        finally:
            for node, row, event in staged:
                if event.is_done():  # a copy that hangs may still write into its row: nobody else may have that
                    self._rows[node.group].give_back(row)
        share = (time.perf_counter() - begun) / len(nodes)
        for node in nodes:
            node.seconds = share

    def _stage(self, nodes: Sequence[TransferNode]) -> list[tuple[TransferNode, int, Event]]:
        """Enqueue the copies of all blocks; those that cannot be enqueued get errors."""
        staged = []
        for node in nodes:
            row = self._rows[node.group].take(0.0)
            if row is None:  # an earlier copy hangs with it
                node.error = TransferError(f"{node.move}: not stored: no row of the direct way is free; a copy hangs")
                continue
            try:
                staged.append((node, row, self._copy_out(node, row)))
            except Exception as error:  # the device's libraries have errors of their own
                self._rows[node.group].give_back(row)
                node.error = error
        return staged

    def _item(self, node: TransferNode, row: int) -> BlockWrite:
        move = node.move
        assert move is not None
        return BlockWrite(group=node.group, slot=slot_of(move.destination), key=move.key, data=self._rows[node.group].target(row),
                          priority=move.priority, expiry=move.expiry)


def _wait(node: TransferNode, event: Event) -> TransferError | None:
    """Until the copy is over; why the row holds no content of the slot, or None."""
    if not event.wait(PATIENCE):
        return TransferError(f"{node.move}: not stored: the copy out of its slot was not over within {PATIENCE:.0f} s")
    if event.error is not None:
        return TransferError(f"{node.move}: not stored: the copy out of its slot failed: {event.error}")
    return node.source_failure()

"""``StoreWrites``: how a batch of blocks gets into a store (design: NVMe rules).

Three steps in this order, whatever happens: the deletion of the slots' old rows is committed, the blocks are written, their rows are
committed. After a write that the system refused, nothing more is taken for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtier.errors import TransferError
from kvtier.io.block_writer import BlockWriter, rows_of
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import ManifestRow, Place
from kvtier.io.quarantine import Quarantine
from kvtier.io.slab import SlabFile
from kvtier.io.store_arguments import objection, slab_of
from kvtier.io.store_directory import StoreDirectory, deleted
from kvtier.io.store_messages import BlockWrite, is_direct
from kvtier.io.write_pause import WritePause

WRITE_THREADS: Final = 2
"""Runs of blocks written at once: a drive with a second one waiting has no gaps between them."""


class StoreWrites:
    """Writes for one caller at a time.

    Args:
        home, slabs, manifest, quarantine, pause: of the store.
        sync: make blocks and rows survive a loss of power.
        clock: wall-clock seconds.
    """

    def __init__(self, home: StoreDirectory, slabs: Sequence[SlabFile], manifest: Manifest, quarantine: Quarantine, pause: WritePause,
                 sync: bool, clock: Callable[[], float]) -> None:
        self._home = home
        self._slabs = slabs
        self._manifest = manifest
        self._quarantine = quarantine
        self._pause = pause
        self._sync = sync
        self._clock = clock
        self._writer = BlockWriter(slabs, WRITE_THREADS)

    def write_batch(self, items: Sequence[BlockWrite], batch: Sequence[int], errors: list[Exception | None],
                    take_hits: Callable[[], dict[Place, int]]) -> dict[str, int]:
        """The three steps for the items at these positions.

        Args:
            items, batch: blocks, and the positions of those to write now; no slot twice among them.
            errors: filled at the same positions; None where the block is stored.
            take_hits: hit counts that go into the same commit as the rows.

        Returns:
            what to add to the store's counters.
        """
        for position in batch:
            errors[position] = self._objection(items[position])
        pending = [position for position in batch if errors[position] is None]
        if not pending:
            return {}
        step = "write"
        try:
            self._require_files()
            step = "delete the old rows"
            self._quarantine.save()
            self._manifest.delete((items[position].group, items[position].slot) for position in pending)
            step = "write"
            rows = self._write_data(items, pending, errors)
            if not rows:
                return {}
            whole = len(rows) == len(pending)
            pending = [position for position in pending if errors[position] is None]
            if self._sync:
                step = "make the blocks durable"
                for group in {row.group for row in rows}:
                    self._slabs[group].file.sync()
            step = "commit the rows"
            self._manifest.put(rows, take_hits())
        except (OSError, TransferError) as error:
            self._pause.failed(f"Could not {step}: {error}")
            for position in pending:
                errors[position] = TransferError(f"not stored: could not {step}: {error}")
            return {}
        if whole:
            self._pause.succeeded()
        return {"written_blocks": len(rows), "written_bytes": sum(row.length for row in rows),
                "gds_written_blocks": sum(is_direct(items[position].data) for position in pending)}

    def close(self, timeout: float) -> bool:
        """End the writing threads; False when that took more than ``timeout`` seconds."""
        return self._writer.close(timeout)

    def _require_files(self) -> None:
        """A deleted file still takes bytes, and they are gone at the next start: that must not look like storing.

        Raises:
            OSError: somebody deleted a slab or the whole directory.
        """
        self._home.require_present()
        for slab in self._slabs:
            if slab.file.is_deleted():
                raise deleted(slab.file.path)

    def _write_data(self, items: Sequence[BlockWrite], positions: Sequence[int], errors: list[Exception | None]) -> list[ManifestRow]:
        """Write the blocks until one fails; what was not written gets an error. Returns the rows of what is complete."""
        pending = [items[position] for position in positions]
        outcome = self._writer.write(pending, self._clock())
        failed = next((number for number, result in enumerate(outcome) if isinstance(result, Exception)), None)
        if failed is not None:
            self._pause.failed(f"Could not write group {pending[failed].group}, slot {pending[failed].slot}: {outcome[failed]}")
        rows, failures = rows_of(pending, outcome)
        for position, failure in zip(positions, failures, strict=True):
            errors[position] = failure
        return rows

    def _objection(self, item: BlockWrite) -> TransferError | None:
        """Why this item cannot be stored, if so."""
        place = f"group {item.group}, slot {item.slot}: not stored: "
        try:
            geometry = slab_of(self._slabs, item.group, item.slot).geometry
        except TransferError as error:
            return error
        reason = objection(item, geometry)
        if reason is not None:
            return TransferError(place + reason)
        if (item.group, item.slot) in self._quarantine:
            return TransferError(f"{place}the slot is quarantined")
        remaining = self._pause.remaining()
        if remaining > 0.0:
            return TransferError(f"{place}after a failed write the store takes no blocks for another {remaining:.0f} s")
        return None

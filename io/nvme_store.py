"""``NvmeStore``: the NVMe level as a store of blocks: slabs for the bytes, a manifest for what they are (design: NVMe rules).

Three rules carry everything else. A row is committed only after its block is complete, so a crash loses entries, never
correctness. A slot is overwritten only after the deletion of its old row has been committed, so a header that does not match
its row is corruption, never routine. Every read verifies header and block, and what does not verify is not served.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Final

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.block_writer import slots_per_run
from kvtier.io.collector import collector_paused
from kvtier.io.direct_file import Buffer
from kvtier.io.drive_queue import DriveQueue
from kvtier.io.faults import Faults
from kvtier.io.incident import Incident
from kvtier.io.manifest_rows import Place
from kvtier.io.quarantine import Quarantine
from kvtier.io.slab import SlabFile
from kvtier.io.store_arguments import runs_of_different_slots, slab_of, unreadable_into
from kvtier.io.store_gate import StoreClosed, StoreGate
from kvtier.io.store_messages import BlockTarget, BlockWrite, NvmeStats, StoredBlock, is_direct
from kvtier.io.store_open import OpenedStore, open_store
from kvtier.io.store_writes import StoreWrites
from kvtier.io.threads import start_thread
from kvtier.io.write_pause import WritePause
from kvtier.pools.nvme_geometry import NvmeGeometry

_log = logging.getLogger(__name__)
_OF_STORED: Final = itemgetter(0, 1, 2, 5, 6, 7)
"""Of a ``ManifestRow``, what a ``StoredBlock`` has."""
_STORED: Final = partial(tuple.__new__, StoredBlock)  # _make, without a Python call for each
_RELEASE_SECONDS: Final = 1.0
"""The least time that closing gives to the last commit, however little is left of the caller's."""


class NvmeStore:
    """The NVMe level of all groups. Make one with :meth:`open`.

    ``read_block``, ``discard`` and ``quarantine`` may be called from any thread, ``write_blocks`` from one at a time (calls
    wait for each other). The caller sees to it that a slot is not read while it is written.
    """

    def __init__(self, opened: OpenedStore, sync: bool, clock: Callable[[], float], drive: DriveQueue | None = None) -> None:
        self._opened = opened
        self._home = opened.home
        self._slabs = opened.slabs
        self._drive = drive
        for slab in self._slabs:
            slab.file.queue = drive
        self._manifest = opened.manifest
        self._quarantine = Quarantine(opened.manifest, clock)
        self._clock = clock
        self._pause = WritePause(str(opened.home.path), clock)
        self._writes = StoreWrites(opened.home, self._slabs, opened.manifest, self._quarantine, self._pause, sync, clock)
        if opened.manifest.write_error is not None:
            self._pause.failed(f"The store was opened for reading: {opened.manifest.write_error}")
        self._bad_blocks = Incident(_log)
        self._write_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._releasing: threading.Thread | None = None
        self._released = False
        self._gate = StoreGate(str(opened.home.path))

    @classmethod
    def open(cls, directory: str | Path, namespace: str, geometries: Sequence[NvmeGeometry], *, faults: Faults | None = None,
             free_space_reserve: int | None = None, sync: bool = False, clock: Callable[[], float] = time.time,
             drive: DriveQueue | None = None, rebuild: bool = False) -> NvmeStore:
        """Open a directory, making it when it is missing or empty, and verify its manifest.

        More slots than before extend the slabs; with fewer, the blocks beyond the new end are dropped, aloud. A damaged
        manifest is kept beside and rebuilt from the slot headers.

        Args:
            directory: for this store alone; folder mode 0700, files 0600.
            namespace: JSON object as text: what the keys presuppose (model, dtype, layout, ranks, ...). Kept in clear.
            geometries: one per group, in order.
            faults: injected failures.
            free_space_reserve: bytes that preallocation must leave free on the filesystem; default 1 % of it, 1 GiB at most.
            sync: make each commit, and the blocks before it, survive a loss of power. Without it a loss of power may cost
                the latest blocks and send some of the latest slots to the quarantine; a crash of the process costs neither.
            clock: wall-clock seconds.
            drive: the turns that reads and writes of blocks take; None for as many at once as there are threads that ask.
            rebuild: make the manifest anew even if it is sound.

        Raises:
            ConfigError: the directory cannot be written, is in use, is not ours, belongs to another model or layout, or has
                too little room; a slab is shorter than it was.
        """
        opened = open_store(directory, namespace, geometries, faults=faults, free_space_reserve=free_space_reserve, sync=sync,
                            rebuild=rebuild)
        try:
            opened.manifest.faults = faults
            return cls(opened, sync, clock, drive)
        except BaseException:
            opened.close()
            raise

    def most_ahead(self, group: int) -> int:
        """How many neighbouring slots :meth:`read_ahead` may take at once; 1 where it is not worth while."""
        return slots_per_run(self._slabs[group])

    def read_ahead(self, group: int, first_slot: int, outs: Sequence[Buffer]) -> list[Buffer]:
        """Read neighbouring slots with one call, without looking at what they hold.

        Args:
            group, first_slot, outs: where from, and for each slot uint8 [payload_bytes], contiguous.

        Returns:
            for each slot what :meth:`read_block` wants as ``arrived``.

        Raises:
            TransferError: there are no such slots, a buffer does not fit, or the read failed; read each block on its own then, so that each
                gets its own answer.
        """
        slab_of(self._slabs, group, first_slot)
        slab = slab_of(self._slabs, group, first_slot + len(outs) - 1)
        for out in outs:
            self._require_room(slab, first_slot, out)
            if out.nbytes != slab.geometry.payload_bytes:  # the next block would begin where this one still is
                raise TransferError(f"group {group}, {len(outs)} slots from {first_slot} on: a buffer of {out.nbytes} bytes; read ahead "
                                    f"takes {slab.geometry.payload_bytes} for each")
        with self._gate:
            try:
                return slab.read_ahead(first_slot, outs)
            except OSError as error:
                raise TransferError(f"group {group}, {len(outs)} slots from {first_slot} on: {error}") from error

    def read_block(self, group: int, slot: int, key: bytes, out: BlockTarget, arrived: Buffer | None = None) -> None:
        """Read one block and verify magic, version, namespace, place, key, length and checksum.

        Args:
            group, slot, key: which block, and what it must be.
            out: uint8 [block_bytes] or [payload_bytes], contiguous; read in place when it is aligned; or a direct row. Garbage
                unless the call returns.
            arrived: of :meth:`read_ahead`, when it has read the block into ``out``: then it is only verified.

        Raises:
            CorruptBlock: it does not verify; names group, slot and what differed. The caller must call ``quarantine``.
            TransferError: there is no such block, its slot is quarantined, or the read failed or was short. After a failed
                or short read the caller calls ``quarantine`` too, which does nothing where no block is stored.
        """
        slab = self._readable_into(group, slot, out)
        with self._gate:
            self._require_stored(group, slot, key)
            try:
                if arrived is None:
                    slab.read(slot, key, out)
                else:
                    slab.verify(slot, key, out, arrived)
                self._require_stored(group, slot, key)  # a block that a reset or a discard overtook is not served
            except CorruptBlock:
                self._require_stored(group, slot, key)  # and its slot, perhaps in new use already, is not corrupt
                self._gate.count(checksum_failures=1)
                raise
            except (OSError, TransferError) as error:
                self._gate.count(read_errors=1)
                raise TransferError(f"group {group}, slot {slot}: read failed: {error}") from error
            self._gate.served((group, slot), slab.geometry.block_bytes, is_direct(out))

    def why_bad(self, group: int, slot: int, key: bytes, out: Buffer) -> str | None:
        """Read one block only to verify it; that is no hit.

        Args:
            group, slot, key, out: as :meth:`read_block`; ``out`` is garbage afterwards.

        Returns:
            Why the block cannot be served, for ``quarantine``; ``None`` when it is sound or not there any more.

        Raises:
            TransferError: there is no such slot, ``out`` does not fit, or the store is closed.
        """
        slab = self._readable_into(group, slot, out)
        with self._gate:
            reason = None
            if self._is_stored(group, slot, key):
                try:
                    slab.read(slot, key, out)
                except (OSError, TransferError, CorruptBlock) as error:
                    reason = str(error)
            return reason if self._is_stored(group, slot, key) else None

    def write_blocks(self, items: Sequence[BlockWrite]) -> list[Exception | None]:
        """Store blocks: delete the rows their slots had, write the blocks, add their rows. Two commits for the whole batch.

        After a write that the system refused, the rest of the batch is shed and ``accepts_writes`` is False for a while.

        Args:
            items: their data must not change until the call returns. Of two items for one slot the later one is kept.

        Returns:
            One entry per item: ``None`` when the block is stored, else a TransferError that says why not. A slot whose
            write failed holds no block any more.
        """
        errors: list[Exception | None] = [None] * len(items)
        with self._write_lock:
            try:
                with self._gate:
                    for batch in runs_of_different_slots(items):
                        self._gate.count(**self._writes.write_batch(items, batch, errors, self._gate.take_hits))
            except StoreClosed as error:
                errors = [error] * len(items)
        failed = sum(error is not None for error in errors)
        if failed:
            self._gate.count(write_errors=failed)
        return errors

    def discard(self, group: int, slots: Iterable[int]) -> None:
        """Delete the rows of slots whose content is no longer wanted, in one commit. Slots without a block are left alone.

        Raises:
            TransferError: the deletion could not be committed. The blocks are still there, which does no harm: a slot's
                next write deletes its row first.
        """
        with self._gate:
            places = [(group, slot) for slot in slots]
            self._manifest.delete(places)
            self._gate.forget_hits(places)

    def quarantine(self, group: int, slot: int, reason: str) -> None:
        """Take a slot whose block failed its check out of service, over restarts too; its bytes stay for inspection.

        Does nothing where no block is stored. Never raises for a disk that cannot be written: the slot is out of service
        from now on, and its row is moved as soon as a commit succeeds.
        """
        if self._gate.is_closed or not self._quarantine.add((group, slot), reason):
            return
        self._gate.forget_hits([(group, slot)])
        self._bad_blocks.warn("%s: group %d, slot %d is quarantined: %s", self._home.path, group, slot, reason)
        try:
            self._quarantine.save()
        except TransferError as error:
            self._pause.failed(f"The quarantine could not be saved: {error}")

    def quarantined(self) -> list[Place]:
        """(group, slot) of every slot out of service, in order."""
        return sorted(self._quarantine.places())

    def is_quarantined(self, group: int, slot: int) -> bool:
        """Whether a slot is out of service. From memory: never waits for the disk."""
        return (group, slot) in self._quarantine

    def release(self) -> int:
        """Put every slot of the quarantine back into service, empty, and return how many there were. What lay in them is given up.

        Raises:
            TransferError: it could not be committed.
        """
        with self._gate, self._write_lock:
            self._quarantine.save()
            return self._manifest.release()

    def clear(self) -> None:
        """Forget all blocks: none stored so far verifies from here on, in this or any later run. The quarantine stays.

        Raises:
            TransferError: it could not be written down. No old block is served by this process all the same; repeat the call
                before the next one starts.
        """
        with self._gate, self._write_lock:
            self._gate.take_hits()
            try:
                self._home.start_generation()
            except OSError as error:
                raise TransferError(f"{self._home.path}: the reset could not be written down: {error}. Free some space and repeat "
                                    "it") from error
            finally:
                for slab in self._slabs:
                    slab.namespace_digest = self._home.identity.namespace_digest
                self._manifest.clear(self._home.identity.namespace_digest)

    def stored_blocks(self) -> list[StoredBlock]:
        """All blocks whose rows verified, without those in quarantine."""
        hits = self._gate.hits()
        away = set(self.quarantined())
        rows = self._manifest.rows()
        if away:
            rows = [row for row in rows if (row.group, row.slot) not in away]
        with collector_paused():
            blocks = list(map(_STORED, map(_OF_STORED, rows)))
        if hits:
            blocks = [block._replace(hits=block.hits + hits.get((block.group, block.slot), 0)) for block in blocks]
        return blocks

    def stored_key(self, group: int, slot: int) -> bytes | None:
        """Key of the block in a slot; None where none is stored or the slot is in quarantine. From memory: never waits for the disk."""
        row = self._manifest.row(group, slot)
        return None if row is None or self.is_quarantined(group, slot) else row.key

    @property
    def accepts_writes(self) -> bool:
        """False for a while after the drive refused a write (30 s, doubling up to 10 minutes), and once closed."""
        return not self._gate.is_closed and self._pause.allows_writes

    def slabs(self) -> list[tuple[Path, NvmeGeometry]]:
        """Files and shapes by group, for whoever moves blocks by another way."""
        return [(slab.file.path, slab.geometry) for slab in self._slabs]

    @property
    def directory(self) -> Path:
        """Where the store lies."""
        return self._home.path

    @property
    def geometries(self) -> tuple[NvmeGeometry, ...]:
        """The shape of each group's slab."""
        return tuple(slab.geometry for slab in self._slabs)

    def stats(self) -> NvmeStats:
        """Counters and state."""
        blocks, quarantined = self._quarantine.counts()
        return NvmeStats(stored_blocks=blocks, quarantined_slots=quarantined, write_pauses=self._pause.pauses, rebuilt=self._opened.rebuilt,
                         dropped_rows=self._opened.dropped_rows, recovered_rows=self._opened.recovered_rows, **self._gate.counts(),
                         direct=all(slab.file.direct for slab in self._slabs), gds_detours=sum(slab.detours for slab in self._slabs))

    def hurry(self) -> None:
        """Finish what is being written without regard to a limited bandwidth, because the store is about to be closed."""
        if self._drive is not None:
            self._drive.hurry()

    def close(self, timeout: float) -> bool:
        """Let running calls finish, save hit counts, close all files, give up the lock. New calls fail at once. Idempotent.

        Returns:
            False when a call was still running after ``timeout`` seconds, or the last commit hangs: files and lock then stay as they
            are (closing a descriptor under a running read would be worse), and ``close`` can be called again.
        """
        deadline = time.monotonic() + max(timeout, 0.0)
        self.hurry()
        if not self._gate.close(max(timeout, 0.0)):
            _log.warning("%s: %d calls still run after %.1f s; the store stays open", self._home.path, self._gate.num_inside, timeout)
            return False
        with self._close_lock:
            if self._releasing is None or (not self._releasing.is_alive() and not self._released):
                try:
                    self._releasing = start_thread(lambda: self._release(deadline), "kvtier-close")
                except ConfigError:  # no thread to be had: rather without a deadline than not at all
                    self._release(deadline)
                    return self._released
            releasing = self._releasing
        # In a thread of its own, because its last commit may hang like any other.
        releasing.join(max(deadline - time.monotonic(), _RELEASE_SECONDS))
        return self._released

    def _release(self, deadline: float) -> None:
        """Save what is not yet saved, close all files, give up the lock."""
        try:
            self._quarantine.save()
            self._manifest.put([], self._gate.take_hits())
        except TransferError as error:
            _log.warning("%s: hit counts or quarantine could not be saved at close: %s", self._home.path, error)
        if not self._manifest.close(deadline - time.monotonic()):
            return
        if not self._writes.close(max(deadline - time.monotonic(), 0.5)):  # idle: no call is active any more
            return
        for slab in self._slabs:
            slab.file.close()
        self._home.close()
        self._released = True

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(timeout=10.0)

    def _readable_into(self, group: int, slot: int, out: BlockTarget) -> SlabFile:
        slab = slab_of(self._slabs, group, slot)
        self._require_room(slab, slot, out)
        return slab

    @staticmethod
    def _require_room(slab: SlabFile, slot: int, out: BlockTarget) -> None:
        reason = unreadable_into(out, slab.geometry)
        if reason is not None:
            raise TransferError(f"group {slab.group}, slot {slot}: cannot read into {reason}")

    def _is_stored(self, group: int, slot: int, key: bytes) -> bool:
        return self.stored_key(group, slot) == key

    def _require_stored(self, group: int, slot: int, key: bytes) -> None:
        row = self._manifest.row(group, slot)
        if (group, slot) in self._quarantine:
            raise TransferError(f"group {group}, slot {slot}: the slot is quarantined")
        if row is None:
            raise TransferError(f"group {group}, slot {slot}: no block is stored there")
        if row.key != key:
            raise TransferError(f"group {group}, slot {slot}: holds the block {row.key.hex()[:16]}, asked for was {key.hex()[:16]}")

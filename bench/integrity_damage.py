"""Damages a store that was left by a killed process, and looks at what the next start finds (``kvtier bench integrity``)."""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.bench.integrity_outcome import GEOMETRIES, NAMESPACE, Outcome, block, examine
from kvtier.errors import TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_directory import LOCK_NAME, MANIFEST_NAME
from kvtier.pools.nvme_geometry import HEADER_BYTES, PAGE_BYTES

_LOG: Final = MANIFEST_NAME + "-wal"
_PATIENCE: Final = 30.0


class DamagedStore:
    """A store to be damaged again and again; each trial starts from the same files.

    Args:
        folder: to work in; it must be there.
        seed: of everything that is left to chance.

    Two groups, most slots in use, a discarded block and a quarantined slot; the last transactions are only in the log.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._directory = folder / "damaged"
        self._choice = random.Random(seed)
        self._keys: dict[Place, bytes] = {}
        self._given_up: dict[Place, set[bytes]] = {}
        self._fill(folder / "work")
        shutil.rmtree(folder / "work")
        self._used = sorted(self._keys)
        self._killed = self._index_files()  # as a killed process left them: the last transactions in the log alone
        self._open().close(_PATIENCE)
        self._closed = self._index_files()

    def flip_in_payload(self) -> Outcome:
        """One bit of a block."""
        group, slot = self._choice.choice(self._used)
        return self._flip_in_slab(group, GEOMETRIES[group].offset(slot) + HEADER_BYTES
                                  + self._choice.randrange(GEOMETRIES[group].block_bytes))

    def flip_in_header(self) -> Outcome:
        """One bit of a slot's header page."""
        group, slot = self._choice.choice(self._used)
        return self._flip_in_slab(group, GEOMETRIES[group].offset(slot) + self._choice.randrange(HEADER_BYTES))

    def flip_in_index(self) -> Outcome:
        """One bit of the manifest's database, of a store that was closed."""
        return self._flip(self._closed, MANIFEST_NAME)

    def flip_in_log(self) -> Outcome:
        """One bit of the manifest's write-ahead log."""
        return self._flip(self._killed, _LOG)

    def torn_write(self) -> Outcome:
        """A loss of power kept the end of a block from reaching the drive: what was there before lies behind its beginning."""
        group, slot = self._choice.choice(self._used)
        geometry = GEOMETRIES[group]
        cut = self._choice.randrange(geometry.stride // PAGE_BYTES) * PAGE_BYTES  # 0: nothing arrived at all
        older = random.Random(f"older {slot}").randbytes(geometry.stride - cut)
        return self._edited(group, geometry.offset(slot) + cut, older)

    def misdirected_write(self) -> Outcome:
        """The drive put a whole slot in the place of another one."""
        group, slot = self._choice.choice(self._used)
        source = self._choice.choice([place for place in self._used if place[0] == group and place[1] != slot])
        geometry = GEOMETRIES[group]
        with self._slab(group).open("rb") as file:
            file.seek(geometry.offset(source[1]))
            content = file.read(geometry.stride)
        return self._edited(group, geometry.offset(slot), content)

    def no_room(self) -> Outcome:
        """The drive is full: nothing stored before is lost, and blocks are stored again when there is room.

        ``seconds`` is how long the store then waits before it tries again, by its own clock.

        Raises:
            TransferError: it takes blocks during the pause, or none after it.
        """
        now = 1_000_000.0
        faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=1, errno=errno.ENOSPC)])
        self._restore(self._killed)
        with self._open(faults=faults, clock=lambda: now) as store:
            held = {(stored.group, stored.slot) for stored in store.stored_blocks()}
            free = [place for place in _all_places() if place not in held and not store.is_quarantined(*place)]
            items = [block(place, hashlib.sha256(b"%d %d" % place).digest()) for place in free]
            refused = store.write_blocks(items)
            if not all(refused) or store.accepts_writes:
                raise TransferError("a full drive: blocks were confirmed as stored all the same")
            outcome, _ = examine(store, self._keys, {}, self._given_up, 0.0)
            start = now
            while not store.accepts_writes and now < start + 3600.0:
                now += 1.0
            written = store.write_blocks(items)
            if any(written):
                raise TransferError(f"a drive with room again: {next(filter(None, written))}")
        with self._open() as store:
            after, _ = examine(store, self._keys | {(item.group, item.slot): item.key for item in items}, {}, self._given_up, 0.0)
        return Outcome(outcome.committed, max(outcome.lost, after.lost), max(outcome.silent, after.silent), outcome.wrong + after.wrong,
                       outcome.unexplained + after.unexplained, 0, outcome.quarantined + after.quarantined, after.rebuilt, now - start)

    def _fill(self, work: Path) -> None:
        def write(store: NvmeStore, count: int) -> None:
            for group in range(len(GEOMETRIES)):
                places = [place for place in _all_places()
                          if place[0] == group and place not in self._keys and not store.is_quarantined(*place)]
                keys = {place: self._choice.randbytes(32) for place in places[:count]}
                errors = store.write_blocks([block(place, key) for place, key in keys.items()])
                if any(errors):
                    raise TransferError(f"the store to be damaged could not be filled: {next(filter(None, errors))}")
                self._keys |= keys

        with NvmeStore.open(work, NAMESPACE, GEOMETRIES, free_space_reserve=0) as store:
            write(store, 16)
            for place in ((0, 2), (1, 3)):
                store.discard(place[0], [place[1]])
                self._given_up[place] = {self._keys.pop(place)}
            store.quarantine(0, 5, "an example")
            self._given_up[0, 5] = {self._keys.pop((0, 5))}  # its header is sound: where the quarantine is lost too, it comes back
        with NvmeStore.open(work, NAMESPACE, GEOMETRIES, free_space_reserve=0) as store:
            for _ in range(4):  # what is discarded is written over; the last commits are in the log alone
                write(store, 2)
            store.discard(0, [7])
            self._given_up[0, 7] = {self._keys.pop((0, 7))}
            self._given_up = {place: keys for place, keys in self._given_up.items() if place not in self._keys}
            shutil.copytree(work, self._directory, ignore=shutil.ignore_patterns(LOCK_NAME, "*-shm"))

    def _flip_in_slab(self, group: int, position: int) -> Outcome:
        with self._slab(group).open("rb") as file:
            file.seek(position)
            byte = file.read(1)[0]
        return self._edited(group, position, bytes([byte ^ 1 << self._choice.randrange(8)]))

    def _edited(self, group: int, position: int, content: bytes) -> Outcome:
        """The outcome with other bytes in a slab, which are put right again."""
        self._restore(self._killed)
        with self._slab(group).open("r+b") as file:
            file.seek(position)
            before = file.read(len(content))
            file.seek(position)
            file.write(content)
        try:
            return self._start()
        finally:
            with self._slab(group).open("r+b") as file:
                file.seek(position)
                file.write(before)

    def _flip(self, sound: dict[str, bytes], name: str) -> Outcome:
        content = bytearray(sound[name])
        content[self._choice.randrange(len(content))] ^= 1 << self._choice.randrange(8)
        self._restore(sound | {name: bytes(content)})
        return self._start()

    def _index_files(self) -> dict[str, bytes]:
        return {entry.name: entry.read_bytes() for entry in self._directory.iterdir()
                if entry.name in (MANIFEST_NAME, _LOG)}

    def _restore(self, files: dict[str, bytes]) -> None:
        for entry in self._directory.iterdir():
            if entry.name.startswith(MANIFEST_NAME):
                entry.unlink()
        for name, content in files.items():
            (self._directory / name).write_bytes(content)

    def _start(self) -> Outcome:
        start = time.perf_counter()
        with self._open() as store:
            seconds = time.perf_counter() - start
            return examine(store, self._keys, {}, self._given_up, seconds)[0]

    def _open(self, faults: Faults | None = None, clock: Callable[[], float] = time.time) -> NvmeStore:
        return NvmeStore.open(self._directory, NAMESPACE, GEOMETRIES, free_space_reserve=0, faults=faults, clock=clock)

    def _slab(self, group: int) -> Path:
        return self._directory / f"group-{group}.slab"


def _all_places() -> list[Place]:
    return [(group, slot) for group, geometry in enumerate(GEOMETRIES) for slot in range(geometry.num_slots)]

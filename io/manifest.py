"""``Manifest``: the index of an NVMe directory, one SQLite row per stored block (design: NVMe rules).

The rows live in memory too, so that lookups touch no file; the database is what survives the process. SQLite's own check
misses most flipped bits, so each row carries a digest over its columns, and one row of totals (how many rows there are, all
digests XORed together) tells when rows have vanished; ``manifest_reading`` compares them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvtier.errors import TransferError
from kvtier.io.collector import collector_paused
from kvtier.io.faults import FaultOperation, Faults
from kvtier.io.manifest_reading import ManifestReader, read_quarantine, stored_totals
from kvtier.io.manifest_rows import ManifestContents, ManifestRow, Place, QuarantineRow, Totals
from kvtier.io.sqlite_errors import SQLITE_ERRORS, outer_cause, primary_code
from kvtier.io.wal_check import wal_path

_Statement: TypeAlias = tuple[str, Sequence[tuple[object, ...]]]

_log = logging.getLogger(__name__)

_SCHEMA: Final = (
    ("CREATE TABLE blocks (group_number INTEGER, slot INTEGER, key BLOB, length INTEGER, checksum BLOB, priority INTEGER, "
     "expiry REAL, hits INTEGER, digest INTEGER, PRIMARY KEY (group_number, slot)) WITHOUT ROWID"),
    ("CREATE TABLE quarantine (group_number INTEGER, slot INTEGER, key BLOB, reason TEXT, since REAL, digest INTEGER, "
     "PRIMARY KEY (group_number, slot)) WITHOUT ROWID"),
    ("CREATE TABLE totals (id INTEGER PRIMARY KEY, namespace BLOB, blocks INTEGER, blocks_xor INTEGER, quarantined INTEGER, "
     "quarantined_xor INTEGER, digest INTEGER)"),
)
_INSERT_BLOCK: Final = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_DELETE_BLOCK: Final = "DELETE FROM blocks WHERE group_number = ? AND slot = ?"
_INSERT_QUARANTINE: Final = "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?)"
_DELETE_QUARANTINE: Final = "DELETE FROM quarantine WHERE group_number = ? AND slot = ?"
_CLEAR: Final = "DELETE FROM blocks"


class Manifest:
    """The open manifest of one directory. Every method may be called from any thread.

    Args:
        path: the database; an empty one is made when it is missing.
        namespace_digest: what the rows belong to (32 bytes); rows of anything else count as damage.
        sync: commit with ``synchronous=FULL``: a committed row or deletion then survives a loss of power.

    Attributes:
        write_error: why the file could be read but not written when it was loaded; ``None`` otherwise.
        faults: injected into commits.

    Call :meth:`load` first. Methods that change rows commit once and raise ``TransferError`` when SQLite cannot; nothing has
    changed in memory then, and what the file holds is read again before the next change.
    """

    def __init__(self, path: Path, namespace_digest: bytes, *, sync: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._reader = ManifestReader(path, sync)  # before SQLite touches the log
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite gives its side files the same mode
        self.write_error: TransferError | None = None
        self.faults: Faults | None = None
        self._connection = _connect(path)
        self._closed = False
        self._must_clear = False   # a clear that could not be committed yet
        self._must_reload = False  # a commit failed: the file may hold more or less than memory
        self._totals = Totals(namespace_digest)
        self._rows: dict[Place, ManifestRow] = {}
        self._quarantine: dict[Place, QuarantineRow] = {}

    def load(self) -> ManifestContents:
        """Read and verify everything with one SELECT per table. Never raises for a damaged file: see ``damage``.

        Raises:
            TransferError: a full disk or a foreign lock keeps SQLite from reading. That is no damage; nothing was changed.
        """
        with self._lock, collector_paused():
            try:
                contents, totals = self._reader.read(self._connection, self._totals.namespace)
            except TransferError:
                # A connection that is alone from the start keeps its index of the log in memory: no room needed to read.
                self._connection.close()
                self._connection = _connect(self.path)
                self._connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
                contents, totals = self._reader.read(self._connection, self._totals.namespace)
            if not contents.damage:
                self._adopt(contents, totals)
                self._empty_log()
                self._require_writable(contents.damage)
            return contents

    def create(self) -> None:
        """Lay out an empty manifest in a new file.

        Raises:
            TransferError: it cannot be written.
        """
        with self._lock:
            try:
                self._reader.configure(self._connection)
            except SQLITE_ERRORS as error:
                raise TransferError(f"{self.path}: {outer_cause(error, self.path.parent) or error}") from error
            self._commit([(statement, [()]) for statement in _SCHEMA], self._totals)

    def row(self, group: int, slot: int) -> ManifestRow | None:
        """The row of a slot, from memory."""
        return self._rows.get((group, slot))

    @property
    def out_of_service(self) -> Container[Place]:
        """The slots in quarantine, from memory."""
        return self._quarantine

    def rows(self) -> list[ManifestRow]:
        """All rows, from memory."""
        with self._lock:
            return list(self._rows.values())

    def quarantined(self) -> dict[Place, QuarantineRow]:
        """All slots out of service, from memory."""
        with self._lock:
            return dict(self._quarantine)

    def counts(self) -> tuple[int, int]:
        """How many blocks and how many quarantined slots there are."""
        return len(self._rows), len(self._quarantine)

    def put(self, rows: Iterable[ManifestRow], hits: Mapping[Place, int] | None = None) -> None:
        """Add rows and, in the same transaction, add to the hit counts of others. The data of each row must be complete."""
        with self._lock:
            self._refresh()
            new = {(row.group, row.slot): row for row in rows}
            for place, count in (hits or {}).items():
                counted = self._rows.get(place)
                if counted is not None and place not in new:
                    new[place] = counted._replace(hits=counted.hits + count)
            if not new:
                return
            digests = {place: row.digest() for place, row in new.items()}
            totals = self._totals_without(new)
            for digest in digests.values():
                totals = totals._replace(blocks=totals.blocks + 1, blocks_xor=totals.blocks_xor ^ digest)
            self._commit([(_INSERT_BLOCK, [(*row, digests[place]) for place, row in new.items()])], totals, lambda: self._rows.update(new))

    def delete(self, places: Iterable[Place]) -> int:
        """Delete the rows of these slots, where there are any, and return how many there were."""
        with self._lock:
            self._refresh()
            present = [place for place in dict.fromkeys(places) if place in self._rows]
            if present:
                self._commit([(_DELETE_BLOCK, present)], self._totals_without(present), lambda: _drop(self._rows, present))
            return len(present)

    def quarantine(self, entries: Sequence[QuarantineRow]) -> None:
        """Take slots out of service: their rows go, and the quarantine table says why."""
        with self._lock:
            self._refresh()
            new = {(entry.group, entry.slot): entry for entry in entries if (entry.group, entry.slot) not in self._quarantine}
            if not new:
                return
            totals = self._totals_without(new)
            for entry in new.values():
                totals = totals._replace(quarantined=totals.quarantined + 1, quarantined_xor=totals.quarantined_xor ^ entry.digest())

            def move() -> None:
                _drop(self._rows, new)
                self._quarantine.update(new)

            self._commit([(_DELETE_BLOCK, list(new)), (_INSERT_QUARANTINE, [(*entry, entry.digest()) for entry in new.values()])],
                         totals, move)

    def release(self) -> int:
        """Put every slot of the quarantine back into service, empty; returns how many there were."""
        with self._lock:
            self._refresh()
            released = list(self._quarantine)
            if released:
                self._commit([(_DELETE_QUARANTINE, released)], self._totals._replace(quarantined=0, quarantined_xor=0),
                             self._quarantine.clear)
            return len(released)

    def forget_beyond(self, num_slots: Sequence[int]) -> tuple[int, int]:
        """Delete everything about slots that are no longer there; returns how many blocks and how many quarantined slots."""
        def beyond(places: Iterable[Place]) -> list[Place]:
            return [(group, slot) for group, slot in places if group >= len(num_slots) or slot >= num_slots[group]]

        with self._lock:
            self._refresh()
            rows = beyond(self._rows)
            quarantined = beyond(self._quarantine)
            if rows or quarantined:
                totals = self._totals_without(rows)
                for place in quarantined:
                    totals = totals._replace(quarantined=totals.quarantined - 1,
                                             quarantined_xor=totals.quarantined_xor ^ self._quarantine[place].digest())

                def forget() -> None:
                    _drop(self._rows, rows)
                    _drop(self._quarantine, quarantined)

                self._commit([(_DELETE_BLOCK, rows), (_DELETE_QUARANTINE, quarantined)], totals, forget)
            return len(rows), len(quarantined)

    def clear(self, namespace_digest: bytes) -> None:
        """Delete all block rows; those to come belong to ``namespace_digest``. The quarantine stays.

        In memory the rows are gone even when the commit fails: on file they then belong to a namespace that is over.
        """
        with self._lock:
            totals = self._totals._replace(namespace=namespace_digest, blocks=0, blocks_xor=0)
            self._rows, self._totals, self._must_clear = {}, totals, True
            self._refresh()

    def close(self, timeout: float) -> bool:
        """Fold the log into the database and close. Idempotent; False when a commit did not end within ``timeout`` seconds."""
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            return False
        try:
            if not self._closed:
                self._closed = True
                try:
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                except SQLITE_ERRORS as error:
                    _log.warning("%s: the log could not be folded in at close (%s); the next start reads it", self.path, error)
                finally:
                    self._connection.close()
        finally:
            self._lock.release()
        return True

    def abandon(self) -> None:
        """Close without folding the log in: a log that has lost its end must still be there to tell at the next start."""
        log = wal_path(self.path)
        kept = log.with_name(log.name + ".tmp")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):  # no log, or a filesystem without hard links
                kept.unlink(missing_ok=True)
                os.link(log, kept)
            try:
                self._connection.close()  # SQLite folds the log in and deletes it, but only under its own name
            finally:
                if log.exists():
                    kept.unlink(missing_ok=True)
                elif kept.exists():
                    os.rename(kept, log)

    def _totals_without(self, places: Iterable[Place]) -> Totals:
        """The totals once the rows of ``places`` (where there are any) are gone."""
        totals = self._totals
        blocks, xor = totals.blocks, totals.blocks_xor
        for place in places:
            row = self._rows.get(place)
            if row is not None:
                blocks, xor = blocks - 1, xor ^ row.digest()
        return totals._replace(blocks=blocks, blocks_xor=xor)

    def _commit(self, statements: Sequence[_Statement], totals: Totals, then: Callable[[], object] = lambda: None) -> None:
        """``then`` changes the rows in memory in the same way."""
        if self._closed:
            raise TransferError(f"{self.path} is closed")
        execute = self._connection.execute
        try:
            if self.faults is not None:
                self.faults.before(FaultOperation.COMMIT)
            execute("BEGIN IMMEDIATE")
            for statement, parameters in statements:
                self._connection.executemany(statement, parameters) if parameters != [()] else execute(statement)
            execute("INSERT OR REPLACE INTO totals VALUES (1, ?, ?, ?, ?, ?, ?)", (*totals, totals.digest()))
            execute("COMMIT")
            self._totals = totals
            then()
        except BaseException as error:  # Ctrl-C too: a transaction left open would keep the next one, and close, from the file
            self._must_reload = True  # whether the commit reached the file is not known, or memory has not followed it
            try:
                if self._connection.in_transaction:
                    execute("ROLLBACK")
            except SQLITE_ERRORS as second:
                _log.debug("%s: rollback: %s", self.path, second)
            if not isinstance(error, (OSError, *SQLITE_ERRORS)):  # OSError: injected
                raise
            why = outer_cause(error, self.path.parent) or f"{error}; check the health of the drive"
            raise TransferError(f"{self.path}: nothing was committed: {why}") from error

    def _refresh(self) -> None:
        """Before a change: make up for a clear that failed, and after a failed commit learn what the file really holds."""
        if self._must_clear:
            if self._must_reload:
                self._reload_quarantine()
            self._commit([(_CLEAR, [()])], self._totals)
            self._must_clear = False
        if self._must_reload:
            contents, totals = self._reader.read(self._connection, self._totals.namespace)
            if contents.damage:
                raise TransferError(f"{self.path} is damaged ({'; '.join(contents.damage)}); restart to rebuild it from the "
                                    "slot headers")
            self._adopt(contents, totals)
            self._empty_log()
            self._must_reload = False

    def _reload_quarantine(self) -> None:
        """What a clear keeps, and counts: as the file has it. The rows that it deletes need not be read."""
        contents = ManifestContents()
        try:
            xor = read_quarantine(self._connection, contents)
            totals = stored_totals(self._connection)
        except SQLITE_ERRORS as error:
            why = outer_cause(error, self.path.parent) or f"{error}; check the health of the drive"
            raise TransferError(f"{self.path}: nothing was committed: {why}") from error
        if totals is None or (totals.quarantined, totals.quarantined_xor) != (len(contents.quarantine), xor):
            raise TransferError(f"{self.path} is damaged (its quarantine is not what it should be); restart to rebuild it from the slot "
                                "headers")
        self._quarantine = dict(contents.quarantine)
        self._totals = self._totals._replace(quarantined=totals.quarantined, quarantined_xor=xor)

    def _adopt(self, contents: ManifestContents, totals: Totals) -> None:
        # Copies: what the caller was given stays as it was loaded.
        self._rows, self._quarantine, self._totals = dict(contents.rows), dict(contents.quarantine), totals

    def _empty_log(self) -> None:
        """Frames of a transaction that never ended must not lie behind those of the next: they would look like a lost end."""
        log = wal_path(self.path)
        with contextlib.suppress(OSError, *SQLITE_ERRORS):  # without room for it the next start rebuilds at worst
            if log.stat().st_size > 0:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _require_writable(self, damage: list[str]) -> None:
        """A flipped bit in the file's header can make SQLite take it for read-only; a full disk is no damage."""
        try:
            self._commit([], self._totals)
        except TransferError as error:
            if primary_code(error.__cause__) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                damage.append(str(error.__cause__))
            else:
                self.write_error = error


def _drop(rows: dict[Place, Any], places: Iterable[Place]) -> None:
    for place in places:
        rows.pop(place, None)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    # Damaged text must come out as bytes and fail its digest, not as a decoding error in the middle of a SELECT.
    connection.text_factory = bytes
    return connection

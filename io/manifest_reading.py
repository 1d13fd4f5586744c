"""``ManifestReader``: what a manifest's file holds, believed only as far as it verifies (design: NVMe rules).

SQLite's own check misses most flipped bits. So each row is compared with its digest, all of them with the row of totals, and the log with
what SQLite made of it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from kvtier.errors import TransferError
from kvtier.io.manifest_rows import BLOCK_SEED, ROW_LAYOUT, ManifestContents, ManifestRow, Place, QuarantineRow, Totals
from kvtier.io.sqlite_errors import SQLITE_ERRORS, outer_cause
from kvtier.io.wal_check import claimed_frames, wal_path

SELECT_BLOCKS: Final = "SELECT group_number, slot, key, length, checksum, priority, expiry, hits, digest FROM blocks"
SELECT_QUARANTINE: Final = "SELECT group_number, slot, key, reason, since, digest FROM quarantine"
SELECT_TOTALS: Final = "SELECT namespace, blocks, blocks_xor, quarantined, quarantined_xor, digest FROM totals WHERE id = 1"

_CHUNK: Final = 1000  # rows at a time: they stay in the processor's cache, and other threads get their turn
_UNSIGNED: Final = (1 << 64) - 1

_Raw = tuple[Any, ...]  # a row as SQLite gives it, where each column may have changed its kind


class ManifestReader:
    """Reads one database, over whatever connection.

    Args:
        path: of the database. Its log is looked at here, before SQLite has touched it.
        sync: commits are to survive a loss of power.
    """

    def __init__(self, path: Path, sync: bool) -> None:
        self._path = path
        self._sync = sync
        self._claimed_frames = claimed_frames(wal_path(path))

    def read(self, connection: sqlite3.Connection, namespace: bytes) -> tuple[ManifestContents, Totals]:
        """Everything in the file that verifies, what does not, and the totals of what does.

        Args:
            connection: open; its text comes as bytes.
            namespace: digest of what the rows must belong to.

        Raises:
            TransferError: a full disk or a foreign lock keeps SQLite from reading. That is no damage; nothing was changed.
        """
        contents = ManifestContents()

        def attempt(step: Callable[[sqlite3.Connection, ManifestContents], int | None]) -> int:
            try:
                return step(connection, contents) or 0
            except SQLITE_ERRORS as error:
                outside = outer_cause(error, self._path.parent)
                if outside is not None:
                    raise TransferError(f"{self._path} cannot be read: {outside}; nothing in it was changed") from error
                contents.damage.append(f"SQLite: {error}")
                return 0

        # One by one: where the blocks cannot be read, the quarantine may still be.
        attempt(self._check_structure)
        blocks_xor = attempt(_read_blocks)
        quarantined_xor = attempt(read_quarantine)
        totals = Totals(namespace, len(contents.rows), blocks_xor, len(contents.quarantine), quarantined_xor)
        attempt(lambda connection, contents: _compare_totals(connection, contents, totals))
        attempt(self._compare_log)
        return contents, totals

    def configure(self, connection: sqlite3.Connection) -> None:
        """How the file is written from here on. Raises what SQLite does."""
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._sync else 'NORMAL'}")

    def _check_structure(self, connection: sqlite3.Connection, contents: ManifestContents) -> None:
        self.configure(connection)
        check = [line for line, in connection.execute("PRAGMA quick_check(3)")]
        if check != [b"ok"]:
            contents.damage.append("SQLite's quick check: " + b"; ".join(check).decode("utf-8", "replace"))

    def _compare_log(self, connection: sqlite3.Connection, contents: ManifestContents) -> None:
        """Only for the log that was there before this process came; its own commits are checked by SQLite as they happen."""
        claimed = self._claimed_frames
        if claimed:
            try:
                _, believed, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error as error:
                if outer_cause(error, self._path.parent) is None:
                    raise
                return  # no room to fold the log in: what was read from it stands, and the next reading compares
            self._claimed_frames = 0
            if believed < claimed:
                contents.damage.append(f"SQLite believed {max(believed, 0)} of {claimed} pages in the log: its end is lost")


def stored_totals(connection: sqlite3.Connection) -> Totals | None:
    """The row of totals; None when it does not verify."""
    stored = connection.execute(SELECT_TOTALS).fetchone()
    try:
        sound = stored is not None and Totals(*stored[:-1]).digest() == stored[-1]
    except (struct.error, TypeError):
        sound = False
    return Totals(*stored[:-1]) if sound else None


def read_quarantine(connection: sqlite3.Connection, contents: ManifestContents) -> int:
    """Fill ``contents.quarantine``; returns the XOR of the digests. What does not verify is missing from the totals, which says enough."""
    xor = 0
    for group, slot, key, reason, since, digest in connection.execute(SELECT_QUARANTINE):
        try:
            row = QuarantineRow(group, slot, key, reason.decode("utf-8", "replace"), since)
            sound = row.digest() == digest
        except (struct.error, TypeError, AttributeError):
            sound = False
        if sound:
            contents.quarantine[group, slot] = row
            xor ^= digest
    return xor


def _read_blocks(connection: sqlite3.Connection, contents: ManifestContents) -> int:
    """Fill ``contents.rows``; returns the XOR of their digests."""
    xor = 0
    cursor = connection.execute(SELECT_BLOCKS)
    while chunk := cursor.fetchmany(_CHUNK):
        rows, digests = sound_rows(chunk) or _sound_ones(chunk, contents)
        contents.rows.update(rows)
        xor = functools.reduce(operator.xor, digests, xor)
    if contents.bad_rows:
        contents.damage.append(f"{len(contents.bad_rows)} rows do not match their digest")
    return xor


def sound_rows(chunk: Sequence[_Raw]) -> tuple[Mapping[Place, ManifestRow], Sequence[int]] | None:
    """The rows by place, and their digests, if all of them match; else None.

    A start reads every row there is, so this goes column by column, in C loops: a third of the time of ``ManifestRow.digest`` on each.
    """
    group, slot, key, length, checksum, priority, expiry, hits, stored = columns = tuple(zip(*chunk, strict=True))
    try:
        numbers = map(ROW_LAYOUT.pack, group, slot, length, priority, hits, expiry)
        packed = map(b"".join, zip(numbers, key, checksum, strict=True))
        digests = list(map(xxhash.xxh3_64_intdigest, packed, itertools.repeat(BLOCK_SEED)))
        if digests != list(map(operator.and_, stored, itertools.repeat(_UNSIGNED))):
            return None
    except (struct.error, TypeError):  # a column has changed its kind
        return None
    rows = map(ManifestRow._make, zip(*columns[:8], strict=True))
    return dict(zip(zip(group, slot, strict=True), rows, strict=True)), stored


def _sound_ones(chunk: Sequence[_Raw], contents: ManifestContents) -> tuple[Mapping[Place, ManifestRow], Sequence[int]]:
    """Those rows that match their digests; the others become ``contents.bad_rows``."""
    rows: dict[Place, ManifestRow] = {}
    digests: list[int] = []
    for raw in chunk:
        row = ManifestRow._make(raw[:8])
        try:
            sound = row.digest() == raw[8]
        except (struct.error, TypeError):
            sound = False
        if sound:
            rows[row.group, row.slot] = row
            digests.append(raw[8])
        else:
            contents.bad_rows.append((row.group, row.slot) if isinstance(row.group, int) and isinstance(row.slot, int) else None)
    return rows, digests


def _compare_totals(connection: sqlite3.Connection, contents: ManifestContents, found: Totals) -> None:
    totals = stored_totals(connection)
    if totals is None:
        contents.damage.append("the row of totals does not match its digest")
        return
    if totals.namespace != found.namespace:
        contents.damage.append("its rows belong to another namespace or to the time before a reset")
        contents.rows.clear()
        contents.bad_rows.clear()
    elif totals != found and not contents.damage:
        contents.damage.append(f"it should hold {totals.blocks} blocks and {totals.quarantined} quarantined slots, it holds "
                               f"{found.blocks} and {found.quarantined}")

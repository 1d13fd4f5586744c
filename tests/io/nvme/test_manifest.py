"""The index: what was committed is there, what was damaged is noticed, and nothing vanishes without a word."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupting import cut_short

import kvtier.io.manifest
from kvtier.errors import TransferError
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import ManifestRow, QuarantineRow
from kvtier.io.wal_check import claimed_frames, wal_path

NAMESPACE = b"n" * 32
MODULE = Path(kvtier.io.manifest.__file__)


def make_row(slot: int, group: int = 0, **changes: object) -> ManifestRow:
    row = ManifestRow(group, slot, bytes([group, slot % 256]) * 16, 8192, bytes([slot % 256]) * 16, 35 + slot % 3, slot * 0.5, 0)
    return row._replace(**changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed manifest with 300 rows and a slot in quarantine."""
    path = tmp_path / "manifest.sqlite"
    manifest = Manifest(path, NAMESPACE)
    manifest.create()
    manifest.put([make_row(slot) for slot in range(300)])
    manifest.put([make_row(slot, group=1) for slot in range(5)])
    manifest.quarantine([QuarantineRow(0, 7, b"", "flipped bit", 5.0)])
    manifest.close(60.0)
    return path


def sql(path: Path, statement: str, *parameters: object) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement, parameters)


def load(path: Path, namespace: bytes = NAMESPACE):
    manifest = Manifest(path, namespace)
    contents = manifest.load()
    manifest.close(60.0)
    return contents


def test_what_was_committed_is_there_again(path: Path) -> None:
    contents = load(path)
    assert contents.damage == []
    assert contents.rows == {(row.group, row.slot): row for row in [*(make_row(slot) for slot in range(300) if slot != 7),
                                                                  *(make_row(slot, group=1) for slot in range(5))]}
    assert contents.quarantine == {(0, 7): QuarantineRow(0, 7, b"", "flipped bit", 5.0)}


def test_memory_and_file_agree_after_every_kind_of_change(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    manifest.put([make_row(3, key=b"z" * 32), make_row(400)], hits={(0, 4): 2, (0, 5): 1, (0, 999): 1})
    assert manifest.delete([(0, 10), (0, 10), (0, 11), (0, 999)]) == 2
    manifest.quarantine([QuarantineRow(0, 12, b"k" * 32, "ü", 6.0), QuarantineRow(0, 500, b"", "no row", 6.0)])
    assert manifest.forget_beyond([290, 0]) == (10 + 1 + 5, 1)
    rows = {(row.group, row.slot): row for row in manifest.rows()}
    quarantine = manifest.quarantined()
    assert rows[0, 4].hits == 2
    assert manifest.counts() == (len(rows), len(quarantine)) == (290 - 4, 2)
    manifest.close(60.0)
    contents = load(path)
    assert contents.damage == []
    assert contents.rows == rows
    assert contents.quarantine == quarantine


@pytest.mark.parametrize("column", ["slot = 1000", "group_number = 3", "key = x'00'", "key = zeroblob(32)", "length = 4096",
                                    "checksum = zeroblob(16)", "priority = 36.5", "priority = 99", "expiry = 1.25", "hits = 1",
                                    "digest = digest + 1", "key = NULL", "length = 'x'", "digest = NULL", "expiry = x'ff'"])
def test_a_row_changed_in_any_column_is_noticed_and_not_believed(path: Path, column: str) -> None:
    sql(path, f"UPDATE blocks SET {column} WHERE group_number = 0 AND slot = 20")
    contents = load(path)
    assert contents.damage == ["1 rows do not match their digest"]
    assert len(contents.bad_rows) == 1
    assert len(contents.rows) == 303
    assert (0, 20) not in contents.rows


def test_rows_that_vanished_are_noticed(path: Path) -> None:
    sql(path, "DELETE FROM blocks WHERE slot > 250")
    assert load(path).damage == ["it should hold 304 blocks and 1 quarantined slots, it holds 255 and 1"]


def test_a_row_exchanged_for_an_older_one_of_its_own_is_noticed(path: Path) -> None:
    old = make_row(20, priority=1)
    sql(path, "UPDATE blocks SET priority = ?, digest = ? WHERE group_number = 0 AND slot = 20", old.priority, old.digest())
    assert len(load(path).damage) == 1


@pytest.mark.parametrize("statement", ["UPDATE quarantine SET slot = 8", "UPDATE quarantine SET reason = 'nothing'",
                                       "UPDATE quarantine SET reason = NULL", "DELETE FROM quarantine"])
def test_a_changed_or_lost_quarantine_is_noticed(path: Path, statement: str) -> None:
    sql(path, statement)
    assert load(path).damage


@pytest.mark.parametrize("statement", ["UPDATE totals SET blocks = 303", "DELETE FROM totals", "UPDATE totals SET digest = 'x'",
                                       "DROP TABLE totals", "DROP TABLE blocks", "ALTER TABLE blocks RENAME COLUMN key TO kex"])
def test_damaged_totals_or_tables_are_noticed(path: Path, statement: str) -> None:
    sql(path, statement)
    assert load(path).damage


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"SQLite format 3\0" + b"\0" * 4080])
def test_a_file_that_is_no_database_is_damage_and_not_an_exception(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "manifest.sqlite"
    path.write_bytes(content)
    assert load(path).damage


def test_rows_of_another_namespace_are_not_believed(path: Path) -> None:
    contents = load(path, b"m" * 32)
    assert contents.damage == ["its rows belong to another namespace or to the time before a reset"]
    assert contents.rows == {}


def test_a_header_that_says_read_only_is_damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(18)
        assert file.read(2) == b"\2\2"
        file.seek(18)
        file.write(b"\6")
    assert load(path).damage


def test_a_cleared_manifest_holds_nothing_and_keeps_the_quarantine(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    manifest.clear(b"m" * 32)
    assert manifest.rows() == []
    manifest.put([make_row(1)])
    manifest.close(60.0)
    contents = load(path, b"m" * 32)
    assert contents.damage == []
    assert list(contents.rows) == [(0, 1)]
    assert list(contents.quarantine) == [(0, 7)]


def test_a_commit_that_fails_changes_nothing_and_the_next_one_goes_through(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")  # another process holds the write lock
        manifest._connection.execute("PRAGMA busy_timeout = 10")
        for call in (lambda: manifest.put([make_row(400)]), lambda: manifest.delete([(0, 1)]),
                     lambda: manifest.quarantine([QuarantineRow(0, 2, b"", "x", 1.0)]), lambda: manifest.forget_beyond([10, 1])):
            with pytest.raises(TransferError, match=r"nothing was committed: another program holds a lock"):
                call()
        assert manifest.row(0, 400) is None
        assert manifest.row(0, 1) is not None
        assert manifest.counts() == (304, 1)
        other.execute("ROLLBACK")
    manifest.put([make_row(400)])
    manifest.close(60.0)
    contents = load(path)
    assert contents.damage == []
    assert (0, 400) in contents.rows


class LyingConnection:
    """Commits, and then says that it could not: the one failure after which the file holds more than memory knows."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self.real = real
        self.lies = True

    def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
        cursor = self.real.execute(statement, *parameters)
        if statement == "COMMIT" and self.lies:
            raise sqlite3.OperationalError("disk I/O error")
        return cursor

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_a_commit_that_failed_only_seemingly_is_discovered_before_the_next_change(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    manifest._connection = LyingConnection(manifest._connection)
    with pytest.raises(TransferError, match="disk I/O error"):
        manifest.put([make_row(400)])
    assert manifest.row(0, 400) is None
    with pytest.raises(TransferError, match="disk I/O error"):
        manifest.delete([(0, 1), (0, 2)])
    manifest._connection.lies = False
    manifest.put([make_row(401)])
    assert manifest.row(0, 400) == make_row(400)
    assert manifest.row(0, 1) is None
    manifest.close(60.0)
    assert load(path).damage == []


class InterruptedConnection:
    """Does what it is told and is then cut short, as by Ctrl-C, once."""

    def __init__(self, real: sqlite3.Connection, statement: str) -> None:
        self.real = real
        self.statement = statement

    def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
        return self._run(self.real.execute, statement, *parameters)

    def executemany(self, statement: str, *parameters: object) -> sqlite3.Cursor:
        return self._run(self.real.executemany, statement, *parameters)

    def _run(self, call: Callable[..., sqlite3.Cursor], statement: str, *parameters: object) -> sqlite3.Cursor:
        cursor = call(statement, *parameters)
        if self.statement and statement.startswith(self.statement):
            self.statement = ""
            raise KeyboardInterrupt
        return cursor

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.mark.parametrize("statement", ["BEGIN", "INSERT OR REPLACE INTO blocks", "INSERT OR REPLACE INTO totals", "COMMIT"])
@pytest.mark.parametrize("closes_at_once", [True, False])
def test_a_commit_cut_short_by_ctrl_c_blocks_neither_the_next_one_nor_close(path: Path, statement: str, closes_at_once: bool,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    manifest._connection = InterruptedConnection(manifest._connection, statement)
    with pytest.raises(KeyboardInterrupt):
        manifest.put([make_row(400)])
    committed = statement == "COMMIT"
    if not closes_at_once:
        manifest.put([make_row(401)])
        assert (manifest.row(0, 400) is not None) is committed
    manifest.close(60.0)
    assert caplog.records == []
    assert [entry.name for entry in path.parent.iterdir()] == ["manifest.sqlite"]
    contents = load(path)
    assert contents.damage == []
    assert ((0, 400) in contents.rows) is committed
    assert ((0, 401) in contents.rows) is not closes_at_once


CHANGES: dict[str, Callable[[Manifest], object]] = {
    "put": lambda manifest: manifest.put([make_row(1), make_row(3), make_row(9)], hits={(0, 0): 2}),
    "delete": lambda manifest: manifest.delete([(0, 0), (0, 2), (0, 8)]),
    "quarantine": lambda manifest: manifest.quarantine([QuarantineRow(0, slot, b"", "flipped bit", 5.0) for slot in (0, 1)]),
    "release": lambda manifest: manifest.release(),
    "forget_beyond": lambda manifest: manifest.forget_beyond([1]),
    "clear": lambda manifest: manifest.clear(NAMESPACE)}


@pytest.mark.parametrize("change", CHANGES)
def test_wherever_a_change_is_cut_short_the_next_ones_and_the_next_start_find_file_and_memory_in_agreement(tmp_path: Path,
                                                                                                          change: str) -> None:
    before, path = tmp_path / "before", tmp_path / "manifest.sqlite"
    manifest = Manifest(before, NAMESPACE)
    manifest.create()
    manifest.put([make_row(slot) for slot in range(4)])
    manifest.quarantine([QuarantineRow(0, slot, b"", "flipped bit", 5.0) for slot in (5, 6)])
    manifest.close(60.0)
    place = 0
    while True:
        shutil.copy(before, path)
        manifest = Manifest(path, NAMESPACE)
        manifest.load()
        was_cut = cut_short(lambda manifest=manifest: CHANGES[change](manifest), place, room=MODULE)
        manifest.put([make_row(slot) for slot in (0, 3, 8)])
        manifest.delete([(0, slot) for slot in (0, 1, 9)])
        assert manifest.close(60.0)
        contents = load(path)
        assert contents.damage == []
        assert contents.rows == {(row.group, row.slot): row for row in manifest.rows()}
        assert contents.quarantine == manifest.quarantined()
        if not was_cut:
            break
        place += 1
    assert place > 5


def test_a_clear_that_fails_shows_no_old_row_and_is_made_up_for(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        manifest._connection.execute("PRAGMA busy_timeout = 10")
        with pytest.raises(TransferError, match="locked"):
            manifest.clear(b"m" * 32)
        assert manifest.rows() == []
        with pytest.raises(TransferError, match="locked"):
            manifest.put([make_row(2)])
        other.execute("ROLLBACK")
    manifest.put([make_row(1)])
    assert [row.slot for row in manifest.rows()] == [1]
    manifest.close(60.0)
    contents = load(path, b"m" * 32)
    assert contents.damage == []
    assert list(contents.rows) == [(0, 1)]


@pytest.mark.parametrize("clears_at_once", [True, False])
def test_a_clear_behind_a_quarantine_that_failed_only_seemingly_goes_through(path: Path, clears_at_once: bool) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    before = manifest.counts()[1]
    manifest._connection = LyingConnection(manifest._connection)
    with pytest.raises(TransferError, match="disk I/O error"):
        manifest.quarantine([QuarantineRow(0, 1, b"k" * 32, "bad", 0)])
    if not clears_at_once:  # whether the clear itself reached the file is not known either
        with pytest.raises(TransferError, match="disk I/O error"):
            manifest.clear(b"m" * 32)
    manifest._connection.lies = False
    manifest.clear(b"m" * 32)
    assert manifest.counts() == (0, before + 1)
    manifest.close(60.0)
    contents = load(path, b"m" * 32)
    assert contents.damage == []
    assert (0, 1) in contents.quarantine


def test_a_closed_manifest_takes_nothing_and_leaves_no_log(path: Path) -> None:
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    assert manifest.close(60.0)
    assert manifest.close(60.0)
    with pytest.raises(TransferError, match="closed"):
        manifest.put([make_row(1)])
    assert [entry.name for entry in path.parent.iterdir()] == ["manifest.sqlite"]


@pytest.mark.parametrize(("sync", "level"), [(False, 1), (True, 2)])
def test_commits_are_normal_by_default_and_full_on_demand(path: Path, sync: bool, level: int) -> None:
    manifest = Manifest(path, NAMESPACE, sync=sync)
    manifest.load()
    assert manifest._connection.execute("PRAGMA synchronous").fetchone() == (level,)
    assert manifest._connection.execute("PRAGMA journal_mode").fetchone() == (b"wal",)
    manifest.close(60.0)


@pytest.fixture
def killed(path: Path, tmp_path: Path) -> Path:
    """The files as a killed process leaves them: 20 transactions only in the log, behind them the remains of an older run."""
    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    for start in range(1000, 2000, 100):
        manifest.put([make_row(slot) for slot in range(start, start + 100)])
    manifest._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    for slot in range(400, 420):
        manifest.put([make_row(slot)])
    copy = tmp_path / "killed"
    copy.mkdir()
    for name in ("manifest.sqlite", "manifest.sqlite-wal"):
        shutil.copy(path.parent / name, copy / name)
    manifest.close(60.0)
    return copy / "manifest.sqlite"


def test_a_log_left_by_a_killed_process_is_read_whole(killed: Path) -> None:
    contents = load(killed)
    assert contents.damage == []
    assert len(contents.rows) == 304 + 1000 + 20


def test_every_flipped_bit_in_a_log_is_noticed_or_harmless(killed: Path) -> None:
    """SQLite itself drops the transactions behind the damage and says nothing."""
    log = killed.with_name("manifest.sqlite-wal")
    frames, content = claimed_frames(log), log.read_bytes()
    database = killed.read_bytes()
    assert 20 <= frames < (len(content) - 32) // (24 + 4096)
    noticed = 0
    end = 32 + frames * (24 + 4096)
    # The log's header, the header of a frame early, in the middle and at the end, and bytes of pages.
    positions = [*range(0, 32, 2), *range(33, 56, 3), *range(32 + 8 * 4120, 56 + 8 * 4120, 3), *range(end - 4120, end - 4096),
                 *range(100, end, 9001)]
    for position in positions:
        for side in killed.parent.iterdir():
            side.unlink()
        killed.write_bytes(database)
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        log.write_bytes(damaged)
        contents = load(killed)
        noticed += bool(contents.damage)
        assert contents.damage or len(contents.rows) == 1324, f"byte {position}: {len(contents.rows)} rows and not a word"
    assert noticed > len(positions) * 0.9


def test_a_log_that_ends_in_the_middle_of_a_commit_costs_that_commit_alone(killed: Path) -> None:
    log = killed.with_name("manifest.sqlite-wal")
    os.truncate(log, 32 + (claimed_frames(log) - 1) * (24 + 4096))
    contents = load(killed)
    assert contents.damage == []
    assert len(contents.rows) == 1323


@pytest.mark.parametrize("num_commits_before", [0, 1])
def test_what_is_left_of_a_commit_that_never_ended_is_never_taken_for_damage(path: Path, tmp_path: Path, num_commits_before: int) -> None:
    """Not by the next start, and not by the one after that, when a shorter commit has been written over its beginning."""
    def kill(manifest: Manifest, name: str) -> Path:
        """The files as a process that is killed now leaves them."""
        (tmp_path / name).mkdir()
        for file in ("manifest.sqlite", "manifest.sqlite-wal"):
            shutil.copy(manifest.path.with_name(file), tmp_path / name / file)
        manifest.close(60.0)
        return tmp_path / name / "manifest.sqlite"

    manifest = Manifest(path, NAMESPACE)
    manifest.load()
    manifest._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    for slot in range(num_commits_before):
        manifest.put([make_row(1000 + slot)])
    before = claimed_frames(wal_path(path))
    manifest.put([make_row(slot) for slot in range(2000, 2400)])
    first = kill(manifest, "first")
    after = claimed_frames(wal_path(first))
    assert after > before + 5
    os.truncate(wal_path(first), 32 + (after - 1) * (24 + 4096))
    manifest = Manifest(first, NAMESPACE)
    assert manifest.load().damage == []
    manifest.put([make_row(3000)])
    contents = load(kill(manifest, "second"))
    assert contents.damage == []
    assert len(contents.rows) == 304 + num_commits_before + 1


def test_a_manifest_of_100_000_rows_is_loaded_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.sqlite"
    manifest = Manifest(path, NAMESPACE)
    manifest.create()
    manifest.put([make_row(slot) for slot in range(100_000)])
    manifest.close(60.0)
    manifest = Manifest(path, NAMESPACE)
    assert len(manifest.load().rows) == 100_000
    manifest.close(60.0)

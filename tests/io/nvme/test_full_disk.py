"""Starts on a full disk and in directories with something in the way: nothing sound is given up, and the remedy fits."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io import manifest as manifest_module
from kvtier.io import sqlite_errors, store_directory, store_open
from kvtier.io.direct_file import DirectFile
from kvtier.io.manifest import Manifest


def failing(monkeypatch: pytest.MonkeyPatch, message: str, code: int | None, statement: str = "", exclusive_too: bool = True) -> None:
    """From now on SQLite refuses every statement that starts so; opened exclusively, only when ``exclusive_too``."""
    class Connection(sqlite3.Connection):
        exclusive = False

        def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
            self.exclusive |= "EXCLUSIVE" in sql
            if sql.startswith(statement) and "locking_mode" not in sql and (exclusive_too or not self.exclusive):
                error = sqlite3.OperationalError(message)
                if code is not None:
                    error.sqlite_errorcode = code
                raise error
            return super().execute(sql, *parameters)

    def connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=0.1, isolation_level=None, check_same_thread=False, factory=Connection)
        connection.text_factory = bytes
        return connection

    monkeypatch.setattr(manifest_module, "_connect", connect)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def filled(nvme) -> dict[tuple[int, int], bytes]:
    """A closed store with a quarantined slot and a block that was served once. Returns what it holds."""
    store = nvme.open()
    keys = nvme.fill(store)
    nvme.read(store, 0, 2, keys[0, 2])
    store.quarantine(0, 5, "flipped bit")
    assert store.close(60.0)
    del keys[0, 5]
    return keys


def complete(nvme, store, keys) -> bool:
    hits = {block.slot: block.hits for block in store.stored_blocks()}
    return nvme.stored(store) == keys and store.quarantined() == [(0, 5)] and hits[2] == 1


def files(nvme) -> dict[str, bytes]:
    """Everything that carries content: neither the lock nor what SQLite makes beside a database to read it."""
    content = {entry.name: entry.read_bytes() for entry in nvme.directory.iterdir() if not entry.name.endswith((".lock", "-shm"))}
    return {name: data for name, data in content.items() if data or not name.endswith("-wal")}


@pytest.mark.parametrize(("message", "code"), [
    ("database or disk is full", None), ("database or disk is full", sqlite3.SQLITE_FULL), ("disk I/O error", sqlite3.SQLITE_IOERR_SHMSIZE),
    ("unable to open database file", sqlite3.SQLITE_CANTOPEN)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_store_that_a_full_disk_keeps_from_being_read_is_refused_and_left_as_it_is(nvme, monkeypatch, message, code, number) -> None:
    keys = filled(nvme)
    before = files(nvme)

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    failing(monkeypatch, message, code)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"the disk is full.*nothing in it was changed"):
        nvme.open()
    assert files(nvme) == before
    monkeypatch.undo()
    assert complete(nvme, nvme.open(), keys)


def test_where_only_the_side_files_find_no_room_the_store_is_served_all_the_same(nvme, monkeypatch) -> None:
    keys = filled(nvme)
    failing(monkeypatch, "disk I/O error", sqlite3.SQLITE_IOERR_SHMSIZE, exclusive_too=False)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    store = nvme.open()
    assert complete(nvme, store, keys)
    assert all(nvme.reads_right(store, *place, key) for place, key in keys.items())


def test_on_a_full_disk_what_is_there_is_served_and_writes_pause(nvme, monkeypatch, clock, caplog) -> None:
    keys = filled(nvme)
    failing(monkeypatch, "database or disk is full", sqlite3.SQLITE_FULL, "COMMIT")
    store = nvme.open(clock=clock)
    assert complete(nvme, store, keys)
    assert all(nvme.reads_right(store, *place, key) for place, key in keys.items())
    assert not store.accepts_writes
    assert "no new blocks are stored" in caplog.text
    assert "disk is full" in caplog.text
    assert not [name for name in files(nvme) if ".damaged-" in name]


def test_the_pause_of_a_start_on_a_full_disk_ends(nvme, monkeypatch, clock) -> None:
    filled(nvme)
    with monkeypatch.context() as patch:
        failing(patch, "database or disk is full", sqlite3.SQLITE_FULL, "INSERT OR REPLACE INTO totals")
        store = nvme.open(clock=clock)
        assert not store.accepts_writes
        store.close(60.0)
    assert nvme.open(clock=clock).write_blocks([nvme.item(0, "new")]) == [None]


def test_an_io_error_with_room_on_the_disk_is_still_damage(nvme, monkeypatch, caplog) -> None:
    keys = filled(nvme)
    failing(monkeypatch, "disk I/O error", sqlite3.SQLITE_IOERR_READ, "SELECT group_number, slot, key, length")
    with pytest.raises(ConfigError, match="damaged again right after"):
        nvme.open()
    monkeypatch.undo()
    assert len([name for name in files(nvme) if ".damaged-" in name]) == 1
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert store.quarantined() == [(0, 5)]  # its table could be read


def test_a_foreign_lock_is_no_damage(nvme, monkeypatch) -> None:
    keys = filled(nvme)
    before = files(nvme)
    failing(monkeypatch, "database is locked", sqlite3.SQLITE_BUSY)
    with pytest.raises(ConfigError, match="another program holds a lock"):
        nvme.open()
    assert files(nvme) == before
    monkeypatch.undo()
    assert complete(nvme, nvme.open(), keys)


@pytest.mark.parametrize("step", ["create", "replace"])
def test_a_damaged_manifest_stays_in_place_until_its_replacement_is_there(nvme, monkeypatch, step: str) -> None:
    keys = filled(nvme)
    nvme.sql("UPDATE blocks SET priority = 99 WHERE slot = 4")
    before = files(nvme)
    if step == "create":
        monkeypatch.setattr(Manifest, "create", no_room)
    else:
        monkeypatch.setattr(store_open.os, "replace", no_room)
    with pytest.raises(ConfigError, match=r"No space left on device.*Free some space"):
        nvme.open()
    monkeypatch.undo()
    assert {name: content for name, content in files(nvme).items() if ".tmp" not in name} == before
    assert complete(nvme, nvme.open(), keys)


def test_without_hard_links_a_damaged_manifest_is_kept_and_comes_back_when_it_cannot_be_replaced(nvme, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    keys = filled(nvme)
    nvme.sql("UPDATE blocks SET priority = 99 WHERE slot = 4")
    monkeypatch.setattr(store_open.os, "link", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(store_open.os, "replace", no_room)
        with pytest.raises(ConfigError, match="No space left"):
            nvme.open()
    assert complete(nvme, nvme.open(), keys)
    assert len([name for name in files(nvme) if ".damaged-" in name and not name.endswith("-wal")]) == 1


@pytest.mark.parametrize("side_files", [True, False])
def test_a_log_that_lost_its_end_still_tells_after_a_rebuild_found_no_room(nvme, tmp_path, monkeypatch, caplog, side_files) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    store.close(60.0)
    store = nvme.open()
    assert store.write_blocks([nvme.item(1, "new")]) == [None]
    keys[0, 1] = nvme.key("new")
    copy = tmp_path / "killed"
    shutil.copytree(nvme.directory, copy)
    (copy / "manifest.sqlite-shm").unlink()
    log = copy / "manifest.sqlite-wal"
    nvme.directory = copy
    nvme.flip(log, log.stat().st_size - 100)  # the last commit: the row of the new block
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "create", no_room)
        if not side_files:
            patch.setattr(os, "posix_fallocate", no_room)
            failing(patch, "disk I/O error", sqlite3.SQLITE_IOERR_SHMSIZE, exclusive_too=False)
        with pytest.raises(ConfigError, match="No space left"):
            nvme.open()
    assert log.stat().st_size > 0
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert "its end is lost" in caplog.text


def test_a_log_for_which_there_is_no_room_in_the_database_is_read_in_place(nvme, tmp_path, monkeypatch) -> None:
    keys = nvme.fill(nvme.open())
    copy = tmp_path / "killed"
    shutil.copytree(nvme.directory, copy)
    nvme.directory = copy
    failing(monkeypatch, "database or disk is full", sqlite3.SQLITE_FULL, "PRAGMA wal_checkpoint")
    assert nvme.stored(nvme.open()) == keys


def test_room_is_told_from_its_lack(tmp_path, monkeypatch) -> None:
    assert not sqlite_errors.has_no_room(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert sqlite_errors.has_no_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not sqlite_errors.has_no_room(tmp_path / "missing")  # another error says nothing about room


@pytest.mark.parametrize("name", ["group-0.slab", "manifest.sqlite", "manifest.sqlite-wal", "kvtier-store.json", "kvtier.lock"])
def test_a_folder_in_the_way_is_called_one(nvme, name: str) -> None:
    filled(nvme)
    place = nvme.directory / name
    place.unlink(missing_ok=True)
    place.mkdir()
    with pytest.raises(ConfigError, match=f"{name}.*A folder is in the way") as caught:
        nvme.open()
    assert "Free some space" not in str(caught.value)
    place.rmdir()


@pytest.mark.parametrize(("number", "remedy"), [
    (errno.EACCES, "Give this user permission"), (errno.EPERM, "Give this user permission"), (errno.EROFS, "The filesystem is mounted"),
    (errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EIO, "Check the drive")])
@pytest.mark.parametrize("part", ["slab", "manifest", "lock"])
def test_each_failure_comes_with_a_remedy_that_fits(nvme, monkeypatch, part: str, number: int, remedy: str) -> None:
    filled(nvme)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), part)

    target = {"slab": (DirectFile, "__init__"), "manifest": (store_open, "Manifest"), "lock": (store_directory, "take_lock")}[part]
    monkeypatch.setattr(*target, refuse)
    with pytest.raises(ConfigError, match=f"'{part}'. {remedy}") as caught:
        nvme.open()
    assert str(caught.value).count("Free some space") == (remedy == "Free some space")

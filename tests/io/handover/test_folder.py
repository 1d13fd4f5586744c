"""The folder of handovers: what fits into it, whose files it touches, and what is said when it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from piece_rig import LIFETIME, SHAPE, Clock, files, hand_over, reader

from kvtier import CapacityError, ConfigError, TransferError
from kvtier.io import handover_folder
from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceGone


def test_a_full_folder_is_said_before_anything_is_written(tmp_path: Path, clock: Clock) -> None:
    folder = HandoverFolder(tmp_path, f"{2 * SHAPE.num_bytes + 10}B", clock)
    hand_over(folder)
    name, digest = hand_over(folder)
    with pytest.raises(CapacityError, match="hand over later, or raise capacity"):
        hand_over(folder)
    assert len(files(folder)) == 2
    reader(folder, name, digest).acknowledge()
    hand_over(folder)
    clock.now += LIFETIME + 1
    hand_over(folder)  # those that nobody took make room
    assert len(files(folder)) == 1


def test_a_full_file_system_is_an_error_of_capacity_and_leaves_nothing(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handover_folder.os, "posix_fallocate", refuse)
    with pytest.raises(CapacityError, match="no room"):
        hand_over(folder)
    assert files(folder) == []


def test_a_write_that_fails_leaves_nothing(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvtier.io.handover_piece.os.pwrite", fail)
    with pytest.raises(TransferError, match="cannot be written"):
        hand_over(folder)
    assert files(folder) == []


def test_files_of_others_are_left_alone(folder: HandoverFolder, clock: Clock) -> None:
    for name in ("notes.txt", "0" * 32 + "-1.kvx", "abc-1.part"):
        (folder.directory / name).touch()
    clock.now += 1e6
    assert folder.collect() == 0
    assert len(files(folder)) == 3
    for name in ("../../etc/passwd", "notes.txt", ""):
        assert folder.open(name) is None


def test_only_handovers_are_removed_whatever_name_is_given(folder: HandoverFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for path in (outside, folder.directory / "notes.txt"):
        path.touch()
    for name in (str(outside), os.path.relpath(outside, folder.directory), "notes.txt", "", "\0"):
        assert not folder.remove(name)
    assert outside.exists()
    assert files(folder) == ["notes.txt"]


def test_who_looks_while_a_file_is_made_does_not_remove_it_from_under_its_writer(folder: HandoverFolder,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has seen that nobody holds the new file, and its writer takes it before it is removed."""
    seen, held = threading.Event(), threading.Event()
    is_locked, truncate, create = handover_folder.is_locked, os.ftruncate, folder._create
    collector = threading.Thread(target=folder.collect)

    def looks(file: int, number: int, count: int = 1) -> bool:
        found = is_locked(file, number, count)
        if number == handover_folder.FIRST_READER and not seen.is_set():
            seen.set()
            held.wait(0.3)
        return found

    def created(*arguments: Any) -> int:
        file = create(*arguments)
        held.set()
        collector.join(30)
        return file

    def made(file: int, size: int) -> None:
        truncate(file, size)
        if not seen.is_set():
            collector.start()
            assert seen.wait(30)

    monkeypatch.setattr(handover_folder, "is_locked", looks)
    monkeypatch.setattr(folder, "_create", created)
    monkeypatch.setattr(handover_folder.os, "ftruncate", made)
    name, _digest = hand_over(folder)
    assert files(folder) == [name]


def test_a_file_system_without_locks_is_an_error_at_once(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    name, digest = hand_over(folder)
    control = fcntl.fcntl

    def refuse(file: int, command: int, argument: bytes) -> bytes:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.ENOLCK, "No locks available")
        return control(file, command, argument)

    with monkeypatch.context() as patch:
        patch.setattr("kvtier.io.byte_locks.fcntl.fcntl", refuse)
        with pytest.raises(TransferError, match="No locks available"):
            hand_over(folder)
        with pytest.raises(TransferError, match="No locks available"):
            reader(folder, name, digest)
        assert folder.collect() == 0
    assert files(folder) == [name]


def test_a_folder_that_was_deleted_is_an_empty_one_and_made_again(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    shutil.rmtree(folder.directory)
    assert folder.collect() == 0
    assert folder.used_bytes == 0
    with pytest.raises(PieceGone):
        reader(folder, name, digest)
    name, digest = hand_over(folder)
    assert stat.S_IMODE(folder.directory.stat().st_mode) == 0o700
    reader(folder, name, digest).acknowledge()


def test_a_deleted_folder_that_cannot_be_made_again_is_an_error_of_that_handover(tmp_path: Path) -> None:
    folder = HandoverFolder(tmp_path / "above" / "handover", "1MiB")
    shutil.rmtree(tmp_path / "above")
    (tmp_path / "above").touch()
    assert folder.collect() == 0
    with pytest.raises(TransferError, match="above"):
        hand_over(folder)


def test_a_folder_that_became_somebody_elses_is_not_written(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_folder.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(TransferError, match="another user"):
        hand_over(folder)
    assert files(folder) == []


def test_a_folder_that_cannot_be_looked_into_is_looked_into_later(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch,
                                                                 clock: Clock) -> None:
    name, _digest = hand_over(folder)
    clock.now += LIFETIME + 1

    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(handover_folder.os, "listdir", fail)
        patch.setattr(handover_folder.os, "lstat", fail)
        assert folder.collect() == 0
        assert folder.has(name), "nothing says that it was taken"
    assert folder.collect() == 1
    assert not folder.has(name)


@pytest.mark.parametrize("directory", [None, 5, "", "$KV_TEST_NOWHERE/x", "~nobody-of-this-name/x", "a\0b"])
def test_a_directory_that_is_none_is_refused(directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_TEST_NOWHERE", raising=False)
    with pytest.raises(ConfigError, match="directory="):
        HandoverFolder(directory, "1MiB")


def test_home_and_variables_in_a_directory_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KV_TEST_PLACE", "here")
    monkeypatch.chdir(tmp_path)
    assert HandoverFolder("~/$KV_TEST_PLACE", "1MiB").directory == tmp_path / "here"
    assert HandoverFolder("relative", "1MiB").directory == tmp_path / "relative"


def test_a_link_in_shared_memory_is_not_followed(tmp_path: Path) -> None:
    """Anybody can make one there, to a folder of somebody else."""
    name = f"test-{uuid.uuid4().hex}"
    link = Path("/dev/shm") / f"kvtier-handover-{name}"
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigError, match="a link"):
            HandoverFolder.in_shared_memory(name, "1MiB")
        assert list(tmp_path.iterdir()) == []
    finally:
        link.unlink()


@pytest.mark.parametrize("capacity", ["5 blocks", "90%", "0B"])
def test_a_capacity_is_a_size_in_bytes(tmp_path: Path, capacity: str) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        HandoverFolder(tmp_path, capacity)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 65, 5])
def test_a_name_in_shared_memory_is_a_simple_one(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        HandoverFolder.in_shared_memory(name, "1MiB")


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a folder that can be written"):
        HandoverFolder(tmp_path / "file" / "folder", "1MiB")

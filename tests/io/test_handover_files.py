"""Files that are handed over: complete or not there, taken once by each rank, removed by whoever looks next when nobody holds them."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import CapacityError, ConfigError, CorruptBlock, TransferError
from kvtier.io import handover_folder
from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceBusy, PieceGone, PieceReader, PieceShape, PieceWriter

SHAPE = PieceShape((64, 0, 100), (5, 3, 2))
KEYS = [bytes([number]) * 32 for number in range(5)]
LIFETIME = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["directory", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[HandoverFolder]:
    if request.param == "directory":
        yield HandoverFolder(tmp_path / "handover", "1MiB", clock)
        return
    made = HandoverFolder.in_shared_memory(f"test-{uuid.uuid4().hex}", "1MiB", clock)
    yield made
    for path in made.directory.iterdir():
        path.unlink()
    made.directory.rmdir()


def content(group: int) -> np.ndarray:
    return np.random.default_rng(group).integers(0, 256, (SHAPE.num_blocks[group], SHAPE.block_bytes[group]), dtype=np.uint8)


def write(folder: HandoverFolder, writer: PieceWriter) -> bytes:
    for group in (0, 2):
        count = SHAPE.num_blocks[group]
        writer.write(group, 0, content(group), KEYS[:count], range(count))
    return writer.finish(folder.now() + LIFETIME)


def hand_over(folder: HandoverFolder) -> tuple[str, bytes]:
    with PieceWriter(folder, SHAPE) as writer:
        digest = write(folder, writer)
        return writer.name, digest


def reader(folder: HandoverFolder, name: str, digest: bytes, rank: int = 0, num_ranks: int = 1, readers: range = range(1)) -> PieceReader:
    return PieceReader(folder, name, SHAPE, digest, rank, num_ranks, readers)


def files(folder: HandoverFolder) -> list[str]:
    return sorted(os.listdir(folder.directory))


def test_what_was_written_is_read_and_gone_once_it_is_acknowledged(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    for group in (0, 2):
        count = SHAPE.num_blocks[group]
        assert np.array_equal(piece.read(group, 0, KEYS[:count], range(count)), content(group))
    assert np.array_equal(piece.read(0, 3, KEYS[3:], [3, 4]), content(0)[3:])
    assert files(folder) == [name]
    piece.acknowledge()
    assert files(folder) == []
    with pytest.raises(PieceGone, match="taken already"):
        reader(folder, name, digest)


def test_a_file_is_not_seen_before_it_is_complete(folder: HandoverFolder) -> None:
    with PieceWriter(folder, SHAPE) as writer:
        assert files(folder) == [writer.name]
        for name in (writer.name, writer.name.replace(".part", ".kv")):
            with pytest.raises(PieceGone):
                reader(folder, name, bytes(16))
        assert folder.collect() == 0  # its writer lives
    assert files(folder) == []


def test_only_one_at_a_time_reads_for_a_rank_and_who_lets_go_has_taken_nothing(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    first = reader(folder, name, digest)
    with pytest.raises(PieceBusy):
        reader(folder, name, digest)
    first.release()
    reader(folder, name, digest).acknowledge()
    assert files(folder) == []


def test_every_rank_takes_it_once_and_the_last_one_removes_it(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    wanted = range(0, 4, 3)  # ranks 1 and 2 want nothing of this piece
    one, other = (reader(folder, name, digest, rank, 4, wanted) for rank in (0, 3))
    with pytest.raises(PieceGone, match="4 ranks, this is one of 2"):
        reader(folder, name, digest, 1, 2, range(2))
    one.acknowledge()
    assert files(folder) == [name]
    with pytest.raises(PieceGone, match="rank 0 has taken it already"):
        reader(folder, name, digest, 0, 4, wanted)
    other.acknowledge()
    assert files(folder) == []


def test_ranks_of_another_number_that_took_nothing_are_not_in_the_way(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    reader(folder, name, digest, 1, 4, range(4)).release()
    reader(folder, name, digest).acknowledge()
    assert files(folder) == []


def test_after_the_deadline_nothing_is_read_and_anybody_removes_it(folder: HandoverFolder, clock: Clock) -> None:
    name, digest = hand_over(folder)
    clock.now += LIFETIME + 1
    with pytest.raises(PieceGone, match="time is over"):
        reader(folder, name, digest)
    assert folder.collect() == 1
    assert files(folder) == []


def test_what_is_being_read_is_not_removed_at_its_deadline(folder: HandoverFolder, clock: Clock) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    clock.now += LIFETIME + 1
    assert folder.collect() == 0
    assert not folder.remove(name)
    assert len(piece.read(0, 0, KEYS, range(5))) == 5
    piece.release()
    assert folder.collect() == 1


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_ends_what_is_good(folder: HandoverFolder, bit: int) -> None:
    name, digest = hand_over(folder)
    flip(folder, name, SHAPE.offset(0, 3) + 7 * bit, bit)
    piece = reader(folder, name, digest)
    assert np.array_equal(piece.read(0, 0, KEYS, range(5)), content(0)[:3])
    assert len(piece.read(0, 3, KEYS[3:], [3, 4])) == 0
    piece.release()


def test_a_damaged_table_or_another_file_is_no_piece_of_this_ticket(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    other, other_digest = hand_over(folder)
    assert digest == other_digest  # equal content
    with pytest.raises(CorruptBlock):
        reader(folder, other, bytes(16))
    flip(folder, name, 4096 + 17, 3)
    with pytest.raises(CorruptBlock, match="damaged"):
        reader(folder, name, digest)
    with (folder.directory / other).open("r+b") as file:
        file.truncate(SHAPE.num_bytes - 1)
    with pytest.raises(CorruptBlock):
        reader(folder, other, digest)


def test_right_bytes_in_the_wrong_place_are_not_good(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    assert len(piece.read(0, 0, [KEYS[1], KEYS[0]], [0, 1])) == 0
    assert len(piece.read(0, 0, KEYS[:2], [1, 2])) == 0
    assert len(piece.read(0, 1, KEYS[1:3], [1, 2])) == 2
    piece.release()


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


def flip(folder: HandoverFolder, name: str, place: int, bit: int) -> None:
    with (folder.directory / name).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def test_of_many_that_want_it_at_once_one_has_it(folder: HandoverFolder) -> None:
    for _ in range(5):
        name, digest = hand_over(folder)
        taken: list[int] = []
        begin = threading.Barrier(6)

        def take(number: int, name: str = name, digest: bytes = digest, begin: threading.Barrier = begin, taken: list[int] = taken) -> None:
            begin.wait(30)
            while True:
                folder.collect()
                try:
                    piece = reader(folder, name, digest)
                except PieceBusy:
                    continue
                except PieceGone:
                    return
                assert len(piece.read(0, 0, KEYS, range(5))) == 5
                if number % 2:  # it has changed its mind
                    piece.release()
                    return
                piece.acknowledge()
                taken.append(number)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        assert files(folder) == []


# -- killed processes ----------------------------------------------------------------------------------------------------


def hang(directory: Path, what: str, name: str, digest: bytes, connection: Connection) -> None:
    folder = HandoverFolder(directory, "1MiB", Clock())
    if what == "write":
        held: object = PieceWriter(folder, SHAPE)
    else:
        held = reader(folder, name, digest)
    connection.send(what)
    connection.recv()
    del held


def killed(directory: Path, what: str, name: str, digest: bytes, folder: HandoverFolder) -> list[str]:
    """What lies in the folder while a process holds something there, which is then killed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hang, args=(directory, what, name, digest, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == what
    found = files(folder)
    folder.collect()
    assert files(folder) == found  # it lives
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    return found


def test_a_writer_that_is_killed_leaves_a_file_that_the_next_one_removes(folder: HandoverFolder) -> None:
    [part] = killed(folder.directory, "write", "", b"", folder)
    assert part.endswith(".part")
    assert folder.collect() == 1
    assert files(folder) == []


def test_a_reader_that_is_killed_has_taken_nothing(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    assert killed(folder.directory, "read", name, digest, folder) == [name]
    piece = reader(folder, name, digest)
    assert len(piece.read(0, 0, KEYS, range(5))) == 5
    piece.acknowledge()
    assert files(folder) == []

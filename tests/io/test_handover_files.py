"""Files that are handed over: complete or not there, taken once by each rank, removed by whoever looks next when nobody holds them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

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

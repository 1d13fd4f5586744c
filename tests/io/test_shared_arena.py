"""Rules of the arena in shared memory: whoever comes first makes it, its shape is agreed, and it never outlives its processes for long."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.io import shared_arena
from kvtier.io.job_board import MAX_JOBS
from kvtier.io.shared_arena import ArenaShape, SharedArena, remove_stale

SHAPE = ArenaShape("engine-1", (5000, 100), (3, 2), ranks=2, copies=2)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[SharedArena]]:
    made: list[SharedArena] = []
    yield made
    for arena in made:
        arena.close()


def open_in(folder: Path, made: list[SharedArena], rank: int | None = None, shape: ArenaShape = SHAPE) -> SharedArena:
    made.append(SharedArena(shape, rank, folder=folder, timeout=60.0))
    return made[-1]


@pytest.mark.parametrize("first", [None, 0])
def test_whoever_comes_first_makes_it_and_all_see_the_same_bytes(tmp_path: Path, opened: list[SharedArena], first: int | None) -> None:
    left, right = (open_in(tmp_path, opened, rank) for rank in ((None, 0) if first is None else (0, None)))
    assert stat.S_IMODE(left.path.stat().st_mode) == 0o600
    assert left.path.stat().st_blocks * 512 >= SHAPE.num_bytes, "all of it has been taken"
    for number, (ours, theirs) in enumerate(zip(left.groups, right.groups, strict=True)):
        assert ours is not None
        assert theirs is not None
        ours.rows[-1] = 7 + number
        assert theirs.rows[-1].tolist() == [7 + number] * SHAPE.block_bytes[number]
        assert not theirs.padded_rows[0].any()
        assert theirs.padded_rows.ctypes.data % 4096 == 0


def test_the_board_tells_which_rank_has_copied_and_ended_what(tmp_path: Path, opened: list[SharedArena]) -> None:
    index, *ranks = (open_in(tmp_path, opened, rank) for rank in (None, 0, 1))
    board = index.board
    assert board.all_opened()
    job = 3 * MAX_JOBS + 5
    ranks[0].board.note_whole(0, [2, 0], 0, job)
    ranks[1].board.note_whole(0, [2], 1, job)
    assert board.whole(0, [0, 1, 2], job) == [False, False, True]
    assert board.whole(0, [2], job - MAX_JOBS) == [False]
    ranks[0].board.note_ended(0, job)
    assert (board.has_ended(0, job), board.has_ended(1, job)) == (True, False)
    assert not board.has_ended(0, job - MAX_JOBS)


def test_a_rank_that_has_gone_is_known_to_have_gone(tmp_path: Path, opened: list[SharedArena]) -> None:
    index, rank = open_in(tmp_path, opened), open_in(tmp_path, opened, 0)
    assert index.is_alive(0)
    assert not index.is_alive(1)
    assert not index.board.has_opened(1)
    rank.close()
    assert not index.is_alive(0)
    assert index.board.has_opened(0)


@pytest.mark.parametrize("part", [None, 0], ids=["index", "worker"])
def test_what_is_closed_is_given_back_though_a_child_has_it_open(tmp_path: Path, opened: list[SharedArena], part: int | None) -> None:
    closed, other = open_in(tmp_path, opened, part), open_in(tmp_path, opened, 0 if part is None else None)
    held = os.dup(closed._file)  # what a child has that was forked meanwhile
    try:
        closed.close()
        assert not (other.has_index if part is None else other.is_alive(0))
        other.close()
        assert not list(tmp_path.iterdir()), "nobody uses it any more"
    finally:
        os.close(held)


def test_a_forked_child_that_closes_it_takes_nothing_from_its_parent(tmp_path: Path, opened: list[SharedArena],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    index, worker = open_in(tmp_path, opened), open_in(tmp_path, opened, 0)
    parents = os.dup(index._file)
    try:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            index.close()
        assert worker.has_index
        assert remove_stale(tmp_path) == 0
    finally:
        os.close(parents)


def test_another_shape_under_the_same_name_is_refused(tmp_path: Path, opened: list[SharedArena]) -> None:
    open_in(tmp_path, opened)
    with pytest.raises(ConfigError, match="another arena than this one's"):
        open_in(tmp_path, opened, 0, ArenaShape("engine-1", (5000, 100), (4, 2), 2, 2))


def test_each_part_is_there_once(tmp_path: Path, opened: list[SharedArena]) -> None:
    open_in(tmp_path, opened)
    open_in(tmp_path, opened, 1)
    for rank, who in ((None, "another index"), (1, "another worker of rank 1")):
        with pytest.raises(ConfigError, match=who):
            open_in(tmp_path, opened, rank)
    open_in(tmp_path, opened, 0)


def test_once_it_is_unlinked_it_ends_with_its_processes(tmp_path: Path, opened: list[SharedArena]) -> None:
    index, rank = open_in(tmp_path, opened), open_in(tmp_path, opened, 0)
    index.unlink()
    assert not list(tmp_path.iterdir())
    slots = rank.groups[0]
    assert slots is not None
    slots.rows[0] = 9
    assert index.groups[0] is not None
    assert index.groups[0].rows[0, 0] == 9
    again = open_in(tmp_path, opened)
    index.unlink()
    assert again.path.exists(), "that is another one's file"


def hold(folder: str, sender: Connection) -> None:
    arena = SharedArena(SHAPE, 0, folder=Path(folder))
    slots = arena.groups[0]
    assert slots is not None
    slots.rows[:] = 255
    sender.send(True)
    signal.pause()


def test_what_a_killed_process_left_is_made_anew_or_removed_by_the_next_one(tmp_path: Path, opened: list[SharedArena]) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=hold, args=(str(tmp_path), sender))
    child.start()
    try:
        assert receiver.poll(60)
        assert remove_stale(tmp_path) == 0, "it is in use"
    finally:
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join(60.0)
    stale = tmp_path / "kvtier-engine-1.arena"
    assert stale.exists()
    anew = open_in(tmp_path, opened)
    assert anew.groups[0] is not None
    assert not anew.groups[0].rows.any()
    assert not anew.board.has_opened(0)
    worker = open_in(tmp_path, opened, 1)
    anew.close()
    assert stale.exists()
    worker.close()
    assert not stale.exists(), "the last one removes it"


def test_an_arena_made_anew_under_the_name_of_a_stale_one_is_not_taken_for_it(tmp_path: Path, opened: list[SharedArena],
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    old = open_in(tmp_path, opened)
    lock_file = shared_arena._lock_file

    def late(file: int, how: int) -> bool:
        """Between opening the file and locking it, its last process ends and the next one starts."""
        monkeypatch.setattr(shared_arena, "_lock_file", lock_file)
        old.close()
        open_in(tmp_path, opened)
        return lock_file(file, how)

    monkeypatch.setattr(shared_arena, "_lock_file", late)
    assert remove_stale(tmp_path) == 0
    assert opened[-1].path.exists()


STAGES = {"created": "_lock_file", "empty": "posix_fallocate", "without a header": "pwrite", "not marked as ready": "pwrite",
          "made": "_is_ready"}


def make_up_to(stage: str, folder: str, ends: Connection) -> None:
    """Make an arena up to a stage, say so, and go on when told."""
    where = shared_arena if STAGES[stage].startswith("_") else os
    known, left = getattr(where, STAGES[stage]), 2 if stage == "not marked as ready" else 1

    def stop(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            ends.send(True)
            ends.recv()
        return known(*given)

    setattr(where, STAGES[stage], stop)
    arena = SharedArena(SHAPE, 0, folder=Path(folder))
    ends.send(arena.path.exists() and not any(slots.rows.any() for slots in arena.groups if slots is not None))
    signal.pause()


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_that_is_killed_while_it_makes_the_arena_leaves_nothing_that_lasts(tmp_path: Path, opened: list[SharedArena],
                                                                                   stage: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=make_up_to, args=(stage, str(tmp_path), theirs))
    child.start()
    path = tmp_path / "kvtier-engine-1.arena"
    try:
        assert ours.poll(60)
        ours.recv()
        assert path.exists()
        remove_stale(tmp_path)  # of a live process: it has not got as far as its lock, or it is left alone
        assert path.exists() or stage == "created"
        ours.send(True)
        assert ours.poll(60)
        assert ours.recv(), "it makes another one then, as good as the first"
    finally:
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join(10)
    again = multiprocessing.get_context("spawn").Process(target=make_up_to, args=(stage, str(tmp_path), theirs))
    again.start()
    try:
        assert ours.poll(60)
        ours.recv()
    finally:
        os.kill(again.pid or 0, signal.SIGKILL)
        again.join(10)
    assert path.exists()
    index = open_in(tmp_path, opened)
    assert not any(slots.rows.any() for slots in index.groups if slots is not None)
    assert not index.board.has_opened(0)
    index.close()
    path.write_bytes(b"as a process left it that was killed at once")
    open_in(tmp_path, opened, shape=ArenaShape("engine-2", (64,), (1,), 1, 1))
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 200, ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, opened: list[SharedArena], name: str) -> None:
    with pytest.raises(ConfigError, match="engine_id"):
        open_in(tmp_path, opened, shape=ArenaShape(name, (64,), (1,), 1, 1))


def test_too_small_a_shared_memory_is_a_clear_error_and_leaves_nothing(tmp_path: Path, opened: list[SharedArena],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ConfigError, match=r"wanted, .* for each of 2 ranks; .* free of .*; lower secondary=.*--shm-size"):
        open_in(tmp_path, opened)
    assert not list(tmp_path.iterdir())


def test_more_than_the_memory_there_is_is_refused_before_any_is_taken(tmp_path: Path, opened: list[SharedArena]) -> None:
    with pytest.raises(ConfigError, match=r"for each of 2 ranks; .* of memory are free"):
        open_in(tmp_path, opened, shape=ArenaShape("engine-1", (1 << 30,), (1 << 20,), 2, 2))
    assert not list(tmp_path.iterdir())

"""Who hangs: an operation is overdue once, its end is told from one that was waited for, and when all hang it is said."""

from __future__ import annotations

import threading

import pytest

from kvtier.tiering import hang_watch
from kvtier.tiering.hang_watch import HangWatch
from kvtier.tiering.transfer_graph import TransferNode, Work


def node(number: int = 0) -> TransferNode:
    return TransferNode(Work.READ, number, 0, 0, 0, None)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [1000.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: seconds[0])
    return seconds


def test_an_operation_is_overdue_once_and_nobody_listens_to_its_end(now: list[float]) -> None:
    watch, late, early = HangWatch(2), node(1), node(2)
    watch.begin(late)
    now[0] += 20.0
    watch.begin(early)
    assert watch.overdue() == []
    now[0] += 11.0
    assert watch.overdue() == [late]
    assert watch.overdue() == []
    assert not watch.is_awaited(late)
    assert watch.is_awaited(early)
    assert not watch.is_stuck
    assert watch.end(early)
    assert not watch.end(late)


def test_a_batch_has_more_time(now: list[float]) -> None:
    watch, batch = HangWatch(1), node()
    watch.begin(batch, num_blocks=13)
    now[0] += 89.0
    assert watch.overdue() == []
    now[0] += 2.0
    assert watch.overdue() == [batch]


def test_it_is_stuck_while_every_thread_hangs(now: list[float]) -> None:
    watch, first, second = HangWatch(2), node(1), node(2)
    watch.begin(first)
    watch.begin(second)
    now[0] += 31.0
    assert watch.overdue() == [first, second]
    assert watch.is_stuck
    watch.end(first)
    assert not watch.is_stuck


def test_every_operation_has_exactly_one_end_however_close_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.0)
    watch, listened, told = HangWatch(4), [], []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            told.extend(watch.overdue())

    def work(numbers: range) -> None:
        for number in numbers:
            operation = node(number)
            watch.begin(operation)
            if watch.end(operation):
                listened.append(operation)

    looking = threading.Thread(target=look)
    working = [threading.Thread(target=work, args=(range(start, start + 5000),)) for start in range(0, 20000, 5000)]
    for thread in (looking, *working):
        thread.start()
    for thread in working:
        thread.join()
    over.set()
    looking.join()
    assert sorted(found.number for found in listened + told) == list(range(20000))
    assert not watch.is_stuck

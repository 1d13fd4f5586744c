"""Turns for file operations: how many at once, loads before stores, stores within their rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvtier.io import drive_queue
from kvtier.io.drive_queue import AdaptiveDepth, DriveQueue

BLOCK = 2 << 20


def run_windows(depth: AdaptiveDepth, rate_at: Callable[[int], float], windows: int) -> list[int]:
    """Feed operations of a drive that does ``rate_at(depth)`` bytes per second; the depth after each window or so."""
    now = 0.0
    seen: list[int] = []
    for _ in range(windows):
        for _ in range(64):
            now += BLOCK / rate_at(depth.depth)
            depth.note(BLOCK, now, True)
        seen.append(depth.depth)
    return seen


def most_common(depths: list[int]) -> int:
    return max(set(depths), key=depths.count)


def test_a_drive_that_gains_from_every_operation_gets_as_many_as_there_may_be() -> None:
    assert most_common(run_windows(AdaptiveDepth(8, 2), lambda depth: 1e9 * depth, 300)[200:]) == 8


def test_a_drive_that_gains_nothing_gets_one_at_a_time() -> None:
    assert most_common(run_windows(AdaptiveDepth(8, 4), lambda _depth: 1e9, 400)[200:]) == 1


def test_a_drive_that_gains_up_to_three_gets_three() -> None:
    assert most_common(run_windows(AdaptiveDepth(8, 1), lambda depth: 1e9 * min(depth, 3), 600)[300:]) == 3


def test_trials_become_rare_where_nothing_is_gained() -> None:
    seen = run_windows(AdaptiveDepth(8, 3), lambda depth: 1e9 * min(depth, 3), 2000)
    assert sum(depth != 3 for depth in seen[:200]) > sum(depth != 3 for depth in seen[1800:])


def test_a_drive_that_is_not_kept_busy_is_not_judged() -> None:
    depth = AdaptiveDepth(8, 2)
    for number in range(10_000):
        depth.note(BLOCK, number * 0.001, False)
    assert depth.depth == 2


@pytest.mark.parametrize(("most", "start", "depth"), [(1, 4, 1), (3, 0, 1), (3, 2, 2)])
def test_the_depth_is_at_least_one_and_never_above_its_limit(most: int, start: int, depth: int) -> None:
    found = AdaptiveDepth(most, start)
    assert found.depth == depth
    assert all(1 <= seen <= most for seen in run_windows(found, lambda _: 1e9, 50))


def start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_more_than_the_depth_are_in_the_drive_at_once() -> None:
    queue = DriveQueue(2, 2)
    inside = most = 0
    lock = threading.Lock()

    def read() -> None:
        nonlocal inside, most
        for _ in range(20):
            with queue.reading(BLOCK):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.0005)
                with lock:
                    inside -= 1

    threads = [start(read) for _ in range(6)]
    for thread in threads:
        thread.join(60.0)
    assert most <= 2


def test_a_load_that_waits_overtakes_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_queue, "YIELD_SECONDS", 60.0)
    monkeypatch.setattr(drive_queue, "_PATIENCE", 60.0)  # nor does a load count as hanging because the machine did
    queue = DriveQueue(1, 1)
    order: list[str] = []
    release = threading.Event()

    def read(name: str, until: threading.Event) -> None:
        with queue.reading(BLOCK):
            order.append(name)
            until.wait(60.0)

    def write() -> None:
        with queue.writing(BLOCK):
            order.append("store")

    threads = [start(lambda: read("first load", release))]
    wait_for(lambda: order)
    threads.append(start(write))
    wait_for(lambda: queue._waiting_writes)
    threads.append(start(lambda: read("second load", release)))
    wait_for(lambda: queue._waiting_reads)
    release.set()
    for thread in threads:
        thread.join(60.0)
    assert order == ["first load", "second load", "store"]


def test_loads_without_end_do_not_end_all_storing() -> None:
    queue = DriveQueue(1, 1)
    release = threading.Event()

    def read() -> None:
        with queue.reading(BLOCK):
            release.wait(60.0)

    reader = start(read)
    wait_for(lambda: queue._reads)
    with queue.writing(BLOCK):
        stored = True
    release.set()
    reader.join(60.0)
    assert stored


def test_an_operation_that_hangs_does_not_hold_up_the_others_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_queue, "_PATIENCE", 0.01)
    queue = DriveQueue(1, 1)
    with queue.reading(BLOCK), queue.reading(BLOCK), queue.writing(BLOCK), queue.writing(BLOCK):
        pass


def test_one_that_hangs_costs_patience_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_queue, "_PATIENCE", 0.01)
    queue = DriveQueue(1, 1)
    for turn in (queue.reading, queue.writing):
        with turn(BLOCK):
            with turn(BLOCK):
                pass
            assert queue._reads == queue._writes == {}  # the one that hangs has no place any more that others would have to wait for
        assert queue._reads == queue._writes == {}


def test_stores_do_not_stand_back_behind_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_queue, "YIELD_SECONDS", 1e6)
    now = 100.0
    queue = DriveQueue(2, 1, clock=lambda: now)
    with queue.reading(BLOCK):
        now += drive_queue._PATIENCE
        with queue.writing(BLOCK):
            pass


def test_stores_keep_to_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    queue = DriveQueue(1, 1, write_bytes_per_second=BLOCK * 10.0, clock=lambda: now)
    monkeypatch.setattr(queue._hurries, "wait", sleep)
    for _ in range(21):
        with queue.writing(BLOCK):
            pass
        with queue.reading(BLOCK):  # costs a store nothing
            pass
    assert now == pytest.approx(102.0)


def test_who_closes_does_not_wait_for_the_rate() -> None:
    queue = DriveQueue(1, 1, write_bytes_per_second=BLOCK / 1000.0)

    def write() -> None:
        for _ in range(3):
            with queue.writing(BLOCK):
                pass

    writer = start(write)
    wait_for(lambda: queue._next_write > queue._clock() + 1000.0)  # the second one waits
    queue.hurry()
    writer.join(60.0)
    assert not writer.is_alive()


def test_an_error_gives_the_turn_back() -> None:
    queue = DriveQueue(1, 1)
    for turn in (queue.reading, queue.writing):
        with pytest.raises(OSError, match="broken"), turn(BLOCK):
            raise OSError("broken")
    assert queue._reads == queue._writes == {}

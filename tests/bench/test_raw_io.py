"""The threads of the plain loop, and Ctrl-C while they work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.bench.raw_io import share_out


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


class Ended(Exception):
    """What a handler of signals raises."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    def end(*_given: object) -> None:
        raise Ended

    before = signal.signal(request.param, end)
    yield request.param
    signal.signal(request.param, before)


def test_every_slot_is_worked_on_once_and_the_first_error_is_raised_when_all_have_ended(threads: ThreadPoolExecutor) -> None:
    seen: list[int] = []

    def work(slots: Sequence[int]) -> None:
        seen.extend(slots)
        if 1 in slots:
            raise OSError("of the second thread")

    with pytest.raises(OSError, match="of the second thread"):
        share_out(threads, 3, 10, work)
    assert sorted(seen) == list(range(10))


def test_a_signal_that_lands_in_the_middle_of_a_lock_comes_when_all_have_ended(
        threads: ThreadPoolExecutor, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, struck, seen = threading.Condition.wait, threading.Event(), []

    def interrupted(condition: Any, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and not struck.is_set():
            struck.set()
            state = condition._release_save()
            signal.raise_signal(number)  # where the true one has given up the lock and will ask for it again
            condition._acquire_restore(state)
        return wait(condition, timeout)

    def work(slots: Sequence[int]) -> None:
        assert struck.wait(60.0)
        seen.extend(slots)

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    with pytest.raises(Ended):
        share_out(threads, 3, 10, work)
    assert sorted(seen) == list(range(10))
    share_out(threads, 3, 10, seen.extend)  # and the next one is not held
    with pytest.raises(Ended):
        signal.raise_signal(number)

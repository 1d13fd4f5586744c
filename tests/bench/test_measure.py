"""Interleaved timing, with a clock that the test turns."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from kvtier.bench.measure import LEAST_ROUNDS, Alternative, Interleaved, Spread, interleave


class FakeClock:
    """Stands still until somebody works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: list[float]) -> Callable[[], None]:
        """Work that takes these times, one after the other."""
        left = iter(seconds)

        def run() -> None:
            self.now += next(left)

        return run


def test_the_order_of_turns_alternates_from_round_to_round() -> None:
    turns: list[str] = []
    alternatives = [Alternative(name, lambda name=name: turns.append(name)) for name in ("limit", "ours")]  # type: ignore[misc]
    interleave(alternatives, 4, warm_up=0)
    assert turns == ["limit", "ours", "ours", "limit", "limit", "ours", "ours", "limit"]


def test_median_and_range_are_those_of_the_recorded_rounds() -> None:
    clock = FakeClock()
    measured = interleave([Alternative("a", clock.work([99.0, 4.0, 1.0, 2.0]))], 3, warm_up=1, clock=clock)
    assert measured.seconds("a") == Spread(median=2.0, low=1.0, high=4.0)
    assert measured.rate("a", 8.0) == Spread(median=4.0, low=2.0, high=8.0)
    assert measured.rounds == 3


def test_a_ratio_compares_times_of_the_same_round() -> None:
    # The machine is slow in the first round, for both. Medians over all rounds would give 3/2.
    clock = FakeClock()
    measured = interleave([Alternative("limit", clock.work([10.0, 1.0, 3.0])), Alternative("ours", clock.work([20.0, 2.0, 1.0]))],
                          3, warm_up=0, clock=clock)
    assert measured.speed_ratio("ours", "limit") == pytest.approx(0.5)
    assert measured.speed_ratio("limit", "ours") == pytest.approx(2.0)


def test_preparing_and_checking_are_not_timed() -> None:
    clock = FakeClock()
    slow = clock.work([50.0] * 6)
    measured = interleave([Alternative("a", clock.work([1.0] * 3), prepare=slow, check=slow)], 3, warm_up=0, clock=clock)
    assert measured.seconds("a") == Spread(1.0, 1.0, 1.0)


def test_warm_up_rounds_are_prepared_and_checked_too() -> None:
    calls: list[str] = []
    alternative = Alternative("a", lambda: calls.append("run"), lambda: calls.append("prepare"), lambda: calls.append("check"))
    measured = interleave([alternative], 1, warm_up=1)
    assert calls == ["prepare", "run", "check"] * 2
    assert measured.rounds == 1


def test_a_program_with_a_clock_of_its_own_reports_its_own_seconds() -> None:
    measured = interleave([Alternative("fio", lambda: 0.25)], 3)
    assert measured.seconds("fio").median == 0.25


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LEAST_ROUNDS), (45.0, 5), (1000.0, 9)])
def test_no_round_begins_after_the_time_allowed_but_three_always_run(seconds: float, rounds: int) -> None:
    clock = FakeClock()
    measured = interleave([Alternative("a", clock.work([10.0] * 9))], 9, warm_up=0, seconds=seconds, clock=clock)
    assert measured.rounds == rounds


def test_the_garbage_collector_rests_during_turns_and_is_back_after_a_failing_one() -> None:
    resting: list[bool] = []

    def fail() -> None:
        resting.append(gc.isenabled())
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        Interleaved().round([Alternative("a", fail)])
    assert resting == [False]
    assert gc.isenabled()

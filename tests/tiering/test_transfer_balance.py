"""Advice where blocks go one way only for long: once, about what to change, until it is over."""

from __future__ import annotations

import pytest

from kvtier import Level
from kvtier.tiering.transfer_balance import MIN_BLOCKS, WINDOW, TransferBalance

HOST = Level.SECONDARY


def run(balance: TransferBalance, iterations: int, onboarded: int, offloaded: int, dropped: int = 0) -> list[tuple[int, str]]:
    """The advice given, and in which iteration."""
    found: list[tuple[int, str]] = []
    for number in range(iterations):
        advice = balance.note(onboarded, offloaded, dropped)
        if advice is not None:
            assert advice == balance.advice
            found.append((number, advice))
    return found


def small(level: Level = HOST) -> TransferBalance:
    return TransferBalance(level, window=10, min_blocks=100)


def test_what_goes_down_and_never_comes_back_is_advised_against_once() -> None:
    balance = small()
    assert [number for number, _advice in run(balance, 100, 1, 20)] == [9], "as soon as the window is full, and never again"
    assert balance.advice == ("in the last 10 iterations 200 blocks were offloaded to the secondary level and 10 were onboarded from it: "
                              "hardly anything is asked for again; raise secondary_offload_min_priority so that only what comes back goes "
                              "there")


@pytest.mark.parametrize(("level", "onboarded", "offloaded", "dropped", "remedy"), [
    (Level.SECONDARY, 0, 20, 0, "raise secondary_offload_min_priority"),
    (Level.SECONDARY, 0, 20, 15, "enlarge secondary"),
    (Level.SECONDARY, 20, 0, 0, "enlarge primary"),
    (Level.NVME, 0, 20, 9, "raise nvme_offload_min_priority"),
    (Level.NVME, 0, 20, 10, "enlarge nvme"),
    (Level.NVME, 20, 0, 0, "enlarge secondary"),
])
def test_the_advice_names_what_to_change(level: Level, onboarded: int, offloaded: int, dropped: int, remedy: str) -> None:
    balance = small(level)
    run(balance, 10, onboarded, offloaded, dropped)
    assert remedy in str(balance.advice)


@pytest.mark.parametrize(("onboarded", "offloaded"), [(5, 20), (20, 5), (20, 20), (0, 9), (9, 0), (0, 0)])
def test_up_to_four_to_one_or_little_traffic_is_no_situation(onboarded: int, offloaded: int) -> None:
    assert run(small(), 50, onboarded, offloaded) == []


@pytest.mark.parametrize(("onboarded", "offloaded"), [(4, 20), (20, 4), (0, 10), (10, 0)])
def test_more_than_four_to_one_of_enough_blocks_is(onboarded: int, offloaded: int) -> None:
    assert len(run(small(), 50, onboarded, offloaded)) == 1


def test_one_burst_is_no_situation() -> None:
    balance = TransferBalance(HOST, window=64, min_blocks=100)
    assert run(balance, 64, 1, 1) == []
    assert run(balance, 3, 0, 50_000) != [], "much among other traffic is one"
    quiet = TransferBalance(HOST, window=64, min_blocks=100)
    run(quiet, 64, 1, 1)
    assert run(quiet, 64, 0, 0) + run(quiet, 3, 0, 50_000) + run(quiet, 60, 0, 0) == []


def test_what_moves_in_turns_within_the_window_is_in_balance() -> None:
    balance = small()
    for _ in range(20):
        assert run(balance, 2, 0, 40) + run(balance, 2, 40, 0) == []


def test_the_window_slides() -> None:
    balance = small()
    run(balance, 10, 20, 20)
    assert run(balance, 7, 0, 20) == [], "60 up, 200 down"
    assert len(run(balance, 1, 0, 20)) == 1, "40 up, 200 down"


def test_drops_count_as_long_as_they_are_within_the_window() -> None:
    balance = small()
    run(balance, 10, 20, 20, 20)
    assert "so that only what comes back goes there" in run(balance, 10, 0, 20)[0][1]


def test_it_is_said_again_only_after_it_was_over() -> None:
    balance = small()
    assert len(run(balance, 20, 4, 20)) == 1
    assert run(balance, 20, 6, 20) == [], "three to one: better, and not over"
    assert balance.advice is not None
    assert run(balance, 20, 4, 20) == [], "it never ended"
    run(balance, 10, 10, 20)
    assert balance.advice is None, "two to one: over"
    assert len(run(balance, 20, 4, 20)) == 1


def test_it_is_over_when_the_traffic_has_ended() -> None:
    balance = small()
    run(balance, 10, 0, 20)
    run(balance, 7, 0, 0)
    assert balance.advice is not None
    run(balance, 2, 0, 0)
    assert balance.advice is None


def test_the_other_direction_is_another_situation() -> None:
    balance = small()
    first = run(balance, 10, 0, 20)
    second = run(balance, 20, 20, 0)
    assert len(first) == len(second) == 1
    assert "enlarge primary" in second[0][1]


def test_by_default_it_takes_thousands_of_blocks_and_many_iterations() -> None:
    assert MIN_BLOCKS >= 1000
    assert run(TransferBalance(HOST), WINDOW - 1, 0, 1000) == []
    assert run(TransferBalance(HOST), 2 * WINDOW, 0, MIN_BLOCKS // WINDOW - 1) == []
    assert len(run(TransferBalance(HOST), 2 * WINDOW, 0, MIN_BLOCKS // WINDOW)) == 1

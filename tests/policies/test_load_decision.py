"""The choice between loading and computing again: never worse than both ends, and monotone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.load_decision import LoadChoice, affordable, choose_load
from kvtier.policies.speed_models import PrefillCost

TOKENS = 16  # per block

costs = st.builds(PrefillCost, st.floats(0, 0.1), st.floats(0, 1e-2), st.floats(0, 1e-5))
block_times = st.lists(st.one_of(st.just(0.0), st.floats(0, 1.0)), max_size=30)


def choose(block_seconds: list[float], cost: PrefillCost, can_split: bool = True, behind: int = 1) -> LoadChoice:
    found = len(block_seconds) * TOKENS
    return choose_load(block_seconds, can_split, TOKENS, found, found + behind, cost)


@given(block_times, costs, st.booleans(), st.integers(1, 200))
def test_no_choice_is_above_the_better_end(block_seconds: list[float], cost: PrefillCost, can_split: bool, behind: int) -> None:
    choice = choose(block_seconds, cost, can_split, behind)
    assert choice.seconds <= min(choice.seconds_all, choice.seconds_none)
    assert 0 <= choice.num_blocks <= len(block_seconds)
    assert can_split or choice.num_blocks in (0, len(block_seconds))
    assert choice.load_seconds == pytest.approx(sum(block_seconds[:choice.num_blocks]))


@given(block_times, costs, st.integers(1, 200))
def test_the_choice_is_the_best_there_is(block_seconds: list[float], cost: PrefillCost, behind: int) -> None:
    choice = choose(block_seconds, cost, behind=behind)
    end = len(block_seconds) * TOKENS + behind
    best = min(sum(block_seconds[:number]) + cost.seconds(number * TOKENS, end) for number in range(len(block_seconds) + 1))
    assert choice.seconds == pytest.approx(best)


@given(block_times, costs, st.floats(1, 100), st.booleans())
def test_a_slower_drive_never_makes_it_load_more(block_seconds: list[float], cost: PrefillCost, factor: float, can_split: bool) -> None:
    slower = [seconds * factor for seconds in block_seconds]
    assert choose(slower, cost, can_split).num_blocks <= choose(block_seconds, cost, can_split).num_blocks


@given(block_times, costs, st.floats(1, 100), st.booleans())
def test_a_slower_engine_never_makes_it_load_less(block_seconds: list[float], cost: PrefillCost, factor: float, can_split: bool) -> None:
    slower = PrefillCost(cost.overhead * factor, cost.per_token * factor, cost.per_pair * factor)
    assert choose(block_seconds, slower, can_split).num_blocks >= choose(block_seconds, cost, can_split).num_blocks


def test_blocks_that_are_there_already_are_always_used() -> None:
    assert choose([0.0, 0.0, 9.0, 9.0], PrefillCost(0.0, 1e-3, 0.0)).num_blocks == 2


def test_a_fast_front_is_loaded_and_a_slow_rest_computed() -> None:
    choice = choose([1e-4] * 6 + [1.0] * 6, PrefillCost(0.0, 1e-3, 0.0))
    assert choice.num_blocks == 6
    assert choice.seconds < min(choice.seconds_all, choice.seconds_none)


def test_of_equal_times_loading_wins() -> None:
    assert choose([0.0] * 4, PrefillCost(0.0, 0.0, 0.0)).num_blocks == 4


def test_part_of_a_block_behind_the_prefix_counts_when_everything_is_loaded() -> None:
    cost = PrefillCost(0.0, 1.0, 0.0)
    assert choose_load([TOKENS + 4.0], True, TOKENS, TOKENS, TOKENS + 9, cost).num_blocks == 0
    assert choose_load([TOKENS + 4.0], True, TOKENS, TOKENS + 8, TOKENS + 9, cost).num_blocks == 1


def test_what_is_affordable_is_at_least_one_block() -> None:
    assert affordable([5.0, 5.0, 5.0], 1.0) == 1
    assert affordable([5.0, 5.0, 5.0], 10.0) == 2
    assert affordable([0.0, 0.0], 0.0) == 2
    assert affordable([], 1.0) == 0

"""What the models of loading and computing make of observations: exact ones, noisy ones, wild ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policies.speed_models import (
    MAX_LOADS,
    LoadModel,
    LoadSpeed,
    PrefillCost,
    PrefillModel,
    median,
    num_pairs,
)

DEFAULT = LoadSpeed(1e-3, 1e-9)
MIB = 1 << 20


def loads(model: LoadModel, truth: LoadSpeed, sizes: list[int], noise: float = 0.0, seed: int = 1) -> LoadModel:
    chance = random.Random(seed)
    for size in sizes:
        model.observe(size, truth.seconds(size) * (1 + noise * chance.uniform(-1, 1)))
    return model


def prefills(truth: PrefillCost, spans: list[tuple[int, int]], noise: float = 0.0, seed: int = 1) -> PrefillModel:
    model = PrefillModel()
    chance = random.Random(seed)
    for start, end in spans:
        model.observe(start, end, truth.seconds(start, end) * (1 + noise * chance.uniform(-1, 1)))
    return model


def test_before_the_first_load_the_default_counts() -> None:
    assert LoadModel(DEFAULT).speed() is DEFAULT


def test_loads_of_distinct_sizes_tell_latency_from_speed() -> None:
    speed = loads(LoadModel(DEFAULT), LoadSpeed(5e-3, 2e-9), [MIB, 4 * MIB, 16 * MIB]).speed()
    assert (speed.latency, speed.seconds_per_byte) == (pytest.approx(5e-3), pytest.approx(2e-9))


def test_loads_of_one_size_predict_that_size() -> None:
    truth = LoadSpeed(5e-3, 2e-9)
    speed = loads(LoadModel(DEFAULT), truth, [4 * MIB] * 5).speed()
    assert speed.latency == 0.0
    assert speed.seconds(4 * MIB) == pytest.approx(truth.seconds(4 * MIB))


def test_a_fifth_of_wild_loads_changes_little() -> None:
    truth = LoadSpeed(1e-3, 5e-10)
    model = LoadModel(DEFAULT)
    for number in range(20):
        size = (1 + number % 7) * 4 * MIB
        model.observe(size, 2.0 if number % 5 == 3 else truth.seconds(size))
    assert model.speed().seconds(16 * MIB) == pytest.approx(truth.seconds(16 * MIB), rel=0.1)


def test_old_loads_are_forgotten() -> None:
    model = loads(LoadModel(DEFAULT), LoadSpeed(0.0, 1e-6), [MIB, 8 * MIB] * 20)
    loads(model, LoadSpeed(0.0, 1e-9), [MIB, 8 * MIB] * (MAX_LOADS // 2))
    assert model.num_observed == MAX_LOADS
    assert model.speed().seconds_per_byte == pytest.approx(1e-9)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e4)), min_size=1, max_size=30))
def test_a_speed_is_never_negative(observed: list[tuple[float, float]]) -> None:
    model = LoadModel(DEFAULT)
    for size, seconds in observed:
        model.observe(size, seconds)
    assert model.speed().latency >= 0.0
    assert model.speed().seconds_per_byte > 0.0


def test_nothing_is_said_about_computing_before_three_reports() -> None:
    truth = PrefillCost(0.0, 1e-3, 0.0)
    assert not prefills(truth, [(0, 10)] * 2).is_known
    assert prefills(truth, [(0, 10)] * 3).is_known


@pytest.mark.parametrize("truth", [PrefillCost(0.0, 1e-4, 0.0), PrefillCost(0.0, 1e-4, 2e-8), PrefillCost(5e-3, 1e-4, 0.0),
                                   PrefillCost(5e-3, 1e-4, 2e-8)])
def test_all_three_parts_of_the_cost_are_found(truth: PrefillCost) -> None:
    cost = prefills(truth, [(0, 100), (0, 500), (0, 2000), (0, 8000), (4000, 4500), (8000, 8200)]).cost()
    for start, end in ((0, 300), (0, 16000), (12000, 12500)):
        assert cost.seconds(start, end) == pytest.approx(truth.seconds(start, end), rel=0.02)


def test_chunks_of_one_prompt_show_that_late_tokens_cost_more() -> None:
    truth = PrefillCost(0.0, 1e-4, 4e-8)
    cost = prefills(truth, [(start, start + 512) for start in range(0, 8192, 512)], noise=0.1).cost()
    assert cost.seconds(0, 8192) == pytest.approx(truth.seconds(0, 8192), rel=0.1)
    assert cost.seconds(7680, 8192) > 1.5 * cost.seconds(0, 512)


def test_reports_of_one_size_are_taken_in_proportion() -> None:
    cost = prefills(PrefillCost(2e-3, 1e-4, 1e-8), [(0, 512)] * 8).cost()
    assert (cost.overhead, cost.per_pair) == (0.0, 0.0)


def test_a_few_wild_reports_change_little() -> None:
    truth = PrefillCost(0.0, 1e-4, 1e-8)
    model = prefills(truth, [(0, size) for size in (256, 512, 1024, 2048, 4096)] * 4)
    for _ in range(3):
        model.observe(0, 1024, 30.0)  # the engine compiled something
    assert model.cost().seconds(0, 4096) == pytest.approx(truth.seconds(0, 4096), rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 100_000), st.floats(1e-12, 1e12)), min_size=3, max_size=20))
def test_no_part_of_the_cost_is_negative(reports: list[tuple[int, int, float]]) -> None:
    model = PrefillModel()
    for start, length, seconds in reports:
        model.observe(start, start + length, seconds)
    cost = model.cost()
    assert min(cost.overhead, cost.per_token, cost.per_pair) >= 0.0


def test_absurd_reports_are_survived() -> None:
    model = PrefillModel()
    for start, end, seconds in ((0, 1, 1e-300), (0, 1 << 40, 1e299), (0, 10**300, 1.0), (5, 5, 1.0), (-1, 3, 1.0), (0, 3, 0.0)):
        model.observe(start, end, seconds)
    assert not model.is_known
    model.observe(0, 100, 1.0)
    assert model.cost().seconds(0, 100) >= 0.0


def test_pairs_and_medians() -> None:
    assert num_pairs(0, 3) == 1 + 2 + 3
    assert num_pairs(2, 4) == 3 + 4
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, 2.0]) == 1.5

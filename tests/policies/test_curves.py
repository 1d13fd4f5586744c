"""Cache curves: exactly what caches of each size find, one after another."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvtier.policies.curves import NextUses, Prompts, knee, lru_curve, sampling_error


def made(seed: int, requests: int = 120) -> tuple[Prompts, int]:
    """Prompts that grow, part and come again; ids with equal prefixes."""
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    ids = 0
    prompts: Prompts = []
    for _ in range(requests):
        base = rng.choice(known[-20:])
        prompt = base[:rng.randint(0, len(base))]
        for _ in range(rng.randint(0, 6)):
            prompt.append(ids)
            ids += 1
        known.append(prompt)
        prompts.append(prompt)
    return prompts, ids


def lru(prompts: Prompts, capacity: int) -> int:
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += sum(block in cached for block in prompt)
        for block in reversed(prompt):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def best(prompts: Prompts, capacity: int) -> int:
    """The optimum block by block: of all blocks at hand, those used next the soonest are kept."""
    def next_use(block: int, after: int) -> int:
        return next((number for number in range(after + 1, len(prompts)) if block in prompts[number]), 1 << 30)

    cached: set[int] = set()
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += sum(block in cached for block in prompt)
        wanted = sorted((next_use(block, number), place, block) for place, block in enumerate([*prompt, *(cached - set(prompt))]))
        cached = {block for use, _, block in wanted[:capacity] if use < 1 << 30}
    return hits


@pytest.mark.parametrize("seed", range(6))
def test_one_pass_finds_what_an_lru_cache_of_each_size_does(seed: int) -> None:
    prompts, ids = made(seed)
    curve = lru_curve(prompts, ids)
    for capacity in (0, 1, 2, 5, 17, 60, ids, 3 * ids):
        assert curve.at(capacity) == lru(prompts, capacity)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_that_of_who_knows_the_future(seed: int) -> None:
    prompts, ids = made(seed, 60)
    uses = NextUses(prompts, ids)
    curve = lru_curve(prompts, ids)
    for capacity in (0, 1, 3, 10, 30, ids):
        assert uses.optimum(capacity) == best(prompts, capacity)
        assert uses.optimum(capacity) >= curve.at(capacity)


def test_a_sample_is_as_close_as_its_error_says() -> None:
    prompts, ids = made(1, 4000)
    exact = lru_curve(prompts, ids)
    uses = sum(len(prompt) for prompt in prompts)
    capacities = [10, 50, 100, 400, ids]
    error = sampling_error(prompts, ids, 0.5, capacities)
    assert 0 < error < 0.1
    sampled = lru_curve(prompts, ids, 0.5)
    assert max(abs(sampled.at(capacity) - exact.at(capacity)) for capacity in capacities) <= error * uses


def test_no_prompts_and_empty_ones_are_found_nowhere() -> None:
    assert lru_curve([], 0).at(5) == 0
    assert lru_curve([[], [0], []], 1).at(5) == 0
    assert NextUses([[]], 0).optimum(3) == 0


def test_the_knee_is_where_twice_as_much_adds_next_to_nothing() -> None:
    assert knee([1, 2, 4, 8], [0.1, 0.5, 0.505, 0.506], 0.01) == 1
    assert knee([1, 2, 4, 8], [0.1, 0.2, 0.3, 0.4], 0.01) == 3
    assert knee([1], [0.0], 0.01) == 0

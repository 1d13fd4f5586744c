"""Prefetch keeps to its budget, raises a long prompt in small portions, and keeps what it has raised for a while."""

from __future__ import annotations

from typing import Any

import pytest
from toy_engine import PROMPT, MakeCache, ToyEngine, tokens_of

from kvtier import ConfigError, Level, Request
from kvtier.tiering.prefetching import BURST_SECONDS, MOST_AT_ONCE, Budget, KeptBlocks, Prefetch, PrefetchState

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

PATIENCE = 30.0


def finished(prefetch: Prefetch) -> PrefetchState:
    return prefetch.wait(PATIENCE)


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_budget_is_kept(make_cache: MakeCache) -> None:
    block_bytes = 512
    prompt = tokens_of(5, 65)
    cache = make_cache(24, 24, 32)
    ToyEngine(cache).serve(Request(1, prompt))
    assert cache.flush()
    cache.close()
    clock = HandClock()
    cache = make_cache(24, 24, 32, clock=clock, prefetch_bandwidth="5KiB/s")  # ten blocks in a second
    prefetch = cache.prefetch(prompt)
    for _ in range(40):
        clock.now += 0.1
        for _ in range(20):
            cache.refresh()
        assert cache.transfers.idle(PATIENCE)
        allowed = 5120 * (clock.now - 100.0 + BURST_SECONDS) + block_bytes
        assert cache.stats().prefetch.bytes <= allowed
        if prefetch.is_done:
            break
    assert prefetch.state is PrefetchState.FINISHED
    assert (prefetch.read_blocks, prefetch.raised_blocks) == (16, 16)


def test_a_budget_saves_up_little() -> None:
    budget = Budget(1000.0, 0.0)
    assert not budget.allows(0.0)
    assert budget.allows(1000.0)
    budget.spend(500)
    assert not budget.allows(1000.2)
    assert budget.allows(1000.6)


def test_without_a_budget_nothing_is_raised(make_cache: MakeCache) -> None:
    cache = make_cache(prefetch_bandwidth=None)
    assert cache.prefetch(PROMPT).state is PrefetchState.FINISHED
    with pytest.raises(ConfigError, match="prefetch_bandwidth"):
        make_cache(prefetch_bandwidth="3 blocks/s")


def test_a_long_prompt_rises_in_small_portions(make_cache: MakeCache) -> None:
    prompt = tokens_of(5, 401)
    cache = make_cache(110, 110, 110)
    ToyEngine(cache).serve(Request(1, prompt))
    assert cache.flush()
    for block_id in range(110):
        if cache.block(block_id).tokens and cache.block(block_id).level == Level.PRIMARY and cache.block(block_id).is_full:
            cache.offload(block_id)
    assert cache.match(prompt).tokens_by_level[1] == 400
    calls: list[int] = []
    carry_on = cache._carry_on

    def counted(ledger: Any) -> bool:
        before = cache._prefetched.raised_blocks
        is_more = carry_on(ledger)
        calls.append(cache._prefetched.raised_blocks - before)
        return is_more

    cache._carry_on = counted  # type: ignore[method-assign]
    prefetch = cache.prefetch(prompt)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.raised_blocks == 100
    assert max(calls) <= MOST_AT_ONCE
    assert ToyEngine(cache).serve(Request(2, prompt)) == 400
    cache.verify()


def test_what_was_raised_is_kept_for_a_while() -> None:
    kept = KeptBlocks()
    kept.add(1, 10.0)
    kept.add(2, 11.0)
    kept.add(1, 20.0)
    kept.forget_older(9.0)
    assert kept.ids == {1, 2}
    kept.forget_older(15.0)
    assert kept.ids == {1}
    kept.forget_older(20.0)
    assert kept.ids == set()


def test_what_is_wanted_is_kept_until_nobody_wants_it_and_its_time_is_over() -> None:
    kept = KeptBlocks()
    kept.want(1)
    kept.want(1)
    kept.add(1, 10.0)
    kept.forget_older(15.0)
    assert kept.ids == {1}, "a prompt that takes longer than that is still being raised"
    kept.want_no_more(1)
    assert kept.ids == {1}, "by the other prompt that begins with it, too"
    kept.want_no_more(1)
    assert kept.ids == set()
    kept.add(1, 20.0)
    kept.want(1)
    kept.want_no_more(1)
    assert kept.ids == {1}, "it was raised a moment ago"
    kept.forget_older(20.0)
    assert kept.ids == set()

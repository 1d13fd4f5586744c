"""Prefetch: right bytes on the right level, within its budget, behind everybody else, and gone when it is overtaken."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from gate import Gate
from toy_engine import OTHER, PROMPT, MakeCache, ToyEngine, WarmCache, fails, tokens_of, wait_until

from kvtier import KVCacheManager, KVLayout, LayerSpec, Level, Request, RequestError, RetentionConfig, TokenRange
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.core import TierCore
from kvtier.tiering.prefetching import Prefetch, PrefetchState

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

PATIENCE = 30.0
READ = FaultOperation.READ
NVME_TO_SECONDARY = (Level.NVME, Level.SECONDARY)
NVME_TO_PRIMARY = (Level.NVME, Level.PRIMARY)


def finished(prefetch: Prefetch) -> PrefetchState:
    return prefetch.wait(PATIENCE)


def read_from_nvme(cache: KVCacheManager) -> int:
    moved = cache.stats().onboard_blocks
    return moved.get(NVME_TO_SECONDARY, 0) + moved.get(NVME_TO_PRIMARY, 0)


def test_blocks_are_raised_to_the_primary_level(warm_cache: WarmCache) -> None:
    cache = warm_cache()
    assert cache.match(PROMPT).tokens_by_level == (0, 0, 12)
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert (prefetch.num_blocks, prefetch.read_blocks, prefetch.raised_blocks, prefetch.lost_blocks) == (3, 3, 3, 0)
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)
    cache.verify()
    engine = ToyEngine(cache)
    admission, = engine.admit(Request(1, PROMPT))
    assert admission.prepopulated_tokens == 12
    assert engine.learn(1) == 12
    engine.forward([1])  # checks every byte
    assert read_from_nvme(cache) == 3
    assert cache.stats().hit_tokens.primary == 12
    cache.verify()


def test_a_prompt_of_which_nothing_is_stored_is_over_at_once(make_cache: MakeCache) -> None:
    cache = make_cache()
    prefetch = cache.prefetch(PROMPT)
    assert prefetch.is_done
    assert (prefetch.state, prefetch.num_blocks) == (PrefetchState.FINISHED, 0)


def test_what_is_on_the_primary_level_stays_there(make_cache: MakeCache) -> None:
    cache = make_cache()
    ToyEngine(cache).serve(Request(1, PROMPT))
    prefetch = cache.prefetch(Request(2, PROMPT))
    assert prefetch.state is PrefetchState.FINISHED
    assert (prefetch.num_blocks, prefetch.raised_blocks) == (3, 0)


def test_namespaces_are_apart(make_cache: MakeCache) -> None:
    cache = make_cache()
    ToyEngine(cache).serve(Request(1, PROMPT, cache_salt="a"))
    assert cache.prefetch(PROMPT).num_blocks == 0
    assert cache.prefetch(PROMPT, cache_salt="a").num_blocks == 3
    with pytest.raises(RequestError, match="namespace keywords"):
        cache.prefetch(PROMPT, no_such_keyword=1)


async def test_it_can_be_awaited(warm_cache: WarmCache) -> None:
    cache = warm_cache()
    assert await asyncio.wait_for(cache.prefetch(PROMPT), PATIENCE) is PrefetchState.FINISHED


async def test_a_cancelled_await_does_not_cancel_the_prefetch(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_awaited(prefetch), 0.01)
    gate.open()
    assert await prefetch is PrefetchState.FINISHED


async def _awaited(prefetch: Prefetch) -> PrefetchState:
    return await prefetch


def test_waiting_has_a_limit(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    with pytest.raises(TimeoutError, match="not over after"):
        prefetch.wait(0.01)
    with pytest.raises(RequestError, match="timeout"):
        prefetch.wait(-1)
    prefetch.cancel()
    gate.open()


# -- overtaken, cancelled ------------------------------------------------------------------------------------------------

def test_a_request_takes_over_what_is_under_way_and_nothing_is_read_twice(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    wait_until(lambda: prefetch.read_blocks >= 1)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    cache.verify()
    assert prefetch.state is PrefetchState.OVERTAKEN
    gate.open()
    assert engine.learn(1) == 12
    engine.forward([1])
    assert read_from_nvme(cache) == 3
    cache.verify()
    engine.remove(1)
    assert cache.flush()
    cache.verify()
    assert cache.stats().prefetch.overtaken == 1


def test_an_overtaking_request_may_end_before_the_read(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    wait_until(lambda: prefetch.read_blocks >= 1)
    cache.add_sequence(Request(1, PROMPT))
    cache.remove_sequence(1)
    cache.verify()
    gate.open()
    engine = ToyEngine(cache)
    for number in range(2, 5):
        engine.serve(Request(number, tokens_of(number + 10, 20)))  # wants the slots
        cache.verify()
    assert engine.serve(Request(9, PROMPT)) in (0, 4, 8, 12)
    cache.verify()


def test_a_bad_read_of_a_prefetch_costs_the_overtaking_request_its_prefix(warm_cache: WarmCache) -> None:
    gate = Gate(READ, rules=[fails(READ, count=1)])
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    wait_until(lambda: prefetch.read_blocks >= 1)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    gate.open()
    assert engine.learn(1) < 12
    engine.forward([1])
    cache.verify()
    engine.remove(1)
    cache.verify()
    assert cache.stats().quarantined == 1
    assert engine.serve(Request(2, PROMPT)) == 12


def test_another_prompt_with_the_same_start_does_not_end_it(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate, primary=16)
    prefetch = cache.prefetch(PROMPT)
    cache.add_sequence(Request(1, [*PROMPT[:4], 7, 7, 7, 7, 7]))
    gate.open()
    assert finished(prefetch) is PrefetchState.FINISHED
    cache.verify()


def test_cancelled_it_begins_no_more_reads(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    cache._prefetch_depth = 1
    prefetch = cache.prefetch(PROMPT)
    prefetch.cancel()
    gate.open()
    assert finished(prefetch) is PrefetchState.CANCELLED
    begun = prefetch.read_blocks
    prefetch.cancel()
    assert cache.transfers.idle(PATIENCE)
    cache.refresh()
    assert read_from_nvme(cache) == begun == 1
    cache.verify()
    assert cache.stats().prefetch.cancelled == 1


def test_a_reset_cancels_and_waits_for_the_read_under_way(warm_cache: WarmCache, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    idle = cache.transfers.idle

    def open_and_wait(timeout: float | None) -> bool:  # the reset has begun
        gate.open()
        return idle(timeout)

    monkeypatch.setattr(cache.transfers, "idle", open_and_wait)
    cache.reset()
    assert prefetch.state is PrefetchState.CANCELLED
    assert cache.match(PROMPT).reusable_blocks == 0
    cache.verify()


def test_closing_cancels(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    cache.close(0.1)
    assert prefetch.state is PrefetchState.CANCELLED
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-prefetch" and thread is cache._prefetch_thread]
    gate.open()


def test_one_that_begins_while_the_cache_is_being_closed_ends_too(warm_cache: WarmCache, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    close, begun = TierCore.close, []

    def close_after_another_prefetch(core: TierCore, timeout: float = 10) -> None:
        begun.append(cache.prefetch(PROMPT))
        close(core, timeout)

    monkeypatch.setattr(TierCore, "close", close_after_another_prefetch)
    cache.close(0.1)
    monkeypatch.undo()
    assert begun[0].wait(PATIENCE) is PrefetchState.CANCELLED
    gate.open()


# -- room ----------------------------------------------------------------------------------------------------------------

def test_content_of_higher_priority_is_not_given_up(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=4, secondary=1)
    high = RetentionConfig([TokenRange(0, None, 90)])
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(7, 13), retention=high))
    engine.serve(Request(2, tokens_of(8, 13), retention=high))
    assert cache.transfers.idle(PATIENCE)
    cache.refresh()
    before = [cache.match(tokens_of(seed, 13)).tokens_by_level for seed in (7, 8)]
    assert sum(levels[1] for levels in before) == 4  # the whole secondary level
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.read_blocks == 0
    assert [cache.match(tokens_of(seed, 13)).tokens_by_level for seed in (7, 8)] == before
    cache.verify()


def test_blocks_in_use_stay_and_the_rest_waits_below(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=4)
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(7, 16)))
    engine.learn(1)
    engine.forward([1])
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert (prefetch.read_blocks, prefetch.raised_blocks) == (3, 0)
    assert cache.match(PROMPT).tokens_by_level == (0, 12, 0)
    engine.forward([1])
    cache.verify()


def test_a_prefix_larger_than_the_levels_does_not_chase_its_own_blocks(make_cache: MakeCache) -> None:
    prompt = tokens_of(5, 81)
    cache = make_cache(24, 4, 32)
    ToyEngine(cache).serve(Request(1, prompt))
    assert cache.flush()
    cache.close()
    cache = make_cache(5, 2, 32)
    prefetch = cache.prefetch(prompt)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.num_blocks == 20
    assert prefetch.read_blocks <= 8
    levels = cache.match(prompt).tokens_by_level
    assert levels[0] + levels[1] == 4 * prefetch.read_blocks
    cache.verify()


@pytest.mark.parametrize("num_below", [2, 3])
def test_what_goes_down_for_the_beginning_of_a_prompt_is_not_its_end(make_cache: MakeCache, num_below: int) -> None:
    """The prompt's blocks are the coldest of the secondary level, and the primary one is full: each block that is raised sends another
    one down."""
    cache = make_cache(4, num_below)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT[:4 * num_below + 1]))
    engine.serve(Request(2, tokens_of(7, 16)))  # three full blocks and a stored tail
    assert cache.transfers.idle(PATIENCE)
    cache.refresh()
    assert cache.match(PROMPT).tokens_by_level == (0, 4 * num_below, 0)
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.lost_blocks == 0
    assert cache.match(PROMPT).reusable_blocks == num_below
    cache.verify()


def test_what_is_read_of_a_prompt_does_not_displace_its_beginning(warm_cache: WarmCache, make_cache: MakeCache) -> None:
    warm_cache().close()
    cache = make_cache(8, 1, 16, keep_backing=False)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT[:5]))
    first = next(block_id for block_id in range(25) if cache.block(block_id).tokens == tuple(PROMPT[:4]))
    cache.offload(first)
    assert cache.transfers.idle(PATIENCE)
    assert cache.match(PROMPT).tokens_by_level == (0, 4, 8)
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.lost_blocks == 0
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)
    cache.verify()


def test_two_prefetches_leave_each_other_their_blocks(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=4, secondary=2)
    first, second = cache.prefetch(PROMPT), cache.prefetch(OTHER)
    assert finished(first) is finished(second) is PrefetchState.FINISHED
    assert cache.match(PROMPT).tokens_by_level[2] == 0
    cache.verify()


def test_a_prompt_that_is_prefetched_again_stays_as_long_as_it_was_going_to(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=4, secondary=2)
    assert finished(cache.prefetch(PROMPT)) is PrefetchState.FINISHED
    raised = cache.match(PROMPT).tokens_by_level
    assert finished(cache.prefetch(PROMPT)) is PrefetchState.FINISHED
    assert finished(cache.prefetch(OTHER)) is PrefetchState.FINISHED
    assert cache.match(PROMPT).tokens_by_level == raised
    cache.verify()


def test_reads_of_requests_come_first(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate, primary=16)
    cache.add_sequence(Request(1, OTHER))
    prefetch = cache.prefetch(PROMPT)
    assert prefetch.read_blocks == 0
    gate.open()
    assert cache.wait_ready(1, timeout=PATIENCE) == 12
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.raised_blocks == 3


def test_an_admission_has_all_primary_blocks_while_a_prefetch_reads(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)
    wait_until(lambda: prefetch.read_blocks >= 1)
    assert cache.add_sequence(Request(1, tokens_of(7, 32))).new_blocks == 8  # all there are
    prefetch.cancel()
    gate.open()


# -- faults, threads -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [FaultKind.FAILURE, FaultKind.BIT_FLIP, FaultKind.HANG])
def test_a_bad_read_is_a_miss(warm_cache: WarmCache, kind: FaultKind) -> None:
    cache = warm_cache(FaultRule(kind, FaultOperation.READ, count=1, seconds=0.05 if kind is FaultKind.HANG else 0.0))
    cache._prefetch_depth = 1  # so that the first block is the one that is hit
    prefetch = cache.prefetch(PROMPT)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.lost_blocks == 1
    stats = cache.stats()
    assert (stats.quarantined, stats.transfer_failures) == (1, 1)
    assert cache.match(PROMPT).reusable_blocks == 0
    cache.verify()
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0
    assert engine.serve(Request(2, PROMPT)) == 12


def test_several_threads_prefetch_and_serve(make_cache: MakeCache) -> None:
    prompts = [tokens_of(number, 13 + 4 * (number % 3)) for number in range(1, 9)]
    cache = make_cache(16, 8, 64)
    engine = ToyEngine(cache)
    for number, prompt in enumerate(prompts):
        engine.serve(Request(number, prompt))
    assert cache.flush()
    cache.close()
    cache = make_cache(16, 8, 64, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, rate=0.05),
                                                 FaultRule(FaultKind.DELAY, FaultOperation.READ, rate=0.3, seconds=0.002)], seed=3))
    errors: list[BaseException] = []
    stop = threading.Event()

    def ask() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                prefetch = cache.prefetch(prompts[number % len(prompts)])
                if number % 3 == 0:
                    prefetch.cancel()
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    engine = ToyEngine(cache)
    try:
        for turn in range(3):
            engine.run([Request(100 * turn + number, prompt) for number, prompt in enumerate(prompts)], answer=2, batch=2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not errors
    assert engine.checked_tokens > 0
    assert cache.flush()
    cache.verify()
    assert cache.stats().leases == 0


def test_layers_with_windows_and_states_rise_together(make_cache: MakeCache) -> None:
    layout = KVLayout(layers=[LayerSpec.attention(num_kv_heads=1, head_dim=8), LayerSpec.attention(num_kv_heads=1, head_dim=8, window=8),
                              LayerSpec.recurrent(state_bytes=64, snapshot_interval=8)], dtype="float32", tokens_per_block=4)
    prompt = list(range(1, 34))
    cache = make_cache(16, 8, 32, layout=layout)
    cache.add_sequence(Request(1, prompt))
    cache.mark_computed(1, len(prompt))
    cache.remove_sequence(1)
    assert cache.flush()
    cache.close()
    cache = make_cache(16, 8, 32, layout=layout)
    found = cache.match(prompt).tokens_by_level
    assert found[2] > 0
    prefetch = cache.prefetch(prompt)
    assert finished(prefetch) is PrefetchState.FINISHED
    assert prefetch.raised_blocks == prefetch.num_blocks > 8
    assert cache.match(prompt).tokens_by_level == (sum(found), 0, 0)
    cache.verify()
    assert cache.add_sequence(Request(2, prompt)).prepopulated_tokens == sum(found)
    assert cache.wait_ready(2, timeout=PATIENCE) == sum(found)
    cache.verify()


def test_a_bug_in_the_thread_leaves_nobody_waiting(warm_cache: WarmCache, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    prefetch = cache.prefetch(PROMPT)

    def fail(_ledger: object) -> bool:
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(cache, "_carry_on", fail)
    gate.open()
    assert finished(prefetch) is PrefetchState.CANCELLED
    assert any("prefetch thread ended" in record.getMessage() for record in caplog.records)
    caplog.clear()  # the fixture looks for bugs
    assert cache.add_sequence(Request(1, PROMPT)).prepopulated_tokens == 12
    assert cache.wait_ready(1, timeout=PATIENCE) == 12


def test_what_is_no_prompt_is_refused(make_cache: MakeCache) -> None:
    cache = make_cache()
    bad: list[Any] = [[], "text", [1.5], None]
    for tokens in bad:
        with pytest.raises(RequestError):
            cache.prefetch(tokens)

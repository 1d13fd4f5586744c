"""Statistics say what is so: of requests, of levels, of groups and of iterations."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import pytest
from gate import Gate
from toy_engine import OTHER, PROMPT, MakeCache, ToyEngine, WarmCache, fails, tokens_of, wait_until

from kvtier import CapacityError, KVCacheManager, Level, Request, RetentionConfig, TokenRange, UnknownRequest
from kvtier.io.faults import FaultOperation
from kvtier.tiering.ledger.group import WINDOW, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.load_speed import LoadMeter
from kvtier.tiering.loading import LoadDecider
from kvtier.tiering.statistics import (
    GdsStats,
    LevelStats,
    PerLevel,
    PrefetchStats,
    TierCounters,
    collect_groups,
    collect_request,
    since,
    total_levels,
)
from kvtier.tiering.statistics_recorder import StatisticsRecorder, UsagePeaks
from kvtier.tiering.transfer_balance import TransferBalance

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")
NOTHING: Any = {"dropped_events": 0, "prefill_tokens_per_second": None, "faults": {}, "gds": GdsStats("none", ""), "store": None,
                "copy_paths": {}, "loading": LoadDecider(LoadMeter([1]), True, True).stats(), "prefetch": PrefetchStats()}


def held_blocks(cache: KVCacheManager) -> int:
    """Counted one by one."""
    with cache.locked() as ledger:
        held = {block.id for sequence in ledger.sequences.values() for block in sequence.blocks}
        return len(held | {block.id for lease in ledger.leases.values() for block in lease.rows[0]})


def make_ledger(*groups: GroupSpec) -> Ledger:
    return Ledger(groups or [GroupSpec((4, 2, 0))], 4, LedgerRules(True, True, True, 35, 35, True, 0.25, "default", 0, bytes(32)))


# -- levels --------------------------------------------------------------------------------------------------------------


def test_used_blocks_are_those_that_somebody_holds(make_cache: MakeCache) -> None:
    cache = make_cache(24, 8, 16, faults=None)
    engine = ToyEngine(cache)
    generator = random.Random(5)
    leases = []
    running: list[int] = []
    for number in range(60):
        try:
            engine.admit(Request(number, tokens_of(generator.randrange(4), generator.randrange(3, 20))))
            running.append(number)
        except CapacityError:
            pass
        if running and generator.random() < 0.3:
            leases.append(cache.pin(generator.choice(running)))
        assert cache.stats().primary.used_blocks == held_blocks(cache)
        if len(running) > 2 or (running and generator.random() < 0.3):
            request_id = running.pop(generator.randrange(len(running)))
            engine.learn(request_id)
            engine.forward([request_id])
            engine.remove(request_id)
        if leases and generator.random() < 0.4:
            leases.pop().release()
        stats = cache.stats()
        assert stats.primary.used_blocks == held_blocks(cache)
        for level in (stats.primary, stats.secondary, stats.nvme):
            assert level.max_blocks == level.free_blocks + level.used_blocks + level.busy_blocks
        cache.refresh()


def test_a_slot_that_is_read_into_is_used_while_somebody_waits_for_it_and_busy_afterwards(warm_cache: WarmCache) -> None:
    gate = Gate(FaultOperation.READ)
    cache = warm_cache(gate=gate)
    cache.add_sequence(Request(1, PROMPT))
    stats = cache.stats().primary
    assert (stats.used_blocks, stats.busy_blocks) == (4, 0)
    cache.remove_sequence(1)
    stats = cache.stats().primary
    assert (stats.used_blocks, stats.busy_blocks) == (0, 3), "the reads still go on"
    gate.open()
    wait_until(lambda: cache.stats().primary.busy_blocks == 0)
    assert cache.iteration_stats().primary.peak_used_blocks == 0
    cache.refresh()
    assert cache.iteration_stats().primary.peak_used_blocks == 4


def test_groups_are_counted_one_by_one_and_together() -> None:
    ledger = make_ledger(GroupSpec((4, 2, 0), WINDOW, window=4), GroupSpec((16, 3, 0)))
    ledger.add_sequences([Request(1, list(range(12)))])
    groups = collect_groups(ledger.allocators)
    assert [group.group for group in groups] == [0, 1]
    assert [(group.primary.max_blocks, group.primary.used_blocks) for group in groups] == [(4, 3), (16, 3)]
    primary, secondary, nvme = total_levels(groups)
    assert primary == LevelStats(20, 14, 6, 0, 0, 0)
    assert secondary == LevelStats(5, 5, 0, 0, 0, 0)
    assert nvme == LevelStats(0, 0, 0, 0, 0, 0)
    assert total_levels(groups[:1])[0] == groups[0].primary
    ledger.mark_computed(1, 12)
    ledger.append_step([1], [[7]])
    groups = collect_groups(ledger.allocators)
    assert [group.primary.used_blocks for group in groups] == [2, 4], "what has left the window is in use no more"


def test_a_request_counts_its_blocks_in_all_groups() -> None:
    ledger = make_ledger(GroupSpec((8, 0, 0)), GroupSpec((8, 0, 0)))
    ledger.add_sequences([Request(1, list(range(12)))])
    ledger.mark_computed(1, 12)
    ledger.remove_sequence(1, True)
    sequence = ledger.add_sequences([Request(2, [*range(7), 99, 99, 99])])[0]
    found = collect_request(ledger, sequence)
    assert (found.reused_full, found.reused_partial, found.missed, found.prepopulated_tokens) == (2, 2, 2, 7)
    counters = ledger.counters
    assert (counters.reused_full, counters.reused_partial, counters.missed - 6) == (2, 2, 2)


def test_a_cache_has_the_levels_of_its_group(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    stats = cache.stats()
    assert [(group.group, group.primary, group.secondary, group.nvme) for group in stats.groups] == [
        (0, stats.primary, stats.secondary, stats.nvme)]


# -- iterations ----------------------------------------------------------------------------------------------------------


def test_the_peak_is_the_most_within_the_iteration(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    cache.add_sequence(Request(1, tokens_of(1, 9)))
    cache.add_sequence(Request(2, tokens_of(2, 9)))
    cache.remove_sequence(1)
    cache.refresh()
    level = cache.iteration_stats().primary
    assert (level.max_blocks, level.free_blocks, level.used_blocks, level.peak_used_blocks) == (8, 5, 3, 6)
    cache.refresh()
    assert cache.iteration_stats().primary.peak_used_blocks == 3, "a new iteration begins with what is in use"
    cache.remove_sequence(2)
    cache.refresh()
    assert cache.iteration_stats().primary.peak_used_blocks == 3
    cache.refresh()
    level = cache.iteration_stats().primary
    assert (level.used_blocks, level.peak_used_blocks) == (0, 0)


def test_the_peak_of_all_groups_is_that_of_their_sum() -> None:
    first, second = make_ledger(GroupSpec((8, 0, 0))), make_ledger(GroupSpec((8, 0, 0)))
    peaks = UsagePeaks([*first.allocators, *second.allocators])
    first.add_sequences([Request(1, list(range(16)))])
    peaks.note()
    first.remove_sequence(1, False)
    second.add_sequences([Request(1, list(range(12)))])
    peaks.note()
    assert (peaks.groups, peaks.total) == ([4, 3], 4)
    first.add_sequences([Request(2, list(range(8)))])
    peaks.note()
    assert (peaks.groups, peaks.total) == ([4, 3], 5)
    peaks.restart()
    assert (peaks.groups, peaks.total) == ([2, 3], 5)


def test_iterations_add_up_to_the_whole(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    engine = ToyEngine(cache)
    onboarded = offloaded = missed = 0
    for number in range(12):
        engine.serve(Request(number, tokens_of(number % 3, 12 + number % 3)))  # its refresh ends an iteration
        iteration = cache.iteration_stats()
        onboarded += sum(iteration.onboard_blocks.values())
        offloaded += sum(iteration.offload_bytes.values())
        missed += iteration.missed
    cache.refresh()
    iteration, stats = cache.iteration_stats(), cache.stats()
    assert onboarded + sum(iteration.onboard_blocks.values()) == sum(stats.onboard_blocks.values()) > 0
    assert offloaded + sum(iteration.offload_bytes.values()) == sum(stats.offload_bytes.values()) > 0
    assert missed == stats.missed > 0
    cache.refresh()
    iteration = cache.iteration_stats()
    assert (sum(iteration.onboard_blocks.values()), sum(iteration.offload_bytes.values()), iteration.missed) == (0, 0, 0), "nothing since"


def test_a_front_that_is_reused_by_copying_counts_as_a_copy(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9)))
    engine.admit(Request(2, tokens_of(1, 9)))  # holds the block that the next one wants a part of
    engine.learn(2)
    engine.admit(Request(3, [*tokens_of(1, 7), 99, 99]))
    engine.learn(3)
    stats = cache.stats()
    assert (stats.copied_blocks, stats.copied_bytes) == (1, cache.layout.groups[0].block_bytes // 4 * 3)
    assert sum(stats.onboard_blocks.values()) == sum(stats.offload_blocks.values()) == 0


def test_a_difference_is_of_counters_alone() -> None:
    counted = StatisticsRecorder(make_ledger()).stats(**NOTHING)
    assert since(dataclasses.replace(counted, host_dropped=7), dataclasses.replace(counted, host_dropped=5)).host_dropped == 2
    assert type(since(counted, counted)) is TierCounters


def test_of_the_blocks_that_were_dropped_those_in_host_memory_are_counted_apart(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4)
    engine = ToyEngine(cache)
    for user in (1, 2):
        engine.serve(Request(user, tokens_of(user, 16)))
    assert (cache.stats().dropped, cache.stats().host_dropped) == (0, 0), "the first one's blocks went down"
    engine.serve(Request(3, tokens_of(3, 16)))
    assert (cache.stats().dropped, cache.stats().host_dropped) == (4, 4), "and were dropped for the second one's"
    assert cache.iteration_stats().host_dropped == 4
    low = RetentionConfig([TokenRange(0, None, 10)])
    engine.serve(Request(4, tokens_of(4, 16), retention=low))
    engine.serve(Request(5, tokens_of(5, 16)))
    assert (cache.stats().dropped, cache.stats().host_dropped) == (12, 8), "four that were too low to go down at all"
    assert cache.stats().groups[0].secondary.evictable_blocks == 4


# -- requests ------------------------------------------------------------------------------------------------------------


def test_what_a_request_got_is_told_by_level_once_it_was_delivered(make_cache: MakeCache) -> None:
    cache = make_cache(6, 4)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 13)))
    engine.serve(Request(2, tokens_of(2, 13)))  # pushes part of the first one down
    levels = cache.match(tokens_of(1, 13)).tokens_by_level
    engine.admit(Request(3, [*tokens_of(1, 10), 77, 78, 79, 80]))
    before = cache.request_stats(3)
    assert (before.request_id, before.reused_full, before.reused_partial, before.missed) == (3, 2, 1, 1)
    assert (before.prepopulated_tokens, before.is_delivered, before.hit_tokens) == (10, False, PerLevel()), "promised, not delivered"
    assert before.hit_rate == 0.75
    totals = cache.stats()
    engine.learn(3)
    after = cache.request_stats(3)
    assert after == dataclasses.replace(before, is_delivered=True, hit_tokens=after.hit_tokens)
    assert sum(after.hit_tokens) == 10
    assert 0 < levels[Level.PRIMARY] < 12, "the prompt lay on two levels"
    assert min(after.hit_tokens.primary, after.hit_tokens.secondary) > 0
    now = cache.stats()
    assert after.hit_tokens == PerLevel(*(new - old for new, old in zip(now.hit_tokens, totals.hit_tokens, strict=True)))


def test_requests_add_up_to_the_whole(make_cache: MakeCache) -> None:
    cache = make_cache(24, 4)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9)))
    before = cache.stats()
    requests = [Request(2, tokens_of(1, 9)), Request(3, [*tokens_of(1, 6), 5, 5]), Request(4, tokens_of(2, 17))]
    for request in requests:
        engine.admit(request)
        engine.learn(request.id)
    found, stats = [cache.request_stats(request.id) for request in requests], cache.stats()
    assert [(each.reused_full, each.reused_partial, each.missed) for each in found] == [(2, 0, 1), (1, 1, 0), (0, 0, 5)]
    for name in ("reused_full", "reused_partial", "missed"):
        assert sum(getattr(each, name) for each in found) == getattr(stats, name) - getattr(before, name)
    assert sum(each.total_blocks for each in found) == stats.alloc_total - before.alloc_total
    assert sum(each.new_blocks for each in found) == stats.alloc_new - before.alloc_new
    assert [sum(each.hit_tokens) for each in found] == [8, 6, 0]


def test_a_bad_read_is_no_hit(warm_cache: WarmCache) -> None:
    cache = warm_cache(fails(FaultOperation.READ))
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    valid = engine.learn(1)
    stats = cache.request_stats(1)
    assert (stats.prepopulated_tokens, stats.hit_tokens) == (12, PerLevel(0, 0, valid))
    assert valid < 12


def test_a_request_that_is_not_active_has_no_statistics(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    engine.serve(Request(1, OTHER))
    with pytest.raises(UnknownRequest, match="request 1"):
        cache.request_stats(1)


def test_a_hit_rate_is_reused_of_all(make_cache: MakeCache) -> None:
    cache = make_cache(16, 0)
    engine = ToyEngine(cache)
    assert cache.stats().hit_rate == cache.iteration_stats().hit_rate == 0.0
    engine.serve(Request(1, tokens_of(1, 13)))
    assert cache.stats().hit_rate == 0.0
    engine.serve(Request(2, tokens_of(1, 13)))
    assert cache.iteration_stats().hit_rate == 0.75
    assert cache.stats().hit_rate == 0.375


# -- advice --------------------------------------------------------------------------------------------------------------


def test_advice_is_said_once_and_can_be_read_while_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    ledger = make_ledger()
    recorder = StatisticsRecorder(ledger, [TransferBalance(Level.SECONDARY, window=8, min_blocks=16)])
    assert recorder.stats(**NOTHING).advice is None
    for _ in range(20):
        for _ in range(3):
            recorder.totals.add(Level.PRIMARY, Level.SECONDARY, 100, 0.1)
        recorder.end_iteration()
    advice = recorder.stats(**NOTHING).advice
    assert advice is not None
    assert "raise secondary_offload_min_priority" in advice
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"transfers are out of balance: {advice}"]
    assert "24 blocks were offloaded to the secondary level and 0 were onboarded" in advice
    for _ in range(8):
        for _ in range(3):
            recorder.totals.add(Level.PRIMARY, Level.SECONDARY, 100, 0.1)
            recorder.totals.add(Level.SECONDARY, Level.PRIMARY, 100, 0.1)
        recorder.end_iteration()
    assert recorder.stats(**NOTHING).advice is None


def test_traffic_with_nvme_is_judged_apart_from_that_with_the_host() -> None:
    ledger = make_ledger()
    balances = [TransferBalance(level, window=4, min_blocks=4) for level in (Level.SECONDARY, Level.NVME)]
    recorder = StatisticsRecorder(ledger, balances)
    for _ in range(6):
        recorder.totals.add(Level.PRIMARY, Level.SECONDARY, 100, 0.1)
        recorder.totals.add(Level.SECONDARY, Level.PRIMARY, 100, 0.1)
        recorder.totals.add(Level.SECONDARY, Level.NVME, 100, 0.1)
        recorder.totals.add(Level.SECONDARY, Level.NVME, 100, 0.1)
        recorder.end_iteration()
    assert balances[0].advice is None
    assert recorder.advice == balances[1].advice
    assert "nvme_offload_min_priority" in str(recorder.advice)

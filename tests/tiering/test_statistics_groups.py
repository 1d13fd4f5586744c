"""Statistics of several groups add up, at any moment and from iteration to iteration."""

from __future__ import annotations

import dataclasses
import random

import pytest
from group_engine import LAYOUTS, GroupEngine
from toy_engine import MakeCache, tokens_of

from kvtier import KVCacheManager, Level
from kvtier.tiering.statistics import GroupLevels, IterationStats, LevelStats, Stats, TierCounters

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

LEVELS = ("primary", "secondary", "nvme")
FIELDS = [field.name for field in dataclasses.fields(LevelStats)]


def check_sums(cache: KVCacheManager, stats: Stats | IterationStats) -> None:
    """Each level is the sum of its groups', and each group's level of its blocks."""
    assert [group.group for group in stats.groups] == list(range(len(cache.layout.groups)))
    assert all(isinstance(group, GroupLevels) for group in stats.groups)
    for level in LEVELS:
        total, parts = getattr(stats, level), [getattr(group, level) for group in stats.groups]
        for field in FIELDS:
            assert getattr(total, field) == sum(getattr(part, field) for part in parts), (level, field)
        for part in parts:
            assert part.max_blocks == part.free_blocks + part.used_blocks + part.busy_blocks
            assert part.evictable_blocks + part.backing_blocks <= part.free_blocks


@pytest.mark.parametrize("name", ["windows of other heads and types", "states and a window", "encoder"])
def test_levels_and_iterations_add_up(make_cache: MakeCache, name: str) -> None:
    cache = make_cache(["8 blocks", "9 blocks", "10 blocks"], ["3 blocks", "4 blocks", "5 blocks"], ["16 blocks", "15 blocks", "14 blocks"],
                       layout=LAYOUTS[name])
    assert [group.primary.max_blocks for group in cache.stats().groups] == [8, 9, 10]
    engine = GroupEngine(cache)
    generator = random.Random(7)
    counted: list[IterationStats] = []
    for number in range(40):
        engine.admit(engine.request(number, tokens_of(generator.randrange(5), generator.randrange(4, 20))))
        check_sums(cache, cache.stats())
        used = [group.primary.used_blocks for group in cache.stats().groups]
        held = [sum(block_id >= 0 for block_id in cache.block_ids(number, group=group.number)) for group in cache.layout.groups]
        assert used == held, "nothing has left a window yet"
        engine.learn(number)
        engine.forward([number])
        engine.remove(number)
        cache.refresh()
        counted.append(cache.iteration_stats())
        check_sums(cache, counted[-1])
        for group, found in enumerate(counted[-1].groups):
            assert found.primary.peak_used_blocks >= used[group]
        assert counted[-1].primary.peak_used_blocks <= sum(group.primary.peak_used_blocks for group in counted[-1].groups)
    assert cache.transfers.idle(10)
    cache.refresh()
    counted.append(cache.iteration_stats())
    stats = cache.stats()
    for field in dataclasses.fields(TierCounters):
        total = getattr(stats, field.name)
        if isinstance(total, int):
            assert sum(getattr(iteration, field.name) for iteration in counted) == total, field.name
        elif isinstance(total, tuple):
            assert tuple(map(sum, zip(*[getattr(iteration, field.name) for iteration in counted], strict=True))) == total
    assert stats.host_dropped <= stats.dropped
    assert stats.hit_tokens.nvme > 0
    assert stats.reused_full > stats.hit_blocks.primary + stats.hit_blocks.secondary, "blocks count in each group, hits once"


def test_bytes_moved_are_those_of_the_groups_whose_blocks_moved(make_cache: MakeCache) -> None:
    layout = LAYOUTS["windows of other heads and types"]
    cache = make_cache(8, 4, 0, layout=layout)
    engine = GroupEngine(cache)
    engine.serve(engine.request(1, tokens_of(1, 13)))
    for group in layout.groups:
        before = cache.stats().offload_bytes.get((Level.PRIMARY, Level.SECONDARY), 0)
        block_id = next(view.id for view in (cache.block(number, group=group.number) for number in range(8)) if view.is_full)
        cache.offload(block_id, group=group.number)
        assert cache.transfers.idle(10)
        assert cache.stats().offload_bytes[Level.PRIMARY, Level.SECONDARY] == before + group.block_bytes
    assert cache.stats().offload_blocks == {(Level.PRIMARY, Level.SECONDARY): len(layout.groups)}

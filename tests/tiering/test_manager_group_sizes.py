"""Sizes and kinds of several groups, as configuration gives them; and sizes that several ranks agree on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from group_engine import LAYOUTS, GroupEngine
from toy_engine import PROMPT, MakeCache, tokens_of

from kvtier import ConfigError, KVCacheManager, KVLayout, LayerSpec, Level

TWO_GROUPS = LAYOUTS["window and full"]


def primary_blocks(cache: KVCacheManager) -> list[int]:
    return [group.primary.max_blocks for group in cache.stats().groups]


# -- sizes ---------------------------------------------------------------------------------------------------------------------


def test_each_group_has_the_size_that_a_list_gives_it(make_cache: MakeCache) -> None:
    cache = make_cache(["9 blocks", "12 blocks"], ["3 blocks", "0 blocks"], ["5 blocks", "0 blocks"], layout=TWO_GROUPS)
    groups = cache.stats().groups
    assert [(group.primary.max_blocks, group.secondary.max_blocks, group.nvme.max_blocks) for group in groups] == [(9, 3, 5), (12, 0, 0)]
    assert (cache.stats().primary.max_blocks, cache.stats().secondary.max_blocks) == (21, 3)
    assert [cache.pool(group).primary.num_blocks for group in (0, 1)] == [9, 12]
    assert [cache.pool(group).secondary is None for group in (0, 1)] == [False, True]
    engine = GroupEngine(cache)
    for number in range(8):
        engine.serve(engine.request(number, tokens_of(number % 3, 14)), answer=3)
    assert cache.num_free_blocks(Level.PRIMARY, group=0) == 9
    assert cache.num_free_blocks(Level.PRIMARY, group=1) == 12


def test_bytes_are_shared_out_by_group_shares(make_cache: MakeCache) -> None:
    window, full = TWO_GROUPS.groups
    total = 10 * window.block_bytes + 30 * full.block_bytes
    share = 10 * window.block_bytes / total
    cache = make_cache(f"{total} B", 0, layout=TWO_GROUPS, group_shares=[share, 1 - share])
    assert primary_blocks(cache) == [10, 30]
    equal = make_cache(f"{total} B", 0, layout=TWO_GROUPS)
    assert primary_blocks(equal) == [-(-total // 2 // group.block_bytes) for group in TWO_GROUPS.groups]


def test_max_tokens_caps_every_group(make_cache: MakeCache, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(["9 blocks", "30 blocks"], 0, layout=TWO_GROUPS, max_tokens=46)
    assert primary_blocks(cache) == [9, 12]
    assert "max_tokens=46 allows 12 blocks per group" in caplog.text


@pytest.mark.parametrize(("settings", "message"), [
    ({"primary": ["8 blocks"] * 3}, "primary: 3 sizes for 2 groups"), ({"secondary": ["8 blocks"] * 3}, "secondary: 3 sizes for 2 groups"),
    ({"primary": "64KiB", "group_shares": [0.2, 0.3, 0.5]}, "group_shares=.*: 3 shares for 2 groups"),
    ({"primary": "64KiB", "group_shares": [0.0, 1.0]}, "gives group 0 no block"),
    ({"primary": ["8 blocks", "0 blocks"]}, "at least 1 block per group")])
def test_sizes_that_do_not_fit_the_groups_are_refused(make_cache: MakeCache, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cache(layout=TWO_GROUPS, **settings)


# -- windows -------------------------------------------------------------------------------------------------------------------


def sinks_in_a_window(window: int, sinks: int) -> KVLayout:
    return KVLayout([LayerSpec.attention(1, 8, window=window, sinks=sinks), LayerSpec.attention(1, 8)], "float32", 4)


@pytest.mark.parametrize("max_seq_len", [32, 8], ids=["longer sequences", "sequences no longer than the window"])
def test_sinks_that_do_not_fill_their_blocks_reuse_nothing_and_say_so(make_cache: MakeCache, caplog: pytest.LogCaptureFixture,
                                                                      max_seq_len: int) -> None:
    cache = make_cache(24, layout=sinks_in_a_window(8, 2), max_seq_len=max_seq_len)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "group 0: 2 sinks do not fill blocks of 4 tokens: nothing is reused; use a multiple"]
    engine = GroupEngine(cache)
    for number in range(3):
        assert engine.serve(engine.request(number, tokens_of(1, 6)), answer=max_seq_len - 6) == 0
    assert cache.stats().primary.evictable_blocks == 0


def test_sinks_that_fill_their_blocks_are_reused_without_a_warning(make_cache: MakeCache, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(24, layout=sinks_in_a_window(8, 4))
    engine = GroupEngine(cache)
    engine.serve(engine.request(1, PROMPT))
    assert engine.serve(engine.request(2, PROMPT)) == 12
    assert not caplog.records


@pytest.mark.parametrize(("max_seq_len", "stays"), [(12, True), (13, False)])
def test_a_window_that_no_sequence_outgrows_is_full_attention(make_cache: MakeCache, max_seq_len: int, stays: bool) -> None:
    layout = KVLayout([LayerSpec.attention(1, 8, window=12), LayerSpec.attention(1, 8)], "float32", 4)
    cache = make_cache(24, layout=layout, max_seq_len=max_seq_len)
    engine = GroupEngine(cache)
    engine.admit(engine.request(1, tokens_of(1, 11)))
    engine.learn(1)
    while engine.sequences[1].num_tokens < max_seq_len:
        engine.forward([1])
        engine.sample(1)
    engine.forward([1])
    with cache.locked() as ledger:
        assert (ledger.geometries[0].window == 0) is stays
    engine.remove(1)
    assert engine.serve(engine.request(2, tokens_of(1, 11))) == 10


# -- ranks ---------------------------------------------------------------------------------------------------------------------


class PretendRanks:
    """What an engine would give each rank: the minimum over what all of them pass in the same call."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=20)
        self._numbers: dict[int, list[int]] = {}
        self.calls = 0

    def rank(self, number: int) -> Callable[[list[int]], list[int]]:
        def allreduce_min(numbers: list[int]) -> list[int]:
            self._numbers[number] = numbers
            self._barrier.wait()
            least = [min(column) for column in zip(*self._numbers.values(), strict=True)]
            self._barrier.wait()
            self.calls += number == 0
            return least
        return allreduce_min


def open_on_two_ranks(make: Callable[[int, Callable[[list[int]], list[int]]], KVCacheManager]) -> list[KVCacheManager | ConfigError]:
    """Each rank opens its own cache at the same time. What came of it."""
    ranks = PretendRanks(2)
    made: dict[int, KVCacheManager | ConfigError] = {}

    def open_one(number: int) -> None:
        try:
            made[number] = make(number, ranks.rank(number))
        except ConfigError as error:
            made[number] = error

    threads = [threading.Thread(target=open_one, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [made[0], made[1]]


def test_all_ranks_have_the_blocks_that_the_smallest_has(make_cache: MakeCache) -> None:
    sizes = [(["9 blocks", "30 blocks"], ["4 blocks", "2 blocks"]), (["12 blocks", "20 blocks"], ["3 blocks", "5 blocks"])]
    caches = open_on_two_ranks(lambda number, least: make_cache(*sizes[number], layout=TWO_GROUPS, allreduce_min=least))
    for cache in caches:
        assert isinstance(cache, KVCacheManager)
        found = [(group.primary.max_blocks, group.secondary.max_blocks) for group in cache.stats().groups]
        assert found == [(9, 3), (20, 2)]
        assert [cache.pool(group).primary.num_blocks for group in (0, 1)] == [9, 20]
        engine = GroupEngine(cache)
        engine.serve(engine.request(1, PROMPT))
        assert engine.serve(engine.request(2, PROMPT)) == 12


def test_ranks_of_different_groups_are_all_told(make_cache: MakeCache) -> None:
    layouts = [TWO_GROUPS, LAYOUTS["states"]]
    errors = open_on_two_ranks(lambda number, least: make_cache(layout=layouts[number], allreduce_min=least))
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "the ranks have different groups" in str(error)


def test_a_function_that_gives_no_minimum_is_refused(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match=r"allreduce_min: .* which is no minimum"):
        make_cache(layout=TWO_GROUPS, allreduce_min=lambda numbers: [number + 1 for number in numbers])

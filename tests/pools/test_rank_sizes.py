"""What holds on every rank: the least of each size, and the same groups, found out by one function."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.rank_sizes import minimum_over_ranks
from kvtier.pools.sizing import PoolSizes

WINDOW, FULL = LayerSpec.attention(2, 8, window=8), LayerSpec.attention(2, 8)
TWO_GROUPS = KVLayout([WINDOW, FULL], "float16", 4)


def together(*ranks: tuple[PoolSizes, KVLayout]) -> list[PoolSizes | Exception]:
    """What each rank gets when all call at the same time; a rank that waits for one that has gone fails by a broken barrier."""
    barrier = threading.Barrier(len(ranks), timeout=60.0)
    given_numbers: list[list[int]] = [[] for _ in ranks]
    results: list[PoolSizes | Exception] = [ValueError() for _ in ranks]

    def run(rank: int) -> None:
        def allreduce_min(numbers: list[int]) -> list[int]:
            given_numbers[rank] = numbers
            barrier.wait()
            lengths = {len(other) for other in given_numbers}
            assert len(lengths) == 1, "lists of different lengths cannot be reduced"
            assert all(-(1 << 63) <= number < 1 << 63 for number in numbers)
            result = [min(column) for column in zip(*given_numbers, strict=True)]
            barrier.wait()
            return result

        try:
            results[rank] = minimum_over_ranks(ranks[rank][0], allreduce_min, ranks[rank][1])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return results


COUNTS = st.tuples(st.integers(0, 100), st.integers(0, 100))


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), min_size=1, max_size=3))
def test_every_rank_gets_the_least_of_each_group_and_level(sizes: list[tuple[tuple[int, int], ...]]) -> None:
    least = PoolSizes(*(tuple(min(rank[level][group] for rank in sizes) for group in (0, 1)) for level in (0, 1, 2)))
    assert together(*((PoolSizes(*rank), TWO_GROUPS) for rank in sizes)) == [least] * len(sizes)


def test_a_part_of_the_heads_or_layers_on_each_rank_is_no_difference() -> None:
    stage = KVLayout([WINDOW, FULL, FULL], "float16", 4)
    narrow = KVLayout([LayerSpec.attention(1, 8, window=8), LayerSpec.attention(1, 8)], "float16", 4)
    sizes = PoolSizes((4, 8), (2, 2), (0, 0))
    assert together((sizes, TWO_GROUPS), (sizes, stage), (sizes, narrow)) == [sizes] * 3


@pytest.mark.parametrize("other", [
    KVLayout([FULL], "float16", 4), KVLayout([LayerSpec.attention(2, 8, window=9), FULL], "float16", 4),
    KVLayout([WINDOW, FULL], "float16", 8), KVLayout([LayerSpec.attention(2, 8, window=8, sinks=4), FULL], "float16", 4),
    KVLayout([WINDOW, LayerSpec.mla(8, 8)], "float16", 4), KVLayout([WINDOW, FULL, LayerSpec.recurrent(8, 4)], "float16", 4)])
def test_ranks_with_other_groups_all_learn_of_it_and_none_waits(other: KVLayout) -> None:
    def sizes(layout: KVLayout) -> PoolSizes:
        return PoolSizes(*((4,) * len(layout.groups),) * 3)

    results = together((sizes(TWO_GROUPS), TWO_GROUPS), (sizes(other), other), (sizes(TWO_GROUPS), TWO_GROUPS))
    for result in results:
        assert isinstance(result, ConfigError)
        assert "the ranks have different groups" in str(result)
    assert "[0: attention window=8, 2x8 float16; 1: attention full, 2x8 float16] with tokens_per_block=4" in str(results[0])


@pytest.mark.parametrize("wrong", [lambda numbers: [number + 1 for number in numbers], lambda numbers: numbers[:1]])
def test_a_function_that_is_no_minimum_is_refused(wrong: Callable[[list[int]], list[int]]) -> None:
    with pytest.raises(ConfigError, match="allreduce_min"):
        minimum_over_ranks(PoolSizes((4, 4), (0, 0), (0, 0)), wrong, TWO_GROUPS)

"""What a scheduler may rely on, whatever the prompts share, and truncation in a store that has gaps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import Driver

from kvtier.pools.pool_index import NVME, PRIMARY
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import WarmRow
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.truncating import truncate


def driver(primary: int, secondary: int = 0, nvme: int = 0, tokens_per_block: int = 4) -> Driver:
    return Driver(Ledger([GroupSpec((primary, secondary, nvme))], tokens_per_block, LedgerRules(policy="lru")))


def stored(prompt: Any) -> Driver:
    cache = driver(16)
    cache.add(Request(0, prompt))
    cache.release(0)
    return cache


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=12),
       st.integers(1, 3), st.booleans())
def test_who_is_admitted_while_enough_is_free_to_completion_completes(requests: list[tuple[int, int, int, int]], tokens_per_block: int,
                                                                      in_parallel: bool) -> None:
    """No call of an admitted sequence ever runs out of blocks; in particular admitting itself does not, with copies to be made."""
    cache = driver(24, tokens_per_block=tokens_per_block)
    reserved = 0
    active: list[Request] = []
    for number, (length, max_new, family, shared) in enumerate(requests):
        tokens = [family] * min(shared, length) + [100 + number] * max(length - shared, 0)
        request = Request(number, tokens, max_new_tokens=max_new)
        if cache.ledger.allocators[0].queues.num_free(PRIMARY) - reserved < capacity.remaining_blocks_to_completion(cache.ledger, request):
            continue
        cache.add(request)
        assert cache.compute(number)
        if in_parallel:
            reserved += capacity.remaining_blocks_to_completion(cache.ledger, cache.ledger.sequence(number))
            active.append(request)
            continue
        for token in range(max_new):
            assert cache.append([number], [[token]])
        cache.remove(number, True)
    while active:
        for request in list(active):
            if cache.ledger.sequence(request.id).num_tokens == request.num_tokens + request.max_new_tokens:
                active.remove(request)
                cache.remove(request.id, True)
        assert not active or cache.append([request.id for request in active], [[1]] * len(active))
    cache.check_idle()


@given(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 14), st.lists(st.integers(0, 1), min_size=1, max_size=14))
def test_after_truncating_nothing_of_the_prompt_beyond_what_is_kept_is_found_again(prompt: list[int], keep: int, other: list[int]) -> None:
    cache = stored(prompt)
    cache.add(Request(1, other))
    cache.release(1)
    truncate(cache.ledger, Request(-1, prompt), keep)
    cache.check()
    cache.events.check()
    kept = -(-keep // 4) * 4
    (sequence,) = cache.add(Request(2, prompt))
    if prompt[:kept] != other[:kept] or len(other) <= kept:
        assert sequence.prepopulated <= max(kept, 0)


def test_truncating_keeps_a_tail_that_is_not_part_of_the_prompt() -> None:
    cache = stored(range(7))
    assert truncate(cache.ledger, Request(-1, [0, 1, 2, 3, 4, 99]), 4) == 0
    (sequence,) = cache.add(Request(1, range(7)))
    assert sequence.prepopulated == 6


def test_truncating_reaches_what_nvme_has_held_since_the_start_behind_gaps_too() -> None:
    source = stored(range(17))
    keys = [source.ledger.allocators[0].chain_key(source.ledger.block(n)) for n in range(4)]
    cache = driver(8, 2, 4)
    cache.ledger.adopt_store([WarmRow(0, slot, key) for slot, key in enumerate(keys) if slot != 2], [])
    assert truncate(cache.ledger, Request(-1, range(17)), 4) == 2
    assert list(cache.ledger.allocators[0].warm) == [keys[0]]
    assert cache.ledger.allocators[0].queues.num_free(NVME) == 4


@pytest.mark.parametrize("keep", [0, 4])
def test_truncating_forgets_a_block_that_is_both_stored_again_and_on_nvme_since_the_start(keep: int) -> None:
    keys = [stored(range(9)).ledger.allocators[0].chain_key(stored(range(9)).ledger.block(n)) for n in range(2)]
    cache = driver(8, 2, 4)
    cache.ledger.adopt_store([WarmRow(0, slot, key) for slot, key in enumerate(keys)], [])
    cache.ledger.add_sequences([Request(0, range(9), skip_read=True)])
    cache.ledger.mark_computed(0, 9)
    cache.ledger.remove_sequence(0, True)
    truncate(cache.ledger, Request(-1, range(9)), keep)
    assert capacity.match(cache.ledger, Request(-1, range(9))).reusable_blocks == keep // 4

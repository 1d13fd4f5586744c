"""Host slots are handed out so that what moves together lies together: then a batch of copies is one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from toy_engine import MakeCache, tokens_of

from kvtier import KVCacheManager, Request
from kvtier.pools.pool_index import PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.moves import Discard, Move

BLOCKS = 4


def run(cache: KVCacheManager, number: int, tokens: list[int]) -> None:
    """One request from admission to the tree."""
    cache.add_sequence(Request(number, tokens))
    cache.wait_ready(number, timeout=30.0)
    cache.mark_computed(number, len(tokens))
    cache.remove_sequence(number)


@pytest.fixture
def cache(make_cache: MakeCache) -> KVCacheManager:
    return make_cache(primary=16, secondary=32, write_ahead_share=0.0)


@pytest.fixture
def batches(cache: KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> list[list[Move]]:
    """The Moves of each call of ``issue``."""
    issued: list[list[Move]] = []
    issue = cache.transfers.issue

    def spy(records: Sequence[Move | Discard]) -> None:
        issued.append([record for record in records if isinstance(record, Move)])
        issue(records)

    monkeypatch.setattr(cache.transfers, "issue", spy)
    return issued


def stretches(slots: list[int]) -> int:
    """How many stretches of neighbours these slots form."""
    slots = sorted(slots)
    return 1 + sum(later != earlier + 1 for earlier, later in itertools.pairwise(slots))


def test_blocks_that_are_evicted_together_get_neighbouring_host_slots(cache: KVCacheManager, batches: list[list[Move]]) -> None:
    size = BLOCKS * cache.layout.tokens_per_block + 1
    for number in range(24):  # the secondary level is full after half of them, and evicts in turn
        run(cache, number, tokens_of(number, size))
    offloads = [[slot_of(move.destination) for move in batch
                 if level_of(move.source) == PRIMARY and level_of(move.destination) == SECONDARY] for batch in batches]
    offloads = [slots for slots in offloads if len(slots) >= BLOCKS]
    assert len(offloads) > 10
    assert sum(map(stretches, offloads)) <= len(offloads) + 2  # one that meets the end of the pool begins anew at its front


def test_a_prefix_that_was_evicted_together_comes_back_from_neighbouring_host_slots(
        cache: KVCacheManager, batches: list[list[Move]]) -> None:
    size = BLOCKS * cache.layout.tokens_per_block + 1
    for number in range(6):
        run(cache, number, tokens_of(number, size))
    batches.clear()
    run(cache, 100, tokens_of(0, size))
    slots = [slot_of(move.source) for batch in batches for move in batch
             if level_of(move.source) == SECONDARY and level_of(move.destination) == PRIMARY]
    assert len(slots) == BLOCKS
    assert stretches(slots) == 1

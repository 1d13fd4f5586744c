"""Known answers at the ledger's own door, bytes included, and rules of the same kinds: isolation, pins, priorities, batches."""

from __future__ import annotations

import pytest
from case_verbs import batch, driver, finish, free, ids, keep, pos, release, seeded, store

from kvtier.errors import CapacityError, RequestError, UnknownBlock
from kvtier.policies.retention import RetentionConfig
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.request import MultimodalItem, Request

PROMPT = [100, 101, 102, 103, 104, 105, 0, 1, 2]

# -- D: isolation, statistics, pins -----------------------------------------------------------------------------------------


def test_case_D3_extra_ids_separate_blocks() -> None:
    cache = driver(16)
    extra = [1, 1, 2, 2, 3, 3, 0, 0, 0]
    assert pos(cache, 0, PROMPT, extra_ids=extra) == 0
    assert ids(cache, 0) == [0, 1, 2]
    cache.release(0, 3, 4)
    assert pos(cache, 1, PROMPT, extra_ids=extra) == 8
    assert ids(cache, 1) == [0, 1, 3]
    cache.release(1, 3, 4)
    assert pos(cache, 2, PROMPT, extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0]) == 0
    assert pos(cache, 3, PROMPT, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    release(cache, 2, 3)


def test_case_D3_multimodal_content_separates_blocks() -> None:
    cache = driver(16)
    one, two, three = (bytes([n]) * 32 for n in (1, 2, 3))
    steps = [([MultimodalItem(one, [(2, 4)])], 0, [0, 1, 2]), ([MultimodalItem(one, [(2, 4)])], 8, [0, 1, 3]),
             ([MultimodalItem(two, [(2, 4)])], 0, [3, 4, 5]),
             ([MultimodalItem(one, [(2, 2)]), MultimodalItem(three, [(4, 2)])], 4, [0, 6, 7])]
    for request_id, (items, expected, blocks) in enumerate(steps):
        assert pos(cache, request_id, PROMPT, multimodal=items) == expected
        assert ids(cache, request_id) == blocks
        cache.release(request_id, 3, 4)


def test_case_D3_adapters_separate_blocks() -> None:
    cache = driver(16)
    for request_id, (lora, expected) in enumerate([(0, 0), (0, 8), (1, 0), (None, 0), (1, 8)]):
        assert pos(cache, request_id, PROMPT, lora_id=lora) == expected
        cache.release(request_id, 3, 4)


def test_case_D3_adapter_and_extra_ids_combine() -> None:
    cache = driver(16)
    for request_id, lora in ((0, 1), (1, 2)):
        assert pos(cache, request_id, PROMPT, lora_id=lora, extra_ids=[1, 1, 2, 2, 3, 3, 0, 0, 0]) == 0
        cache.release(request_id, 3, 4)
    assert pos(cache, 2, PROMPT, lora_id=2, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert pos(cache, 3, PROMPT, lora_id=1, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert ids(cache, 2)[0] != ids(cache, 3)[0]


def test_case_D3_salts_separate_blocks() -> None:
    cache = driver(16)
    steps = [(None, 0, [0, 1, 2]), ("tenant-A", 0, [3, 4, 5]), ("tenant-A", 8, [3, 4, 6]), ("tenant-B", 0, [6, 7, 8]), (None, 8, [0, 1, 9])]
    for request_id, (salt, expected, blocks) in enumerate(steps):
        assert pos(cache, request_id, PROMPT, cache_salt=salt) == expected
        assert ids(cache, request_id) == blocks
        cache.release(request_id, 3, 4)


def test_case_D4_statistics_of_a_request() -> None:
    cache = driver(16)
    for request_id, expected in enumerate([(3, 3, 0, 3), (1, 1, 2, 1)]):
        (sequence,) = cache.add(Request(request_id, range(9)))
        assert (sequence.total_blocks, sequence.new_blocks, sequence.reused_blocks, sequence.missed_blocks) == expected
        release(cache, request_id)
    counters = cache.ledger.counters
    assert (counters.alloc_total, counters.alloc_new, counters.reused_full, counters.reused_partial, counters.missed) == (4, 4, 2, 0, 4)


def test_case_D6_pinned_blocks_are_not_free_until_released() -> None:
    cache = driver(4)
    pos(cache, 0, range(8))
    lease = cache.ledger.pin(0)
    release(cache, 0)
    assert free(cache) == 2
    with pytest.raises(CapacityError):
        cache.add(Request(1, range(20, 32)))
    cache.ledger.release_lease(lease)
    cache.check()
    assert free(cache) == 4
    assert cache.ledger.leases == {}


def test_case_D6_two_leases_of_one_block_are_two_references() -> None:
    cache = driver(4)
    pos(cache, 0, range(8))
    first, second = cache.ledger.pin(0), cache.ledger.pin(0)
    release(cache, 0)
    cache.ledger.release_lease(first)
    assert free(cache) == 2
    cache.ledger.release_lease(second)
    assert free(cache) == 4


def test_a_lease_is_released_once() -> None:
    cache = driver(4)
    pos(cache, 0, range(8))
    lease = cache.ledger.pin(0)
    cache.ledger.release_lease(lease)
    with pytest.raises(RequestError, match="released already"):
        cache.ledger.release_lease(lease)
    cache.check()


def test_case_D8_a_block_has_the_priority_of_its_range_and_unknown_ids_are_errors() -> None:
    cache = driver(4)
    pos(cache, 0, range(8), retention=keep((0, None, 80)))
    assert [cache.ledger.block(block_id).priority for block_id in ids(cache, 0)] == [80, 80]
    for unknown in (-1, 4, 9999):
        with pytest.raises(UnknownBlock, match=r"0\.\.3"):
            cache.ledger.block(unknown)


# -- E: priorities ------------------------------------------------------------------------------------------------------------


def test_case_E1_low_priorities_are_evicted_first() -> None:
    cache = driver(4)
    pos(cache, 0, range(8), retention=keep((0, 4, 90), (4, 8, 10)))
    pos(cache, 1, range(8, 16))
    release(cache, 0, 1)
    pos(cache, 2, range(16, 24), retention=keep((0, None, 20)))
    release(cache, 2)
    assert pos(cache, 3, range(8, 16)) == 4
    release(cache, 3)
    assert free(cache) == 4
    assert pos(cache, 4, range(8)) == 4
    release(cache, 4)
    assert pos(cache, 5, range(16, 24)) == 0


def test_case_E2_generated_blocks_have_the_decode_priority() -> None:
    cache = driver(8)
    pos(cache, 0, range(12), retention=keep((0, None, 90), decode=90))
    assert free(cache) == 5
    cache.append([0], [[77]])
    assert free(cache) == 4
    pos(cache, 1, range(12, 24), retention=keep((0, None, 5), decode=5))
    assert free(cache) == 1
    cache.append([1], [[77]])
    assert free(cache) == 0
    release(cache, 0, 1)
    assert free(cache) == 8
    pos(cache, 2, range(24, 36))
    release(cache, 2)
    assert pos(cache, 3, range(12)) == 11


def test_case_E7_a_leaf_is_reused_in_place() -> None:
    cache = driver(4)
    pos(cache, 0, [0, 1, 2, 3])
    store(cache, 0)
    cache.release(0, 0)
    assert pos(cache, 1, [1, 1, 2, 3]) == 0
    assert ids(cache, 1) == [1]
    twelve = [2, *range(1, 12)]
    pos(cache, 2, twelve)
    release(cache, 1, 2)
    assert pos(cache, 3, twelve) == 11
    assert free(cache) == 1
    cache.append([3], [[5]])
    assert free(cache) == 0
    with pytest.raises(CapacityError) as error:
        cache.add(Request(4, [9]))
    assert (error.value.needed, error.value.available, error.value.preempt) == (1, 0, (3,))


def test_a_match_with_another_priority_overrides_it_and_one_without_keeps_it() -> None:
    cache = driver(8)
    pos(cache, 0, range(9), retention=keep((0, None, 80)))
    release(cache, 0)
    pos(cache, 1, range(9))
    assert [cache.ledger.block(block_id).priority for block_id in ids(cache, 1)[:2]] == [80, 80]
    release(cache, 1)
    pos(cache, 2, range(9), retention=keep((4, 8, 20)))
    assert [cache.ledger.block(block_id).priority for block_id in ids(cache, 2)[:2]] == [80, 20]
    release(cache, 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_partial_match_keeps_the_priority_of_what_it_matched_unless_the_request_says_otherwise(in_place: bool) -> None:
    for asked, expected in ((None, 80), (keep((0, None, 20)), 20)):
        cache = driver(8)
        pos(cache, 0, range(5 if in_place else 9), retention=keep((0, None, 80, 5.0)))
        release(cache, 0)
        assert pos(cache, 1, [0, 1, 9], retention=asked) == 2
        assert (ids(cache, 1) == [0]) is in_place
        assert cache.ledger.block(ids(cache, 1)[0]).priority == expected
        release(cache, 1)


def test_a_duration_counts_from_the_release_and_is_published_when_it_ends() -> None:
    cache = driver(4)
    cache.refresh(10.0)
    pos(cache, 0, range(5), retention=keep((0, None, 80, 2.0)))
    cache.refresh(100.0)
    release(cache, 0)
    cache.refresh(101.0)
    assert cache.ledger.block(0).priority == 80
    cache.refresh(102.0)
    assert cache.ledger.block(0).priority == 35
    cache.events.check()


def test_a_generated_block_has_the_decode_duration() -> None:
    cache = driver(4)
    pos(cache, 0, range(4), retention=RetentionConfig(decode_priority=90, decode_duration_seconds=1.0))
    cache.release(0, 1, 2, 3, 4, 5)
    assert cache.ledger.block(1).priority == 90
    cache.refresh(1.0)
    assert cache.ledger.block(1).priority == 35


# -- F: two-phase batches -------------------------------------------------------------------------------------------------------


def test_case_F1_of_two_partial_matches_the_last_keeps_the_block() -> None:
    cache = seeded(range(7))
    assert batch(cache, [0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20]) == [5, 5]
    assert ids(cache, 1)[1] == 1
    assert ids(cache, 0)[1] != 1
    finish(cache)


def test_of_three_partial_matches_the_last_keeps_the_block() -> None:
    cache = seeded(range(7))
    assert batch(cache, [0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20], [0, 1, 2, 3, 4, 5, 30]) == [5, 5, 6]
    assert ids(cache, 2)[1] == 1
    finish(cache)


def test_a_block_that_a_later_request_takes_over_is_not_given_away_after_an_earlier_one_copied_it() -> None:
    """Priority 0 would make it the next block taken, by the very request that copied it."""
    cache = driver(6)
    pos(cache, 100, range(7), retention=keep((4, None, 0)))
    release(cache, 100)
    pos(cache, 101, range(40, 52))
    release(cache, 101)
    pos(cache, 102, [70])
    assert batch(cache, [0, 1, 2, 3, 4, 10, 11, 12, 13], [0, 1, 2, 3, 4, 20]) == [5, 5]
    assert ids(cache, 1)[1] == 1
    assert not set(ids(cache, 0)[1:]) & set(ids(cache, 1)[1:])
    finish(cache)


def test_case_F3_a_full_match_beats_a_partial_one() -> None:
    cache = seeded(range(9))
    assert batch(cache, [*range(7), 10], range(9)) == [7, 8]
    assert ids(cache, 1)[:2] == [0, 1]
    assert ids(cache, 0)[1] != 1
    finish(cache)


def test_a_full_match_beats_a_later_partial_one_too() -> None:
    cache = seeded(range(9))
    assert batch(cache, range(9), [*range(7), 10]) == [8, 7]
    assert ids(cache, 0)[:2] == [0, 1]
    assert ids(cache, 1)[1] != 1
    finish(cache)


def test_case_F6_two_copies_of_one_inner_block() -> None:
    cache = seeded(range(8), [0, 1, 2, 3, 10, 11, 12, 13])
    assert batch(cache, [0, 1, 2, 50], [0, 1, 60, 70]) == [3, 2]
    assert [len(ids(cache, request_id)) for request_id in (0, 1)] == [1, 1]
    finish(cache)
    assert free(cache) == 16


def test_a_block_that_a_running_sequence_holds_is_copied_not_taken_over() -> None:
    cache = driver(8)
    pos(cache, 100, range(5))
    store(cache, 100)
    assert batch(cache, [0, 1, 50]) == [2]
    assert not set(ids(cache, 0)) & set(ids(cache, 100))
    finish(cache)


def test_a_copied_block_is_evictable_again_once_the_last_copy_is_planned() -> None:
    cache = seeded(range(9))
    batch(cache, [0, 1, 50], [0, 1, 60])
    assert free(cache) == 14
    finish(cache)


def test_nothing_matched_by_any_request_of_a_batch_is_evicted_by_another() -> None:
    """Promoting one match must not push another one out."""
    cache = seeded(range(9), range(20, 29), primary=5, secondary_offload_min_priority=30)
    assert batch(cache, range(9), range(20, 27)) == [8, 6]
    finish(cache)


def test_two_requests_of_a_batch_share_what_both_match() -> None:
    cache = seeded(range(9))
    assert batch(cache, range(9), [*range(8), 77]) == [8, 8]
    assert ids(cache, 0)[:2] == ids(cache, 1)[:2] == [0, 1]
    assert cache.ledger.block(0).ref_count == 2
    finish(cache)


def test_without_copying_a_partial_match_needs_a_free_leaf() -> None:
    cache = seeded(range(9), copy_on_partial_reuse=False)
    assert batch(cache, [0, 1, 50], [0, 1, 2, 3, 4, 60]) == [0, 5]
    finish(cache)


def test_without_copying_the_last_partial_match_wins_and_the_others_get_nothing() -> None:
    cache = seeded(range(7), copy_on_partial_reuse=False)
    assert batch(cache, [0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20]) == [4, 5]
    finish(cache)


def test_without_partial_reuse_only_full_blocks_match() -> None:
    cache = seeded(range(9), enable_partial_reuse=False)
    assert batch(cache, [*range(7), 10]) == [4]
    finish(cache)


def test_without_block_reuse_nothing_matches_and_nothing_is_stored() -> None:
    cache = driver(8, enable_block_reuse=False)
    for request_id in range(2):
        assert pos(cache, request_id, range(9)) == 0
        cache.ledger.mark_computed(request_id, 9)
        cache.ledger.store_context(request_id)
        cache.ledger.remove_sequence(request_id, True)
        cache.check()
    assert cache.ledger.tree.num_nodes() == 0


def test_skip_read_matches_nothing_and_skip_write_stores_nothing() -> None:
    cache = seeded(range(9))
    assert pos(cache, 0, range(9), skip_read=True) == 0
    cache.ledger.remove_sequence(0, False)
    del cache.lives[0]
    nodes = cache.ledger.tree.num_nodes()
    assert pos(cache, 1, range(50, 59), skip_write=True) == 0
    cache.ledger.mark_computed(1, 9)
    cache.ledger.remove_sequence(1, True)
    assert cache.ledger.tree.num_nodes() == nodes
    assert cache.ledger.allocators[0].queues.num_free(PRIMARY) == 16

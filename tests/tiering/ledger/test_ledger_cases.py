"""Known answers at the ledger's own door, bytes included, and rules of the same kinds (policy "lru", no backings, threshold 30)."""

from __future__ import annotations

from typing import Any

import pytest
from naive_model import Driver, snapshot

from kvtier.errors import CapacityError, RequestError, UnknownBlock, UnknownRequest
from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.rules import LedgerRules

PROMPT = [100, 101, 102, 103, 104, 105, 0, 1, 2]


def driver(primary: int, secondary: int = 0, nvme: int = 0, **rules: Any) -> Driver:
    settings: dict[str, Any] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30} | rules
    return Driver(Ledger((primary, secondary, nvme), 4, LedgerRules(**settings)))


def keep(*ranges: tuple[Any, ...], decode: int = 35) -> RetentionConfig:
    return RetentionConfig([TokenRange(*r) for r in ranges], decode_priority=decode)


def pos(cache: Driver, request_id: int, tokens: Any, **keywords: Any) -> int:
    """Prepopulated tokens right after adding."""
    (sequence,) = cache.add(Request(request_id, tokens, **keywords))
    cache.check()
    return sequence.prepopulated


def ids(cache: Driver, request_id: int) -> list[int]:
    return [block.id for block in cache.ledger.sequence(request_id).blocks]


def free(cache: Driver) -> int:
    return cache.ledger.allocator.queues.free[PRIMARY]


def store(cache: Driver, request_id: int) -> None:
    assert cache.compute(request_id)
    cache.store_context(request_id)
    cache.check()


def release(cache: Driver, *request_ids: int) -> None:
    for request_id in request_ids:
        cache.release(request_id)
        cache.check()


# -- D: isolation, statistics, pins -----------------------------------------------------------------------------------------


def test_d3_extra_ids_separate_blocks() -> None:
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


def test_d3_multimodal_content_separates_blocks() -> None:
    cache = driver(16)
    one, two, three = (bytes([n]) * 32 for n in (1, 2, 3))
    steps = [([MultimodalItem(one, [(2, 4)])], 0, [0, 1, 2]), ([MultimodalItem(one, [(2, 4)])], 8, [0, 1, 3]),
             ([MultimodalItem(two, [(2, 4)])], 0, [3, 4, 5]),
             ([MultimodalItem(one, [(2, 2)]), MultimodalItem(three, [(4, 2)])], 4, [0, 6, 7])]
    for request_id, (items, expected, blocks) in enumerate(steps):
        assert pos(cache, request_id, PROMPT, multimodal=items) == expected
        assert ids(cache, request_id) == blocks
        cache.release(request_id, 3, 4)


def test_d3_adapters_separate_blocks() -> None:
    cache = driver(16)
    for request_id, (lora, expected) in enumerate([(0, 0), (0, 8), (1, 0), (None, 0), (1, 8)]):
        assert pos(cache, request_id, PROMPT, lora_id=lora) == expected
        cache.release(request_id, 3, 4)


def test_d3_adapter_and_extra_ids_combine() -> None:
    cache = driver(16)
    for request_id, lora in ((0, 1), (1, 2)):
        assert pos(cache, request_id, PROMPT, lora_id=lora, extra_ids=[1, 1, 2, 2, 3, 3, 0, 0, 0]) == 0
        cache.release(request_id, 3, 4)
    assert pos(cache, 2, PROMPT, lora_id=2, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert pos(cache, 3, PROMPT, lora_id=1, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert ids(cache, 2)[0] != ids(cache, 3)[0]


def test_d3_salts_separate_blocks() -> None:
    cache = driver(16)
    steps = [(None, 0, [0, 1, 2]), ("tenant-A", 0, [3, 4, 5]), ("tenant-A", 8, [3, 4, 6]), ("tenant-B", 0, [6, 7, 8]), (None, 8, [0, 1, 9])]
    for request_id, (salt, expected, blocks) in enumerate(steps):
        assert pos(cache, request_id, PROMPT, cache_salt=salt) == expected
        assert ids(cache, request_id) == blocks
        cache.release(request_id, 3, 4)


def test_d4_statistics_of_a_request() -> None:
    cache = driver(16)
    for request_id, expected in enumerate([(3, 3, 0, 3), (1, 1, 2, 1)]):
        (sequence,) = cache.add(Request(request_id, range(9)))
        assert (sequence.total_blocks, sequence.new_blocks, sequence.reused_blocks, sequence.missed_blocks) == expected
        release(cache, request_id)
    counters = cache.ledger.counters
    assert (counters.alloc_total, counters.alloc_new, counters.reused_full, counters.reused_partial, counters.missed) == (4, 4, 2, 0, 4)


def test_d6_pinned_blocks_are_not_free_until_released() -> None:
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


def test_d6_two_leases_of_one_block_are_two_references() -> None:
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


def test_d8_a_block_has_the_priority_of_its_range_and_unknown_ids_are_errors() -> None:
    cache = driver(4)
    pos(cache, 0, range(8), retention=keep((0, None, 80)))
    assert [cache.ledger.block(block_id).priority for block_id in ids(cache, 0)] == [80, 80]
    for unknown in (-1, 4, 9999):
        with pytest.raises(UnknownBlock, match=r"0\.\.3"):
            cache.ledger.block(unknown)


# -- E: priorities ------------------------------------------------------------------------------------------------------------


def test_e1_low_priorities_are_evicted_first() -> None:
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


def test_e2_generated_blocks_have_the_decode_priority() -> None:
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


def test_e7_a_leaf_is_reused_in_place() -> None:
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


def seeded(*prompts: Any, primary: int = 16, **rules: Any) -> Driver:
    cache = driver(primary, **rules)
    for number, prompt in enumerate(prompts):
        pos(cache, 100 + number, prompt)
        release(cache, 100 + number)
    return cache


def batch(cache: Driver, *prompts: Any, **keywords: Any) -> list[int]:
    sequences = cache.add(*[Request(number, prompt, **keywords) for number, prompt in enumerate(prompts)])
    cache.check()
    return [sequence.prepopulated for sequence in sequences]


def finish(cache: Driver) -> None:
    """Every sequence reads right bytes, and then everything is free."""
    release(cache, *list(cache.ledger.sequences))
    cache.check_idle()
    cache.events.check()


def test_f1_of_two_partial_matches_the_last_keeps_the_block() -> None:
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


def test_f3_a_full_match_beats_a_partial_one() -> None:
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


def test_f6_two_copies_of_one_inner_block() -> None:
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
    del cache.running[0]
    nodes = cache.ledger.tree.num_nodes()
    assert pos(cache, 1, range(50, 59), skip_write=True) == 0
    cache.ledger.mark_computed(1, 9)
    cache.ledger.remove_sequence(1, True)
    assert cache.ledger.tree.num_nodes() == nodes
    assert cache.ledger.allocator.queues.free[PRIMARY] == 16


# -- write-ahead -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nvme", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("keep_backing", [True, False])
def test_write_ahead_ends_when_nothing_else_happens(num_nvme: int, keep_backing: bool) -> None:
    """Two secondary blocks must not take each other's NVMe copy in turns, for that writes for ever."""
    cache = driver(2, 3, num_nvme, write_ahead_share=1.0, keep_backing=keep_backing)
    for request_id in range(10):
        pos(cache, request_id, range(10 * request_id, 10 * request_id + 5))
        release(cache, request_id)
        cache.refresh(0.0)
        cache.tier.settle()
    cache.check_writing_ends(0.0)
    cache.check_idle()


def test_what_falls_to_the_default_priority_may_be_written_ahead_from_then_on() -> None:
    cache = driver(2, 2, 2, write_ahead_share=1.0, nvme_offload_min_priority=35)
    pos(cache, 0, range(5), retention=keep((0, None, 30, 5.0)))
    release(cache, 0)
    cache.ledger.offload(0)
    cache.tier.settle()
    cache.refresh(1.0)
    cache.tier.settle()
    assert cache.tier.rows == {}
    cache.refresh(5.0)
    cache.tier.settle()
    assert len(cache.tier.rows) == 1
    cache.check_idle()


def test_room_that_comes_free_on_nvme_is_used() -> None:
    cache = driver(4, 2, 1, write_ahead_share=1.0)
    blocks = []
    for request_id, priority in ((0, 80), (1, 50)):
        pos(cache, request_id, range(10 * request_id, 10 * request_id + 5), retention=keep((0, None, priority)))
        blocks.append(cache.ledger.sequence(request_id).blocks[0])
        release(cache, request_id)
        cache.ledger.offload(blocks[-1].id)
    cache.refresh(0.0)
    cache.tier.settle()
    first = next(block for block in blocks if block.nvme_backing is not None)
    cache.ledger.allocator.forget(first)
    cache.refresh(0.0)
    cache.tier.settle()
    assert [block.nvme_backing is not None for block in blocks if block is not first] == [True]
    cache.check_idle()


# -- all or nothing ---------------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    cache = seeded(range(9), primary=6)
    pos(cache, 50, range(60, 68))
    before = snapshot(cache.ledger)
    with pytest.raises(CapacityError) as error:
        cache.add(Request(0, range(9)), Request(1, range(80, 92)))
    assert snapshot(cache.ledger) == before
    assert (error.value.needed, error.value.available, error.value.preempt) == (4, 2, (50,))


def test_a_duplicate_id_is_refused_and_nothing_changes() -> None:
    cache = seeded(range(9))
    pos(cache, 0, range(9))
    before = snapshot(cache.ledger)
    for requests in ([Request(1, [1]), Request(0, [1])], [Request(2, [1]), Request(2, [2])]):
        with pytest.raises(RequestError, match="active already"):
            cache.add(*requests)
    assert snapshot(cache.ledger) == before


def test_a_request_larger_than_the_pool_is_told_so() -> None:
    cache = driver(4)
    pos(cache, 0, [1])
    with pytest.raises(CapacityError, match="enlarge primary") as error:
        cache.add(Request(1, range(17)))
    assert (error.value.needed, error.value.preempt) == (5, ())


def test_whoever_is_named_for_pre_emption_really_makes_room_though_they_share_blocks() -> None:
    cache = seeded(range(17), primary=8)
    for request_id in range(3):
        pos(cache, request_id, [*range(16), request_id])
    with pytest.raises(CapacityError) as error:
        cache.add(Request(9, range(50, 76)))
    assert error.value.preempt == (2, 1, 0)
    for request_id in error.value.preempt:
        cache.remove(request_id, False)
    assert pos(cache, 9, range(50, 76)) == 0


def test_a_request_is_not_told_to_pre_empt_whoever_holds_only_what_it_matches() -> None:
    cache = seeded(range(9), primary=4)
    pos(cache, 0, range(9))
    with pytest.raises(CapacityError) as error:
        cache.add(Request(1, [*range(8), *range(40, 52)]))
    assert error.value.preempt == ()


def test_a_request_that_fits_without_copying_a_partial_match_is_not_refused_because_of_the_copy() -> None:
    """The source of a copy has to stay while it is copied. In a full pool that place is missing: then do without."""
    cache = seeded(range(9), primary=3)
    assert batch(cache, [0, 1, *range(40, 50)]) == [0]
    finish(cache)


def test_appending_to_a_batch_that_does_not_fit_appends_to_nobody() -> None:
    cache = driver(3)
    pos(cache, 0, range(4))
    pos(cache, 1, range(10, 14))
    cache.compute(0)
    cache.compute(1)
    before = snapshot(cache.ledger)
    with pytest.raises(CapacityError) as error:
        cache.ledger.append_step([0, 1], [[5], [6]])
    assert snapshot(cache.ledger) == before
    assert (error.value.needed, error.value.available, error.value.preempt) == (2, 1, (1,))


@pytest.mark.parametrize(("request_ids", "tokens", "message"), [
    ([0], [[2**31]], "token 2147483648"), ([0, 0], [[1], [2]], "given twice"), ([0], [], "1 ids and 0"),
])
def test_a_bad_step_is_refused_and_changes_nothing(request_ids: list[int], tokens: list[list[int]], message: str) -> None:
    cache = driver(4)
    pos(cache, 0, range(4))
    before = snapshot(cache.ledger)
    with pytest.raises(RequestError, match=message):
        cache.ledger.append_step(request_ids, tokens)
    assert snapshot(cache.ledger) == before


def test_an_unknown_request_is_an_error_of_every_verb() -> None:
    ledger = driver(4).ledger
    for verb in (lambda: ledger.append_step([7], [[1]]), lambda: ledger.mark_computed(7, 1), lambda: ledger.rewind(7, 1),
                 lambda: ledger.store_context(7), lambda: ledger.remove_sequence(7, True), lambda: ledger.pin(7),
                 lambda: ledger.make_writable(7, 0)):
        with pytest.raises(UnknownRequest, match="request 7"):
            verb()


# -- what is stored ------------------------------------------------------------------------------------------------------------------


def test_the_last_prompt_token_is_never_matched() -> None:
    cache = seeded(range(20))
    assert [pos(cache, n, range(n)) for n in (1, 4, 5, 8, 9)] == [0, 3, 4, 7, 8]


def test_only_what_was_computed_is_stored() -> None:
    cache = driver(8)
    pos(cache, 0, range(12))
    assert cache.compute(0, 6)
    cache.store_context(0)
    assert cache.ledger.tree.num_nodes() == 1
    cache.remove(0, True)
    assert pos(cache, 1, range(12)) == 6


def test_a_sequence_that_was_never_computed_stores_nothing() -> None:
    cache = driver(8)
    pos(cache, 0, range(12))
    cache.store_context(0)
    cache.remove(0, True)
    assert cache.ledger.tree.num_nodes() == 0
    assert free(cache) == 8


def test_the_newest_token_is_never_stored() -> None:
    cache = driver(8)
    pos(cache, 0, range(8))
    store(cache, 0)
    assert cache.ledger.tree.num_nodes() == 1
    assert cache.append([0], [[8]])
    cache.store_context(0)
    assert cache.ledger.tree.num_nodes() == 2


def test_dropping_a_sequence_keeps_only_what_was_stored_before() -> None:
    cache = driver(8)
    pos(cache, 0, range(9))
    store(cache, 0)
    cache.append([0], [[9]])
    cache.remove(0, False)
    assert pos(cache, 1, range(12)) == 8


def test_of_two_equal_sequences_the_first_one_s_blocks_stay_and_the_second_one_s_are_given_away_first() -> None:
    cache = driver(8)
    cache.add(Request(0, range(9)), Request(1, range(9)))
    release(cache, 0, 1)
    assert cache.ledger.tree.num_nodes() == 2
    pos(cache, 2, [50])
    assert ids(cache, 2) == [3]


def test_the_tail_of_a_sequence_is_given_up_before_its_head() -> None:
    cache = driver(3)
    pos(cache, 0, range(12))
    release(cache, 0)
    pos(cache, 1, [50])
    assert ids(cache, 1) == [2]


def with_a_hole() -> Driver:
    """[0..11] stored in three blocks, of which the middle one has been evicted since."""
    cache = driver(4)
    pos(cache, 0, range(13), retention=keep((0, 4, 80), (4, 8, 5), (8, None, 80)))
    release(cache, 0)
    pos(cache, 1, [50, 51, 52, 53, 54, 55, 56, 57])
    cache.remove(1, False)
    return cache


def test_a_prefix_with_a_hole_matches_up_to_the_hole_and_beyond_once_it_is_refilled() -> None:
    cache = with_a_hole()
    assert pos(cache, 2, range(9)) == 4
    release(cache, 2)
    assert pos(cache, 3, range(13)) == 12
    finish(cache)


def test_a_partial_match_does_not_reach_over_a_hole() -> None:
    assert pos(with_a_hole(), 2, range(6)) == 4
    assert pos(with_a_hole(), 2, [*range(10), 99]) == 4, "the block behind the hole shares two tokens with the prompt's next one"


def test_in_place_reuse_publishes_that_the_old_block_is_gone() -> None:
    cache = seeded(range(5))
    cache.events.check()
    key = next(iter(cache.events.blocks))
    assert pos(cache, 0, [0, 1, 9]) == 2
    cache.events.check()
    assert key not in cache.events.blocks
    finish(cache)


# -- writing into blocks ---------------------------------------------------------------------------------------------------------------


def test_appending_into_a_pinned_block_copies_it_first() -> None:
    cache = driver(4)
    pos(cache, 0, range(6))
    cache.compute(0)
    lease = cache.ledger.pin(0)
    assert cache.append([0], [[6]])
    assert ids(cache, 0) == [0, 2]
    assert [block.id for block in lease.blocks] == [0, 1]
    cache.check()
    cache.release(0)
    cache.ledger.release_lease(lease)
    finish(cache)


def test_rewinding_into_a_stored_block_and_writing_there_takes_it_out_of_the_tree() -> None:
    cache = driver(4)
    pos(cache, 0, range(6))
    assert cache.append([0], [[6]])
    assert cache.append([0], [[7]])
    assert cache.append([0], [[8]])
    cache.store_context(0)
    assert cache.ledger.tree.num_nodes() == 2
    cache.rewind(0, 3)
    cache.check()
    assert cache.append([0], [[66]])
    cache.check()
    assert cache.ledger.tree.num_nodes() == 1
    release(cache, 0)
    assert pos(cache, 1, [*range(6), 66, 0]) == 6
    finish(cache)


def test_rewinding_gives_whole_blocks_back() -> None:
    cache = driver(8)
    pos(cache, 0, range(4))
    assert cache.append([0], [[1, 2, 3, 4, 5, 6]])
    assert free(cache) == 5
    cache.rewind(0, 6)
    assert free(cache) == 7
    assert cache.ledger.sequence(0).num_tokens == 4


@pytest.mark.parametrize("num_tokens", [-1, 3])
def test_the_prompt_is_never_rewound(num_tokens: int) -> None:
    cache = driver(8)
    pos(cache, 0, range(4))
    cache.append([0], [[1, 2]])
    before = snapshot(cache.ledger)
    with pytest.raises(RequestError, match="generated 2"):
        cache.ledger.rewind(0, num_tokens)
    assert snapshot(cache.ledger) == before


@pytest.mark.parametrize("num_tokens", [-1, 3, 10])
def test_computed_tokens_neither_shrink_nor_pass_the_end(num_tokens: int) -> None:
    cache = driver(8)
    pos(cache, 0, range(9))
    cache.ledger.mark_computed(0, 4)
    with pytest.raises(RequestError, match="4 are computed already"):
        cache.ledger.mark_computed(0, num_tokens)
    assert cache.ledger.sequence(0).computed == 4


def test_making_a_shared_block_writable_copies_it_and_a_stored_one_leaves_the_tree() -> None:
    cache = seeded(range(9))
    pos(cache, 0, range(9))
    pos(cache, 1, range(9))
    cache.tier.settle()
    private = cache.ledger.make_writable(1, 0)
    cache.tier.fetch()
    assert private.id not in ids(cache, 0)
    assert private.ref_count == 1
    cache.check()
    alone = cache.ledger.make_writable(0, 0)
    assert alone.id == 0
    assert alone.node is None
    finish(cache)


# -- single blocks ---------------------------------------------------------------------------------------------------------------------


def test_a_priority_is_set_on_unreferenced_content_only() -> None:
    cache = driver(4)
    pos(cache, 0, range(5))
    with pytest.raises(RequestError, match="referenced"):
        cache.ledger.set_priority(0, 80)
    release(cache, 0)
    with pytest.raises(RequestError, match="empty"):
        cache.ledger.set_priority(3, 80)
    with pytest.raises(RequestError, match="priority=101"):
        cache.ledger.set_priority(0, 101)
    cache.ledger.set_priority(0, 80)
    assert cache.ledger.block(0).priority == 80
    cache.check()
    cache.events.check()


def test_reset_forgets_everything_and_needs_a_quiet_ledger() -> None:
    cache = seeded(range(9))
    pos(cache, 0, range(9))
    lease = cache.ledger.pin(0)
    with pytest.raises(RequestError, match="1 sequences and 1 leases"):
        cache.ledger.reset()
    release(cache, 0)
    with pytest.raises(RequestError, match="0 sequences and 1 leases"):
        cache.ledger.reset()
    cache.ledger.release_lease(lease)
    cache.ledger.reset()
    cache.ever_stored.clear()
    cache.check_idle()
    assert pos(cache, 1, range(9)) == 0
    cache.events.check()

"""Rules of the ledger beyond the known answers: refusals, what is stored, what is written into, single blocks, write-ahead."""

from __future__ import annotations

import pytest
from case_verbs import batch, driver, finish, free, ids, keep, pos, release, seeded, store
from naive_model import Driver, snapshot

from kvtier.errors import CapacityError, RequestError, UnknownRequest
from kvtier.pools.pool_index import NVME, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.request import Request

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


def test_write_ahead_ends_where_one_place_on_nvme_is_left_for_two_blocks() -> None:
    cache = driver(4, 3, 3, write_ahead_share=1.0, keep_backing=True)

    def lower(request_id: int, priority: int) -> Block:
        pos(cache, request_id, range(10 * request_id, 10 * request_id + 5), retention=keep((0, None, priority)))
        block = cache.ledger.sequence(request_id).blocks[0]
        release(cache, request_id)
        cache.ledger.offload(block.id)
        return block

    kept = [lower(0, 80), lower(1, 80)]
    cache.refresh(0.0)
    cache.tier.settle()
    pushed = [lower(2, 80), lower(3, 80), lower(4, 80)]
    cache.tier.settle()
    assert [level_of(block.index) for block in kept] == [NVME, NVME]
    for block in pushed:
        cache.ledger.allocators[0].forget(block)
    both = [lower(5, 35), lower(6, 35)]
    cache.check_writing_ends(0.0)
    assert [block.nvme_backing is not None for block in both] == [True, False], "what is on NVMe is worth more"
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
    cache.ledger.allocators[0].forget(first)
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
    assert [block.id for block in lease.rows[0]] == [0, 1]
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

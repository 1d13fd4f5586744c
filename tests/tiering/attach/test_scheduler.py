"""Who runs, and how much of a prompt a step computes: each policy by itself over a scripted cache, and in use over the real one."""

from __future__ import annotations

import pytest

from kvtier.errors import CapacityError, ConfigError
from kvtier.tiering.attach.scheduler import Scheduler
from kvtier.tiering.attach.serving_sequence import ServedSequence
from kvtier.tiering.ledger.request import Request


@pytest.fixture
def cache(scripted_cache):
    return scripted_cache(20)  # blocks of 4 tokens


def sequence(number, num_tokens, computed=0, new_tokens=8, first=5):
    served = ServedSequence.of(Request(number, [first] * num_tokens, max_new_tokens=new_tokens), 0.0)
    served.computed = computed
    return served


def start(cache, *sequences):
    cache.add_sequences([served.request for served in sequences])
    return list(sequences)


def ids(sequences):
    return [served.id for served in sequences]


def test_max_utilization_admits_what_fits_for_one_step(cache):
    scheduler = Scheduler(cache)
    waiting = [sequence(number, 32, first=number + 5, new_tokens=40) for number in range(3)]  # 8 blocks each; two fit
    assert ids(scheduler.admit(waiting, [], 8)) == [0, 1]


def test_guaranteed_no_evict_admits_what_fits_to_the_end(cache):
    scheduler = Scheduler(cache, admission="guaranteed_no_evict")
    waiting = [sequence(number, 32, first=number + 5, new_tokens=16) for number in range(3)]  # 12 blocks at their ends; one fits
    assert ids(scheduler.admit(waiting, [], 8)) == [0]
    active = start(cache, waiting[0])
    assert scheduler.admit(waiting[1:], active, 8) == []  # 12 are free, 4 of them promised
    assert ids(scheduler.admit([sequence(3, 16, new_tokens=16)], active, 8)) == [3]


def test_max_utilization_leaves_room_for_the_next_step_of_those_that_run(cache):
    active = start(cache, sequence(0, 32), sequence(1, 32))  # 16 of 20 blocks, both full: each takes one more
    scheduler = Scheduler(cache)
    assert scheduler.admit([sequence(2, 12)], active, 8) == []
    assert ids(scheduler.admit([sequence(2, 8)], active, 8)) == [2]


def test_nobody_overtakes_a_request_that_has_no_room(cache):
    waiting = [sequence(0, 96), sequence(1, 4)]
    assert Scheduler(cache).admit(waiting, [], 8) == []


def test_no_more_are_admitted_than_the_batch_takes(cache):
    waiting = [sequence(number, 4, first=number + 5) for number in range(5)]
    assert ids(Scheduler(cache).admit(waiting, [], 2)) == [0, 1]
    assert Scheduler(cache).admit(waiting, [], 0) == []


def test_max_utilization_preempts_the_newest_until_those_that_grow_have_room(cache):
    active = start(cache, *(sequence(number, 24) for number in range(3)), sequence(3, 4), sequence(4, 4))  # all 20 blocks, all full
    victims = Scheduler(cache).policy.victims([], active, active)
    assert ids(victims) == [4, 3, 2]  # three that stay need three; 4 and 3 free two, and need none any more; 2 frees the rest
    assert not Scheduler(cache, admission="guaranteed_no_evict").policy.victims([], active, active)


def test_a_request_that_ends_in_this_step_makes_room_without_a_preemption(cache):
    active = start(cache, *(sequence(number, 24) for number in range(3)), sequence(3, 4), sequence(4, 4))
    assert Scheduler(cache).policy.victims([active[0]], active[1:], active) == []


def test_the_last_one_is_never_preempted(cache):
    active = start(cache, sequence(0, 80))
    assert Scheduler(cache).policy.victims([], active, active) == []


def test_a_request_waits_for_the_prefix_that_another_one_computes(cache):
    cache.has_reuse = True
    active = start(cache, sequence(0, 16))
    scheduler = Scheduler(cache)
    waiting = [sequence(1, 12), sequence(2, 12, first=9)]
    assert ids(scheduler.admit(waiting, active, 8)) == [2]
    active[0].prompt_is_stored = True
    assert ids(scheduler.admit(waiting, active, 8)) == [1, 2]
    active[0].prompt_is_stored = False
    assert ids(Scheduler(cache, wait_for_shared_prefix=False).admit(waiting, active, 8)) == [1, 2]


def test_of_two_that_arrive_together_one_waits_for_the_other(cache):
    cache.has_reuse = True
    assert ids(Scheduler(cache).admit([sequence(0, 16), sequence(1, 16)], [], 8)) == [0]


def test_nobody_waits_for_a_prefix_that_will_not_be_stored(cache):
    cache.has_reuse = True
    secret = ServedSequence.of(Request(0, [5] * 16, skip_write=True), 0.0)
    assert ids(Scheduler(cache).admit([sequence(1, 16)], start(cache, secret), 8)) == [1]


def test_first_come_first_served_gives_the_budget_to_the_first_prompts(cache):
    filling = start(cache, sequence(0, 30), sequence(1, 30), sequence(2, 10))
    plan = Scheduler(cache, chunk_size=16, token_budget=24).chunks(filling, 0)
    assert [(served.id, count) for served, count in plan] == [(0, 16), (1, 8)]


def test_equal_progress_brings_all_prompts_equally_far(cache):
    filling = start(cache, sequence(0, 30, computed=8), sequence(1, 30), sequence(2, 10))
    plan = Scheduler(cache, chunk_size=16, token_budget=24, chunking="equal_progress").chunks(filling, 0)
    assert [(served.id, count) for served, count in plan] == [(0, 4), (1, 12), (2, 8)]


def test_generated_tokens_come_out_of_the_budget_first(cache):
    filling = start(cache, sequence(0, 30))
    scheduler = Scheduler(cache, chunk_size=16, token_budget=12)
    assert [count for _, count in scheduler.chunks(filling, 7)] == [4]
    assert scheduler.chunks(filling, 12) == []


def test_without_a_budget_pieces_end_only_where_chunks_do(cache):
    filling = start(cache, sequence(0, 30, computed=21), sequence(1, 30), sequence(2, 5))
    plan = Scheduler(cache, chunk_size=16).chunks(filling, 5)
    assert [(served.id, count) for served, count in plan] == [(0, 9)]  # 7 are left of the budget, and nobody overtakes
    plan = Scheduler(cache, chunk_size=16, chunking="equal_progress").chunks(filling, 5)
    assert [(served.id, count) for served, count in plan] == [(1, 16)]  # the one that is least far


def test_the_cache_trims_a_piece_at_the_last_moment(cache):
    filling = start(cache, sequence(0, 30), sequence(1, 30))
    asked = []

    def fit(request_id, chunk_tokens, token_budget):
        asked.append((request_id, chunk_tokens, token_budget))
        return min(chunk_tokens, 3) if request_id == 0 else chunk_tokens

    cache.fit_token_budget = fit
    plan = Scheduler(cache, chunk_size=16, token_budget=24).chunks(filling, 0)
    assert asked == [(0, 16, 24), (1, 8, 21)]
    assert [(served.id, count) for served, count in plan] == [(0, 3), (1, 8)]


def test_generated_tokens_that_are_computed_again_are_not_cut_where_the_prompt_ended(cache):
    served = sequence(0, 12, computed=12)
    served.tokens += [7] * 9
    start(cache, served)
    cache.fit_token_budget = None
    assert [count for _, count in Scheduler(cache, chunk_size=16).chunks([served], 0)] == [4]


def test_a_shortage_names_blocks_pool_and_remedy(cache):
    error = Scheduler(cache, admission="guaranteed_no_evict").shortage(Request(7, [5] * 60, max_new_tokens=40))
    assert isinstance(error, CapacityError)
    assert "request 7: 25 primary blocks of group 0 are needed, the pool has 20 and 20 of them are free" in str(error)
    assert (error.needed, error.available) == (25, 20)


@pytest.mark.parametrize(("options", "message"), [
    ({"admission": "optimistic"}, "admission='optimistic': choose one of max_utilization, guaranteed_no_evict"),
    ({"chunking": "fair"}, "chunking='fair': choose one of first_come_first_served, equal_progress"),
    ({"chunk_size": 0}, "chunk_size=0"), ({"token_budget": 0}, "token_budget=0"), ({"chunk_unit": 4}, "without token_budget"),
    ({"token_budget": 2}, "chunk_unit=4 with token_budget=2")])
def test_what_cannot_be_scheduled_is_refused(cache, options, message):
    with pytest.raises(ConfigError, match=message):
        Scheduler(cache, **options)

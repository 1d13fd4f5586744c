"""What a scheduler may rely on, for every layout: who is admitted while enough is free to completion completes (spec: ledger.md, J5)."""

from __future__ import annotations

import pytest
from group_layouts import LAYOUTS, layouts, prompts
from hypothesis import given
from hypothesis import strategies as st
from naive_model import Driver

from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules


def remaining(cache: Driver, request_id: int) -> list[int]:
    sequence = cache.ledger.sequence(request_id)
    return [capacity.remaining_blocks_to_completion(cache.ledger, sequence, group) for group in range(len(cache.ledger.groups))]


def unreserved(cache: Driver) -> list[int]:
    """By group, free blocks beside what the admitted requests may still take."""
    left = cache.free_primary()
    for request_id in cache.lives:
        left = [free - reserved for free, reserved in zip(left, remaining(cache, request_id), strict=True)]
    return left


def fits(cache: Driver, request: Request) -> bool:
    return all(free >= capacity.remaining_blocks_to_completion(cache.ledger, request, group)
               for group, free in enumerate(unreserved(cache)))


def is_complete(cache: Driver, request_id: int) -> bool:
    asked = cache.ledger.sequence(request_id).request
    return cache.ledger.sequence(request_id).num_tokens >= asked.num_tokens + asked.max_new_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data(), tokens_per_block=st.sampled_from((2, 4)), reuse=st.integers(0, 4), in_parallel=st.booleans(), store=st.booleans(),
       chunk=st.sampled_from((0, 2)))
def test_who_is_admitted_while_enough_is_free_to_completion_completes(data: st.DataObject, layout: str, tokens_per_block: int, reuse: int,
                                                                      in_parallel: bool, store: bool, chunk: int) -> None:
    groups = data.draw(layouts(layout, tokens_per_block))
    has_cross = any(group.kind == CROSS for group in groups)
    cache = Driver(Ledger(groups, tokens_per_block, LedgerRules(enable_block_reuse=reuse > 0, policy="lru", chunk_size=chunk)))
    prompt: list[int] = []
    for number in range(data.draw(st.integers(1, 6))):
        keywords = data.draw(prompts(has_cross))
        if data.draw(st.booleans()):
            keywords["tokens"] = (prompt + keywords["tokens"])[:5 * tokens_per_block]
        prompt = keywords["tokens"]
        width = data.draw(st.sampled_from((1, 1, 2, 3)))
        request = Request(number, max_new_tokens=data.draw(st.integers(0, 12)), beam_width=width, **keywords)
        if not fits(cache, request):
            continue
        cache.add(request)
        assert cache.compute(number)
        if store:
            cache.store_context(number)
        if not in_parallel:
            while not is_complete(cache, number):
                step(data, cache, [number])
            cache.remove(number, True)
    while cache.lives:
        for request_id in list(cache.lives):
            if is_complete(cache, request_id):
                cache.remove(request_id, True)
        if cache.lives:
            step(data, cache, list(cache.lives))
    cache.check_idle()


def step(data: st.DataObject, cache: Driver, ids: list[int]) -> None:
    tokens = []
    for request_id in ids:
        width = cache.ledger.sequence(request_id).request.beam_width
        assert cache.compute(request_id)
        if width > 1 and data.draw(st.booleans()):
            cache.reorder(request_id, data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width)))
        tokens.append(data.draw(st.lists(st.integers(0, 1), min_size=width, max_size=width)))
    before = unreserved(cache)
    assert min(before) >= 0
    assert cache.append(ids, tokens)
    assert all(now >= then for now, then in zip(unreserved(cache), before, strict=True)), "a step takes no more than was reserved for it"
    cache.check()


@pytest.mark.parametrize("window", range(1, 7))
def test_beams_behind_a_window_never_reserve_more_than_they_were_admitted_for(window: int) -> None:
    ledger = Ledger([GroupSpec((40, 0, 0), WINDOW, window)], 2, LedgerRules(chunk_size=2))
    ledger.add_sequences([Request(0, [0] * 9)])
    compute_in_chunks(ledger, 0)
    ledger.remove_sequence(0, True)
    request = Request(1, [0] * 10, beam_width=3, max_new_tokens=1)
    free = ledger.allocators[0].queues.num_free(PRIMARY) - capacity.remaining_blocks_to_completion(ledger, request)

    def check() -> None:
        reserved = capacity.remaining_blocks_to_completion(ledger, ledger.sequence(1))
        assert ledger.allocators[0].queues.num_free(PRIMARY) - reserved >= free

    ledger.add_sequences([request])
    check()
    compute_in_chunks(ledger, 1)
    check()
    ledger.append_step([1], [[0, 0, 0]])
    check()


def compute_in_chunks(ledger: Ledger, request_id: int) -> None:
    sequence = ledger.sequence(request_id)
    while sequence.computed < sequence.num_tokens:
        ledger.resume_prefills([request_id])
        assert not ledger.is_paused(request_id)
        ledger.mark_computed(request_id, sequence.covered)


@pytest.mark.parametrize("group", [GroupSpec((40, 0, 0), FULL), GroupSpec((40, 0, 0), WINDOW, 9),
                                   GroupSpec((40, 0, 0), RECURRENT, snapshot_interval=8)])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_a_lease_keeps_of_unfilled_blocks_is_counted_to_completion(group: GroupSpec, beams: int) -> None:
    """The next token goes into a copy; the block that is copied stays with the lease."""
    ledger = Ledger([group], 4, LedgerRules())
    ledger.add_sequences([Request(0, range(5), beam_width=beams, max_new_tokens=12)])
    ledger.mark_computed(0, 5)
    ledger.append_step([0], [[7] * beams])
    lease = ledger.pin(0)
    left = capacity.remaining_blocks_to_completion(ledger, ledger.sequence(0))
    allocator = ledger.allocators[0]
    others = allocator.take_many(allocator.queues.num_free(PRIMARY) - left, 35, 0.0)
    for _ in range(11):
        ledger.append_step([0], [[7] * beams])
    ledger.release_lease(lease)
    ledger.remove_sequence(0, True)
    allocator.release_many(others)
    verify(ledger)

"""What a scheduler asks, for several groups: what if, what is needed, what is left to completion; and other sources of a prefix."""

from __future__ import annotations

import pytest
from group_run import GroupRun, cross, full, recurrent, window

from kvtier.errors import RequestError
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.scheduling import WhatIf
from kvtier.tiering.ledger.truncating import truncate


def test_a_what_if_frees_in_every_group_what_nobody_else_holds() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(9))
    one, two = run.add_all(run.request(range(9)), run.request([*range(8), 50]))
    run.append(one, *range(12))
    what_if = WhatIf(2)
    freed = what_if.remove(run.ledger, one, 1)
    assert freed == len(run.real_ids(one, 1)) - 2
    assert what_if.freed[0] == len(run.real_ids(one, 0) - run.real_ids(two, 0))
    what_if.remove(run.ledger, two)
    for group in range(2):
        assert scheduling.num_schedulable_blocks(run.ledger, what_if, group) == 24
        assert run.free(group) < 24
    run.finish()


def test_a_what_if_removes_a_sequence_once() -> None:
    run = GroupRun(full(24))
    run.serve(range(9))
    one, _two = run.add_all(run.request(range(9)), run.request([*range(8), 50]))
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, one) == 1
    assert what_if.remove(run.ledger, one) == 0
    assert what_if.freed == [1]
    run.finish()


def test_a_what_if_counts_beams_once_and_what_leases_hold_never() -> None:
    run = GroupRun(window(8, 24), full(24))
    beams = run.add(range(6), beam_width=3)
    pinned = run.add(range(50, 55))
    lease = run.ledger.pin(pinned.id)
    what_if = WhatIf(2)
    assert what_if.remove(run.ledger, beams, 1) == 4
    assert what_if.remove(run.ledger, pinned, 1) == 0
    run.ledger.release_lease(lease)
    run.finish()


@pytest.mark.parametrize("reusing", [False, True])
def test_what_a_request_was_said_to_need_in_each_group_is_what_it_takes(reusing: bool) -> None:
    run = GroupRun(window(8, 40), full(40), recurrent(8, 40), cross(40), chunk_size=64)
    keywords = {"encoder_length": 10, "encoder_digest": b"e" * 32}
    if reusing:
        run.serve(range(30), **keywords)
        holder = run.add(range(25), **keywords)
        assert holder.prepopulated == 24
    request = Request(7, range(30), max_new_tokens=20, **keywords)  # type: ignore[arg-type]
    groups = range(4)
    free = [run.free(group) for group in groups]
    needed = [capacity.needed_blocks_one_step(run.ledger, request, False, group) for group in groups]
    whole = [capacity.remaining_blocks_to_completion(run.ledger, request, group) for group in groups]
    [sequence] = run.add_all(request)
    assert [free[group] - run.free(group) for group in groups] == needed
    for token in range(20):
        assert run.compute(sequence)
        before = [run.free(group) for group in groups]
        step = [capacity.needed_blocks_one_step(run.ledger, sequence, False, group) for group in groups]
        run.append(sequence, token)
        for group in groups:
            assert before[group] - run.free(group) <= step[group]
            assert free[group] - run.free(group) <= whole[group]
            assert capacity.held_blocks(sequence, group) <= scheduling.request_block_budget(run.ledger, sequence, group)
    assert capacity.remaining_blocks_to_completion(run.ledger, sequence, 1) == 0
    run.finish()


def test_a_match_says_what_each_group_would_take_up() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(17))
    reuse = capacity.match(run.ledger, run.request(range(17)))
    assert (reuse.reusable_blocks, reuse.referenced_blocks, reuse.unreferenced_by_group) == (4, 0, (2, 4))
    run.add(range(9))
    reuse = capacity.match(run.ledger, run.request(range(17)))
    assert (reuse.referenced_blocks, reuse.unreferenced_by_group) == (2, (2, 2))
    run.finish()


def test_who_may_not_reuse_gains_nothing_by_waiting() -> None:
    run = GroupRun(full(24), cross(24))
    for keywords, worth in (({"encoder_digest": b"e" * 32}, True), ({}, False), ({"encoder_digest": b"e" * 32, "skip_read": True}, False)):
        request = run.request(range(9), encoder_length=3, **keywords)  # type: ignore[arg-type]
        computing = {capacity.match(run.ledger, run.request(range(9), encoder_length=3, encoder_digest=b"e" * 32)).first_new_key}
        assert scheduling.beneficial_to_skip(run.ledger, request, computing) is worth
    run.finish()


def test_truncating_reaches_every_group() -> None:
    run = GroupRun(window(8, 24), full(24), recurrent(8, 24))
    run.serve(range(21))
    request = run.request(range(21))
    assert truncate(run.ledger, request, 8) > 0
    run.settle()
    assert capacity.match(run.ledger, request).reusable_tokens == 8
    assert truncate(run.ledger, request, 0) > 0
    assert run.ledger.tree.num_nodes() == 0
    run.finish()


# -- a prefix from elsewhere -------------------------------------------------------------------------------------------------


class Elsewhere:
    """Somebody else has the first ``num_tokens`` tokens of every prompt."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.asked: list[tuple[int, int]] = []

    def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
        self.asked.append((request.id, num_matched_tokens))
        return max(self.num_tokens - num_matched_tokens, 0)


class Says:
    """Announces whatever it was told to."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def num_new_matched_tokens(self, _request: Request, _num_matched_tokens: int) -> int:
        return self.answer  # type: ignore[return-value]


def test_what_is_announced_lies_behind_what_matched_here() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(9))
    run.ledger.inbound = inbound = Elsewhere(16)
    sequence = run.add(range(20), id=1)
    assert (sequence.prepopulated, sequence.external_tokens) == (8, 8)
    assert inbound.asked == [(1, 8)]
    assert sequence.computed == 8, "announced is not delivered"
    run.finish()


def test_an_announcement_replaces_a_shorter_partial_match_and_frees_its_block_for_others() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(11))
    run.ledger.inbound = Elsewhere(16)
    sequence = run.add([*range(10), *range(50, 60)])
    assert (sequence.prepopulated, sequence.external_tokens) == (8, 8)
    assert run.ledger.block(2, 1).node is not None, "the tail that matched partly stays stored"
    run.ledger.inbound = None
    assert run.reuse(range(11)) == 10
    run.finish()


def test_without_an_announcement_the_partial_match_stands() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(11))
    run.ledger.inbound = Elsewhere(0)
    sequence = run.add([*range(10), 50])
    assert (sequence.prepopulated, sequence.external_tokens) == (10, 0)
    run.finish()


def test_an_earlier_request_of_a_batch_that_was_to_copy_copies_even_if_the_later_one_loads_instead() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(11))

    class Second(Elsewhere):
        def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
            return 4 if request.id == 2 else 0

    run.ledger.inbound = Second(0)
    first, second = run.add_all(Request(1, [*range(10), 50]), Request(2, [*range(9), *range(60, 66)]))
    assert (first.prepopulated, second.prepopulated, second.external_tokens) == (10, 8, 4)
    assert run.compute(first)
    run.finish()


def test_who_loads_instead_of_taking_over_does_not_cover_up_another_ones_take_over() -> None:
    """The full-attention group, whose handle stands for a place, is not the first one when there are windows."""
    run = GroupRun(window(8, 24), full(24))
    held = run.add(range(80, 85))
    run.ledger.pin(held.id)
    run.ledger.make_writable(held.id, 0, 0)  # from here on the two groups have different ids at one place
    run.serve(range(20, 25))
    run.serve(range(40, 45))

    class Second(Elsewhere):
        def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
            return 4 if request.id == 102 else 0

    run.ledger.inbound = Second(0)
    first, second, third = run.add_all(Request(101, [*range(40, 43), 50, 51]), Request(102, [*range(20, 22), *range(60, 66)]),
                                       Request(103, [*range(40, 44), 70, 71]))
    assert (first.prepopulated, second.external_tokens, third.prepopulated) == (3, 4, 4)
    for group in range(2):
        assert first.rows[group].blocks[0] is not third.rows[group].blocks[0], "a block that another one matched as a whole is not written"
    verify(run.ledger)


@pytest.mark.parametrize("answer", [-4, 3, 12, 1 << 40, 4.0, None, "4"])
def test_a_bad_announcement_is_refused_with_nothing_changed(answer: object) -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(9))
    run.ledger.inbound = Says(answer)
    error = run.refused(RequestError, lambda: run.ledger.add_sequences([Request(1, range(17)), Request(2, range(5))]))
    assert "whole blocks of 4 tokens" in str(error)
    run.ledger.inbound = Says(8)
    [sequence] = run.add_all(Request(1, range(17)))
    assert sequence.external_tokens == 8
    run.finish()


def test_who_may_not_reuse_is_not_asked_about() -> None:
    run = GroupRun(full(24))
    run.ledger.inbound = inbound = Elsewhere(8)
    run.add(range(9), skip_read=True)
    assert inbound.asked == []
    run.finish()

"""Rules of drafts that branch (4 tokens per block): proposed behind the newest token, verified in one step, one path accepted.

The tree of most tests, behind a prompt of 6 tokens::

    newest ── 0 ── 2 ── 4
          └── 1 ── 3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draft_run import DraftRun
from group_run import cross, full, recurrent, window

from kvtier.errors import CapacityError, RequestError, UnknownRequest
from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.sequence import ActiveSequence

PROMPT = [10, 11, 12, 13, 14, 15]
TOKENS = [100, 101, 102, 103, 104]
PARENTS = [-1, -1, 0, 1, 2]


def drafting(*groups: GroupSpec, prompt: list[int] = PROMPT, **rules: Any) -> tuple[DraftRun, ActiveSequence]:
    """A sequence whose drafts have been verified."""
    run = DraftRun(*groups, **rules)
    sequence = run.add(prompt)
    run.propose(sequence, TOKENS, PARENTS)
    run.verify_drafts(sequence)
    return run, sequence


# -- proposing ---------------------------------------------------------------------------------------------------------


def test_drafts_have_places_behind_the_sequence_and_are_not_part_of_it() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert run.compute(sequence, 5)
    run.propose(sequence, TOKENS, PARENTS)
    assert (sequence.num_tokens, sequence.computed) == (6, 5)
    assert len(run.ids(sequence)) == 3  # places 0 to 10
    assert run.ledger.pending_drafts(sequence.id).visible_places() == [[6], [7], [6, 8], [7, 9], [6, 8, 10]]
    assert run.ledger.pending_drafts(sequence.id).depths == [0, 0, 1, 1, 2]
    run.finish()


def test_paths_share_the_pages_of_the_prefix_and_each_others_without_copies() -> None:
    run, _sequence = drafting(full(3))  # as many blocks as a line of five drafts would take
    assert run.moves == []
    assert run.free() == 0
    run.finish()


def test_a_tail_that_is_stored_leaves_the_tree_before_drafts_are_written_into_it() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert run.compute(sequence)
    run.ledger.release_lease(run.driver.store_and_pin(sequence.id))
    tail = sequence.blocks[1]
    assert tail.node is not None
    run.propose(sequence, [1], [-1])
    assert tail.node is None
    assert sequence.blocks[1] is tail
    run.finish()


def test_a_tail_that_a_lease_holds_too_is_copied_first() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    head, tail = run.ids(sequence)
    run.propose(sequence, [1], [-1])
    assert run.ids(sequence)[0] == head
    assert run.ids(sequence)[1] != tail
    assert [(move.source, move.destination) for move in run.moves] == [(run.ledger.block(tail).index, sequence.blocks[1].index)]
    run.verify_drafts(sequence)
    run.accept(sequence, [0])
    run.ledger.release_lease(lease)
    run.finish()


def test_a_full_tail_stays_shared_because_drafts_begin_a_block() -> None:
    run = DraftRun(full(8))
    sequence = run.add(range(8))
    lease = run.ledger.pin(sequence.id)
    run.propose(sequence, [1], [-1])
    assert run.moves == []
    run.ledger.release_lease(lease)
    run.finish()


def test_without_room_nothing_is_proposed_and_the_error_names_whom_to_pre_empt() -> None:
    run = DraftRun(full(5))
    sequence = run.add(PROMPT)
    other = run.add(range(8))
    error = run.no_room(lambda: run.ledger.propose_drafts(sequence.id, list(range(7)), [-1] * 7))
    assert (error.needed, error.available, error.preempt) == (2, 1, (other.id,))
    run.propose(sequence, list(range(6)), [-1] * 6)
    run.finish()


def test_more_drafts_than_the_pool_has_places_for_are_refused_without_a_victim() -> None:
    run = DraftRun(full(4))
    sequence = run.add(PROMPT)
    error = run.no_room(lambda: run.ledger.propose_drafts(sequence.id, list(range(11)), [-1] * 11))
    assert not error.preempt
    run.finish()


def test_the_copy_of_a_shared_tail_counts_too() -> None:
    run = DraftRun(full(3))
    sequence = run.add(PROMPT)
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    assert run.no_room(lambda: run.ledger.propose_drafts(sequence.id, [1, 2, 3], [-1, 0, 1])).needed == 2
    run.propose(sequence, [1, 2], [-1, 0])
    run.ledger.release_lease(lease)
    run.finish()


def test_room_is_wanted_in_every_group_or_none_takes_any() -> None:
    run = DraftRun(window(8, 2), full(8))
    sequence = run.add(PROMPT)
    run.no_room(lambda: run.ledger.propose_drafts(sequence.id, [1, 2, 3], [-1, 0, 1]))
    run.finish()


# -- what is pending ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [
    lambda run, sequence: run.ledger.propose_drafts(sequence.id, [1], [-1]),
    lambda run, sequence: run.ledger.append_step([sequence.id], [[1]]),
    lambda run, sequence: run.ledger.rewind(sequence.id, 1),
])
def test_while_drafts_are_pending_the_sequence_is_neither_appended_to_nor_rewound(
        call: Callable[[DraftRun, ActiveSequence], object]) -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    run.append(sequence, 1)
    run.propose(sequence, TOKENS, PARENTS)
    error = run.refused(RequestError, lambda: call(run, sequence))
    assert "5 drafts are pending; call accept_drafts() or drop_drafts() first" in str(error)
    run.ledger.drop_drafts(sequence.id)
    call(run, sequence)
    verify(run.ledger)


def test_a_batch_with_a_drafting_sequence_is_appended_to_nobody() -> None:
    run, sequence = drafting(full(8))
    other = run.add(range(50, 53))
    run.refused(RequestError, lambda: run.ledger.append_step([other.id, sequence.id], [[1], [1]]))
    run.ledger.drop_drafts(sequence.id)
    run.finish()


def test_storing_the_context_ignores_drafts() -> None:
    run, sequence = drafting(full(8))
    run.ledger.mark_computed(sequence.id, 6)
    run.driver.store_context(sequence.id)
    run.check()
    assert run.reuse([*PROMPT, 1]) == 4
    run.accept(sequence, [1, 3])
    run.release(sequence)
    assert run.reuse([*PROMPT, 101, 103, 1]) == 7
    run.finish()


def test_a_sequence_ends_without_its_drafts() -> None:
    run, sequence = drafting(full(8))
    run.release(sequence)
    assert run.free() == 8
    assert run.reuse([*PROMPT, 100, 102, 104]) == 5
    run.finish()


def test_what_is_stored_and_pinned_while_drafts_are_written_leaves_out_their_block() -> None:
    run, sequence = drafting(full(8))
    run.ledger.mark_computed(sequence.id, 6)
    lease = run.driver.store_and_pin(sequence.id)
    run.check()
    assert [len(row) for row in lease.rows] == [1]
    run.accept(sequence, [1, 3])
    run.ledger.release_lease(lease)
    run.finish()


def test_dropping_gives_the_blocks_back_and_changes_nothing_else() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert run.compute(sequence, 5)
    before, free = run.ids(sequence), run.free()
    run.propose(sequence, TOKENS, PARENTS)
    run.ledger.drop_drafts(sequence.id)
    run.ledger.drop_drafts(sequence.id)  # nothing is left to drop, and that is fine
    run.settle()
    assert (run.ids(sequence), run.free(), sequence.computed, sequence.num_tokens) == (before, free, 5, 6)
    run.propose(sequence, TOKENS, PARENTS)
    run.finish()


def test_a_failed_copy_drops_the_drafts_when_the_engine_is_told() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)  # so that the tail is copied
    run.fails = lambda move: level_of(move.destination) == PRIMARY
    run.propose(sequence, TOKENS, PARENTS)
    assert sequence.must_report
    for call in (lambda: run.ledger.accept_drafts(sequence.id, [0]), lambda: run.ledger.pending_drafts(sequence.id)):
        assert "a read failed" in str(run.refused(RequestError, call))
    run.fails = never_fails
    assert run.compute(sequence)  # hears of it, and computes the tail again
    assert len(run.ids(sequence)) == 2
    assert "no drafts are pending" in str(run.refused(RequestError, lambda: run.ledger.accept_drafts(sequence.id, [0])))
    run.propose(sequence, TOKENS, PARENTS)
    run.verify_drafts(sequence)
    run.accept(sequence, [0, 2])
    run.ledger.release_lease(lease)
    run.finish()


def never_fails(_move: Move) -> bool:
    return False


# -- accepting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "moves"), [
    ([0, 2, 4], [(8, 7), (10, 8)]), ([0, 2], [(8, 7)]), ([0], []), ([1], [(7, 6)]), ([1, 3], [(7, 6), (9, 7)]),
])
def test_the_accepted_path_becomes_the_sequences_next_tokens(path: list[int], moves: list[tuple[int, int]]) -> None:
    run, sequence = drafting(full(8))
    assert run.accept(sequence, path) == moves
    assert sequence.num_tokens == sequence.computed == 6 + len(path)
    assert sequence.keys.token_ids(6, sequence.num_tokens) == [TOKENS[node] for node in path]
    assert sequence.storable_tokens() == sequence.num_tokens - 1
    run.append(sequence, 7)  # the token that the step sampled
    run.finish()


def test_blocks_behind_the_last_accepted_token_are_given_back() -> None:
    run, sequence = drafting(full(8))
    assert len(run.ids(sequence)) == 3
    run.accept(sequence, [1, 3])
    assert len(run.ids(sequence)) == 2
    assert run.free() == 6
    run.finish()


def test_an_empty_path_rejects_all_and_says_that_the_newest_token_was_computed() -> None:
    run, sequence = drafting(full(8))
    assert run.accept(sequence, []) == []
    assert (sequence.num_tokens, sequence.computed) == (6, 6)
    assert len(run.ids(sequence)) == 2
    run.append(sequence, 7)
    run.finish()


def test_a_line_of_drafts_needs_no_moves() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    run.propose(sequence, TOKENS, [-1, 0, 1, 2, 3])
    run.verify_drafts(sequence)
    assert run.accept(sequence, [0, 1, 2, 3, 4]) == []
    run.finish()


def test_accepted_tokens_are_found_again_like_any_others() -> None:
    run, sequence = drafting(full(8))
    run.accept(sequence, [0, 2, 4])
    run.append(sequence, 7)
    run.release(sequence)
    assert run.reuse([*PROMPT, 100, 102, 104, 7, 8]) == 9
    run.finish()


def test_accepted_tokens_can_be_rewound() -> None:
    run, sequence = drafting(full(8))
    run.accept(sequence, [0, 2, 4])
    run.rewind(sequence, 2)
    assert sequence.keys.token_ids(0, 7) == [*PROMPT, 100]
    run.finish()


@pytest.mark.parametrize("layout", [(window(4, 16), full(16)), (window(6, 16, sinks=2), full(16)), (full(16), cross(4))])
def test_every_group_makes_the_same_moves(layout: tuple[GroupSpec, ...]) -> None:
    run = DraftRun(*layout)
    sequence = run.add(PROMPT, **({"encoder_length": 3} if run.ledger.has_cross else {}))
    for token in range(6):
        run.propose(sequence, TOKENS, PARENTS)
        run.verify_drafts(sequence)
        run.accept(sequence, [[0, 2, 4], [1, 3], []][token % 3])
        run.append(sequence, token)
    run.finish()


def test_nothing_leaves_a_window_because_of_drafts_until_they_are_accepted() -> None:
    run = DraftRun(window(4, 8))
    sequence = run.add(PROMPT)
    run.append(sequence, 1)  # position 6 still reads position 3
    before = run.ids(sequence)
    run.propose(sequence, TOKENS, PARENTS)
    assert run.ids(sequence)[:2] == before
    run.verify_drafts(sequence)
    run.accept(sequence, [0, 2])
    assert run.ids(sequence)[0] < 0  # position 7 reads positions 4 to 7
    assert sequence.rows[0].departed_ids == [[before[0]]]
    run.finish()


def test_what_leaves_a_window_by_accepted_drafts_is_stored_before() -> None:
    run = DraftRun(window(4, 12))
    sequence = run.add(PROMPT)
    run.append(sequence, 1)
    for step in range(4):
        run.propose(sequence, [10 * step, 10 * step + 1], [-1, 0])
        run.verify_drafts(sequence)
        run.accept(sequence, [0, 1])
    whole = sequence.keys.token_ids(0, sequence.num_tokens)
    run.release(sequence)
    for end in range(4, len(whole) - 1, 4):
        assert run.reuse(whole[:end + 1]) == end, f"the block that ends with token {end} left before it was stored"
    run.finish()


# -- estimates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", range(1, 7))
@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("pinned", [False, True])
def test_drafts_never_take_more_blocks_than_one_step_was_estimated_to_need(num_drafts: int, length: int, pinned: bool) -> None:
    run = DraftRun(window(5, 16, sinks=1), full(16))
    sequence = run.add(range(length), num_draft_tokens=num_drafts)
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id) if pinned else None
    estimated = [capacity.needed_blocks_one_step(run.ledger, sequence, False, group) for group in range(2)]
    free = [run.free(group) for group in range(2)]
    run.propose(sequence, list(range(num_drafts)), [-1] * num_drafts)
    assert all(free[group] - run.free(group) <= estimated[group] for group in range(2))
    if lease is not None:
        run.ledger.release_lease(lease)
    run.finish()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "parents", "message"), [
    ([], [], "0 drafts with 0 parents"), ([1, 2], [-1], "2 drafts with 1 parents"),
    ([1, 2], [-1, 1], "parents[1]=1"), ([1, 2], [-1, 2], "parents[1]=2"), ([1], [0], "parents[0]=0"), ([1], [-2], "parents[0]=-2"),
    ([1, 2], [-1, True], "parents[1]=True"), ([1], [None], "parents[0]=None"), ([1], [0.0], "parents[0]=0.0"),
    ([2**31], [-1], "token 2147483648"), (["a"], [-1], "token 'a'"), ([True], [-1], "token True"),
])
def test_what_is_no_tree_of_tokens_is_refused(tokens: list[Any], parents: list[Any], message: str) -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    assert message in str(run.refused(RequestError, lambda: run.ledger.propose_drafts(sequence.id, tokens, parents)))
    run.finish()


@pytest.mark.parametrize(("nodes", "message"), [
    ([2], "node 2 has the parent 0; a path begins with a draft whose parent is -1"), ([0, 3], "node 3 has the parent 1"),
    ([0, 0], "node 0 has the parent -1"), ([2, 0], "node 2"), ([0, 4], "node 4 has the parent 2"), ([5], "there are drafts 0 to 4"),
    ([-1], "node -1"), ([True], "node True"), ([0, "2"], "node '2'"),
])
def test_what_is_no_path_is_refused_and_the_drafts_stay(nodes: list[Any], message: str) -> None:
    run, sequence = drafting(full(8))
    assert message in str(run.refused(RequestError, lambda: run.ledger.accept_drafts(sequence.id, nodes)))
    run.refused(RequestError, lambda: run.ledger.draft_moves(sequence.id, nodes))
    run.accept(sequence, [0, 2, 4])
    run.finish()


def test_nothing_can_be_accepted_that_was_not_proposed() -> None:
    run = DraftRun(full(8))
    sequence = run.add(PROMPT)
    for call in (lambda: run.ledger.accept_drafts(sequence.id, []), lambda: run.ledger.pending_drafts(sequence.id),
                 lambda: run.ledger.draft_moves(sequence.id, [])):
        assert "no drafts are pending" in str(run.refused(RequestError, call))
    run.finish()


def test_an_unknown_request_has_no_drafts() -> None:
    run = DraftRun(full(8))
    for call in (lambda: run.ledger.propose_drafts(5, [1], [-1]), lambda: run.ledger.accept_drafts(5, []),
                 lambda: run.ledger.drop_drafts(5), lambda: run.ledger.pending_drafts(5)):
        run.refused(UnknownRequest, call)


def test_beams_and_running_states_have_no_drafts() -> None:
    run = DraftRun(full(8))
    beams = run.add(PROMPT, beam_width=2)
    assert "2 beams" in str(run.refused(RequestError, lambda: run.ledger.propose_drafts(beams.id, [1], [-1])))
    run.finish()
    run = DraftRun(full(8), recurrent(4, 8))
    sequence = run.add(PROMPT)
    assert "running state" in str(run.refused(RequestError, lambda: run.ledger.propose_drafts(sequence.id, [1], [-1])))
    run.finish()


def test_capacity_errors_are_of_this_family() -> None:
    run = DraftRun(full(2))
    sequence = run.add(PROMPT)
    with pytest.raises(CapacityError, match="3 drafts of request"):
        run.ledger.propose_drafts(sequence.id, [1, 2, 3], [-1, -1, -1])
    run.finish()

"""Chunked prefill over windows: rows that grow chunk by chunk, scratch of a fixed number, and sequences that wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from group_run import GroupRun, full, recurrent, window
from hypothesis import given, note
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import CapacityError, ConfigError, LedgerError, RequestError
from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.group import WINDOW, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence


def positions(run: GroupRun, sequence: ActiveSequence, group: int = 0) -> int:
    return len(sequence.rows[group].blocks)


def held(run: GroupRun, sequence: ActiveSequence, group: int = 0) -> int:
    return len(run.real_ids(sequence, group))


# -- rows that grow ----------------------------------------------------------------------------------------------------------


def test_a_window_group_takes_blocks_for_the_first_chunk_only() -> None:
    run = GroupRun(window(8, 40), full(40), chunk_size=16)
    sequence = run.add(range(100))
    assert (positions(run, sequence), positions(run, sequence, 1)) == (4, 25)
    run.finish()


def test_without_a_chunk_size_it_takes_blocks_for_the_whole_prompt() -> None:
    run = GroupRun(window(8, 40), full(40))
    sequence = run.add(range(100))
    assert positions(run, sequence) == 25
    assert run.compute(sequence, 40)
    assert held(run, sequence) == 25
    run.finish()


def test_without_windows_the_chunk_size_changes_nothing() -> None:
    run = GroupRun(full(40), recurrent(8, 40), chunk_size=16)
    sequence = run.add(range(100))
    assert (positions(run, sequence), positions(run, sequence, 1)) == (25, 25)
    run.finish()


def test_what_has_left_the_window_goes_when_a_chunk_is_computed_and_the_next_chunk_gets_its_blocks() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(100))
    assert run.compute(sequence, 16)
    assert positions(run, sequence) == 8
    assert [block_id < 0 for block_id in run.ids(sequence)] == [True, True, *[False] * 6]  # token 16 reads from token 9 on
    run.finish()


@pytest.mark.parametrize(("size", "chunk", "sinks"), [(8, 16, 0), (1, 4, 0), (9, 5, 0), (20, 4, 0), (12, 16, 4), (7, 3, 2)])
def test_a_long_prompt_holds_its_window_and_one_chunk(size: int, chunk: int, sinks: int) -> None:
    run = GroupRun(window(size, 16, sinks=sinks), chunk_size=chunk)
    sequence = run.add(range(200))
    while sequence.computed < 200:
        assert held(run, sequence) <= (size + chunk) // 4 + 2 + (1 if sinks % 4 else 0)
        assert run.compute(sequence, sequence.covered)
    run.append(sequence, 1, 2, 3)
    run.finish()


def test_the_first_chunk_ends_at_a_multiple_behind_what_was_reused() -> None:
    run = GroupRun(window(8, 40), full(40), chunk_size=16)
    run.serve(range(41))
    sequence = run.add([*range(40), *range(200, 260)])
    assert (sequence.prepopulated, sequence.covered, positions(run, sequence)) == (40, 48, 12)
    run.finish()


def test_a_chunk_computed_in_pieces_lets_go_piece_by_piece_and_the_next_comes_when_it_is_whole() -> None:
    run = GroupRun(window(4, 40), chunk_size=16)
    sequence = run.add(range(100))
    assert run.ledger.scratch_used == [3]
    assert run.compute(sequence, 9)
    assert (positions(run, sequence), held(run, sequence), run.ledger.scratch_used) == (4, 3, [2])
    assert run.compute(sequence, 16)
    assert (sequence.covered, run.ledger.scratch_used) == (32, [3])
    run.finish()


def test_what_is_behind_the_blocks_cannot_be_said_to_be_computed() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(100))
    error = run.refused(RequestError, lambda: run.ledger.mark_computed(sequence.id, 17))
    assert "first 16 tokens" in str(error)
    assert "chunk_size=16" in str(error)
    run.finish()


def test_nothing_is_appended_before_the_prompt_has_all_its_blocks() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(40))
    error = run.refused(RequestError, lambda: run.ledger.append_step([sequence.id], [[1]]))
    assert "first 16 of 40 tokens" in str(error)
    assert run.compute(sequence)
    run.append(sequence, 1)
    run.finish()


def test_a_token_budget_never_reaches_behind_the_blocks() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(40))
    assert scheduling.fit_token_budget(run.ledger, sequence, 30, 30) == 16
    run.finish()


# -- what is stored ----------------------------------------------------------------------------------------------------------


def test_what_leaves_the_window_is_stored_first_and_found_again() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(80))
    assert run.compute(sequence, 64)
    assert run.reuse([*range(48), 500]) == 48
    assert run.compute(sequence)
    run.release(sequence)
    assert run.reuse([*range(79), 500]) == 79
    run.finish()


def test_a_request_that_may_not_store_lets_go_without_storing() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(80), skip_write=True)
    assert run.compute(sequence)
    assert run.ledger.tree.num_nodes() == 0
    assert run.reuse(range(80)) == 0
    run.finish()


def test_a_lease_keeps_what_the_window_has_left() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    sequence = run.add(range(80))
    lease = run.ledger.pin(sequence.id)
    assert len(lease.rows[0]) == 4
    assert run.compute(sequence)
    assert all(block.ref_count >= 1 for block in lease.rows[0])
    run.ledger.release_lease(lease)
    run.finish()


# -- scratch -----------------------------------------------------------------------------------------------------------------


def test_two_long_prompts_that_share_scratch_for_one_chunk_take_turns() -> None:
    run = GroupRun(window(8, 40), chunk_size=16, window_scratch_blocks=2)
    first, second = run.add_all(run.request(range(64)), run.request(range(100, 164)))
    assert not run.ledger.is_paused(first.id)
    assert run.ledger.is_paused(second.id)
    assert positions(run, second) == 0
    run.ledger.resume_prefills([second.id])
    assert run.ledger.is_paused(second.id)
    assert run.compute(first, 16)
    assert run.ledger.is_paused(first.id), "who waits already is served before who has just been"
    run.ledger.resume_prefills([first.id, second.id])
    assert [run.ledger.is_paused(sequence.id) for sequence in (first, second)] == [True, False]
    assert run.compute(second, 16)
    run.ledger.resume_prefills([second.id, first.id])
    assert [run.ledger.is_paused(sequence.id) for sequence in (first, second)] == [False, True]
    run.finish()


def test_who_waits_longest_is_not_overtaken_by_a_smaller_chunk() -> None:
    run = GroupRun(window(4, 60), chunk_size=16, window_scratch_blocks=4)
    running = run.add(range(64))
    big = run.add(range(100, 164))
    small = run.add(range(200, 208))  # one block of scratch, for which there is room
    assert run.ledger.scratch_used == [3]
    assert run.ledger.is_paused(small.id)
    run.ledger.resume_prefills([small.id, big.id, running.id])
    assert run.ledger.is_paused(small.id)
    run.ledger.resume_prefills([small.id, running.id])  # nobody asks for the big one to go on
    assert not run.ledger.is_paused(small.id)
    run.finish()


def test_a_chunk_within_its_window_needs_no_scratch() -> None:
    run = GroupRun(window(32, 60), chunk_size=16, window_scratch_blocks=0)
    sequences = run.add_all(*[run.request(range(100 * number, 100 * number + 60)) for number in range(3)])
    assert not run.ledger.paused
    for sequence in sequences:
        assert run.compute(sequence)
    run.finish()


def test_scratch_comes_back_when_a_waiting_or_a_computing_sequence_is_dropped() -> None:
    run = GroupRun(window(8, 40), chunk_size=16, window_scratch_blocks=2)
    first, second, third = run.add_all(*[run.request(range(100 * number, 100 * number + 64)) for number in range(3)])
    run.drop(second)
    run.drop(first)
    assert run.ledger.scratch_used == [0]
    run.ledger.resume_prefills([third.id])
    assert not run.ledger.is_paused(third.id)
    run.finish()


def test_without_a_number_there_is_scratch_for_two_chunks() -> None:
    run = GroupRun(window(8, 60), chunk_size=16)
    sequences = run.add_all(*[run.request(range(100 * number, 100 * number + 64)) for number in range(3)])
    assert run.ledger.scratch_budgets == [4]
    assert [run.ledger.is_paused(sequence.id) for sequence in sequences] == [False, False, True]
    run.finish()


def test_a_budget_without_room_for_one_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"window_scratch_blocks=1 with chunk_size=16.*needs 2 scratch blocks"):
        GroupRun(window(8, 40), chunk_size=16, window_scratch_blocks=1)


# -- free blocks -------------------------------------------------------------------------------------------------------------


def test_without_free_blocks_a_sequence_waits_until_another_ends() -> None:
    run = GroupRun(window(16, 12), chunk_size=16, window_scratch_blocks=1)
    first = run.add(range(100))
    second = run.add(range(100, 200))
    assert run.compute(first, 16)
    assert run.compute(second, 16)
    assert [run.ledger.is_paused(sequence.id) for sequence in (first, second)] == [False, True]
    run.ledger.resume_prefills([second.id])
    assert run.ledger.is_paused(second.id)
    run.drop(first)
    assert run.compute(second)
    run.finish()


def test_a_prompt_whose_window_and_chunk_do_not_fit_the_pool_is_refused_at_once() -> None:
    run = GroupRun(window(16, 7), chunk_size=16)
    error = run.no_room(lambda: run.ledger.add_sequences([run.request(range(100))]))
    assert (error.needed, error.available, list(error.preempt)) == (8, 7, [])
    assert "chunks of 16" in str(error)
    run.finish()


def test_a_part_of_a_block_that_makes_the_first_chunk_too_long_for_the_pool_is_not_reused() -> None:
    run = GroupRun(window(2, 2), chunk_size=3, enable_partial_reuse=True)
    run.serve(range(8))
    prompt = [0, 1, 2, 3, 4, 5, 100, 101, 102, 103]
    assert run.serve(prompt) == 4, "behind 6 tokens the chunk would end at 9, in a third block"
    run.finish()


def test_ending_the_requests_that_are_named_makes_room_where_parts_of_their_blocks_would_be_taken_over() -> None:
    run = GroupRun(window(8, 3), chunk_size=3, enable_partial_reuse=True, copy_on_partial_reuse=True)
    holder = run.add(range(9))
    run.store(holder)
    batch = [run.request([0, 1, 2, 3, 4, 5, *range(100 * number, 100 * number + 4)]) for number in (1, 2)]
    error = run.no_room(lambda: run.ledger.add_sequences(batch))
    assert list(error.preempt) == [holder.id]
    run.drop(holder)
    assert [sequence.prepopulated for sequence in run.add_all(*batch)] == [4, 4]
    run.finish()


@pytest.mark.parametrize(("size", "chunk", "blocks"), [(16, 16, 8), (8, 16, 6), (4, 5, 3), (1, 3, 2), (30, 4, 9)])
def test_a_lone_prompt_gets_through_a_pool_that_holds_just_its_window_and_a_chunk(size: int, chunk: int, blocks: int) -> None:
    run = GroupRun(window(size, blocks), chunk_size=chunk)
    sequence = run.add(range(97))
    assert run.compute(sequence)
    run.release(sequence)
    smaller = GroupRun(window(size, blocks - 1), chunk_size=chunk)
    smaller.no_room(lambda: smaller.ledger.add_sequences([smaller.request(range(97))]))


def test_case_J2_remaining_blocks_are_bounded_by_window_and_chunk() -> None:
    group = GroupSpec((40, 0, 0), WINDOW, window=128)
    request = Request(1, range(1024), max_new_tokens=128)
    assert capacity.remaining_blocks_to_completion(Ledger([group], 64, LedgerRules(chunk_size=16384)), request) == 18
    assert capacity.remaining_blocks_to_completion(Ledger([group], 64, LedgerRules(chunk_size=128)), request) == 5
    assert capacity.needed_blocks_one_step(Ledger([group], 64, LedgerRules(chunk_size=128)), request, False) == 2


@pytest.mark.parametrize(("size", "chunk", "prompt", "output"), [(16, 16, 100, 30), (5, 7, 60, 9), (1, 4, 50, 50), (12, 3, 30, 100)])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_was_admitted_by_remaining_blocks_completes_beside_others(size: int, chunk: int, prompt: int, output: int, beams: int) -> None:
    run = GroupRun(window(size, 60), chunk_size=chunk)
    active: list[ActiveSequence] = []
    for number in range(12):
        request = run.request(range(20 * number, 20 * number + prompt), max_new_tokens=output, beam_width=beams)
        promised = sum(capacity.remaining_blocks_to_completion(run.ledger, sequence) for sequence in active)
        if promised + capacity.remaining_blocks_to_completion(run.ledger, request) > run.free():
            break
        active += run.add_all(request)
    assert active
    waiting = list(active)
    while waiting:
        run.ledger.resume_prefills([sequence.id for sequence in waiting])
        run.settle()
        computing = [sequence for sequence in waiting if not run.ledger.is_paused(sequence.id)]
        assert computing, "somebody can always go on"
        for sequence in computing:
            assert run.compute(sequence, sequence.covered)
        waiting = [sequence for sequence in waiting if sequence.computed < prompt]
    for step in range(output):
        run.append_all(active, [[step + beam for beam in range(beams)] for _ in active])
    run.release(*active)
    run.finish()


# -- losses ------------------------------------------------------------------------------------------------------------------


def test_after_a_failed_read_a_sequence_starts_over_chunk_by_chunk_and_leaks_nothing() -> None:
    run = GroupRun(window(8, 12, 12), full(40, 40), chunk_size=16)
    run.serve(range(65))
    run.serve(range(300, 345))  # what the window group has of the first prompt goes down
    run.fails = lambda move: move.group == 0 and level_of(move.source) != PRIMARY
    sequence = run.add([*range(64), *range(500, 540)])
    assert sequence.prepopulated == 64
    assert sequence.must_report
    assert sequence.computed == 0
    run.ledger.deliver(sequence)
    run.check()
    assert positions(run, sequence) == 0
    assert run.ledger.is_paused(sequence.id)
    assert run.ledger.scratch_used == [0, 0]
    assert run.compute(sequence)
    run.append(sequence, 1, 2, 3)
    run.release(sequence)
    run.finish()


def test_a_sequence_that_could_never_be_computed_again_has_to_be_preempted() -> None:
    run = GroupRun(window(8, 5), chunk_size=32)
    sequence = run.add(range(5))
    run.append(sequence, *range(25))
    lease = run.ledger.pin(sequence.id)
    run.fails = lambda move: True
    run.append(sequence, 7)  # into a copy of the pinned block, which never arrives
    assert sequence.must_report
    assert sequence.must_preempt, "31 tokens in one chunk take 8 blocks of 5"
    run.drop(sequence)
    run.ledger.release_lease(lease)
    run.finish()


def test_after_a_failed_copy_what_was_generated_is_computed_again_chunk_by_chunk() -> None:
    run = GroupRun(window(8, 12), chunk_size=16)
    sequence = run.add(range(5), beam_width=2)
    for token in range(40):
        run.append(sequence, [token, 100 + token])
    lease = run.ledger.pin(sequence.id)
    run.fails = lambda move: True
    run.append(sequence, [7, 8])
    run.fails = lambda move: False
    run.ledger.release_lease(lease)
    assert sequence.must_report
    assert not sequence.must_preempt
    assert run.compute(sequence)
    run.append(sequence, [9, 10], [11, 12])
    run.release(sequence)
    run.finish()


def test_verify_notices_scratch_that_is_counted_twice() -> None:
    run = GroupRun(window(8, 40), chunk_size=16)
    run.add(range(64))
    run.ledger.scratch_used[0] += 1
    with pytest.raises(LedgerError, match="scratch"):
        verify(run.ledger)


# -- at random ---------------------------------------------------------------------------------------------------------------


@examples(60)
@given(data=st.data(), size=st.integers(1, 12), chunk=st.integers(1, 18), sinks=st.sampled_from((0, 0, 4)), extra=st.integers(0, 3),
       primary=st.integers(8, 20), has_full=st.booleans())
def test_sequences_of_any_kind_read_what_they_wrote_and_leave_nothing(data: st.DataObject, size: int, chunk: int, sinks: int, extra: int,
                                                                      primary: int, has_full: bool) -> None:
    groups = [window(size + sinks, primary, 6, sinks=sinks)] + ([full(60, 20)] if has_full else [])
    rules: dict[str, Any] = {"chunk_size": chunk, "window_scratch_blocks": max(chunk + 1 - size, 0) // 4 + extra}
    run = GroupRun(*groups, **rules)
    active: list[ActiveSequence] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(("add", "compute", "compute", "compute", "piece", "append", "drop", "release", "store")))
        if action == "add" or not active:
            start = data.draw(st.sampled_from((0, 0, 1, 2)))
            length = data.draw(st.integers(1, 60))
            failing = data.draw(st.integers(0, 9)) == 0
            run.fails = (lambda move: level_of(move.source) not in (PRIMARY, NVME)) if failing else (lambda _move: False)
            try:
                active.append(run.add(range(start, start + length), beam_width=data.draw(st.sampled_from((1, 1, 2))),
                                      max_new_tokens=8, skip_write=data.draw(st.integers(0, 5)) == 0))
            except CapacityError as error:
                note(str(error))
            continue
        sequence = data.draw(st.sampled_from(active))
        if action == "compute":
            run.compute(sequence)
        elif action == "piece":
            end = data.draw(st.integers(min(sequence.computed, sequence.covered), sequence.covered))
            if not sequence.must_preempt:
                run.compute(sequence, end)
        elif action == "append" and sequence.covered == sequence.num_tokens and not sequence.must_preempt:
            try:
                run.append(sequence, [data.draw(st.integers(0, 1)) for _ in range(sequence.request.beam_width)])
            except CapacityError:
                pass
        elif action == "store":
            run.driver.store_context(sequence.id)
            run.check()
        elif action in ("drop", "release"):
            run.driver.remove(sequence.id, action == "release")
            run.settle()
            active.remove(sequence)
        run.ledger.resume_prefills([one.id for one in active])
        run.settle()
        if len(active) == 1 and not active[0].must_preempt and not active[0].must_report:
            assert not run.ledger.paused, "alone, a sequence never waits"
    run.finish()
    assert run.ledger.scratch_used == [0] * len(groups)
    assert not run.ledger.paused

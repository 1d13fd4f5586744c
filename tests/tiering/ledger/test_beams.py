"""Rules of beams: what they share, when they part, what is copied then (4 tokens per block unless stated)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, window

from kvtier.errors import CapacityError, RequestError
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.sequence import ActiveSequence


def beam_ids(run: GroupRun, sequence: ActiveSequence, group: int = 0) -> list[list[int]]:
    return [run.ids(sequence, group, beam) for beam in range(sequence.request.beam_width)]


# -- D1 ------------------------------------------------------------------------------------------------------------------


def test_case_D1_an_unaligned_prompt_has_a_private_tail_for_each_beam() -> None:
    run = GroupRun(full(24), tokens_per_block=64, enable_block_reuse=False)
    sequence = run.add(range(191), beam_width=8, id=0)
    assert run.free() == 14
    rows = beam_ids(run, sequence)
    assert [len(row) for row in rows] == [3] * 8
    assert len({block_id for row in rows for block_id in row}) == 10
    assert len({tuple(row[:2]) for row in rows}) == 1
    run.drop(sequence)
    assert run.free() == 24
    assert all(block.node is None and block.ref_count == 0 for block in run.ledger.allocators[0].blocks)


def test_case_D1_an_aligned_prompt_is_shared_as_a_whole() -> None:
    run = GroupRun(full(24), tokens_per_block=64, enable_block_reuse=False)
    sequence = run.add(range(192), beam_width=8, id=0)
    assert run.free() == 21
    assert len({tuple(row) for row in beam_ids(run, sequence)}) == 1
    run.finish()


def test_case_D1_what_does_not_fit_and_an_id_in_use_are_refused() -> None:
    run = GroupRun(full(24), tokens_per_block=64, enable_block_reuse=False)
    for number in range(2):
        run.add(range(191), beam_width=8, id=number)
    run.refused(RequestError, lambda: run.ledger.add_sequences([run.request(range(191), beam_width=8, id=0)]))
    error = run.no_room(lambda: run.ledger.add_sequences([run.request(range(191), beam_width=8, id=2)]))
    assert (error.needed, error.available, error.preempt) == (10, 4, (1,))
    run.finish()


# -- sharing and parting ---------------------------------------------------------------------------------------------------


def test_the_prompts_tail_is_copied_to_the_other_beams_at_the_first_append() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(10), beam_width=3)
    assert run.compute(sequence)
    assert run.moves == []
    first = run.ledger.block(run.ids(sequence)[2])
    run.append(sequence, (1, 2, 3))
    assert [(move.source, move.num_tokens) for move in run.moves] == [(first.index, 2)] * 2
    run.append(sequence, (1, 2, 3), (1, 2, 3), (1, 2, 3))
    assert len(run.moves) == 2
    run.finish()


def test_beams_of_an_aligned_prompt_part_with_their_first_token_without_a_copy() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=3)
    run.append(sequence, (1, 2, 3))
    assert run.moves == []
    assert run.free() == 24 - 2 - 3
    run.finish()


@pytest.mark.parametrize("group", [full(40), window(8, 40), window(12, 40, sinks=5)])
def test_a_beam_that_continues_another_reads_that_ones_tokens(group: object) -> None:
    run = GroupRun(group)  # type: ignore[arg-type]
    sequence = run.add(range(10), beam_width=3)
    for step, parents in enumerate([(1, 1, 0), (2, 0, 1), (0, 0, 0), (2, 2, 2), (0, 1, 2), (1, 2, 2)]):
        run.append(sequence, (step, step + 10, step + 20), (step, step + 1, step + 2))
        run.reorder(sequence, parents)
    run.append(sequence, (1, 2, 3))
    run.finish()


def test_reordering_shares_blocks_and_the_first_to_write_copies() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=3)
    run.append(sequence, (1, 2, 3), (1, 2, 3))
    taken = 24 - run.free()
    run.reorder(sequence, (0, 0, 2))
    assert 24 - run.free() == taken - 1, "beam 1's own block is given back"
    assert run.ids(sequence, 0, 0) == run.ids(sequence, 0, 1)
    assert run.moves == []
    shared = run.ids(sequence)[2]
    run.append(sequence, (4, 5, 6))
    assert len(run.moves) == 1, "the last of those who share it needs no copy"
    assert shared in (run.ids(sequence, 0, 0)[2], run.ids(sequence, 0, 1)[2])
    assert run.ids(sequence, 0, 0)[2] != run.ids(sequence, 0, 1)[2]
    run.finish()


def test_full_blocks_of_a_common_parent_stay_shared_for_ever() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=2)
    run.append(sequence, *[(1, 2)] * 4)
    run.reorder(sequence, (1, 1))
    run.append(sequence, (1, 2))
    assert run.moves == []
    assert run.ids(sequence, 0, 0)[:3] == run.ids(sequence, 0, 1)[:3]
    assert run.free() == 24 - 3 - 2
    run.finish()


def test_reordering_before_anything_is_generated_changes_nothing() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(10), beam_width=2)
    assert run.compute(sequence)
    before = beam_ids(run, sequence)
    run.reorder(sequence, (1, 1))
    assert beam_ids(run, sequence) == before
    run.append(sequence, (1, 2))
    run.finish()


def test_when_a_copy_does_not_fit_no_beam_goes_on() -> None:
    run = GroupRun(full(4))
    sequence = run.add(range(5), beam_width=2)
    lonely = run.add([7], id=1)
    assert run.free() == 0
    run.append(sequence, (1, 2))
    run.reorder(sequence, (0, 0))
    run.drop(lonely)
    other = run.add(range(50, 55), id=2)
    assert run.free() == 0
    error = run.no_room(lambda: run.ledger.append_step([sequence.id], [[3, 4]]))
    assert (error.needed, error.available) == (1, 0)
    assert error.preempt == (2,)
    run.drop(other)
    run.append(sequence, (3, 4))
    run.finish()


def test_a_step_of_a_batch_in_which_one_sequences_beams_do_not_fit_appends_to_nobody() -> None:
    run = GroupRun(full(6))
    beams = run.add(range(8), beam_width=3)
    single = run.add([1, 2])
    for sequence in (beams, single):
        assert run.compute(sequence)
    assert run.free() == 3
    run.no_room(lambda: run.ledger.append_step([single.id, beams.id], [[3, 4, 5], [1, 2, 3]]))
    assert (beams.num_tokens, single.num_tokens) == (8, 2)
    run.append_all([single, beams], [[3, 4], [1, 2, 3]])
    run.finish()


# -- reuse -----------------------------------------------------------------------------------------------------------------


def test_beams_store_the_prompts_full_blocks_and_never_what_they_generated() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(10), beam_width=2)
    run.append(sequence, *[(50, 60)] * 8)
    run.release(sequence)
    assert run.reuse([*range(10), 50, 50, 50]) == 8
    assert run.ledger.tree.num_nodes() == 2
    run.finish()


def test_beams_reuse_full_blocks_of_the_prompt_and_no_part_of_their_tails() -> None:
    run = GroupRun(full(24))
    run.serve(range(14))
    single = run.reuse([*range(11)])
    assert single == 10
    sequence = run.add(range(11), beam_width=2)
    assert sequence.prepopulated == 8
    assert run.ids(sequence, 0, 0)[:2] == run.ids(sequence, 0, 1)[:2]
    assert run.ledger.block(run.ids(sequence)[0]).ref_count == 2
    run.append(sequence, *[(1, 2)] * 5)
    run.finish()


def test_an_aligned_prompt_of_beams_may_match_part_of_its_last_block() -> None:
    run = GroupRun(full(24))
    run.serve(range(12))
    sequence = run.add(range(8), beam_width=2)
    assert sequence.prepopulated == 7
    run.append(sequence, *[(1, 2)] * 5)
    run.finish()


def test_a_single_request_reuses_what_beams_stored_while_they_go_on() -> None:
    run = GroupRun(full(24), window(8, 24))
    beams = run.add(range(9), beam_width=2)
    run.store(beams)
    single = run.add(range(9))
    assert single.prepopulated == 8
    run.append_all([beams, single], [[1, 2], [3]])
    run.append_all([beams, single], [[1, 2], [3]])
    run.finish()


# -- windows, rewinding, accounting ------------------------------------------------------------------------------------------


def test_what_leaves_the_window_leaves_it_for_all_beams() -> None:
    run = GroupRun(window(8, 40))
    sequence = run.add(range(9), beam_width=2)
    run.store(sequence)
    run.append(sequence, *[(1, 2)] * 10)
    assert all(row[:2] == [-2, -2] for row in beam_ids(run, sequence))
    run.release(sequence)
    assert run.reuse(range(9)) == 8
    run.finish()


def test_a_rewind_takes_the_same_number_of_tokens_from_every_beam() -> None:
    run = GroupRun(full(24), window(8, 24))
    sequence = run.add(range(7), beam_width=2)
    run.append(sequence, *[(1, 2)] * 4)
    run.rewind(sequence, 3)
    assert run.free() == 24 - 1 - 2
    run.append(sequence, *[(5, 6)] * 6)
    run.finish()


def test_beams_that_share_a_cut_block_go_on_sharing_it_until_one_writes() -> None:
    run = GroupRun(full(5))
    sequence = run.add(range(8), beam_width=2)
    run.append(sequence, *[(1, 2)] * 3)
    run.reorder(sequence, (0, 0))
    run.add([9, 9, 9, 9, 9], id=1)
    assert run.free() == 0
    run.rewind(sequence, 1)
    assert run.ids(sequence, 0, 0) == run.ids(sequence, 0, 1)
    run.drop(run.ledger.sequence(1))
    run.append(sequence, (5, 6))
    run.finish()


def test_what_beams_were_said_to_need_is_what_they_take() -> None:
    run = GroupRun(full(60), window(8, 60))
    for prompt in (7, 8, 9):
        request = run.request(range(prompt), beam_width=3, max_new_tokens=9)
        for group in (0, 1):
            assert capacity.needed_blocks_one_step(run.ledger, request, False, group) == (prompt + 3) // 4 + (2 if prompt % 4 else 0)
        whole = [capacity.remaining_blocks_to_completion(run.ledger, request, group) for group in (0, 1)]
        free = [run.free(0), run.free(1)]
        [sequence] = run.add_all(request)
        for token in range(9):
            run.append(sequence, (token, token + 1, token + 2))
            for group in (0, 1):
                assert free[group] - run.free(group) <= whole[group]
        assert free[0] - run.free(0) == whole[0]
        run.drop(sequence)
    run.finish()


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("appended", [[1], [1, 2], [1, 2, 3, 4]])
def test_a_sequence_of_beams_takes_one_token_for_each(appended: list[int]) -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=3)
    assert run.compute(sequence)
    error = run.refused(RequestError, lambda: run.ledger.append_step([sequence.id], [appended]))
    assert f"{len(appended)} tokens for 3 beams" in str(error)
    run.finish()


@pytest.mark.parametrize("parents", [(), (0,), (0, 1, 2, 0), (0, 1, 3), (0, 1, -1),
                                     (0, 1, 1.0), (0, 1, None)])
def test_every_beam_has_one_parent_that_exists(parents: tuple[object, ...]) -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=3)
    run.append(sequence, (1, 2, 3))
    run.refused(RequestError, lambda: run.ledger.reorder_beams(sequence.id, parents))  # type: ignore[arg-type]
    run.finish()


def test_a_prompt_of_beams_that_never_fits_says_so() -> None:
    run = GroupRun(full(4))
    with pytest.raises(CapacityError, match="enlarge primary"):
        run.ledger.add_sequences([run.request(range(7), beam_width=4)])
    run.finish()

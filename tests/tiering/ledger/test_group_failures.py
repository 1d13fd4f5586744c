"""Failed Moves where there are windows or beams: what is lost, what everybody falls back to (design: all or nothing)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, window

from kvtier.errors import RequestError
from kvtier.pools.pool_index import SECONDARY, level_of
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.sequence import ActiveSequence


def offloaded(*groups: object, num_tokens: int = 21, **rules: object) -> GroupRun:
    """A prompt stored, and all of it on the secondary level."""
    run = GroupRun(*groups, **rules)  # type: ignore[arg-type]
    run.serve(range(num_tokens))
    for number, allocator in enumerate(run.ledger.allocators):
        for block in allocator.blocks:
            if block.node is not None:
                run.ledger.offload(block.id, number)
    run.settle()
    return run


def fail(run: GroupRun, group: int, *block_ids: int) -> None:
    """The next Moves of these blocks fail, once each."""
    left = set(block_ids)

    def decide(move: Move) -> bool:
        if move.group == group and move.block_id in left:
            left.discard(move.block_id)
            return True
        return False

    run.fails = decide


def goes_on(run: GroupRun, sequence: ActiveSequence) -> None:
    """The engine is told, computes again what is missing, stores it and generates."""
    run.store(sequence)
    run.append(sequence, *range(12))
    run.release(sequence)
    assert run.reuse(range(21)) == 20
    run.finish()


@pytest.mark.parametrize(("group", "position", "valid"), [
    (1, 4, 0), (1, 0, 0), (0, 4, 0), (0, 3, 0),  # window 8 holds blocks 3 and 4 only: nothing shorter is whole
])
def test_a_lost_block_leaves_the_longest_prefix_that_every_group_still_holds(group: int, position: int, valid: int) -> None:
    run = offloaded(window(8, 16, 8), full(16, 8))
    fail(run, group, position)
    sequence = run.add(range(21))
    assert sequence.prepopulated == 20
    assert (sequence.valid, sequence.computed, sequence.must_report) == (valid, valid, True)
    goes_on(run, sequence)


def test_what_lies_before_the_lost_block_is_kept_where_the_window_still_holds_it() -> None:
    run = offloaded(window(16, 16, 8), full(16, 8))
    fail(run, 0, 3)
    sequence = run.add(range(17))
    assert (sequence.prepopulated, sequence.valid) == (16, 12)
    goes_on(run, sequence)


def test_a_block_lost_outside_the_window_of_a_later_token_is_computed_again_for_nobody() -> None:
    """Sequence two matched nothing but the first block; the loss of block 3 does not touch it."""
    run = offloaded(window(8, 16, 8))
    fail(run, 0, 3)
    one, two = run.add_all(run.request(range(21)), run.request(range(6)))
    assert (one.valid, two.valid, two.must_report) == (0, 5, False)
    goes_on(run, one)


def test_after_a_fall_back_positions_that_had_left_the_window_have_blocks_again() -> None:
    run = offloaded(window(8, 16, 8))
    fail(run, 0, 4)
    sequence = run.add(range(21))
    assert all(block_id >= 0 for block_id in run.ids(sequence))
    assert sequence.rows[0].num_departed == 0
    assert run.compute(sequence)
    run.append(sequence, 1)
    assert run.ids(sequence)[:3] == [-2] * 3
    run.finish()


def test_when_there_are_too_few_blocks_to_compute_again_the_sequence_must_be_pre_empted() -> None:
    run = offloaded(window(8, 6, 8))
    fail(run, 0, 4)
    other = run.add([7, 7, 7, 7, 7])
    sequence = run.add(range(21))
    assert sequence.must_preempt
    assert not run.compute(sequence)
    run.refused(RequestError, lambda: run.ledger.append_step([sequence.id], [[1]]))
    run.refused(RequestError, lambda: run.ledger.mark_computed(sequence.id, 20))
    run.drop(sequence, other)
    run.finish()


def test_two_sequences_that_share_a_lost_block_both_fall_back_to_blocks_of_their_own() -> None:
    run = offloaded(window(8, 24, 8), full(24, 8))
    fail(run, 1, 2)
    one, two = run.add_all(run.request(range(21)), run.request([*range(20), 50]))
    assert one.must_report
    assert two.must_report
    for group in (0, 1):
        behind = [set(run.ids(sequence, group)[one.valid // 4:]) for sequence in (one, two)]
        assert behind[0].isdisjoint(behind[1])
    for sequence in (one, two):
        assert run.compute(sequence)
    run.drop(two)
    goes_on(run, one)


def test_an_engine_that_does_not_know_of_the_loss_is_stopped() -> None:
    run = offloaded(window(8, 16, 8), full(16, 8))
    fail(run, 1, 2)
    sequence = run.add(range(21))
    run.refused(RequestError, lambda: run.ledger.mark_computed(sequence.id, 21))
    run.refused(RequestError, lambda: run.ledger.append_step([sequence.id], [[1]]))
    goes_on(run, sequence)


def test_a_failed_partial_copy_leaves_the_full_blocks_before_it() -> None:
    run = offloaded(window(8, 16, 8), full(16, 8), num_tokens=11)
    run.fails = lambda move: move.num_tokens > 0 and move.group == 0
    sequence = run.add([*range(7), 50, 51])
    run.fails = lambda _move: False
    assert sequence.prepopulated == 7
    assert sequence.valid == 4
    assert run.compute(sequence)
    run.append(sequence, *range(6))
    run.finish()


# -- beams -----------------------------------------------------------------------------------------------------------------


def test_beams_that_shared_a_lost_block_share_the_one_that_replaces_it() -> None:
    run = offloaded(full(24, 8), window(8, 24, 8))
    fail(run, 0, 3)
    sequence = run.add(range(21), beam_width=3)
    assert sequence.must_report
    assert len({tuple(run.ids(sequence, 0, beam)[:5]) for beam in range(3)}) == 1
    assert len({run.ids(sequence, 0, beam)[5] for beam in range(3)}) == 3
    run.append(sequence, *[(1, 2, 3)] * 6)
    run.finish()


def test_a_beam_whose_copy_of_the_tail_failed_takes_all_beams_back_to_the_tails_start() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(10), beam_width=3)
    assert run.compute(sequence)
    run.fails = lambda move: len(run.moves) == 2
    run.append(sequence, (1, 2, 3))
    run.fails = lambda _move: False
    assert sequence.must_report
    assert sequence.computed == 8
    assert len({run.ids(sequence, 0, beam)[2] for beam in range(3)}) == 3
    run.append(sequence, *[(4, 5, 6)] * 6)
    run.finish()


def test_a_failed_copy_on_divergence_takes_the_beams_back_to_what_they_share() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(8), beam_width=2)
    run.append(sequence, (1, 2), (1, 2))
    run.reorder(sequence, (0, 0))
    run.fails = lambda _move: True
    run.append(sequence, (3, 4))
    run.fails = lambda _move: False
    assert sequence.must_report
    assert sequence.computed == 8
    run.append(sequence, *[(4, 5)] * 6)
    run.finish()


def test_a_lost_block_leaves_nothing_behind_when_the_beams_end() -> None:
    run = offloaded(full(24, 8), window(8, 24, 8))
    fail(run, 1, 4)
    sequence = run.add(range(21), beam_width=3)
    run.drop(sequence)
    run.finish()


# -- failed Moves that concern nobody any more ------------------------------------------------------------------------------


def test_an_offload_that_fails_loses_the_content_for_its_group_alone() -> None:
    run = GroupRun(window(8, 16, 8), full(16, 8))
    run.serve(range(9))
    run.fails = lambda _move: True
    run.ledger.offload(1, 0)
    run.settle()
    run.fails = lambda _move: False
    assert all(level_of(block.index) != SECONDARY or block.node is None for block in run.ledger.allocators[0].blocks)
    assert run.ledger.block(1, 1).node is not None
    assert run.reuse(range(9)) == 4
    run.finish()

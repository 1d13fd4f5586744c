"""Rules of recurrent layers: one running state, snapshots at intervals, and resuming from them (4 tokens per block)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, recurrent, window

from kvtier.errors import CapacityError, ConfigError, RequestError
from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.sequence import ActiveSequence


def real(run: GroupRun, sequence: ActiveSequence, group: int = 0, beam: int = 0) -> list[int]:
    """Positions at which the group holds a block."""
    return [position for position, block_id in enumerate(run.ids(sequence, group, beam)) if block_id >= 0]


def tokens(count: int, start: int = 1000) -> range:
    return range(start, start + count)


# -- static allocation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "beams", "blocks"), [(100, 1, 1), (96, 1, 1), (31, 1, 1), (100, 4, 4), (96, 4, 1)])
def test_without_reuse_a_sequence_has_one_block_or_one_for_each_beam_when_unaligned(num_tokens: int, beams: int, blocks: int) -> None:
    run = GroupRun(recurrent(64, 24), tokens_per_block=32, enable_block_reuse=False)
    sequence = run.add(tokens(num_tokens), beam_width=beams)
    assert run.free() == 24 - blocks
    last = (num_tokens - 1) // 32
    placeholder = run.ledger.allocators[0].placeholder.id
    for beam in range(beams):
        ids = run.ids(sequence, 0, beam)
        assert ids[:last] == [placeholder] * last
        assert placeholder < 0 <= ids[last]
    run.drop(sequence)
    assert run.free() == 24


def test_without_reuse_the_same_block_moves_on_with_the_last_position() -> None:
    run = GroupRun(recurrent(64, 24), tokens_per_block=32, enable_block_reuse=False)
    sequence = run.add(tokens(60))
    [block] = run.real_ids(sequence)
    run.append(sequence, *range(100))
    assert run.real_ids(sequence) == {block}
    assert real(run, sequence) == [4]
    assert run.moves == []
    run.release(sequence)
    assert run.free() == 24


def test_without_reuse_several_tokens_at_once_may_cross_blocks() -> None:
    run = GroupRun(recurrent(64, 24), tokens_per_block=32, enable_block_reuse=False)
    sequence = run.add(tokens(60))
    run.append(sequence, range(100), 1)
    assert real(run, sequence) == [5]
    run.finish()


# -- snapshots -----------------------------------------------------------------------------------------------------------


def test_blocks_are_real_at_the_interval_and_at_the_last_full_block() -> None:
    run = GroupRun(recurrent(64, 24), tokens_per_block=32)
    sequence = run.add(tokens(32 * 5 + 3))
    assert real(run, sequence) == [1, 3, 4, 5], "64 and 128 tokens, the last full block, the running state"
    run.finish()


@pytest.mark.parametrize(("num_tokens", "expected"), [(30, 28), (25, 24), (24, 16), (17, 16), (16, 8), (9, 8), (8, 0)])
def test_a_match_ends_at_the_nearest_snapshot(num_tokens: int, expected: int) -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(30))  # kept: after 8, 16, 24 tokens, and after the last full block, 28
    assert run.reuse(tokens(num_tokens)) == expected
    assert capacity.match(run.ledger, run.request(tokens(num_tokens))).reusable_tokens == expected
    run.finish()


def test_the_first_tokens_of_a_block_are_no_match() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(30))
    assert run.reuse([*tokens(14), 5, 5, 5]) == 8
    run.finish()


def test_a_snapshot_is_copied_and_never_written() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(17))
    first, second = run.add_all(run.request([*tokens(16), 1, 2]), run.request([*tokens(16), 3, 4]))
    snapshot = run.ledger.block(run.ids(first)[3])
    assert run.ids(second)[3] == snapshot.id
    assert snapshot.ref_count == 2
    copies = [move for move in run.moves if move.group == 0]
    assert [(move.source, move.num_tokens) for move in copies] == [(snapshot.index, 0)] * 2
    for sequence in (first, second):
        run.append(sequence, *range(20))
    assert snapshot.node is not None
    assert run.reuse([*tokens(16), 9]) == 16
    run.finish()


def test_a_match_holds_its_last_snapshot_only() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(30))
    sequence = run.add(tokens(30))
    assert real(run, sequence) == [6, 7]
    assert real(run, sequence, 1) == list(range(8))
    run.finish()


def test_states_on_the_way_of_a_generation_are_kept_at_the_interval() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(6))
    run.append(sequence, *tokens(30, 50))
    assert real(run, sequence) == [0, 1, 3, 5, 7, 8], "the prompt's last full block, 8, 16, 24 and 32 tokens, the running state"
    run.release(sequence)
    assert run.reuse([*tokens(6), *tokens(30, 50)]) == 32
    assert run.reuse([*tokens(6), *tokens(20, 50)]) == 24
    run.finish()


def test_what_may_not_be_stored_keeps_no_states_while_it_generates() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(6), skip_write=True)
    run.append(sequence, *tokens(30, 50))
    assert len(real(run, sequence)) == 2
    run.finish()


def test_a_state_that_has_moved_on_with_several_tokens_is_not_kept_as_a_snapshot() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(7))
    run.append(sequence, 1)
    run.ledger.append_step([sequence.id], [[2, 3]])  # computed at once: nobody saw the state behind eight tokens
    assert real(run, sequence)[-2:] != [1, 2]
    assert not [move for move in run.ledger.moves.take() if isinstance(move, Move)]


def test_a_model_of_recurrent_layers_only_stores_and_finds_its_snapshots() -> None:
    run = GroupRun(recurrent(8, 24))
    assert run.serve(tokens(6), *tokens(15, 50)) == 0
    assert run.reuse([*tokens(6), *tokens(15, 50)]) == 16
    run.finish()
    run.ledger.reset()
    assert run.ledger.tree.num_nodes() == 0


def test_an_evicted_snapshot_shortens_the_match_to_the_one_before() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(25))
    run.evict(0, 1020)
    assert run.reuse(tokens(25)) == 16
    run.evict(1, 1008)
    assert run.reuse(tokens(25)) == 8
    run.finish()


def test_a_pinned_running_state_is_copied_before_it_goes_on() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(6))
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    pinned = lease.rows[0][-1]
    run.append(sequence, 1, 2)
    assert pinned.id not in run.real_ids(sequence)
    assert pinned.ref_count == 1
    run.ledger.release_lease(lease)
    run.finish()


def test_beams_share_a_state_and_each_goes_on_from_a_copy() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(8), beam_width=3)
    assert len(run.real_ids(sequence)) == 1
    run.append(sequence, (1, 2, 3))
    assert len({run.ids(sequence, 0, beam)[-1] for beam in range(3)}) == 3
    run.append(sequence, (1, 2, 3))
    run.reorder(sequence, (2, 2, 0))
    run.append(sequence, *[(4, 5, 6)] * 9)
    run.finish()


def test_beams_start_from_a_snapshot() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(11))
    sequence = run.add(tokens(11), beam_width=2)
    assert sequence.prepopulated == 8
    run.append(sequence, *[(1, 2)] * 6)
    run.finish()


@pytest.mark.parametrize(("held", "reused", "left"), [(4, 4, 0), (5, 0, 0)])
def test_a_match_is_given_up_only_when_less_than_the_estimate_is_free(held: int, reused: int, left: int) -> None:
    """The state to start from is no state that the longer prompt keeps: it takes a block beside those, for the copy only."""
    run = GroupRun(recurrent(8, 7))
    run.serve(tokens(5))
    for number in range(held):
        run.add(tokens(3, 100 * number))
    request = run.request([*tokens(4), *tokens(6, 50)])
    assert capacity.match(run.ledger, request).reusable_tokens == 4
    assert capacity.needed_blocks_one_step(run.ledger, request, False) == 3
    assert run.free() == 7 - held
    [sequence] = run.add_all(request)
    assert (sequence.prepopulated, run.free()) == (reused, left)


def test_what_shares_a_prefix_and_lacks_a_state_asks_for_the_end_of_one_request_not_of_all() -> None:
    """Without the match it would need blocks for the whole prompt too, which the others would have to make room for."""
    run = GroupRun(recurrent(40, 9), full(40))
    run.serve([*tokens(80), 1])
    others = [run.add([*tokens(80), 2, number]) for number in range(8)]
    assert (run.free(0), run.free(1)) == (0, 12)
    request = run.request([*tokens(80), 3, 3])
    assert [capacity.needed_blocks_one_step(run.ledger, request, False, group) for group in range(2)] == [1, 1]
    error = run.no_room(lambda: run.ledger.add_sequences([request]))
    assert "1 primary blocks of group 0 needed, 0 available" in str(error)
    assert error.preempt == (others[-1].id,)
    run.drop(others.pop())
    assert run.add_all(request)[0].prepopulated == 80
    run.finish()


# -- what is not possible --------------------------------------------------------------------------------------------------


def test_a_running_state_cannot_be_taken_back() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(6))
    run.append(sequence, 1, 2)
    error = run.refused(RequestError, lambda: run.ledger.rewind(sequence.id, 1))
    assert "resumes from the last snapshot" in str(error)
    run.rewind(sequence, 0)
    run.finish()


@pytest.mark.parametrize("interval", [6, 1, 0, -8])
def test_a_snapshot_interval_is_a_multiple_of_the_block_size(interval: int) -> None:
    with pytest.raises(ConfigError, match="snapshot_interval"):
        GroupRun(recurrent(interval, 4))


def test_a_step_that_has_no_block_for_the_snapshot_it_leaves_behind_is_refused() -> None:
    run = GroupRun(recurrent(8, 2), full(24))
    sequence = run.add(tokens(6))
    assert run.free() == 0
    run.append(sequence, 1, 2)
    error = run.no_room(lambda: run.ledger.append_step([sequence.id], [[3]]))
    assert isinstance(error, CapacityError)
    assert "group 0" in str(error)
    run.finish()


# -- failed Moves ------------------------------------------------------------------------------------------------------------


def test_when_the_copy_of_a_snapshot_fails_the_sequence_starts_again() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    run.serve(tokens(30))
    run.fails = lambda move: move.group == 0 and level_of(move.source) == PRIMARY
    sequence = run.add(tokens(30))
    assert (sequence.prepopulated, sequence.valid) == (28, 0)
    assert sequence.must_report
    run.fails = lambda _move: False
    run.append(sequence, *range(12))
    run.release(sequence)
    assert run.reuse(tokens(30)) == 28
    run.finish()


def test_when_a_copy_fails_in_the_middle_of_a_generation_the_state_before_is_copied_again() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(tokens(8))
    run.append(sequence, *range(8))
    run.fails = lambda move: len(run.moves) == 2
    run.append(sequence, 8)  # the state behind 16 tokens is kept, its copy fails
    assert sequence.must_report
    assert sequence.computed == 8
    run.append(sequence, *range(12))
    run.finish()


def test_when_another_group_loses_a_block_the_state_goes_back_to_a_snapshot_too() -> None:
    run = GroupRun(recurrent(8, 24), full(24, 8))
    run.serve(tokens(30))
    block = run.ledger.allocators[1].blocks[4]
    run.ledger.offload(block.id, 1)
    run.settle()
    run.fails = lambda move: move.group == 1
    sequence = run.add(tokens(30))
    run.fails = lambda _move: False
    assert sequence.valid == 0, "the only snapshot that it holds is behind the loss"
    assert run.compute(sequence)
    run.append(sequence, *range(12))
    run.finish()


def test_a_snapshot_that_fails_to_come_up_takes_the_running_state_with_it() -> None:
    run = GroupRun(recurrent(8, 24, 8), full(24), window(8, 24))
    run.serve(tokens(30))
    snapshot = next(block for block in run.ledger.allocators[0].blocks if block.node is not None and block.position == 6)
    run.ledger.offload(snapshot.id, 0)
    run.settle()
    run.fails = lambda move: move.group == 0
    sequence = run.add(tokens(30))
    run.fails = lambda _move: False
    assert sequence.valid == 0
    assert snapshot.node is None
    run.append(sequence, *range(12))
    run.release(sequence)
    assert run.reuse(tokens(30)) == 28
    run.finish()

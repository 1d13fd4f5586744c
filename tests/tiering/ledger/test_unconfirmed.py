"""Blocks computed from what had not arrived (design: all or nothing): a failed read takes along everything that was computed from it."""

from __future__ import annotations

import pytest
from group_run import GroupRun, window
from hand_run import HandRun, expect_lost, on_secondary, pending, words

from kvtier.pools.pool_index import PRIMARY, SECONDARY
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.confirming import awaited_slots
from kvtier.tiering.ledger.events import Removed
from kvtier.tiering.ledger.group import FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.truncating import truncate

# -- by hand: 4 tokens in a block, a letter for each block -----------------------------------------------------------------


def hurry(run: HandRun, sequence: ActiveSequence) -> None:
    """The engine computes everything without waiting for what it reads."""
    run.driver._write(sequence, sequence.computed, sequence.num_tokens)
    run.ledger.mark_computed(sequence.id, sequence.num_tokens)


def stored(run: HandRun, sequence: ActiveSequence, letters: str) -> list[Block]:
    """Compute in a hurry and store; the blocks of these letters, of which the last ones are new."""
    hurry(run, sequence)
    run.ledger.store_context(sequence.id)
    return sequence.blocks[:len(letters)]


def reusable(run: HandRun, letters: str) -> int:
    return capacity.match(run.ledger, run.request(letters)).reusable_blocks


def fails(run: HandRun, move: Move) -> None:
    """Carried out and reported; what an engine computed in a hurry is not looked at in between."""
    run.tier.carry_out(move, True)
    run.ledger.finish(move, True)
    run.driver.events.consume()


@pytest.mark.parametrize("still_active", [True, False])
def test_what_was_stored_behind_a_block_that_is_lost_later_leaves_the_tree(still_active: bool) -> None:
    run = HandRun(12, 4)
    on_secondary(run, "ab")
    sequence = run.add("abcd")
    first, second = [move for move in run.tier.waiting if isinstance(move, Move)]
    a, b, c, d = stored(run, sequence, "abcd")
    keys = {run.key(block) for block in (b, c, d)}
    assert reusable(run, "abcd") == 4
    if not still_active:
        run.driver.remove(sequence.id, True)
    run.tier.carry_out(first, False)
    run.ledger.finish(first, False)
    run.driver.events.consume()
    run.tier.carry_out(second, True)
    run.ledger.finish(second, True)
    removed = [event.data for event in run.driver.events.consume() if isinstance(event.data, Removed)]
    assert {key for data in removed for key in data.block_hashes} == keys
    assert a.node is not None
    assert b.node is c.node is d.node is None
    assert reusable(run, "abcd") == 1
    if still_active:
        expect_lost(sequence, 4)
        assert run.compute(sequence)
        run.remove(sequence)
        assert reusable(run, "abcd") == 4
    run.finish()


def test_what_was_stored_behind_a_block_that_arrives_stays() -> None:
    run = HandRun(12, 4)
    on_secondary(run, "a")
    sequence = run.add("abc")
    stored(run, sequence, "abc")
    run.end(pending(run, SECONDARY, PRIMARY))
    run.append(sequence, 1)
    assert not run.ledger.allocators[0].unconfirmed.by_block
    run.remove(sequence)
    assert reusable(run, "abc") == 3
    run.finish()


def test_what_another_sequence_stored_there_before_stays() -> None:
    """Only what was computed from the lost block goes: not what lies behind its place in the tree."""
    run = HandRun(16, 4)
    [a, b, _c] = run.serve("abc")
    run.offload(a)
    run.settle()
    alone = run.add("abd", skip_read=True)
    assert run.compute(alone)
    hasty = run.add("abe")
    move = pending(run, SECONDARY, PRIMARY)
    hurry(run, hasty)
    run.ledger.store_context(hasty.id)
    run.ledger.store_context(alone.id)
    fails(run, move)
    assert a.node is None
    assert b.node is not None
    assert hasty.must_report
    assert not alone.must_report
    run.driver.remove(alone.id, True)  # fills the hole
    assert [reusable(run, letters) for letters in ("abc", "abd", "abe")] == [3, 3, 2]
    run.finish()


def test_a_sequence_that_shares_what_was_computed_from_a_lost_block_is_told_and_loses_what_it_stored() -> None:
    run = HandRun(16, 4)
    on_secondary(run, "a")
    first = run.add("ab")
    move = pending(run, SECONDARY, PRIMARY)
    stored(run, first, "ab")
    run.driver.remove(first.id, True)
    second = run.ledger.add_sequences([run.request("abcd", id=1)])[0]
    assert second.prepopulated == 8
    run.ledger.mark_computed(1, second.num_tokens)
    run.ledger.store_context(1)
    third = run.ledger.add_sequences([run.request("abcdx", id=2)])[0]
    assert third.prepopulated == 16
    fails(run, move)
    for sequence in (second, third):
        expect_lost(sequence, 0)
    assert reusable(run, "abcd") == 0
    for request_id in (1, 2):
        run.ledger.remove_sequence(request_id, False)
    run.finish()


def test_blocks_computed_from_a_block_outside_of_the_next_ones_window_are_waited_for_and_lost() -> None:
    """The second prompt reuses what its window needs: not the block that the first one has not got yet."""
    run = GroupRun(window(4, 16, 8))
    run.serve(range(5))
    run.ledger.offload(0)
    run.settle()
    first = run.ledger.add_sequences([run.request(range(5), id=1)])[0]
    assert first.prepopulated == 4
    [move] = run.ledger.moves.take()
    run.ledger.mark_computed(1, 5)
    for token in range(5, 17):  # the first block leaves the window before it has arrived
        run.ledger.append_step([1], [[token]])
    second = run.ledger.add_sequences([run.request(range(14), id=2)])[0]
    assert second.prepopulated == 12
    assert awaited_slots(run.ledger, second, 0)
    run.ledger.mark_computed(2, 14)
    for token in range(70, 76):
        run.ledger.append_step([2], [[token]])
    run.ledger.store_context(2)
    assert isinstance(move, Move)
    run.ledger.finish(move, True)
    assert first.must_report
    assert first.computed == 0
    assert second.must_report
    assert second.computed < 12
    assert capacity.match(run.ledger, run.request([*range(14), *range(70, 76)])).reusable_blocks == 0
    for request_id in (1, 2):
        run.ledger.remove_sequence(request_id, False)
    assert not run.ledger.allocators[0].unconfirmed.by_move


def test_a_copy_of_part_of_an_unconfirmed_block_is_lost_with_it() -> None:
    run = HandRun(16, 4)
    on_secondary(run, "a")
    first = run.add("ab")
    move = pending(run, SECONDARY, PRIMARY)
    stored(run, first, "ab")
    second = run.ledger.add_sequences([run.request([*words("a"), *words("b")[:2], 8, 8, 8], id=1)])[0]
    assert second.prepopulated == 6
    assert second.blocks[1] is not first.blocks[1]
    assert second.blocks[1].id in run.ledger.allocators[0].unconfirmed.by_block
    fails(run, move)
    expect_lost(second, 0)
    run.ledger.remove_sequence(1, False)
    run.finish()


def test_an_unconfirmed_block_is_not_written_to_nvme_until_it_is_confirmed() -> None:
    run = HandRun(8, 4, 4)
    on_secondary(run, "a")
    sequence = run.add("ab")
    move = pending(run, SECONDARY, PRIMARY)
    [_a, b] = stored(run, sequence, "ab")
    run.driver.remove(sequence.id, True)
    run.ledger.offload(b.id)
    run.ledger.refresh(1.0)
    assert b.nvme_backing is None
    run.tier.fetch()
    run.tier.carry_out(move, False)
    run.ledger.finish(move, False)
    run.ledger.refresh(2.0)
    assert b.nvme_backing is not None
    run.settle()
    run.finish()


def test_a_copy_made_after_the_sequence_was_ready_counts_as_well() -> None:
    """A lease shares the unfilled block; the append copies it, and the engine goes on before the copy has been made."""
    run = HandRun(12)
    sequence = run.add([1, 2, 3, 4, 5, 6])
    assert run.compute(sequence)
    run.ledger.deliver(sequence)
    assert sequence.rows[0].is_settled
    lease = run.ledger.pin(sequence.id)
    run.ledger.append_step([sequence.id], [[7]])
    run.tier.fetch()
    move = pending(run, PRIMARY, PRIMARY)
    for token in range(8, 15):
        run.ledger.append_step([sequence.id], [[token]])
    run.ledger.store_context(sequence.id)
    blocks = sequence.blocks[:3]
    assert [block.node is not None for block in blocks] == [True, True, True]
    run.ledger.finish(move, True)
    assert (sequence.computed, sequence.must_report) == (4, True)
    assert [block.node is not None for block in blocks] == [True, False, False]
    assert run.ledger.counters.dropped_unconfirmed > 0
    run.ledger.release_lease(lease)
    run.ledger.remove_sequence(sequence.id, False)


def test_a_forgotten_block_that_has_become_a_backing_is_not_lost_with_what_it_had_been_computed_from() -> None:
    run = HandRun(8, 4, 4, write_ahead_share=0.0)
    on_secondary(run, "a")
    [other] = run.serve("z")
    sequence = run.add("ab")
    move = pending(run, SECONDARY, PRIMARY)
    [_a, b] = stored(run, sequence, "ab")
    run.driver.remove(sequence.id, True)
    run.ledger.offload(b.id)
    truncate(run.ledger, run.request("ab"), 4)
    run.ledger.write_everything_out()
    assert other.secondary_backing is b
    run.tier.fetch()
    for record in [waiting for waiting in run.tier.waiting if waiting is not move and isinstance(waiting, Move)]:
        run.tier.carry_out(record, False)
        run.ledger.finish(record, False)
    dropped = run.dropped()
    fails(run, move)
    assert run.dropped() == dropped
    assert other.secondary_backing is b
    verify(run.ledger)


def test_what_was_computed_from_a_state_is_lost_with_it_though_another_one_starts_in_its_slot() -> None:
    """The first beam continues the second one; its own state, which has not arrived, is given up, and its slot is taken."""
    ledger = Ledger([GroupSpec((24, 0, 0), FULL), GroupSpec((8, 0, 0), RECURRENT, snapshot_interval=4)], 4, LedgerRules(policy="lru"))

    def moves() -> list[Move]:
        return [record for record in ledger.moves.take() if isinstance(record, Move)]

    prompt = list(range(1, 9))
    ledger.add_sequences([Request(0, [*prompt, 99])])
    ledger.mark_computed(0, 9)
    ledger.remove_sequence(0, True)
    for move in moves():
        ledger.finish(move, False)
    [sequence] = ledger.add_sequences([Request(1, [*prompt, *range(50, 63)], beam_width=2)])
    assert sequence.prepopulated == 8
    [copy] = moves()
    ledger.mark_computed(1, 21)
    ledger.append_step([1], [[5, 6]])
    parted = moves()
    ledger.reorder_beams(1, [1, 1])
    ledger.add_sequences([Request(2, [*prompt, 70])])
    [later] = moves()
    assert later.destination == copy.destination
    ledger.store_context(1)
    blocks = sequence.blocks[2:5]
    assert all(block.node is not None for block in blocks)
    ledger.finish(copy, True)
    assert all(block.node is None for block in blocks)
    for move in [*parted, later]:
        ledger.finish(move, False)
    assert not any(allocator.overtaken or allocator.arriving for allocator in ledger.allocators)
    for request_id in (1, 2):
        ledger.remove_sequence(request_id, False)
    verify(ledger)


def test_each_move_is_waited_for_once_however_much_was_stored_behind_it() -> None:
    run = HandRun(24, 8)
    on_secondary(run, "abcd")
    sequence = run.add("abcdefghijkl")
    moves = [record for record in run.tier.waiting if isinstance(record, Move)]
    assert len(moves) == 4
    for computed in (24, 32, 40, 48):
        run.ledger.mark_computed(sequence.id, computed)
        run.ledger.store_context(sequence.id)
    assert len(run.ledger.allocators[0].unconfirmed.by_block) == 8
    assert sorted(awaited_slots(run.ledger, sequence, 0)) == sorted(move.destination for move in moves)
    run.ledger.remove_sequence(sequence.id, False)


def test_of_blocks_that_leave_a_window_and_wait_for_the_same_the_first_speaks_for_all() -> None:
    ledger = Ledger([GroupSpec((40, 8, 0), FULL), GroupSpec((40, 8, 0), WINDOW, 8)], 4, LedgerRules(policy="lru"))
    ledger.add_sequences([Request(0, range(9))])
    ledger.mark_computed(0, 9)
    ledger.remove_sequence(0, True)
    for block_id in (0, 1):
        ledger.offload(block_id)
    for move in ledger.moves.take():
        ledger.finish(move, False)
    [sequence] = ledger.add_sequences([Request(1, range(60))])
    moves = ledger.moves.take()
    assert (sequence.prepopulated, len(moves)) == (8, 2)
    ledger.mark_computed(1, 60)
    ledger.append_step([1], [[5]])
    row = sequence.rows[1]
    assert row.num_departed > 10
    assert [left.position for left in row.left_behind] == [2]
    ledger.finish(moves[0], True)
    assert (sequence.computed, sequence.must_report) == (0, True)
    assert capacity.match(ledger, Request(2, range(60))).reusable_blocks == 0
    ledger.finish(moves[1], False)
    ledger.remove_sequence(1, False)
    verify(ledger)
    assert not any(allocator.unconfirmed.by_move for allocator in ledger.allocators)

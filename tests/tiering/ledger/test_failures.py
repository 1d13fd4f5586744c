"""A Move that fails loses its content, and nothing else (design: all or nothing)."""

from __future__ import annotations

from hand_run import HandRun, ends, expect_lost, is_queued, level, on_nvme, on_secondary, pending, place, words

from kvtier.errors import RequestError
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, slot_of
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.sequence import ActiveSequence

# -- reads from NVMe ---------------------------------------------------------------------------------------------------


def test_a_failed_nvme_read_takes_the_block_out_of_the_tree_and_quarantines_its_slot() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_nvme(run, "a")
    slot = place(block)[1]
    key = run.key(block)
    run.driver.events.consume()
    [read] = run.onboard(block)
    assert isinstance(read, Move)
    run.end(read, fails=True)
    assert run.removed_hashes() == [key]
    assert block.node is None
    assert block.nvme_backing is None
    assert is_queued(block)
    assert run.queued(PRIMARY)[0] is block, "empty, and taken next"
    assert run.ledger.allocators[0].quarantined == {slot}
    assert run.ledger.counters.quarantined == 1
    assert run.ledger.counters.lost == 1
    assert run.free(NVME) == 1
    assert run.add("a").prepopulated == 0
    run.finish()


def test_after_a_failed_nvme_read_each_sequence_computes_the_block_again_in_a_private_one() -> None:
    run = HandRun(8, 1, 3)
    [block] = on_nvme(run, "a")
    first, second = run.add_all(run.request("ab"), run.request("ac"))
    assert first.prepopulated == second.prepopulated == 4
    assert first.blocks[0] is second.blocks[0] is block
    run.end(pending(run, NVME, PRIMARY), fails=True)
    expect_lost(first, 0)
    expect_lost(second, 0)
    assert first.blocks[0] is not second.blocks[0]
    assert block.ref_count <= 1
    assert first.blocks[0].ref_count == second.blocks[0].ref_count == 1
    assert first.blocks[0].node is None
    assert second.blocks[0].node is None
    for sequence in (first, second):
        assert run.compute(sequence)
        run.remove(sequence)
    assert run.add("ab").prepopulated == 8
    assert run.ledger.counters.hit_tokens == [0, 0, 0], "nothing was delivered"
    run.finish()


def test_a_failed_way_from_a_good_file_discards_the_row_but_quarantines_nothing() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_nvme(run, "a")
    slot = place(block)[1]
    sequence = run.add("a")
    run.end(pending(run, NVME, PRIMARY), fails=True, source_is_bad=False)
    expect_lost(sequence, 0)
    assert run.ledger.allocators[0].quarantined == set()
    assert [record.slot for record in run.tier.waiting if isinstance(record, Discard)] == [slot]
    assert run.free(NVME) == 2
    run.finish()


def test_a_quarantined_slot_is_in_no_queue_and_never_written_again() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_nvme(run, "a")
    bad = place(block)[1]
    [read] = run.onboard(block)
    assert isinstance(read, Move)
    run.end(read, fails=True)
    already = len(run.moves())
    for letter in "bcde":
        on_secondary(run, letter)
        run.refresh()
        run.settle()
    written = {slot_of(move.destination) for move in run.moves()[already:] if ends(move) == (SECONDARY, NVME)}
    assert written == {1 - bad}
    assert [slot_of(handle.index) for handle in run.queued(NVME)] == [1 - bad]
    run.ledger.reset()
    run.settle()
    assert run.free(NVME) == 1, "a reset does not bring it back"
    run.finish()


def test_a_failed_read_after_its_sequence_has_ended_leaves_an_empty_handle() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_nvme(run, "a")
    sequence = run.add("a")
    run.remove(sequence, store=False)
    run.end(pending(run, NVME, PRIMARY), fails=True)
    assert block.node is None
    assert is_queued(block)
    assert run.free(PRIMARY) == 4
    run.finish()


# -- offloads ----------------------------------------------------------------------------------------------------------


def test_a_failed_offload_of_an_unreferenced_block_leaves_an_empty_handle() -> None:
    run = HandRun(4, 2)
    [block] = run.serve("a")
    key = run.key(block)
    [move] = run.offload(block)
    assert isinstance(move, Move)
    run.driver.events.consume()
    run.end(move, fails=True)
    assert run.removed_hashes() == [key]
    assert block.node is None
    assert run.queued(SECONDARY)[0] is block
    assert run.ledger.counters.lost == 1
    run.finish()


def test_a_promotion_of_what_a_failed_offload_never_brought_down_fails_too() -> None:
    run = HandRun(4, 2)
    [block] = run.serve("a")
    [down] = run.offload(block)
    assert isinstance(down, Move)
    sequence = run.add("a")
    up = pending(run, SECONDARY, PRIMARY)
    assert up.source == down.destination
    assert up.source_generation == down.destination_generation
    run.carry_out(down, fails=True)
    run.carry_out(up)
    run.report(down)
    assert level(block) == PRIMARY
    run.report(up)
    expect_lost(sequence, 0)
    assert block.secondary_backing is None
    assert run.compute(sequence)
    run.finish()


def test_a_failed_offload_does_not_touch_the_sequences_that_took_the_primary_slot() -> None:
    run = HandRun(3, 2)
    [block] = run.serve("a")
    sequence = run.add([1] * 9)
    move = pending(run, PRIMARY, SECONDARY)
    assert move.block_id == block.id
    run.end(move, fails=True)
    assert block.node is None
    assert not sequence.must_report
    assert run.compute(sequence)
    assert sequence.computed == 9
    run.finish()


# -- promotions --------------------------------------------------------------------------------------------------------


def test_a_failed_promotion_of_an_unreferenced_block_leaves_two_empty_handles() -> None:
    run = HandRun(4, 2)
    [block] = on_secondary(run, "a")
    [move] = run.onboard(block)
    assert isinstance(move, Move)
    run.end(move, fails=True)
    assert block.node is None
    assert block.secondary_backing is None
    assert run.content(PRIMARY) == run.content(SECONDARY) == []
    assert run.free(SECONDARY) == 2
    run.finish()


def test_a_failed_promotion_is_lost_to_every_sequence_that_holds_the_block() -> None:
    run = HandRun(8, 2)
    [block] = on_secondary(run, "a")
    sequences = run.add_all(run.request("ab"), run.request("ac"), run.request("a"))
    assert {sequence.blocks[0].id for sequence in sequences} == {block.id}
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    for sequence in sequences:
        expect_lost(sequence, 0)
    assert len({sequence.blocks[0].id for sequence in sequences}) == 3
    for sequence in sequences:
        assert run.compute(sequence)
        run.remove(sequence)
    run.finish()


def test_a_pinned_block_whose_promotion_failed_is_exchanged_and_the_lease_ends_as_usual() -> None:
    run = HandRun(6, 2)
    [block] = on_secondary(run, "a")
    sequence = run.add("a")
    lease = run.ledger.pin(sequence.id)
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    expect_lost(sequence, 0)
    assert sequence.blocks[0] is not block
    assert lease.lost_ids == [{block.id}]
    run.ledger.release_lease(lease)
    run.note()
    assert block.ref_count == 0
    assert run.compute(sequence)
    run.finish()


def test_a_failed_block_takes_all_later_prefix_blocks_with_it_and_no_earlier_one() -> None:
    run = HandRun(9, 3)
    blocks = run.serve("abc")
    run.offload(blocks[1])
    run.settle()
    sequence = run.add("abcd")
    assert sequence.blocks[:3] == blocks
    fourth = sequence.blocks[3]
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    expect_lost(sequence, 4)
    assert sequence.blocks[0] is blocks[0]
    assert sequence.blocks[1] is not blocks[2]
    assert sequence.blocks[2] is not blocks[2]
    assert sequence.blocks[3] is fourth, "it was private already"
    assert blocks[1].node is None
    assert blocks[2].node is not None, "its own bytes are good: reusable once the gap is filled"
    assert blocks[2].ref_count == 0
    assert run.compute(sequence)
    run.remove(sequence)
    assert run.add("abcd").prepopulated == 16
    run.finish()


def test_the_engine_is_told_before_it_may_go_on() -> None:
    run = HandRun(6, 2)
    on_secondary(run, "a")
    sequence = run.add("a")
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    for call in (lambda: run.ledger.mark_computed(sequence.id, 5), lambda: run.ledger.append_step([sequence.id], [[1]])):
        assert "0 of 4 reused tokens are left" in str(run.refused(RequestError, call))
    assert run.compute(sequence)
    run.append(sequence, 1)
    run.finish()


def test_hits_are_counted_by_what_was_delivered() -> None:
    run = HandRun(9, 3)
    blocks = run.serve("abc")
    run.offload(blocks[1])
    run.settle()
    sequence = run.add("abc")
    assert run.compute(sequence, decide=lambda move: ends(move) == (SECONDARY, PRIMARY))
    assert run.ledger.counters.hit_tokens == [4, 0, 0]
    assert run.ledger.counters.hit_blocks == [1, 0, 0]
    run.finish()


# -- partial copies ----------------------------------------------------------------------------------------------------


def copied(run: HandRun) -> tuple[ActiveSequence, Move]:
    """A sequence whose second block is a copy of the first two tokens of block b, which another sequence holds."""
    run.serve("ab")
    run.add("ab")
    sequence = run.add([*words("a"), *words("b")[:2], 5, 5])
    assert sequence.prepopulated == 6
    return sequence, pending(run, PRIMARY, PRIMARY)


def test_a_failed_partial_copy_is_lost_to_its_sequence_only() -> None:
    run = HandRun(8)
    sequence, move = copied(run)
    source = run.ledger.allocators[0].holders[PRIMARY][slot_of(move.source)]
    target = sequence.blocks[1]
    run.end(move, fails=True)
    expect_lost(sequence, 4)
    assert sequence.blocks[1] is target, "private already: it is computed in place"
    assert source.node is not None
    other = run.ledger.sequence(min(run.ledger.sequences))
    assert not other.must_report
    assert run.compute(sequence)
    assert run.compute(other)
    run.finish()


def test_a_failed_partial_copy_after_its_sequence_has_ended_changes_nothing() -> None:
    run = HandRun(8)
    sequence, move = copied(run)
    target = sequence.blocks[1]
    run.remove(sequence, store=False)
    run.end(move, fails=True)
    assert is_queued(target)
    assert run.ledger.counters.lost == 1
    run.finish()


# -- writes to NVMe ----------------------------------------------------------------------------------------------------


def test_a_failed_write_ahead_leaves_the_block_where_it_is_and_deletes_the_row() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_secondary(run, "a")
    [write] = run.refresh()
    assert isinstance(write, Move)
    target = block.nvme_backing
    assert target is not None
    run.end(write, fails=True)
    assert block.node is not None
    assert level(block) == SECONDARY
    assert block.nvme_backing is None
    assert is_queued(block)
    assert is_queued(target)
    assert [record.slot for record in run.tier.waiting if isinstance(record, Discard)] == [slot_of(write.destination)]
    assert run.ledger.counters.lost == 0
    assert run.ledger.counters.quarantined == 0
    again = [record for record in run.refresh() if isinstance(record, Move)]
    assert [move.block_id for move in again] == [block.id], "it is tried again"
    run.settle()
    assert block.nvme_backing is not None
    run.finish()


def test_a_failed_write_does_not_touch_the_sequence_that_took_the_block_up_meanwhile() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_secondary(run, "a")
    [write] = run.refresh()
    assert isinstance(write, Move)
    sequence = run.add("a")
    assert level(block) == PRIMARY
    run.end(write, fails=True)
    assert not sequence.must_report
    assert sequence.valid == 4
    assert block.node is not None
    assert run.compute(sequence)
    run.finish()


def test_a_write_that_ends_for_a_block_that_is_gone_by_then_is_discarded() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_secondary(run, "a")
    [write] = run.refresh()
    assert isinstance(write, Move)
    run.ledger.allocators[0].forget(block)
    run.note()
    run.end(write)
    assert [record.slot for record in run.tier.waiting if isinstance(record, Discard)] == [slot_of(write.destination)]
    run.settle()
    assert run.tier.rows == {}
    assert run.free(SECONDARY) == 1
    assert run.free(NVME) == 2
    run.finish()


# -- too few blocks ----------------------------------------------------------------------------------------------------


def test_a_sequence_whose_failed_block_cannot_be_replaced_must_be_preempted_and_is_told_so() -> None:
    run = HandRun(4, 1)
    on_secondary(run, "a")
    first, second = run.add_all(run.request("a"), run.request([*words("a"), 3]))
    assert run.free() == 1
    run.add([1])
    assert run.free() == 0
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    doomed = [sequence for sequence in (first, second) if sequence.must_preempt]
    assert len(doomed) >= 1
    for sequence in doomed:
        for call in (lambda s=sequence: run.ledger.mark_computed(s.id, s.num_tokens),
                     lambda s=sequence: run.ledger.append_step([s.id], [[1]])):
            assert "remove this sequence" in str(run.refused(RequestError, call))
        run.driver.events.consume()
        run.remove(sequence, store=True)
        assert run.events() == [], "nothing of it is stored"
    run.finish()


def test_the_last_holder_of_a_failed_block_keeps_the_handle_when_there_is_no_other() -> None:
    run = HandRun(2, 1)
    [block] = on_secondary(run, "a")
    sequence = run.add("a")
    assert run.free() == 0
    run.end(pending(run, SECONDARY, PRIMARY), fails=True)
    expect_lost(sequence, 0)
    assert sequence.blocks[0] is block
    assert run.compute(sequence)
    run.finish()

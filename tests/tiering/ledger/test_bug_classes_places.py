"""Bugs of this kind of code, each as the rule that would have prevented it: where a block is, and who may take it.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen; ``tests/test_proofs.py`` lists them all.
"""

from __future__ import annotations

from itertools import product

import pytest
from hand_run import HandRun, ends, level, on_nvme, on_secondary, place, words
from naive_model import snapshot

from kvtier.errors import RequestError
from kvtier.policies.eviction import LISTS_PER_LEVEL
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.moves import Move


def churn(run: HandRun, letters: str = "abcdefgh") -> None:
    """Serve more than fits, twice, so that content goes down and up."""
    for letter in letters * 2:
        run.serve(letter)
        run.refresh()
        run.settle()


# -- the free count exceeded the maximum; a claim after the swap unlinked from the wrong level's list ------------------


def test_free_counts_never_exceed_the_blocks_of_a_level_however_often_blocks_change_levels() -> None:
    """Bugs 11879, 12834, 12297."""
    run = HandRun(3, 2, 4)
    for letter in "abcdab" * 3:
        run.serve(letter)
        run.refresh()
        run.settle()
        for where, total in ((PRIMARY, 3), (SECONDARY, 2), (NVME, 4)):
            assert run.free(where) == len(run.queued(where)) == total
    run.finish()


def test_a_block_is_unlinked_from_the_queue_it_was_put_into() -> None:
    """Bugs 11879, 12834, 12297."""
    run = HandRun(4, 2)
    [block] = run.serve("a")
    assert block.queue == PRIMARY * LISTS_PER_LEVEL + 35
    run.offload(block)
    assert block.queue == SECONDARY * LISTS_PER_LEVEL + 35
    run.set_priority(block, 60)
    assert block.queue == SECONDARY * LISTS_PER_LEVEL + 60
    sequence = run.add("a", priority=80)  # raises the priority of a block that is queued under another
    assert sequence.blocks[0] is block
    assert block.priority == 80
    assert run.compute(sequence)
    run.remove(sequence)
    assert block.queue == PRIMARY * LISTS_PER_LEVEL + 80
    run.finish()


# -- another prompt's tokens; pending transfers kept by block id or by a bare slot number ------------------------------


def test_a_move_names_slots_with_their_level_and_their_write_generation_never_block_ids_alone() -> None:
    """Bugs 8813, 8274, 9056, 15272."""
    run = HandRun(3, 2)
    churn(run, "abcd")
    block_of_slot_differs = False
    for move in run.moves():
        assert 0 <= slot_of(move.source) < run.ledger.allocators[0].num_blocks[level_of(move.source)]
        assert 0 <= slot_of(move.destination) < run.ledger.allocators[0].num_blocks[level_of(move.destination)]
        assert move.source != move.destination
        block_of_slot_differs |= slot_of(move.source) != move.block_id
    assert block_of_slot_differs
    writers = [(move.destination, move.destination_generation) for move in run.moves()]
    assert len(set(writers)) == len(writers), "no two writers of a slot have the same generation"
    run.finish()


def test_the_same_slot_number_on_two_levels_is_two_slots() -> None:
    """Bugs 8813, 8274, 9056, 15272."""
    run = HandRun(3, 3)
    blocks = on_secondary(run, "ab")
    sequence = run.add("ab")
    slots = [slot_of(block.index) for block in blocks]
    lower = [slot_of(block.secondary_backing.index) for block in blocks if block.secondary_backing is not None]
    assert set(slots) & set(lower), "so that the case means something"
    assert run.compute(sequence)
    run.finish()


@pytest.mark.parametrize("latest_first", [True, False])
def test_no_order_of_independent_transfers_shows_a_prompt_another_ones_tokens(latest_first: bool) -> None:
    """Bugs 8813, 8274, 9056, 15272."""
    run = HandRun(4, 2, 4)
    for letters in ("ab", "cd", "ab", "ce", "abf", "cd"):
        sequence = run.add(letters)
        run.refresh()
        while run.tier.waiting:  # the contents are compared after every report
            runnable = run.tier.runnable()
            run.carry_out(runnable[-1 if latest_first else 0])
            while run.tier.ended:
                run.tier.report(-1 if latest_first else 0)
                run.note()
        assert run.compute(sequence)
        run.remove(sequence)
    run.finish()


# -- illegal memory access after an offload; a block id was used as a slot ---------------------------------------------


def test_a_block_id_is_not_a_slot() -> None:
    """Bug 13124."""
    run = HandRun(3, 3)
    [block] = run.serve("a")
    block_id = block.id
    run.offload(block)
    run.add([1] * 12)
    ids = [held.id for sequence in run.ledger.sequences.values() for held in sequence.blocks]
    slots = [slot_of(held.index) for sequence in run.ledger.sequences.values() for held in sequence.blocks]
    assert max(ids) >= 3, "a handle that began on the secondary level is primary now"
    assert sorted(slots) == [0, 1, 2]
    assert block.id == block_id
    assert run.ledger.block(block_id) is block
    run.finish()


# -- hang and ghost free entry; a pin added a reference without taking the block out of its queue ----------------------


def test_a_pinned_block_is_in_no_queue_and_cannot_be_taken() -> None:
    """Bugs 12560, 12667."""
    run = HandRun(4)
    sequence = run.add("a")
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    run.remove(sequence)
    assert run.free() == 2
    assert not set(run.queued(PRIMARY)) & set(lease.rows[0])
    other = run.add([1] * 8)
    assert not set(other.blocks) & set(lease.rows[0])
    run.no_room(lambda: run.ledger.add_sequences([run.request("x")]))
    run.remove(other)
    run.ledger.release_lease(lease)
    run.note()
    assert run.free() == 4
    assert run.add("a").prepopulated == 4
    run.finish()


def test_several_pins_of_one_sequence_each_hold_its_blocks_to_their_own_end() -> None:
    """Bugs 12560, 12667."""
    run = HandRun(4)
    sequence = run.add("a")
    leases = [run.ledger.pin(sequence.id), run.ledger.pin(sequence.id)]
    run.remove(sequence, store=False)
    run.ledger.release_lease(leases[0])
    run.note()
    assert run.free() == 2
    run.refused(RequestError, lambda: run.ledger.release_lease(leases[0]))
    run.ledger.release_lease(leases[1])
    run.note()
    assert run.free() == 4
    run.finish()


# -- something reusable was evicted although there were empty blocks ---------------------------------------------------


@pytest.mark.parametrize("priority", [0, 35, 100])
def test_empty_blocks_are_taken_before_any_content_whatever_its_priority(priority: int) -> None:
    """Bug 11685."""
    run = HandRun(8)
    kept = run.serve("ab", priority=priority)
    run.serve([1])                     # stores nothing: its only token is the newest
    dropped = run.add("cd")
    assert run.compute(dropped)
    run.remove(dropped, store=False)   # given back without content
    run.add([1] * 24)                  # six blocks, and six are empty
    assert [block.node is not None for block in kept] == [True, True]
    assert run.dropped() == 0
    run.finish()


def test_a_sequences_own_duplicate_of_a_stored_block_is_given_back_empty() -> None:
    """Bug 11685."""
    run = HandRun(8)
    first, second = run.add_all(run.request("a"), run.request("a"))
    for sequence in (first, second):
        assert run.compute(sequence)
    duplicate = second.blocks[0]
    run.remove(first)
    run.remove(second)
    assert duplicate.node is None
    assert run.queued(PRIMARY)[0] is duplicate
    assert len(run.content(PRIMARY)) == 1
    run.finish()


# -- assertions about leaves; a primary block had children on the secondary level --------------------------------------


@pytest.mark.parametrize("lowered", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_a_block_may_be_on_another_level_than_the_blocks_before_and_behind_it(lowered: tuple[int, ...]) -> None:
    """Bugs 4596, 3735, 699, 2708."""
    run = HandRun(6, 3)
    blocks = run.serve("abc")
    for position in lowered:
        run.offload(blocks[position])
    run.settle()
    assert [level(block) for block in blocks] == [SECONDARY if position in lowered else PRIMARY for position in range(3)]
    sequence = run.add("abc")
    assert sequence.blocks[:3] == blocks
    assert sequence.prepopulated == 12
    assert run.compute(sequence)
    run.remove(sequence)
    assert run.add([*words("ab"), 5, 5]).prepopulated == 8
    run.finish()


@pytest.mark.parametrize("levels", list(product((PRIMARY, SECONDARY, NVME), repeat=3)), ids=str)
def test_a_prompt_is_found_whatever_level_each_of_its_blocks_is_on(levels: tuple[int, int, int]) -> None:
    """Bugs 4596, 3735, 699, 2708."""
    run = HandRun(8, 4, 4, keep_backing=False)
    blocks = on_nvme(run, "abc")
    for block, wanted in zip(blocks, levels, strict=True):
        if wanted != NVME:
            run.onboard(block)
            run.settle()
        if wanted == SECONDARY:
            run.offload(block)
            run.settle()
    assert [level(block) for block in blocks] == list(levels)
    sequence = run.add("abc")
    assert sequence.prepopulated == 12
    assert run.compute(sequence)
    run.remove(sequence)
    run.finish()


def test_dropping_a_block_leaves_the_blocks_behind_it_stored() -> None:
    """Bugs 4596, 3735, 699, 2708."""
    run = HandRun(8, 2)
    blocks = run.serve("abc")
    run.offload(blocks[2])
    run.settle()
    run.ledger.allocators[0].forget(blocks[0])
    run.note()
    assert blocks[1].node is not None
    assert blocks[2].node is not None
    assert level(blocks[2]) == SECONDARY
    run.serve("abc")
    assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == 3
    run.finish()


def test_a_stored_block_that_nobody_references_is_taken_out_of_its_queue_when_it_is_pinned() -> None:
    """Bugs 12560, 12667: two sequences have computed the same; what is pinned is what the first one stored and let go."""
    run = HandRun(6)
    first, second = run.add_all(run.request("a"), run.request("a"))
    for sequence in (first, second):
        assert run.compute(sequence)
    stored = first.blocks[0]
    run.remove(first)
    assert stored in run.queued(PRIMARY)
    lease = run.ledger.store_and_pin(second.id)
    run.note()
    assert lease.rows[0][0] is stored
    assert stored not in run.queued(PRIMARY)
    run.remove(second, store=False)
    taken = run.add([1] * 16)
    assert stored not in taken.blocks
    run.remove(taken)
    run.ledger.release_lease(lease)
    run.note()
    assert run.free() == 6
    run.finish()


# -- the list of free primary blocks had no primary block in it --------------------------------------------------------


def test_every_queue_of_a_level_holds_handles_of_that_level_only() -> None:
    """Bug 1687."""
    run = HandRun(3, 2, 3)
    for letters in ("ab", "cd", "ab", "e", "cd", "ab"):
        run.serve(letters)
        run.refresh()
        run.settle()
        for where in (PRIMARY, SECONDARY, NVME):
            assert {level(block) for block in run.queued(where)} == {where}
            assert len({place(block) for block in run.queued(where)}) == len(run.queued(where))
    run.finish()


# -- suspending sequences again and again exhausted the host level -----------------------------------------------------


def test_pre_empting_and_resuming_without_end_leaves_nothing_behind() -> None:
    """Bug 15931."""
    run = HandRun(4, 2, 3)
    for _round in range(12):
        for letters in ("ab", "cd"):
            sequence = run.add(letters)
            assert run.compute(sequence)
            run.append(sequence, 9)
            run.remove(sequence)       # pre-empted: what was computed is kept where there is room
        run.refresh()
        run.settle()
        assert (run.free(PRIMARY), run.free(SECONDARY), run.free(NVME)) == (4, 2, 3)
    sequence = run.add("ab")
    assert run.compute(sequence)
    run.finish()


# -- how does one force the use of the host level? ---------------------------------------------------------------------


def test_a_cached_block_can_be_sent_down_and_brought_up_by_hand() -> None:
    """Bug 3130."""
    run = HandRun(4, 1)
    [block] = run.serve("a")
    run.offload(block)
    run.settle()
    assert level(block) == SECONDARY
    run.onboard(block)
    run.settle()
    assert level(block) == PRIMARY
    before = snapshot(run.ledger)
    run.onboard(block)
    assert snapshot(run.ledger) == before, "already there"
    run.finish()


# -- and what several of them had in common ----------------------------------------------------------------------------


def test_records_are_numbered_without_a_gap_in_the_order_of_decision() -> None:
    run = HandRun(3, 2, 3)
    churn(run, "abcd")
    assert [record.number for record in run.tier.records] == list(range(len(run.tier.records)))
    assert {ends(record) for record in run.tier.records if isinstance(record, Move)} >= {(PRIMARY, SECONDARY), (SECONDARY, NVME)}
    run.finish()

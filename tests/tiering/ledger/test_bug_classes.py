"""Bugs that this kind of code has had elsewhere, each as the rule that would have prevented it.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen.
"""

from __future__ import annotations

import pytest
from hand_run import LAST, HandRun, ends, level, on_secondary, place, words
from naive_model import snapshot

from kvtier.errors import RequestError
from kvtier.policies.eviction import LISTS_PER_LEVEL
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.truncating import truncate


def churn(run: HandRun, letters: str = "abcdefgh") -> None:
    """Serve more than fits, twice, so that content goes down and up."""
    for letter in letters * 2:
        run.serve(letter)
        run.refresh()
        run.settle()


# -- 11879, 12834 (12297): the free count exceeded the maximum; a claim after the swap unlinked from the wrong level's list --------


def test_free_counts_never_exceed_the_blocks_of_a_level_however_often_blocks_change_levels() -> None:
    run = HandRun(3, 2, 4)
    for letter in "abcdab" * 3:
        run.serve(letter)
        run.refresh()
        run.settle()
        for where, total in ((PRIMARY, 3), (SECONDARY, 2), (NVME, 4)):
            assert run.free(where) == len(run.queued(where)) == total
    run.finish()


def test_a_block_is_unlinked_from_the_queue_it_was_put_into() -> None:
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


# -- 8813, 8274, 9056, 15272: another prompt's tokens; pending transfers kept by block id or by a bare slot number -----------------


def test_a_move_names_slots_with_their_level_and_their_write_generation_never_block_ids_alone() -> None:
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


# -- 13124: illegal memory access after an offload; a block id was used as a slot ---------------------------------------------------


def test_a_block_id_is_not_a_slot() -> None:
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


# -- 12560, 12667: hang and ghost free entry; a pin added a reference without taking the block out of its queue --------------------


def test_a_pinned_block_is_in_no_queue_and_cannot_be_taken() -> None:
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


# -- 12878, 12892, 13029: over-allocation; bringing one match up evicted another ----------------------------------------------------


def test_bringing_one_match_up_never_evicts_another_of_the_same_batch() -> None:
    run = HandRun(7, 4)
    high = run.serve("ab")
    low = run.serve("cd")
    for block in low:
        run.offload(block)
    run.settle()
    run.serve("e")
    first, second = run.add_all(run.request("cd"), run.request("ab"))
    assert first.blocks[:2] == low
    assert second.blocks[:2] == high
    assert (first.prepopulated, second.prepopulated) == (8, 8)
    assert run.compute(first)
    assert run.compute(second)
    run.finish()


def test_the_source_of_a_copy_is_not_evicted_by_the_batch_that_copies_it() -> None:
    run = HandRun(6)
    [_first, second] = run.serve("ab")
    prompts = [[*words("a"), *words("b")[:2], tail, tail] for tail in (5, 6)]
    first, last = run.add_all(*[run.request(tokens) for tokens in prompts])
    assert (first.prepopulated, last.prepopulated) == (6, 6)
    assert second in last.blocks, "the last one takes it over, the other copies it"
    assert second not in first.blocks
    assert run.compute(first)
    assert run.compute(last)
    run.finish()


# -- 15065, 11731: the scheduler counted reusable blocks twice -----------------------------------------------------------------------


def test_what_a_request_was_said_to_need_is_what_it_takes() -> None:
    run = HandRun(12)
    run.serve("abc")
    for letters in ("abcd", "abcd", "abce", "ab", "z"):
        request = run.request(letters)
        needed = capacity.needed_blocks_one_step(run.ledger, request, False)
        if needed > run.free():
            break
        free = run.free()
        run.add_all(request)
        assert free - run.free() == needed
    assert len(run.ledger.sequences) >= 3
    run.finish()


def test_two_requests_that_share_an_unreferenced_block_are_not_both_credited_with_it() -> None:
    run = HandRun(4)
    run.serve("ab")
    requests = [run.request("ab"), run.request("ab")]
    assert [capacity.needed_blocks_one_step(run.ledger, request, False) for request in requests] == [3, 3]
    run.add_all(requests[0])
    assert capacity.needed_blocks_one_step(run.ledger, requests[1], False) == 1
    run.add_all(requests[1])
    assert run.free() == 0
    run.finish()


# -- 12933, 15018: orphaned blocks; a prompt was stored behind a predecessor that had been evicted ----------------------------------


def test_storing_behind_a_forgotten_predecessor_puts_the_sequences_own_block_there() -> None:
    run = HandRun(8)
    old = run.serve("a")[0]
    sequence = run.add("ab")
    assert sequence.blocks[0] is old
    truncate(run.ledger, run.request("a"), 0)
    run.note()
    assert old.node is None
    assert run.compute(sequence)
    run.driver.store_context(sequence.id)
    run.note()
    assert old.node is not None
    run.remove(sequence)
    assert run.add("ab").prepopulated == 8
    run.finish()


def test_a_hole_in_a_stored_prompt_is_refilled_and_what_lies_behind_is_found_again() -> None:
    run = HandRun(8)
    blocks = run.serve("abc")
    run.ledger.allocators[0].forget(blocks[0])
    run.note()
    assert capacity.match(run.ledger, run.request("abc")).reusable_blocks == 0
    sequence = run.add("abc")
    assert sequence.prepopulated == 0
    assert run.compute(sequence)
    run.remove(sequence)
    assert blocks[1].node is not None
    assert blocks[2].node is not None, "an occupied place keeps its handle"
    assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == 3
    run.finish()


# -- 12673, 12786, 12818: wrong output with chunked prefill; blocks were stored whose tokens had not been computed ------------------


def test_only_computed_tokens_are_stored_and_never_the_newest() -> None:
    run = HandRun(10)
    sequence = run.add("abc")  # 13 tokens
    for computed, stored in ((3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (13, 3)):
        assert run.compute(sequence, computed)
        run.driver.store_context(sequence.id)
        run.note()
        assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == stored
    run.finish()


def test_a_prompt_that_ends_at_a_block_boundary_stores_its_last_block_only_after_the_next_token() -> None:
    run = HandRun(6)
    sequence = run.add([*words("ab")])
    assert run.compute(sequence)
    run.driver.store_context(sequence.id)
    run.note()
    assert capacity.match(run.ledger, run.request("ab")).reusable_blocks == 1
    run.append(sequence, 9)
    run.driver.store_context(sequence.id)
    run.note()
    assert capacity.match(run.ledger, run.request("ab")).reusable_blocks == 2
    run.finish()


def test_a_sequence_that_ends_in_the_middle_of_its_prefill_stores_what_was_computed() -> None:
    run = HandRun(6)
    sequence = run.add("abc")
    assert run.compute(sequence, 6)
    run.remove(sequence)
    again = run.add("abc")
    assert again.prepopulated == 6
    assert run.compute(again)
    run.finish()


def test_rejected_drafts_are_never_stored() -> None:
    run = HandRun(6)
    sequence = run.add("a", max_new_tokens=8)
    assert run.compute(sequence)
    run.append(sequence, 1, 2, 3, 4)
    run.driver.rewind(sequence.id, 3)
    run.note()
    assert sequence.computed <= sequence.num_tokens == 6
    run.append(sequence, 8, 8)
    run.remove(sequence)
    assert run.add([*words("a"), LAST, 1, 2, 3, 4]).prepopulated == 6
    run.finish()


# -- 11685: something reusable was evicted although there were empty blocks ---------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 35, 100])
def test_empty_blocks_are_taken_before_any_content_whatever_its_priority(priority: int) -> None:
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


# -- 4596, 3735, 699, 2708: assertions about leaves; a primary block had children on the secondary level ----------------------------


@pytest.mark.parametrize("lowered", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_a_block_may_be_on_another_level_than_the_blocks_before_and_behind_it(lowered: tuple[int, ...]) -> None:
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


def test_dropping_a_block_leaves_the_blocks_behind_it_stored() -> None:
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


# -- 1687: the list of free primary blocks had no primary block in it ---------------------------------------------------------------


def test_every_queue_of_a_level_holds_handles_of_that_level_only() -> None:
    run = HandRun(3, 2, 3)
    for letters in ("ab", "cd", "ab", "e", "cd", "ab"):
        run.serve(letters)
        run.refresh()
        run.settle()
        for where in (PRIMARY, SECONDARY, NVME):
            assert {level(block) for block in run.queued(where)} == {where}
            assert len({place(block) for block in run.queued(where)}) == len(run.queued(where))
    run.finish()


# -- 13320: a block was missing at a decode boundary --------------------------------------------------------------------------------


def test_the_token_that_begins_a_block_finds_its_block_allocated() -> None:
    run = HandRun(8)
    sequence = run.add([1, 2, 3], max_new_tokens=12)
    assert run.compute(sequence)
    for token in range(12):
        run.append(sequence, token)
        assert len(sequence.blocks) == -(-sequence.num_tokens // 4)
        assert len(set(sequence.blocks)) == len(sequence.blocks)
    run.finish()


def test_a_block_given_back_by_a_rewind_at_a_boundary_is_allocated_again() -> None:
    run = HandRun(3)
    sequence = run.add([1, 2, 3, 4], max_new_tokens=8)
    assert run.compute(sequence)
    run.append(sequence, 5)
    assert (len(sequence.blocks), run.free()) == (2, 1)
    run.driver.rewind(sequence.id, 1)
    run.note()
    assert (len(sequence.blocks), run.free()) == (1, 2)
    run.append(sequence, 6)
    assert (len(sequence.blocks), run.free()) == (2, 1)
    run.finish()


# -- 11173: releasing a subtree -------------------------------------------------------------------------------------------------------


def test_forgetting_a_subtree_takes_each_of_its_blocks_once_on_whatever_level_and_no_held_one_out_of_use() -> None:
    run = HandRun(12, 4, 4)
    trunk = run.serve("ab")
    branches = [run.serve(letters) for letters in ("abc", "abd", "abde")]
    run.offload(branches[0][2])
    run.settle()
    held = run.add("abde")
    assert run.compute(held)
    stored = {block.id for blocks in branches for block in blocks if block.node is not None}
    assert truncate(run.ledger, run.request("abx"), 4) == len(stored) - 1
    run.note()
    assert trunk[0].node is not None
    assert all(block.node is None for blocks in branches for block in blocks[1:])
    assert all(block.ref_count == 1 for block in held.blocks)
    run.settle()
    run.finish()


# -- 15931: suspending sequences again and again exhausted the host level ------------------------------------------------------------


def test_pre_empting_and_resuming_without_end_leaves_nothing_behind() -> None:
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


# -- 3130: how does one force the use of the host level? ----------------------------------------------------------------------------


def test_a_cached_block_can_be_sent_down_and_brought_up_by_hand() -> None:
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


# -- and what several of them had in common --------------------------------------------------------------------------------------------


def test_records_are_numbered_without_a_gap_in_the_order_of_decision() -> None:
    run = HandRun(3, 2, 3)
    churn(run, "abcd")
    assert [record.number for record in run.tier.records] == list(range(len(run.tier.records)))
    assert {ends(record) for record in run.tier.records if isinstance(record, Move)} >= {(PRIMARY, SECONDARY), (SECONDARY, NVME)}
    run.finish()

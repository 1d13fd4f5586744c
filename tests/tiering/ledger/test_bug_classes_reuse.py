"""Bugs of this kind of code, each as the rule that would have prevented it: what is stored, promised and found again.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen; ``tests/test_proofs.py`` lists them all.
"""

from __future__ import annotations

from group_run import GroupRun, full, window
from hand_run import LAST, HandRun, words

from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.truncating import truncate

# -- over-allocation; bringing one match up evicted another ------------------------------------------------------------


def test_bringing_one_match_up_never_evicts_another_of_the_same_batch() -> None:
    """Bugs 12878, 12892, 13029."""
    run = HandRun(7, 4)
    high = run.serve("ab")
    low = run.serve("cd")
    for block in low:
        run.offload(block)
    run.settle()
    run.serve("efgh")
    assert run.queued(PRIMARY)[1:3] == high[::-1], "next to be taken, and the first request takes more than the one empty block"
    first, second = run.add_all(run.request("cd"), run.request("ab"))
    assert first.blocks[:2] == low
    assert second.blocks[:2] == high
    assert (first.prepopulated, second.prepopulated) == (8, 8)
    assert run.compute(first)
    assert run.compute(second)
    run.finish()


def test_the_source_of_a_copy_is_not_evicted_by_the_batch_that_copies_it() -> None:
    """Bugs 12878, 12892, 13029."""
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


# -- the scheduler counted reusable blocks twice -----------------------------------------------------------------------


def test_what_a_request_was_said_to_need_is_what_it_takes() -> None:
    """Bugs 15065, 11731."""
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
    """Bugs 15065, 11731."""
    run = HandRun(4)
    run.serve("ab")
    requests = [run.request("ab"), run.request("ab")]
    assert [capacity.needed_blocks_one_step(run.ledger, request, False) for request in requests] == [3, 3]
    run.add_all(requests[0])
    assert capacity.needed_blocks_one_step(run.ledger, requests[1], False) == 1
    run.add_all(requests[1])
    assert run.free() == 0
    run.finish()


# -- orphaned blocks; a prompt was stored behind a predecessor that had been evicted -----------------------------------


def test_storing_behind_a_forgotten_predecessor_puts_the_sequences_own_block_there() -> None:
    """Bugs 12933, 15018."""
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
    """Bugs 12933, 15018."""
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


# -- wrong output with chunked prefill; blocks were stored whose tokens had not been computed --------------------------


def test_only_computed_tokens_are_stored_and_never_the_newest() -> None:
    """Bugs 12673, 12786, 12818."""
    run = HandRun(10)
    sequence = run.add("abc")  # 13 tokens
    for computed, stored in ((3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (13, 3)):
        assert run.compute(sequence, computed)
        run.driver.store_context(sequence.id)
        run.note()
        assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == stored
    run.finish()


def test_a_prompt_that_ends_at_a_block_boundary_stores_its_last_block_only_after_the_next_token() -> None:
    """Bugs 12673, 12786, 12818."""
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
    """Bugs 12673, 12786, 12818."""
    run = HandRun(6)
    sequence = run.add("abc")
    assert run.compute(sequence, 6)
    run.remove(sequence)
    again = run.add("abc")
    assert again.prepopulated == 6
    assert run.compute(again)
    run.finish()


def test_rejected_drafts_are_never_stored() -> None:
    """Bugs 12673, 12786, 12818."""
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


# -- a block was missing at a decode boundary --------------------------------------------------------------------------


def test_the_token_that_begins_a_block_finds_its_block_allocated() -> None:
    """Bug 13320."""
    run = HandRun(8)
    sequence = run.add([1, 2, 3], max_new_tokens=12)
    assert run.compute(sequence)
    for token in range(12):
        run.append(sequence, token)
        assert len(sequence.blocks) == -(-sequence.num_tokens // 4)
        assert len(set(sequence.blocks)) == len(sequence.blocks)
    run.finish()


def test_a_block_given_back_by_a_rewind_at_a_boundary_is_allocated_again() -> None:
    """Bug 13320."""
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


# -- releasing a subtree -----------------------------------------------------------------------------------------------


def test_forgetting_a_subtree_takes_each_of_its_blocks_once_on_whatever_level_and_no_held_one_out_of_use() -> None:
    """Bug 11173."""
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


# -- placeholders of sliding windows were treated like blocks --------------------------------------------------------------


def test_a_placeholder_is_never_queued_moved_stored_or_handed_out() -> None:
    """Bug 13346."""
    run = GroupRun(window(8, 9, 5, 8), full(9, 5, 8))
    for number in range(4):
        prompt = [number % 2, *range(50, 62)]
        sequence = run.add(prompt)
        run.store(sequence)
        run.append(sequence, *range(9))
        assert min(run.ids(sequence)) < 0, "so that the case means something"
        assert min(run.ids(sequence, 1)) >= 0
        assert run.free() == 9 - len(run.real_ids(sequence))
        lease = run.ledger.pin(sequence.id)
        run.release(sequence)
        run.ledger.release_lease(lease)
        run.settle()
    for allocator in run.ledger.allocators:
        placeholder = allocator.placeholder
        assert (placeholder.queue, placeholder.ref_count, placeholder.node) == (NOT_QUEUED, 0, None)
        assert all(placeholder not in allocator.queues.members(place) for place in (PRIMARY, SECONDARY, NVME))
        assert all(level_of(block.index) in (PRIMARY, SECONDARY, NVME) for block in allocator.blocks)
    assert {move.group for move in run.moves} == {0, 1}
    assert all(move.block_id >= 0 and move.source >= 0 and move.destination >= 0 for move in run.moves)
    run.finish()


def test_a_block_that_left_its_window_and_was_taken_is_not_stored_again_as_what_it_was() -> None:
    """Bug 13346."""
    run = GroupRun(window(8, 4))
    sequence = run.add(range(1000, 1011))
    run.store(sequence)
    departed = run.ids(sequence)[0]
    run.append(sequence, 1011)
    other = run.add(range(2000, 2008))
    assert departed in run.ids(other), "somebody else has the handle now"
    run.release(sequence)
    assert run.reuse(range(1000, 1004)) == 0
    assert run.ledger.block(departed).ref_count == 1
    run.release(other)
    assert run.reuse(range(2000, 2008)) == 7
    run.finish()


def test_what_has_left_a_window_may_be_missing_and_what_a_token_still_reads_may_not() -> None:
    """Bug 13346."""
    for missing, reused in ((0, 16), (1, 16), (2, 8), (3, 12)):
        run = GroupRun(window(8, 16))
        run.serve(range(17))
        run.evict(0, 4 * missing)
        assert run.reuse(range(17)) == reused
        run.finish()

"""Backings: a full block is immutable, so its lower copy stays good (design: ledger rules, backing)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hand_run import LAST, HandRun, ends, level, on_nvme, on_secondary, place, words

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.admission import AdmissionPlan
from kvtier.tiering.ledger.events import Removed, Updated
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.truncating import truncate


def test_a_promotion_keeps_the_secondary_copy_as_backing() -> None:
    run = HandRun(4, 2)
    [block] = on_secondary(run, "a")
    slot = place(block)
    sequence = run.add("a")
    [move] = [record for record in run.moves() if ends(record) == (SECONDARY, PRIMARY)]
    assert sequence.blocks[0] is block
    assert level(block) == PRIMARY
    backing = block.secondary_backing
    assert backing is not None
    assert place(backing) == slot == (level_of(move.source), slot_of(move.source))
    assert backing.owner is block
    assert not backing.has_content
    assert backing.ref_count == 0
    assert run.queued(SECONDARY)[-1] is backing
    run.finish()


def test_a_promotion_from_nvme_is_one_move_and_keeps_the_nvme_copy_as_backing() -> None:
    run = HandRun(4, 2, 2)
    [block] = on_nvme(run, "a")
    slot = place(block)
    key = run.key(block)
    before = len(run.moves())
    sequence = run.add("a")
    [move] = run.moves()[before:]
    assert ends(move) == (NVME, PRIMARY)
    assert move.key == key
    assert block.secondary_backing is None
    assert block.nvme_backing is not None
    assert place(block.nvme_backing) == slot
    assert run.compute(sequence)
    run.finish()


def test_evicting_a_backed_block_needs_no_move() -> None:
    run = HandRun(3, 2)
    [block] = on_secondary(run, "a")
    run.serve("a")
    assert level(block) == PRIMARY
    backing = block.secondary_backing
    assert backing is not None
    lower = place(backing)
    before = len(run.moves())
    run.add([1] * 9)  # three blocks: everything cached has to go
    assert run.moves()[before:] == []
    assert place(block) == lower
    assert block.secondary_backing is None
    assert backing.owner is None
    assert run.dropped() == 0
    run.finish()


def test_a_primary_victim_with_only_an_nvme_backing_goes_to_nvme_at_once() -> None:
    run = HandRun(3, 1, 2)
    [block] = on_nvme(run, "a")
    run.onboard(block)
    run.settle()
    assert level(block) == PRIMARY
    assert block.secondary_backing is None
    assert block.nvme_backing is not None
    lower = place(block.nvme_backing)
    before = len(run.moves())
    run.driver.events.consume()
    key = run.key(block)
    run.add([1] * 9)
    assert run.moves()[before:] == []
    assert place(block) == lower
    assert Updated(key, (PRIMARY, NVME)) in run.events()
    assert run.dropped() == 0
    run.finish()


def test_a_primary_victim_with_both_backings_goes_to_secondary_and_stays_clean() -> None:
    run = HandRun(3, 1, 2)
    [block] = on_secondary(run, "a")
    run.refresh()
    run.settle()
    nvme_copy = block.nvme_backing
    assert nvme_copy is not None
    run.onboard(block)
    run.settle()
    assert block.secondary_backing is not None
    assert block.nvme_backing is nvme_copy
    before = len(run.moves())
    run.offload(block)
    assert run.moves()[before:] == []
    assert level(block) == SECONDARY
    assert block.nvme_backing is nvme_copy
    run.finish()


def test_a_block_on_nvme_that_was_lowered_below_the_threshold_does_not_go_back_there() -> None:
    run = HandRun(3, 1, 2, secondary_offload_min_priority=20, nvme_offload_min_priority=35)
    [block] = on_nvme(run, "a")
    run.onboard(block)
    run.settle()
    run.set_priority(block, 34)
    before = len(run.moves())
    run.add([1] * 9)
    assert level(block) == SECONDARY
    assert [ends(move) for move in run.moves()[before:]] == [(PRIMARY, SECONDARY)]
    run.finish()


def test_a_secondary_backing_is_given_up_before_content() -> None:
    run = HandRun(6, 2)
    backed, other = on_secondary(run, "ab")
    run.onboard(backed)
    run.settle()
    assert backed.secondary_backing is not None
    slot = place(backed.secondary_backing)
    [newcomer] = run.serve("c")
    run.offload(newcomer)
    assert place(newcomer) == slot
    assert level(other) == SECONDARY
    assert backed.secondary_backing is None
    assert level(backed) == PRIMARY, "only its lower copy was given up"
    assert run.dropped() == 0
    run.finish()


def test_an_nvme_backing_of_a_primary_block_is_given_up_by_age_like_content() -> None:
    run = HandRun(6, 2, 2)
    backed, other = on_nvme(run, "ab")
    run.onboard(backed)
    run.settle()
    backing = backed.nvme_backing
    assert backing is not None
    slot = place(other)
    [newcomer] = on_secondary(run, "c")
    run.refresh()
    run.settle()
    assert newcomer.nvme_backing is not None
    assert place(newcomer.nvme_backing) == slot, "the block on NVMe was used before the one that came up"
    assert backed.nvme_backing is backing
    assert run.dropped() == 1
    assert level(backed) == PRIMARY
    run.finish()


def test_an_nvme_backing_goes_for_a_block_that_would_be_lost_whatever_colder_content_is_worth_more_than_both() -> None:
    run = HandRun(6, 2, 2)
    [precious] = on_nvme(run, "a", priority=80)
    [backed] = on_secondary(run, "b")
    run.refresh()
    run.settle()
    run.onboard(backed)
    run.settle()
    assert backed.nvme_backing is not None
    slot = place(backed.nvme_backing)
    [newcomer] = on_secondary(run, "c")
    run.refresh()
    run.settle()
    assert newcomer.nvme_backing is not None
    assert place(newcomer.nvme_backing) == slot
    assert (level(precious), level(backed)) == (NVME, PRIMARY), "only a lower copy was given up"
    assert run.dropped() == 0
    run.finish()


def test_an_empty_handle_is_taken_before_a_backing() -> None:
    run = HandRun(6, 2)
    [backed] = on_secondary(run, "a")
    run.onboard(backed)
    run.settle()
    [newcomer] = run.serve("c")
    run.offload(newcomer)
    assert backed.secondary_backing is not None
    assert place(newcomer) != place(backed.secondary_backing)
    run.finish()


def test_without_keep_backing_the_spare_is_released_empty_behind_the_other_empty_ones() -> None:
    run = HandRun(4, 3, keep_backing=False)
    [block] = on_secondary(run, "a")
    slot = place(block)
    run.onboard(block)
    run.settle()
    assert block.secondary_backing is None
    spare = run.queued(SECONDARY)[-1]
    assert place(spare) == slot
    assert spare.owner is None
    assert len(run.queued(SECONDARY)) == 3
    assert run.content(SECONDARY) == []
    run.finish()


@pytest.mark.parametrize("keep_backing", [True, False])
def test_what_is_computed_again_keeps_its_nvme_copy_as_backing_or_deletes_its_row(keep_backing: bool) -> None:
    class NothingIsWorthLoading:
        def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
            return 0

    run = HandRun(4, 2, 2, keep_backing=keep_backing)
    [block] = on_nvme(run, "a")
    slot = slot_of(block.index)
    run.ledger.loading = NothingIsWorthLoading()
    before = len(run.moves())
    run.serve("a")
    assert (level(block), run.moves()[before:]) == (PRIMARY, []), "the computed block has taken its place, without a copy"
    backing = block.nvme_backing
    assert (backing is not None and place(backing) == (NVME, slot)) == keep_backing
    assert (slot in run.tier.rows) == keep_backing, "the next process finds what this one knows of"
    truncate(run.ledger, run.request("a"), 0)
    run.settle()
    assert run.tier.rows == {}, "what was forgotten does not come back with the next process"
    run.finish()


def test_of_what_is_computed_again_only_the_prompt_has_the_prompts_retention() -> None:
    class NothingIsWorthLoading:
        def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
            return 0

    run = HandRun(8, 4)
    blocks = on_secondary(run, "abc")
    run.ledger.loading = NothingIsWorthLoading()
    sequence = run.add(words("abc")[:6], retention=RetentionConfig([TokenRange(0, None, 80)], decode_priority=20))
    run.append(sequence, *words("abc")[6:], LAST)
    run.remove(sequence)
    assert [level(block) for block in blocks] == [PRIMARY] * 3, "the computed blocks have taken their places"
    assert [block.priority for block in blocks] == [80, 80, 20]
    run.finish()


def test_without_keep_backing_every_eviction_costs_a_move() -> None:
    run = HandRun(3, 2, keep_backing=False)
    [block] = on_secondary(run, "a")
    run.serve("a")
    before = len(run.moves())
    run.add([1] * 9)
    assert [ends(move) for move in run.moves()[before:]] == [(PRIMARY, SECONDARY)]
    assert level(block) == SECONDARY
    run.finish()


def test_only_full_blocks_get_backings() -> None:
    run = HandRun(4, 2, 2)
    [tail] = run.serve([1, 2, 3])  # two tokens are stored
    assert tail.num_tokens == 2
    run.offload(tail)
    run.settle()
    assert level(tail) == SECONDARY
    before = len(run.moves())
    run.refresh()
    run.ledger.write_everything_out()
    run.note()
    assert run.moves()[before:] == [], "a partial block is not written to NVMe"
    run.onboard(tail)
    run.settle()
    assert level(tail) == PRIMARY
    assert tail.secondary_backing is None
    assert tail.nvme_backing is None
    assert len(run.queued(SECONDARY)) == 2
    run.finish()


def test_in_place_partial_reuse_publishes_removed_and_drops_the_backings() -> None:
    run = HandRun(4, 2, 2)
    [block] = on_secondary(run, "a")
    run.refresh()
    run.settle()
    run.onboard(block)
    run.settle()
    secondary_copy, nvme_copy = block.secondary_backing, block.nvme_backing
    assert secondary_copy is not None
    assert nvme_copy is not None
    key = run.key(block)
    run.driver.events.consume()
    sequence = run.add([*words("a")[:2], 5, 5, 5])
    assert sequence.blocks[0] is block
    assert sequence.prepopulated == 2
    assert run.removed_hashes() == [key]
    assert block.node is None
    assert block.secondary_backing is None
    assert block.nvme_backing is None
    assert secondary_copy.owner is None
    assert nvme_copy.owner is None
    assert run.compute(sequence)
    run.settle()
    assert run.tier.rows == {}, "the row of what was overwritten is deleted"
    run.finish()


def test_in_place_partial_reuse_of_a_secondary_block_promotes_it_without_a_backing() -> None:
    run = HandRun(4, 2)
    [block] = on_secondary(run, "a")
    run.driver.events.consume()
    key = run.key(block)
    sequence = run.add([*words("a")[:3], 5, 5])
    assert sequence.blocks[0] is block
    assert level(block) == PRIMARY
    assert block.secondary_backing is None
    assert run.events() == [Removed((key,))], "what has left the tree is not updated any more"
    assert run.compute(sequence)
    run.finish()


def test_appending_to_a_stored_tail_drops_its_place_in_the_tree_and_publishes_removed() -> None:
    run = HandRun(4, 2)
    sequence = run.add([1, 2, 3, 4, 5, 6])
    assert run.compute(sequence)
    run.remove(sequence)
    tail = sequence.blocks[1]
    assert tail.num_tokens == 1
    run.driver.events.consume()
    key = run.key(tail)
    again = run.add([1, 2, 3, 4, 5, 9, 9])
    assert again.blocks[1] is tail
    assert run.removed_hashes() == [key]
    run.finish()


def rewound(run: HandRun) -> ActiveSequence:
    """A sequence whose second, stored block has been rewound into: two of its four tokens are left."""
    sequence = run.add("a", max_new_tokens=20)
    assert run.compute(sequence)
    run.append(sequence, 1, 2, 3, 4)
    run.driver.store_context(sequence.id)
    run.note()
    assert sequence.blocks[1].num_tokens == 4
    return sequence


def test_writing_after_a_rewind_into_a_stored_block_takes_it_out_of_the_tree_first() -> None:
    run = HandRun(6)
    sequence = rewound(run)
    block = sequence.blocks[1]
    key = run.key(block)
    run.driver.events.consume()
    run.driver.rewind(sequence.id, 2)
    run.note()
    run.append(sequence, 5, 6)
    assert sequence.blocks[1] is block
    assert block.node is None
    assert run.removed_hashes() == [key]
    assert run.moves() == []
    run.finish()


def test_writing_after_a_rewind_into_a_block_that_another_sequence_holds_copies_it_first() -> None:
    run = HandRun(8)
    sequence = rewound(run)
    block = sequence.blocks[1]
    other = run.add([*words("a"), LAST, 1, 2, 3, 9])
    assert other.blocks[1] is block
    run.driver.rewind(sequence.id, 2)
    run.note()
    run.append(sequence, 5, 6)
    assert sequence.blocks[1] is not block
    assert [ends(move) for move in run.moves()] == [(PRIMARY, PRIMARY)]
    assert block.node is not None
    assert block.ref_count == 1
    assert run.compute(other)
    run.finish()

"""A failure that comes late never touches a slot's next owner: Moves carry the slot's write generation (design: all or nothing)."""

from __future__ import annotations

import pytest
from hand_run import HandRun, expect_lost, level, on_secondary, pending

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import PRIMARY, SECONDARY, slot_of
from kvtier.tiering.ledger.moves import Move


def test_a_late_failure_of_an_offload_never_touches_the_slots_next_owner() -> None:
    run = HandRun(6, 1)
    [old] = run.serve("a")
    [new] = run.serve("b")
    [first] = run.offload(old)
    [second] = run.offload(new)
    assert isinstance(first, Move)
    assert isinstance(second, Move)
    assert first.destination == second.destination
    assert first.destination_generation != second.destination_generation
    assert old.node is None
    run.carry_out(first, fails=True)
    run.carry_out(second)
    run.report(second)
    run.report(first)
    assert new.node is not None
    assert level(new) == SECONDARY
    assert run.ledger.counters.lost == 0
    sequence = run.add("b")
    assert sequence.prepopulated == 4
    assert run.compute(sequence)
    run.finish()


@pytest.mark.parametrize("store", [True, False])
def test_a_late_failure_of_a_promotion_never_touches_the_slots_next_owner(store: bool) -> None:
    run = HandRun(2, 1, keep_backing=False)
    [block] = on_secondary(run, "a")
    sequence = run.add("a")
    move = pending(run, SECONDARY, PRIMARY)
    slot = slot_of(move.destination)
    run.remove(sequence, store=store)
    run.ledger.allocators[0].forget(block)
    run.note()
    owner = run.add([1] * 8)
    assert slot in [slot_of(held.index) for held in owner.blocks]
    run.end(move, fails=True)
    assert not owner.must_report
    assert run.ledger.counters.lost == 0
    assert run.compute(owner)
    run.remove(owner)
    assert run.add([1] * 8).prepopulated == 7
    run.finish()


def test_a_late_failure_never_touches_the_same_handle_in_a_later_life() -> None:
    run = HandRun(2, 1, keep_backing=False)
    [block] = on_secondary(run, "a")
    sequence = run.add("a")
    move = pending(run, SECONDARY, PRIMARY)
    run.remove(sequence, store=False)
    run.ledger.allocators[0].forget(block)
    run.note()
    owner = run.add([1])
    assert owner.blocks == [block], "given back last, taken first"
    run.end(move, fails=True)
    assert not owner.must_report
    assert owner.blocks == [block]
    assert run.compute(owner)
    run.finish()


def test_a_block_computed_again_after_a_failure_is_not_lost_when_its_dependents_report() -> None:
    run = HandRun(2, 1)
    [block] = run.serve("a")
    [down] = run.offload(block)
    sequence = run.add("a")
    up = pending(run, SECONDARY, PRIMARY)
    assert isinstance(down, Move)
    run.carry_out(down, fails=True)
    run.carry_out(up)
    run.report(up)
    expect_lost(sequence, 0)
    assert run.compute(sequence)
    assert sequence.computed == 5
    if run.tier.ended:
        run.report(down)
    assert sequence.computed == 5
    assert not sequence.must_report
    run.remove(sequence)
    assert block.node is not None
    run.settle()
    [again] = run.offload(block)
    assert isinstance(again, Move)
    assert (again.source, again.source_generation) != (up.destination, up.destination_generation), "what was written since is good"
    run.settle()
    assert level(block) == SECONDARY
    assert block.node is not None
    run.finish()


def test_what_was_generated_is_computed_again_into_blocks_of_its_own_retention() -> None:
    """A range without an end goes to the end of the prompt: what is generated, and deliberately low, is worth no more for being lost."""
    retention = RetentionConfig([TokenRange(0, None, 80)], decode_priority=5, decode_duration_seconds=3.0)
    run = HandRun(16)
    sequence = run.add("a", retention=retention)
    run.compute(sequence)
    run.append(sequence, *range(4))
    lease = run.ledger.pin(sequence.id)
    run.driver.rewind(sequence.id, 3)
    run.note()
    [copy] = run.tier.waiting
    assert isinstance(copy, Move)
    run.driver.append_step([sequence.id], [[1] * 6])
    other = run.ledger.pin(sequence.id)
    run.end(copy, fails=True)
    assert sequence.must_report
    assert sequence.computed == 4
    assert [(block.priority, block.duration) for block in sequence.blocks] == [(80, 0.0), (80, 0.0), (5, 3.0)]
    run.ledger.release_lease(lease)
    run.ledger.release_lease(other)
    run.finish()

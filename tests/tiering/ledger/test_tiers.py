"""Steps down are earned and never cost anybody of higher priority a place (design: ledger rules; transfer rules)."""

from __future__ import annotations

import pytest
from hand_run import HandRun, at_priority, ends, level, on_nvme, on_secondary

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger.events import Updated
from kvtier.tiering.ledger.moves import Move

# -- thresholds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priority", "goes_down"), [(50, True), (49, False)])
def test_case_A4_the_step_to_secondary_is_earned_exactly_at_the_threshold(priority: int, goes_down: bool) -> None:
    run = HandRun(3, 3, secondary_offload_min_priority=50)
    [block] = run.serve("a", priority=priority)
    key = run.key(block)
    run.driver.events.consume()
    run.add([1] * 9)
    assert (level(block) == SECONDARY) == goes_down
    assert (block.node is not None) == goes_down
    assert run.dropped() == run.ledger.counters.dropped_priority == (0 if goes_down else 1)
    assert [ends(move) for move in run.moves()] == ([(PRIMARY, SECONDARY)] if goes_down else [])
    assert run.removed_hashes() == ([] if goes_down else [key])
    run.finish()


def test_what_has_a_duration_and_has_not_earned_the_step_is_counted_as_such_too() -> None:
    run = HandRun(3, 3)
    run.serve("a", retention=RetentionConfig([TokenRange(0, None, 10, 60.0)]))
    run.add([1] * 9)
    assert run.dropped() == run.ledger.counters.dropped_priority == 1
    run.finish()


@pytest.mark.parametrize(("priority", "goes_down"), [(50, True), (49, False)])
def test_the_step_to_nvme_is_earned_exactly_at_the_threshold(priority: int, goes_down: bool) -> None:
    run = HandRun(3, 1, 3, secondary_offload_min_priority=20, nvme_offload_min_priority=50)
    [block] = on_secondary(run, "a", priority=priority)
    run.refresh()
    run.settle()
    run.ledger.write_everything_out()
    run.settle()
    assert (block.nvme_backing is not None) == goes_down
    [other] = run.serve("b", priority=100)
    run.offload(other)
    assert (level(block) == NVME) == goes_down
    assert (block.node is not None) == goes_down
    assert run.dropped() == run.ledger.counters.dropped_priority == (0 if goes_down else 1)
    run.settle()
    assert (SECONDARY, NVME) in [ends(move) for move in run.moves()] or not goes_down
    run.finish()


def test_a_low_block_never_reaches_nvme_by_any_path() -> None:
    run = HandRun(3, 2, 4, secondary_offload_min_priority=10, nvme_offload_min_priority=35)
    for letter in "abcdefgh":
        run.serve(letter, priority=34)
        run.refresh()
        run.ledger.write_everything_out()
        run.settle()
    assert run.content(SECONDARY), "low blocks do reach the secondary level"
    assert not any(NVME in ends(move) for move in run.moves())
    assert run.content(NVME) == []
    assert run.tier.rows == {}
    run.finish()


def test_a_block_below_the_secondary_threshold_does_not_reach_nvme_by_a_flush_either() -> None:
    run = HandRun(3, 2, 4, secondary_offload_min_priority=50, nvme_offload_min_priority=35)
    run.serve("a", priority=49)
    run.ledger.write_everything_out()
    run.note()
    assert run.moves() == []
    run.finish()


def test_a_written_block_that_was_lowered_since_is_dropped_instead_of_going_to_nvme() -> None:
    run = HandRun(4, 1, 2, secondary_offload_min_priority=10, nvme_offload_min_priority=35)
    [block] = on_secondary(run, "a")
    run.refresh()
    run.settle()
    assert block.nvme_backing is not None
    run.set_priority(block, 34)
    [other] = run.serve("b", priority=90)
    run.offload(other)
    assert block.node is None
    assert run.dropped() == 1
    run.settle()
    assert run.tier.rows == {}
    run.finish()


# -- spills ------------------------------------------------------------------------------------------------------------


def test_a_spill_never_displaces_a_higher_priority_and_is_dropped_and_counted() -> None:
    run = HandRun(3, 1)
    [precious] = on_secondary(run, "a", priority=60)
    [plain] = run.serve("b", priority=59)
    before = len(run.moves())
    key = run.key(plain)
    run.driver.events.consume()
    run.add([1] * 9)
    assert level(precious) == SECONDARY
    assert precious.node is not None
    assert plain.node is None
    assert run.dropped() == 1
    assert run.moves()[before:] == []
    assert run.removed_hashes() == [key]
    run.finish()


def test_a_spill_displaces_content_of_its_own_priority() -> None:
    run = HandRun(3, 1)
    [older] = on_secondary(run, "a", priority=60)
    [newer] = run.serve("b", priority=60)
    run.add([1] * 9)
    assert level(newer) == SECONDARY
    assert newer.node is not None
    assert older.node is None
    assert run.dropped() == 1
    run.finish()


def test_a_write_to_nvme_never_displaces_a_higher_priority() -> None:
    run = HandRun(6, 1, 1)
    [precious] = on_nvme(run, "a", priority=60)
    [plain] = on_secondary(run, "b", priority=59)
    before = len(run.moves())
    run.refresh()
    run.ledger.write_everything_out()
    run.note()
    assert run.moves()[before:] == []
    assert level(precious) == NVME
    assert plain.nvme_backing is None
    run.finish()


def test_a_write_to_nvme_displaces_content_of_its_own_priority_and_counts_it_as_dropped() -> None:
    run = HandRun(6, 1, 1)
    [older] = on_nvme(run, "a", priority=60)
    old_key = run.key(older)
    [newer] = on_secondary(run, "b", priority=60)
    run.driver.events.consume()
    dropped = run.dropped()
    run.refresh()
    assert run.removed_hashes() == [old_key]
    assert run.dropped() == dropped + 1
    run.settle()
    assert newer.nvme_backing is not None
    assert run.tier.rows == {0: run.key(newer)}
    run.finish()


def test_a_secondary_victim_without_an_nvme_backing_is_dropped_and_counted() -> None:
    run = HandRun(3, 1, 4)
    [victim] = on_secondary(run, "a")
    [newcomer] = run.serve("b")
    before = len(run.moves())
    run.add([1] * 9)
    assert victim.node is None
    assert run.dropped() == 1
    assert level(newcomer) == SECONDARY
    assert [ends(move) for move in run.moves()[before:]] == [(PRIMARY, SECONDARY)], "nothing waits for NVMe"
    run.finish()


def test_a_secondary_victim_with_an_nvme_backing_goes_there_without_a_move() -> None:
    run = HandRun(3, 1, 4)
    [victim] = on_secondary(run, "a")
    run.refresh()
    run.settle()
    [newcomer] = run.serve("b")
    before = len(run.moves())
    run.add([1] * 9)
    assert level(victim) == NVME
    assert victim.node is not None
    assert run.dropped() == 0
    assert level(newcomer) == SECONDARY
    assert [ends(move) for move in run.moves()[before:]] == [(PRIMARY, SECONDARY)]
    run.finish()


def test_an_allocation_does_not_wait_for_a_secondary_block_that_is_being_written() -> None:
    run = HandRun(3, 1, 4)
    [written] = on_secondary(run, "a")
    [newcomer] = run.serve("b")
    [write] = run.refresh()
    assert ends(write) == (SECONDARY, NVME)
    sequence = run.add([1] * 9)
    assert newcomer.node is None
    assert run.dropped() == 1
    assert level(written) == SECONDARY
    assert sequence.num_tokens == 9
    run.settle()
    assert written.nvme_backing is not None
    run.finish()


def test_an_explicit_offload_obeys_the_order_of_priorities_like_any_spill() -> None:
    run = HandRun(4, 1)
    on_secondary(run, "a", priority=60)
    sequence = run.add("b", retention=at_priority(59))
    assert run.compute(sequence)
    run.remove(sequence)
    error = run.no_room(lambda: run.ledger.offload(sequence.blocks[0].id))
    assert "priority 59" in str(error)
    run.finish()


# -- within one call ---------------------------------------------------------------------------------------------------


def test_spares_of_promotions_are_not_taken_within_the_call() -> None:
    run = HandRun(4, 2)
    first, second = on_secondary(run, "ab")
    cached = [run.serve(letter)[0] for letter in "cde"]
    before = len(run.moves())
    sequence = run.add("ab")  # two promotions and a new block; one empty handle is there, so cached content has to go
    assert sequence.blocks[:2] == [first, second]
    moves = run.moves()[before:]
    assert [ends(move) for move in moves] == [(SECONDARY, PRIMARY)] * 2
    assert run.dropped() == 2, "victims cannot go where the call still reads"
    assert [block.node is not None for block in cached] == [False, False, True]
    assert first.secondary_backing is not None
    assert second.secondary_backing is not None
    assert len(run.queued(SECONDARY)) == 2, "the call over, the spares are queued"
    run.finish()


def test_no_move_of_a_call_writes_where_another_move_of_it_reads() -> None:
    run = HandRun(5, 4, keep_backing=False)
    on_secondary(run, "ab")
    for letter in "cdef":
        run.serve(letter)
    before = len(run.moves())
    run.add("abz")
    moves = run.moves()[before:]
    assert (SECONDARY, PRIMARY) in [ends(move) for move in moves]
    assert (PRIMARY, SECONDARY) in [ends(move) for move in moves]
    read_from_below = {move.source for move in moves if ends(move) == (SECONDARY, PRIMARY)}
    assert not read_from_below & {move.destination for move in moves}
    run.finish()


def test_an_offload_publishes_the_change_of_level_and_keeps_the_priority() -> None:
    run = HandRun(3, 1)
    [block] = run.serve("a", priority=70)
    run.driver.events.consume()
    run.offload(block)
    assert run.events() == [Updated(run.key(block), (PRIMARY, SECONDARY))]
    assert block.priority == 70
    run.finish()


def test_what_is_left_of_a_duration_goes_on_below() -> None:
    run = HandRun(3, 1)
    [block] = run.serve("a", retention=RetentionConfig([TokenRange(0, None, 80, 10.0)]))
    run.refresh(6.0)
    run.offload(block)
    run.settle()
    run.refresh(9.9)
    assert block.priority == 80
    run.refresh(10.0)
    assert block.priority == 35
    assert level(block) == SECONDARY
    run.finish()


def test_the_priority_of_the_step_down_travels_with_its_move() -> None:
    run = HandRun(3, 1, 2)
    [block] = on_secondary(run, "a", priority=70)
    [write] = run.refresh()
    assert isinstance(write, Move)
    assert write.priority == 70
    assert write.key == run.key(block)
    run.finish()

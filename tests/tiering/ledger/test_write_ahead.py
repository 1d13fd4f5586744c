"""Writing ahead to NVMe: what is written, when, and what stays usable meanwhile (design: transfer rules)."""

from __future__ import annotations

from hand_run import HandRun, ends, is_queued, level, on_nvme, on_secondary

from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger.at_once import no_moves, write_ahead_at_once
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.truncating import truncate


def test_write_ahead_starts_with_the_coldest_and_keeps_to_its_share() -> None:
    run = HandRun(6, 4, 8, write_ahead_share=0.5)
    blocks = [on_secondary(run, letter, priority=priority)[0] for letter, priority in (("a", 80), ("b", 40), ("c", 40), ("d", 60))]
    writes = [record for record in run.refresh() if isinstance(record, Move)]
    assert [move.block_id for move in writes] == [blocks[1].id, blocks[2].id]
    assert [ends(move) for move in writes] == [(SECONDARY, NVME)] * 2
    run.settle()
    assert run.refresh() == [], "the share is clean"
    run.finish()


def test_a_written_block_returns_to_its_place_in_the_queue() -> None:
    run = HandRun(6, 3, 6, write_ahead_share=0.3)
    order = [on_secondary(run, letter)[0] for letter in "abc"]
    assert run.content(SECONDARY) == order
    [write] = run.refresh()
    assert isinstance(write, Move)
    assert write.block_id == order[0].id
    assert run.content(SECONDARY) == order[1:], "it is in no queue while its slot is being read"
    run.end(write)
    assert run.content(SECONDARY) == order
    assert order[0].nvme_backing is not None
    run.finish()


def test_handles_with_a_transfer_to_or_from_nvme_are_in_no_queue_until_it_ended() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_secondary(run, "a")
    [write] = run.refresh()
    assert isinstance(write, Move)
    target = block.nvme_backing
    assert target is not None
    assert not is_queued(block)
    assert not is_queued(target)
    assert run.free(SECONDARY) == 0
    assert run.free(NVME) == 1
    run.carry_out(write)
    assert not is_queued(block), "carried out is not yet reported"
    run.report(write)
    assert is_queued(block)
    assert is_queued(target)

    [other] = run.serve("b", priority=100)
    run.offload(other)
    run.settle()
    assert level(block) == NVME
    [read] = run.onboard(block)
    assert isinstance(read, Move)
    spare = block.nvme_backing
    assert spare is not None
    assert not is_queued(block)
    assert not is_queued(spare)
    assert run.free(PRIMARY) == 3
    run.end(read)
    assert is_queued(block)
    assert is_queued(spare)
    run.finish()


def test_a_block_that_is_released_while_it_is_being_read_from_nvme_is_queued_when_the_read_has_ended() -> None:
    run = HandRun(4, 1, 2)
    [block] = on_nvme(run, "a")
    sequence = run.add("a")
    [read] = run.tier.waiting
    assert isinstance(read, Move)
    run.remove(sequence, store=False)
    assert block.ref_count == 0
    assert not is_queued(block)
    run.end(read)
    assert is_queued(block)
    assert block.node is not None
    run.finish()


def test_nothing_is_written_ahead_while_nvme_takes_no_writes() -> None:
    run = HandRun(4, 1, 2)
    on_secondary(run, "a")
    run.ledger.refresh(0.0, may_write=False)
    assert run.note() == []
    assert [ends(record) for record in run.refresh()] == [(SECONDARY, NVME)]
    run.finish()


def test_what_leaves_nvme_makes_room_for_what_was_not_worth_it_before() -> None:
    """Whoever looked once, and found nothing to write, looks again."""
    run = HandRun(6, 2, 1)
    on_nvme(run, "a", priority=80)
    [waiting] = on_secondary(run, "b")
    assert run.refresh() == [], "what is on NVMe is worth more"
    truncate(run.ledger, run.request("a"), 0)
    assert len(run.note()) == 1
    assert [ends(record) for record in run.refresh()] == [(SECONDARY, NVME)]
    run.settle()
    assert waiting.nvme_backing is not None
    run.finish()


def test_a_flush_writes_primary_content_through_a_secondary_backing_and_leaves_it_where_it_is() -> None:
    run = HandRun(4, 2, 4)
    [block] = run.serve("a")
    for _ in range(4):
        if run.ledger.write_everything_out():
            break
        run.settle()
    run.settle()
    assert run.ledger.write_everything_out()
    assert level(block) == PRIMARY
    assert block.secondary_backing is not None
    assert block.nvme_backing is not None
    assert [ends(move) for move in run.moves()] == [(PRIMARY, SECONDARY), (SECONDARY, NVME)]
    run.finish()


def test_writes_that_end_at_once_go_on_where_too_many_were_in_flight_and_go_where_the_others_go() -> None:
    """Of seventy blocks 64 are written at a time; the slots tell the order."""
    letters = "".join(chr(ord("a") + number) for number in range(70))
    one_by_one, at_once = HandRun(80, 80, 160), HandRun(80, 80, 160)
    blocks = on_secondary(one_by_one, letters)
    while writes := one_by_one.refresh():
        assert len(writes) <= 64
        one_by_one.settle()
    others = on_secondary(at_once, letters)
    counts = no_moves()
    write_ahead_at_once(at_once.ledger, 0.0, counts)
    assert counts[SECONDARY][NVME] == len(letters)
    slots = [[None if block.nvme_backing is None else block.nvme_backing.index for block in row] for row in (blocks, others)]
    assert slots[0] == slots[1]
    assert None not in slots[0]
    assert not at_once.ledger.allocators[0].left_over
    one_by_one.finish()

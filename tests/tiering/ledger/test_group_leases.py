"""Pins, and storing with a pin, over several groups and beams (4 tokens per block)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, recurrent, window
from hand_run import HandRun, is_queued, on_nvme, place

from kvtier.errors import CapacityError, RequestError, UnknownRequest
from kvtier.pools.pool_index import NVME, SECONDARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import GroupSpec


def test_a_pin_holds_every_block_of_every_group_once_and_no_placeholder() -> None:
    run = GroupRun(window(8, 24), full(24), recurrent(8, 24))
    sequence = run.add(range(9))
    run.append(sequence, *range(10))
    lease = run.ledger.pin(sequence.id)
    for group in range(3):
        assert {block.id for block in lease.rows[group]} == run.real_ids(sequence, group)
    assert all(block.id >= 0 for row in lease.rows for block in row)
    run.check()
    run.ledger.release_lease(lease)
    run.finish()


def test_a_pin_of_beams_holds_shared_blocks_once_and_private_ones_too() -> None:
    run = GroupRun(window(8, 40), full(40))
    sequence = run.add(range(6), beam_width=3)
    run.append(sequence, *[(1, 2, 3)] * 4)
    lease = run.ledger.pin(sequence.id)
    ids = [block.id for block in lease.rows[1]]
    assert len(ids) == len(set(ids)) == 1 + 3 * 2
    run.drop(sequence)
    assert run.free(1) == 40 - 7
    run.ledger.release_lease(lease)
    run.finish()


def test_what_a_pin_holds_stays_when_it_leaves_the_window() -> None:
    run = GroupRun(window(8, 24))
    sequence = run.add(range(9))
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    head = lease.rows[0][0]
    run.append(sequence, *range(12))
    assert head.id not in run.real_ids(sequence)
    assert head.ref_count == 1
    run.ledger.release_lease(lease)
    run.settle()
    assert head.ref_count == 0
    run.finish()


def test_pins_are_released_in_any_order_and_after_the_sequence_ended() -> None:
    run = GroupRun(window(8, 24), full(24))
    sequence = run.add(range(9))
    assert run.compute(sequence)
    leases = [run.ledger.pin(sequence.id) for _ in range(3)]
    run.release(sequence)
    for lease in (leases[1], leases[0]):
        run.ledger.release_lease(lease)
        run.settle()
        assert run.free(1) == 24 - 3
    run.ledger.release_lease(leases[2])
    run.finish()


def test_a_lease_ends_once_whatever_happened_to_its_sequence() -> None:
    run = GroupRun(window(8, 24), full(24))
    sequence = run.add(range(9))
    lease = run.ledger.pin(sequence.id)
    run.drop(sequence)
    run.ledger.release_lease(lease)
    run.refused(RequestError, lambda: run.ledger.release_lease(lease))
    run.refused(UnknownRequest, lambda: run.ledger.pin(sequence.id))
    run.refused(UnknownRequest, lambda: run.driver.store_and_pin(sequence.id))
    run.finish()


def test_storing_with_a_pin_holds_the_trees_block_rather_than_the_own_duplicate() -> None:
    run = GroupRun(window(8, 24), full(24))
    run.serve(range(9))
    stored = {block.id for block in run.ledger.allocators[1].blocks if block.node is not None}
    twin = run.add(range(9), skip_read=True)
    assert run.compute(twin)
    lease = run.driver.store_and_pin(twin.id)
    for group in range(2):
        assert {block.id for block in lease.rows[group]} == stored
        assert run.real_ids(twin, group).isdisjoint(stored)
    run.drop(twin)
    assert run.free(1) == 24 - 2
    run.ledger.release_lease(lease)
    run.finish()


def test_what_is_stored_with_a_pin_is_found_however_much_is_taken_afterwards() -> None:
    run = GroupRun(window(8, 8), full(8))
    sequence = run.add(range(9))
    assert run.compute(sequence)
    lease = run.driver.store_and_pin(sequence.id)
    run.drop(sequence)
    for start in range(100, 1000, 100):
        run.serve(range(start, start + 21))
    assert run.reuse(range(9)) == 8
    with pytest.raises(CapacityError):
        run.ledger.add_sequences([run.request(range(500, 530))])
    run.ledger.release_lease(lease)
    run.finish()


def test_a_stored_block_on_the_secondary_level_is_held_there() -> None:
    run = GroupRun(full(12, 4))
    run.serve(range(9))
    run.ledger.offload(0)
    run.settle()
    twin = run.add(range(9), skip_read=True)
    assert run.compute(twin)
    lease = run.driver.store_and_pin(twin.id)
    assert level_of(run.ledger.block(0).index) == SECONDARY
    assert run.ledger.block(0) in lease.rows[0]
    run.drop(twin)
    assert run.reuse(range(9)) == 8, "it may come up while it is held"
    run.ledger.release_lease(lease)
    run.finish()


@pytest.mark.parametrize("groups", [[full(12, 4)], [full(12, 4), window(16, 12, 4)]])
def test_a_block_that_is_held_on_the_secondary_level_still_costs_a_primary_one(groups: list[GroupSpec]) -> None:
    run = GroupRun(*groups)
    run.serve(range(9))
    run.ledger.offload(0)
    run.settle()
    twin = run.add(range(9), skip_read=True)
    assert run.compute(twin)
    lease = run.driver.store_and_pin(twin.id)
    request = run.request(range(9))
    reuse = capacity.match(run.ledger, request)
    assert (reuse.reusable_blocks, reuse.referenced_blocks, reuse.unreferenced_by_group[0]) == (2, 1, 1)
    needed = [capacity.needed_blocks_one_step(run.ledger, request, False, group) for group in range(len(groups))]
    free = [run.free(group) for group in range(len(groups))]
    run.add_all(request)
    assert [before - run.free(group) for group, before in enumerate(free)] == needed
    run.ledger.release_lease(lease)
    run.finish()


def test_storing_with_a_pin_holds_the_partial_tail_in_every_group() -> None:
    run = GroupRun(window(8, 24), full(24))
    sequence = run.add(range(11))
    assert run.compute(sequence)
    lease = run.driver.store_and_pin(sequence.id)
    assert [len(row) for row in lease.rows] == [3, 3]
    run.append(sequence, 11)  # the tail is held and stored: it is copied before it is written
    assert run.ids(sequence, 1)[2] != lease.rows[1][2].id
    run.release(sequence)
    run.ledger.release_lease(lease)
    run.finish()


def test_storing_with_a_pin_stores_what_was_computed_and_no_more() -> None:
    run = GroupRun(full(24))
    sequence = run.add(range(20))
    assert run.compute(sequence, 9)
    lease = run.driver.store_and_pin(sequence.id)
    assert [block.num_tokens for block in lease.rows[0]] == [4, 4, 1]
    run.ledger.release_lease(lease)
    run.finish()


def test_a_reset_waits_for_leases() -> None:
    run = GroupRun(window(8, 24), full(24))
    sequence = run.add(range(9))
    lease = run.ledger.pin(sequence.id)
    run.drop(sequence)
    run.refused(RequestError, run.ledger.reset)
    run.ledger.release_lease(lease)
    run.ledger.reset()
    run.finish()


# -- what a lease holds on NVMe --------------------------------------------------------------------------------------------


def test_a_slot_found_bad_while_a_lease_holds_what_it_held_is_never_used_again_and_the_lease_knows() -> None:
    run = HandRun(6, 2, 4)
    block, sound = on_nvme(run, "ab")
    slot = place(block)[1]
    sequence = run.add("ab", skip_read=True)
    run.compute(sequence)
    lease = run.driver.store_and_pin(sequence.id)
    assert [held.id for held in lease.rows[0]] == [block.id, sound.id], "the tree has these, on NVMe"
    run.tier.quarantine(slot)
    run.ledger.condemn(0, slot)
    run.note()
    assert lease.lost_ids == [{block.id}]
    run.ledger.release_lease(lease)
    run.note()
    assert not is_queued(block)
    assert is_queued(sound)
    assert run.free(NVME) == 3
    run.finish()

"""Reads of neighbouring NVMe slots: one call for several, and each block still has its own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.errors import TransferError
from kvtier.pools.pool_index import SLOT_STEP, pool_index
from kvtier.tiering import hang_watch

Make = Callable[..., Any]


def P(slot: int) -> int:
    return pool_index(0, slot)


def N(slot: int) -> int:
    return pool_index(2, slot)


def queue_reads(rig: Any, slots: list[int]) -> dict[int, Any]:
    """Read these slots into primary slots 1, 2, ..., all queued before the only reader, busy with another one, comes to them."""
    for slot in [*slots, 15]:
        rig.fill(N(slot), slot + 1)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N(15), P(0))])
    while not rig.store.reads_running:
        threading.Event().wait(0.001)
    rig.transfers.issue([rig.move(N(slot), P(number + 1)) for number, slot in enumerate(slots)])
    rig.store.read_gate.set()
    results: dict[int, Any] = rig.settle()
    return results


@pytest.fixture
def rig(make_rig: Make) -> Any:
    return make_rig(primary=16, ahead=3, read_threads=1, staging_blocks=8)


@pytest.mark.parametrize(("slots", "runs"), [
    ([2, 3, 4], [(2, 3)]),
    ([4, 3, 2], [(2, 3)]),                  # a prefix whose tail was written first
    ([2, 3, 4, 5, 6], [(2, 3), (5, 2)]),    # no more than the store takes
    ([2, 3, 7, 8], [(2, 2), (7, 2)]),
    ([2, 3, 2, 3], None),                   # forth and back: whatever, but every block arrives
    ([2, 4, 6], []),
], ids=str)
def test_neighbours_are_read_together_and_arrive_where_they_belong(rig: Any, slots: list[int], runs: list[tuple[int, int]] | None) -> None:
    results = queue_reads(rig, slots)
    assert all(result.error is None for result in results.values())
    assert [rig.value(P(number + 1)) for number in range(len(slots))] == [slot + 1 for slot in slots]
    assert runs is None or rig.store.runs == runs


def test_what_was_read_together_is_copied_together(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    onboard = rig.transfers._onboard
    submit = onboard.submit

    def spy(work: Any, after: Any = (), done: Any = None) -> Any:
        copies.append(len(work.func.__self__.nodes))
        return submit(work, after, done)

    monkeypatch.setattr(onboard, "submit", spy)
    assert all(result.error is None for result in queue_reads(rig, [2, 3, 4, 5, 6]).values())
    assert copies == [1, 3, 2]  # the first one kept the reader busy


def test_neighbours_that_go_different_ways_are_read_together_all_the_same(rig: Any) -> None:
    for slot in range(2, 8):
        rig.fill(N(slot), slot + 1)
    rig.store.ahead = 6
    rig.transfers._files._reads._most_ahead[0] = 6
    rig.store.read_gate.clear()
    rig.fill(N(15), 16)
    rig.transfers.issue([rig.move(N(15), P(0))])
    while not rig.store.reads_running:
        threading.Event().wait(0.001)
    rig.fill(P(4), 99)
    ways = [(P(1), 0), (pool_index(1, 1), 0), (pool_index(1, 2), 0), (P(4), 1), (P(5), 0), (P(6), 0)]
    rig.transfers.issue([rig.move(N(slot), destination, num_tokens) for slot, (destination, num_tokens) in enumerate(ways, 2)])
    rig.store.read_gate.set()
    assert all(result.error is None for result in rig.settle().values())
    assert rig.store.runs == [(2, 6)]
    assert [rig.value(index) for index in (P(1), pool_index(1, 1), pool_index(1, 2), P(5), P(6))] == [3, 4, 5, 7, 8]
    assert set(rig.rows(0)[4].tolist()) == {6, 99}  # of a part only that part


def test_all_buffers_of_a_run_come_back_whatever_became_of_it(rig: Any) -> None:
    rig.store.fail_reads[0, 3] = TransferError("this one")
    for _ in range(4):
        queue_reads(rig, [2, 3, 4])
        queue_reads(rig, [6, 7, 8])
    taken = [rig.transfers._routes.staging[0].take(0.0) for _ in range(9)]
    assert sorted(buffer for buffer in taken if buffer is not None) == list(range(8))


def test_one_that_cannot_be_read_fails_alone(rig: Any) -> None:
    rig.store.fail_reads[0, 3] = TransferError("this one")
    results = queue_reads(rig, [2, 3, 4])
    assert rig.store.runs == [(2, 3)]
    assert [results[number].error is None for number in range(4)] == [True, True, False, True]
    assert "this one" in str(results[2].error)
    assert [slot for _, slot, _ in rig.store.quarantines] == [3]
    assert (rig.value(P(1)), rig.value(P(3))) == (3, 5)


def test_one_that_is_not_there_fails_alone(rig: Any) -> None:
    rig.store.blocks.pop((0, 3), None)
    for slot in (2, 4):
        rig.fill(N(slot), slot)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N(2), P(0))])
    while not rig.store.reads_running:
        threading.Event().wait(0.001)
    rig.transfers.issue([rig.move(N(slot), P(slot)) for slot in (2, 3, 4)])
    rig.store.read_gate.set()
    assert [result.error is None for _, result in sorted(rig.settle().items())] == [True, True, False, True]


@pytest.mark.parametrize("fails_together", [False, True], ids=["together", "on its own"])
def test_a_read_that_hangs_takes_only_those_along_that_its_thread_has(make_rig: Make, monkeypatch: pytest.MonkeyPatch,
                                                                       fails_together: bool) -> None:
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.2)
    rig = make_rig(primary=16, ahead=3, read_threads=2, staging_blocks=8)
    store, hangs = rig.store, threading.Event()
    read_ahead, read_block = store.read_ahead, store.read_block

    def hanging_read_ahead(group: int, first_slot: int, outs: Any) -> Any:
        if fails_together:
            raise TransferError("not together")
        hangs.wait(20.0)
        return read_ahead(group, first_slot, outs)

    def hanging_read_block(group: int, slot: int, key: bytes, out: Any, arrived: Any = None) -> None:
        if fails_together and slot == 2:
            hangs.wait(20.0)
        read_block(group, slot, key, out, arrived)

    monkeypatch.setattr(store, "read_ahead", hanging_read_ahead)
    monkeypatch.setattr(store, "read_block", hanging_read_block)
    for slot in (2, 3, 4, 9):
        rig.fill(N(slot), slot + 1)
    with rig.transfers._files._reads._waiting._filled:  # no reader looks before all three are there
        rig.transfers.issue([rig.move(N(slot), P(slot)) for slot in (2, 3, 4)])
    assert rig.transfers.idle(10.0)  # nobody waits for ever for what stands behind the one that hangs
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 30.0)  # what comes now does not hang, and need not be quick
    rig.transfers.issue([rig.move(N(9), P(9))])
    assert rig.transfers.idle(10.0)  # the other thread reads on
    assert [result.error is None for _, result in sorted(rig.settle().items())] == [False, False, False, True]
    assert rig.value(P(9)) == 10
    hangs.set()


def test_with_few_buffers_the_rest_of_a_run_waits_its_turn(make_rig: Make) -> None:
    rig = make_rig(primary=16, ahead=3, read_threads=1, staging_blocks=2)
    results = queue_reads(rig, [2, 3, 4])
    assert all(result.error is None for result in results.values())
    assert [rig.value(P(number)) for number in (1, 2, 3)] == [3, 4, 5]
    assert all(length <= 2 for _, length in rig.store.runs)


def test_pool_indices_of_neighbours_are_four_apart() -> None:
    assert pool_index(2, 6) - pool_index(2, 5) == SLOT_STEP

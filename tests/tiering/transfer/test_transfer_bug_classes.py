"""Bugs of this kind of code in the order of copies, each as the rule that would have prevented it.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen; ``tests/test_proofs.py`` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import pool_index

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

Make = Callable[..., Any]


def first_copy_is_slow() -> Faults:
    return Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.05, count=1)])


# -- another prompt's tokens came out, with the host level on: copies on different streams were not ordered against each other -----


@pytest.mark.parametrize("moves", [
    [(P[0], S[0]), (S[0], P[1])],   # a read behind a write
    [(P[0], S[0]), (S[1], P[0])],   # a write behind a read
    [(P[0], S[0]), (S[1], P[0]), (P[0], S[0])],   # a write behind a write and a read, over both streams
])
def test_a_slow_copy_is_not_overtaken_by_the_other_streams_next_one(make_rig: Make, moves: list[Any]) -> None:
    """Bugs 8813, 8274, 9056."""
    rig = make_rig(faults=first_copy_is_slow())
    values = {P[0]: 5, P[1]: 6, S[0]: 7, S[1]: 8}
    for index, value in values.items():
        rig.fill(index, value)
    for source, destination in moves:
        rig.transfers.issue([rig.move(source, destination)])
        values[destination] = values[source]
    assert all(result.error is None for result in rig.settle().values())
    assert {index: rig.value(index) for index in values} == values


def test_pending_copies_are_found_by_their_slots_whatever_block_they_belong_to(make_rig: Make) -> None:
    """Bugs 8813, 8274, 9056: each Move of the rig is of another block, and these two meet in one slot."""
    rig = make_rig(faults=first_copy_is_slow())
    rig.fill(P[0], 5)
    first, second = rig.move(P[0], S[0]), rig.move(S[0], P[3])
    assert first.block_id != second.block_id
    rig.transfers.issue([first])
    rig.transfers.issue([second])
    assert rig.transfers.wait(0, [P[3]], 10.0)
    assert rig.value(P[3]) == 5


# -- slot n of the device and slot n of the host were one key of the pending copies ---------------------------------------------------


def test_the_same_slot_number_on_two_levels_is_two_places(make_rig: Make) -> None:
    """Bug 15272: the second copy would stand in the books where the first, slow one did, and the third would not wait."""
    rig = make_rig(faults=first_copy_is_slow())
    for index, value in ((P[0], 5), (S[0], 6), (S[1], 7)):
        rig.fill(index, value)
    rig.transfers.issue([rig.move(P[0], S[1])])
    rig.transfers.issue([rig.move(S[0], P[1])])
    rig.transfers.issue([rig.move(S[1], P[2])])
    rig.settle()
    assert (rig.value(P[1]), rig.value(P[2])) == (6, 5)


def test_a_failed_write_of_a_slot_is_not_the_failure_of_its_namesake_on_another_level(make_rig: Make) -> None:
    """Bug 15272."""
    rig = make_rig(faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, count=1)]))
    rig.fill(P[1], 5)
    rig.generations[0, P[1]] = 1  # as often written as the slot whose write fails
    rig.generations[0, S[1]] = 0
    bad, good = rig.move(P[0], S[1]), rig.move(P[1], S[2])
    rig.transfers.issue([bad])
    rig.transfers.issue([good])
    results = rig.settle()
    assert [results[move.number].error is None for move in (bad, good)] == [False, True]
    assert rig.value(S[2]) == 5

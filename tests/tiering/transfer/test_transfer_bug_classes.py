"""Bugs of this kind of code in the order of copies, each as the rule that would have prevented it.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen; ``tests/test_proofs.py`` lists them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import PRIMARY, SECONDARY, pool_index

P, S = ([pool_index(level, slot) for slot in range(8)] for level in range(2))

Make = Callable[..., Any]


class Gate:
    """Holds the first copy out of the device back until it is opened."""

    def __init__(self, rig: Any) -> None:
        self._copier = rig.transfers._routes._copiers[0][SECONDARY, PRIMARY]
        self._is_first = True
        self._open = threading.Event()
        rig.transfers._routes._copiers[0][SECONDARY, PRIMARY] = self

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        is_first, self._is_first = self._is_first, False
        if is_first:
            assert self._open.wait(10.0)
        self._copier.copy(pairs, num_tokens)

    def open_late(self) -> None:
        """After whatever does not wait has had its time."""
        time.sleep(0.03)
        self._open.set()


def carry_out(rig: Any, *moves: tuple[int, int]) -> dict[int, int]:
    """Issue these Moves one by one while the first is held back, and let all end. Returns what must be in the slots then."""
    values = {P[0]: 5, P[1]: 6, P[2]: 7, S[0]: 8, S[1]: 9, S[2]: 10}
    for index, value in values.items():
        rig.fill(index, value)
    gate = Gate(rig)
    for source, destination in moves:
        rig.transfers.issue([rig.move(source, destination)])
        values[destination] = values[source]
    gate.open_late()
    assert all(result.error is None for result in rig.settle().values())
    return values


def held(rig: Any, values: dict[int, int]) -> dict[int, int]:
    return {index: rig.value(index) for index in values}


# -- another prompt's tokens came out, with the host level on: copies on different streams were not ordered against each other -----


@pytest.mark.parametrize("moves", [
    [(P[0], S[0]), (S[0], P[1])],                             # a read behind a write
    [(P[0], S[0]), (S[1], P[0])],                             # a write behind a read
    [(P[0], S[0]), (S[1], S[0])],                             # a write behind a write
    [(P[0], S[0]), (S[0], P[1]), (P[2], S[0])],               # a write behind a read that waits itself
    [(P[0], S[0]), (S[1], P[0]), (P[0], S[2])],
])
def test_a_copy_that_takes_long_is_not_overtaken_by_what_depends_on_it(make_rig: Make, moves: list[tuple[int, int]]) -> None:
    """Bugs 8813, 8274, 9056. Each Move is of another block: pending copies are known by their slots, not by blocks."""
    rig = make_rig()
    values = carry_out(rig, *moves)
    assert held(rig, values) == values


# -- slot n of the device and slot n of the host were one key of the pending copies ---------------------------------------------------


def test_the_same_slot_number_on_two_levels_is_two_places(make_rig: Make) -> None:
    """Bug 15272: the second copy would stand in the books where the first one does, and the third would not wait for that."""
    rig = make_rig()
    values = carry_out(rig, (P[0], S[1]), (S[0], P[1]), (S[1], P[2]))
    assert held(rig, values) == values


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

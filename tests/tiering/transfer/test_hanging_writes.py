"""A write that hangs: what is queued behind it is handed back with an error, what it reads stays, and when it ends all goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.pools.pool_index import pool_index
from kvtier.tiering import hang_watch

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

Make = Callable[..., Any]


def test_what_is_queued_behind_a_write_that_hangs_is_handed_back(make_rig: Make, until: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.05)  # of the one write that is begun: it waits for the gate
    rig = make_rig()
    rig.fill(P[0], 1)
    for slot in range(4):
        rig.fill(S[slot], 10 + slot)
    rig.store.write_gate.clear()
    hanging = rig.move(S[0], N[0])
    rig.transfers.issue([hanging])
    until(lambda: rig.store.write_batches == [1])
    queued, deletion, held = rig.move(S[1], N[1]), rig.discard(5), rig.move(N[1], P[1])
    rig.transfers.issue([queued, deletion, held])
    until(lambda: rig.transfers.writes_hang)
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 30.0)  # what comes now does not hang, and need not be quick
    late = rig.move(S[2], N[2])
    rig.transfers.issue([late])

    results: dict[int, Any] = {}

    def are_handed_back() -> bool:
        results.update({result.move.number: result for result in rig.transfers.drain()})
        return {move.number for move in (queued, held, late)} <= results.keys()

    until(are_handed_back)
    for move in (queued, late):
        assert "given up, because file operations hang" in str(results[move.number].error)
    assert repr(queued) in str(results[held.number].error), "who was to read it learns why it is not there"
    assert rig.transfers.failed_discards == 1
    assert rig.transfers.stats()["secondary->nvme"].failures == 2

    again, overwrite = rig.move(P[0], S[1]), rig.move(P[0], S[0])
    rig.transfers.issue([again, overwrite])
    until(lambda: are_handed_back() and again.number in results)
    assert rig.value(S[1]) == 1, "the slot of a write that was handed back is usable again"
    assert overwrite.number not in results, "the call may still take its bytes from the slot"
    assert rig.value(S[0]) == 10
    assert not rig.transfers.idle(0.0)

    rig.store.write_gate.set()
    until(lambda: not rig.transfers.writes_hang)
    rig.transfers.issue([rig.move(S[1], N[1]), rig.move(N[1], P[2])])
    results.update(rig.settle())
    assert {number for number, result in results.items() if result.error is not None} == {queued.number, held.number, late.number}
    assert (rig.value(N[0]), rig.value(S[0]), rig.value(N[1]), rig.value(P[2])) == (10, 1, 1, 1)

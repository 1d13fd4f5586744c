"""The gate of a store: closing lets nobody in and waits for who is inside; what is counted is never lost."""

from __future__ import annotations

import threading

import pytest

from kvtier.io.store_gate import StoreClosed, StoreGate


def test_closing_waits_for_who_is_inside_and_lets_nobody_else_in() -> None:
    gate = StoreGate("/store")
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with gate:
            entered.set()
            leave.wait(60.0)

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(60.0)
    assert not gate.close(0.0)
    assert gate.num_inside == 1
    with pytest.raises(StoreClosed, match="the store in /store is closed"), gate:
        pass
    leave.set()
    assert gate.close(60.0)
    thread.join(60.0)
    assert gate.is_closed


def test_an_error_inside_leaves_the_gate() -> None:
    gate = StoreGate("/store")
    with pytest.raises(ZeroDivisionError), gate:
        raise ZeroDivisionError
    assert gate.num_inside == 0


def test_hits_are_taken_once_and_counts_stay() -> None:
    gate = StoreGate("/store")
    for _ in range(3):
        gate.served((0, 1), 100, False)
    gate.served((1, 0), 50, True)
    gate.count(read_errors=2)
    gate.forget_hits([(1, 0), (5, 5)])
    assert gate.hits() == gate.take_hits() == {(0, 1): 3}
    assert gate.take_hits() == {}
    counts = gate.counts()
    assert (counts["read_blocks"], counts["read_bytes"], counts["gds_read_blocks"], counts["read_errors"]) == (4, 350, 1, 2)

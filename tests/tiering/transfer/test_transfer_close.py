"""Closing is bounded, whatever hangs, and loses no report of what it cancelled."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from gate import PATIENCE, Gate

from kvtier.errors import TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import pool_index

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

Make = Callable[..., Any]


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-")]


def test_close_ends_all_threads_and_may_be_called_again(make_rig: Make) -> None:
    before = len(our_threads())
    rig = make_rig(read_threads=3)
    assert len(our_threads()) == before + 7  # two streams, three readers, one writer, one that looks after them
    assert rig.transfers.close(10.0)
    assert len(our_threads()) == before
    assert rig.transfers.close(0.0)
    with pytest.raises(TransferError, match="closed"):
        rig.transfers.issue([rig.move(P[0], S[0])])


def test_a_closed_manager_goes_without_the_garbage_collector(make_rig: Make) -> None:
    rig = make_rig()
    rig.fill(P[0], 5)
    gc.disable()
    try:
        rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], N[0])])
        rig.settle()
        rig.transfers.issue([rig.move(N[0], P[1])])
        rig.settle()
        assert rig.value(P[1]) == 5
        assert rig.transfers.close(10.0)
        gone = weakref.ref(rig.transfers)
        rig.transfers = make_rig().transfers
        assert gone() is None
    finally:
        gc.enable()


def test_close_waits_for_copies_that_were_issued(make_rig: Make) -> None:
    rig = make_rig(faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.02)]))
    rig.fill(P[0], 5)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], P[1]), rig.move(P[1], S[2])])
    assert rig.transfers.close(10.0)
    assert rig.value(S[2]) == 5
    assert [result.error for result in rig.transfers.drain()] == [None, None, None]


def test_close_cancels_file_operations_that_have_not_begun_and_finishes_those_that_run(make_rig: Make, until: Make) -> None:
    rig = make_rig(read_threads=1)
    for slot in range(4):
        rig.fill(N[slot], slot + 1)
        rig.fill(S[slot], slot + 11)
    rig.fill(P[7], 9)
    rig.store.read_gate.clear()
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(S[3], N[7])])
    until(lambda: rig.store.reads_running == 1 and rig.store.write_batches == [1])
    rig.transfers.issue([rig.move(N[1], P[1]), rig.move(S[1], N[5]), rig.discard(6),
                         rig.move(P[1], S[4]),    # would copy what the cancelled read was to bring
                         rig.move(P[7], P[1]),    # overwrites it: not affected
                         rig.move(N[5], P[2])])   # held back behind a write that is cancelled
    closer = threading.Thread(target=lambda: results.append(rig.transfers.close(10.0)))
    results: list[bool] = []
    closer.start()
    until(lambda: rig.transfers._closing)
    rig.store.read_gate.set()
    rig.store.write_gate.set()
    closer.join(10.0)
    assert results == [True]
    outcome = {result.move.number: result.error for result in rig.transfers.drain()}
    assert sorted(outcome) == [0, 1, 2, 3, 5, 6, 7], "every Move is reported, the discard is not"
    assert {number for number, error in outcome.items() if error is None} == {0, 1, 6}
    for number in (2, 3):
        assert "cancelled" in str(outcome[number])
    assert (rig.value(P[0]), rig.value(N[7]), rig.value(P[1])) == (1, 14, 9)


def test_close_is_bounded_when_a_read_hangs(make_rig: Make, until: Make) -> None:
    rig = make_rig(read_threads=1)
    rig.fill(N[0], 5)
    rig.fill(P[0], 1)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(N[1], P[1])])
    until(lambda: rig.store.reads_running == 1)
    assert not rig.transfers.close(0.1)  # returns, although the call has no end
    assert [result.move.number for result in rig.transfers.drain()] == [1]
    # When it comes back after all, nothing is copied: the pools may be somebody else's by now.
    rig.store.read_gate.set()
    until(lambda: rig.transfers._outstanding == 0)
    assert rig.value(P[0]) == 1
    until(lambda: rig.transfers.close(1.0))


def test_a_read_that_was_held_back_is_reported_even_when_all_readers_hang(make_rig: Make, until: Make) -> None:
    rig = make_rig(read_threads=1)
    rig.fill(N[0], 5)
    rig.store.read_gate.clear()
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(S[0], N[7])])
    until(lambda: rig.store.reads_running == 1 and rig.store.write_batches == [1])
    rig.transfers.issue([rig.move(S[1], N[5]), rig.move(N[5], P[2])])
    assert not rig.transfers.close(0.1)
    assert sorted(result.move.number for result in rig.transfers.drain()) == [2, 3]


def test_close_is_bounded_when_a_write_hangs(make_rig: Make, until: Make) -> None:
    rig = make_rig()
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(S[0], N[0])])
    until(lambda: rig.store.write_batches == [1])
    rig.transfers.issue([rig.move(P[0], S[0])])  # held back behind the write
    assert not rig.transfers.close(0.1)  # returns, although the call has no end
    rig.store.write_gate.set()
    until(lambda: rig.transfers._outstanding == 0)
    assert {result.move.number: result.error is None for result in rig.transfers.drain()} == {0: True, 1: False}


def test_close_is_bounded_when_a_copy_hangs(make_rig: Make) -> None:
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[0], P[1])])
    assert not rig.transfers.close(0.05)  # returns, although the copies have no end
    gate.open()


@pytest.mark.parametrize("kind", ["read", "write", "copy"])
def test_a_second_close_waits_for_what_the_first_gave_up(make_rig: Make, until: Make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.fill(N[0], 5)
    if kind == "copy":
        rig.transfers.issue([rig.move(P[1], S[1])])
        until(lambda: gate.arrived == 1)
    else:
        gate.open()
        rig.store.read_gate.clear()
        rig.store.write_gate.clear()
        rig.transfers.issue([rig.move(N[0], P[0]) if kind == "read" else rig.move(S[0], N[1])])
        until(lambda: rig.store.reads_running == 1 or rig.store.write_batches == [1])
    assert not rig.transfers.close(0.05)
    assert not rig.transfers.close(0.05), "it runs on"

    def end_then_close(timeout: float) -> bool:
        assert rig.transfers._outstanding == 1, "it is not over when the second close begins to wait"
        gate.open()
        rig.store.read_gate.set()
        rig.store.write_gate.set()
        return close_files(timeout)

    close_files = rig.transfers._files.close
    monkeypatch.setattr(rig.transfers._files, "close", end_then_close)
    assert rig.transfers.close(PATIENCE)
    monkeypatch.undo()


def test_a_waiter_is_let_go_when_the_manager_is_closed(make_rig: Make, until: Make) -> None:
    rig = make_rig()
    rig.fill(N[0], 5)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0])])
    until(lambda: rig.store.reads_running == 1)
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(rig.transfers.wait(0, [P[0]], None)))
    waiter.start()
    assert not rig.transfers.close(0.05)
    waiter.join(10.0)
    assert results == [False]


def test_close_while_others_issue_loses_no_move(make_rig: Make) -> None:
    for _ in range(10):
        rig = make_rig()
        rig.store.largest_pause = 0.002
        for slot in range(8):
            rig.fill(N[slot], slot)
        issued: list[int] = []

        def work(rig: Any = rig, issued: list[int] = issued) -> None:
            try:
                for number in range(1000):
                    records = [rig.move(N[number % 8], P[number % 8]), rig.move(P[number % 8], S[number % 8]),
                               rig.move(S[number % 8], N[(number + 1) % 8])]
                    rig.transfers.issue(records)
                    issued.extend(record.number for record in records)
            except TransferError:
                pass  # closed: what was refused was not issued

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.005)
        assert rig.transfers.close(10.0)
        thread.join(10.0)
        assert sorted(result.move.number for result in rig.transfers.drain()) == issued


def test_on_cuda_close_tells_when_the_device_still_works_on_the_pools(make_rig: Make, cuda_device: Make) -> None:
    device = cuda_device(1)
    rig = make_rig(device=device)
    device._cuda.runtime.paused = True
    rig.transfers.issue([rig.move(P[0], S[0])])
    assert not rig.transfers.close(0.05)
    rig.transfers._offload._watcher.join(PATIENCE)  # nobody looks at the device any more
    assert not rig.transfers.close(0.05)
    device._cuda.runtime.paused = False
    assert rig.transfers.close(PATIENCE)

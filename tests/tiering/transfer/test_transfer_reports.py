"""Reports, waits and listeners: each Move is reported once, every wait keeps its time-out, memory stays bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gate import Gate

from kvtier.errors import CorruptBlock
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import PoolIndex, pool_index
from kvtier.tiering.ledger.moves import Move

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

Make = Callable[..., Any]


def test_each_move_is_reported_exactly_once_by_whoever_drains(make_rig: Make) -> None:
    rig = make_rig(primary=16, secondary=16)
    seen: list[int] = []
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            seen.extend(result.move.number for result in rig.transfers.drain())

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for round_number in range(25):
        rig.transfers.issue([rig.move(pool_index(round_number % 2, slot), pool_index(1 - round_number % 2, slot))
                             for slot in range(16)])
    is_idle = rig.transfers.idle(30.0)
    stop.set()
    for thread in threads:
        thread.join(10.0)
    assert is_idle
    seen.extend(result.move.number for result in rig.transfers.drain())
    assert sorted(seen) == list(range(400))


def test_when_a_wait_returns_the_results_can_be_drained(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that waits and then drains must not miss a failure and serve garbage."""
    rig = make_rig(faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY)]))
    add = rig.transfers._completed.add

    def late(*arguments: Any) -> None:
        time.sleep(0.02)  # the event is done already
        add(*arguments)

    monkeypatch.setattr(rig.transfers._completed, "add", late)
    waits = [lambda: rig.transfers.wait(0, [S[0]], 10.0), lambda: rig.transfers.order_before_engine(None, 0, [S[0]], 10.0),
             lambda: rig.transfers.order_before_engine(None, 0, [P[0]], None), lambda: rig.transfers.idle(10.0)]
    for wait in waits:
        rig.transfers.issue([rig.move(P[0], S[0])])
        assert wait()
        assert len(rig.transfers.drain()) == 1
        rig.transfers.order_after_engine(None)


def test_waits_keep_their_time_outs(make_rig: Make) -> None:
    rig = make_rig()
    rig.fill(N[0], 5)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(P[0], S[0])])
    for timeout in (0.05, 0.0):
        assert not rig.transfers.wait(0, [P[0]], timeout)
        assert not rig.transfers.order_before_engine(None, 0, [S[0]], timeout)
        assert not rig.transfers.idle(timeout)
    assert rig.transfers.wait(0, [P[1], S[1]], 0.0)
    assert rig.transfers.order_before_engine(None, 0, [P[1]], 0.0)
    rig.store.read_gate.set()
    assert rig.transfers.wait(0, [P[0], S[0]], None)
    assert rig.transfers.order_before_engine(None, 0, [S[0]], None)
    assert rig.transfers.idle(None)


def test_the_engine_waits_for_a_slow_copy_no_longer_than_it_was_told_to(make_rig: Make) -> None:
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.transfers.issue([rig.move(P[0], S[0])])
    assert not rig.transfers.order_before_engine(None, 0, [P[0]], 0.02)
    gate.open()
    assert rig.transfers.order_before_engine(None, 0, [P[0]], 10.0), "reads of the slot count as well"


def test_a_wait_for_a_slot_does_not_wait_for_reads_of_it(make_rig: Make) -> None:
    rig = make_rig()
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(S[0], N[0])])
    assert rig.transfers.wait(0, [S[0]], 0.0)
    assert not rig.transfers.wait(0, [N[0]], 0.0)


def test_listeners_are_called_without_a_lock_and_may_fail(rig: Any, caplog: Any) -> None:
    calls: list[str] = []
    told = threading.Event()

    def listener() -> None:
        rig.transfers.drain()
        rig.transfers.stats()
        assert rig.transfers.wait(0, [P[1]], 0.0)
        calls.append(threading.current_thread().name)
        told.set()

    def broken() -> None:
        raise ValueError("on purpose")

    rig.transfers.add_listener(broken)
    rig.transfers.add_listener(listener)
    rig.transfers.issue([rig.move(P[0], S[0])])
    assert told.wait(10.0)
    assert calls == ["kvtier-offload"]
    assert "a transfer listener failed" in caplog.text
    caplog.clear()  # it was meant to be logged
    rig.transfers.remove_listener(broken)
    rig.transfers.remove_listener(listener)
    rig.transfers.issue([rig.move(P[0], S[0])])
    rig.settle()
    rig.transfers.issue([rig.move(P[0], S[0])])
    rig.settle()
    assert len(calls) == 1


def test_listeners_hear_of_a_confirmed_read_and_of_writes(rig: Any) -> None:
    told = threading.Semaphore(0)
    rig.transfers.add_listener(told.release)
    rig.fill(N[0], 5)
    rig.transfers.issue([rig.move(N[0], P[0])])
    assert told.acquire(timeout=10.0)
    assert told.acquire(timeout=10.0)
    rig.transfers.issue([rig.move(S[0], N[0])])
    assert told.acquire(timeout=10.0)


def test_counters_tell_blocks_bytes_seconds_and_failures_per_pair_of_levels(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 1)
    rig.fill(N[1], 1)
    rig.store.fail_reads[0, 1] = corrupt
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[1], S[1]), rig.move(S[0], P[2], num_tokens=1),
                         rig.move(S[1], N[5]), rig.move(N[0], P[3]), rig.move(N[1], P[4])])
    results = rig.settle()
    stats = rig.transfers.stats()
    assert {name: (counters.blocks, counters.bytes, counters.failures) for name, counters in stats.items()} == {
        "primary->secondary": (2, 2 * rig.block_bytes, 0),
        "secondary->primary": (1, rig.block_bytes // 4, 0),
        "secondary->nvme": (1, rig.block_bytes, 0),
        "nvme->primary": (1, rig.block_bytes, 1),
    }
    assert all(counters.seconds > 0.0 for counters in stats.values())
    assert sum(result.seconds for result in results.values()) == pytest.approx(
        sum(counters.seconds for counters in stats.values()))


def test_what_is_pending_does_not_grow_with_the_number_of_moves(make_rig: Make) -> None:
    rig = make_rig(primary=16, secondary=16)
    for slot in range(8):
        rig.fill(N[slot], slot)
    for round_number in range(125):
        upwards = round_number % 2
        records = [rig.move(pool_index(upwards, slot), pool_index(1 - upwards, slot)) for slot in range(14)]
        records += [rig.move(S[0], N[round_number % 8]), rig.move(N[(round_number + 4) % 8], pool_index(0, 15))]
        rig.transfers.issue(records)
        assert rig.transfers.idle(10.0)
        assert rig.transfers._graph.size() == 0
    assert len(rig.transfers.drain()) == 2000
    assert rig.transfers._open == {}
    assert rig.transfers._ready == []


def test_failures_that_are_remembered_are_bounded_by_the_slots(make_rig: Make) -> None:
    rig = make_rig(faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY)]))
    for _ in range(60):
        rig.transfers.issue([rig.move(P[slot], S[slot]) for slot in range(8)])
        rig.settle()
    assert rig.transfers._graph.size() == 8


def test_a_long_chain_of_moves_keeps_no_history_alive(make_rig: Make, until: Make) -> None:
    import gc
    import weakref

    class Marked(Move):
        __slots__ = ("__weakref__",)

    rig = make_rig()
    first = Marked(0, 0, 0, PoolIndex(P[0]), 0, PoolIndex(S[0]), 1)
    rig.number = 1
    gone = weakref.ref(first)
    rig.store.write_gate.clear()
    chain = [first]
    for _ in range(50):
        chain += [rig.move(S[0], P[0]), rig.move(P[0], S[0])]
    rig.transfers.issue([*chain, rig.move(S[0], N[0])])  # each knows who wrote its source, and the last one stays
    assert rig.transfers.wait(0, [S[0]], 10.0)
    rig.transfers.drain()
    del first, chain
    until(lambda: gc.collect() is None or gone() is None)
    rig.store.write_gate.set()

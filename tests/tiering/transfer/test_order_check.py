"""The second opinion on the order of transfers: it says nothing about what is ordered, and names what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.errors import LedgerError
from kvtier.io.cpu_stream import CpuEvent
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, pool_index
from kvtier.tiering import transfer_graph
from kvtier.tiering.order_check import READER, WRITER, OrderCheck

P0, P1, S0, N0 = ((0, pool_index(PRIMARY, 0)), (0, pool_index(PRIMARY, 1)), (0, pool_index(SECONDARY, 0)), (0, pool_index(NVME, 0)))


@pytest.fixture
def check() -> OrderCheck:
    return OrderCheck()


def is_refused(check: OrderCheck, *names: str) -> None:
    with pytest.raises(LedgerError, match=".*".join(names)):
        check.raise_if_violated()


def test_works_of_one_stream_are_in_order(check: OrderCheck) -> None:
    check.submitted("offload", [], CpuEvent(), "first", [P0], [S0])
    check.submitted("offload", [], CpuEvent(), "second", [S0], [P0])
    check.raise_if_violated()


def test_two_streams_need_an_event_between_them(check: OrderCheck) -> None:
    event = CpuEvent()
    check.submitted("offload", [], event, "first", [P0], [S0])
    check.submitted("onboard", [event], CpuEvent(), "second", [S0], [P1])
    check.raise_if_violated()
    check.submitted("offload", [], CpuEvent(), "third", [P1], [(0, pool_index(SECONDARY, 1))])
    is_refused(check, "primary slot 1", "third", "offload", "second", "onboard")


def test_an_event_stands_for_all_that_its_stream_waited_for(check: OrderCheck) -> None:
    first, second = CpuEvent(), CpuEvent()
    check.submitted("a", [], first, "first", [], [P0])
    check.submitted("b", [first], second, "second", [], [P1])
    check.submitted("c", [second], CpuEvent(), "third", [P0], [])
    check.raise_if_violated()


def test_what_is_over_need_not_be_waited_for(check: OrderCheck) -> None:
    event = CpuEvent()
    check.submitted("offload", [], event, "first", [P0], [S0])
    event.finish()
    check.submitted("onboard", [], CpuEvent(), "second", [S0], [P0])
    check.raise_if_violated()


def test_two_reads_need_no_order_and_a_write_waits_for_both(check: OrderCheck) -> None:
    one, other = CpuEvent(), CpuEvent()
    check.submitted("a", [], one, "one", [P0], [])
    check.submitted("b", [], other, "other", [P0], [])
    check.raise_if_violated()
    check.submitted("c", [one], CpuEvent(), "write", [], [P0])
    is_refused(check, "write", "other")


def test_a_writer_thread_is_in_order_and_readers_are_not(check: OrderCheck) -> None:
    check.began(WRITER, [], "write", lambda: False, [S0], [N0])
    check.began(WRITER, [], "discard", lambda: False, [], [N0])
    check.raise_if_violated()
    check.began(READER, [], "read", lambda: False, [N0], [])
    is_refused(check, "NVMe slot|nvme slot", "read", "discard")


def test_a_copy_into_what_a_file_operation_reads_waits_until_it_is_over(check: OrderCheck) -> None:
    is_over = False
    check.began(WRITER, [], "write", lambda: is_over, [S0], [N0])
    check.submitted("offload", [], CpuEvent(), "copy", [P0], [S0])
    is_refused(check, "secondary slot 0", "copy", "write")
    check = OrderCheck()
    check.began(WRITER, [], "write", lambda: True, [S0], [N0])
    check.submitted("offload", [], CpuEvent(), "copy", [P0], [S0])
    check.raise_if_violated()


def test_the_engine_waits_for_copies_and_copies_for_the_engine(check: OrderCheck) -> None:
    event = CpuEvent()
    check.submitted("onboard", [], event, "load", [S0], [P0])
    check.engine_begins([event], [P0], check.num_uses)
    check.raise_if_violated()
    check.engine_ends(["onboard", "offload"], False)
    check.submitted("offload", [], CpuEvent(), "give away", [], [P0])
    check.raise_if_violated()
    check.engine_begins([], [P0], check.num_uses)
    is_refused(check, "step of the engine", "give away")


def test_a_copy_into_what_the_engine_uses_is_named(check: OrderCheck) -> None:
    check.engine_begins([], [P0], 0)
    check.submitted("onboard", [], CpuEvent(), "load", [S0], [P0])
    is_refused(check, "load", "step of the engine")


def test_events_that_are_over_are_forgotten(check: OrderCheck) -> None:
    for _ in range(1000):
        event = CpuEvent()
        check.submitted("offload", [], event, "copy", [P0], [S0])
        event.finish()
    assert len(check._events) <= 1
    assert sum(len(readers) for readers in check._reads.values()) <= 2


def random_life(rig: Any, seed: int) -> None:
    """Moves between random slots of all levels, from a thread that never waits, with steps of an engine between."""
    choice = random.Random(seed)

    def slot(level: int) -> int:
        return pool_index(level, choice.randrange(3))

    for _ in range(150):
        route = choice.choice([(PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (PRIMARY, PRIMARY), (SECONDARY, NVME)])
        source, destination = slot(route[0]), slot(route[1])
        if source != destination:
            rig.transfers.issue([rig.move(source, destination)])
        if choice.random() < 0.1:
            slots = [slot(PRIMARY)]
            assert rig.transfers.order_before_engine(None, 0, slots, 10.0)
            rig.transfers.order_after_engine(None)
    assert rig.transfers.idle(30.0)
    rig.transfers.issue([])


def random_lives(rig: Any) -> None:
    for seed in range(10):
        random_life(rig, seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_real_transfers_holds(make_rig: Callable[..., Any], seed: int) -> None:
    random_life(make_rig(primary=3, secondary=3), seed)


@pytest.mark.parametrize("forgotten", ["readers", "writer", "held"])
def test_an_order_that_the_graph_forgets_is_noticed(make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    add = transfer_graph.TransferGraph.add

    def add_less(self: transfer_graph.TransferGraph, node: transfer_graph.TransferNode) -> None:
        if forgotten == "readers":
            self._reads[node.group].clear()
        elif forgotten == "writer":
            self._writes[node.group].pop(node.source, None)
        add(self, node)

    monkeypatch.setattr(transfer_graph.TransferGraph, "add", add_less)
    if forgotten == "held":
        monkeypatch.setattr(transfer_graph, "_blocks", lambda earlier, node: False)
    rig = make_rig(primary=3, secondary=3)
    rig.store.largest_pause = 0.002
    with pytest.raises(LedgerError, match="unordered access"):
        random_lives(rig)

"""Loads in pieces by layers: what has arrived may be used, what has not is waited for, and of a Move that fails nothing counts as there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.errors import LedgerError
from kvtier.io import layer_pieces
from kvtier.io.cpu_stream import CpuEvent
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, pool_index
from kvtier.tiering import transfer
from kvtier.tiering.order_check import OrderCheck

Make = Callable[..., Any]
P, S, N = ([pool_index(level, slot) for slot in range(16)] for level in (PRIMARY, SECONDARY, NVME))
LAYERS = 4


class LayerGate:
    """Stands before a rig's copier into the primary level: lets so many layers pass, and fails at those layers that it is told."""

    def __init__(self, rig: Any, passes: int = 0, group: int = 0) -> None:
        copiers = rig.transfers._routes._copiers[group]
        self._copier = copiers[PRIMARY, SECONDARY]
        copiers[PRIMARY, SECONDARY] = self
        self._passes = passes
        self._changed = threading.Condition()
        self.fails: set[int] = set()  # numbers of layers
        self.copied: list[tuple[int, int] | None] = []

    def layer_ends(self, pairs: Sequence[tuple[int, int]], most: int) -> tuple[int, ...]:
        ends: tuple[int, ...] = self._copier.layer_ends(pairs, most)
        return ends

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: tuple[int, int] | None = None) -> None:
        end = layers[1] if layers is not None else LAYERS
        with self._changed:
            assert self._changed.wait_for(lambda: self._passes >= end, 20.0), "the test left layers held back"
        if end - 1 in self.fails:
            raise OSError(5, "on purpose")
        self.copied.append(layers)
        self._copier.copy(pairs, num_tokens, layers)

    def let_pass(self, layers: int) -> None:
        with self._changed:
            self._passes = layers
            self._changed.notify_all()


@pytest.fixture(autouse=True)
def every_load_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_CALL_BYTES", "LEAST_UNIT_BYTES", "LEAST_PIECE_BYTES"):
        monkeypatch.setattr(layer_pieces, name, 1)


@pytest.fixture
def make_layered(make_rig: Make) -> Make:
    """Rigs whose blocks have four layers, each loaded on its own."""
    def make(**options: Any) -> Any:
        layout = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)
        return make_rig(layout=layout, **{"layer_pieces": LAYERS, **options})
    return make


def layers_of(rig: Any, slot: int) -> list[int]:
    """The byte that fills each layer of a primary slot."""
    rows = rig.rows(PRIMARY)[slot].reshape(LAYERS, -1)
    assert (rows == rows[:, :1]).all()
    return [int(row[0]) for row in rows]


def fill(rig: Any, slots: Sequence[int]) -> None:
    for slot in slots:
        rig.fill(S[slot], slot + 1)


def test_the_first_layers_are_there_before_the_others(make_layered: Make) -> None:
    rig = make_layered()
    gate = LayerGate(rig, passes=2)
    fill(rig, range(3))
    rig.transfers.issue([rig.move(S[slot], P[slot]) for slot in range(3)])
    assert rig.transfers.wait(0, P[:3], 10.0, 2)
    assert [layers_of(rig, slot) for slot in range(3)] == [[slot + 1] * 2 + [0] * 2 for slot in range(3)]
    assert not rig.transfers.wait(0, P[:3], 0.02, 3)
    assert not rig.transfers.wait(0, P[:3], 0.02)
    assert rig.transfers.drain() == [], "a Move is reported when all of it is there"
    gate.let_pass(LAYERS)
    assert rig.transfers.wait(0, P[:3], 10.0)
    assert len(rig.transfers.drain()) == 3
    assert gate.copied == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_listener_hears_of_each_piece(make_layered: Make, until: Callable[..., None]) -> None:
    rig = make_layered()
    heard: list[int] = []
    rig.transfers.add_listener(lambda: heard.append(1))
    rig.transfers.issue([rig.move(S[0], P[0])])
    rig.settle()
    until(lambda: len(heard) == LAYERS)


def test_a_move_that_fails_in_the_middle_is_not_there_in_part(make_layered: Make) -> None:
    rig = make_layered()
    gate = LayerGate(rig, passes=1)
    gate.fails = {2}
    fill(rig, range(2))
    rig.transfers.issue([rig.move(S[slot], P[slot]) for slot in range(2)])
    assert rig.transfers.wait(0, P[:2], 10.0, 1)
    gate.let_pass(LAYERS)
    assert rig.transfers.wait(0, P[:2], 10.0, 3)
    results = rig.transfers.drain()  # the wait for a layer that will not come ends when the Move has been reported
    assert [type(result.error) for result in results] == [OSError, OSError]
    assert gate.copied == [(0, 1), (1, 2)], "the rest is not copied any more"
    rig.transfers.verify()


def test_a_copy_that_fails_at_once_is_reported_before_its_first_layer_counts(make_layered: Make) -> None:
    rig = make_layered()
    gate = LayerGate(rig, passes=LAYERS)
    gate.fails = {0}
    rig.transfers.issue([rig.move(S[0], P[0])])
    assert rig.transfers.wait(0, P[:1], 10.0, 1)
    assert [type(result.error) for result in rig.transfers.drain()] == [OSError]


def test_one_block_that_fails_keeps_none_of_the_others_back(make_layered: Make) -> None:
    rig = make_layered(with_store=True)
    rig.fill(S[1], 2)
    rig.transfers.issue([rig.move(N[7], S[0])])  # there is no such block
    rig.transfers.issue([rig.move(S[0], P[0]), rig.move(S[1], P[1])])
    results = rig.settle()
    assert [results[number].error is None for number in range(3)] == [False, False, True]
    assert layers_of(rig, 1) == [2] * LAYERS


def test_what_depends_on_a_load_waits_for_all_of_it(make_layered: Make) -> None:
    rig = make_layered()
    gate = LayerGate(rig)
    fill(rig, [0])
    rig.fill(S[5], 99)
    rig.transfers.issue([rig.move(S[0], P[0]), rig.move(P[0], S[1]), rig.move(P[0], P[3]), rig.move(S[5], P[0])])
    for layers in range(1, LAYERS + 1):
        gate.let_pass(layers)
    rig.settle()
    assert (rig.value(S[1]), rig.value(P[3]), rig.value(P[0])) == (1, 1, 99)
    rig.transfers.verify()


def test_the_front_layers_of_all_batches_of_a_call_come_first(make_layered: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_layered()
    monkeypatch.setattr(transfer, "MAX_BATCH_BYTES", 2 * rig.block_bytes)
    gate = LayerGate(rig, passes=1)
    fill(rig, range(5))
    rig.transfers.issue([rig.move(S[slot], P[slot]) for slot in range(5)])
    assert rig.transfers.wait(0, P[:5], 10.0, 1)  # held back behind the second layer of the first batch otherwise
    assert gate.copied == [(0, 1)] * 3
    gate.let_pass(LAYERS)
    rig.settle()
    assert [rig.value(P[slot]) for slot in range(5)] == [1, 2, 3, 4, 5]


def test_a_block_from_a_file_is_there_in_no_layer_before_it_is_verified(make_layered: Make) -> None:
    rig = make_layered()
    rig.fill(N[0], 7)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0])])
    assert not rig.transfers.wait(0, P[:1], 0.02, 0)
    assert not rig.transfers.wait(0, P[:1], 0.02, 1)
    rig.store.read_gate.set()
    assert rig.transfers.wait(0, P[:1], 10.0, 1)
    assert rig.value(P[0]) == 7


def test_small_loads_partial_ones_and_offloads_are_not_cut(make_layered: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_layered()
    pieces: list[int] = []
    submit = rig.transfers._submit_piece
    monkeypatch.setattr(rig.transfers, "_submit_piece", lambda batch, number: (pieces.append(number), submit(batch, number)))
    rig.transfers.issue([rig.move(S[0], P[0], num_tokens=2), rig.move(P[1], S[1])])
    monkeypatch.setattr(layer_pieces, "LEAST_CALL_BYTES", 1 << 20)
    rig.transfers.issue([rig.move(S[2], P[2])])
    rig.settle()
    assert pieces == [0, 0, 0]


def test_closing_in_the_middle_of_a_load_ends_it(make_layered: Make, until: Callable[..., None]) -> None:
    rig = make_layered()
    gate = LayerGate(rig, passes=1)
    rig.transfers.issue([rig.move(S[0], P[0])])
    assert rig.transfers.wait(0, P[:1], 10.0, 1)
    assert not rig.transfers.close(0.05)
    assert not rig.transfers.wait(0, P[:1], 10.0, 2), "nobody waits for what was abandoned"
    gate.let_pass(LAYERS)
    until(lambda: rig.transfers.close(1.0))


# -- the engine ----------------------------------------------------------------------------------------------------------


def test_on_the_cpu_the_engine_waits_for_its_layers_only(make_layered: Make) -> None:
    rig = make_layered()
    gate = LayerGate(rig, passes=1)
    fill(rig, [0])
    rig.transfers.issue([rig.move(S[0], P[0])])
    assert rig.transfers.order_layers(None, 0, P[:2], (0, 1), 10.0) == P[:1], "the other slot is complete"
    assert rig.transfers.order_layers(None, 0, P[:1], (1, 3), 0.02) is None
    gate.let_pass(LAYERS)
    assert rig.transfers.order_layers(None, 0, P[:1], (1, 3), 10.0) in ([], P[:1])
    assert rig.transfers.order_layers(None, 0, P[:1], (3, 1 << 30), 10.0) == []
    rig.transfers.order_after_engine(None)
    rig.transfers.verify()


def test_layers_that_are_not_needed_yet_are_not_waited_for_but_what_reads_the_slot_is(make_layered: Make) -> None:
    rig = make_layered()
    LayerGate(rig).let_pass(0)
    offload = threading.Event()
    copier = rig.transfers._routes._copiers[0][SECONDARY, PRIMARY]
    rig.transfers._routes._copiers[0][SECONDARY, PRIMARY] = Held(copier, offload)
    rig.transfers.issue([rig.move(S[0], P[0]), rig.move(P[1], S[1])])
    assert rig.transfers.order_layers(None, 0, P[:1], (0, 0), 10.0) == P[:1]
    assert rig.transfers.order_layers(None, 0, P[1:2], (0, 0), 0.02) is None, "the engine writes into this one"
    offload.set()
    assert rig.transfers.order_layers(None, 0, P[1:2], (0, 0), 10.0) == []
    gate = rig.transfers._routes._copiers[0][PRIMARY, SECONDARY]
    gate.let_pass(LAYERS)
    rig.settle()


class Held:
    """A copier that waits for an event first."""

    def __init__(self, copier: Any, opens: threading.Event) -> None:
        self._copier = copier
        self._opens = opens

    def layer_ends(self, pairs: Any, most: int) -> tuple[int, ...]:
        return (LAYERS,)

    def copy(self, pairs: Any, num_tokens: int = 0) -> None:
        assert self._opens.wait(20.0)
        self._copier.copy(pairs, num_tokens)


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_on_a_device_sees_each_layer_it_was_ordered_behind(
        make_layered: Make, cuda_device: Callable[[int], Any], seed: int) -> None:
    device = cuda_device(seed)
    rig = make_layered(device=device, with_store=False)
    engine = device._cuda.Stream(non_blocking=True)
    fill(rig, range(3))
    rig.fill(P[5], 44)
    rig.transfers.issue([rig.move(P[0], S[6]), *[rig.move(S[slot], P[slot]) for slot in range(3)], rig.move(P[5], S[5])])
    seen = np.zeros((LAYERS, 3, rig.block_bytes // LAYERS), np.uint8)
    late = [P[slot] for slot in (0, 1, 2, 5)]
    for layer in range(LAYERS):
        late = rig.transfers.order_layers(engine, 0, late, (layer, layer + 1), 10.0)
        assert late == ([] if layer == LAYERS - 1 else P[:3]) or set(late) <= set(P[:3])
        for slot in range(3):
            source = rig.rows(PRIMARY)[slot].ctypes.data + layer * seen.shape[2]
            device._cuda.runtime.memcpyAsync(seen[layer, slot].ctypes.data, source, seen.shape[2], 4, engine.ptr)
    done = device.engine_event(engine)
    rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(S[7], P[slot]) for slot in range(1)])  # comes after what the engine reads
    assert done.wait(10.0)
    assert (seen == np.arange(1, 4, dtype=np.uint8)[None, :, None]).all()
    rig.settle()
    rig.transfers.verify()


# -- the second opinion --------------------------------------------------------------------------------------------------

P0, S0 = (0, P[0]), (0, S[0])


def test_the_checker_tells_layers_apart() -> None:
    check = OrderCheck()
    first, second = CpuEvent(), CpuEvent()
    check.submitted("onboard", [], first, "load", [S0], [P0], (0, 2))
    check.submitted("onboard", [], second, "load", [S0], [P0], (2, 4))
    check.engine_begins([first], [P0], check.num_uses, (0, 2))
    check.raise_if_violated()
    check.engine_begins([second], [P0], check.num_uses, (2, 4))
    check.raise_if_violated()


def test_the_checker_finds_a_layer_that_was_used_too_early() -> None:
    check = OrderCheck()
    first = CpuEvent()
    check.submitted("onboard", [], first, "load", [S0], [P0], (0, 2))
    check.submitted("onboard", [], CpuEvent(), "load", [S0], [P0], (2, 4))
    check.engine_begins([first], [P0], check.num_uses, (0, 3))
    with pytest.raises(LedgerError, match=r"step of the engine .* does not wait for load"):
        check.raise_if_violated()


def test_the_checker_finds_what_overtakes_one_of_the_pieces() -> None:
    for range_ in ((0, 2), (2, 4)):
        check = OrderCheck()
        events = {layers: CpuEvent() for layers in ((0, 2), (2, 4))}
        for layers, event in events.items():
            check.submitted("onboard", [], event, "load", [S0], [P0], layers)
        check.submitted("offload", [events[range_]], CpuEvent(), "store", [(0, P[3])], [S0])
        if range_ == (2, 4):
            check.raise_if_violated()  # the last piece stands for all of its stream before it
        else:
            with pytest.raises(LedgerError, match="store"):
                check.raise_if_violated()

"""Whatever the order of completion, the bytes and the failures are those of carrying out the Moves one after another."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import CorruptBlock
from kvtier.io import layer_pieces
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import PoolIndex, level_of, pool_index, slot_of

Make = Callable[..., Any]
SLOTS = 3
MEMORY = [pool_index(level, slot) for level in range(2) for slot in range(SLOTS)]
SECONDARY = MEMORY[SLOTS:]
FILES = [pool_index(2, slot) for slot in range(SLOTS)]


class Outcome(enum.Enum):
    """What becomes of a write to the store."""

    GOOD = enum.auto()
    REFUSED = enum.auto()  #: the write fails
    ROTTEN = enum.auto()   #: it goes well, but no read of these bytes will verify


@dataclass(frozen=True)
class Step:
    """One record: a discard when there is no source."""

    source: int | None
    destination: int
    num_tokens: int = 0
    outcome: Outcome = Outcome.GOOD


def records() -> st.SearchStrategy[Step]:
    tokens = st.sampled_from([0, 0, 0, 1, 3])
    outcomes = st.sampled_from([Outcome.GOOD, Outcome.GOOD, Outcome.GOOD, Outcome.REFUSED, Outcome.ROTTEN])
    between = st.builds(Step, st.sampled_from(MEMORY), st.sampled_from(MEMORY), tokens)
    up = st.builds(Step, st.sampled_from(FILES), st.sampled_from(MEMORY), tokens)
    down = st.builds(Step, st.sampled_from(SECONDARY), st.sampled_from(FILES), st.just(0), outcomes)
    discard = st.builds(Step, st.none(), st.sampled_from(FILES))
    return st.one_of(between, between, up, down, discard).filter(lambda step: step.source != step.destination)


CALLS = st.lists(st.lists(records(), min_size=1, max_size=6), min_size=1, max_size=8)


class Model:
    """The same Moves, one after another. A failed Move leaves the bytes of its destination alone.

    A slot of the store may hold nothing (None): after a discard, or a write that failed.
    """

    def __init__(self, rig: Any) -> None:
        self.shape = rig.pools[0].primary.tensor.shape[1:]
        self.content: dict[int, np.ndarray | None] = {}
        self.spoilt: set[int] = set()  # last written by a Move that failed
        self.rotten: set[int] = set()
        self.quarantined: set[int] = set()
        self.failed: set[int] = set()

    def carry_out(self, number: int, step: Step) -> None:
        destination = step.destination
        if step.source is None:
            self.content[destination] = None
            self.spoilt.discard(destination)
            return
        data = self.content[step.source]
        fails = step.source in self.spoilt
        if step.source in FILES and not fails and (data is None or step.source in self.rotten):
            fails = True
            if data is not None:
                self.quarantined.add(step.source)
        if destination in FILES and not fails:
            self.rotten.discard(destination)
            if step.outcome is Outcome.REFUSED or destination in self.quarantined:
                fails = True
                self.content[destination] = None
            elif step.outcome is Outcome.ROTTEN:
                self.rotten.add(destination)
        if fails:
            self.failed.add(number)
            self.spoilt.add(destination)
            return
        assert data is not None
        self.spoilt.discard(destination)
        data = data.copy()
        if step.num_tokens:
            rest = self.content[destination]
            assert rest is not None
            data[:, :, :, step.num_tokens:] = rest[:, :, :, step.num_tokens:]
        self.content[destination] = data


def give_outcomes(store: Any, outcomes: dict[bytes, Outcome]) -> None:
    """Let the store do to each write what the example says; ``outcomes`` by key."""
    write = store.write_blocks

    def write_blocks(items: Any) -> Any:
        for item in items:
            place = (item.group, item.slot)
            store.fail_reads.pop(place, None)
            store.fail_writes.pop(place, None)
            if outcomes[item.key] is Outcome.REFUSED:
                store.fail_writes[place] = OSError(5, "on purpose")
            elif outcomes[item.key] is Outcome.ROTTEN:
                store.fail_reads[place] = CorruptBlock("on purpose")
        return write(items)

    store.write_blocks = write_blocks


def check(rig: Any, calls: list[list[Step]]) -> None:
    model = Model(rig)
    outcomes: dict[bytes, Outcome] = {}
    give_outcomes(rig.store, outcomes)
    generator = np.random.default_rng(11)
    for index in MEMORY + FILES:
        data = generator.random(model.shape, dtype=np.float32)
        model.content[index] = data
        row = data.reshape(-1).view(np.uint8)
        if index in FILES:
            rig.store.blocks[0, slot_of(index)] = row.copy()
        else:
            rig.rows(level_of(index))[slot_of(index)] = row
    moves: set[int] = set()
    for steps in calls:
        records = []
        for step in steps:
            number = rig.number
            model.carry_out(number, step)
            if step.source is None:
                records.append(rig.discard(slot_of(PoolIndex(step.destination))))
                continue
            move = rig.move(step.source, step.destination, step.num_tokens)
            move.key = number.to_bytes(32, "big")
            outcomes[move.key] = step.outcome
            moves.add(number)
            records.append(move)
        rig.transfers.issue(records)
    results = rig.settle()
    assert set(results) == moves
    assert len(rig.results) == len(moves)
    assert {number for number, result in results.items() if result.error is not None} == model.failed
    for index, expected in model.content.items():
        if expected is None:
            assert (0, slot_of(PoolIndex(index))) not in rig.store.blocks
            continue
        row = rig.store.blocks[0, slot_of(PoolIndex(index))] if index in FILES \
            else rig.rows(level_of(PoolIndex(index)))[slot_of(PoolIndex(index))]
        np.testing.assert_array_equal(row, expected.reshape(-1).view(np.uint8), err_msg=f"slot {index & 3}:{index >> 2}")
    assert {(0, slot_of(PoolIndex(index))) for index in model.quarantined} == {(g, s) for g, s, _ in rig.store.quarantines}


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


FEWER = settings(suppress_health_check=QUIET, max_examples=settings().max_examples // 3)  # each with threads of its own


@pytest.fixture(autouse=True)
def every_load_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_CALL_BYTES", "LEAST_UNIT_BYTES", "LEAST_PIECE_BYTES"):
        monkeypatch.setattr(layer_pieces, name, 1)


@FEWER
@given(calls=CALLS, seed=st.integers(0, 1000), staging=st.integers(1, 3), readers=st.integers(1, 3), ahead=st.integers(1, 3),
       pieces=st.integers(1, 2), is_delayed=st.booleans())
def test_bytes_and_failures_equal_those_of_sequential_execution(make_rig: Make, calls: list[list[Step]], seed: int, staging: int,
                                                                readers: int, ahead: int, pieces: int, is_delayed: bool) -> None:
    """What nothing delays or fails is planned by the thread that issues it: other code."""
    delays = Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.3, seconds=0.001)], seed) if is_delayed else None
    rig = make_rig(primary=SLOTS, secondary=SLOTS, faults=delays, staging_blocks=staging, read_threads=readers,
                   ahead=ahead, layer_pieces=pieces)
    rig.store.largest_pause = 0.001
    check(rig, calls)
    assert rig.transfers.close(10.0)


@FEWER
@given(calls=CALLS, seed=st.integers(0, 1000), staging=st.integers(1, 3), pieces=st.integers(1, 2))
def test_the_cuda_twin_keeps_the_same_order_on_the_stand_in(
        make_rig: Make, cuda_device: Make, calls: list[list[Step]], seed: int, staging: int, pieces: int) -> None:
    rig = make_rig(primary=SLOTS, secondary=SLOTS, device=cuda_device(seed), staging_blocks=staging, layer_pieces=pieces)
    rig.store.largest_pause = 0.001
    check(rig, calls)
    assert rig.transfers.close(10.0)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_long_run_of_random_moves_equals_sequential_execution(make_rig: Make, threads: int) -> None:
    generator = np.random.default_rng(threads)
    calls = []
    for _ in range(150):
        steps = []
        for _ in range(int(generator.integers(1, 9))):
            kind = generator.integers(0, 6)
            if kind == 0:
                source, destination = generator.choice(FILES), generator.choice(MEMORY)
            elif kind == 1:
                source, destination = generator.choice(SECONDARY), generator.choice(FILES)
            else:
                source, destination = generator.choice(MEMORY, 2, replace=False)
            outcome = Outcome.GOOD if kind != 1 or generator.random() < 0.9 else Outcome.REFUSED
            steps.append(Step(int(source), int(destination), 0, outcome))
        calls.append(steps)
    check(make_rig(primary=SLOTS, secondary=SLOTS, read_threads=threads, layer_pieces=2), calls)

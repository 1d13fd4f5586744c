"""A small set of pools, a store in memory, and a transfer manager over them."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.device import CudaDevice, open_device
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, PRIMARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", tokens_per_block=4)
WAIT = 10.0
"""Seconds after which a test that should have gone on is taken to hang."""


class MemoryStore:
    """The part of ``NvmeStore`` that transfers use, in memory, with gates and failures; checks its callers.

    Attributes:
        fail_reads: (group, slot) whose next reads raise this.
        read_gate, write_gate: calls wait for them; open unless a test closes them.
        largest_pause: seconds of random sleep in every call.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], np.ndarray] = {}
        self.fail_reads: dict[tuple[int, int], Exception] = {}
        self.fail_writes: dict[tuple[int, int], Exception] = {}
        self.discard_error: Exception | None = None
        self.quarantine_error: Exception | None = None
        self.quarantines: list[tuple[int, int, str]] = []
        self.discarded: list[tuple[int, int]] = []
        self.write_batches: list[int] = []
        self.reads_running = 0
        self.accepting = True
        self.read_gate = threading.Event()
        self.write_gate = threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.largest_pause = 0.0
        self.ahead = 1
        self.runs: list[tuple[int, int]] = []
        self._busy: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()
        self._random = random.Random(1)

    @property
    def accepts_writes(self) -> bool:
        return self.accepting

    def most_ahead(self, group: int) -> int:
        return self.ahead

    def read_ahead(self, group: int, first_slot: int, outs: Sequence[np.ndarray]) -> list[np.ndarray]:
        places = [(group, first_slot + number) for number in range(len(outs))]
        self.runs.append((first_slot, len(outs)))
        with self._lock:
            assert all(self._busy.get(place) != "write" for place in places), "read while it was written"
            self._busy.update(dict.fromkeys(places, "read"))
        try:
            self._pause(self.read_gate)
            for out, place in zip(outs, places, strict=True):
                out[:] = 0xEE
                if place in self.fail_reads:
                    raise TransferError("one of them cannot be read")
                if place in self.blocks:
                    out[:len(self.blocks[place])] = self.blocks[place]
        finally:
            with self._lock:
                for place in places:
                    self._busy.pop(place, None)
        return [np.array([slot]) for _, slot in places]

    def read_block(self, group: int, slot: int, key: bytes, out: np.ndarray, arrived: np.ndarray | None = None) -> None:
        place = (group, slot)
        if arrived is not None:
            assert arrived.tolist() == [slot], "another block's header"
            if place not in self.blocks or place in {(g, s) for g, s, _ in self.quarantines}:
                raise TransferError(f"no block in slot {slot}")
            return
        with self._lock:
            assert self._busy.get(place) != "write", "read while it was written"
            self._busy[place] = "read"
            self.reads_running += 1
        try:
            out[:] = 0xEE  # what was there is gone, whatever happens now
            self._pause(self.read_gate)
            if place in self.fail_reads:
                raise self.fail_reads[place]
            if place not in self.blocks or place in {(g, s) for g, s, _ in self.quarantines}:
                raise TransferError(f"no block in slot {slot}")
            out[:len(self.blocks[place])] = self.blocks[place]
        finally:
            with self._lock:
                self._busy.pop(place, None)
                self.reads_running -= 1

    def write_blocks(self, items: Sequence[BlockWrite]) -> list[Exception | None]:
        self.write_batches.append(len(items))
        places = [(item.group, item.slot) for item in items]
        assert len(set(places)) == len(places), "one slot twice in a batch"
        with self._lock:
            assert not any(place in self._busy for place in places), "written while it was read"
            self._busy.update(dict.fromkeys(places, "write"))
        try:
            self._pause(self.write_gate)
            errors: list[Exception | None] = []
            for item, place in zip(items, places, strict=True):
                quarantined = place in {(g, s) for g, s, _ in self.quarantines}
                error = TransferError("quarantined") if quarantined else self.fail_writes.get(place)
                if error is None:
                    self.blocks[place] = item.data[:LAYOUT.groups[0].block_bytes].copy()
                else:
                    self.blocks.pop(place, None)
                errors.append(error)
            return errors
        finally:
            with self._lock:
                for place in places:
                    self._busy.pop(place, None)

    def discard(self, group: int, slots: Sequence[int]) -> None:
        if self.discard_error is not None:
            raise self.discard_error
        for slot in slots:
            with self._lock:
                assert (group, slot) not in self._busy
            self.blocks.pop((group, slot), None)
            self.discarded.append((group, slot))

    def quarantine(self, group: int, slot: int, reason: str) -> None:
        if self.quarantine_error is not None:
            raise self.quarantine_error
        if (group, slot) in self.blocks:
            self.quarantines.append((group, slot, reason))

    def _pause(self, gate: threading.Event) -> None:
        if self.largest_pause:
            time.sleep(self._random.random() * self.largest_pause)
        assert gate.wait(60.0), "the test left a gate closed"


class Rig:
    """A manager with its pools and store, and numbering and generations as the ledger would give them."""

    def __init__(self, primary: int = 8, secondary: int | None = 8, with_store: bool = True, device: Any = None,
                 groups: int = 1, ahead: int = 1, layout: KVLayout = LAYOUT, **options: Any) -> None:
        group = layout.groups[0]
        self.block_bytes = group.block_bytes
        self.pools = [GroupPools(group, PrimaryPool(group, primary, "cpu"),
                                 HostArena(secondary, group.block_bytes, pin=False) if secondary else None)
                      for _ in range(groups)]
        self.store = MemoryStore()
        self.store.ahead = ahead
        options = {"check_order": True, **options}
        self.transfers = TransferManager(device or open_device("cpu"), self.pools, self.store if with_store else None,
                                         **options)
        self.generations: dict[tuple[int, int], int] = {}
        self.number = 0
        self.results: list[MoveResult] = []
        for pools in self.pools:
            pools.primary.rows.zero_()

    def move(self, source: int, destination: int, num_tokens: int = 0, group: int = 0) -> Move:
        """The next Move; its destination gets a new generation."""
        self.generations[group, destination] = self.generations.get((group, destination), 0) + 1
        made = Move(self.number, group, self.number, PoolIndex(source), self.generations.get((group, source), 0),
                    PoolIndex(destination), self.generations[group, destination], num_tokens,
                    key=slot_of(PoolIndex(source)).to_bytes(32, "big"))
        self.number += 1
        return made

    def discard(self, slot: int) -> Discard:
        made = Discard(self.number, 0, slot)
        self.number += 1
        return made

    def rows(self, level: int, group: int = 0) -> np.ndarray:
        pools = self.pools[group]
        if level == PRIMARY:
            return pools.primary.rows.numpy()
        assert pools.secondary is not None
        return pools.secondary.rows

    def fill(self, index: int, value: int) -> None:
        """Write a slot behind the manager's back, as the engine or an earlier run would have."""
        level, slot = level_of(PoolIndex(index)), slot_of(PoolIndex(index))
        if level == NVME:
            self.store.blocks[0, slot] = np.full(self.block_bytes, value, np.uint8)
        else:
            self.rows(level)[slot] = value

    def value(self, index: int) -> int:
        """The byte that fills a slot; an error when it is not the same byte everywhere."""
        level, slot = level_of(PoolIndex(index)), slot_of(PoolIndex(index))
        row = self.store.blocks[0, slot] if level == NVME else self.rows(level)[slot]
        assert (row == row[0]).all(), f"{level}:{slot} is a mixture"
        return int(row[0])

    def settle(self) -> dict[int, MoveResult]:
        """Wait until everything has finished; results by the number of the Move."""
        assert self.transfers.idle(WAIT), "transfers hang"
        self.results += self.transfers.drain()
        return {result.move.number: result for result in self.results}


def primary(slot: int) -> int:
    return pool_index(0, slot)


def secondary(slot: int) -> int:
    return pool_index(1, slot)


def nvme(slot: int) -> int:
    return pool_index(2, slot)


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and closes them at the end with every gate open (and with a stand-in for CuPy still in place)."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.store.read_gate.set()
        rig.store.write_gate.set()
        rig.transfers.close(WAIT)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], CudaDevice]:
    """A CUDA device over the stand-in of tests/io, with the given seed for its order of progress."""
    path = Path(__file__).parents[2] / "io" / "cuda_stand_in.py"
    spec = importlib.util.spec_from_file_location("cuda_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(seed: int) -> CudaDevice:
        cuda = module.StandInCuda(seed)
        monkeypatch.setitem(sys.modules, "cupy", cuda)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        return CudaDevice(cuda, 0)

    return make


@pytest.fixture
def corrupt() -> CorruptBlock:
    return CorruptBlock("checksum differs (on purpose)")


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], bool]], None]:
    return until

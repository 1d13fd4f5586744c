"""Real pools and the real NVMe store: every byte arrives, and what does not verify does not arrive."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.device import open_device
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.nvme_store import NvmeStore
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import pool_index
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32", tokens_per_block=4)
FLOATS = 2048
SLOTS = 32


class Place:
    """Three real levels of 32 blocks of 2,048 floats."""

    def __init__(self, directory: Path, faults: Faults | None, read_threads: int) -> None:
        group = LAYOUT.groups[0]
        assert group.block_bytes == 4 * FLOATS
        self.primary = PrimaryPool(group, SLOTS, "cpu")
        self.secondary = HostArena(SLOTS, group.block_bytes, pin=False)
        self.store = NvmeStore.open(directory, json.dumps({"model": "test"}), [NvmeGeometry(group.block_bytes, SLOTS)],
                                    faults=faults, free_space_reserve=0)
        self.transfers = TransferManager(open_device("cpu"), [GroupPools(group, self.primary, self.secondary)], self.store,
                                         faults=faults, read_threads=read_threads)
        self._next = 0
        self._lock = threading.Lock()

    def move(self, source: tuple[int, int], destination: tuple[int, int], key: int) -> Move:
        with self._lock:
            number = self._next
            self._next += 1
        return Move(number, 0, key, pool_index(*source), 0, pool_index(*destination), 0, key=key.to_bytes(32, "big"))

    def settle(self) -> list[MoveResult]:
        assert self.transfers.idle(30.0)
        return sorted(self.transfers.drain(), key=lambda result: result.move.number)

    def close(self) -> None:
        assert self.transfers.close(10.0)
        assert self.store.close(10.0)
        self.primary.close()
        self.secondary.close()


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(faults: Faults | None = None, read_threads: int = 2) -> Place:
        made.append(Place(tmp_path / "store", faults, read_threads))
        return made[-1]

    yield make
    for place in made:
        place.close()


def pattern(slot: int) -> np.ndarray:
    return ((np.arange(FLOATS) * 3 + slot * 101) % 997).astype(np.float32)


def floats(place: Place, slot: int) -> np.ndarray:
    return place.primary.tensor[slot].numpy().reshape(-1)


@pytest.mark.parametrize("threads", [1, 4, 8])
def test_case_G6_every_float_survives_the_way_down_and_up_with_many_threads(make_place: Any, threads: int) -> None:
    place = make_place(read_threads=threads)
    for slot in range(SLOTS):
        floats(place, slot)[:] = pattern(slot)

    def down_and_up(part: int) -> None:
        for slot in range(part, SLOTS, threads):
            place.transfers.issue([place.move((0, slot), (1, slot), slot), place.move((1, slot), (2, slot), slot)])
        for slot in range(part, SLOTS, threads):
            assert place.transfers.wait(0, [pool_index(2, slot)], 30.0)
            floats(place, slot)[:] = -1.0
            place.transfers.issue([place.move((2, slot), (0, slot), slot)])

    workers = [threading.Thread(target=down_and_up, args=(part,)) for part in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60.0)
    results = place.settle()
    assert len(results) == 3 * SLOTS
    assert [result.error for result in results if result.error is not None] == []
    mismatches = sum(int((floats(place, slot) != pattern(slot)).sum()) for slot in range(SLOTS))
    assert mismatches == 0


def write_down(place: Place, slots: int) -> None:
    for slot in range(slots):
        floats(place, slot)[:] = pattern(slot)
        place.transfers.issue([place.move((0, slot), (1, slot), slot), place.move((1, slot), (2, slot), slot)])
    assert all(result.error is None for result in place.settle())
    place.primary.rows.fill_(0xAA)


def test_a_flipped_bit_never_reaches_the_primary_pool(make_place: Any) -> None:
    place = make_place(Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, count=3)]), read_threads=1)
    write_down(place, 8)
    place.transfers.issue([place.move((2, slot), (0, slot), slot) for slot in range(8)])
    results = place.settle()
    assert [isinstance(result.error, CorruptBlock) for result in results] == [True] * 3 + [False] * 5
    assert place.store.quarantined() == [(0, 0), (0, 1), (0, 2)]
    for slot in range(3):
        assert bool((place.primary.rows[slot] == 0xAA).all()), "the slot was not touched"
    for slot in range(3, 8):
        assert np.array_equal(floats(place, slot), pattern(slot))


def test_a_block_asked_for_under_another_key_is_not_served(make_place: Any) -> None:
    place = make_place()
    write_down(place, 2)
    place.transfers.issue([place.move((2, 0), (0, 0), key=1), place.move((2, 1), (0, 1), key=1)])
    results = place.settle()
    assert isinstance(results[0].error, TransferError)
    assert results[1].error is None


def test_a_read_that_the_disk_refuses_is_a_failed_move(make_place: Any) -> None:
    place = make_place(Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=1)]), read_threads=1)
    write_down(place, 2)
    place.transfers.issue([place.move((2, slot), (0, slot), slot) for slot in range(2)])
    results = place.settle()
    assert isinstance(results[0].error, TransferError)
    assert results[1].error is None


def test_a_full_disk_fails_stores_for_a_while_and_loads_go_on(make_place: Any) -> None:
    rules = [FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=1, errno=errno.ENOSPC)]
    faults = Faults(rules)
    place = make_place(faults)
    place.transfers.issue([place.move((1, 0), (2, 0), 0)])
    assert place.settle()[0].error is not None
    assert not place.store.accepts_writes
    place.transfers.issue([place.move((1, 1), (2, 1), 1), place.move((0, 3), (1, 3), 3), place.move((1, 3), (0, 4), 3)])
    results = place.settle()
    assert "takes no writes for a while" in str(results[0].error)
    assert [result.error for result in results[1:]] == [None, None]


def test_a_discarded_block_is_gone(make_place: Any) -> None:
    place = make_place()
    write_down(place, 1)
    place.transfers.issue([Discard(place._next, 0, 0)])
    place._next += 1
    place.transfers.issue([place.move((2, 0), (0, 0), 0)])
    assert isinstance(place.settle()[0].error, TransferError)
    assert place.store.stored_blocks() == []


def test_a_manager_without_a_store_brings_in_neither_sqlite_nor_cupy() -> None:
    code = "import sys, kvtier.tiering.transfer; sys.exit(bool({'sqlite3', 'cupy', 'kvtier.io.nvme_store'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_store_reads_neighbours_at_once_and_verifies_each_block(make_place: Callable[..., Place]) -> None:
    place = make_place(read_threads=1)
    assert place.store.most_ahead(0) > 3
    for slot in range(8):
        place.secondary.rows[slot] = slot + 1
    place.transfers.issue([place.move((1, slot), (2, slot), slot) for slot in range(8)])
    assert all(result.error is None for result in place.settle())
    slab = place.store._slabs[0]
    with open(slab.file.path, "r+b") as file:
        file.seek(slab.geometry.offset(5) + 5000)
        file.write(b"\xff")
    lengths: list[int] = []
    read_ahead = slab.read_ahead

    def spy(first_slot: int, outs: list[np.ndarray]) -> list[np.ndarray]:
        lengths.append(len(outs))
        return read_ahead(first_slot, outs)

    slab.read_ahead = spy  # type: ignore[method-assign,assignment]
    place.transfers.issue([place.move((2, slot), (0, 31 - slot), slot) for slot in range(8)])
    assert [result.error is None for result in place.settle()] == [slot != 5 for slot in range(8)]
    assert lengths
    assert place.store.stats().checksum_failures == 1
    rows = place.primary.rows.numpy()
    assert all((rows[31 - slot] == slot + 1).all() for slot in range(8) if slot != 5)

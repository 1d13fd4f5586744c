"""Three groups of different kinds and sizes, real pools and the real store: each group's bytes stay its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.device import open_device
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.nvme_store import NvmeStore
from kvtier.pools.group_pools import open_group_pools
from kvtier.pools.layout import KVLayout, LayerGroup, LayerSpec
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.pools.sizing import PoolSizes, nvme_geometries
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult

WINDOW, FULL, STATES = range(3)
LAYOUT = KVLayout([LayerSpec.attention(2, 16, window=8, scale_bytes=1, indexer_bytes=20), LayerSpec.attention(4, 32, value_dim=16),
                   LayerSpec.recurrent(5000, 8), LayerSpec.attention(4, 32, value_dim=16)], "float32", 4)
SIZES = PoolSizes((6, 10, 4), (5, 8, 6), (7, 9, 5))
MODEL = {"model": "test", "layout": json.loads(LAYOUT.describe())}


class Place:
    """Pools, store and transfers of three groups."""

    def __init__(self, directory: Path, sizes: PoolSizes = SIZES, faults: Faults | None = None, read_threads: int = 2) -> None:
        self.sizes = sizes
        self.pools = open_group_pools(LAYOUT, sizes, "cpu")
        self.store = NvmeStore.open(directory, json.dumps(MODEL), nvme_geometries(LAYOUT, sizes), faults=faults, free_space_reserve=0)
        self.transfers = TransferManager(open_device("cpu"), self.pools, self.store, faults=faults, read_threads=read_threads,
                                         staging_blocks=2)
        self.keys: dict[tuple[int, int], bytes] = {}  # (group, NVMe slot) -> key that was written there last
        self._next = 0
        self._lock = threading.Lock()

    def move(self, group: int, source: int, destination: int, num_tokens: int = 0) -> Move:
        """The next Move; what goes to NVMe gets a key of its own."""
        with self._lock:
            number = self._next
            self._next += 1
            key = b""
            if level_of(PoolIndex(destination)) == NVME:
                key = self.keys[group, slot_of(PoolIndex(destination))] = number.to_bytes(32, "big")
            elif level_of(PoolIndex(source)) == NVME:
                key = self.keys[group, slot_of(PoolIndex(source))]
        return Move(number, group, number, PoolIndex(source), 0, PoolIndex(destination), 0, num_tokens, key=key)

    def discard(self, group: int, slot: int) -> Discard:
        with self._lock:
            number = self._next
            self._next += 1
        return Discard(number, group, slot)

    def put(self, group: int, slot: int, data: np.ndarray) -> None:
        self.pools[group].primary.write_block(slot, torch.from_numpy(data))

    def get(self, group: int, index: int) -> np.ndarray:
        level, slot = level_of(PoolIndex(index)), slot_of(PoolIndex(index))
        pools = self.pools[group]
        if level == PRIMARY:
            return pools.primary.read_block(slot).numpy()
        if level == SECONDARY:
            assert pools.secondary is not None
            return np.array(pools.secondary.rows[slot])
        out = np.empty(pools.group.block_bytes, np.uint8)
        self.store.read_block(group, slot, self.keys[group, slot], out)
        return out

    def settle(self) -> list[MoveResult]:
        assert self.transfers.idle(30.0), "transfers hang"
        return sorted(self.transfers.drain(), key=lambda result: result.move.number)

    def close(self) -> None:
        assert self.transfers.close(10.0)
        assert self.store.close(10.0)
        for pools in self.pools:
            pools.close()


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(**options: Any) -> Place:
        made.append(Place(tmp_path / "store", **options))
        return made[-1]

    yield make
    for place in made:
        place.close()


def content(group: int, name: int) -> np.ndarray:
    return np.random.default_rng([group, name]).integers(0, 256, LAYOUT.groups[group].block_bytes, dtype=np.uint8)


def at(level: int, slot: int) -> int:
    return pool_index(level, slot)


def first_tokens(group: LayerGroup, data: np.ndarray, rest: np.ndarray, num_tokens: int) -> np.ndarray:
    """``rest`` with the first tokens of ``data`` and with all of its data that cannot be cut at a token."""
    mixed = data.copy()
    for section in group.sections:
        if section.is_by_token:
            part = slice(section.offset, section.offset + section.num_bytes)
            lines = (-1, group.tokens_per_block, section.head_bytes // group.tokens_per_block)
            mixed[part].reshape(lines)[:, num_tokens:] = rest[part].reshape(lines)[:, num_tokens:]
    return mixed


def test_equal_slots_of_different_groups_are_different_places(make_place: Any) -> None:
    place = make_place()
    for group in (WINDOW, FULL, STATES):
        for slot in range(4):
            place.put(group, slot, content(group, slot))
    records = []
    for slot in range(4):
        for group in (WINDOW, FULL, STATES):
            records += [place.move(group, at(PRIMARY, slot), at(SECONDARY, slot)), place.move(group, at(SECONDARY, slot), at(NVME, slot))]
    place.transfers.issue(records)
    assert [result.error for result in place.settle()] == [None] * 24
    for group in (WINDOW, FULL, STATES):
        for slot in range(4):
            place.put(group, slot, content(group, 99))
    back = [place.move(group, at(NVME, slot), at(PRIMARY, 3 - slot)) for group in (STATES, WINDOW, FULL) for slot in range(4)]
    place.transfers.issue(back)
    results = place.settle()
    assert [result.error for result in results] == [None] * 12
    assert [result.num_bytes for result in results] == [LAYOUT.groups[move.group].block_bytes for move in back]
    for group in (WINDOW, FULL, STATES):
        for slot in range(4):
            for index in (at(PRIMARY, 3 - slot), at(SECONDARY, slot), at(NVME, slot)):
                np.testing.assert_array_equal(place.get(group, index), content(group, slot))


@pytest.mark.parametrize("level", [PRIMARY, SECONDARY, NVME])
def test_the_first_tokens_of_a_block_arrive_from_every_level_and_side_data_whole(make_place: Any, level: int) -> None:
    place = make_place()
    for group in (WINDOW, FULL, STATES):
        place.put(group, 0, content(group, 0))
        place.put(group, 1, content(group, 1))
        place.transfers.issue([place.move(group, at(PRIMARY, 0), at(SECONDARY, 0)), place.move(group, at(SECONDARY, 0), at(NVME, 0)),
                               place.move(group, at(level, 0), at(PRIMARY, 1), num_tokens=3)])
    results = place.settle()
    assert [result.error for result in results] == [None] * 9
    for group in (WINDOW, FULL, STATES):
        expected = first_tokens(LAYOUT.groups[group], content(group, 0), content(group, 1), 3)
        np.testing.assert_array_equal(place.get(group, at(PRIMARY, 1)), expected)
        assert results[3 * group + 2].num_bytes == LAYOUT.groups[group].copied_bytes(3)
    assert not np.array_equal(place.get(FULL, at(PRIMARY, 1)), content(FULL, 0))
    np.testing.assert_array_equal(place.get(STATES, at(PRIMARY, 1)), content(STATES, 0))


def test_a_discard_forgets_the_slot_of_its_own_group_only(make_place: Any) -> None:
    place = make_place()
    for group in (WINDOW, FULL, STATES):
        place.put(group, 0, content(group, 0))
        place.transfers.issue([place.move(group, at(PRIMARY, 0), at(SECONDARY, 0)), place.move(group, at(SECONDARY, 0), at(NVME, 0))])
    place.transfers.issue([place.discard(FULL, 0)])
    place.settle()
    assert sorted((block.group, block.slot) for block in place.store.stored_blocks()) == [(WINDOW, 0), (STATES, 0)]
    place.transfers.issue([place.move(group, at(NVME, 0), at(PRIMARY, 2)) for group in (WINDOW, FULL, STATES)])
    assert [result.error is None for result in place.settle()] == [True, False, True]


def test_a_bad_read_in_one_group_is_no_other_groups_business(make_place: Any) -> None:
    place = make_place(faults=Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, count=1)]), read_threads=1)
    for group in (WINDOW, FULL, STATES):
        place.put(group, 1, content(group, 1))
        place.transfers.issue([place.move(group, at(PRIMARY, 1), at(SECONDARY, 1)), place.move(group, at(SECONDARY, 1), at(NVME, 1))])
    place.settle()
    place.transfers.issue([place.move(group, at(NVME, 1), at(PRIMARY, 0)) for group in (FULL, WINDOW, STATES)])
    results = place.settle()
    assert [isinstance(result.error, CorruptBlock) for result in results] == [True, False, False]
    assert place.store.quarantined() == [(FULL, 1)]
    assert place.store.is_quarantined(FULL, 1)
    assert not place.store.is_quarantined(WINDOW, 1)


def test_waiting_for_one_group_does_not_wait_for_another(make_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place()
    gate = threading.Event()
    read_block = place.store.read_block

    def slow(group: int, slot: int, key: bytes, out: np.ndarray) -> None:
        if group == FULL:
            assert gate.wait(30.0)
        read_block(group, slot, key, out)

    monkeypatch.setattr(place.store, "read_block", slow)
    for group in (WINDOW, FULL, STATES):
        place.put(group, 0, content(group, 0))
        place.transfers.issue([place.move(group, at(PRIMARY, 0), at(SECONDARY, 0)), place.move(group, at(SECONDARY, 0), at(NVME, 0))])
    place.settle()
    place.transfers.issue([place.move(group, at(NVME, 0), at(PRIMARY, 2)) for group in (FULL, WINDOW, STATES)])
    slots = [at(PRIMARY, 2)]
    assert place.transfers.wait(WINDOW, slots, 30.0)
    assert place.transfers.wait(STATES, slots, 30.0)
    assert place.transfers.order_before_engine(None, STATES, slots, 30.0)
    assert place.transfers.pending_files(FULL, slots)
    assert not place.transfers.wait(FULL, slots, 0.0)
    gate.set()
    assert place.transfers.wait(FULL, slots, 30.0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_moves_of_three_groups_at_once_equal_those_in_sequence(make_place: Any, seed: int) -> None:
    delays = Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.1, seconds=0.001)], seed)
    place = make_place(faults=delays, read_threads=3)
    models: list[dict[int, np.ndarray]] = [{} for _ in LAYOUT.groups]
    failures: list[BaseException] = []

    def drive(group: int) -> None:
        """One thread for each group: what each place holds is known from this thread's own order."""
        generator = np.random.default_rng([seed, group])
        model, shape = models[group], LAYOUT.groups[group]
        slots = [[at(level, slot) for slot in range(counts[group])]
                 for level, counts in enumerate((SIZES.primary, SIZES.secondary, SIZES.nvme))]
        for slot in range(SIZES.primary[group]):
            model[at(PRIMARY, slot)] = content(group, slot)
        for _ in range(40):
            records: list[Move | Discard] = []
            for _ in range(int(generator.integers(1, 7))):
                filled = list(model)
                source = int(generator.choice(filled))
                if level_of(PoolIndex(source)) == NVME and generator.random() < 0.2:
                    records.append(place.discard(group, slot_of(PoolIndex(source))))
                    del model[source]
                    continue
                levels = [PRIMARY, SECONDARY] + [NVME] * (level_of(PoolIndex(source)) == SECONDARY)
                destination = int(generator.choice(slots[int(generator.choice(levels))]))
                if destination == source:
                    continue
                tokens = int(generator.integers(0, 4)) if destination in model and level_of(PoolIndex(destination)) != NVME else 0
                records.append(place.move(group, source, destination, tokens))
                model[destination] = first_tokens(shape, model[source], model[destination], tokens) if tokens else model[source]
            place.transfers.issue(records)

    def run(group: int) -> None:
        try:
            drive(group)
        except BaseException as error:
            failures.append(error)

    for group in (WINDOW, FULL, STATES):
        for slot in range(SIZES.primary[group]):
            place.put(group, slot, content(group, slot))
    threads = [threading.Thread(target=run, args=(group,)) for group in (WINDOW, FULL, STATES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failures
    assert [result.error for result in place.settle() if result.error is not None] == []
    for group, model in enumerate(models):
        for index, expected in model.items():
            np.testing.assert_array_equal(place.get(group, index), expected, err_msg=f"group {group}, slot {index & 3}:{index >> 2}")
    stored = {(block.group, block.slot): block.key for block in place.store.stored_blocks()}
    assert set(stored) == {(group, slot_of(PoolIndex(index))) for group, model in enumerate(models) for index in model if index & 3 == NVME}
    assert all(place.keys[where] == key for where, key in stored.items())


def test_blocks_of_all_groups_are_found_again_after_a_restart(make_place: Any) -> None:
    place = make_place()
    for group in (WINDOW, FULL, STATES):
        place.put(group, 2, content(group, 2))
        place.transfers.issue([place.move(group, at(PRIMARY, 2), at(SECONDARY, 1)), place.move(group, at(SECONDARY, 1), at(NVME, 3))])
    place.settle()
    place.close()
    again = make_place()
    rows = {(block.group, block.slot): block.key for block in again.store.stored_blocks()}
    assert set(rows) == {(group, 3) for group in (WINDOW, FULL, STATES)}
    again.keys = rows
    again.transfers.issue([again.move(group, at(NVME, 3), at(PRIMARY, 0)) for group in (WINDOW, FULL, STATES)])
    assert [result.error for result in again.settle()] == [None] * 3
    for group in (WINDOW, FULL, STATES):
        np.testing.assert_array_equal(again.get(group, at(PRIMARY, 0)), content(group, 2))


def test_a_group_may_have_no_lower_level_at_all(make_place: Any) -> None:
    place = make_place(sizes=PoolSizes((6, 10, 4), (5, 0, 6), (7, 0, 0)))
    place.put(WINDOW, 0, content(WINDOW, 0))
    place.transfers.issue([place.move(WINDOW, at(PRIMARY, 0), at(SECONDARY, 0)), place.move(WINDOW, at(SECONDARY, 0), at(NVME, 0))])
    assert [result.error for result in place.settle()] == [None, None]
    np.testing.assert_array_equal(place.get(WINDOW, at(NVME, 0)), content(WINDOW, 0))
    with pytest.raises(TransferError, match="group 1 has no way from primary to secondary"):
        place.transfers.issue([place.move(FULL, at(PRIMARY, 0), at(SECONDARY, 0))])
    place.put(FULL, 0, content(FULL, 0))
    place.transfers.issue([place.move(FULL, at(PRIMARY, 0), at(PRIMARY, 1))])
    assert [result.error for result in place.settle()] == [None]
    np.testing.assert_array_equal(place.get(FULL, at(PRIMARY, 1)), content(FULL, 0))


@pytest.mark.parametrize("group", [3, -1])
def test_a_group_that_does_not_exist_is_refused_before_anything_is_queued(make_place: Any, group: int) -> None:
    place = make_place()
    for record in (Move(1, group, 0, pool_index(PRIMARY, 0), 0, pool_index(PRIMARY, 1), 0), Discard(1, group, 0)):
        with pytest.raises(TransferError, match=rf"group {group}; there are groups 0 to 2"):
            place.transfers.issue([place.move(WINDOW, at(PRIMARY, 0), at(PRIMARY, 1)), record])
    assert place.settle() == []


@pytest.mark.parametrize("layers", [
    [LayerSpec.attention(2, 16, window=9, scale_bytes=1, indexer_bytes=20), *LAYOUT.layers[1:]],   # the window of one group
    [LAYOUT.layers[0], LAYOUT.layers[1], LayerSpec.recurrent(5000, 16), LAYOUT.layers[3]],         # how often a state is kept
    [LayerSpec.attention(2, 16, window=8, scale_bytes=11, indexer_bytes=0), *LAYOUT.layers[1:]],   # what lies beside, of one size
    [LAYOUT.layers[1], LAYOUT.layers[0], LAYOUT.layers[2], LAYOUT.layers[3]],                      # which layers
])
def test_a_directory_of_other_groups_is_refused(make_place: Any, tmp_path: Path, layers: list[LayerSpec]) -> None:
    make_place().close()
    other = KVLayout(layers, "float32", 4)
    namespace = json.dumps({"model": "test", "layout": json.loads(other.describe())})
    with pytest.raises(ConfigError, match="belongs to another cache: "):
        NvmeStore.open(tmp_path / "store", namespace, nvme_geometries(other, SIZES), free_space_reserve=0)

"""Block copies between host memories, byte for byte."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.io import copiers, row_copier
from kvtier.io.copiers import HostCopier, open_copiers
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import LEVEL_NAMES, NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import PrimaryPool

pytestmark = pytest.mark.usefixtures("copies")

SLOTS = 12
SMALL = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "dtype": "float32", "tokens_per_block": 4}  # 1,536 bytes: strided
PAGES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "tokens_per_block": 8}  # 8,192: dense
ROUTES = [(destination, source) for destination in (PRIMARY, SECONDARY) for source in (PRIMARY, SECONDARY, NVME)]

Place = tuple[GroupPools, HostArena]


def make_pools(shape: dict[str, int | str]) -> Place:
    layout = KVLayout.uniform(**shape)  # type: ignore[arg-type]
    group = layout.groups[0]
    pools = GroupPools(group, PrimaryPool(group, SLOTS, "cpu"), HostArena(SLOTS, group.block_bytes, pin=False))
    return pools, HostArena(SLOTS, group.block_bytes, pin=False)


def rows_of(place: Place, level: int) -> np.ndarray:
    pools, staging = place
    if level == PRIMARY:
        return pools.primary.rows.numpy()
    memory = pools.secondary if level == SECONDARY else staging
    assert memory is not None
    return memory.rows


def fill(place: Place) -> None:
    generator = np.random.default_rng(3)
    for level in (PRIMARY, SECONDARY, NVME):
        rows = rows_of(place, level)
        rows[:] = generator.integers(0, 256, rows.shape, dtype=np.uint8)


@pytest.fixture(params=[SMALL, PAGES], ids=["strided", "dense"])
def place(request: pytest.FixtureRequest) -> Place:
    made = make_pools(request.param)
    fill(made)
    return made


def name(route: tuple[int, int]) -> str:
    return f"{LEVEL_NAMES[route[1]]}-{LEVEL_NAMES[route[0]]}"


@pytest.mark.parametrize("route", ROUTES, ids=name)
@pytest.mark.parametrize("pairs", [
    [(3, 5)],
    [(0, 4), (1, 5), (2, 6)],             # one run
    [(3, 4), (0, 5), (2, 6), (1, 7)],     # scattered sources, neighbouring destinations
    [(0, 9), (1, 4), (2, 6)],             # neighbouring sources, scattered destinations
    [(2, 11), (0, 4), (0, 5), (3, 7)],    # one source twice
], ids=["one", "run", "gather", "scatter", "mixed"])
def test_exactly_the_named_slots_are_copied(place: Place, route: tuple[int, int], pairs: list[tuple[int, int]]) -> None:
    destination, source = route
    expected = {level: rows_of(place, level).copy() for level in (PRIMARY, SECONDARY, NVME)}
    for from_slot, to_slot in pairs:
        expected[destination][to_slot] = expected[source][from_slot]
    pools, staging = place
    open_copiers(pools, staging, "cpu")[route].copy(pairs)
    for level, rows in expected.items():
        np.testing.assert_array_equal(rows_of(place, level), rows)


@settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_set_of_independent_pairs_is_copied_byte_for_byte(
        place: Place, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copier, "CALL_BYTES", data.draw(st.sampled_from([1, 20_000, 1 << 20])))
    monkeypatch.setattr(row_copier, "_WORTH_RELEASING", data.draw(st.sampled_from([0, 20_000, 1 << 20])))
    monkeypatch.setattr(row_copier, "_PUT_KEEPS_GIL", data.draw(st.sampled_from([4, 500, 5_000])))
    monkeypatch.setattr(row_copier, "_ITEM_BYTES", data.draw(st.sampled_from([1, 1_000, 256 << 10])))
    monkeypatch.setattr(row_copier, "_LEAST_HALVED", data.draw(st.sampled_from([1, 2 << 20])))
    destination, source = route = data.draw(st.sampled_from(ROUTES))
    middle = SLOTS // 2  # inside one memory no destination may be a source
    slots, to_slots = (st.integers(0, last - 1) for last in ((middle, middle) if source == destination else (SLOTS, SLOTS)))
    pairs = data.draw(st.lists(st.tuples(slots, to_slots), max_size=SLOTS, unique_by=lambda pair: pair[1]))
    if source == destination:
        pairs = [(from_slot, to_slot + middle) for from_slot, to_slot in pairs]
    fill(place)
    expected = rows_of(place, destination).copy()
    for from_slot, to_slot in pairs:
        expected[to_slot] = rows_of(place, source)[from_slot]
    pools, staging = place
    open_copiers(pools, staging, "cpu")[route].copy(pairs)
    np.testing.assert_array_equal(rows_of(place, destination), expected)


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_a_partial_copy_moves_the_first_tokens_of_each_head_layer_and_field(place: Place, route: tuple[int, int]) -> None:
    destination, source = route
    pools, staging = place
    group = pools.group
    shape = (SLOTS, *group.block_shape[:4], group.page_bytes // group.spec.num_kv_heads // group.tokens_per_block)
    before = rows_of(place, destination).copy()
    origin = rows_of(place, source).copy()
    open_copiers(pools, staging, "cpu")[route].copy([(2, 6), (3, 9)], num_tokens=3)
    expected = before.reshape(shape)
    for from_slot, to_slot in ((2, 6), (3, 9)):
        expected[to_slot, :, :, :, :3] = origin.reshape(shape)[from_slot, :, :, :, :3]
    np.testing.assert_array_equal(rows_of(place, destination), expected.reshape(SLOTS, -1))


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("pair", [(SLOTS, 0), (0, SLOTS), (-1, 0)])
def test_a_slot_outside_the_pool_copies_nothing(place: Place, pair: tuple[int, int], num_tokens: int) -> None:
    pools, staging = place
    before = rows_of(place, SECONDARY).copy()
    with pytest.raises(IndexError):
        open_copiers(pools, staging, "cpu")[SECONDARY, PRIMARY].copy([(0, 1), pair], num_tokens)
    np.testing.assert_array_equal(rows_of(place, SECONDARY), before)


def test_many_blocks_take_few_calls(copies: str) -> None:
    """Each call that releases the GIL may wait a switch interval to get it back."""
    place = make_pools(PAGES)
    copier = open_copiers(place[0], place[1], "cpu")[SECONDARY, PRIMARY]
    assert isinstance(copier, HostCopier)
    assert len(copier.plan([(slot, slot) for slot in range(SLOTS)])) == 1
    assert len(copier.plan([(SLOTS - 1 - slot, slot) for slot in range(SLOTS)])) == 1
    assert len(copier.plan([(slot, slot * 5 % SLOTS) for slot in range(SLOTS)])) == 1  # neighbours that are scattered
    assert len(copier.plan([(slot * 5 % SLOTS, slot) for slot in range(SLOTS)])) == 1  # scattered that become neighbours
    assert len(copier.plan([(1, 1), (0, 2), (5, 7)])) == (1 if copies == "compiled" else 2)


@pytest.mark.parametrize("pairs", [
    [(slot * 5 % SLOTS, slot) for slot in range(SLOTS)],
    [(slot, slot * 5 % SLOTS) for slot in range(SLOTS - 1)],  # with a gap: otherwise it would be a gather
    [(2, 7)],
], ids=["gather", "scatter", "one"])
@pytest.mark.parametrize("num_tokens", [0, 8], ids=["whole", "partial"])
def test_other_threads_run_while_blocks_are_copied(pairs: list[tuple[int, int]], num_tokens: int) -> None:
    """An engine computes meanwhile: no copy of more than some microseconds may keep the GIL."""
    group = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float32", tokens_per_block=16).groups[0]  # 4 MiB
    copier = open_copiers(GroupPools(group, PrimaryPool(group, SLOTS, "cpu"), HostArena(SLOTS, group.block_bytes, pin=False)),
                          None, "cpu")[SECONDARY, PRIMARY]
    assert isinstance(copier, HostCopier)
    calls = copier.plan(pairs, num_tokens)
    # On a busy machine, or with a single core, the other thread may wake up too late to be seen, so they are made for a while; but it is
    # never seen when the GIL was kept.
    assert any(another_thread_runs_beside(50 * calls) for _ in range(100))


@pytest.mark.parametrize("num_tokens", [0, 8], ids=["whole", "partial"])
@pytest.mark.parametrize("layer_first", [False, True])
def test_a_block_that_is_copied_within_a_pool_is_copied_once(layer_first: bool, num_tokens: int) -> None:
    """The blocks of a layer-first pool lie between one another: that is no overlap, and no reason for a copy in between."""
    group = KVLayout.uniform(num_layers=8, num_kv_heads=8, head_dim=128, dtype="float32", tokens_per_block=16).groups[0]  # 1 MiB
    pool = PrimaryPool(group, SLOTS, "cpu", layer_first)
    pool.sections[0].tensor.normal_(generator=torch.Generator().manual_seed(1))
    expected = pool.sections[0].tensor.clone()
    tokens = slice(num_tokens or None)
    expected[7, ..., tokens, :] = expected[2, ..., tokens, :]
    calls = HostCopier(pool, pool, group).plan([(2, 7)], num_tokens)
    tracemalloc.start()
    try:
        for call in calls:
            call()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < group.block_bytes // 16
    assert torch.equal(pool.sections[0].tensor, expected)


@pytest.mark.parametrize("copies", ["library"], indirect=True)
@pytest.mark.parametrize("route", [(SECONDARY, PRIMARY), (PRIMARY, PRIMARY)], ids=name)
@pytest.mark.parametrize("pairs", [
    [(slot * 5 % 6, slot + 6) for slot in range(6)],
    [(slot, slot * 5 % 6 + 6) for slot in range(5)],
    [(slot, slot + 6) for slot in range(6)],
    [(2, 7)],
], ids=["gather", "scatter", "run", "one"])
def test_no_move_is_so_long_that_it_goes_past_the_caches(route: tuple[int, int], pairs: list[tuple[int, int]]) -> None:
    group = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16).groups[0]  # 2 MiB
    pools = GroupPools(group, PrimaryPool(group, SLOTS, "cpu"), HostArena(SLOTS, group.block_bytes, pin=False))
    copier = open_copiers(pools, None, "cpu")[route]
    assert isinstance(copier, HostCopier)
    calls = copier.plan(pairs)
    assert sum(array.nbytes for array, _ in map(moved, calls)) == len(pairs) * group.block_bytes
    assert all(longest <= row_copier._ITEM_BYTES for _, longest in map(moved, calls))


def moved(call: row_copier.Call) -> tuple[np.ndarray, int]:
    """What a call writes (of ``put``: what it reads), and how much of it one ``memmove`` moves at most."""
    assert isinstance(call, partial)
    if call.func is not np.copyto:
        array = call.args[2] if call.func.__name__ == "take" else call.args[1]
        return array, array.itemsize
    array, longest = call.args[0], 1
    for length, stride in zip(array.shape[::-1], array.strides[::-1], strict=True):  # numpy joins what lies side by side
        if stride == longest:
            longest *= length
        elif length > 1:
            break
    return array, longest


def another_thread_runs_beside(calls: list[row_copier.Call]) -> bool:
    """Whether a thread that was woken just before these calls ran before they were over. Nobody takes the GIL from them."""
    gate, is_there, turns = threading.Lock(), threading.Event(), []

    def take_turn() -> None:
        is_there.set()
        gate.acquire()
        turns.append(True)

    gate.acquire()
    other = threading.Thread(target=take_turn)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # before the thread is there: it must not have begun to wait for the GIL with a shorter one
    try:
        other.start()
        assert is_there.wait(60.0)
        gate.release()
        for call in calls:
            call()
        return bool(turns)
    finally:
        sys.setswitchinterval(interval)
        other.join(60.0)


def test_a_call_that_was_planned_copies_when_it_is_made() -> None:
    place = make_pools(PAGES)
    fill(place)
    copier = open_copiers(place[0], place[1], "cpu")[SECONDARY, PRIMARY]
    assert isinstance(copier, HostCopier)
    before = rows_of(place, SECONDARY).copy()
    calls = copier.plan([(3, 1), (0, 2), (5, 7), (6, 9)])
    np.testing.assert_array_equal(rows_of(place, SECONDARY), before)
    for call in calls:
        call()
    for source, destination in [(3, 1), (0, 2), (5, 7), (6, 9)]:
        before[destination] = rows_of(place, PRIMARY)[source]
    np.testing.assert_array_equal(rows_of(place, SECONDARY), before)


def test_without_a_secondary_level_there_is_no_route_to_it() -> None:
    group = KVLayout.uniform(**SMALL).groups[0]  # type: ignore[arg-type]
    table = open_copiers(GroupPools(group, PrimaryPool(group, 2, "cpu"), None), None, "cpu")
    assert set(table) == {(PRIMARY, PRIMARY)}


def test_the_typed_view_of_an_arena_is_the_same_memory() -> None:
    pools, staging = make_pools(SMALL)
    blocks = copiers.typed_blocks(staging, pools.group)
    blocks[3] = 7.5
    assert torch.equal(torch.from_numpy(staging.rows[3].copy()).view(torch.float32), torch.full((384,), 7.5))

"""Copies of blocks that consist of several sections: together when whole, and what cannot be cut stays whole when partial."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, TransferError
from kvtier.io import copiers, cuda_row_copier
from kvtier.io.copiers import HostCopier, open_copiers
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_stream import CudaStream
from kvtier.io.device import CudaDevice
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout, LayerGroup, LayerSpec
from kvtier.pools.pool_index import LEVEL_NAMES, NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import PrimaryPool

pytestmark = pytest.mark.usefixtures("copies")

SLOTS = 8
TOKENS = 4

GROUPS = {
    "plain": LayerSpec.attention(2, 8),
    "split": LayerSpec.attention(2, 8, value_dim=4),
    "mla": LayerSpec.mla(6, 2, indexer_bytes=12),
    "recurrent": LayerSpec.recurrent(100, 8),
    "scales": LayerSpec.attention(2, 32, dtype="uint8", scale_bytes=2),
    "all": LayerSpec.attention(2, 16, value_dim=32, dtype="bfloat16", scale_bytes=3, indexer_bytes=7),
    "dense": LayerSpec.attention(2, 128, dtype="bfloat16", scale_bytes=128, indexer_bytes=512),  # 8 KiB, 8 KiB and 4 KiB for two layers
}
ROUTES = [(destination, source) for destination in (PRIMARY, SECONDARY) for source in (PRIMARY, SECONDARY, NVME)]


def group_of(name: str, layers: int = 2) -> LayerGroup:
    return KVLayout([GROUPS[name]] * layers, "float32", TOKENS).groups[0]


class Place:
    """Three memories of one group with random content."""

    def __init__(self, group: LayerGroup, layer_first: bool = False) -> None:
        self.group = group
        self.pools = GroupPools(group, PrimaryPool(group, SLOTS, "cpu", layer_first), HostArena(SLOTS, group.block_bytes, pin=False))
        self.staging = HostArena(SLOTS, group.block_bytes, pin=False)
        self.fill()

    def fill(self) -> None:
        generator = np.random.default_rng(5)
        for level in (PRIMARY, SECONDARY, NVME):
            for slot in range(SLOTS):
                data = generator.integers(0, 256, self.group.block_bytes, dtype=np.uint8)
                if level == PRIMARY:
                    self.pools.primary.write_block(slot, torch.from_numpy(data))
                else:
                    self.arena(level).rows[slot] = data

    def arena(self, level: int) -> HostArena:
        arena = self.staging if level == NVME else self.pools.secondary
        assert arena is not None
        return arena

    def now(self, level: int) -> np.ndarray:
        """uint8 [slots, block bytes]."""
        if level == PRIMARY:
            return np.stack([self.pools.primary.read_block(slot).numpy() for slot in range(SLOTS)])
        return np.array(self.arena(level).rows)

    def all(self) -> dict[int, np.ndarray]:
        return {level: self.now(level) for level in (PRIMARY, SECONDARY, NVME)}


def block_after(group: LayerGroup, before: np.ndarray, data: np.ndarray, num_tokens: int) -> np.ndarray:
    """A block after a copy of ``data``, from the description of what a block holds (not from its sections)."""
    spec, layers = group.spec, group.num_layers
    is_packed = group.dtype == "uint8" and spec.scale_bytes > 0   # numbers of 4 bits go whole
    if not 0 < num_tokens < TOKENS or spec.kind == "recurrent" or is_packed:
        return data.copy()
    size = {"float32": 4, "bfloat16": 2, "uint8": 1}[group.dtype]
    fields = [(layers * spec.kv_factor, spec.head_dim)] if not group.is_split else [(layers, spec.head_dim), (layers, spec.value_dim)]
    after, start = data.copy(), 0
    for count, dim in fields:
        length = count * spec.num_kv_heads * TOKENS * dim * size
        shape = (count, spec.num_kv_heads, TOKENS, dim * size)
        after[start:start + length].reshape(shape)[:, :, num_tokens:] = before[start:start + length].reshape(shape)[:, :, num_tokens:]
        start += length
    return after


def check(place: Place, copier: Any, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int) -> None:
    destination, source = route
    expected = place.all()
    before = {level: rows.copy() for level, rows in expected.items()}
    for from_slot, to_slot in pairs:
        expected[destination][to_slot] = block_after(place.group, before[destination][to_slot], before[source][from_slot], num_tokens)
    copier(pairs, num_tokens)
    for level, rows in expected.items():
        np.testing.assert_array_equal(place.now(level), rows, err_msg=LEVEL_NAMES[level])


@pytest.fixture(params=GROUPS)
def place(request: pytest.FixtureRequest) -> Place:
    return Place(group_of(request.param))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStream]:
    spec = importlib.util.spec_from_file_location("cuda_stand_in", Path(__file__).with_name("cuda_stand_in.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cuda_stand_in", module)
    spec.loader.exec_module(module)
    cuda = module.StandInCuda(3)
    monkeypatch.setitem(sys.modules, "cupy", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    made = CudaDevice(cuda, 0).stream("test")
    assert isinstance(made, CudaStream)
    yield made
    assert made.close(60.0)


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(4, SLOTS - 1)), min_size=1, max_size=4, unique_by=lambda pair: pair[1])
QUIET = settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture], max_examples=40)


@QUIET
@given(route=st.sampled_from(ROUTES), pairs=PAIRS, num_tokens=st.integers(-1, TOKENS + 1))
def test_every_section_of_a_block_arrives(place: Place, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int) -> None:
    check(place, open_copiers(place.pools, place.staging, "cpu")[route].copy, route, pairs, num_tokens)


@pytest.fixture(params=GROUPS)
def layer_first(request: pytest.FixtureRequest) -> Place:
    return Place(group_of(request.param), layer_first=True)


@QUIET
@given(route=st.sampled_from(ROUTES), pairs=PAIRS, num_tokens=st.integers(-1, TOKENS + 1))
def test_every_section_of_a_block_arrives_from_and_in_a_layer_first_pool(
        layer_first: Place, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int) -> None:
    check(layer_first, open_copiers(layer_first.pools, layer_first.staging, "cpu")[route].copy, route, pairs, num_tokens)


def test_a_batch_of_blocks_of_a_layer_first_pool_is_one_call() -> None:
    group = KVLayout([LayerSpec.attention(2, 128, dtype="bfloat16")] * 4, "bfloat16", TOKENS).groups[0]  # 4 layers of 4 KiB
    pools = GroupPools(group, PrimaryPool(group, SLOTS, "cpu", layer_first=True), HostArena(SLOTS, group.block_bytes, pin=False))
    table = open_copiers(pools, None, "cpu")
    for route, pairs in (((SECONDARY, PRIMARY), [(5, 2), (1, 3), (7, 4)]), ((PRIMARY, SECONDARY), [(2, 5), (3, 1), (4, 7)])):
        copier = table[route]
        assert isinstance(copier, HostCopier)
        assert len(copier.plan(pairs)) == 1


def test_what_a_layer_first_pool_does_not_have_it_says() -> None:
    pool = Place(group_of("plain"), layer_first=True).pools.primary
    assert pool.layer_buffer(1).is_contiguous()
    with pytest.raises(ConfigError, match="no pages over all layers"):
        _ = pool.pages


@pytest.fixture(params=["block-first", "layer-first"])
def either(request: pytest.FixtureRequest, place: Place) -> Place:
    return place if request.param == "block-first" else Place(place.group, layer_first=True)


@QUIET
@given(route=st.sampled_from(ROUTES), pairs=PAIRS, num_tokens=st.integers(-1, TOKENS + 1))
def test_the_cuda_twin_copies_the_same_bytes_on_the_stand_in(
        either: Place, stream: CudaStream, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int) -> None:
    copier = open_copiers(either.pools, either.staging, "cuda:0")[route]

    def copy(pairs: list[tuple[int, int]], num_tokens: int) -> None:
        event = stream.submit(lambda: copier.copy(pairs, num_tokens))
        assert event.wait(60.0)
        assert event.error is None

    check(either, copy, route, pairs, num_tokens)


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("pair", [(SLOTS, 0), (0, SLOTS), (-1, 0)])
def test_a_slot_outside_copies_no_section(place: Place, pair: tuple[int, int], num_tokens: int) -> None:
    before = place.all()
    with pytest.raises(IndexError):
        open_copiers(place.pools, place.staging, "cpu")[SECONDARY, PRIMARY].copy([(0, 1), pair], num_tokens)
    for level, rows in before.items():
        np.testing.assert_array_equal(place.now(level), rows)


def test_a_run_of_neighbours_is_one_copy_for_each_section_and_one_in_all_between_host_memories(stream: CudaStream) -> None:
    place = Place(group_of("all"))
    table = open_copiers(place.pools, place.staging, "cuda:0")
    pairs = [(0, 4), (1, 5), (2, 6)]
    for route, copies in (((SECONDARY, PRIMARY), 4), ((PRIMARY, NVME), 4), ((SECONDARY, NVME), 1)):
        calls = sys.modules["cupy"].runtime.calls  # type: ignore[attr-defined]
        calls.clear()
        assert stream.submit(lambda route=route: table[route].copy(pairs)).wait(60.0)  # type: ignore[misc]
        assert len(calls) == copies


# -- some of the layers --------------------------------------------------------------------------------------------------

LAYERS = 3
RANGES = st.sampled_from([(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)])
INTO_PRIMARY = [route for route in ROUTES if PRIMARY in route and route != (PRIMARY, PRIMARY)]


@pytest.fixture(params=[(name, layer_first) for name in GROUPS for layer_first in (False, True)],
                ids=lambda param: f"{param[0]}-{'layer' if param[1] else 'block'}-first")
def layered(request: pytest.FixtureRequest) -> Place:
    name, layer_first = request.param
    return Place(group_of(name, LAYERS), layer_first)


def check_layers(place: Place, copier: Any, route: tuple[int, int], pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
    """Exactly these layers of exactly these blocks have been copied, in every section."""
    destination, source = route
    expected = place.all()
    before = expected[source].copy()
    for section in place.group.sections:
        size = section.num_bytes // LAYERS
        columns = slice(section.offset + layers[0] * size, section.offset + layers[1] * size)
        for from_slot, to_slot in pairs:
            expected[destination][to_slot, columns] = before[from_slot, columns]
    copier(pairs, layers)
    for level, rows in expected.items():
        np.testing.assert_array_equal(place.now(level), rows, err_msg=LEVEL_NAMES[level])


@QUIET
@given(route=st.sampled_from(INTO_PRIMARY), pairs=PAIRS, layers=RANGES)
def test_some_layers_of_blocks_arrive_and_the_others_stay(
        layered: Place, route: tuple[int, int], pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
    copier = open_copiers(layered.pools, layered.staging, "cpu")[route]
    check_layers(layered, lambda pairs, layers: copier.copy(pairs, layers=layers), route, pairs, layers)


@QUIET
@given(route=st.sampled_from(INTO_PRIMARY), pairs=PAIRS, layers=RANGES)
def test_the_cuda_twin_copies_the_same_layers_on_the_stand_in(
        layered: Place, stream: CudaStream, route: tuple[int, int], pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
    copier = open_copiers(layered.pools, layered.staging, "cuda:0")[route]

    def copy(pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
        event = stream.submit(lambda: copier.copy(pairs, layers=layers))
        assert event.wait(60.0)
        assert event.error is None

    check_layers(layered, copy, route, pairs, layers)


@pytest.fixture(params=[CopyPath.BATCH, CopyPath.KERNEL], ids=lambda path: path.name.lower())
def many_units_by(request: pytest.FixtureRequest, stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> CopyTools:
    """The stand-in's device copies many units like this."""
    module, cuda = sys.modules["cuda_stand_in"], sys.modules["cupy"]
    tools = CopyTools(cuda.runtime, module.StandInBatch(cuda.runtime), module.StandInKernel(cuda.runtime),
                      CopyPaths(dict.fromkeys(Direction, ((1, request.param),))))
    monkeypatch.setattr(copiers, "copy_tools", lambda *_: tools)
    return tools


@QUIET
@given(route=st.sampled_from(ROUTES), pairs=PAIRS, layers=RANGES)
def test_every_path_brings_the_same_bytes(layered: Place, stream: CudaStream, many_units_by: CopyTools, route: tuple[int, int],
                                          pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
    copier = open_copiers(layered.pools, layered.staging, "cuda:0")[route]

    def copy(pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
        whole = layers == (0, LAYERS)
        event = stream.submit(lambda: copier.copy(pairs) if whole else copier.copy(pairs, layers=layers))
        assert event.wait(60.0)
        assert event.error is None

    check_layers(layered, copy, route, pairs, layers)


def test_many_units_take_the_path_that_was_chosen_and_one_run_takes_none(stream: CudaStream, many_units_by: CopyTools) -> None:
    place = Place(group_of("plain", LAYERS))
    copier = open_copiers(place.pools, place.staging, "cuda:0")[PRIMARY, SECONDARY]
    assert stream.submit(lambda: copier.copy([(0, 4), (1, 5), (2, 6)], layers=(0, 2))).wait(60.0)
    assert sys.modules["cupy"].runtime.calls == ["memcpy2DAsync"]  # type: ignore[attr-defined]
    assert stream.submit(lambda: copier.copy([(0, 6), (3, 5)], layers=(0, 2))).wait(60.0)
    chosen: Any = many_units_by.batch if many_units_by.paths.path(Direction.UP, 1) is CopyPath.BATCH else many_units_by.kernel
    assert chosen.counts == [2]


def test_a_path_that_fails_is_left_and_the_copy_is_made_all_the_same(
        stream: CudaStream, many_units_by: CopyTools, caplog: pytest.LogCaptureFixture) -> None:
    path = many_units_by.paths.path(Direction.UP, 1)
    broken = StandInBroken()
    many_units_by.batch = many_units_by.kernel = broken  # type: ignore[assignment]
    place = Place(group_of("plain", LAYERS))
    copier = open_copiers(place.pools, place.staging, "cuda:0")[PRIMARY, SECONDARY]

    def copy(pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
        assert stream.submit(lambda: copier.copy(pairs, layers=layers)).wait(60.0)

    for _ in range(2):
        check_layers(place, copy, (PRIMARY, SECONDARY), [(0, 6), (3, 5)], (0, 2))
    assert broken.calls == 1
    assert len(caplog.records) == 1
    assert "not today" in many_units_by.missing[path]


class StandInBroken:
    """A path that does not work."""

    def __init__(self) -> None:
        self.calls = 0

    def copy(self, *_: Any) -> None:
        self.calls += 1
        raise TransferError("not today")


@pytest.mark.parametrize(("layer_first", "pairs", "calls"), [
    (False, [(0, 4), (1, 5), (2, 6)], ["memcpy2DAsync"]),                # a run: a line for each block
    (False, [(0, 4), (2, 6)], ["memcpyAsync"] * 2),
    (True, [(0, 4), (2, 6)], ["memcpy2DAsync"] * 2),                     # a line for each layer
    (True, [(0, 4), (1, 5), (2, 6), (3, 7)], ["memcpy2DAsync"] * 2),     # a longer run: a line for each block, a call for each layer
], ids=str)
def test_a_piece_takes_few_calls_of_cuda(stream: CudaStream, layer_first: bool, pairs: list[tuple[int, int]], calls: list[str]) -> None:
    place = Place(group_of("plain", LAYERS), layer_first)
    copier = open_copiers(place.pools, None, "cuda:0")[PRIMARY, SECONDARY]
    assert stream.submit(lambda: copier.copy(pairs, layers=(1, 3))).wait(60.0)
    assert sys.modules["cupy"].runtime.calls == calls  # type: ignore[attr-defined]


def test_lines_too_far_apart_for_cuda_are_copied_layer_by_layer(stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(group_of("plain", LAYERS), layer_first=True)
    copier = open_copiers(place.pools, None, "cuda:0")[PRIMARY, SECONDARY]
    monkeypatch.setattr(cuda_row_copier, "MAX_PITCH", SLOTS * 256 - 1)  # of a layer of 8 blocks

    def copy(pairs: list[tuple[int, int]], layers: tuple[int, int]) -> None:
        assert stream.submit(lambda: copier.copy(pairs, layers=layers)).wait(60.0)

    check_layers(place, copy, (PRIMARY, SECONDARY), [(0, 4)], (0, 3))
    assert sys.modules["cupy"].runtime.calls == ["memcpyAsync"] * 3  # type: ignore[attr-defined]

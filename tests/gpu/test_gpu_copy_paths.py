"""Every way to copy on a real device, byte by byte; the choice among them; and loads that arrive layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")

import torch
from gpu_rig import LARGE, PATIENCE, GpuRig, busy

from kvtier.io import copiers
from kvtier.io.copiers import open_copiers
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction
from kvtier.io.copy_tools import CopyTools, copy_tools
from kvtier.io.cuda_stream import CudaEvent, CudaStream, load_cuda
from kvtier.io.device import open_device
from kvtier.kernels.row_moves import RowPlaces, move_rows, move_rows_reference
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PRIMARY, SECONDARY, pool_index
from kvtier.pools.primary import PrimaryPool

pytestmark = pytest.mark.gpu

BLOCKS, LAYERS = 16, 4
GROUP = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=3, head_dim=64, dtype="bfloat16", tokens_per_block=16).groups[0]
SCATTERED = [(0, 15), (3, 2), (7, 9), (8, 1), (12, 12), (11, 0), (1, 8), (2, 7)]

MakeRig = Callable[..., GpuRig]


@pytest.fixture
def stream() -> Iterator[CudaStream]:
    made = open_device("cuda").stream("test")
    assert isinstance(made, CudaStream)
    yield made
    assert made.close(PATIENCE)


@pytest.fixture(params=CopyPath, ids=lambda path: path.name.lower())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyPath]:
    """Copies of many units take this path."""
    found = CopyTools.of(load_cuda(), "cuda:0")
    if request.param in found.missing:
        pytest.skip(found.missing[request.param])
    chosen = CopyPaths(dict.fromkeys(Direction, ((1, request.param),)))
    tools = CopyTools(found.runtime, found.batch, found.kernel, chosen)
    monkeypatch.setattr(copiers, "copy_tools", lambda *_: tools)
    yield request.param
    assert not tools.missing, f"it was given up: {tools.missing}"


@pytest.mark.parametrize("layers", [None, (0, 1), (1, 4)])
@pytest.mark.parametrize("layer_first", [False, True], ids=["block-first", "layer-first"])
@pytest.mark.parametrize("route", [(PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (PRIMARY, PRIMARY)])
def test_every_path_brings_every_byte(stream: CudaStream, path: CopyPath, route: tuple[int, int], layer_first: bool,
                                      layers: tuple[int, int] | None) -> None:
    pools = GroupPools(GROUP, PrimaryPool(GROUP, BLOCKS, "cuda", layer_first), HostArena(BLOCKS, GROUP.block_bytes, pin=True))
    assert pools.secondary is not None
    generator = np.random.default_rng(7)
    before = {level: generator.integers(0, 256, (BLOCKS, GROUP.block_bytes), dtype=np.uint8) for level in (PRIMARY, SECONDARY)}
    pools.secondary.rows[:] = before[SECONDARY]
    for slot in range(BLOCKS):
        pools.primary.write_block(slot, torch.from_numpy(before[PRIMARY][slot]))
    torch.cuda.synchronize()
    pairs = [(source, slot) for source, slot in SCATTERED if route[0] != route[1] or slot not in {pair[0] for pair in SCATTERED}]
    copier = open_copiers(pools, None, "cuda:0")[route]
    event = stream.submit(lambda: copier.copy(pairs, layers=layers))
    assert event.wait(PATIENCE)
    assert event.error is None
    expected = before[route[0]].reshape(BLOCKS, LAYERS, -1).copy()
    first, end = layers or (0, LAYERS)
    for source, slot in pairs:
        expected[slot, first:end] = before[route[1]][source].reshape(LAYERS, -1)[first:end]
    now = np.stack([pools.primary.read_block(slot).numpy() for slot in range(BLOCKS)]) if route[0] == PRIMARY \
        else np.array(pools.secondary.rows)
    np.testing.assert_array_equal(now, expected.reshape(BLOCKS, -1))
    pools.close()


def test_copies_that_another_thread_enqueues_leave_a_capture_alone(stream: CudaStream, path: CopyPath) -> None:
    """An engine may capture a graph at any time. In CUDA's default mode much of what a copy could need would then break the capture."""
    pools = GroupPools(GROUP, PrimaryPool(GROUP, BLOCKS, "cuda"), HostArena(BLOCKS, GROUP.block_bytes, pin=True))
    assert pools.secondary is not None
    pools.secondary.rows[:] = np.random.default_rng(7).integers(0, 256, pools.secondary.rows.shape, dtype=np.uint8)
    copier = open_copiers(pools, None, "cuda:0")[PRIMARY, SECONDARY]
    assert stream.submit(lambda: copier.copy(SCATTERED)).wait(PATIENCE)  # kernels are compiled and loaded
    pools.primary.rows.zero_()
    found, target = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    events: list[CudaEvent] = []
    with torch.cuda.stream(side):
        graph.capture_begin()
        target.copy_(found)
        other = threading.Thread(target=lambda: events.append(stream.submit(lambda: copier.copy(SCATTERED))))
        other.start()
        other.join(PATIENCE)
        graph.capture_end()
    assert events[0].wait(PATIENCE)
    assert events[0].error is None
    sources, destinations = ([pair[end] for pair in SCATTERED] for end in (0, 1))
    assert np.array_equal(pools.primary.rows[destinations].cpu().numpy(), pools.secondary.rows[sources])
    pools.primary.rows.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert target.all()
    assert not pools.primary.rows.any(), "the copies became part of the graph"
    pools.close()


@pytest.mark.parametrize("num_bytes", [7, 20, 64, 9000])
def test_the_kernel_moves_rows_between_pinned_memory_and_the_device(num_bytes: int) -> None:
    pytest.importorskip("triton", reason="the kernel needs Triton")
    arena = HostArena(6, 2 * num_bytes, pin=True)
    arena.rows[:] = np.random.default_rng(num_bytes).integers(0, 256, arena.rows.shape, dtype=np.uint8)
    host = torch.from_numpy(arena.rows).view(6, 2, num_bytes)
    device = torch.zeros(2, 5, num_bytes, dtype=torch.uint8, device="cuda").transpose(0, 1)  # layer-first
    pairs = torch.tensor([[5, 0], [0, 4], [3, 1]], dtype=torch.int64)
    move_rows(RowPlaces.of(device), RowPlaces.of(host), pairs.cuda(), 2, num_bytes)
    wanted = move_rows_reference(torch.zeros(5, 2, num_bytes, dtype=torch.uint8), host, pairs)
    assert torch.equal(device.cpu(), wanted)
    back = pairs[:, [1, 0]]
    host_wanted = move_rows_reference(host, wanted, back)
    move_rows(RowPlaces.of(host), RowPlaces.of(device), back.cuda(), 2, num_bytes)
    torch.cuda.synchronize()
    assert torch.equal(host, host_wanted)
    del host
    arena.close()


def test_the_device_is_measured_once_and_every_direction_has_its_way() -> None:
    tools = copy_tools(load_cuda(), "cuda:0")
    assert copy_tools(load_cuda(), "cuda:0") is tools
    assert not [reason for reason in tools.missing.values() if "wrong bytes" in reason]
    print(tools.paths.describe() or tools.paths.reason, tools.missing)
    if len(tools.available()) > 1:
        assert set(tools.paths.describe()) == {direction.value for direction in Direction}


def test_the_engine_reads_each_layer_that_it_was_ordered_behind(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    """The loads are held up by the engine's own work, so that all is enqueued before the first byte has arrived."""
    rig = make_rig(LARGE, layer_pieces=4)
    primary, secondary = ([pool_index(level, slot) for slot in range(8)] for level in range(2))
    for slot in range(8):
        rig.put(secondary[slot], np.full(LARGE.block_bytes, slot + 1, np.uint8))
    with busy(engine):
        rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(secondary[slot], primary[slot]) for slot in range(8)])
    reader = torch.cuda.Stream()
    late, seen = list(primary), []
    for layer in range(LARGE.num_layers):
        end = layer + 1 if layer + 1 < LARGE.num_layers else 1 << 30
        if late:
            found = rig.transfers.order_layers(reader, 0, late, (layer, end), PATIENCE)
            assert found is not None
            late = found
        with torch.cuda.stream(reader):
            seen.append(rig.primary.tensor[:, layer].view(torch.uint8).flatten(1).amin(dim=1).clone())
    assert not late
    reader.synchronize()
    assert torch.stack(seen).cpu().tolist() == [list(range(1, 9))] * LARGE.num_layers
    rig.settle()
    rig.transfers.verify()

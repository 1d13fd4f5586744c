"""Copies on a real device, byte by byte: between primary, secondary and staging memory, on streams of ours."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")

import torch
from gpu_rig import DENSE, PATIENCE, STRIDED, first_tokens

from kvtier.io.copiers import open_copiers
from kvtier.io.cuda_copier import CudaCopier
from kvtier.io.cuda_stream import CudaStream
from kvtier.io.device import open_device
from kvtier.pools import host_arena
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import PrimaryPool

pytestmark = pytest.mark.gpu

BLOCKS = 16
RUNS_AND_SCATTERED = [(0, 4), (1, 5), (2, 6), (14, 7), (3, 15), (12, 10), (13, 11), (8, 9)]
"""Two runs of neighbours, and single blocks in no order. Destinations are no sources."""

ROUTES = [(SECONDARY, PRIMARY), (PRIMARY, SECONDARY), (PRIMARY, NVME), (PRIMARY, PRIMARY), (SECONDARY, NVME)]
"""(destination, source), as the table of copiers has them."""


@pytest.fixture
def stream() -> Iterator[CudaStream]:
    made = open_device("cuda").stream("test")
    assert isinstance(made, CudaStream)
    yield made
    assert made.close(PATIENCE)


class Memories:
    """The three memories of a group, filled with known bytes."""

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.pools = GroupPools(group, PrimaryPool(group, BLOCKS, "cuda"), HostArena(BLOCKS, group.block_bytes, pin=True))
        self.staging = HostArena(BLOCKS, group.block_bytes, pin=True)
        generator = np.random.default_rng(1)
        self.before = {level: generator.integers(0, 256, (BLOCKS, group.block_bytes), dtype=np.uint8)
                       for level in (PRIMARY, SECONDARY, NVME)}
        self.pools.primary.rows.copy_(torch.from_numpy(self.before[PRIMARY]))
        torch.cuda.synchronize()
        for level in (SECONDARY, NVME):
            self._arena(level).rows[:] = self.before[level]

    def _arena(self, level: int) -> HostArena:
        arena = self.staging if level == NVME else self.pools.secondary
        assert arena is not None
        return arena

    def now(self, level: int) -> np.ndarray:
        """uint8 [blocks, block_bytes]."""
        return self.pools.primary.rows.cpu().numpy() if level == PRIMARY else np.array(self._arena(level).rows)

    def expected(self, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int = 0) -> np.ndarray:
        """The destination level after these copies."""
        destination, source = route
        rows = self.before[destination].copy()
        for from_slot, to_slot in pairs:
            data = self.before[source][from_slot]
            rows[to_slot] = first_tokens(data, rows[to_slot], self.group, num_tokens) if num_tokens else data
        return rows

    def close(self) -> None:
        self.pools.close()
        self.staging.close()


@pytest.fixture(params=[STRIDED, DENSE], ids=["strided", "dense"])
def memories(request: pytest.FixtureRequest) -> Iterator[Memories]:
    made = Memories(request.param)
    yield made
    torch.cuda.synchronize()
    made.close()


def carry_out(memories: Memories, stream: CudaStream, route: tuple[int, int], pairs: list[tuple[int, int]], num_tokens: int = 0) -> None:
    copier = open_copiers(memories.pools, memories.staging, "cuda:0")[route]
    assert isinstance(copier, CudaCopier)
    event = stream.submit(lambda: copier.copy(pairs, num_tokens))
    assert event.wait(PATIENCE)
    assert event.error is None


def check(memories: Memories, route: tuple[int, int], expected: np.ndarray) -> None:
    """The destination is as expected, its other slots untouched, and so is every other memory."""
    np.testing.assert_array_equal(memories.now(route[0]), expected)
    for level in {PRIMARY, SECONDARY, NVME} - {route[0]}:
        np.testing.assert_array_equal(memories.now(level), memories.before[level])


@pytest.mark.parametrize("route", ROUTES)
def test_runs_and_scattered_blocks_arrive_byte_for_byte(memories: Memories, stream: CudaStream, route: tuple[int, int]) -> None:
    carry_out(memories, stream, route, RUNS_AND_SCATTERED)
    check(memories, route, memories.expected(route, RUNS_AND_SCATTERED))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_first_tokens_arrive_and_the_others_stay(
        memories: Memories, stream: CudaStream, route: tuple[int, int], num_tokens: int) -> None:
    carry_out(memories, stream, route, RUNS_AND_SCATTERED, num_tokens)
    check(memories, route, memories.expected(route, RUNS_AND_SCATTERED, num_tokens))


@pytest.mark.parametrize("route", [(SECONDARY, PRIMARY), (PRIMARY, SECONDARY)])
@pytest.mark.parametrize("group", [STRIDED, DENSE], ids=["strided", "dense"])
def test_a_run_over_memory_that_was_pinned_in_pieces_arrives(
        stream: CudaStream, monkeypatch: pytest.MonkeyPatch, group: LayerGroup, route: tuple[int, int]) -> None:
    monkeypatch.setattr(host_arena, "PIECE_BYTES", 3 * -(-group.block_bytes // 4096) * 4096)
    memories = Memories(group)
    assert memories.staging.slots_per_piece == 3
    everything = [(slot, slot) for slot in range(BLOCKS)]
    carry_out(memories, stream, route, everything)
    check(memories, route, memories.expected(route, everything))
    memories.close()


def test_memory_is_unpinned_when_the_arena_is_closed() -> None:
    from cupy.cuda import runtime

    arena = HostArena(4, 4096, pin=True)
    assert arena.is_pinned
    address = arena.rows.ctypes.data
    rows = arena.rows  # keeps the mapping
    runtime_error = runtime.CUDARuntimeError
    with pytest.raises(runtime_error, match="AlreadyRegistered"):
        runtime.hostRegister(address, 4 * 4096, 0)
    arena.close()
    runtime.hostRegister(address, 4 * 4096, 0)
    runtime.hostUnregister(address)
    del rows


def test_our_streams_are_not_the_default_one_and_do_not_wait_for_it(stream: CudaStream) -> None:
    assert stream.handle != 0
    torch.cuda._sleep(900_000_000)
    default = torch.cuda.current_stream()
    event = stream.submit(lambda: None)
    assert event.wait(PATIENCE)
    assert not default.query(), "our stream waited for the default one"
    torch.cuda.synchronize()


def test_a_new_pool_is_zero_before_any_stream_of_ours_can_write_it(stream: CudaStream) -> None:
    """Zeroing runs on torch's stream: were it still to come, it would wipe out the first block that is brought back."""
    secondary = HostArena(BLOCKS, DENSE.block_bytes, pin=True)
    secondary.rows[:] = 7
    torch.cuda._sleep(900_000_000)
    pools = GroupPools(DENSE, PrimaryPool(DENSE, BLOCKS, "cuda"), secondary)
    copier = open_copiers(pools, None, "cuda:0")[PRIMARY, SECONDARY]
    assert stream.submit(lambda: copier.copy([(slot, slot) for slot in range(BLOCKS)])).wait(PATIENCE)
    torch.cuda.synchronize()
    assert bool((pools.primary.rows == 7).all())
    pools.close()

"""Blocks of several sections (different widths, block scales, indexer keys, states) on a real device, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")

import torch
from gpu_rig import PATIENCE

from kvtier.io.copiers import open_copiers
from kvtier.io.cuda_stream import CudaStream
from kvtier.io.device import open_device
from kvtier.kernels import OffsetTable
from kvtier.pools.group_pools import GroupPools, open_group_pools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout, LayerGroup, LayerSpec
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.sizing import PoolSizes

pytestmark = pytest.mark.gpu

BLOCKS = 8
TOKENS = 4
LAYOUT = KVLayout([LayerSpec.attention(2, 16, value_dim=8, scale_bytes=3, indexer_bytes=20), LayerSpec.recurrent(100, 8),
                   LayerSpec.mla(48, 16, indexer_bytes=132)] * 2, "bfloat16", TOKENS)
ROUTES = [(SECONDARY, PRIMARY), (PRIMARY, SECONDARY), (PRIMARY, NVME), (PRIMARY, PRIMARY), (SECONDARY, NVME)]
PAIRS = [(0, 4), (1, 5), (3, 7), (2, 6)]


class Place:
    """The three memories of one group, with random content."""

    def __init__(self, pools: GroupPools) -> None:
        self.group: LayerGroup = pools.group
        self.pools = pools
        self.staging = HostArena(BLOCKS, self.group.block_bytes, pin=True)
        generator = np.random.default_rng(self.group.number)
        self.before = {level: generator.integers(0, 256, (BLOCKS, self.group.block_bytes), dtype=np.uint8)
                       for level in (PRIMARY, SECONDARY, NVME)}
        assert pools.secondary is not None
        pools.secondary.rows[:] = self.before[SECONDARY]
        self.staging.rows[:] = self.before[NVME]
        for slot in range(BLOCKS):
            pools.primary.write_block(slot, torch.from_numpy(self.before[PRIMARY][slot]))
        torch.cuda.synchronize()

    def now(self, level: int) -> np.ndarray:
        """uint8 [blocks, block_bytes]."""
        if level == PRIMARY:
            return np.stack([self.pools.primary.read_block(slot).numpy() for slot in range(BLOCKS)])
        arena = self.staging if level == NVME else self.pools.secondary
        assert arena is not None
        return np.array(arena.rows)

    def block_after(self, source: np.ndarray, rest: np.ndarray, num_tokens: int) -> np.ndarray:
        """A block after a copy: whole, or the first tokens of what can be cut at a token."""
        after = source.copy()
        for section in self.group.sections:
            if num_tokens and section.is_by_token:
                part = slice(section.offset, section.offset + section.num_bytes)
                lines = (-1, TOKENS, section.head_bytes // TOKENS)
                after[part].reshape(lines)[:, num_tokens:] = rest[part].reshape(lines)[:, num_tokens:]
        return after


@pytest.fixture(params=range(3), ids=[group.kind for group in LAYOUT.groups])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    pools = open_group_pools(LAYOUT, PoolSizes(*((BLOCKS,) * 3,) * 3), "cuda")
    made = Place(pools[request.param])
    yield made
    torch.cuda.synchronize()
    made.staging.close()
    for each in pools:
        each.close()


@pytest.fixture
def stream() -> Iterator[CudaStream]:
    made = open_device("cuda").stream("test")
    assert isinstance(made, CudaStream)
    yield made
    assert made.close(PATIENCE)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_every_section_arrives_and_what_cannot_be_cut_arrives_whole(
        place: Place, stream: CudaStream, route: tuple[int, int], num_tokens: int) -> None:
    destination, source = route
    copier = open_copiers(place.pools, place.staging, "cuda:0")[route]
    event = stream.submit(lambda: copier.copy(PAIRS, num_tokens))
    assert event.wait(PATIENCE)
    assert event.error is None
    expected = {level: rows.copy() for level, rows in place.before.items()}
    for from_slot, to_slot in PAIRS:
        expected[destination][to_slot] = place.block_after(place.before[source][from_slot], place.before[destination][to_slot], num_tokens)
    for level, rows in expected.items():
        np.testing.assert_array_equal(place.now(level), rows)


@pytest.mark.parametrize("group", LAYOUT.groups, ids=lambda group: group.kind)
def test_the_table_of_a_group_is_the_same_on_a_device(group: LayerGroup) -> None:
    rows = [[3, None, 1], [], [7, -1]]
    tables = [OffsetTable.for_group(group, max_rows=4, max_blocks=5, num_blocks=BLOCKS, device=device) for device in ("cpu", "cuda")]
    for table in tables:
        table.fill([[1] * 5] * 4)
    on_host, on_device = (table.fill(rows) for table in tables)
    assert torch.equal(on_device.cpu(), on_host)
    assert torch.equal(tables[1].tensor.cpu(), tables[0].tensor)

"""What the direct way to the drive does on a device by itself: the checksum of a block, and rows of staging memory."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("xxhash", reason="checksums are compared with xxhash's")
pytest.importorskip("triton", reason="the checksum kernels need Triton")

import numpy as np
import torch
import xxhash
from gpu_rig import DENSE, PATIENCE, STRIDED

from kvtier.errors import ConfigError
from kvtier.io.checksum import block_checksum
from kvtier.io.copiers import DIRECT, open_copiers
from kvtier.io.device import open_device
from kvtier.io.gds import DeviceRowMemory
from kvtier.kernels.page_checksum import BlockChecksum
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import PRIMARY
from kvtier.pools.primary import PrimaryPool

pytestmark = pytest.mark.gpu

KEY = bytes(range(32))


# -- the checksum ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [248, 256, 1024, 1032, 1088, 1536, 4096, 65_536, 1 << 20, (2 << 20) + 8, 16 << 20])
def test_the_checksum_on_the_device_is_the_hosts(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    checksum = BlockChecksum(torch.from_numpy(data).cuda())
    torch.cuda.synchronize()
    for seed in (0, 1, 0xFEDC_BA98_7654_3210):
        assert checksum.digest(seed) == xxhash.xxh3_128_digest(data.data, seed=seed)


def test_it_sums_up_what_lies_there_now_and_a_flipped_bit_is_seen() -> None:
    block = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    checksum = BlockChecksum(block)
    torch.cuda.synchronize()
    before = checksum.digest(5)
    for place in (0, 12_345, (1 << 20) - 1):
        block[place] ^= 4
        torch.cuda.synchronize()
        assert checksum.digest(5) != before
        block[place] ^= 4
    torch.cuda.synchronize()
    assert checksum.digest(5) == before


@pytest.mark.parametrize("size", [5, 240, 1001])
def test_sizes_that_the_kernels_do_not_take_are_right_too(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    block = torch.from_numpy(data).cuda()
    torch.cuda.synchronize()
    assert BlockChecksum(block).digest(3) == xxhash.xxh3_128_digest(data.data, seed=3)


# -- staging memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1536, 4096, 65_536])
def test_rows_of_the_arena_are_whole_pages_on_page_boundaries(block_bytes: int) -> None:
    arena = DeviceArena(5, block_bytes, 0)
    assert arena.address % 4096 == 0
    assert arena.stride % 4096 == 0
    assert arena.rows.shape == (5, block_bytes)
    memory = DeviceRowMemory(arena, 3)
    data = np.random.default_rng(1).integers(0, 256, arena.stride, dtype=np.uint8)
    memory.from_host(data)
    assert np.array_equal(memory.to_host(), data)
    assert memory.checksum(KEY, 1, 7) == block_checksum(data[:block_bytes], KEY, 1, 7)
    assert not arena.rows[2].any()
    arena.close()


def test_an_arena_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPUDirect staging"):
        DeviceArena(1 << 20, 1 << 30, 0)


@pytest.mark.parametrize("group", [STRIDED, DENSE], ids=["strided", "dense"])
def test_blocks_go_from_the_pool_to_the_rows_and_back(group: LayerGroup) -> None:
    pools = GroupPools(group, PrimaryPool(group, 6, "cuda:0"), None)
    arena = DeviceArena(6, group.block_bytes, 0)
    copiers = open_copiers(pools, None, "cuda:0", arena)
    data = torch.randint(0, 256, (6, group.block_bytes), dtype=torch.uint8)
    pools.primary.rows.copy_(data)
    torch.cuda.synchronize()
    stream = open_device("cuda:0").stream("test")
    out = stream.submit(lambda: copiers[DIRECT, PRIMARY].copy([(0, 3), (1, 4), (5, 0)]))
    assert out.wait(PATIENCE)
    assert out.error is None
    assert torch.equal(arena.rows[[3, 4, 0]].cpu(), data[[0, 1, 5]])
    pools.primary.rows.zero_()
    torch.cuda.synchronize()
    back = stream.submit(lambda: copiers[PRIMARY, DIRECT].copy([(3, 5), (4, 2)]))
    assert back.wait(PATIENCE)
    assert back.error is None
    assert torch.equal(pools.primary.rows[[5, 2]].cpu(), data[[0, 1]])
    stream.close(PATIENCE)

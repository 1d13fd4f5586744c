"""What the direct way does with device memory, with a tensor on the host in its place: addresses, sizes, checksums.

That it is right on a device is shown by ``tests/gpu/test_gpu_gds.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there

from cuda_stand_in import StandInCuda
from kvikio_double import KvikioDouble

from kvtier.io.checksum import block_checksum
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_copier import CudaCopier
from kvtier.io.cuda_stream import CudaStream
from kvtier.io.gds import DeviceRowMemory, _unregister, require_right_checksum
from kvtier.io.gds_driver import GdsUnavailable
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.primary import PrimaryPool

STRIDED = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", tokens_per_block=4).groups[0]
DENSE = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", tokens_per_block=16).groups[0]


def arena_on_host(num_slots: int, block_bytes: int) -> DeviceArena:
    """A device arena as its constructor leaves it, but in memory of the host."""
    arena = DeviceArena.__new__(DeviceArena)
    arena.num_slots, arena.block_bytes, arena.stride = num_slots, block_bytes, -(-block_bytes // 4096) * 4096
    arena.whole = torch.zeros(num_slots * arena.stride, dtype=torch.uint8)
    arena.address = arena.whole.data_ptr()
    arena.padded_rows = arena.whole.view(num_slots, arena.stride)
    arena.rows = arena.padded_rows[:, :block_bytes]
    return arena


@pytest.mark.parametrize("block_bytes", [100, 5000, 8192])
def test_a_row_is_summed_up_without_its_padding_and_copied_with_it(block_bytes: int) -> None:
    arena = arena_on_host(3, block_bytes)
    row = DeviceRowMemory(arena, 1)
    data = np.random.default_rng(2).integers(0, 256, arena.stride, dtype=np.uint8)
    row.from_host(data)
    assert row.nbytes == arena.stride
    assert np.array_equal(row.to_host(), data)
    assert row.to_host().ctypes.data % 4096 == 0, "what goes through the host is written with direct I/O"
    key = bytes(32)
    assert row.checksum(key, 2, 9) == block_checksum(data[:block_bytes], key, 2, 9)
    assert not arena.padded_rows[0].any()
    assert not arena.padded_rows[2].any()
    arena.close()
    arena.close()


@pytest.mark.parametrize("group", [STRIDED, DENSE], ids=["strided", "dense"])
def test_copies_between_pool_and_rows_hit_the_right_slots(group: LayerGroup) -> None:
    cuda = StandInCuda()
    pool, arena = PrimaryPool(group, 6, "cpu"), arena_on_host(6, group.block_bytes)
    content = torch.randint(0, 256, (6, group.block_bytes), dtype=torch.uint8)
    pool.rows.copy_(content)
    stream = CudaStream(cuda, 0, "test")
    stream.submit(lambda: CudaCopier(CopyTools(cuda.runtime), pool, arena, group).copy([(0, 3), (1, 4), (5, 0)])).wait()
    assert torch.equal(arena.rows[[3, 4, 0]], content[[0, 1, 5]])
    pool.rows.zero_()
    stream.submit(lambda: CudaCopier(CopyTools(cuda.runtime), arena, pool, group).copy([(3, 5), (4, 2)])).wait()
    assert torch.equal(pool.rows[[5, 2]], content[[0, 1]])
    assert stream.close(5.0)


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda *_arguments: bytes(16), "the host's is"), (lambda *_arguments: 1 / 0, "ZeroDivisionError")])
def test_a_device_whose_checksum_is_wrong_or_missing_is_not_used(damage, reason: str) -> None:
    """Otherwise each read would condemn a good slot."""
    row = DeviceRowMemory(arena_on_host(2, 5000), 0)
    require_right_checksum(row, 5000)
    row.checksum = damage  # type: ignore[method-assign]
    with pytest.raises(GdsUnavailable, match=reason):
        require_right_checksum(row, 5000)


def test_memory_is_unregistered_in_the_mode_that_it_was_registered_in() -> None:
    """In KvikIO's compatibility mode neither does anything: memory registered in another one would stay so, and be freed."""
    kvikio, arena = KvikioDouble(), arena_on_host(2, 5000)
    with kvikio.defaults.set({"compat_mode": "off"}):
        kvikio.memory_register(arena.whole)
    kvikio.set({"compat_mode": "on"})
    _unregister(kvikio, arena, "off")
    assert not kvikio.registered
    assert kvikio.get("compat_mode") == "on"

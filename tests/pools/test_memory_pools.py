"""Primary pool and host arena: alignment, shapes, what is refused, and what closing gives back."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.pools import host_arena
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import DTYPE_BYTES, KVLayout, LayerGroup
from kvtier.pools.primary import TORCH_DTYPES, PrimaryPool


def one_group(dtype: str = "float32", layers: int = 3, heads: int = 2) -> LayerGroup:
    return KVLayout.uniform(layers, num_kv_heads=heads, head_dim=8, dtype=dtype, tokens_per_block=4).groups[0]


class FakeRuntime(types.ModuleType):
    """Stands in for ``cupy.cuda.runtime``: remembers registrations, fails at the one numbered ``fail_at``."""

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.fail_at: int | None = None

    def hostRegister(self, address: int, length: int, flags: int) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.registered[address] = length

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime = runtime  # type: ignore[attr-defined]
    for name, module in (("cupy", types.ModuleType("cupy")), ("cupy.cuda", cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    return runtime


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_storage_dtype_has_a_torch_dtype_of_its_size(dtype: str) -> None:
    assert TORCH_DTYPES[dtype].itemsize == DTYPE_BYTES[dtype]
    pool = PrimaryPool(one_group(dtype), 2, "cpu")
    assert pool.tensor.dtype == TORCH_DTYPES[dtype]


def test_primary_tensor_rows_pages_and_layer_buffers_are_one_memory() -> None:
    group = one_group()
    pool = PrimaryPool(group, 5, "cpu")
    assert pool.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert pool.rows.shape == (5, group.block_bytes)
    assert pool.layer_buffer(1).shape == (5, 2, 2, 4, 8)
    slot, layer, field = 3, 1, 1
    page = pool.pages[slot * 3 * 2 + layer * 2 + field]
    page.fill_(7.0)
    assert torch.equal(pool.tensor[slot, layer, field], page)
    assert torch.equal(pool.layer_buffer(layer)[slot, field], page)
    assert pool.tensor.sum() == 7.0 * page.numel()
    assert int((pool.rows[slot] != 0).sum()) > 0
    assert int((pool.rows[slot - 1] != 0).sum()) == 0


@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_primary_memory_starts_on_a_page_and_is_zero(num_blocks: int) -> None:
    pool = PrimaryPool(one_group(), num_blocks, "cpu")
    assert pool.tensor.data_ptr() % 4096 == 0
    assert pool.tensor.is_contiguous()
    assert not pool.tensor.any()


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_primary_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        PrimaryPool(one_group(), num_blocks, "cpu")


def test_primary_memory_that_cannot_be_had_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"primary: .* want \d+ bytes on cpu.*lower primary"):
        PrimaryPool(one_group(), 1 << 45, "cpu")


def test_a_layer_position_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"position=3.*0\.\.2"):
        PrimaryPool(one_group(), 1, "cpu").layer_buffer(3)


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 4097, 3 * 4096])
def test_arena_slots_start_on_pages_and_are_padded_to_pages(block_bytes: int) -> None:
    arena = HostArena(3, block_bytes, pin=False)
    assert arena.stride % 4096 == 0
    assert 0 <= arena.stride - block_bytes < 4096
    assert arena.rows.shape == (3, block_bytes)
    assert arena.padded_rows.shape == (3, arena.stride)
    assert all(arena.padded_rows[slot].ctypes.data % 4096 == 0 for slot in range(3))
    arena.rows[1] = 9
    assert (arena.padded_rows[1, :block_bytes] == 9).all()
    assert not arena.padded_rows[0].any()
    assert not arena.padded_rows[2].any()
    arena.close()


def test_the_arena_is_never_rounded_up_to_a_power_of_two() -> None:
    for slots, mapped in ((33, 34), (3, 3)):  # whole huge pages, where there is more than one
        arena = HostArena(slots, 1 << 20, pin=False)
        assert len(arena._memory) == mapped << 20
        assert len(arena.rows) == slots
        arena.close()


@pytest.mark.parametrize(("slots", "block_bytes"), [(0, 10), (-1, 10), (2, 0)])
def test_an_arena_without_room_is_refused(slots: int, block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        HostArena(slots, block_bytes, pin=False)


@pytest.mark.parametrize("slots", [1 << 48, 1 << 60])
def test_host_memory_that_cannot_be_had_is_a_config_error(slots: int) -> None:
    with pytest.raises(ConfigError, match=r"secondary: .* lower secondary"):
        HostArena(slots, 4096, pin=False)


def test_closing_twice_is_fine_and_a_forgotten_view_does_not_keep_the_pages() -> None:
    arena = HostArena(4, 4096, pin=False)
    view = arena.rows[2]
    view[:] = 5
    arena.close()
    arena.close()
    assert not view.any()  # the pages went back to the system, the view reads fresh zeros
    assert arena.rows.size == 0


def test_pinning_covers_every_byte_in_pieces_that_no_slot_straddles(
        cuda_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "PIECE_BYTES", 5 * 4096)
    arena = HostArena(7, 8000, pin=True)
    start = arena.padded_rows.ctypes.data
    assert arena.is_pinned
    assert arena.slots_per_piece == 2
    pieces = sorted(cuda_runtime.registered.items())
    assert [address - start for address, _ in pieces] == [0, 16384, 32768, 49152]
    assert [length for _, length in pieces] == [16384, 16384, 16384, 8192]
    arena.close()
    assert not cuda_runtime.registered
    assert not arena.is_pinned


def test_a_refused_registration_undoes_the_others_and_names_the_remedy(
        cuda_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "PIECE_BYTES", 4096)
    cuda_runtime.fail_at = 3
    with pytest.raises(ConfigError, match=r"could not pin 4096 bytes at offset 8192 of 16384.*memlock.*ulimit -l"):
        HostArena(4, 4096, pin=True)
    assert not cuda_runtime.registered


def test_a_broken_device_does_not_keep_an_arena_from_being_closed(
        cuda_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    arena = HostArena(2, 4096, pin=True)
    arena.rows[:] = 7
    left = arena.rows
    monkeypatch.setattr(cuda_runtime, "hostUnregister", refuse)
    arena.close()
    assert "cudaErrorIllegalAddress" in caplog.text
    assert not left.any(), "its pages have been given back"
    arena.close()


def test_pinning_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"kvtier\[cuda\]"):
        HostArena(1, 4096, pin=True)


def test_group_pools_close_both_levels() -> None:
    group = one_group()
    pools = GroupPools(group, PrimaryPool(group, 1, "cpu"), HostArena(1, group.block_bytes, pin=False))
    assert pools.secondary is not None
    pools.close()
    pools.close()
    assert pools.primary.rows.numel() == 0
    assert pools.secondary.rows.size == 0
    GroupPools(group, PrimaryPool(group, 1, "cpu"), None).close()
    assert isinstance(pools.secondary.rows, np.ndarray)

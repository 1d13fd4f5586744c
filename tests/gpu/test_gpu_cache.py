"""``KVCacheManager(device="cuda")``: bytes over three levels, and a step that orders our copies against the engine's stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("pydantic_settings", reason="TierConfig needs pydantic-settings")
pytest.importorskip("xxhash", reason="the NVMe level needs xxhash")

import torch
from gpu_engine import PATIENCE, GpuToyEngine, bytes_of_block

import kvtier
from kvtier import KVCacheManager, KVLayout, Level, Request, TierConfig

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", tokens_per_block=8)


def make_cache(directory: Path | None, primary: int = 12, secondary: int = 6, nvme: int = 48, device: str = "cuda",
               **settings: Any) -> KVCacheManager:
    config = TierConfig(primary=f"{primary} blocks", secondary=f"{secondary} blocks", nvme=f"{nvme} blocks", nvme_directory=directory,
                        nvme_free_space_reserve="1MiB", max_seq_len=128, max_batch_size=8, **settings)
    return KVCacheManager(LAYOUT, config, device=device, model="toy@1:gpu")


def prompt(seed: int, length: int = 40) -> list[int]:
    return [seed * 1000 + position for position in range(length)]


def test_every_value_is_right_on_three_levels_and_after_a_restart(tmp_path: Path, engine: torch.cuda.Stream) -> None:
    directory = tmp_path / "store"
    with make_cache(directory) as cache:
        toy = GpuToyEngine(cache, engine)
        seen: list[list[int]] = []
        for turn in range(4):
            for user in (0, 1, 1, 2, 3, 3, 4, 5):
                seen.append([*prompt(user), *range(turn * 3)])
                toy.serve(user, seen[-1])
                cache.verify()
            assert toy.wrong_values() == 0

        def fewest_hits_first(tokens: list[int]) -> tuple[int, ...]:
            """Tokens it would have from the level that has served least so far, then from the next: what lies where is the disk's doing."""
            there, served = cache.match(Request(99, tokens)).tokens_by_level, cache.stats().hit_tokens
            return tuple(there[level] for level in sorted(Level, key=lambda level: served[level]))

        for _ in range(40):
            if min(cache.stats().hit_tokens) > 0:
                break
            toy.serve(0, max(seen, key=fewest_hits_first))
        assert toy.wrong_values() == 0
        stats = cache.stats()
        assert min(stats.hit_tokens) > 0, "every level has served something"
        assert stats.onboard_blocks[Level.NVME, Level.PRIMARY] > 0
        assert stats.onboard_blocks[Level.SECONDARY, Level.PRIMARY] > 0
        assert (stats.lost, stats.transfer_failures, stats.checksum_failures) == (0, 0, 0)
        assert cache.flush(PATIENCE)
    with make_cache(directory) as cache:
        toy = GpuToyEngine(cache, engine)
        reused = [toy.serve(user, prompt(user)) for user in range(6)]
        assert toy.wrong_values() == 0
        assert sum(reused) > 0
        assert cache.stats().hit_tokens.nvme > 0
        assert toy.checked_tokens == sum(reused)


def test_an_offload_after_a_step_is_ordered_behind_what_the_engine_still_computes(engine: torch.cuda.Stream) -> None:
    with make_cache(None, nvme=0) as cache:
        toy = GpuToyEngine(cache, engine)
        toy.become_slow()
        tokens = prompt(1, 17)
        cache.add_sequence(Request(1, tokens))
        assert cache.wait_ready(1, timeout=PATIENCE) == 0
        blocks = cache.block_ids(1)[:2]
        toy.compute(1, tokens, 0)
        cache.remove_sequence(1)
        for block in blocks:
            cache.offload(block)
        assert not engine.query(), "the host waited for the engine"
        assert [cache.block(block).level for block in blocks] == [Level.SECONDARY] * 2
        for number, block in enumerate(blocks):
            assert cache.read_block(block) == bytes_of_block(toy, tokens, 8 * number, 8)


def test_a_block_that_the_engine_still_writes_comes_back_right_from_below(engine: torch.cuda.Stream) -> None:
    """Offload and onboard are both issued while the kernel that writes the block has not begun."""
    with make_cache(None, nvme=0) as cache:
        toy = GpuToyEngine(cache, engine)
        toy.become_slow()
        tokens = prompt(2, 17)
        cache.add_sequence(Request(1, tokens))
        cache.wait_ready(1, timeout=PATIENCE)
        blocks = cache.block_ids(1)[:2]
        toy.compute(1, tokens, 0)
        cache.remove_sequence(1)
        for block in blocks:
            cache.offload(block)
        for block in blocks:
            cache.onboard(block)
        assert not engine.query(), "the host waited for the engine"
        assert toy.serve(2, tokens) == 16
        assert toy.wrong_values() == 0


def test_a_sequence_is_not_ready_before_its_blocks_have_arrived(engine: torch.cuda.Stream) -> None:
    with make_cache(None, nvme=0) as cache:
        toy = GpuToyEngine(cache, engine)
        toy.become_slow()
        tokens = prompt(3, 17)
        toy.serve(1, tokens)
        for block in range(12):
            if cache.block(block).tokens:
                cache.offload(block)
        cache.add_sequence(Request(2, tokens))
        assert not engine.query(), "the host waited for the engine"
        assert not cache.is_ready(2)
        with pytest.raises(TimeoutError):
            cache.wait_ready(2, timeout=0.01)
        assert cache.wait_ready(2, timeout=PATIENCE) == 16
        cache.remove_sequence(2)


def test_the_block_table_stays_where_it_is_and_names_pages_of_the_pool(engine: torch.cuda.Stream) -> None:
    with make_cache(None, nvme=0) as cache:
        cache.add_sequence(Request(1, prompt(1, 20)))
        cache.add_sequence(Request(2, prompt(2, 9)))
        address = cache.block_table([1]).data_ptr()
        table = cache.block_table([2, 1])
        assert table.data_ptr() == address
        assert table.is_cuda
        for row, request_id in enumerate((2, 1)):
            slots = [cache.block(block).slot for block in cache.block_ids(request_id)]
            assert table[row, 0, :len(slots)].tolist() == [slot * 4 for slot in slots]
            assert table[row, 1, :len(slots)].tolist() == [slot * 4 + 1 for slot in slots]
        assert cache.layer_buffer(1).is_cuda


def test_a_device_that_is_not_there_is_refused_with_the_number_of_devices() -> None:
    with pytest.raises(kvtier.ConfigError, match="CUDA devices, numbered from 0"):
        make_cache(None, nvme=0, device=f"cuda:{torch.cuda.device_count()}")


def test_a_primary_pool_that_does_not_fit_the_device_is_refused_before_anything_is_allocated() -> None:
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(kvtier.ConfigError, match="primary"):
        make_cache(None, primary=2 * free // LAYOUT.groups[0].block_bytes, nvme=0)
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)

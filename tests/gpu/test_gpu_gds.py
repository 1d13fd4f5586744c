"""GPUDirect Storage on a real device: blocks through KvikIO, and the whole cache over NVMe.

Where GPUDirect itself does not work, the tests that need it are skipped with the probe's own reason, and KvikIO's POSIX mode
carries the same code, device memory included: that one is no GPUDirect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("pydantic_settings", reason="TierConfig needs pydantic-settings")
pytest.importorskip("xxhash", reason="the NVMe level needs xxhash")
pytest.importorskip("triton", reason="the checksum kernels need Triton")

import torch
from gpu_engine import PATIENCE, GpuToyEngine

from kvtier import ConfigError, KVCacheManager, KVLayout, Level, TierConfig
from kvtier.io import gds_probe
from kvtier.io.gds import GdsPath
from kvtier.io.gds_driver import KvikioModule, configure_kvikio, load_kvikio
from kvtier.io.gds_probe import NvmePath
from kvtier.io.nvme_store import NvmeStore
from kvtier.tiering import core
from kvtier.tiering.direct_writes import WRITE_ROWS

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", tokens_per_block=8)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder on a file system that may have GPUDirect: the temporary folder is often memory. GPU_TEST_DIRECTORY names one."""
    import tempfile

    where = os.environ.get("GPU_TEST_DIRECTORY", str(Path.cwd()))
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


# -- the cache ---------------------------------------------------------------------------------------------------------------


def make_cache(directory: Path, secondary: int, gds: str) -> KVCacheManager:
    config = TierConfig(primary="12 blocks", secondary=f"{secondary} blocks", nvme="48 blocks", nvme_directory=directory,
                        nvme_free_space_reserve="1MiB", max_seq_len=128, max_batch_size=8, write_ahead_share=1.0, gds=gds)
    return KVCacheManager(LAYOUT, config, device="cuda", model="toy@1:gds")


def prompt(seed: int) -> list[int]:
    return [seed * 1000 + position for position in range(40)]


def serve_crowd(cache: KVCacheManager, engine: torch.cuda.Stream) -> int:
    """Six users in turns; the number of tokens that were found again. Every value is checked."""
    toy = GpuToyEngine(cache, engine)
    reused = 0
    for _turn in range(3):
        for user in range(6):
            reused += toy.serve(user, prompt(user))
            cache.flush(PATIENCE)
            cache.verify()
    assert toy.wrong_values() == 0
    return reused


@pytest.fixture
def kvikio() -> KvikioModule:
    pytest.importorskip("kvikio", reason="pip install 'kvtier[cuda]'")
    return load_kvikio()


@contextmanager
def posix_mode(kvikio: KvikioModule) -> Iterator[None]:
    with kvikio.defaults.set({"compat_mode": kvikio.CompatMode.ON}):
        yield


@pytest.mark.parametrize("secondary", [0, 6])
def test_device_memory_through_kvikios_posix_mode_which_is_not_gpudirect(
        kvikio: KvikioModule, disk: Path, engine: torch.cuda.Stream, monkeypatch: pytest.MonkeyPatch, secondary: int) -> None:
    """Everything of the direct way but the way itself: rows on the device, their checksums, copies, order and KvikIO's handles."""

    def open_without_gpudirect(config: TierConfig, device: str, store: NvmeStore | None,
                               staging_blocks: int) -> tuple[NvmePath, GdsPath | None]:
        assert store is not None
        paths, geometries = zip(*store.slabs(), strict=True)
        configure_kvikio(kvikio, 4, 1 << 20)
        with posix_mode(kvikio):
            opened = GdsPath.of_device(kvikio, paths, geometries, 0, staging_blocks + WRITE_ROWS, 1 << 20, lambda: None)
        return NvmePath("gds"), opened

    monkeypatch.setattr(core, "open_direct_path", open_without_gpudirect)
    monkeypatch.setattr(core, "require_possible", lambda *_arguments: None)
    directory = disk / f"posix-{secondary}"
    with make_cache(directory, secondary, "required") as cache:
        assert serve_crowd(cache, engine) > 0
        stats = cache.stats()
        assert stats.gds.read_blocks > 0
        assert (stats.gds.detours, stats.checksum_failures, stats.lost) == (0, 0, 0)
        if secondary == 0:
            assert stats.gds.written_blocks == stats.offload_blocks[Level.PRIMARY, Level.NVME] > 0
    monkeypatch.undo()
    with make_cache(directory, 6, "off") as cache:  # and the host reads it
        toy = GpuToyEngine(cache, engine)
        assert sum(toy.serve(user, prompt(user)) for user in range(6)) > 0
        assert toy.wrong_values() == 0
        assert cache.stats().gds.read_blocks == 0


# -- GPUDirect itself --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verdict(disk: Path) -> str | None:
    """What the probe says about this machine and folder."""
    return gds_probe.obstacle("cuda:0", disk) or gds_probe.try_directory(disk, "cuda:0")


def test_required_and_auto_say_what_the_probe_says(disk: Path, verdict: str | None) -> None:
    if verdict is None:
        with make_cache(disk / "required", 6, "required") as cache:
            assert cache.stats().gds.path == "gds"
        return
    with pytest.raises(ConfigError, match="gds='required'") as caught:
        make_cache(disk / "required", 6, "required")
    assert verdict.partition(":")[0] in str(caught.value)
    with make_cache(disk / "auto", 6, "auto") as cache:
        assert cache.stats().gds.path == "posix"
        assert cache.stats().gds.reason


@pytest.mark.parametrize("secondary", [0, 6])
def test_gpudirect_carries_every_block_right_and_without_a_detour(disk: Path, verdict: str | None, engine: torch.cuda.Stream,
                                                                  secondary: int) -> None:
    if verdict is not None:
        pytest.skip(f"no GPUDirect here: {verdict}")
    directory = disk / f"gds-{secondary}"
    with make_cache(directory, secondary, "required") as cache:
        assert serve_crowd(cache, engine) > 0
        stats = cache.stats()
        assert stats.gds.path == "gds"
        assert stats.gds.read_blocks == stats.onboard_blocks[Level.NVME, Level.PRIMARY] > 0
        assert (stats.gds.detours, stats.checksum_failures, stats.lost) == (0, 0, 0)
    with make_cache(directory, 6, "off") as cache:
        toy = GpuToyEngine(cache, engine)
        assert sum(toy.serve(user, prompt(user)) for user in range(6)) > 0
        assert toy.wrong_values() == 0

"""A whole cache over the real KvikIO and host memory. Run by ``tests/io/test_gds_kvikio.py`` in a process of its own, on a stand-in for
the CUDA driver: KvikIO's POSIX mode, no GPUDirect and no GPU.
"""

from __future__ import annotations

import os

import pytest
from toy_engine import ToyEngine, tokens_of

from kvtier import Level, Request, TierConfig
from kvtier.io.gds import GdsPath
from kvtier.io.gds_driver import configure_kvikio, load_kvikio
from kvtier.io.gds_probe import NvmePath
from kvtier.io.nvme_store import NvmeStore
from kvtier.tiering import core
from kvtier.tiering.direct_writes import WRITE_ROWS

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


@pytest.fixture
def _over_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["KVIKIO_COMPAT_MODE"] == "ON", "anything else may spin for ever without a GPU"
    kvikio = load_kvikio()
    configure_kvikio(kvikio, 3, 4096)

    def open_on_host(config: TierConfig, device: str, store: NvmeStore, staging_blocks: int) -> tuple[NvmePath, GdsPath]:
        paths, geometries = zip(*store.slabs(), strict=True)
        return NvmePath("gds"), GdsPath.of_host(kvikio, paths, geometries, staging_blocks + WRITE_ROWS, 4096)

    monkeypatch.setattr(core, "open_direct_path", open_on_host)
    monkeypatch.setattr(core, "require_possible", lambda *_arguments: None)


@pytest.mark.usefixtures("_over_kvikio")
@pytest.mark.parametrize("secondary", [0, 4])
def test_every_byte_that_kvikio_carries_for_a_cache_is_right(make_cache, secondary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(8, secondary, 32, gds="required", write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for turn in range(3):
        for user in range(5):
            engine.serve(Request(turn * 10 + user, tokens_of(user, 13)))
            assert cache.flush()
            cache.verify()
    stats = cache.stats()
    assert stats.gds.read_blocks == stats.onboard_blocks[Level.NVME, Level.PRIMARY] > 0
    assert stats.gds.written_blocks == (15 if secondary == 0 else 0)
    assert (stats.gds.detours, stats.lost, stats.checksum_failures) == (0, 0, 0)
    cache.close()
    monkeypatch.undo()
    assert ToyEngine(make_cache(8, 4, 32, gds="off")).serve(Request(1, tokens_of(2, 13))) == 12, "and the host reads it"

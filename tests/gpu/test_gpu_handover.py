"""Blocks handed over between two caches on a device: the values that were computed, in order with the engines' streams."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("pydantic_settings", reason="TierConfig needs pydantic-settings")
pytest.importorskip("xxhash", reason="handovers need xxhash")

import torch
from gpu_engine import GpuToyEngine

from kvtier import BlockExporter, BlockImporter, HandoverFolder, KVCacheManager, KVLayout, Request, TierConfig

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", tokens_per_block=8)
CONFIG = TierConfig(primary="12 blocks", secondary="6 blocks", max_seq_len=128, max_batch_size=8)


def test_what_one_cache_computed_late_another_one_reads(tmp_path: Path, engine: torch.cuda.Stream) -> None:
    folder = HandoverFolder(tmp_path, "64MiB")
    tokens = list(range(40))
    with (KVCacheManager(LAYOUT, CONFIG, device="cuda", model="toy@1:gpu") as there,
          KVCacheManager(LAYOUT, CONFIG, device="cuda", model="toy@1:gpu") as here):
        exporting, importing = GpuToyEngine(there, engine), GpuToyEngine(here, torch.cuda.Stream())
        exporter, importer = BlockExporter(there, folder), BlockImporter(here, folder)
        there.add_sequence(Request(1, tokens[:37]))
        there.wait_ready(1)
        exporting.compute(1, tokens[:37], 0)  # the device is still asleep when this returns
        importer.offer(exporter.export(1))
        there.remove_sequence(1)
        here.add_sequence(Request(1, tokens))
        taken = importer.fill(1, importing.stream)
        assert taken == 37
        importing.compute(1, tokens, taken)
        here.remove_sequence(1)
        assert importing.serve(2, [*tokens, 1, 2]) == 39
        assert importing.wrong_values() == 0
        assert importing.checked_tokens == 37 + 39
        there.verify()
        here.verify()

"""What the TensorRT-LLM connector refuses at the start, and says."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.attach import tensorrt_llm_scheduler
from kvtier.tiering.attach.tensorrt_llm import TieredScheduler, TieredWorker

sys.path.append(str(Path(__file__).parent))
from tensorrt_double import TOKENS, Engine, llm_args, nvme


@pytest.mark.parametrize(("settings", "named"), [
    ({"secondry": "8 blocks"}, "did you mean 'secondary'"), ({}, "no host memory"), ({"secondary": "8 blocks", "gds": "off"}, "no meaning"),
    ({"secondary": "8 blocks", "engine_id": 5}, "engine_id"), ({"secondary": "8 blocks", "trusted_lora_ids": "yes"}, "trusted_lora_ids"),
    ({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": "/nowhere/at/all"}, "nothing says which weights")])
def test_a_misspelt_or_unusable_setting_is_refused_on_every_side(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any],
                                                                 named: str) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps(settings))
    for side in (TieredScheduler, TieredWorker):
        with pytest.raises(ConfigError, match=named):
            side(llm_args())


def test_settings_come_from_a_file_too_and_broken_ones_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("secondary: 8 blocks\nlookup_timeout: 2.5\n")
    monkeypatch.setenv("TRTLLM_KVTIER", str(file))
    assert TieredScheduler(llm_args())._arrangement.settings.lookup_timeout == 2.5
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": ')
    with pytest.raises(ConfigError, match="no JSON mapping"):
        TieredScheduler(llm_args())


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_ranks_that_hold_other_layers_or_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": "8 blocks"}')
    with pytest.raises(ConfigError, match=name):
        TieredWorker(llm_args(**{name: 2}))


def test_a_cache_whose_blocks_are_not_contiguous_or_of_another_block_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": "8 blocks"}')
    worker = TieredWorker(llm_args())
    with pytest.raises(ConfigError, match="contiguous"):
        worker.register_kv_caches(torch.zeros(4, 8, 16)[:, :, ::2])
    with pytest.raises(ConfigError, match="tokens in a block"):
        worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=TOKENS + 1, groups=()))


def test_a_folder_of_another_number_of_ranks_is_refused(start: Callable[..., Engine], tmp_path: Path) -> None:
    start(**nvme(tmp_path / "kv")).close()
    with pytest.raises(ConfigError, match="kv"):
        start(engine={"ranks": 2}, **nvme(tmp_path / "kv"))


def test_ranks_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm_scheduler, "START_SECONDS", 0.1)
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps({"secondary": "8 blocks", "engine_id": f"trt-{uuid.uuid4().hex[:12]}"}))
    with pytest.raises(ConfigError, match="ranks 0, 1 of 2"):
        TieredScheduler(llm_args(2)).wait_for_initialization()

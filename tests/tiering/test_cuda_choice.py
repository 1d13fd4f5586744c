"""``device="cuda"`` on a machine whose torch cannot follow: an error that says so, before anything is allocated."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import kvtier

STAND_IN = Path(__file__).parents[1] / "io" / "cuda_stand_in.py"


def test_a_torch_without_cuda_is_a_config_error(monkeypatch: pytest.MonkeyPatch, layout: kvtier.KVLayout) -> None:
    spec = importlib.util.spec_from_file_location("cuda_stand_in", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cuda = module.StandInCuda()
    monkeypatch.setitem(sys.modules, "cupy", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = kvtier.TierConfig(primary="8 blocks", secondary="4 blocks", nvme="0 blocks")
    with pytest.raises(kvtier.ConfigError, match=r"device='cuda:0': this torch .* cannot use CUDA; install a torch built for CUDA"):
        kvtier.KVCacheManager(layout, config, device="cuda")

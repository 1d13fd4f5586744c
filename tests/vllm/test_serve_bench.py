"""``kvtier bench serve`` with the real vLLM: the point after a restart, as small as it can be. Nothing is timed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bench.serve import ServePlan, measure_serve
from kvtier.bench.serve_vllm import VllmMaker
from kvtier.bench.serve_workload import Shape


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "restart"])
def test_the_point_is_valid(smollm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    plan = ServePlan((2,), Shape(shared=64, per_turn=40, answer=4, turns=2), users=4, rounds=1, kinds=(kind,))
    file = tmp_path / "serve.json"
    code = measure_serve(VllmMaker(str(smollm), "--enforce-eager --dtype float32"), "vllm", plan, tmp_path).finish(file)
    assert code == 0, capsys.readouterr().out
    hits = json.loads(file.read_text())["config"]["hit_tokens"][f"serve/vllm/{kind}/2"]
    assert (hits["nvme"] > 0) == (kind == "restart")

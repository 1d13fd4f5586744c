"""``kvtier bench serve`` with the real vLLM: the point after a restart, as small as it can be. Nothing is timed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bench import serve_vllm
from kvtier.bench.serve import ServePlan, measure_serve
from kvtier.bench.serve_engine import Sizes
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


def test_with_and_without_a_tier_vllm_computes_on_the_same_cores(smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would keep one core more from computing where it sees a connector: then the comparison is one of cores."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(serve_vllm, "VllmServer", lambda command, port, environment: started.append(environment))
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    maker = VllmMaker(str(smollm))
    for folder in (None, tmp_path):
        maker.start(Sizes(pool=1024, host=1024, nvme=1024, longest=256, at_once=1), folder)
    assert [environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] for environment in started] == ["1", "1"]
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")  # who says it has it
    maker.start(Sizes(pool=1024, host=1024, nvme=1024, longest=256, at_once=1), None)
    assert started[-1]["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "3"

"""``kvtier bench kernels`` on a tiny batch: which rows there are, and that a wrong result never becomes a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvtier.bench import kernels as kernels_bench
from kvtier.bench import kernels_gpu
from kvtier.bench import report as report_module
from kvtier.bench.build import compiled
from kvtier.bench.kernels import KernelsPlan, measure_kernels
from kvtier.bench.kernels_gpu import GpuDecodePlan, measure_gpu_decode
from kvtier.bench.plot import panels_of
from kvtier.errors import ConfigError
from kvtier.pools.host_memory import HostMemory

TINY = KernelsPlan(3, 50, heads=2, group=2, head_dim=16, page_tokens=(8, 32), append_tokens=40, rounds=2)
ROWS = ["float32/1KiB", "float32/4KiB", "bfloat16/512B", "bfloat16/2KiB"]


def test_every_row_stands_beside_its_limit_and_can_be_drawn(tmp_path: Path) -> None:
    figures = tmp_path / "kernels.json"
    report = measure_kernels(plan=TINY)
    assert report.finish(figures) == 0
    written = json.loads(figures.read_text())
    rows = {row["name"]: row for row in written["results"]}
    assert list(rows) == [f"kernels/{kernel}/{row}{suffix}" for row in ROWS for kernel in ("decode", "append") for suffix in ("", "/noise")]
    for name, row in rows.items():
        assert 0.0 < row["low"] <= row["median"] <= row["high"]
        if name.endswith("/noise"):
            assert (row["unit"], row["limit"]) == ("x", None)
            continue
        assert row["unit"] == "GB/s"
        assert row["ratio"] > 0.0
        assert row["limit"]["name"] == ("torch copy" if "/append/" in name else "torch sdpa, contiguous")
        assert list(row["peers"]) == ([] if "/append/" in name else ["enable_gqa"])
    assert written["config"]["compiled"] is compiled()
    assert written["config"]["torch_threads"] == torch.get_num_threads()
    assert "4KiB is 32 tokens in float32" in written["config"]["notes"][0]
    assert {name: [size for size, _ in points] for name, points in panels_of(report.rows).items()} == {
        f"kernels/{kernel}/{dtype}": [1024 // narrow, 4096 // narrow]
        for dtype, narrow in (("float32", 1), ("bfloat16", 2)) for kernel in ("decode", "append")}


@pytest.mark.parametrize(("kernel", "row"), [("attention_decode", "decode"), ("write_kv", "append")])
def test_a_wrong_result_makes_a_row_invalid_and_the_exit_code_1(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, row: str) -> None:
    genuine, calls = getattr(kernels_bench, kernel), 0

    def wrong(*arguments: torch.Tensor, **keywords: object) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        result = genuine(*arguments, **keywords)
        target = arguments[0] if result is None else result
        if result is not None or calls > TINY.sequences:   # the sequences of the decode batch are appended first
            target[-1, 0, 0] += 0.5
        return result

    monkeypatch.setattr(kernels_bench, kernel, wrong)
    figures = tmp_path / "kernels.json"
    plan = KernelsPlan(3, 50, heads=2, group=2, head_dim=16, dtypes=("float32",), page_tokens=(16,), append_tokens=48, rounds=2)
    assert measure_kernels(plan=plan).finish(figures) == 1
    written = json.loads(figures.read_text())
    assert [entry["name"] for entry in written["config"]["invalid"]] == [f"kernels/{row}/float32/2KiB"]
    assert f"kernels/{row}/float32/2KiB" not in [found["name"] for found in written["results"]]


def test_a_batch_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_bench, "_measure_decode", lambda *_: pytest.fail("measured all the same"))
    monkeypatch.setattr(report_module, "host_memory", lambda: HostMemory(1 << 20, 1 << 30, "MemAvailable", None))
    with pytest.raises(ConfigError, match="use --quick"):
        measure_kernels(plan=KernelsPlan(32, 4096))
    with pytest.raises(ConfigError, match="0 sequences of 5 tokens"):
        measure_kernels(plan=KernelsPlan(0, 5))


def test_the_usual_batch_is_that_of_the_documented_figure() -> None:
    plan = KernelsPlan.for_this_machine(quick=False)
    assert (plan.sequences, plan.tokens) == (32, 4096)
    assert plan.page_tokens == (16, 32, 64, 128)
    assert plan.rounds >= 7


def test_the_gpu_figures_have_a_row_for_each_page_and_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GpuDecodePlan(sequences=3, tokens=64, heads=2, head_dim=16, groups=(1, 3), page_tokens=(16, 32), rounds=5)
    names = [f"kernels/decode/bfloat16/{size}/r{ratio}" for size in ("1KiB", "2KiB") for ratio in (1, 3)]
    report = measure_gpu_decode(plan, "cpu")
    assert [row.name for row in report.rows] == names
    assert all(row.limit is not None and row.limit.name == "device copy, bytes read and written" for row in report.rows)
    genuine = kernels_gpu.attention_decode
    monkeypatch.setattr(kernels_gpu, "attention_decode", lambda *arguments, **keywords: genuine(*arguments, **keywords) * 1.1)
    assert list(measure_gpu_decode(plan, "cpu").invalid) == names
    with pytest.raises(ConfigError, match="whole pages"):
        measure_gpu_decode(GpuDecodePlan(tokens=100), "cpu")

"""The figures of the write path that ``make test-gpu`` adds: a row for each kernel, checked results, and a plan without work."""

from __future__ import annotations

import pytest

from kvtier.bench import kernels_write_gpu
from kvtier.bench.kernels_write_gpu import GpuWritePlan, measure_gpu_write
from kvtier.bench.measure import Interleaved
from kvtier.bench.report import ResultRow
from kvtier.errors import ConfigError

PLAN = GpuWritePlan(tokens=64, heads=2, head_dim=16, group=3, page_tokens=(16, 32), rounds=5)
NAMES = [f"kernels/{kernel}/bfloat16/{size}" for size in ("1KiB", "2KiB") for kernel in ("append", "fused_write", "partial_copy")]
NVFP4 = ["kernels/nvfp4/quantise/bfloat16/2x16", "kernels/nvfp4/dequantise/bfloat16/2x16"]


def test_there_is_a_row_for_each_kernel_and_page_size() -> None:
    report = measure_gpu_write(PLAN, "cpu")
    assert [row.name for row in report.rows] == NAMES + NVFP4
    assert all(row.limit is not None and row.limit.name == "device copy, bytes read and written" for row in report.rows)
    assert report.invalid == {}


@pytest.mark.parametrize(("name", "rows"), [
    ("write_kv", [row for row in NAMES if "append" in row]), ("fused_write", [row for row in NAMES if "fused" in row]),
    ("copy_partial_blocks", [row for row in NAMES if "partial" in row])])
def test_a_kernel_that_does_nothing_has_no_row(monkeypatch: pytest.MonkeyPatch, name: str, rows: list[str]) -> None:
    monkeypatch.setattr(kernels_write_gpu, name, lambda *_, **__: None)
    report = measure_gpu_write(PLAN, "cpu")
    assert list(report.invalid) == rows
    assert not set(rows) & {row.name for row in report.rows}


def test_codes_that_do_not_come_back_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = kernels_write_gpu.dequantise_nvfp4
    monkeypatch.setattr(kernels_write_gpu, "dequantise_nvfp4", lambda *arguments: genuine(*arguments) * 1.2)
    assert list(measure_gpu_write(PLAN, "cpu").invalid) == NVFP4


def test_bytes_are_those_that_a_kernel_has_to_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    genuine = kernels_write_gpu.throughput_row

    def kept(name: str, measured: Interleaved, ours: str, limit: str, num_bytes: int) -> ResultRow:
        found[name] = num_bytes
        return genuine(name, measured, ours, limit, num_bytes)

    monkeypatch.setattr(kernels_write_gpu, "throughput_row", kept)
    measure_gpu_write(PLAN, "cpu")
    row = 2 * 16 * 2                                    # keys of a token: heads, numbers, bytes
    append = 64 * 2 * row * 2                           # tokens; keys and values; read and written
    fused = 64 * ((3 + 2) * row * 2 + 2 * 8 * 4)        # with queries; cosines and sines in float32
    nvfp4 = 64 * 2 * 16 * 2 + 64 * 2 * (16 // 2 + 1)    # numbers; half a byte for each, and a scale for 16
    assert found == {
        **{f"kernels/append/bfloat16/{size}": append for size in ("1KiB", "2KiB")},
        **{f"kernels/fused_write/bfloat16/{size}": fused for size in ("1KiB", "2KiB")},
        "kernels/partial_copy/bfloat16/1KiB": 2 * 8 * 2 * row * 2,      # blocks; tokens; keys and values; read and written
        "kernels/partial_copy/bfloat16/2KiB": 1 * 16 * 2 * row * 2,
        **dict.fromkeys(NVFP4, nvfp4)}


def test_a_plan_without_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole pages"):
        measure_gpu_write(GpuWritePlan(tokens=100), "cpu")

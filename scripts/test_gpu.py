"""Run the tests in ``tests/gpu``, then measure copies, attention and, where there is GPUDirect Storage, reads and writes through it (in
the folder that KVTIER_GPU_TEST_DIRECTORY names, or the current one); the last line is a JSON object in the form of every benchmark.

Needs pytest, torch and CuPy. Tests that need more are skipped where it is missing, and their reasons are shown and counted.
Arguments are passed on to pytest. Exit codes: 0 fine; 1 a test failed or a figure did not hold; 2 no GPU, or used wrongly;
5 every test was skipped.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvtier.bench.report import Report

GPU_TESTS = Path(__file__).resolve().parent.parent / "tests" / "gpu"


class Outcomes:
    """Pytest plugin that counts. A file that is skipped as a whole counts once."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.counts[report.outcome] += 1


def measure() -> tuple[Report | None, str]:
    """The copy benchmark, or why there are no figures."""
    try:
        from kvtier.bench.copy_gpu import measure_gpu_copies
    except ModuleNotFoundError as error:
        return None, f"copies were not measured: the package {error.name!r} is not installed"
    try:
        report = measure_gpu_copies()
        add(report, measure_attention, "attention")
        add(report, measure_writes, "the write path")
        add(report, measure_gds, "GPUDirect Storage")
        return report, ""
    except Exception as error:  # torch's, CuPy's, the driver's: it is the reason, and the last line has to be written all the same
        return None, f"copies were not measured: {_in_words(error)}"


def measure_attention() -> Report:
    """Decode over pages, beside a copy on the device."""
    from kvtier.bench.kernels_gpu import measure_gpu_decode

    return measure_gpu_decode()


def measure_writes() -> Report:
    """Append, fused write, partial copy and NVFP4, beside a copy on the device."""
    from kvtier.bench.kernels_write_gpu import measure_gpu_write

    return measure_gpu_write()


def measure_gds() -> Report:
    """Reads and writes through GPUDirect Storage."""
    from kvtier.bench.gds import measure_gds

    directory = os.environ.get("KVTIER_GPU_TEST_DIRECTORY")
    return measure_gds(Path(directory) if directory else None)


def add(report: Report, measure_more: Callable[[], Report], what: str) -> None:
    """The rows of another benchmark, or a note that says why there are none. What nobody expects counts as a figure that did not hold."""
    from kvtier.errors import KVTierError

    try:
        measured = measure_more()
    except (KVTierError, ModuleNotFoundError) as error:
        report.note(f"{what} was not measured: {error}")
        return
    except Exception as error:  # torch's, Triton's: whatever has been measured is printed all the same
        report.reject(what, f"not measured: {_in_words(error)}")
        return
    report.rows += measured.rows
    report.notes += measured.notes
    report.invalid |= measured.invalid


def _in_words(error: Exception) -> str:
    from kvtier.errors import KVTierError

    return str(error) if isinstance(error, KVTierError | RuntimeError) else f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> int:
    import torch

    import kvtier

    if not torch.cuda.is_available():
        print("make test-gpu: torch sees no GPU; run it on a machine with one (nvidia-smi shows what the driver sees)",
              file=sys.stderr)
        return 2
    outcomes = Outcomes()
    code = int(pytest.main([str(GPU_TESTS), "-m", "gpu", "-rs", "-p", "no:cacheprovider", *arguments], plugins=[outcomes]))
    report, reason = measure()
    if report is not None:
        code = code or report.finish(None)
        document = report.as_json()
    else:
        print(reason, file=sys.stderr)
        code = code or 1
        machine = {"python": platform.python_version(), "gpu": torch.cuda.get_device_name(0)}
        document = {"kvtier": kvtier.__version__, "machine": machine, "results": [],
                    "config": {"command": "copy", "torch": torch.__version__, "notes": [reason], "invalid": []}}
    config = document["config"]
    assert isinstance(config, dict)
    config["tests"] = outcomes.counts
    print(json.dumps(document))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

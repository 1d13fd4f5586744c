"""``kvtier bench all``: one document with a section for each benchmark, and one that fails does not keep the others from their turn."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from kvtier.bench.compare import read_figures
from kvtier.bench.copy import CopyPlan
from kvtier.bench.copy_gpu import GpuCopyPlan
from kvtier.bench.family import FAMILY, Benchmark, Common, run_all
from kvtier.bench.gds import QUICK as QUICK_GDS
from kvtier.bench.gds import GdsPlan
from kvtier.bench.integrity import IntegrityPlan
from kvtier.bench.kernels import KernelsPlan
from kvtier.bench.kernels_gpu import GpuDecodePlan
from kvtier.bench.kernels_write_gpu import GpuWritePlan
from kvtier.bench.ledger_plan import LedgerPlan
from kvtier.bench.load import LoadPlan
from kvtier.bench.measure import LEAST_ROUNDS
from kvtier.bench.nvme_point import NvmePlan
from kvtier.bench.outputs import Outputs
from kvtier.bench.report import Limit, Report, ResultRow
from kvtier.bench.serve import ServePlan
from kvtier.bench.warm_start import warm_start_rows
from kvtier.errors import ConfigError, TransferError


def benchmark(name: str, median: float = 10.0, error: Exception | None = None, lacks: str = "", bad: str = "") -> Benchmark:
    def measure(common: Common) -> Report:
        if error is not None:
            raise error
        report = Report(f"kvtier bench {name}", {"command": name, **common.settings(), "rounds": 5}, common.directory)
        report.add(ResultRow(f"{name}/a", "GB/s", median, median, median, Limit("limit", 20.0), median / 20.0))
        report.note(f"a remark about {name}")
        if bad:
            report.reject(bad, "wrong bytes")
        return report

    return Benchmark(measure, lambda common: lacks)


def test_all_rows_are_in_one_document_with_the_settings_of_each(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    assert run_all(Common(tmp_path, True), Outputs(file), {"copy": benchmark("copy"), "nvme": benchmark("nvme")}) == 0
    written = json.loads(file.read_text())
    assert list(written) == ["kvtier", "machine", "config", "results"]
    assert [row["name"] for row in written["results"]] == ["copy/a", "nvme/a"]
    assert written["config"]["command"] == "all"
    assert list(written["config"]["sections"]) == ["copy", "nvme"]
    assert written["config"]["sections"]["nvme"]["rounds"] == 5
    assert written["config"]["sections"]["nvme"]["notes"] == ["a remark about nvme"]
    assert "mount" in written["machine"]
    assert list(read_figures(file).configs) == ["copy", "nvme"]


@pytest.mark.parametrize(("error", "is_a_bug"), [(TransferError("the drive is gone"), False), (OSError(28, "No space left"), False),
                                                 (ZeroDivisionError("a bug"), True)])
def test_one_that_fails_does_not_stop_the_others_and_the_exit_code_says_so(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, is_a_bug: bool) -> None:
    file = tmp_path / "all.json"
    family = {"copy": benchmark("copy", error=error), "nvme": benchmark("nvme")}
    assert run_all(Common(), Outputs(file), family) == 1
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["results"]] == ["nvme/a"]
    assert written["config"]["failed"] == {"copy": str(error)}
    said = capsys.readouterr()
    assert f"FAILED copy: {error}" in said.out
    assert ("Traceback" in said.err) == is_a_bug


@pytest.mark.parametrize("has_found", [False, True])
def test_an_interrupt_ends_them_all_and_what_was_measured_is_written_as_incomplete(tmp_path: Path, has_found: bool) -> None:
    def measure(common: Common) -> Report:
        report = benchmark("kernels").measure(common)
        report.rows = report.rows if has_found else []
        with report.interruptible():
            raise KeyboardInterrupt

    file = tmp_path / "all.json"
    family = {"copy": benchmark("copy"), "kernels": Benchmark(measure),
              "nvme": Benchmark(lambda common: pytest.fail("went on after the interrupt"))}
    with pytest.raises(KeyboardInterrupt):
        run_all(Common(), Outputs(file), family)
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["results"]] == ["copy/a", "kernels/a"][:1 + has_found]
    assert written["config"]["incomplete"] is True
    assert "incomplete" not in written["config"]["sections"]["copy"]
    assert written["config"]["sections"].get("kernels", {}).get("incomplete", False) is has_found


def test_what_cannot_be_measured_here_is_left_out_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.json"
    assert run_all(Common(), Outputs(file), {"copy": benchmark("copy"), "gds": benchmark("gds", lacks="it needs a GPU")}) == 0
    assert json.loads(file.read_text())["config"]["left_out"] == {"gds": "it needs a GPU"}
    assert "left out gds: it needs a GPU" in capsys.readouterr().out


def test_a_row_that_does_not_hold_is_an_exit_code_of_1(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    assert run_all(Common(), Outputs(file), {"copy": benchmark("copy", bad="copy/b"), "nvme": benchmark("nvme")}) == 1
    assert json.loads(file.read_text())["config"]["invalid"] == [{"name": "copy/b", "reason": "wrong bytes"}]


def test_all_are_compared_with_an_earlier_run_of_all_or_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    run_all(Common(), Outputs(old), {"copy": benchmark("copy"), "nvme": benchmark("nvme")})
    slower = {"copy": benchmark("copy"), "nvme": benchmark("nvme", 5.0)}
    capsys.readouterr()
    assert run_all(Common(), Outputs(compare_with=old), slower) == 1
    assert "nvme/a" in capsys.readouterr().out.rpartition("compared with")[2]
    one = tmp_path / "one.json"
    benchmark("copy").measure(Common()).finish(one)
    assert run_all(Common(), Outputs(compare_with=one), slower) == 0


def test_nothing_is_measured_for_files_or_folders_that_cannot_be_used(tmp_path: Path) -> None:
    family = {"copy": Benchmark(lambda common: pytest.fail("measured all the same"))}
    for common, outputs in ((Common(tmp_path / "missing"), Outputs()), (Common(), Outputs(tmp_path / "missing" / "x.json")),
                            (Common(), Outputs(compare_with=tmp_path / "missing.json")), (Common(device="cuda:99"), Outputs())):
        with pytest.raises(ConfigError):
            run_all(common, outputs, family)


def test_the_order_is_what_the_machine_can_do_before_what_is_built_on_it() -> None:
    assert list(FAMILY) == ["copy", "kernels", "ledger", "nvme", "gds", "load", "integrity", "serve"]
    assert FAMILY["gds"].lacks(Common()) != ""


@pytest.mark.parametrize("quick", [False, True])
def test_every_usual_row_is_of_at_least_five_rounds(quick: bool) -> None:
    assert LEAST_ROUNDS == 5
    plans = [*CopyPlan.for_this_machine(quick), KernelsPlan.for_this_machine(quick), LedgerPlan.usual(quick), *NvmePlan.usual(quick),
             LoadPlan.usual(quick), ServePlan.usual(quick), QUICK_GDS if quick else GdsPlan(), GpuCopyPlan.usual(quick),
             GpuDecodePlan.usual(quick), GpuWritePlan.usual(quick)]
    assert min(plan.rounds for plan in plans) >= LEAST_ROUNDS
    trials = IntegrityPlan.usual(quick)
    assert min(trials.kills_per_point, trials.kills_at_any_moment, trials.flips, trials.writes, trials.full_drives) >= LEAST_ROUNDS
    assert inspect.signature(warm_start_rows).parameters["rounds"].default >= LEAST_ROUNDS



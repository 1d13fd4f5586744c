"""``kvtier bench``: every benchmark has the same options, and what cannot be done afterwards is refused before anything is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kvtier import cli
from kvtier.bench import family, ledger, outputs, serve
from kvtier.bench.build import compiled
from kvtier.bench.family import FAMILY, IN_MEMORY, Benchmark, Common
from kvtier.bench.report import Limit, Report, ResultRow, describe_machine
from kvtier.cli_bench import bench

MEASURING = [*FAMILY, "all"]


def leaving(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of ``kvtier bench`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["kvtier", "bench", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return raised.value.code


def measuring(monkeypatch: pytest.MonkeyPatch, median: float = 10.0) -> list[Common]:
    """``kvtier bench copy`` finds this figure at once; gives what it is called with."""
    asked: list[Common] = []

    def measure(common: Common) -> Report:
        asked.append(common)
        report = Report("kvtier bench copy", {"command": "copy", **common.settings()})
        report.add(ResultRow("copy/a/2MiB", "GB/s", median, median, median, Limit("memcpy", 20.0), median / 20.0))
        return report

    monkeypatch.setattr(family, "FAMILY", {"copy": family.Benchmark(measure)})
    return asked


def test_every_benchmark_of_the_family_is_a_command_with_the_same_options() -> None:
    commands = {command.name: {option for each in command.params for option in each.opts}
                for command in typer.main.get_command(bench).commands.values()}  # type: ignore[attr-defined]
    assert {*MEASURING, "compare"} == set(commands)
    for name in MEASURING:
        assert {"--json", "--plot", "--compare", "--quick"} <= commands[name], name


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_by_all(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, option: str) -> None:
    monkeypatch.setattr(family, "FAMILY", {})  # whoever measures all the same meets a KeyError
    for file in (tmp_path / "missing" / "x.svg", tmp_path):
        assert leaving(monkeypatch, name, option, str(file)) == 2
        assert f"'{option}'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MEASURING)
def test_figures_of_another_machine_or_of_none_are_refused_by_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setattr(family, "FAMILY", {})
    old = tmp_path / "old.json"
    machine = {"cpu": "A machine that is none", "cores": 7777, "gpu": "none"}
    old.write_text(json.dumps({"kvtier": "0", "machine": machine, "config": {"command": name, "sections": {each: {} for each in FAMILY}},
                               "results": []}))
    new = tmp_path / "new.json"
    assert leaving(monkeypatch, name, "--compare", str(old), "--json", str(new)) == 2
    said = capsys.readouterr().err
    assert "another machine" in said
    assert "A machine that is none there" in said
    assert said.count("\n") == 1
    old.write_text("{")
    assert leaving(monkeypatch, name, "--compare", str(old), "--json", str(new)) == 2
    assert not new.exists()


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **more: object) -> Report:
        pytest.fail("measured all the same")

    for each in FAMILY:
        monkeypatch.setitem(FAMILY, each, Benchmark(never))
    monkeypatch.setattr(ledger, "measure_ledger", never)
    monkeypatch.setattr(serve, "measure_serve", never)


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("name", [name for name in MEASURING if name not in IN_MEMORY])
def test_without_a_folder_figures_of_another_drive_than_the_current_folder_s_are_refused_beforehand(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"kvtier": "0", "machine": describe_machine() | {"mount": "/no-such-mount"},
                               "config": {"command": name, "sections": {each: {} for each in FAMILY}}, "results": []}))
    assert leaving(monkeypatch, name, "--compare", str(old)) == 2
    assert "mount /no-such-mount there" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("name", MEASURING)
def test_figures_of_another_build_are_refused_by_all_before_anything_is_measured(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    other = {"compiled": not compiled()}
    for command in FAMILY if name == "all" else [name]:
        config = {"command": name, "sections": {command: other}} if name == "all" else {"command": name, **other}
        (tmp_path / "old.json").write_text(json.dumps({"kvtier": "0", "machine": describe_machine(), "config": config, "results": []}))
        assert leaving(monkeypatch, name, "--compare", str(tmp_path / "old.json")) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{command} was measured with compiled={not compiled()}, this run with compiled={compiled()}" in said
        assert "make bench" in said


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("name", ["nvme", "all"])
def test_figures_of_direct_io_are_refused_where_there_is_none_before_anything_is_measured(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setattr(outputs, "refuses_direct", lambda folder: "open with O_DIRECT: Invalid argument")
    config = {"command": "nvme", "direct_io": True}
    (tmp_path / "old.json").write_text(json.dumps({"kvtier": "0", "machine": describe_machine(), "results": [],
                                                   "config": {"sections": {"nvme": config}} if name == "all" else config}))
    (drive := tmp_path / "drive").mkdir()
    assert leaving(monkeypatch, name, "--directory", str(drive), "--compare", str(tmp_path / "old.json")) == 2
    assert "nvme was measured with direct_io=True, this run with direct_io=False" in " ".join(capsys.readouterr().err.split())
    assert list(drive.iterdir()) == []


def test_what_was_measured_before_ctrl_c_is_shown_and_written_as_incomplete(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(common: Common, rows: int = 1) -> Report:
        report = Report("kvtier bench copy", {"command": "copy", **common.settings()})
        with report.interruptible():
            for _ in range(rows):
                report.add(ResultRow("copy/a/2MiB", "GB/s", 10.0, 10.0, 10.0))
            raise KeyboardInterrupt

    monkeypatch.setattr(family, "FAMILY", {"copy": Benchmark(lambda common: measure(common, 0))})
    assert leaving(monkeypatch, "copy", "--json", str(tmp_path / "new.json")) == 130
    assert not (tmp_path / "new.json").exists(), "there is nothing to write"
    capsys.readouterr()
    monkeypatch.setattr(family, "FAMILY", {"copy": Benchmark(measure)})
    assert leaving(monkeypatch, "copy", "--json", str(tmp_path / "new.json")) == 130
    said = capsys.readouterr()
    assert "copy/a/2MiB" in said.out
    assert "INCOMPLETE" in said.out
    assert said.err == "kvtier: interrupted\n"
    written = json.loads((tmp_path / "new.json").read_text())
    assert written["config"]["incomplete"] is True
    assert [row["name"] for row in written["results"]] == ["copy/a/2MiB"]


def test_options_reach_the_benchmark_and_a_regression_is_an_exit_code_of_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    asked = measuring(monkeypatch)
    assert leaving(monkeypatch, "copy", "--quick", "--json", str(old)) == 0
    assert leaving(monkeypatch, "copy", "--quick", "--compare", str(old)) == 0
    assert asked == [Common(None, True, "cpu")] * 2
    measuring(monkeypatch, 5.0)
    assert leaving(monkeypatch, "copy", "--quick", "--compare", str(old), "--json", str(new)) == 1
    assert leaving(monkeypatch, "copy", "--compare", str(old)) == 2, "a full run beside a short one"
    assert leaving(monkeypatch, "compare", str(old), str(new)) == 1
    assert leaving(monkeypatch, "compare", str(new), str(old)) == 0
    assert leaving(monkeypatch, "compare", str(new), str(tmp_path / "missing.json")) == 2


def test_a_benchmark_that_touches_no_drive_compares_with_figures_of_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    asked = measuring(monkeypatch)
    old.write_text(json.dumps({"kvtier": "0", "machine": describe_machine() | {"mount": "/no-such-mount"},
                               "config": {"command": "all", "sections": {"copy": {}, "nvme": {}}}, "results": []}))
    assert leaving(monkeypatch, "copy", "--compare", str(old)) == 0
    assert len(asked) == 1


def test_all_takes_a_folder_and_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measuring(monkeypatch)
    assert leaving(monkeypatch, "all", "--directory", str(tmp_path / "missing")) == 2
    assert leaving(monkeypatch, "all", "--device", "cuda:99") == 2
    assert "device='cuda:99'" in capsys.readouterr().err


def test_help_shows_the_family() -> None:
    said = CliRunner().invoke(bench, ["--help"]).output
    assert all(name in said for name in MEASURING)

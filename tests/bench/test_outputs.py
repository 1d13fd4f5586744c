"""What every benchmark does with its figures: refused beforehand what cannot be done afterwards, and nothing half written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.bench import outputs as outputs_module
from kvtier.bench import plot
from kvtier.bench.outputs import Outputs, compare_files
from kvtier.bench.report import Limit, Report, ResultRow
from kvtier.errors import ConfigError

QUICK = {"quick": True}


def report(median: float = 10.0, **config: object) -> Report:
    made = Report("kvtier bench copy", {"command": "copy", **QUICK, **config}, None,
                  Console(width=100, record=True, file=open(os.devnull, "w")))  # noqa: SIM115
    made.add(ResultRow("copy/a/2MiB", "GB/s", median, median - 0.1, median + 0.1, Limit("memcpy", 20.0), median / 20.0))
    return made


def shown(made: Report) -> str:
    return " ".join(made._console.export_text().split())


@pytest.mark.parametrize("name", ["", "no-such-folder/x.json", "-"])
def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name a file"):
        Outputs(json_file=Path(name)).check("copy", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[bench\]'"):
        Outputs(plot_file=tmp_path / "copy.png").check("copy", QUICK)


def test_an_earlier_run_of_another_machine_is_refused_beforehand(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    document = report().as_json()
    old.write_text(json.dumps(document))
    Outputs(compare_with=old).check("copy", QUICK)
    with pytest.raises(ConfigError, match="quick=True"):
        Outputs(compare_with=old).check("copy", {"quick": False})
    with pytest.raises(ConfigError, match="none of ledger"):
        Outputs(compare_with=old).check("ledger", QUICK)
    old.write_text(json.dumps(document | {"machine": dict(document["machine"]) | {"cpu": "Another"}}))  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"old\.json is of another machine than this run: cpu Another there, .* here"):
        Outputs(compare_with=old).check("copy", QUICK)


def test_a_row_that_has_become_worse_is_shown_and_is_an_exit_code_of_1(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    assert report().finish(old) == 0
    same, worse, better = report(10.05), report(9.0), report(11.0)
    assert Outputs(compare_with=old).finish(same) == 0
    said = shown(same)
    assert "nothing differs beyond noise, over 1 row" in said
    assert "before" not in said, "an empty table says nothing"
    assert Outputs(compare_with=old).finish(worse) == 1
    said = shown(worse)
    assert "copy/a/2MiB 10.0 GB/s 9.00 GB/s -10% +0% WORSE" in said
    assert "0 rows within noise, 1 WORSE" in said
    assert Outputs(compare_with=old).finish(better) == 0
    assert "+10% +0% better" in shown(better)


def test_a_file_can_be_compared_with_and_written_over_at_once(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    report().finish(file)
    assert Outputs(json_file=file, compare_with=file).finish(report(9.0)) == 1
    assert json.loads(file.read_text())["results"][0]["median"] == 9.0
    assert Outputs(json_file=file, compare_with=file).finish(report(9.0)) == 0


def test_two_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    report().finish(old)
    report(9.0).finish(new)
    assert compare_files(old, new) == 1
    assert "WORSE" in capsys.readouterr().out
    assert compare_files(new, old) == 0


def test_a_row_that_did_not_hold_outweighs_a_good_comparison(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    report().finish(old)
    bad = report()
    bad.reject("copy/b", "wrong bytes")
    assert Outputs(compare_with=old).finish(bad) == 1


def test_a_picture_is_drawn_or_said_not_to_be_and_the_figures_are_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bool] = []

    def draw(file: Path, title: str, rows: list[ResultRow]) -> bool:
        drawn.append((tmp_path / "x.json").exists())
        return bool(rows)

    monkeypatch.setattr(outputs_module, "plot_report", draw)
    out = Outputs(tmp_path / "x.json", tmp_path / "x.svg")
    one, none = report(), report()
    none.rows.clear()
    assert out.finish(one) == out.finish(none) == 0
    assert drawn == [True, True]
    assert "x.svg" in shown(one)
    assert "was not drawn: no row can be" in shown(none)
    assert out.of("copy") == Outputs(plot_file=tmp_path / "x-copy.svg")

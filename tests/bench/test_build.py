"""Of which build figures are: it is in the report, and figures of two builds do not compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench import build
from kvtier.bench.outputs import Outputs
from kvtier.bench.report import Report
from kvtier.errors import ConfigError


def build_is(monkeypatch: pytest.MonkeyPatch, compiled: bool, failure: ImportError | None) -> None:
    monkeypatch.setattr(build, "is_compiled", lambda: compiled)
    monkeypatch.setattr(build, "host_copy_failure", lambda: failure)


def report() -> Report:
    return Report("kvtier bench copy", {"command": "copy", "compiled": build.compiled()})


def test_a_compiled_build_whose_module_in_c_cannot_be_loaded_says_so_and_compares_with_no_whole_one(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_is(monkeypatch, True, None)
    assert build.compiled() is True
    report().finish(tmp_path / "whole.json")
    assert ", compiled\n" in capsys.readouterr().out
    build_is(monkeypatch, True, ImportError("of another system"))
    report().finish(tmp_path / "damaged.json")
    assert ", compiled (the ledger alone, without copies in C)" in " ".join(capsys.readouterr().out.split())
    Outputs(compare_with=tmp_path / "damaged.json").check("copy", {"compiled": build.compiled()})
    with pytest.raises(ConfigError, match="copy was measured with compiled=True, this run with compiled=the ledger alone"):
        Outputs(compare_with=tmp_path / "whole.json").check("copy", {"compiled": build.compiled()})


def test_plain_python_has_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    build_is(monkeypatch, False, ImportError("kvtier.kernels.host_copy is missing"))
    assert build.compiled() is False

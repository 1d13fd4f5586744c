"""The table of crashes and damage: one line for each case, and nothing that was not measured."""

from __future__ import annotations

import runpy
from pathlib import Path

TABLE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "figures_integrity.py"))["integrity_table"]


def test_a_case_is_one_line_with_its_counts() -> None:
    case = {"name": "flip/index", "trials": 250, "rebuilt": 53, "committed": 11000, "lost": 1, "wrong": 0}
    rows = [{"name": "integrity/flip/index/recover", "median": 0.0123}, {"name": "integrity/flip/index/wrong", "median": 0.0}]
    lines = TABLE({"results": rows, "config": {"matrix": [case, case | {"name": "torn-write"}]}})
    assert lines[2:] == ["| `flip/index` | 250 | 11000 | 1 | 0 | 53 | 0.012 |", "| `torn-write` | 250 | 11000 | 1 | 0 | 53 |  |"]
    assert {line.count("|") for line in lines} == {8}


def test_without_cases_there_is_a_head_and_nothing_else() -> None:
    assert len(TABLE({"results": [], "config": {}})) == 2

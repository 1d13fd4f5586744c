"""The figures in docs/performance.md: all of them come from committed measurements."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from kvtier.bench.family import FAMILY

ROOT = Path(__file__).resolve().parent.parent
FIGURES = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
PAGE = "before\n<!-- figures: ledger.json -->\nold\n<!-- end -->\nafter\n"


def measurement(**config: object) -> dict:
    row = {"name": "ledger/W1", "unit": "us", "median": 12.3456, "low": 1.0, "high": 200.4, "limit": {"name": "memcmp", "value": 0.05},
           "ratio": 0.5, "peers": {"vllm": 17.89}}
    return {"kvtier": "0.1.0", "machine": {"cpu": "A CPU", "cores": 2, "kernel": "Linux 6", "python": "3.11.1", "gpu": "none"},
            "config": {"notes": ["a remark"], "losses": ["ledger/W1 LOSES to vllm: 0.90"],
                       "invalid": [{"name": "ledger/W2", "reason": "wrong"}], **config},
            "results": [row, row | {"name": "ledger/W4", "limit": None, "ratio": None, "peers": {}}]}


def test_the_page_agrees_with_the_committed_measurements() -> None:
    assert FIGURES["main"](["--check"]) == 0


def test_every_benchmark_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert set(re.findall(r"figures: (\w+)\.json", page)) >= {*FAMILY} - {"gds"}  # whose page is docs/gpudirect.md
    committed = {file.name for file in (ROOT / "docs" / "measurements").glob("*.json")}
    assert committed <= set(re.findall(r"figures: ([\w.-]+) -->", page))


def test_a_section_is_made_anew_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text(json.dumps(measurement(compiled=True, quick=True)))
    page = FIGURES["filled"](PAGE, tmp_path)
    assert "old" not in page
    assert page.startswith("before\n<!-- figures: ledger.json -->\n")
    assert page.endswith("<!-- end -->\nafter\n")
    assert "| `ledger/W1` | 12.3 us | 1.00 to 200 | 0.0500 (memcmp) | 0.50 | vllm 17.9 |" in page
    assert "| `ledger/W4` | 12.3 us | 1.00 to 200 |  |  |  |" in page
    assert "kvtier 0.1.0, --quick: A CPU, 2 cores" in page
    assert "modules were compiled" in page
    assert "* a remark" in page
    assert "* ledger/W1 LOSES to vllm: 0.90" in page
    assert "* INVALID ledger/W2: wrong" in page
    assert FIGURES["filled"](page, tmp_path) == page


@pytest.mark.parametrize(("command", "compiled", "plain"), [
    ("ledger", "The ledger's modules were compiled.", "The ledger's modules were plain Python."),
    ("copy", "Copies were compiled.", "Copies were library calls."),
    ("nvme", "The modules were compiled.", "The modules were plain Python.")])
def test_a_section_says_of_which_build_its_figures_are(tmp_path: Path, command: str, compiled: str, plain: str) -> None:
    for is_compiled, said in ((True, compiled), (False, plain), ("the ledger alone", "Compiled was the ledger alone.")):
        (tmp_path / "ledger.json").write_text(json.dumps(measurement(command=command, compiled=is_compiled)))
        assert said in FIGURES["filled"](PAGE, tmp_path)
    (tmp_path / "ledger.json").write_text(json.dumps(measurement(command=command)))
    assert " were " not in FIGURES["filled"](PAGE, tmp_path), "an older file does not say"


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    assert "Not measured yet: there is no `ledger.json`." in FIGURES["filled"](PAGE, tmp_path)

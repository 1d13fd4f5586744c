"""``make soak``, for a moment: it checks bytes, survives what it does, and says what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def soak(*options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "soak.py"), *options], cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout, check=False)


@pytest.mark.parametrize("minutes", ["0.05", pytest.param("2", marks=pytest.mark.slow)])
def test_a_soak_finds_nothing_wrong_and_says_what_it_did(tmp_path: Path, minutes: str) -> None:
    done = soak("--minutes", minutes, "--seed", "1", "--json", str(tmp_path / "soak.json"), timeout=300)
    summary = json.loads(done.stdout)
    assert done.returncode == 0, summary["errors"]
    assert summary == json.loads((tmp_path / "soak.json").read_text())
    assert (summary["wrong_bytes"], summary["errors"]) == (0, [])
    assert summary["processes"] > 0
    assert min(summary["lives"] + summary["killed"], summary["tokens_checked"] + summary["killed"]) > 0


@pytest.mark.parametrize("options", [("--minutes", "nan"), ("--directory", ".")])
def test_a_soak_that_makes_no_sense_is_refused(options: tuple[str, ...]) -> None:
    done = soak(*options, timeout=60)
    assert done.returncode == 2
    assert options[0] in done.stderr

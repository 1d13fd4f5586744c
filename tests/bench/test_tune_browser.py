"""The report in a real browser, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.bench.trace_synthetic import synthetic_trace
from kvtier.bench.tune import curve_of
from kvtier.bench.tune_page import curve_picture, page

PATIENCE = 240.0


@pytest.fixture
def browser() -> str:
    """One that works: where only a snap has it, Ubuntu installs a program of this name that says so and ends."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True, timeout=PATIENCE, check=False).returncode == 0:
            return found
    pytest.skip("no chromium is installed")


def test_the_page_opens_in_a_browser(tmp_path: Path, browser: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.html"
    file.write_text(page("a <title>", ["a & b"], curve_picture(curve_of(synthetic_trace("chats", 60)), 1 << 20, [("primary", 5)]),
                         [("Levels", (("level",), [("primary",)]))], "primary: x"))
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",  # a container's is small
                            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
                           capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    assert "a &lt;title&gt;" in shown
    assert "<svg" in shown

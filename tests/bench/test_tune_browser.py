"""The report in a real browser, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.bench.trace_synthetic import synthetic_trace
from kvtier.bench.tune import curve_of
from kvtier.bench.tune_page import curve_picture, page

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert BROWSER is not None
    file = tmp_path / "report.html"
    file.write_text(page("a <title>", ["a & b"], curve_picture(curve_of(synthetic_trace("chats", 60)), 1 << 20, [("primary", 5)]),
                         [("Levels", (("level",), [("primary",)]))], "primary: x"))
    shown = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
                            file.as_uri()], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "a &lt;title&gt;" in shown
    assert "<svg" in shown

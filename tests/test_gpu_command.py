"""``make test-gpu`` on machines that lack something: it says what, and its last line is still the JSON of every benchmark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_PACKAGES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError("hidden by the test", name=name)

sys.meta_path.insert(0, Hidden())
if "cupy" not in {hidden}:
    import types
    sys.modules["cupy"] = types.ModuleType("cupy")
import torch
torch.cuda.is_available = lambda: {gpu}
torch.cuda.get_device_name = lambda *_: "a GPU that is not there"
sys.argv = ["test_gpu.py", *{arguments}]
import runpy
runpy.run_path("scripts/test_gpu.py", run_name="__main__")
"""

BARE = {"cupy", "hypothesis", "kvikio", "pydantic", "pydantic_core", "pydantic_settings", "pytest_asyncio", "typer", "xxhash"}
"""What a machine that has pytest, torch and Triton may lack."""


def run(hidden: set[str], gpu: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_PACKAGES.format(hidden=hidden, gpu=gpu, arguments=arguments)
    around = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=around, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_gpu_it_says_so_and_runs_nothing() -> None:
    done = run({"cupy"}, False)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr
    assert "skipped" not in done.stdout


def test_on_a_bare_machine_every_file_is_skipped_with_its_reason_and_nothing_fails() -> None:
    done = run(BARE, True)
    assert "the CUDA twin needs CuPy: pip install 'kvtier[cuda]'" in done.stdout, done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    written = json.loads(done.stdout.splitlines()[-1])
    assert written.keys() == {"kvtier", "machine", "config", "results"}
    assert written["config"]["tests"] == {"passed": 0, "failed": 0, "skipped": len(list((ROOT / "tests/gpu").glob("test_*.py")))}
    assert "not measured" in written["config"]["notes"][0]
    assert done.returncode == 5, "nothing that ran is not nothing that failed"


def test_with_cupy_alone_only_what_needs_more_is_skipped() -> None:
    """Whatever comes to be imported there: a file that asks for less than it uses would end as an error."""
    done = run(BARE - {"cupy", "xxhash"}, True, "--collect-only", "-q")
    assert not re.search(r"^ERROR|\d errors?\b", done.stdout, re.MULTILINE), done.stdout
    collected = {line.partition("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}
    wanted = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py") if "pydantic_settings" not in path.read_text()}
    assert collected == wanted
    assert "test_gpu_direct_rows.py" in wanted


def test_the_sanitizer_runs_files_that_are_there_and_says_when_it_is_missing(tmp_path: Path) -> None:
    script = ROOT / "scripts/sanitize_gpu.sh"
    named = re.findall(r"tests/gpu/\w+\.py", script.read_text())
    assert named
    assert all((ROOT / name).is_file() for name in named)
    (tmp_path / "dirname").symlink_to(str(shutil.which("dirname")))
    done = subprocess.run(["/bin/bash", str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "compute-sanitizer is not on the PATH" in done.stderr


def test_figures_that_cannot_be_had_are_an_exit_code_and_a_reason() -> None:
    done = run({"cupy"}, True)
    written = json.loads(done.stdout.splitlines()[-1])
    assert written["results"] == []
    assert "needs CuPy" in written["config"]["notes"][0]
    assert "needs CuPy" in done.stderr
    assert done.returncode != 0

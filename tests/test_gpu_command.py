"""``make test-gpu`` on machines that lack something: it says what, and its last line is still the JSON of every benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.errors import ConfigError, CorruptBlock, TransferError

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
if any("test_gpu.py" in argument for argument in sys.orig_argv):  # and not the processes that it starts
    import torch
    torch.cuda.is_available = lambda: {gpu}
    torch.cuda.get_device_name = lambda *_: "a GPU that is not there"
"""
"""What each process does first, as its ``sitecustomize``."""

BARE = {"cupy", "hypothesis", "kvikio", "pydantic", "pydantic_core", "pydantic_settings", "pytest_asyncio", "typer", "xxhash"}
"""What a machine that has pytest, torch and Triton may lack."""


def run(folder: Path, hidden: set[str], gpu: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(WITHOUT_PACKAGES.format(hidden=hidden, gpu=gpu))
    around = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, "scripts/test_gpu.py", *arguments], cwd=ROOT, env=around, capture_output=True, text=True,
                          timeout=240, check=False)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, {"cupy"}, False)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr
    assert "skipped" not in done.stdout


def test_on_a_bare_machine_every_file_is_skipped_with_its_reason_and_nothing_fails(tmp_path: Path) -> None:
    done = run(tmp_path, BARE, True)
    assert "the CUDA twin needs CuPy: pip install 'kvtier[cuda]'" in done.stdout, done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    written = json.loads(done.stdout.splitlines()[-1])
    assert written.keys() == {"kvtier", "machine", "config", "results"}
    assert written["config"]["tests"] == {"passed": 0, "failed": 0, "skipped": len(list((ROOT / "tests/gpu").glob("test_*.py")))}
    assert written["results"] == []
    assert written["config"]["notes"][0].startswith("copies: not measured: ")
    assert "copies: not measured: " in done.stderr
    assert done.returncode == 5, "nothing that ran is not nothing that failed"


def test_with_cupy_alone_only_what_needs_more_is_skipped(tmp_path: Path) -> None:
    """Whatever comes to be imported there: a file that asks for less than it uses would end as an error."""
    done = run(tmp_path, BARE - {"cupy", "xxhash"}, True, "--collect-only", "-q")
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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_waits_for_cuda_and_tells_neighbours_apart(tmp_path: Path, tool: str) -> None:
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\nif [ "$1" = -c ]; then exit "$NO_GPU"; fi\necho staged\n')
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@"\n')
    for file in (python, sanitizer):
        file.chmod(0o700)

    def sanitize(no_gpu: str) -> subprocess.CompletedProcess[str]:
        around = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python), "NO_GPU": no_gpu}
        return subprocess.run(["/bin/bash", str(ROOT / "scripts/sanitize_gpu.sh"), tool, "-x"], env=around, capture_output=True, text=True,
                              timeout=60, check=False)

    done = sanitize("1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no GPU" in done.stderr
    said = sanitize("0").stdout.split()
    assert said[:3] == ["1", "--tool", tool]
    assert said[-1] == "-x"
    assert said[said.index("--launch-timeout") + 1] == "0", "importing torch may take longer than the ten seconds that it waits for CUDA"
    assert ("--padding" in said) == ("--report-api-errors" in said) == (tool == "memcheck"), "they are of memcheck"


def test_each_file_of_tests_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    command = script("test_gpu")
    named = [*command.ALONE, *sum(command.SIDE_BY_SIDE, ()), *command.LAST]
    assert sorted(named) == sorted(path.stem.removeprefix("test_gpu_") for path in (ROOT / "tests/gpu").glob("test_*.py"))


def test_what_runs_side_by_side_is_stopped_by_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    command = script("test_gpu")

    def run_tests(files: list[str], *_: object, stop: threading.Event, **__: object) -> None:
        if files == ["interrupted"]:
            raise KeyboardInterrupt
        assert stop.wait(60)

    monkeypatch.setattr(command, "run_tests", run_tests)
    with pytest.raises(KeyboardInterrupt):
        command.run_side_by_side([["interrupted"], ["long"]], [], 0.0)


def test_no_variable_of_the_suite_is_taken_for_a_setting_of_a_cache() -> None:
    """``TierConfig`` refuses a KVTIER_ variable that it does not know, and all tests of caches with it."""
    suite = [*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "scripts").glob("*gpu*")]
    read = {name for path in suite for name in re.findall(r"environ\S*[\"'](\w+)[\"']", path.read_text())}
    assert "GPU_TEST_DIRECTORY" in read
    assert not [name for name in read if name.startswith("KVTIER_")]


@pytest.mark.parametrize(("error", "found"), [
    (ModuleNotFoundError("No module named 'cupy'", name="cupy"), {"missing": "the package 'cupy' is not installed"}),
    (ConfigError("device='cuda' needs CuPy"), {"missing": "device='cuda' needs CuPy"}),
    (CorruptBlock("slot 3: the checksum is another"), {"error": "slot 3: the checksum is another"}),
    (TransferError("copies hang"), {"error": "copies hang"}),
    (RuntimeError("CUDA error: an illegal memory access"), {"error": "CUDA error: an illegal memory access"}),
    (KeyError("warps"), {"error": "KeyError: 'warps'"})])
def test_figures_that_cannot_be_had_have_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, found: dict[str, str]) -> None:
    def fail(name: str) -> None:
        raise error

    figures = script("gpu_figures")
    monkeypatch.setattr(figures, "measure", fail)
    assert figures.found("copies") == found


FIGURES = """
import json, subprocess, sys, time
from pathlib import Path
name, path = sys.argv[1:]
if name == "hangs":
    time.sleep(600)
if name == "ends":
    helper = subprocess.Popen(["sleep", "600"])
    Path(__file__).with_name("helper").write_text(str(helper.pid))
    sys.exit(3)
config = {"command": "copy" if name == "copies" else "kernels", "notes": [f"a note of {name}"], "invalid": []}
machine = {"cpu": "some", "gpu": "none"} | ({"mount": "/drive"} if name == "attention" else {})
found = {"report": {"kvtier": "1", "machine": machine, "config": config, "results": [{"name": name}]}}
Path(path).write_text(json.dumps({"error": "broken"} if name == "fails" else {"missing": "no room"} if name == "lacks" else found))
"""


def wait_for_end(process: int) -> None:
    status = Path(f"/proc/{process}/status")
    deadline = time.monotonic() + 60
    with suppress(FileNotFoundError, ProcessLookupError):
        while "(zombie)" not in status.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_one_benchmark_does_keeps_no_other_from_being_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu_figures.py").write_text(FIGURES)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    command = script("test_gpu")
    monkeypatch.setattr(command, "SCRIPTS", tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "a GPU that is not there")
    findings = command.Findings()
    assert findings.exit_code() == 5, "nothing has run"
    findings.outcomes.by_test["one"] = "passed"
    assert findings.exit_code() == 1, "there are no figures"
    findings.measure("lacks", time.monotonic() + 300)
    findings.measure("copies", time.monotonic() + 300)
    assert findings.exit_code() == 0
    findings.measure("hangs", time.monotonic() + 1)
    findings.measure("fails", time.monotonic() + 300)
    findings.measure("ends", time.monotonic() + 300)
    wait_for_end(int((tmp_path / "helper").read_text()))  # what it had started
    findings.measure("attention", time.monotonic() + 300)
    findings.show()
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in written["results"]] == ["copies", "attention"]
    assert written["config"]["command"] == "copy"
    assert written["machine"].items() >= {"gpu": "a GPU that is not there", "cpu": "some", "mount": "/drive"}.items()
    assert [each["name"] for each in written["config"]["invalid"]] == ["hangs", "fails", "ends"]
    assert written["config"]["notes"][:2] == ["lacks: not measured: no room", "a note of copies"]
    assert findings.exit_code() == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_an_interpreter_that_lacks_what_it_needs_is_named_in_a_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without packages
    python.chmod(0o755)
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    found = subprocess.run(["make", "test-gpu", f"PYTHON={python}"], cwd=ROOT, env=around, capture_output=True, text=True, timeout=60,
                           check=False)
    assert found.returncode == 2
    assert f"make test-gpu: {python} has no pytest or no torch" in found.stderr
    assert "Traceback" not in found.stderr

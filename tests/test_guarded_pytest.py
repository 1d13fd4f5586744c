"""``scripts/guarded_pytest.py``: a test that hangs, ends its process or breaks the device costs itself and no other."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "guarded_pytest.py"

BAD_DAYS = """
import os, time
import pytest

def test_first():
    pass

def test_hangs():
    time.sleep(600)

def test_after_one_that_hung():
    pass

def test_ends_its_process():
    os._exit(9)

def test_breaks_the_device():
    import torch

    def refuse():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, refuse
    refuse()

def test_after_the_device_was_broken():
    import torch
    assert not torch.cuda.is_initialized()

def test_skips():
    pytest.skip("because")

@pytest.fixture
def falls_over():
    yield
    raise ValueError("at the end")

def test_is_followed_by_an_error(falls_over):
    pass

@pytest.fixture
def hangs_at_the_end():
    yield
    time.sleep(600)

def test_is_followed_by_a_hang(hangs_at_the_end):
    pass
"""


@pytest.fixture
def guarded() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("guarded_pytest", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["guarded_pytest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["guarded_pytest"]


def run(guarded: ModuleType, folder: Path, text: str, *arguments: str, seconds: float = 300.0, patience: float = 10.0,
        stop: threading.Event | None = None) -> Any:
    (folder / "test_days.py").write_text(text)
    with (folder / "output").open("wb") as output:
        everything = [str(folder), "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
        return guarded.run_guarded(everything, time.monotonic() + seconds, output, patience, stop)


def test_every_test_has_its_turn_whatever_the_others_do(guarded: ModuleType, tmp_path: Path) -> None:
    outcomes = run(guarded, tmp_path, BAD_DAYS)
    by_test = {nodeid.rpartition("::")[2]: outcome for nodeid, outcome in outcomes.by_test.items()}
    assert by_test == {
        "test_first": "passed", "test_hangs": "failed", "test_after_one_that_hung": "passed", "test_ends_its_process": "failed",
        "test_breaks_the_device": "failed", "test_after_the_device_was_broken": "passed", "test_skips": "skipped",
        "test_is_followed_by_an_error": "failed", "test_is_followed_by_a_hang": "failed"}, (tmp_path / "output").read_text()
    assert [trouble.partition("::")[2].partition(";")[0] for trouble in outcomes.troubles] == [
        "test_hangs: no end within 10 s", "test_ends_its_process: its process ended with exit code 9",
        "test_is_followed_by_a_hang: no end within 10 s"]
    assert outcomes.exit_code() == 1
    assert "an illegal memory access" in (tmp_path / "output").read_text(), "what a test said before its process was ended"


def test_when_the_time_is_over_what_is_left_counts_as_failed(guarded: ModuleType, tmp_path: Path) -> None:
    outcomes = run(guarded, tmp_path, "def test_some():\n    pass", seconds=0.0)
    assert outcomes.exit_code() == 1
    assert "the time for all tests was over" in outcomes.troubles[0]


def test_a_process_that_breaks_down_behind_its_tests_is_a_failure(guarded: ModuleType, tmp_path: Path) -> None:
    outcomes = run(guarded, tmp_path, "import atexit, os\n\ndef test_some():\n    atexit.register(os._exit, 9)")
    assert outcomes.counts() == {"passed": 1, "failed": 1, "skipped": 0}
    assert outcomes.troubles == ["outside of tests: its process ended with exit code 9"]


def test_whoever_runs_it_in_a_thread_can_stop_it(guarded: ModuleType, tmp_path: Path) -> None:
    stop = threading.Event()
    outcomes: list[Any] = []
    hangs = f"import time, pathlib\n\ndef test_hangs():\n    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n    time.sleep(600)"
    thread = threading.Thread(target=lambda: outcomes.append(run(guarded, tmp_path, hangs, patience=600.0, stop=stop)))
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert outcomes[0].exit_code() == 1


def test_pytest_that_cannot_begin_is_a_failure_and_not_tried_again(guarded: ModuleType, tmp_path: Path) -> None:
    outcomes = run(guarded, tmp_path, "def test_some():\n    pass", "--no-such-option")
    assert outcomes.exit_code() == 1
    assert "exit code 4" in outcomes.troubles[0]


def test_a_file_that_cannot_be_imported_keeps_no_other_from_running(guarded: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_package")
    outcomes = run(guarded, tmp_path, "def test_some():\n    pass", "--continue-on-collection-errors")
    assert outcomes.counts() == {"passed": 1, "failed": 1, "skipped": 0}


def test_nothing_that_ran_is_not_nothing_that_failed(guarded: ModuleType, tmp_path: Path) -> None:
    assert run(guarded, tmp_path, "import pytest\npytest.skip('all of it', allow_module_level=True)").exit_code() == 5

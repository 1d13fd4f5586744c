"""Pytest in a process of its own, begun anew as often as it takes until every test has had its turn.

A test that waits for the driver for ever is beyond any time-out within its process, and after an error of the device CUDA answers every
call with that error until the process ends. So each costs the test it happened in and no other. What has begun and how it ended stands
in a journal, whose tests the next process leaves out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

PATIENCE = 120.0
"""Seconds for one test, and for whatever comes before the first. A kernel that is compiled in one takes a few of them."""

_PAUSE = 0.1
_LAST_WAIT = 10.0


class Journal:
    """Pytest plugin of the process that runs tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = set(_read(path))
        self._outcome = ""
        self._session: pytest.Session | None = None

    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self._session = session
        items[:] = [item for item in items if item.nodeid not in self._begun]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = ""
        self._write(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            self._outcome = "failed" if report.failed else self._outcome or report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, self._outcome)  # not before: what a test leaves behind is put away by then, which may hang as well
        if self._outcome == "failed" and _is_device_lost():
            self._write(nodeid, "lost")
            assert self._session is not None
            self._session.shouldstop = "the device is in error: what is left runs in a new process"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:  # a file that is skipped as a whole counts once
            self._write(report.nodeid, report.outcome)

    def _write(self, nodeid: str, what: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([nodeid, what]) + "\n")


def _is_device_lost() -> bool:
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _read(path: Path) -> dict[str, str]:
    """The last word on each test."""
    return dict(json.loads(line) for line in path.read_text().splitlines())


@dataclass
class Outcomes:
    """By test, "passed", "failed" or "skipped"; and what happened to processes, in words."""

    by_test: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def take(self, other: Outcomes) -> None:
        """Those of another run as well."""
        self.by_test |= other.by_test
        self.troubles += other.troubles

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {outcome: list(self.by_test.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}

    def exit_code(self) -> int:
        """0 fine, 1 something failed, 5 nothing ran."""
        counts = self.counts()
        return 1 if counts["failed"] else 0 if counts["passed"] else 5


def run_guarded(arguments: Sequence[str], deadline: float, output: IO[bytes] | None = None, patience: float = PATIENCE,
                stop: threading.Event | None = None) -> Outcomes:
    """Run pytest with these arguments.

    Args:
        arguments: of pytest.
        deadline: on the monotonic clock. Tests that have not ended by then are left out; that counts as a failure.
        output: where the processes write; to this process's own streams when None.
        patience: seconds that a test may take.
        stop: once it is set, the deadline has come.
    """
    outcomes = Outcomes()
    stop = stop or threading.Event()
    num_known = 0
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        journal.touch()
        while True:
            trouble = _run_once([sys.executable, __file__, str(journal), *arguments], journal, deadline, output, patience, stop)
            found = list(_read(journal).items())
            new = found[num_known:]
            num_known = len(found)
            outcomes.by_test |= {nodeid: what if what in ("passed", "skipped") else "failed" for nodeid, what in new}
            if trouble:
                begun = [nodeid for nodeid, what in new if what == "begun"]
                outcomes.troubles.append(f"{begun[0] if begun else 'outside of tests'}: {trouble}")
                if not begun:  # no test has failed with it
                    outcomes.by_test["pytest"] = "failed"
            is_cut_short = trouble or "lost" in dict(new).values()
            if not (new and is_cut_short) or stop.is_set() or time.monotonic() >= deadline:
                return outcomes


def _run_once(command: Sequence[str], journal: Path, deadline: float, output: IO[bytes] | None, patience: float,
              stop: threading.Event) -> str:
    """One process; what went wrong with it, or nothing."""
    process = subprocess.Popen(command, stdout=output, stderr=None if output is None else subprocess.STDOUT, start_new_session=True,
                               env=os.environ | {"PYTHONUNBUFFERED": "1"})  # what a process had said that is ended
    try:
        before = size = journal.stat().st_size
        since = time.monotonic()
        while process.poll() is None:
            now, grown = time.monotonic(), journal.stat().st_size
            if grown != size:
                size, since = grown, now
            if now >= deadline or stop.is_set():
                return "the time for all tests was over; what had not run was left out"
            if now - since >= (patience if size > before else PATIENCE):
                return f"no end within {now - since:.0f} s; its process was ended"
            time.sleep(_PAUSE)
    finally:
        put_away(process)
    understood = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.NO_TESTS_COLLECTED)
    return "" if process.returncode in understood else f"its process ended with exit code {process.returncode}"


def put_away(process: subprocess.Popen[bytes]) -> None:
    """End a process with a session of its own, and what it may have left behind in that."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that the driver holds on to stays for now
        process.wait(_LAST_WAIT)


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Journal(Path(sys.argv[1]))]))

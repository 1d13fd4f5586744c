"""Run the tests in ``tests/gpu``, then measure copies, attention, the write path and, where there is GPUDirect Storage, reads and writes
through it (in the folder that GPU_TEST_DIRECTORY names, or the current one); the last line is a JSON object in the form of every benchmark.

Needs pytest, torch and CuPy. Tests that need more are skipped where it is missing, and their reasons are shown and counted.

    make test-gpu ARGS="--minutes 9 ..."

ends after so many minutes (30); two thirds of them are for the tests. Other arguments are passed on to pytest. What is quick and tells
most comes first, whatever hangs or breaks the device costs itself alone, and the JSON object is printed after each part, with all that is
known by then. Exit codes: 0 fine; 1 a test failed or a figure did not hold; 2 no GPU, or used wrongly; 5 every test was skipped.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from guarded_pytest import Outcomes, put_away, run_guarded

SCRIPTS = Path(__file__).resolve().parent
GPU_TESTS = SCRIPTS.parent / "tests" / "gpu"

ALONE = ("copies", "transfers", "copy_paths", "sections", "tier_worker", "cache", "handover")
"""Files of tests that look at what the device and the host do at the same time."""

SIDE_BY_SIDE = (("kernels", "direct_rows"), ("kernels_write",), ("attention",))
"""Files of tests that have kernels compiled for most of their time."""

LAST = ("gds",)
"""Where cuFile's driver may keep everybody waiting."""

LONGEST_FIGURES = 240.0
"""Seconds for one benchmark."""


def run_tests(files: Sequence[str], arguments: Sequence[str], deadline: float, is_shown_late: bool = False,
              stop: threading.Event | None = None) -> Outcomes:
    """Those of some files, in this order."""
    paths = [str(GPU_TESTS / f"test_gpu_{name}.py") for name in files]
    everything = [*paths, "-m", "gpu", "-rs", "-p", "no:cacheprovider", "--continue-on-collection-errors", *arguments]
    if not is_shown_late:
        return run_guarded(everything, deadline)
    with tempfile.TemporaryFile() as output:
        outcomes = run_guarded(everything, deadline, output, stop=stop)
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
    return outcomes


def run_side_by_side(groups: Sequence[Sequence[str]], arguments: Sequence[str], deadline: float) -> Outcomes:
    """Those of groups of files, each in a process of its own."""
    outcomes = Outcomes()
    stop = threading.Event()
    with ThreadPoolExecutor(len(groups)) as threads:
        try:
            for found in threads.map(lambda files: run_tests(files, arguments, deadline, is_shown_late=True, stop=stop), groups):
                outcomes.take(found)
        except BaseException:  # Ctrl-C: it reaches none of the processes, which have their own sessions, and their threads are waited for
            stop.set()
            raise
    return outcomes


class Findings:
    """The JSON object, and whether all of it is as it should be."""

    def __init__(self) -> None:
        import torch

        import kvtier

        self.outcomes = Outcomes()
        self.has_figures = False
        self._config: dict[str, Any] = {"command": "copy", "torch": torch.__version__, "notes": [], "invalid": []}
        self._document: dict[str, Any] = {
            "kvtier": kvtier.__version__, "machine": {"python": platform.python_version(), "gpu": torch.cuda.get_device_name(0)},
            "config": self._config, "results": []}

    def measure(self, name: str, deadline: float) -> None:
        """Take in what a benchmark finds in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figures.json"
            seconds = max(min(LONGEST_FIGURES, deadline - time.monotonic()), 0.0)
            process = subprocess.Popen([sys.executable, str(SCRIPTS / "gpu_figures.py"), name, str(path)], start_new_session=True)
            try:
                code = process.wait(seconds)
                found = json.loads(path.read_text()) if path.exists() else {"error": f"its process ended with exit code {code}"}
            except subprocess.TimeoutExpired:
                found = {"error": f"no end within {seconds:.0f} s"}
            finally:
                put_away(process)
        report = found.get("report")
        if report is None:
            reason = f"{name}: not measured: {found.get('missing') or found['error']}"
            print(reason, file=sys.stderr)
            self._config["notes"].append(reason)
            if "error" in found:
                self._config["invalid"].append({"name": name, "reason": reason})
            return
        for key in ("notes", "invalid"):
            self._config[key] += report["config"].pop(key)
        if not self.has_figures:  # the settings of the others are in their notes
            self._config |= report["config"]
        # The drive's mount comes with the last; the driver's files, which tell reports the GPU's name, may be hidden in a container.
        gpu = self._document["machine"]["gpu"]
        self._document["machine"] |= report["machine"]
        if gpu not in self._document["machine"]["gpu"]:
            self._document["machine"]["gpu"] = gpu
        self._document["results"] += report["results"]
        self.has_figures = True

    def show(self) -> None:
        """What is known by now, as a line of JSON."""
        self._config["tests"] = self.outcomes.counts() | ({"troubles": self.outcomes.troubles} if self.outcomes.troubles else {})
        print(json.dumps(self._document), flush=True)

    def exit_code(self) -> int:
        """0, 1 or 5."""
        return self.outcomes.exit_code() or int(bool(self._config["invalid"]) or not self.has_figures)


def main(arguments: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("make test-gpu: torch sees no GPU; run it on a machine with one (nvidia-smi shows what the driver sees)",
              file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="make test-gpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    own, others = parser.parse_known_args(arguments)
    end = time.monotonic() + 60 * own.minutes
    end_of_tests = end - 60 * own.minutes / 3
    findings = Findings()
    findings.outcomes.take(run_tests(ALONE, others, end_of_tests))
    findings.show()
    findings.outcomes.take(run_side_by_side(SIDE_BY_SIDE, others, end_of_tests))
    findings.show()
    is_measured = not {"--collect-only", "--co"} & set(others)
    for name in ("copies", "attention", "writes") if is_measured else ():
        findings.measure(name, end)
        findings.show()
    findings.outcomes.take(run_tests(LAST, others, end))
    if is_measured:
        findings.measure("gds", end)
    for trouble in findings.outcomes.troubles:
        print(f"make test-gpu: {trouble}", file=sys.stderr)
    findings.show()
    return findings.exit_code()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nobody else would end the processes of tests
    sys.exit(main(sys.argv[1:]))

"""Kills a process that works on a store, and looks at what the next start finds (``kvtier bench integrity``).

A directory lives through many kills, one after the other: what each of them left is what the next process starts with.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from kvtier.bench.integrity_child import operations
from kvtier.bench.integrity_outcome import GEOMETRIES, NAMESPACE, Outcome, examine
from kvtier.errors import TransferError
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore

ANY_MOMENT: Final = "any-moment"
_PATIENCE: Final = 120.0


class CrashHistory:
    """One directory and what it must hold.

    Args:
        directory: of the store; made by the first process.
        seed: of everything that is left to chance.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._choice = random.Random(seed)
        self._stored: dict[Place, bytes] = {}
        self._quarantined: set[Place] = set()
        self._given_up: dict[Place, set[bytes]] = {}  # what may still lie there without a row

    def kill(self, point: str) -> Outcome:
        """Let a process work until it dies at ``point`` (``ANY_MOMENT``: after a random time), start the store again, examine it.

        Raises:
            TransferError: the process met wrong bytes, or ended otherwise than by being killed.
        """
        seed = self._choice.randrange(1 << 30)
        nth = self._choice.randint(2, 60)
        returned = self._run(seed, point, nth)
        verb, keys = self._follow(seed, returned)
        start = time.perf_counter()
        with NvmeStore.open(self._directory, NAMESPACE, GEOMETRIES, free_space_reserve=0) as store:
            seconds = time.perf_counter() - start
            must = {place: key for place, key in self._stored.items() if place not in keys}
            possible: dict[Place, set[bytes]] = {place: {key} if verb == "write" else set() for place, key in keys.items()}
            for place in keys.keys() & self._stored.keys():
                possible[place].add(self._stored[place])
            outcome, self._stored = examine(store, must, possible, self._given_up, seconds)
            self._quarantined = set(store.quarantined())
        for place, candidates in possible.items():
            self._given_up.setdefault(place, set()).update(candidates)
        for place in self._stored:
            self._given_up.pop(place, None)
        return outcome

    def _run(self, seed: int, point: str, nth: int) -> int:
        """How many operations had returned when the process died."""
        command = [sys.executable, "-m", "kvtier.bench.integrity_child", str(self._directory), str(seed), point, str(nth)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            end = threading.Timer(self._choice.random() * 0.3 if point == ANY_MOMENT else _PATIENCE, process.kill)
            try:
                first = process.stdout.readline()
                end.start()
                # Not communicate(): it does not see what readline has taken out of the pipe already.
                lines = process.stdout.read().split("\n")[:-1]  # the last one may be a part of a line
                errors = process.stderr.read()
                too_late = not end.is_alive() and point != ANY_MOMENT
            finally:  # also when this process is told to stop
                end.cancel()
                process.kill()
        if too_late:
            raise TransferError(f"the process did not come to {point} within {_PATIENCE:.0f} s: {_last_line(errors)}")
        if process.returncode != -signal.SIGKILL or first != "ready\n":
            raise TransferError(f"killed at {point}: the process ended with code {process.returncode}: {_last_line(errors)}")
        return int(lines[-1]) + 1 if lines else 0

    def _follow(self, seed: int, returned: int) -> tuple[str, dict[Place, bytes]]:
        """Take note of the operations that returned; gives the one that was under way."""
        sequence = operations(seed, [geometry.num_slots for geometry in GEOMETRIES])
        for verb, keys in itertools.islice(sequence, returned):
            for place, key in keys.items():
                if place in self._quarantined:
                    continue
                before = self._stored.pop(place, None)
                if verb == "write":
                    self._stored[place] = key
                    self._given_up.pop(place, None)
                elif before is not None:
                    self._given_up[place] = {before}
        return next(sequence)


def _last_line(text: str) -> str:
    """Of a traceback: the error itself."""
    return text.strip().rpartition("\n")[2]

"""A line for each stage of a long command, and again while one lasts, where no terminal could show a bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Final

EVERY: Final = 15.0
"""Seconds between two lines of one stage."""


def to_stderr(line: str) -> None:
    """A line that may be lost: nobody has to read it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


class SlowStages:
    """Says what a command is at. For a ``with`` statement: a thread of its own speaks, because a single step may last for minutes.

    Args:
        command: stands before each line.
        say: takes a line, from this thread or the other.
        seconds: between two lines of one stage.
    """

    def __init__(self, command: str, say: Callable[[str], None] = to_stderr, seconds: float = EVERY) -> None:
        self._command, self._say, self._seconds = command, say, seconds
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._speak, name="kvtier-stages", daemon=True)
        self._stage, self._done, self._total, self._began, self._ended = "", 0, 0, 0.0, False

    def begin(self, stage: str, total: int = 0) -> None:
        """The next stage, in words, and how many steps it has, if that is known."""
        with self._turn:
            self._stage, self._done, self._total, self._began = stage, 0, total, time.monotonic()
            self._say(f"{self._command}: {stage}")
            self._turn.notify()  # the other line of this stage is due from now on

    def advance(self) -> None:
        """One step is done."""
        with self._turn:
            self._done += 1

    def __enter__(self) -> SlowStages:
        self._thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify()
        self._thread.join()

    def _speak(self) -> None:
        with self._turn:
            while not self._ended:
                if not self._turn.wait(self._seconds) and self._stage and not self._ended:
                    steps = f", {self._done} of {self._total}" if self._total else ""
                    self._say(f"{self._command}: {self._stage}{steps}, {time.monotonic() - self._began:.0f} s so far")

"""Threads that work side by side until they have done enough."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ROUNDS = 4
PATIENCE = 30.0  # seconds


class Crew:
    """Threads that repeat their work, and the first error of any of them.

    They go on for some seconds, and on a slow machine for longer: until each has worked a few rounds and ``enough`` is true.
    """

    def __init__(self, seconds: float, enough: Callable[[], bool] = lambda: True) -> None:
        now = time.monotonic()
        self.end = now + seconds
        self.last_end = now + seconds + PATIENCE
        self.errors: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._enough = enough
        self._threads: list[threading.Thread] = []

    @property
    def goes_on(self) -> bool:
        now = time.monotonic()
        if self.errors or now > self.last_end:
            return False
        return now < self.end or min(self.rounds.values()) < ROUNDS or not self._enough()

    def stop(self) -> None:
        self.last_end = 0.0

    def add(self, name: str, work: Callable[[], object]) -> None:
        self.rounds[name] = 0

        def repeat() -> None:
            try:
                while self.goes_on:
                    work()
                    self.rounds[name] += 1
            except BaseException as error:
                self.errors.append(error)
        self._threads.append(threading.Thread(target=repeat, name=name, daemon=True))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(PATIENCE + 10)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.errors:
            raise self.errors[0]

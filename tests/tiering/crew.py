"""Threads that work side by side until time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Crew:
    """Threads that repeat their work until time is up, and the first error of any of them."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.errors: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end and not self.errors

    def add(self, name: str, work: Callable[[], object]) -> None:
        def repeat() -> None:
            try:
                while self.goes_on:
                    work()
                    self.rounds[name] = self.rounds.get(name, 0) + 1
            except BaseException as error:
                self.errors.append(error)
        self._threads.append(threading.Thread(target=repeat, name=name, daemon=True))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(40)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.errors:
            raise self.errors[0]

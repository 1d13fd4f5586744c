"""``Incident``: one warning for a row of like failures, so that a failing drive does not write the log full."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

AGAIN_SECONDS: Final = 600.0


class Incident:
    """The first of its kind is a warning. What follows within ten minutes is INFO, and counted for the next warning. Thread-safe.

    Args:
        log: where it is said.
        clock: seconds that only go forward.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._said: float | None = None
        self._held_back = 0

    def warn(self, message: str, *arguments: object) -> None:
        """It happened again: ``message`` with its ``arguments``, as for a logger."""
        with self._lock:
            now = self._clock()
            if self._said is not None and now - self._said < AGAIN_SECONDS:
                self._held_back += 1
                level, more = logging.INFO, ""
            else:
                more = f" (and {self._held_back} more since the last warning)" if self._held_back else ""
                self._said, self._held_back = now, 0
                level = logging.WARNING
        self._log.log(level, message + more, *arguments)

"""``WritePause``: after a failed write the store takes no more for a while (design: ENOSPC, EDQUOT or EIO stops stores for a while)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

FIRST_SECONDS: Final = 30.0
LONGEST_SECONDS: Final = 600.0

_log = logging.getLogger(__name__)


class WritePause:
    """Pauses of 30 s that double up to 10 minutes while writes keep failing. One warning per incident. Thread-safe.

    Args:
        name: what is paused, for the log.
        clock: seconds; wall or monotonic.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = 0.0  # length of the current or last pause; 0.0 outside an incident
        self._start = 0.0
        self._pauses = 0

    @property
    def allows_writes(self) -> bool:
        """False during a pause. The first write after it decides whether the incident is over."""
        return self.remaining() == 0.0

    def remaining(self) -> float:
        """Seconds until writes are tried again."""
        with self._lock:
            passed = self._clock() - self._start
            # A clock that was set back must not stretch the pause.
            return self._seconds - passed if 0.0 <= passed < self._seconds else 0.0

    @property
    def pauses(self) -> int:
        """How many pauses there have been."""
        with self._lock:
            return self._pauses

    def failed(self, reason: str) -> None:
        """A write failed: begin a pause, or the next longer one."""
        with self._lock:
            first = self._seconds == 0.0
            self._seconds = FIRST_SECONDS if first else min(self._seconds * 2, LONGEST_SECONDS)
            self._start = self._clock()
            self._pauses += 1
            seconds = self._seconds
        _log.log(logging.WARNING if first else logging.DEBUG,
                 "%s: no new blocks are stored for %.0f s, then it is tried again; reads go on. %s", self._name, seconds, reason)

    def succeeded(self) -> None:
        """A write reached the drive: the incident, if there was one, is over."""
        with self._lock:
            if self._seconds == 0.0:
                return
            self._seconds = 0.0
        _log.warning("%s: storing blocks again", self._name)

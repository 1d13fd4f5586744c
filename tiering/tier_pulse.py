"""``TierPulse``: calls ``TierIndex.poll`` for engines that have no step of their own, or whose steps stop when nothing is asked of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

BUSY_SECONDS: Final = 0.02
IDLE_SECONDS: Final = 0.25


class TierPulse:
    """A thread that calls ``beat`` again and again until it is closed.

    Args:
        beat: does what is to be done and returns whether more is under way: then it is called every BUSY_SECONDS, else every IDLE_SECONDS.
        name: of the thread.
    """

    def __init__(self, beat: Callable[[], bool], name: str) -> None:
        self._beat = beat
        self._wanted = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # cut short, it may have been started
            self._closing = True
            raise

    def hurry(self) -> None:
        """Something has begun: beat now."""
        self._wanted.set()

    def close(self, timeout: float) -> bool:
        """End the thread; False when it did not end within ``timeout`` seconds. May be called again."""
        self._closing = True
        self._wanted.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_busy = said = False
        while True:
            self._wanted.wait(BUSY_SECONDS if is_busy else IDLE_SECONDS)
            self._wanted.clear()
            if self._closing:
                return
            try:
                is_busy = self._beat()
            except Exception as error:  # the next beat may go well; without one nothing would be written to NVMe any more
                is_busy = False
                if not said and not self._closing:
                    said = True
                    _log.warning("%s: %s: %s", self._thread.name, type(error).__name__, error)

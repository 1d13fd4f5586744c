"""The bounded queue between the ledger's events and whoever polls them (design: events)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from kvtier.tiering.ledger.events import Event

logger = logging.getLogger(__name__)


class EventQueue:
    """Holds the newest ``max_size`` events. Ids of dropped ones are gone, so that a subscriber sees the gap."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._events: deque[Event] = deque()
        self._arrived = threading.Condition()
        self._closed = False
        self._next_id = 0
        self.dropped = 0

    def put(self, batch: list[Event]) -> None:
        """Add a batch. Over the limit the oldest queued events go first."""
        if not batch or not self._max_size:
            return
        with self._arrived:
            lost = batch[0].event_id - self._next_id  # the ledger keeps no more than we do between two batches
            self._next_id = batch[-1].event_id + 1
            self._events.extend(batch)
            while len(self._events) > self._max_size:
                self._events.popleft()
                lost += 1
            if lost:
                if self.dropped == 0:
                    logger.warning("events: more than %d waited to be polled, the oldest are dropped from now on; poll more often or "
                                   "raise event_buffer_max_size", self._max_size)
                self.dropped += lost
            self._arrived.notify_all()

    def take(self, timeout: float) -> list[Event]:
        """All queued events; waits up to ``timeout`` seconds for the first. Empty when none came or events are off."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while not self._events and not self._closed and self._max_size:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._arrived.wait(left)
            taken = list(self._events)
            self._events.clear()
            return taken

    def close(self) -> None:
        """Wake everybody who waits."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

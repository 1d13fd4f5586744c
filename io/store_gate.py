"""``StoreGate``: who is inside a store's files, so that closing can wait for them; and what they count (part of ``NvmeStore``).

Every read of a block passes here, so each passage is one short turn of a plain lock. An exception can land between that turn and the
``with`` statement around it; so who is inside is known by his frame, and whose function runs no longer is not waited for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType

from kvtier.errors import TransferError
from kvtier.io.manifest_rows import Place
from kvtier.io.running import runs
from kvtier.io.store_messages import COUNTERS


class StoreClosed(TransferError):
    """The store has been closed."""


class StoreGate:
    """``with gate:`` around everything that uses files. Thread-safe; one thread may be inside more than once.

    Args:
        name: of the store, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._inside: list[FrameType] = []
        self._is_closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._hits: dict[Place, int] = {}

    def __enter__(self) -> None:
        """Raises StoreClosed once it has been closed."""
        frame = sys._getframe(1)
        with self._lock:
            if self._is_closed:
                raise StoreClosed(f"the store in {self._name} is closed")
            self._inside.append(frame)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._inside.remove(sys._getframe(1))
            if self._is_closed:  # only then does anybody wait
                self._left.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def close(self, timeout: float) -> bool:
        """Let nobody in any more; False when somebody is still inside after ``timeout`` seconds. May be called again."""
        with self._lock:
            self._is_closed = True
            return self._left.wait_for(self._nobody_is_inside, timeout)

    def _nobody_is_inside(self) -> bool:
        self._inside = [frame for frame in self._inside if runs(frame)]
        return not self._inside

    # -- what is counted ---------------------------------------------------------------------------------------------------------

    def count(self, **amounts: int) -> None:
        """Add to counters, by the names of ``COUNTERS``."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def served(self, place: Place, num_bytes: int, is_direct: bool) -> None:
        """A block has been read and verified."""
        with self._lock:
            counts = self._counts
            counts["read_blocks"] += 1
            counts["read_bytes"] += num_bytes
            counts["gds_read_blocks"] += is_direct
            self._hits[place] = self._hits.get(place, 0) + 1

    def counts(self) -> dict[str, int]:
        """All counters now."""
        with self._lock:
            return dict(self._counts)

    def hits(self) -> dict[Place, int]:
        """How often blocks were served since hits were last taken."""
        with self._lock:
            return dict(self._hits)

    def take_hits(self) -> dict[Place, int]:
        """The same, and begin anew."""
        with self._lock:
            hits, self._hits = self._hits, {}
            return hits

    def forget_hits(self, places: Iterable[Place]) -> None:
        """Of blocks that are given up."""
        with self._lock:
            for place in places:
                self._hits.pop(place, None)

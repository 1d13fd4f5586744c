"""``Quarantine``: slots out of service, at once in memory and in the manifest as soon as a commit succeeds (design: NVMe rules)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import Place, QuarantineRow


class Quarantine:
    """The slots out of service of one store. Thread-safe.

    Args:
        manifest: where they are kept over restarts.
        clock: wall-clock seconds.
    """

    def __init__(self, manifest: Manifest, clock: Callable[[], float]) -> None:
        self._manifest = manifest
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved: dict[Place, QuarantineRow] = {}

    def add(self, place: Place, reason: str) -> bool:
        """Take a slot out of service; False when no block is stored there, or it is out already. Never waits for the disk."""
        row = self._manifest.row(*place)
        with self._lock:
            if row is None or place in self._unsaved:
                return False
            self._unsaved[place] = QuarantineRow(*place, row.key, reason, self._clock())
            return True

    def __contains__(self, place: Place) -> bool:
        return place in self._unsaved or place in self._manifest.out_of_service

    def places(self) -> set[Place]:
        """All of them."""
        with self._lock:
            unsaved = set(self._unsaved)
        return unsaved | self._manifest.quarantined().keys()

    def save(self) -> None:
        """Move the rows of those that are not in the manifest yet.

        Raises:
            TransferError: it cannot be committed; they stay out of service all the same.
        """
        with self._lock:
            unsaved = dict(self._unsaved)
        if unsaved:
            self._manifest.quarantine(list(unsaved.values()))
            with self._lock:
                for place in unsaved:
                    self._unsaved.pop(place, None)

    def counts(self) -> tuple[int, int]:
        """How many blocks are stored, without those out of service, and how many slots these are."""
        with self._lock:
            unsaved = list(self._unsaved)
        rows, quarantined = self._manifest.counts()
        still_rows = sum(self._manifest.row(*place) is not None for place in unsaved)
        return rows - still_rows, quarantined + len(unsaved)

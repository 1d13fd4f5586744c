"""``Scrubber``: reads every block of a store within a bandwidth budget and quarantines what fails (design: NVMe rules).

It goes on where it was: the place is kept in the store's directory, so that a pass over a large store may take many runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.io.direct_file import aligned_buffer
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_directory import write_atomically
from kvtier.pools.nvme_geometry import NvmeGeometry

POSITION_NAME: Final = "scrub.json"

_SAVE_SECONDS: Final = 10.0
_LONGEST_SLEEP: Final = 0.2  # so that a stop is obeyed soon
_LOOK_AGAIN: Final = 0.02  # whether it is idle now
_EMPTY_SLOTS: Final = 4096  # looked at before asking whether to stop


@dataclass(frozen=True)
class Scrubbed:
    """What one run did.

    Attributes:
        verified, num_bytes: blocks read and their bytes.
        bad: slots quarantined, with why.
        next_place: where the next run goes on; ``None`` when the pass came to its end.
    """

    verified: int
    num_bytes: int
    bad: tuple[tuple[Place, str], ...]
    next_place: Place | None


def saved_place(directory: Path) -> Place:
    """Where the next run begins: behind the last block that was verified; (0, 0) for a new pass."""
    try:
        group, slot = json.loads((directory / POSITION_NAME).read_text(encoding="utf-8"))["next"]
        return int(group), int(slot)
    except (OSError, ValueError, TypeError, KeyError):  # none, or not ours: verifying blocks once more does no harm
        return 0, 0


class Scrubber:
    """One store's scrubbing.

    Args:
        store: open; calls of others may go on meanwhile.
        bytes_per_second: budget; ``None`` for none.
        is_idle: no block is begun while this says no.
        condemn: called with place, key and reason of a bad block; ``None``: its slot is quarantined.
        clock: seconds.
        sleep: waits for some seconds.
    """

    def __init__(self, store: NvmeStore, bytes_per_second: float | None, *, is_idle: Callable[[], bool] = lambda: True,
                 condemn: Callable[[Place, bytes, str], None] | None = None, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], object] = time.sleep) -> None:
        self._store = store
        self._budget = bytes_per_second
        self._is_idle = is_idle
        self._condemn = condemn if condemn is not None else self._quarantine
        self._clock = clock
        self._sleep = sleep
        self._next_start = 0.0

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Scrubbed:
        """Verify the blocks from where the last run stopped to the end of the store, or until ``should_stop``.

        Raises:
            TransferError: the store was closed.
            OSError: the place could not be written down.
        """
        geometries = self._store.geometries
        out = aligned_buffer(max((geometry.payload_bytes for geometry in geometries), default=0))
        saved = self._next_start = self._clock()
        bad: list[tuple[Place, str]] = []
        num_bytes = done = 0
        at: Place | None = None
        try:
            # Slot by slot: sorting the rows of a large store would keep every other thread waiting, and new blocks would be left out.
            for at in _places(geometries, saved_place(self._store.directory)):
                group, slot = at
                key = self._store.stored_key(group, slot)
                if key is None and slot % _EMPTY_SLOTS:
                    continue
                if not self._wait(geometries[group].stride if key is not None else 0, should_stop):
                    break
                if key is None:
                    continue
                reason = self._store.why_bad(group, slot, key, out[:geometries[group].payload_bytes])
                if reason is not None:
                    self._condemn(at, key, reason)
                    bad.append((at, reason))
                done += 1
                num_bytes += geometries[group].stride
                if self._clock() - saved >= _SAVE_SECONDS:
                    self._save(at)
                    saved = self._clock()
            else:
                at = None
        finally:
            self._save(at)
        return Scrubbed(done, num_bytes, tuple(bad), at)

    def _wait(self, num_bytes: int, should_stop: Callable[[], bool]) -> bool:
        """Until a block of this size may be read; False when it is time to stop. What was not used earlier is not made up for."""
        while not should_stop():
            now = self._clock()
            early = self._next_start - now
            if early <= 0.0 and self._is_idle():
                self._next_start = now if self._budget is None else now + num_bytes / self._budget
                return True
            self._sleep(min(early, _LONGEST_SLEEP) if early > 0.0 else _LOOK_AGAIN)
        return False

    def _quarantine(self, place: Place, key: bytes, reason: str) -> None:
        self._store.quarantine(*place, reason)

    def _save(self, place: Place | None) -> None:
        write_atomically(self._store.directory / POSITION_NAME, json.dumps({"next": list(place or (0, 0)), "at": time.time()}) + "\n")


def _places(geometries: Sequence[NvmeGeometry], start: Place) -> Iterator[Place]:
    """All slots from ``start`` on, in order."""
    for group, geometry in enumerate(geometries):
        if group >= start[0]:
            for slot in range(start[1] if group == start[0] else 0, geometry.num_slots):
                yield group, slot

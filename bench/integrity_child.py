"""The process that is killed: works on a store, under load, until it dies at a labelled point of the write path.

    python -m kvtier.bench.integrity_child DIRECTORY SEED POINT NTH

Prints "ready", then the number of each operation that has returned, so that the parent knows what must be there. Two threads
read all the while and compare. The points are where SQLite and the kernel are called, so they stand whatever lies above.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtier.io.manifest_rows import Place

POINTS: Final = (
    "before-deletion", "in-deletion-commit", "in-deletion-log", "after-deletion",
    "before-block", "in-block", "after-block",
    "before-rows", "in-rows-commit", "in-rows-log", "after-rows")
"""Where the child kills itself. "log": between the writes that bring one transaction into the manifest's log."""

_WRONG_BYTES: Final = 3
_READERS: Final = 2
_COMMITS_PER_LOG: Final = 8
_PAGE: Final = 4096

Operation = tuple[str, dict[Place, bytes]]


def operations(seed: int, num_slots: Sequence[int]) -> Iterator[Operation]:
    """An endless mix of writes and discards: ("write" | "discard", key by place)."""
    choice = random.Random(seed)
    for number in itertools.count():
        group = choice.randrange(len(num_slots))
        slots = choice.sample(range(num_slots[group]), choice.randint(1, 8))
        verb = "discard" if choice.random() < 0.15 else "write"
        yield verb, {(group, slot): hashlib.sha256(f"{seed} {number} {slot}".encode()).digest() for slot in slots}


class Executioner:
    """Kills this process at the nth time that it passes its point."""

    def __init__(self, point: str, nth: int, seed: int) -> None:
        self.choice = random.Random(f"{seed} {point}")
        self._point = point
        self._passes = itertools.count(1)
        self._nth = nth

    def passes(self, point: str, last_act: Callable[[], None] | None = None) -> None:
        """The process is at ``point``; ``last_act`` is what it still does where it dies there."""
        if point == self._point and next(self._passes) == self._nth:
            if last_act is not None:
                last_act()
            os.kill(os.getpid(), signal.SIGKILL)

    def is_at(self, point: str) -> bool:
        return point == self._point


class WatchedConnection(sqlite3.Connection):
    """SQLite with the points of the manifest's two kinds of commit. Folds its log in often, so that it is written over again."""

    executioner: Executioner
    _kind = ""
    _commits = 0

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        if not self._kind:
            self._kind = "deletion" if sql.startswith("DELETE FROM blocks") else "rows"
            self.executioner.passes(f"before-{self._kind}")
        return super().executemany(sql, parameters)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA synchronous"):
            super().execute("PRAGMA wal_autocheckpoint = 0").fetchall()  # not within a commit that is to be torn afterwards
        if sql != "COMMIT" or not self._kind:
            return super().execute(sql, parameters)
        kind, self._kind = self._kind, ""
        self.executioner.passes(f"in-{kind}-commit")
        in_log = f"in-{kind}-log"
        before = self._log().read_bytes() if self.executioner.is_at(in_log) else b""
        cursor = super().execute(sql, parameters)
        self.executioner.passes(in_log, lambda: self._tear_log(before))
        self.executioner.passes(f"after-{kind}")
        self._commits += 1
        if self._commits % _COMMITS_PER_LOG == 0:
            super().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return cursor

    def _log(self) -> Path:
        _, _, path = super().execute("PRAGMA database_list").fetchone()
        return Path(os.fsdecode(path) + "-wal")

    def _tear_log(self, before: bytes) -> None:
        """Undo a commit's last writes into the log, as if the process had been killed between two of them."""
        after = self._log().read_bytes()
        anew = before[:32] != after[:32]  # the log was begun again from its start
        writes = [(0, 32)] if anew else []
        for start in range(32, len(after), 24 + _PAGE):
            writes += [(start, start + 24), (start + 24, start + 24 + _PAGE)]  # as SQLite does it: header, page
        changed = [number for number, (start, end) in enumerate(writes) if before[start:end] != after[start:end]]
        # A page written again with the same bytes is no difference: from the first change on, everything was written.
        done = writes[:self.executioner.choice.randint(changed[0], changed[-1])]
        torn = bytearray(before)
        for start, end in done:
            torn[start:end] = after[start:end]
        self._log().write_bytes(torn)


def _watch(executioner: Executioner) -> None:
    """Put the points into the calls of SQLite and of the kernel."""
    WatchedConnection.executioner = executioner
    sqlite3.connect = partial(sqlite3.connect, factory=WatchedConnection)  # type: ignore[assignment]
    real = os.pwritev

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        def write_a_part() -> None:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            pages = executioner.choice.randrange(1, len(whole) // _PAGE)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(whole[:pages * _PAGE])

        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".slab"):
            return real(descriptor, buffers, offset, *flags)
        executioner.passes("before-block")
        executioner.passes("in-block", write_a_part)
        written = real(descriptor, buffers, offset, *flags)
        executioner.passes("after-block")
        return written

    os.pwritev = pwritev  # type: ignore[assignment]


def main(directory: str, seed: int, point: str, nth: int) -> None:
    """Work until the end comes."""
    _watch(Executioner(point, nth, seed))
    import numpy as np

    from kvtier.bench.integrity_outcome import GEOMETRIES, NAMESPACE, block, content
    from kvtier.io.nvme_store import NvmeStore

    store = NvmeStore.open(directory, NAMESPACE, GEOMETRIES, free_space_reserve=0)
    held = {(stored.group, stored.slot): stored.key for stored in store.stored_blocks()}
    locks = {(group, slot): threading.Lock() for group, geometry in enumerate(GEOMETRIES) for slot in range(geometry.num_slots)}

    def read_and_compare(number: int) -> None:
        choice = random.Random(f"{seed} reader {number}")
        outs = [np.empty(geometry.block_bytes, np.uint8) for geometry in GEOMETRIES]
        while True:
            place = choice.choice(list(locks))
            with locks[place]:  # nobody reads a slot that is being written
                key = held.get(place)
                if key is not None:
                    try:
                        store.read_block(*place, key, outs[place[0]])
                        sound = np.array_equal(outs[place[0]], content(key, place[0]))
                    except Exception as error:
                        print(error, file=sys.stderr)
                        sound = False
                    if not sound:
                        os._exit(_WRONG_BYTES)

    for number in range(_READERS):
        threading.Thread(target=read_and_compare, args=(number,), daemon=True).start()
    print("ready", flush=True)
    for number, (verb, keys) in enumerate(operations(seed, [geometry.num_slots for geometry in GEOMETRIES])):
        for place in sorted(keys):
            locks[place].acquire()
            held.pop(place, None)
        if verb == "write":
            # A block torn by an earlier kill comes back when the manifest is rebuilt, fails its check, and its slot is out of service.
            wanted = {place: key for place, key in keys.items() if not store.is_quarantined(*place)}
            errors = [error for error in store.write_blocks([block(place, key) for place, key in wanted.items()]) if error is not None]
            assert not errors, errors
            held.update(wanted)
        else:
            [group] = {group for group, _ in keys}
            store.discard(group, [slot for _, slot in keys])
        print(number, flush=True)
        for place in keys:
            locks[place].release()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""Run as a program by test_nvme_crash: works on a store until it kills itself at a labelled point of the write path.

    crash_child.py DIRECTORY SEED POINT NTH

Prints the number of each operation that has returned, so that the parent knows what must be there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator

import numpy as np

NAMESPACE = '{"model": "crash@1"}'
BLOCK_BYTES, NUM_SLOTS = 8192, 12
POINTS = ("before-delete-commit", "after-delete-commit", "between-blocks", "before-row-commit", "in-row-commit", "after-row-commit")

Operation = tuple[str, list[tuple[int, bytes]]]


def operations(seed: int) -> Iterator[Operation]:
    """An endless mix of writes and discards: ("write" | "discard", [(slot, key), ...])."""
    choice = random.Random(seed)
    for number in itertools.count():
        slots = choice.sample(range(NUM_SLOTS), choice.randint(1, 5))
        verb = "discard" if choice.random() < 0.15 else "write"
        yield verb, [(slot, hashlib.sha256(f"{seed} {number} {slot}".encode()).digest()) for slot in slots]


def content(key: bytes) -> np.ndarray:
    """The one block that has this key."""
    return np.frombuffer(random.Random(key).randbytes(BLOCK_BYTES), np.uint8)


def main(directory: str, seed: int, point: str, nth: int) -> None:
    from kvtier.io.manifest import Manifest
    from kvtier.io.nvme_store import BlockWrite, NvmeStore
    from kvtier.io.slab import SlabFile
    from kvtier.pools.nvme_geometry import NvmeGeometry

    calls = itertools.count(1)

    def die_at_nth() -> None:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: type, name: str, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments: object) -> object:
            if before is not None:
                before()
            result = real(*arguments)
            if after is not None:
                after()
            return result

        setattr(owner, name, wrapped)

    store = NvmeStore.open(directory, NAMESPACE, [NvmeGeometry(BLOCK_BYTES, NUM_SLOTS)], free_space_reserve=0)
    if point == "before-delete-commit":
        around(Manifest, "delete", die_at_nth, None)
    elif point == "after-delete-commit":
        around(Manifest, "delete", None, die_at_nth)
    elif point == "between-blocks":
        around(SlabFile, "write", None, die_at_nth)
    elif point == "before-row-commit":
        around(Manifest, "put", die_at_nth, None)
    elif point == "in-row-commit":
        store._manifest._connection.set_trace_callback(lambda statement: die_at_nth() if statement == "COMMIT" else None)
    elif point == "after-row-commit":
        around(Manifest, "put", None, die_at_nth)
    for number, (verb, blocks) in enumerate(operations(seed)):
        if verb == "write":
            errors = store.write_blocks([BlockWrite(0, slot, key, content(key), 35, 0.0) for slot, key in blocks])
            assert errors == [None] * len(blocks)
        else:
            store.discard(0, [slot for slot, _ in blocks])
        print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""A process killed at any point of the write path loses entries at most, never correctness, and nothing that had been committed."""

from __future__ import annotations

import itertools
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.nvme_store import BlockWrite, NvmeStore
from kvtier.pools.nvme_geometry import NvmeGeometry

CHILD = Path(__file__).with_name("crash_child.py")
LAST_KEY = bytes(32)
child = runpy.run_path(str(CHILD))


def run_child(directory: Path, seed: int, point: str, nth: int, seconds: float | None = None) -> int:
    """Let the child work until it dies; returns how many operations had returned."""
    process = subprocess.Popen([sys.executable, str(CHILD), str(directory), str(seed), point, str(nth)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    if seconds is not None:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun to work
        time.sleep(seconds)
        process.kill()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors.decode()
    lines = output.split()
    return int(lines[-1]) + 1 if lines else 0


def check(directory: Path, seed: int, returned: int, expected: dict[int, bytes], discarded: dict[int, bytes]) -> dict[int, bytes]:
    """Open the store, compare it with what must be there, and return what is there.

    ``discarded``: blocks that were given up and whose bytes are still in their slots; kept up to date. A manifest that had to
    be rebuilt cannot know that they were, and may serve them again.
    """
    sequence = list(itertools.islice(child["operations"](seed), returned + 1))
    for verb, blocks in sequence[:returned]:
        for slot, key in blocks:
            given_up = expected.pop(slot, None)
            if verb == "write":
                expected[slot] = key
                discarded.pop(slot, None)
            elif given_up is not None:
                discarded[slot] = given_up
    verb, blocks = sequence[returned]  # was under way: each of its slots holds the old block, none, or the new one
    under_way = dict(blocks)
    with NvmeStore.open(directory, child["NAMESPACE"], [NvmeGeometry(child["BLOCK_BYTES"], child["NUM_SLOTS"])],
                        free_space_reserve=0) as store:
        stored = {block.slot: block.key for block in store.stored_blocks()}
        assert store.quarantined() == []
        assert store.stats().dropped_rows == 0
        rebuilt = store.stats().recovered_rows > 0
        out = np.empty(child["BLOCK_BYTES"], np.uint8)
        for slot, key in stored.items():
            store.read_block(0, slot, key, out)
            assert np.array_equal(out, child["content"](key)), f"slot {slot} serves wrong bytes"
        for slot in range(child["NUM_SLOTS"]):
            allowed = {expected.get(slot)}
            if slot in under_way:
                allowed |= {None, under_way[slot]} if verb == "write" else {None}
            if rebuilt and None in allowed:
                allowed.add(discarded.get(slot))
            assert stored.get(slot) in allowed, f"slot {slot}: something committed was lost, or is back without a rebuild"
        for slot in under_way:
            discarded.pop(slot, None)
            if slot not in stored and expected.get(slot) is not None:
                discarded[slot] = expected[slot]
        assert store.write_blocks([BlockWrite(0, 0, LAST_KEY, child["content"](LAST_KEY), 35, 0.0)]) == [None]
        store.discard(0, [0])
    stored.pop(0, None)
    discarded[0] = LAST_KEY
    return stored


@pytest.mark.parametrize("point", child["POINTS"])
def test_a_process_killed_at_this_point_of_the_write_path_serves_only_right_bytes_afterwards(tmp_path: Path, point: str) -> None:
    choice = random.Random(point)
    left: dict[int, bytes] = {}
    discarded: dict[int, bytes] = {}
    for seed in range(3):
        returned = run_child(tmp_path / "store", seed, point, choice.randint(3, 40))
        left = check(tmp_path / "store", seed, returned, left, discarded)


def test_a_process_killed_at_any_moment_serves_only_right_bytes_afterwards(tmp_path: Path) -> None:
    left: dict[int, bytes] = {}
    discarded: dict[int, bytes] = {}
    for seed in range(100, 104):
        returned = run_child(tmp_path / "store", seed, "nowhere", 0, seconds=0.05 + seed % 4 * 0.02)
        left = check(tmp_path / "store", seed, returned, left, discarded)

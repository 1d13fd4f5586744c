"""How long a manager takes to start over a full NVMe level, and whether its first request waits for that (design: warm start).

The rows are written into the manifest without their blocks: a start reads no block. Before each start the manifest is put out
of the page cache. The collector runs as it does in an engine, for thousands of new objects are part of the cost.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.bench.measure import Alternative, Interleaved, interleave
from kvtier.bench.removal import remove_folder
from kvtier.bench.report import Limit, ResultRow
from kvtier.errors import TransferError
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import ManifestRow
from kvtier.io.store_view import geometries_of, identity_of
from kvtier.pools.layout import KVLayout
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager

NUM_BLOCKS: Final = 100_000
SECONDS_PER_BLOCK: Final = 0.5 / 100_000
"""What a start may take."""

_FULL: Final = "full"
_EMPTY: Final = "empty"
_PATIENCE: Final = 60.0
_LAYOUT: Final = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)
"""Small blocks: a slot is two pages. A start does not depend on their size."""


def warm_start_rows(directory: Path, *, num_blocks: int = NUM_BLOCKS, rounds: int = 7) -> list[ResultRow]:
    """Two rows for ``kvtier bench nvme``, in seconds; the ratios say how much faster than the limit.

    ``nvme/warm_start/100k``: making the manager over a directory that holds so many blocks, against half a second per
    100,000. ``nvme/warm_start/100k/first_request``: its first request, against the same with an empty directory.

    Args:
        directory: a folder to work in, on the drive that is measured; what is made in it is removed. 8 KiB per block, twice.
        num_blocks: a multiple of 1000.
        rounds: recorded ones.

    Raises:
        ConfigError: too little room, or the folder cannot be used.
        TransferError: a start did not find the blocks.
    """
    name = f"nvme/warm_start/{num_blocks // 1000}k"
    starts, requests = measure_warm_start(directory, num_blocks, rounds)
    start, request, empty = starts.seconds(_FULL), requests.seconds(_FULL), requests.seconds(_EMPTY)
    limit = num_blocks * SECONDS_PER_BLOCK
    return [ResultRow(name, "s", start.median, start.low, start.high, Limit("0.5 s per 100,000 blocks", limit), limit / start.median),
            ResultRow(f"{name}/first_request", "s", request.median, request.low, request.high,
                      Limit("the first request over an empty directory", empty.median), requests.speed_ratio(_FULL, _EMPTY))]


def measure_warm_start(directory: Path, num_blocks: int, rounds: int) -> tuple[Interleaved, Interleaved]:
    """Seconds of the start and of the first request, over a full and over an empty directory in turns. Raises as above."""
    places = {name: _Place(directory / f"warm-start-{name}", num_blocks) for name in (_FULL, _EMPTY)}
    try:
        for place in places.values():
            place.start()
            place.end()
        places[_FULL].fill()
        starts = interleave([Alternative(name, place.start, place.forget, place.end) for name, place in places.items()], rounds)
        requests = interleave([Alternative(name, place.first_request, place.start, place.end) for name, place in places.items()], rounds)
    finally:
        for place in places.values():
            place.remove()
    return starts, requests


class _Place:
    """One directory, and a manager over it for one measurement at a time."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        self._path = path
        self._num_blocks = num_blocks
        self._expected = 0
        self._manager: KVCacheManager | None = None

    def fill(self) -> None:
        """Write the rows; their blocks are never read."""
        identity = identity_of(self._path)
        [geometry] = geometries_of(identity)
        manifest = Manifest(self._path / "manifest.sqlite", identity.namespace_digest)
        damage = manifest.load().damage
        if damage:
            raise TransferError(f"{self._path}: {damage[0]}")
        keys = (hashlib.sha256(b"%d" % slot).digest() for slot in range(self._num_blocks))
        manifest.put(ManifestRow(0, slot, key, geometry.block_bytes, bytes(16), 35, 0.0, 0) for slot, key in enumerate(keys))
        manifest.close(_PATIENCE)
        self._expected = self._num_blocks

    def forget(self) -> None:
        """Put the manifest out of the page cache."""
        descriptor = os.open(self._path / "manifest.sqlite", os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def start(self) -> None:
        config = TierConfig(primary="64 blocks", secondary="64 blocks", nvme=f"{self._num_blocks} blocks", max_batch_size=4,
                            max_seq_len=256, nvme_directory=self._path, nvme_free_space_reserve="0B")
        with _collector_running():
            self._manager = KVCacheManager(_LAYOUT, config, device="cpu", model="kvtier bench warm start")

    def first_request(self) -> float:
        """Seconds until a request of 40 blocks, none of them stored, has been admitted and is ready."""
        assert self._manager is not None
        with _collector_running():
            start = time.perf_counter()
            self._manager.add_sequence(Request(id=1, tokens=list(range(160))))
            self._manager.wait_ready(1, timeout=_PATIENCE)
            return time.perf_counter() - start

    def end(self) -> None:
        """Close the manager, and make sure that it had found everything."""
        assert self._manager is not None
        found = self._manager.stats().nvme.evictable_blocks
        self._manager.close(timeout=_PATIENCE)
        self._manager = None
        if found != self._expected:
            raise TransferError(f"{self._path}: the start found {found} of {self._expected} blocks")

    def remove(self) -> None:
        if self._manager is not None:
            self._manager.close(timeout=_PATIENCE)
        remove_folder(self._path)


@contextlib.contextmanager
def _collector_running() -> Iterator[None]:
    """Inside a turn, where ``Interleaved`` has stopped it."""
    was_running = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_running:
            gc.disable()

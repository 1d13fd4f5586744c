"""What ``kvtier store`` does to one directory: ls, verify, scrub, rebuild, gc, clear (design: NVMe rules).

The model's configuration is not needed: the directory carries its namespace and its shape. A start repairs and drops by
itself what must be (a damaged manifest, the rows of a slab that is gone); ``ls`` and ``verify`` do not start the store, and
change nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.errors import TransferError
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.scrub import POSITION_NAME, Scrubbed, Scrubber, saved_place
from kvtier.io.slab import FORMAT_VERSION
from kvtier.io.store_view import StoreView, geometries_of, identity_of, leftovers, view_store


@dataclass(frozen=True)
class GroupListing:
    """One layer group. ``num_bytes``: of its blocks without padding; ``expired``: blocks whose time is over."""

    group: int
    block_bytes: int
    slots: int
    blocks: int
    num_bytes: int
    expired: int
    quarantined: int


@dataclass(frozen=True)
class Listing:
    """What ``ls`` says of a store.

    Attributes:
        directory, format_version, generation, namespace: as its identity file has it.
        groups: one each.
        damage: what is wrong with manifest and slabs, in words; a start would repair or drop it.
        leftovers, leftover_bytes: files that ``gc`` would remove.
        scrub_at: group and slot where the next scrubbing goes on, (0, 0) for a new pass.
    """

    directory: str
    format_version: int
    generation: int
    namespace: dict[str, object]
    groups: tuple[GroupListing, ...]
    damage: tuple[str, ...]
    leftovers: tuple[str, ...]
    leftover_bytes: int
    scrub_at: tuple[int, int]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found: blocks read, those that would not be served (group, slot, why), and damage as in ``Listing``."""

    directory: str
    blocks: int
    bad: tuple[tuple[int, int, str], ...]
    damage: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.bad and not self.damage

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True)
class Rebuilt:
    """What ``rebuild`` made: blocks in the new manifest, those of them that the old one did not know, slots quarantined."""

    directory: str
    blocks: int
    recovered: int
    dropped: int
    quarantined: int


@dataclass(frozen=True)
class Collected:
    """What ``gc`` removed: expired blocks, files and their bytes; and slots of the quarantine that are in service again."""

    directory: str
    expired: int
    released: int
    files: tuple[str, ...]
    num_bytes: int


def list_store(path: Path, clock: Callable[[], float] = time.time) -> Listing:
    """What is in a store, without changing it.

    Raises:
        ConfigError: as :func:`view_store`.
    """
    with view_store(path) as view:
        now = clock()
        blocks = Counter(row.group for row in view.contents.rows.values())
        expired = Counter(row.group for row in view.contents.rows.values() if 0.0 < row.expiry <= now)
        quarantined = Counter(group for group, _ in view.contents.quarantine)
        groups = tuple(GroupListing(group, geometry.block_bytes, geometry.num_slots, blocks[group], blocks[group] * geometry.block_bytes,
                                    expired[group], quarantined[group])
                       for group, geometry in enumerate(geometries_of(view.identity)))
        files = leftovers(path)
        return Listing(str(path), FORMAT_VERSION, view.identity.generation, view.identity.namespace, groups, _damage(view),
                       tuple(file.name for file in files), _sizes(files), saved_place(path))


def verify_store(path: Path, on_block: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Read and verify every block that a start would offer; nothing is quarantined, repaired or dropped.

    Args:
        path: of the store.
        on_block: called after each block with how many have been read, and of how many.

    Raises:
        ConfigError: as :func:`view_store`.
    """
    with view_store(path) as view:
        rows = sorted(view.contents.rows.values())
        bad = []
        for done, row in enumerate(rows, start=1):
            reason = view.why_bad(row)
            if reason is not None:
                bad.append((row.group, row.slot, reason))
            on_block(done, len(rows))
        return Verified(str(path), len(rows), tuple(bad), _damage(view))


def scrub_store(path: Path, bytes_per_second: float | None, seconds: float | None = None) -> Scrubbed:
    """Verify blocks from where the last run stopped, and quarantine those that fail.

    Args:
        path: of the store.
        bytes_per_second: bandwidth that is used at most; ``None`` for all there is.
        seconds: stop after this time; the next run goes on from there.

    Raises:
        ConfigError: the store cannot be opened.
        OSError: the place to go on from could not be written down.
    """
    with _started(path) as store:
        end = None if seconds is None else time.monotonic() + seconds
        return Scrubber(store, bytes_per_second).run(lambda: end is not None and time.monotonic() >= end)


def rebuild_store(path: Path) -> Rebuilt:
    """Make the manifest anew from the slot headers; what can be read of the old one, which is kept beside, adds hits and quarantine.

    Raises:
        ConfigError: the store cannot be opened.
    """
    with _started(path, rebuild=True) as store:
        stats = store.stats()
        return Rebuilt(str(path), stats.stored_blocks, stats.recovered_rows, stats.dropped_rows, stats.quarantined_slots)


def collect_garbage(path: Path, release: bool = False, clock: Callable[[], float] = time.time) -> Collected:
    """Remove blocks whose time is over, damaged manifests that were kept, and what interrupted runs left behind.

    Args:
        path: of the store.
        release: also put the slots of the quarantine back into service, empty.
        clock: wall-clock seconds.

    Raises:
        ConfigError: the store cannot be opened.
        TransferError: the deletions could not be committed.
        OSError: a file could not be removed.
    """
    identity_of(path)  # not a word about files where there is no store
    before = {file: _sizes([file]) for file in leftovers(path)}
    with _started(path) as store:
        now = clock()
        expired = [(block.group, block.slot) for block in store.stored_blocks() if 0.0 < block.expiry <= now]
        for group in sorted({group for group, _ in expired}):
            store.discard(group, [slot for of, slot in expired if of == group])
        released = store.release() if release else 0
        for file in before:
            file.unlink(missing_ok=True)  # the start has removed some already
    return Collected(str(path), len(expired), released, tuple(file.name for file in before), sum(before.values()))


def clear_store(path: Path) -> int:
    """Forget all blocks and return how many there were. The quarantine stays, and so does the size of the files.

    Raises:
        ConfigError: the store cannot be opened.
        TransferError: it could not be written down.
    """
    with _started(path) as store:
        blocks = store.stats().stored_blocks
        store.clear()
        (path / POSITION_NAME).unlink(missing_ok=True)
        return blocks


@contextlib.contextmanager
def _started(path: Path, rebuild: bool = False) -> Iterator[NvmeStore]:
    """The store with the namespace and shape that its directory names."""
    identity = identity_of(path)
    store = NvmeStore.open(path, json.dumps(identity.namespace), geometries_of(identity), rebuild=rebuild)
    try:
        yield store
    finally:
        if not store.close(timeout=60.0):
            raise TransferError(f"{path} could not be closed within 60 s; check the drive")


def _damage(view: StoreView) -> tuple[str, ...]:
    return (*(f"the manifest is damaged: {text}" for text in view.contents.damage), *view.slab_damage)


def _sizes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)



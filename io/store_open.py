"""Opening an NVMe directory: space, slabs, manifest; what does not fit the configuration is put right or refused.

The order matters. Whatever can be refused is refused before anything is changed. Rows go before the slots they point at,
and the number of slots is written down only when the slabs have it, so a crash in between is found at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, TransferError
from kvtier.io.direct_file import refuses_direct
from kvtier.io.faults import Faults
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import ManifestContents, QuarantineRow
from kvtier.io.rebuild import rebuild_from_headers
from kvtier.io.slab import SlabFile
from kvtier.io.space_turn import alone_on
from kvtier.io.store_directory import KEPT_SUFFIX, TEMPORARY_SUFFIX, StoreDirectory, sync_directory, unusable
from kvtier.io.wal_check import wal_path
from kvtier.pools.nvme_geometry import NvmeGeometry

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 30.0
_ASKED_FOR: Final = "a rebuild was asked for"


@dataclass(frozen=True)
class OpenedStore:
    """The parts of an opened directory.

    Attributes:
        home, slabs, manifest: directory with its lock, one slab per group, index.
        dropped_rows: rows given up at this start: damaged, beyond the configured slots, or of a slab that is gone.
        recovered_rows: blocks found again by their slot headers after damage to the manifest, which no row of it vouched for.
        rebuilt: whether there was such damage.
    """

    home: StoreDirectory
    slabs: tuple[SlabFile, ...]
    manifest: Manifest
    dropped_rows: int
    recovered_rows: int
    rebuilt: bool

    def close(self) -> None:
        """Nobody has used it."""
        self.manifest.close(_CLOSE_SECONDS)
        for slab in self.slabs:
            slab.file.close()
        self.home.close()


def default_reserve(path: Path) -> int:
    """Bytes that preallocation leaves free: 1 % of the filesystem, 1 GiB at most."""
    system = os.statvfs(path)
    return min(1 << 30, system.f_blocks * system.f_frsize // 100)


def open_store(directory: str | Path, namespace: str, geometries: Sequence[NvmeGeometry], *, faults: Faults | None = None,
               free_space_reserve: int | None = None, sync: bool = False, rebuild: bool = False) -> OpenedStore:
    """Open or make the store of a directory. See :meth:`NvmeStore.open`. ``rebuild``: make the manifest anew even if it is sound.

    Raises:
        ConfigError: the directory, its content or the space on it does not allow it.
    """
    undo = contextlib.ExitStack()
    home = StoreDirectory.open(directory, namespace, [geometry.block_bytes for geometry in geometries])
    try:
        undo.callback(home.close)
        lost_slabs = [group for group in range(len(geometries))
                      if home.identity.num_slots[group] > 0 and not home.slab_path(group).exists()]
        slabs = _open_slabs(home, geometries, lost_slabs, faults, undo)
        growing = [slab for slab in slabs if slab.file.size() < slab.geometry.file_bytes]
        if growing:  # who has its space already waits for nobody
            with alone_on(home.path):
                _require_space(home, growing, free_space_reserve)
                for slab in growing:
                    slab.file.resize(slab.geometry.file_bytes)
        manifest, was_damaged, dropped, recovered = _open_manifest(home, slabs, sync, rebuild)
        undo.callback(manifest.close, _CLOSE_SECONDS)
        dropped += _forget(home, manifest, slabs, lost_slabs)
        home.record_slots([geometry.num_slots for geometry in geometries])
        for slab in slabs:
            if slab.file.size() > slab.geometry.file_bytes:
                slab.file.resize(slab.geometry.file_bytes)
        return OpenedStore(home, slabs, manifest, dropped, recovered, was_damaged)
    except BaseException as error:
        undo.close()
        if isinstance(error, OSError):
            raise unusable(home.path, error) from error
        if isinstance(error, TransferError):
            raise ConfigError(f"nvme_directory={str(home.path)!r} cannot be used: {error}") from error
        raise


def _open_slabs(home: StoreDirectory, geometries: Sequence[NvmeGeometry], lost_slabs: Sequence[int], faults: Faults | None,
                undo: contextlib.ExitStack) -> tuple[SlabFile, ...]:
    direct = True
    try:
        refusal = refuses_direct(home.path)
    except OSError as error:  # a full disk must not keep an existing store from being read
        _log.info("%s: direct I/O could not be tried (%s)", home.path, error)
    else:
        if refusal is not None:
            direct = False
            _log.warning("%s: the mount refuses direct I/O (%s); using the page cache instead", home.path, refusal)
    slabs = []
    for group, geometry in enumerate(geometries):
        slab = SlabFile(home.slab_path(group), group, geometry, home.identity.namespace_digest, direct=direct, faults=faults)
        undo.callback(slab.file.close)
        if group not in lost_slabs:
            slab.require_size(home.identity.num_slots[group])
        slabs.append(slab)
    return tuple(slabs)


def _require_space(home: StoreDirectory, slabs: Sequence[SlabFile], free_space_reserve: int | None) -> None:
    """Of slabs that grow. The cap counts what is already there: only what the slabs still have to grow by needs room."""
    wanted = sum(max(0, slab.geometry.file_bytes - slab.file.allocated()) for slab in slabs)
    if wanted == 0:
        return
    reserve = default_reserve(home.path) if free_space_reserve is None else free_space_reserve
    system = os.statvfs(home.path)
    free = system.f_bavail * system.f_frsize
    if wanted + reserve > free:
        raise ConfigError(f"the NVMe level needs {wanted} more bytes in {home.path} and leaves {reserve} bytes free, available are "
                          f"{free}: configure a smaller NVMe level, free some space or lower the reserve")


def _forget(home: StoreDirectory, manifest: Manifest, slabs: Sequence[SlabFile], lost_slabs: Sequence[int]) -> int:
    """Drop the rows of slots that are no longer there, aloud."""
    slots = [0 if slab.group in lost_slabs else slab.geometry.num_slots for slab in slabs]
    blocks, quarantined = manifest.forget_beyond(slots)
    if lost_slabs:
        _log.warning("%s: the slab files of groups %s are gone; these groups start empty, %d blocks and %d quarantined slots are dropped",
                     home.path, lost_slabs, blocks, quarantined)
    elif blocks or quarantined:
        _log.warning("%s: %d blocks and %d quarantined slots lay beyond the %s slots that there are now and are dropped",
                     home.path, blocks, quarantined, slots)
    return blocks


def _open_manifest(home: StoreDirectory, slabs: Sequence[SlabFile], sync: bool, rebuild: bool) -> tuple[Manifest, bool, int, int]:
    """The sound manifest, whether it had to be rebuilt, rows dropped, rows recovered."""
    path = home.manifest_path
    digest = home.identity.namespace_digest
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    if path.is_dir() or (path.exists() and path.stat().st_size > 0):
        manifest = Manifest(path, digest, sync=sync)
        try:
            contents = manifest.load()
            if rebuild:
                contents.damage.append(_ASKED_FOR)
            if not contents.damage:
                return manifest, False, 0, 0
            dropped, recovered = _make_manifest(home, temporary, slabs, contents)
        except BaseException:
            manifest.abandon()
            raise
        manifest.abandon()
    else:
        contents = ManifestContents(damage=["it is missing or empty"] if any(home.identity.num_slots) else [])
        dropped, recovered = _make_manifest(home, temporary, slabs, contents)
    _put_in_place(temporary, path, _level(contents))
    manifest = Manifest(path, digest, sync=sync)
    try:
        remaining = manifest.load().damage
        if remaining:
            raise ConfigError(f"{path} is damaged again right after it was rebuilt: {'; '.join(remaining)}. Check the drive")
    except BaseException:
        manifest.abandon()
        raise
    return manifest, bool(contents.damage), dropped, recovered


def _make_manifest(home: StoreDirectory, temporary: Path, slabs: Sequence[SlabFile], contents: ManifestContents) -> tuple[int, int]:
    """Write a complete new manifest beside the place of the old one, which is left alone. Returns rows dropped, rows recovered."""
    path = home.manifest_path
    dropped = recovered = 0
    with contextlib.ExitStack() as undo:
        for name in ("", "-wal", "-shm"):
            undo.callback(temporary.with_name(temporary.name + name).unlink, missing_ok=True)
        manifest = Manifest(temporary, home.identity.namespace_digest)
        undo.callback(manifest.close, _CLOSE_SECONDS)
        manifest.create()
        if contents.damage:
            suspected = [place for place in contents.bad_rows if place is not None]
            rebuilt = rebuild_from_headers(slabs, contents.rows, suspected, contents.quarantine)
            manifest.put(rebuilt.rows)
            now = time.time()
            manifest.quarantine([*contents.quarantine.values(),
                                 *(QuarantineRow(*place, b"", "its manifest row or header was damaged", now) for place in rebuilt.lost)])
            dropped, recovered = len(contents.bad_rows), rebuilt.recovered
            _log.log(_level(contents), "%s is damaged (%s) and was rebuilt from the slot headers: %d blocks, %d of them recovered; "
                     "%d damaged rows dropped, %d slots quarantined, %d second copies left out", path, "; ".join(contents.damage),
                     len(rebuilt.rows), recovered, dropped, len(rebuilt.lost), rebuilt.duplicates)
        manifest.close(_CLOSE_SECONDS)
        if wal_path(temporary).exists():
            raise TransferError(f"{temporary}: the new manifest could not be completed. Free some space and check the drive")
        undo.pop_all()
    return dropped, recovered


def _level(contents: ManifestContents) -> int:
    """How loudly a rebuild is told of: damage aloud."""
    return logging.INFO if contents.damage == [_ASKED_FOR] else logging.ERROR


def _put_in_place(temporary: Path, path: Path, level: int) -> None:
    """Replace a damaged database, which is kept beside with its log. Where there are hard links, a manifest is there throughout.

    A log of the old database must never meet the new one, so it goes first; it comes back when the replacement fails.
    """
    kept = _name_to_keep(path) if path.exists() and path.stat().st_size > 0 else None
    log, kept_log = wal_path(path), wal_path(kept) if kept is not None else None
    if kept is not None:
        try:
            os.link(path, kept)
        except OSError:  # a filesystem without hard links
            os.rename(path, kept)
    try:
        if kept_log is not None and log.exists() and log.stat().st_size > 0:
            os.rename(log, kept_log)
        for side in (log, path.with_name(path.name + "-shm")):
            side.unlink(missing_ok=True)
        os.replace(temporary, path)
    except BaseException:
        if kept is not None and kept_log is not None:
            if kept_log.exists():
                os.rename(kept_log, log)
            if path.exists():
                kept.unlink()
            else:
                os.rename(kept, path)
        raise
    sync_directory(path.parent)
    if kept is not None:
        _log.log(level, "%s is damaged and is kept as %s", path, kept)


def _name_to_keep(path: Path) -> Path:
    suffix = time.strftime(f"{KEPT_SUFFIX}%Y%m%d-%H%M%S")
    number = 0
    while path.with_name(path.name + suffix).exists():
        number += 1
        suffix = f"{suffix.split('_')[0]}_{number}"
    return path.with_name(path.name + suffix)

"""``StoreView``: what an NVMe directory holds, looked at without changing it (``kvtier store ls | verify``).

The manifest is read from a copy, for SQLite changes what it opens: it folds a killed process's log in. Only the lock file is
written to, so that no other process works on the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_rows import ManifestContents, ManifestRow
from kvtier.io.rank_directories import are_ranks_of_one, in_order_of_ranks
from kvtier.io.slab import SlabFile
from kvtier.io.sqlite_errors import NO_ROOM
from kvtier.io.store_directory import (
    IDENTITY_NAME,
    KEPT_SUFFIX,
    MANIFEST_NAME,
    StoreIdentity,
    expand,
    is_temporary,
    read_identity,
    take_lock,
    unusable,
)
from kvtier.io.wal_check import wal_path
from kvtier.pools.nvme_geometry import NvmeGeometry

_CLOSE_SECONDS: Final = 30.0
_ROOM: Final = "Free some space there, or set TMPDIR to a folder that has room"


def find_stores(directory: str | Path) -> list[Path]:
    """The stores in a directory: itself, or those right below it, where several ranks have theirs under one root. In order.

    Raises:
        ConfigError: it does not exist, cannot be looked into, or there is no store.
    """
    path = expand(directory)
    try:
        if not path.is_dir():
            raise ConfigError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}: name the directory of a store")
        if (path / IDENTITY_NAME).exists():
            return [path]
        entries = list(path.iterdir())
        found = [entry for entry in entries if entry.is_dir() and (entry / IDENTITY_NAME).exists()]
    except OSError as error:
        raise unusable(path, error) from error
    if not found:
        raise ConfigError(f"{path} is not a kvtier store: it holds {len(entries)} entries, and there is no {IDENTITY_NAME} in it or in a "
                          "folder right below it. Name the nvme_directory of a configuration, or the root above those of several ranks")
    return in_order_of_ranks(found)


def find_stores_to_change(directory: str | Path) -> list[Path]:
    """The same for commands that change what they find: a store, or the ranks of one. Whoever names a folder that happens to have stores
    of several caches in it means one of them, or none.

    Raises:
        ConfigError: as :func:`find_stores`; or the stores below the directory are not the ranks of one.
    """
    path, stores = expand(directory), find_stores(directory)
    if stores != [path] and not (are_ranks_of_one(stores) and len(set(filter(None, map(_owner, stores)))) <= 1):
        raise ConfigError(f"{path} is no store, and what lies below it is not the ranks of one: {', '.join(map(str, stores))}. Name one "
                          "of them; only kvtier store ls and verify take several")
    return stores


def identity_of(path: Path) -> StoreIdentity:
    """What the directory says it holds.

    Raises:
        ConfigError: there is no identity file, or it is damaged or of another format version.
    """
    try:
        identity = read_identity(path)
    except OSError as error:
        raise unusable(path, error) from error
    if identity is None:
        raise ConfigError(f"{path} is not a kvtier store: there is no {IDENTITY_NAME} in it")
    return identity


def _owner(path: Path) -> str | None:
    """What the namespaces of all ranks of one cache have in common: model and kind of namespace. Layouts may differ from stage to stage of
    a pipeline, and fingerprints name ranks. None where it cannot be read, for no command changes such a store."""
    try:
        namespace = identity_of(path).namespace
    except ConfigError:
        return None
    return f"{namespace.get('model')} {namespace.get('ranks')} {sorted(namespace)}"


def geometries_of(identity: StoreIdentity) -> list[NvmeGeometry]:
    """The shape of each group's slab, as it was at the last start."""
    return [NvmeGeometry(*shape) for shape in zip(identity.block_bytes, identity.num_slots, strict=True)]


def leftovers(path: Path) -> list[Path]:
    """Files that no start needs any more: damaged manifests that were kept, their logs, and what an interrupted run left behind."""
    return sorted(entry for entry in path.iterdir() if entry.name.startswith(MANIFEST_NAME + KEPT_SUFFIX) or is_temporary(entry.name))


@dataclass(frozen=True)
class StoreView:
    """An existing directory, locked.

    Attributes:
        path, identity: where it is and what it says it holds.
        contents: of the manifest; ``damage`` says what is wrong with it.
        slabs: one per group, ``None`` where the file is missing or too short.
        slab_damage: which slabs that is, in words.
    """

    path: Path
    identity: StoreIdentity
    contents: ManifestContents
    slabs: tuple[SlabFile | None, ...]
    slab_damage: tuple[str, ...]

    def why_bad(self, row: ManifestRow) -> str | None:
        """Read and verify the block of a row; ``None`` when it is sound."""
        slab = self.slabs[row.group] if 0 <= row.group < len(self.slabs) else None
        if slab is None or not 0 <= row.slot < slab.geometry.num_slots:
            return f"group {row.group}, slot {row.slot}: there is no such slot any more"
        try:
            slab.read(row.slot, row.key, aligned_buffer(slab.geometry.payload_bytes))
        except (OSError, TransferError, CorruptBlock) as error:
            return str(error)
        return None


@contextlib.contextmanager
def view_store(path: Path) -> Iterator[StoreView]:
    """Lock a store and look at it; nothing in it is repaired, rebuilt or dropped.

    Raises:
        ConfigError: it is in use by another process, is no store, is of another format version, or cannot be read.
    """
    identity = identity_of(path)
    with contextlib.ExitStack() as undo:
        try:
            undo.callback(os.close, take_lock(path))
            slabs, slab_damage = [], []
            for group, geometry in enumerate(geometries_of(identity)):
                file = path / f"group-{group}.slab"
                slab = None
                if geometry.num_slots > 0 and not file.exists():  # opening it would make it
                    slab_damage.append(f"{file.name} is missing: the blocks of group {group} are gone")
                elif geometry.num_slots > 0:
                    slab = SlabFile(file, group, geometry, identity.namespace_digest)
                    undo.callback(slab.file.close)
                    try:
                        slab.require_size(geometry.num_slots)
                    except ConfigError as error:
                        slab_damage.append(str(error))
                        slab = None
                slabs.append(slab)
            contents = _read_manifest(path, identity)
        except OSError as error:
            raise unusable(path, error) from error
        yield StoreView(path, identity, contents, tuple(slabs), tuple(slab_damage))


def _read_manifest(path: Path, identity: StoreIdentity) -> ManifestContents:
    source = path / MANIFEST_NAME
    if not source.is_file() or source.stat().st_size == 0:
        return ManifestContents(damage=[f"{MANIFEST_NAME} is missing or empty"] if any(identity.num_slots) else [])
    with _folder_for_copies() as folder:
        copy = folder / MANIFEST_NAME
        for original, place in ((source, copy), (wal_path(source), wal_path(copy))):
            if original.exists():
                _copy(original, place)
        manifest = Manifest(copy, identity.namespace_digest)
        try:
            return manifest.load()
        except TransferError as error:
            raise ConfigError(f"{source} cannot be read from a copy in {folder}: {error}") from error
        finally:
            manifest.close(_CLOSE_SECONDS)


@contextlib.contextmanager
def _folder_for_copies() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-view-")
    except OSError as error:
        raise ConfigError(f"no folder for a copy of the manifest can be made ({error.strerror}: {error.filename or 'TMPDIR'}). "
                          f"{_ROOM}") from error
    with folder as path:
        yield Path(path)


def _copy(original: Path, place: Path) -> None:
    try:
        shutil.copyfile(original, place)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise  # the store's own file cannot be read
        raise ConfigError(f"{original} ({original.stat().st_size} bytes) cannot be copied into {place.parent}, which is full: the store is "
                          f"read from a copy. {_ROOM}") from error

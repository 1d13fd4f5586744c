"""A small NVMe directory to work on, and bytes that follow from their key, so that any block can be checked."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.direct_file import aligned_buffer
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import NvmeGeometry

NAMESPACE = '{"model": "tiny@1", "layout": "uniform-2x1x8"}'


class Nvme:
    """Two groups: one whose blocks are whole pages, one whose blocks are not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespace = NAMESPACE
        self.geometries = [NvmeGeometry(8192, 8), NvmeGeometry(5000, 8)]
        self.stores: list[NvmeStore] = []

    def open(self, **options) -> NvmeStore:
        options.setdefault("free_space_reserve", 0)
        store = NvmeStore.open(options.pop("directory", self.directory), options.pop("namespace", self.namespace),
                               options.pop("geometries", self.geometries), **options)
        self.stores.append(store)
        return store

    def reopen(self, **options) -> NvmeStore:
        assert self.stores[-1].close(timeout=60.0)
        return self.open(**options)

    def key(self, name: object) -> bytes:
        return hashlib.sha256(repr(name).encode()).digest()

    def content(self, key: bytes, group: int = 0) -> np.ndarray:
        return np.random.default_rng(list(key)).integers(0, 256, self.geometries[group].block_bytes, dtype=np.uint8)

    def item(self, slot: int, name: object, group: int = 0, priority: int = 35, expiry: float = 0.0) -> BlockWrite:
        key = self.key(name)
        return BlockWrite(group, slot, key, self.content(key, group), priority, expiry)

    def fill(self, store: NvmeStore, group: int = 0, slots: Sequence[int] = range(8)) -> dict[Place, bytes]:
        """Store a block in each slot and return the keys by place."""
        items = [self.item(slot, (group, slot), group) for slot in slots]
        assert store.write_blocks(items) == [None] * len(items)
        return {(item.group, item.slot): item.key for item in items}

    def read(self, store: NvmeStore, group: int, slot: int, key: bytes) -> np.ndarray:
        out = np.empty(self.geometries[group].block_bytes, np.uint8)
        store.read_block(group, slot, key, out)
        return out

    def reads_right(self, store: NvmeStore, group: int, slot: int, key: bytes) -> bool:
        return bool(np.array_equal(self.read(store, group, slot, key), self.content(key, group)))

    def stored(self, store: NvmeStore) -> dict[Place, bytes]:
        return {(block.group, block.slot): block.key for block in store.stored_blocks()}

    def slab(self, group: int = 0) -> Path:
        return self.directory / f"group-{group}.slab"

    def slab_bytes(self, group: int, offset: int, count: int) -> bytes:
        with self.slab(group).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def edit_slab(self, group: int, offset: int, content: bytes) -> None:
        with self.slab(group).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit]))

    def sql(self, statement: str, *parameters: object) -> None:
        """Change the manifest behind the store's back."""
        with contextlib.closing(sqlite3.connect(self.directory / "manifest.sqlite", isolation_level=None)) as connection:
            connection.execute(statement, parameters)

    def close(self) -> None:
        for store in self.stores:
            store.close(timeout=60.0)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Nvme]:
    helper = Nvme(tmp_path / "store")
    yield helper
    helper.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def page() -> np.ndarray:
    return aligned_buffer(4096)

"""Blocks that travel through KvikIO: the same slots, the same checks, and whatever KvikIO does, no wrong byte and no silence.

KvikIO is a double here that can be told to go wrong; ``test_gds_kvikio.py`` has the real one. Host memory stands for the
device's: nothing here is GPUDirect.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent))  # importlib mode puts no folder there

from kvikio_double import KvikioDouble

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.gds import GdsPath
from kvtier.io.gds_driver import GdsUnavailable
from kvtier.io.nvme_store import NvmeStore

TASK = 4096


@pytest.fixture
def kvikio() -> KvikioDouble:
    return KvikioDouble()


@pytest.fixture
def direct(nvme, kvikio: KvikioDouble) -> Iterator[Callable[[NvmeStore], GdsPath]]:
    """The direct way of a store, two rows for each group."""
    made: list[GdsPath] = []

    def make(store: NvmeStore) -> GdsPath:
        made.append(GdsPath.of_host(kvikio, [path for path, _geometry in store.slabs()], nvme.geometries, 2, TASK))
        return made[-1]

    yield make
    for path in made:
        path.close()
    assert all(file.closed for file in kvikio.files)


def write_direct(nvme, store: NvmeStore, path: GdsPath, slot: int, name: object, group: int = 0, row: int = 1) -> bytes:
    """Store a block out of a row, whose padding holds something else than the header's page would like."""
    item = nvme.item(slot, name, group)
    rows = path.groups[group].arena
    rows.padded_rows[row] = 0xEE
    rows.rows[row] = item.data
    assert store.write_blocks([dataclasses.replace(item, data=path.groups[group].rows[row])]) == [None]
    return item.key


def read_direct(store: NvmeStore, path: GdsPath, group: int, slot: int, key: bytes, row: int = 0) -> np.ndarray:
    path.groups[group].arena.padded_rows[row] = 0xDD
    store.read_block(group, slot, key, path.groups[group].rows[row])
    return path.groups[group].arena.rows[row].copy()


@pytest.mark.parametrize("group", [0, 1])
def test_what_one_way_wrote_the_other_reads_also_after_a_restart(nvme, kvikio: KvikioDouble, direct, group: int) -> None:
    store = nvme.open()
    keys = nvme.fill(store, group, slots=range(2))
    path = direct(store)
    direct_key = write_direct(nvme, store, path, 2, "direct", group)
    for slot in range(2):
        key = keys[group, slot]
        assert np.array_equal(read_direct(store, path, group, slot, key), nvme.content(key, group))
    assert np.array_equal(nvme.read(store, group, 2, direct_key), nvme.content(direct_key, group))
    assert {verb for verb, _size, _offset in kvikio.calls} == {"pread", "pwrite"}
    stats = store.stats()
    assert (stats.gds_read_blocks, stats.gds_written_blocks, stats.gds_detours) == (2, 1, 0)
    assert (stats.read_blocks, stats.written_blocks) == (3, 3)
    store = nvme.reopen()
    assert np.array_equal(nvme.read(store, group, 2, direct_key), nvme.content(direct_key, group))
    assert np.array_equal(read_direct(store, direct(store), group, 2, direct_key), nvme.content(direct_key, group))


def test_a_library_that_writes_something_else_in_silence_is_found_out_by_the_read(nvme, kvikio: KvikioDouble, direct) -> None:
    store = nvme.open()
    path = direct(store)
    kvikio.corrupts_writes = True
    key = write_direct(nvme, store, path, 0, "a")
    with pytest.raises(CorruptBlock, match="checksum of the block"):
        nvme.read(store, 0, 0, key)
    with pytest.raises(CorruptBlock, match="checksum of the block"):
        read_direct(store, path, 0, 0, key)
    assert store.stats().checksum_failures == 2


def test_a_read_that_reads_nothing_and_says_it_did_serves_nothing(nvme, kvikio: KvikioDouble, direct) -> None:
    store = nvme.open()
    key = nvme.fill(store)[0, 3]
    path = direct(store)
    kvikio.reads_nothing = True
    with pytest.raises(CorruptBlock):
        read_direct(store, path, 0, 3, key)


@pytest.mark.parametrize("damage", [{"error": RuntimeError("cuFile error: 5030")}, {"short_by": 4096}], ids=["error", "short"])
def test_what_kvikio_refuses_goes_through_the_host_is_counted_and_said_once(
        nvme, kvikio: KvikioDouble, direct, damage: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    store = nvme.open()
    keys = nvme.fill(store, slots=range(3))
    path = direct(store)
    for name, value in damage.items():
        setattr(kvikio, name, value)
    with caplog.at_level(logging.WARNING):
        for slot in range(3):
            assert np.array_equal(read_direct(store, path, 0, slot, keys[0, slot]), nvme.content(keys[0, slot]))
        key = write_direct(nvme, store, path, 5, "written")
    assert np.array_equal(nvme.read(store, 0, 5, key), nvme.content(key))
    assert store.stats().gds_detours == 4
    said = [record.getMessage() for record in caplog.records if "through the host" in record.getMessage()]
    assert len(said) == 1
    assert "KvikIO" in said[0]


def test_a_file_that_ends_too_early_is_an_error_of_both_ways_and_no_detour(nvme, direct) -> None:
    store = nvme.open()
    key = nvme.fill(store)[0, 7]
    path = direct(store)
    with store.slabs()[0][0].open("r+b") as file:
        file.truncate(7 * nvme.geometries[0].stride + 4096 + 100)
    with pytest.raises(TransferError, match="short read"):
        read_direct(store, path, 0, 7, key)
    assert store.stats().gds_detours == 0
    assert store.stats().read_errors == 1


@pytest.mark.parametrize("operation", [FaultOperation.READ, FaultOperation.WRITE])
def test_a_flipped_bit_on_the_direct_way_is_never_served(nvme, direct, operation: FaultOperation) -> None:
    store = nvme.open(faults=Faults([FaultRule(FaultKind.BIT_FLIP, operation)]))
    path = direct(store)
    key = write_direct(nvme, store, path, 0, "a")
    with pytest.raises(CorruptBlock):
        read_direct(store, path, 0, 0, key)


def test_an_injected_failure_hits_the_direct_way_like_the_other(nvme, direct) -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, errno=errno.EIO, count=1)])
    store = nvme.open(faults=faults)
    path = direct(store)
    key = write_direct(nvme, store, path, 0, "a")
    with pytest.raises(TransferError, match="Input/output error"):
        read_direct(store, path, 0, 0, key)
    assert np.array_equal(read_direct(store, path, 0, 0, key), nvme.content(key))


def test_a_row_of_another_size_is_refused(nvme, direct) -> None:
    store = nvme.open(geometries=[nvme.geometries[0], dataclasses.replace(nvme.geometries[0], block_bytes=12288)])
    nvme.fill(store)
    paths, geometries = zip(*store.slabs(), strict=True)
    wrong = GdsPath.of_host(KvikioDouble(), paths, geometries, 1, TASK)
    with pytest.raises(TransferError, match="a direct row of 12288 bytes"):
        store.read_block(0, 0, nvme.key((0, 0)), wrong.groups[1].rows[0])
    wrong.close()


def test_a_slab_that_kvikio_cannot_open_is_a_reason_and_leaves_nothing_open(nvme, kvikio: KvikioDouble) -> None:
    store = nvme.open()
    kvikio.open_error = RuntimeError("cuFileHandleRegister failed")
    with pytest.raises(GdsUnavailable, match="cuFileHandleRegister failed"):
        GdsPath.of_host(kvikio, [path for path, _geometry in store.slabs()], nvme.geometries, 2, TASK)
    assert kvikio.files == []


def test_closing_twice_closes_once(nvme, kvikio: KvikioDouble) -> None:
    store = nvme.open()
    path = GdsPath.of_host(kvikio, [path for path, _geometry in store.slabs()], nvme.geometries, 2, TASK)
    path.close()
    path.close()
    assert [file.closed for file in kvikio.files] == [True, True]

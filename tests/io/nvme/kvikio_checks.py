"""The real KvikIO moves blocks between slabs and host memory. Run by ``tests/io/test_gds_kvikio.py`` in a process of its own, on a
stand-in for the CUDA driver: KvikIO's POSIX mode, no GPUDirect and no GPU.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import TransferError
from kvtier.io.gds import GdsPath
from kvtier.io.gds_driver import GdsUnavailable, configure_kvikio, load_kvikio
from kvtier.io.gds_probe import PROBE_NAME, write_read_compare
from kvtier.pools.nvme_geometry import NvmeGeometry

sys.path.append(str(Path(__file__).parents[1]))  # importlib mode puts no folder there
from kvikio_double import HostMemory

TASK = 64 << 10


@pytest.fixture(scope="module")
def kvikio():
    assert os.environ["KVIKIO_COMPAT_MODE"] == "ON", "anything else may spin for ever without a GPU"
    module = load_kvikio()
    configure_kvikio(module, 4, TASK)
    return module


@pytest.fixture
def large(nvme):
    """Blocks that KvikIO cuts into 16 tasks and a bit, and blocks that are smaller than one."""
    nvme.geometries = [NvmeGeometry((1 << 20) + 4096, 12), NvmeGeometry(5000, 12)]
    return nvme


@pytest.fixture
def path(large, kvikio) -> Iterator[GdsPath]:
    made = GdsPath.of_host(kvikio, [path for path, _geometry in large.open().slabs()], large.geometries, 4, TASK)
    yield made
    made.close()


def test_the_settings_are_the_ones_that_were_asked_for(kvikio) -> None:
    import kvikio.defaults as defaults

    assert defaults.get("num_threads") == 4
    assert defaults.get("task_size") == TASK
    assert defaults.get("gds_threshold") == 4096
    assert defaults.get("auto_direct_io_read") is True
    assert defaults.get("auto_direct_io_write") is True
    with kvikio.defaults.set({"compat_mode": kvikio.defaults.get("compat_mode")}):
        assert defaults.get("compat_mode") == kvikio.CompatMode.ON


def test_the_probe_passes_with_the_real_library(kvikio, tmp_path) -> None:
    assert write_read_compare(kvikio, tmp_path / PROBE_NAME, HostMemory()) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", [0, 1])
def test_what_kvikio_writes_posix_reads_and_the_other_way_round(large, path: GdsPath, group: int) -> None:
    store, rows, arena = large.stores[-1], path.groups[group].rows, path.groups[group].arena
    plain = large.fill(store, group, slots=range(4))
    for slot in range(4, 8):
        item = large.item(slot, ("direct", slot), group)
        arena.padded_rows[slot % 4] = 0xEE
        arena.rows[slot % 4] = item.data
        assert store.write_blocks([dataclasses.replace(item, data=rows[slot % 4])]) == [None]
        assert large.reads_right(store, group, slot, item.key)
    for (_group, slot), key in plain.items():
        arena.padded_rows[0] = 0xDD
        store.read_block(group, slot, key, rows[0])
        assert np.array_equal(arena.rows[0], large.content(key, group))
    assert store.stats().gds_detours == 0, "the real library carried every block"
    store = large.reopen()
    assert large.reads_right(store, group, 5, large.key(("direct", 5)))


def test_several_readers_at_once_get_their_own_blocks(large, path: GdsPath) -> None:
    store = large.stores[-1]
    keys = large.fill(store, 0, slots=range(12))

    def read(row: int) -> int:
        wrong = 0
        for turn in range(12):
            slot = (turn * 5 + row * 3) % 12
            store.read_block(0, slot, keys[0, slot], path.groups[0].rows[row])
            wrong += not np.array_equal(path.groups[0].arena.rows[row], large.content(keys[0, slot]))
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [0] * 4
    assert store.stats().gds_detours == 0


def test_the_end_of_the_file_is_an_error_and_not_a_short_block(large, path: GdsPath) -> None:
    store = large.stores[-1]
    key = large.fill(store, 0, slots=[11])[0, 11]
    with large.slab(0).open("r+b") as file:
        file.truncate(large.geometries[0].offset(11) + 8192)
    with pytest.raises(TransferError, match="KvikIO: read of"):
        path.groups[0].rows[0].start_read(large.geometries[0].offset(11) + 4096).wait()
    with pytest.raises(TransferError, match="short read"):
        store.read_block(0, 11, key, path.groups[0].rows[0])


def test_a_file_that_is_not_there_cannot_be_opened(kvikio, tmp_path, large) -> None:
    with pytest.raises(GdsUnavailable, match="cannot open"):
        GdsPath.of_host(kvikio, [tmp_path / "none.slab"], large.geometries[:1], 1, TASK)

"""What a restart finds: every block that was stored, whatever happened to the index, the slabs or the configuration."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io import store_open
from kvtier.pools.nvme_geometry import NvmeGeometry


def covered(nvme, store, keys) -> bool:
    """Every block that was stored reads back right or its slot is known to be quarantined: nothing is shortened silently."""
    stored = nvme.stored(store)
    assert stored.items() <= keys.items()
    assert all(nvme.reads_right(store, group, slot, key) for (group, slot), key in stored.items())
    return stored.keys() | set(store.quarantined()) >= keys.keys()


def damaged_files(nvme) -> list[str]:
    return [entry.name for entry in nvme.directory.iterdir() if ".damaged-" in entry.name and not entry.name.endswith("-wal")]


def test_a_restart_finds_every_block_and_makes_no_noise(nvme, caplog) -> None:
    with caplog.at_level(logging.INFO):
        store = nvme.open()
        keys = nvme.fill(store, 0) | nvme.fill(store, 1, [0, 3])
        for _ in range(2):
            store = nvme.reopen()
            assert nvme.stored(store) == keys
            assert all(nvme.reads_right(store, group, slot, key) for (group, slot), key in keys.items())
    assert caplog.text == ""
    assert store.stats().recovered_rows == store.stats().dropped_rows == 0


def test_files_are_private(nvme) -> None:
    nvme.fill(nvme.open())
    assert nvme.directory.stat().st_mode & 0o777 == 0o700
    names = {entry.name: entry.stat().st_mode & 0o777 for entry in nvme.directory.iterdir()}
    assert set(names) == {"kvtier-store.json", "kvtier.lock", "manifest.sqlite", "manifest.sqlite-wal", "manifest.sqlite-shm",
                          "group-0.slab", "group-1.slab"}
    assert set(names.values()) == {0o600}


def test_slabs_are_allocated_when_the_store_is_made(nvme) -> None:
    nvme.open()
    for group, geometry in enumerate(nvme.geometries):
        assert nvme.slab(group).stat().st_size == geometry.file_bytes
        assert nvme.slab(group).stat().st_blocks * 512 >= geometry.file_bytes


def test_a_group_without_slots_is_fine(nvme) -> None:
    nvme.geometries = [NvmeGeometry(8192, 4), NvmeGeometry(5000, 0)]
    store = nvme.open()
    nvme.fill(store, slots=range(4))
    assert isinstance(store.write_blocks([nvme.item(0, "x", group=1)])[0], TransferError)
    assert len(nvme.reopen().stored_blocks()) == 4


def test_more_slots_extend_the_slab_and_keep_every_block(nvme, caplog) -> None:
    keys = nvme.fill(nvme.open())
    nvme.geometries[0] = NvmeGeometry(8192, 20)
    store = nvme.reopen()
    assert nvme.stored(store) == keys
    assert caplog.text == ""
    assert store.write_blocks([nvme.item(19, "new")]) == [None]
    store = nvme.reopen()
    assert nvme.reads_right(store, 0, 19, nvme.key("new"))
    assert all(nvme.reads_right(store, *place, key) for place, key in keys.items())


def test_fewer_slots_drop_the_blocks_behind_the_end_aloud_and_keep_the_others(nvme, caplog) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    store.quarantine(0, 6, "x")
    nvme.geometries[0] = NvmeGeometry(8192, 5)
    caplog.clear()
    store = nvme.reopen()
    assert nvme.stored(store) == {place: key for place, key in keys.items() if place[1] < 5}
    assert all(nvme.reads_right(store, *place, key) for place, key in nvme.stored(store).items())
    assert store.stats().dropped_rows == 2
    assert store.quarantined() == []
    assert "2 blocks and 1 quarantined slots lay beyond" in caplog.text
    assert nvme.slab().stat().st_size == 5 * nvme.geometries[0].stride
    nvme.geometries[0] = NvmeGeometry(8192, 8)
    assert len(nvme.reopen().stored_blocks()) == 5


def test_what_does_not_fit_is_refused_before_anything_is_allocated(nvme) -> None:
    system = os.statvfs(nvme.directory.parent)
    whole = system.f_blocks * system.f_frsize  # not what is free now: somebody may give some of it back meanwhile
    nvme.geometries[0] = NvmeGeometry(2 << 20, whole // (2 << 20) + 10)
    with pytest.raises(ConfigError, match=r"needs \d+ more bytes in .* leaves 5 bytes free, available are \d+: configure a smaller"):
        nvme.open(free_space_reserve=5)
    assert nvme.slab().stat().st_size == 0


def test_the_reserve_is_kept_free_and_an_existing_store_needs_no_room(nvme, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=f"leaves {1 << 60} bytes free"):
        nvme.open(free_space_reserve=1 << 60)
    keys = nvme.fill(nvme.open())
    assert nvme.stored(nvme.reopen(free_space_reserve=1 << 60)) == keys  # the cap counts what is already there


def test_the_reserve_is_one_percent_or_one_gibibyte_by_default(nvme, monkeypatch) -> None:
    class System:
        f_frsize = 4096
        f_blocks = 1000

    monkeypatch.setattr(store_open.os, "statvfs", lambda path: System)
    assert store_open.default_reserve(Path("/")) == 40960
    System.f_blocks = 1 << 40
    assert store_open.default_reserve(Path("/")) == 1 << 30


def test_a_disk_that_fills_up_during_preallocation_is_a_config_error_and_the_next_start_goes_through(nvme, monkeypatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*lower the size"):
        nvme.open()
    monkeypatch.undo()
    nvme.fill(nvme.open())


def test_a_failed_open_gives_the_directory_free_again(nvme) -> None:
    nvme.open().close(60.0)
    os.truncate(nvme.slab(), 4096)
    for _ in range(2):
        with pytest.raises(ConfigError, match="truncated"):
            nvme.open()


def test_a_second_store_in_the_same_directory_is_refused_and_the_first_goes_on(nvme) -> None:
    store = nvme.open()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        nvme.open()
    nvme.fill(store)


def test_another_model_is_refused_and_nothing_is_changed(nvme) -> None:
    keys = nvme.fill(nvme.open())
    nvme.stores[-1].close(60.0)
    with pytest.raises(ConfigError, match=r'model is "tiny@1", configured is "other@1"'):
        nvme.open(namespace='{"model": "other@1", "layout": "uniform-2x1x8"}')
    assert nvme.stored(nvme.open()) == keys


def test_a_slab_truncated_while_the_store_was_closed_is_an_error_that_names_file_and_sizes(nvme) -> None:
    nvme.fill(nvme.open())
    nvme.stores[-1].close(60.0)
    os.truncate(nvme.slab(), 3 * nvme.geometries[0].stride)
    with pytest.raises(ConfigError, match=r"group-0\.slab has 36864 bytes but its 8 slots need 98304.*delete it to start this group empty"):
        nvme.open()


def test_a_slab_that_is_gone_costs_its_group_aloud_and_the_other_groups_stay(nvme, caplog) -> None:
    store = nvme.open()
    nvme.fill(store, 0)
    keys = nvme.fill(store, 1)
    store.close(60.0)
    nvme.slab(0).unlink()
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert store.stats().dropped_rows == 8
    assert "slab files of groups [0] are gone" in caplog.text
    nvme.fill(store, 0)
    assert len(nvme.reopen().stored_blocks()) == 16


def test_a_mount_without_direct_io_works_and_says_so_once(nvme, monkeypatch, caplog) -> None:
    monkeypatch.setattr(store_open, "refuses_direct", lambda path: "open with O_DIRECT: Invalid argument")
    store = nvme.open()
    keys = nvme.fill(store, 0) | nvme.fill(store, 1)
    assert all(nvme.reads_right(store, *place, key) for place, key in keys.items())
    assert not store.stats().direct
    assert caplog.text.count("refuses direct I/O") == 1


def test_a_full_disk_does_not_keep_an_existing_store_from_being_read(nvme, monkeypatch) -> None:
    keys = nvme.fill(nvme.open())

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_open, "refuses_direct", full)
    assert nvme.stored(nvme.reopen()) == keys


# The manifest


@pytest.mark.parametrize("statement", [
    "UPDATE blocks SET checksum = zeroblob(16) WHERE group_number = 0 AND slot = 3", "UPDATE blocks SET key = zeroblob(32) WHERE slot < 3",
    "UPDATE blocks SET slot = 77 WHERE group_number = 0 AND slot = 3", "DELETE FROM blocks WHERE slot = 4", "DELETE FROM blocks",
    "DROP TABLE blocks", "DROP TABLE totals", "UPDATE totals SET blocks = 3"])
def test_a_changed_manifest_is_noticed_said_aloud_kept_beside_and_rebuilt(nvme, caplog, statement: str) -> None:
    store = nvme.open()
    keys = nvme.fill(store, 0) | nvme.fill(store, 1)
    store.close(60.0)
    nvme.sql(statement)
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert all(nvme.reads_right(store, *place, key) for place, key in keys.items())
    assert "is damaged" in caplog.text
    assert len(damaged_files(nvme)) == 1
    caplog.clear()
    assert nvme.stored(nvme.reopen()) == keys  # and the new one is sound
    assert caplog.text == ""


def test_a_damaged_row_whose_slot_does_not_vouch_for_a_block_is_dropped_counted_and_its_slot_quarantined(nvme, caplog) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    store.close(60.0)
    nvme.sql("UPDATE blocks SET checksum = zeroblob(16) WHERE group_number = 0 AND slot = 3")
    nvme.flip(nvme.slab(), nvme.geometries[0].offset(3) + 60)
    store = nvme.open()
    assert store.quarantined() == [(0, 3)]
    assert covered(nvme, store, keys)
    assert store.stats().dropped_rows == 1
    assert "1 damaged rows dropped, 1 slots quarantined" in caplog.text
    assert nvme.reopen().quarantined() == [(0, 3)]


def test_a_lost_manifest_is_rebuilt_with_priorities_and_without_quarantined_or_foreign_slots(nvme, caplog) -> None:
    store = nvme.open()
    keys = nvme.fill(store, slots=[0, 1, 2, 3])
    assert store.write_blocks([nvme.item(4, "kept", priority=70, expiry=12.5)]) == [None]
    keys[0, 4] = nvme.key("kept")
    store.close(60.0)
    nvme.flip(nvme.slab(), nvme.geometries[0].offset(1) + 4096)  # the block, not the header: found when it is read
    (nvme.directory / "manifest.sqlite").unlink()
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert store.stats().recovered_rows == 5
    [block] = [block for block in store.stored_blocks() if block.slot == 4]
    assert (block.priority, block.expiry) == (70, 12.5)
    with pytest.raises(CorruptBlock, match="checksum of the block"):
        nvme.read(store, 0, 1, keys[0, 1])
    assert "missing or empty" in caplog.text


def test_a_log_whose_database_is_gone_is_not_mixed_into_the_new_one(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store, slots=[0, 1])
    log = nvme.directory / "manifest.sqlite-wal"
    older = log.read_bytes()
    keys |= nvme.fill(store, slots=[2, 3, 4])
    store.close(60.0)
    (nvme.directory / "manifest.sqlite").unlink()
    log.write_bytes(older)
    assert nvme.stored(nvme.open()) == keys


def test_hits_and_quarantine_survive_a_rebuild(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    nvme.read(store, 0, 2, keys[0, 2])
    store.quarantine(0, 5, "flipped bit")
    store.close(60.0)
    nvme.sql("UPDATE blocks SET priority = 99 WHERE slot = 4")
    store = nvme.open()
    assert store.quarantined() == [(0, 5)]
    assert {block.slot: block.hits for block in store.stored_blocks()}[2] == 1
    assert covered(nvme, store, keys)


def test_of_two_slots_with_one_key_a_rebuild_keeps_one(nvme, clock) -> None:
    store = nvme.open(clock=clock)
    assert store.write_blocks([nvme.item(1, "a")]) == [None]
    store.discard(0, [1])
    clock.now += 1
    assert store.write_blocks([nvme.item(2, "a")]) == [None]
    store.close(60.0)
    (nvme.directory / "manifest.sqlite").unlink()
    assert nvme.stored(nvme.open()) == {(0, 2): nvme.key("a")}


def test_blocks_from_before_a_reset_never_come_back_not_even_from_their_headers(nvme) -> None:
    store = nvme.open()
    nvme.fill(store)
    store.clear()
    assert store.stored_blocks() == []
    assert store.write_blocks([nvme.item(1, "new")]) == [None]
    store.close(60.0)
    (nvme.directory / "manifest.sqlite").unlink()
    assert nvme.stored(nvme.open()) == {(0, 1): nvme.key("new")}


def test_a_reset_that_was_interrupted_before_the_rows_were_deleted_is_finished_at_the_next_start(nvme, monkeypatch) -> None:
    store = nvme.open()
    nvme.fill(store)

    def crash(digest: bytes) -> None:
        raise TransferError("killed here")

    monkeypatch.setattr(store._manifest, "clear", crash)
    with pytest.raises(TransferError, match="killed here"):
        store.clear()
    assert nvme.reopen().stored_blocks() == []


def test_a_reset_that_cannot_be_written_down_is_an_error_and_still_serves_nothing_old(nvme, monkeypatch) -> None:
    store = nvme.open()
    keys = nvme.fill(store)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store._home, "start_generation", full)
    with pytest.raises(TransferError, match="reset could not be written down"):
        store.clear()
    monkeypatch.undo()
    with pytest.raises(TransferError, match="no block"):
        nvme.read(store, 0, 0, keys[0, 0])
    store.clear()
    assert nvme.reopen().stored_blocks() == []


def test_a_rebuild_that_is_interrupted_is_done_again(nvme, monkeypatch) -> None:
    keys = nvme.fill(nvme.open())
    nvme.stores[-1].close(60.0)
    nvme.sql("DELETE FROM blocks WHERE slot > 2")

    def crash(source: object, target: object) -> None:
        raise OSError(errno.EIO, "killed here")

    monkeypatch.setattr(store_open.os, "replace", crash)
    with pytest.raises(ConfigError, match="killed here"):
        nvme.open()
    monkeypatch.undo()
    store = nvme.open()
    assert nvme.stored(store) == keys
    assert not [entry.name for entry in nvme.directory.iterdir() if ".tmp" in entry.name]


def test_random_flipped_bits_in_the_manifest_never_serve_a_wrong_block_and_never_lose_one_silently(nvme, tmp_path) -> None:
    store = nvme.open()
    keys = nvme.fill(store, 0) | nvme.fill(store, 1)
    store.close(60.0)
    sound = (nvme.directory / "manifest.sqlite").read_bytes()
    choice = np.random.default_rng(3)
    rebuilt = 0
    for position in [*range(0, 108, 7), *choice.integers(0, len(sound), 30)]:  # SQLite's own header, then anywhere
        damaged = bytearray(sound)
        damaged[position] ^= 1 << int(choice.integers(0, 8))
        (nvme.directory / "manifest.sqlite").write_bytes(damaged)
        store = nvme.open()
        assert covered(nvme, store, keys), f"byte {position}"
        rebuilt += store.stats().recovered_rows > 0
        store.close(60.0)
    assert rebuilt > 5


def test_a_killed_process_leaves_a_log_whose_damage_costs_no_block(nvme, tmp_path) -> None:
    store = nvme.open()
    nvme.fill(store)
    store.close(60.0)
    store = nvme.open()
    store.discard(0, [0])
    assert store.write_blocks([nvme.item(1, "new 1"), nvme.item(2, "new 2")]) == [None, None]
    keys = nvme.stored(store)
    copy = tmp_path / "killed"
    shutil.copytree(nvme.directory, copy)
    log = copy / "manifest.sqlite-wal"
    assert log.stat().st_size > 0
    content, database = log.read_bytes(), (copy / "manifest.sqlite").read_bytes()
    nvme.directory = copy
    for position in range(20, len(content), 2503):
        damaged = bytearray(content)
        damaged[position] ^= 4
        (copy / "manifest.sqlite").write_bytes(database)
        (copy / "manifest.sqlite-shm").unlink(missing_ok=True)
        log.write_bytes(damaged)
        store = nvme.open()
        stored = nvme.stored(store)
        assert {place: key for place, key in stored.items() if place != (0, 0)} == keys  # a discarded block may come back: it is right
        assert all(nvme.reads_right(store, *place, key) for place, key in stored.items())
        store.close(60.0)

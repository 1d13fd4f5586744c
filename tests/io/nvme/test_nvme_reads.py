"""What ``read_block`` serves: the right bytes of a stored block, or an error. Nothing else."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults


def test_every_block_reads_back_in_both_groups(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store, 0) | nvme.fill(store, 1)
    assert nvme.stored(store) == keys
    for (group, slot), key in keys.items():
        assert nvme.reads_right(store, group, slot, key)
    stats = store.stats()
    assert (stats.read_blocks, stats.written_blocks, stats.stored_blocks) == (16, 16, 16)
    assert stats.read_bytes == stats.written_bytes == 8 * (8192 + 5000)


def test_a_flipped_bit_is_never_served_and_is_counted(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    for part, position in ((0, 100), (4096, 17)):
        slot = 3 if part else 5
        nvme.flip(nvme.slab(), nvme.geometries[0].offset(slot) + part + position)
        with pytest.raises(CorruptBlock, match=f"group 0, slot {slot}"):
            nvme.read(store, 0, slot, keys[0, slot])
    assert store.stats().checksum_failures == 2
    assert nvme.reads_right(store, 0, 4, keys[0, 4])


def test_a_quarantined_slot_is_never_served_and_never_written_and_stays_so_over_a_restart(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    store.quarantine(0, 3, "flipped bit")
    store.quarantine(0, 3, "again")
    for _ in range(2):
        assert store.quarantined() == [(0, 3)]
        assert (0, 3) not in nvme.stored(store)
        assert len(nvme.stored(store)) == 7
        with pytest.raises(TransferError, match="slot 3: the slot is quarantined"):
            nvme.read(store, 0, 3, keys[0, 3])
        [error] = store.write_blocks([nvme.item(3, "new")])
        assert isinstance(error, TransferError)
        assert "quarantined" in str(error)
        store.discard(0, [3])
        assert store.stats().quarantined_slots == 1
        assert store.stats().stored_blocks == 7
        store = nvme.reopen()
    store.clear()
    assert nvme.reopen().quarantined() == [(0, 3)]


def test_the_bytes_of_a_quarantined_slot_stay_for_inspection(nvme) -> None:
    store = nvme.open()
    nvme.fill(store)
    before = nvme.slab().read_bytes()
    store.quarantine(0, 3, "flipped bit")
    store.write_blocks([nvme.item(3, "new")])
    store.discard(0, [3])
    nvme.reopen()
    assert nvme.slab().read_bytes() == before


def test_quarantine_of_a_slot_without_a_block_does_nothing(nvme) -> None:
    store = nvme.open()
    store.quarantine(0, 3, "read failed after a reset")
    assert store.quarantined() == []
    assert store.write_blocks([nvme.item(3, "new")]) == [None]


def test_a_quarantine_that_cannot_be_saved_holds_at_once_and_is_saved_later(nvme, monkeypatch, clock) -> None:
    store = nvme.open(clock=clock)
    keys = nvme.fill(store)
    real = store._manifest.quarantine

    def failing(entries: object) -> None:
        raise TransferError("database or disk is full")

    monkeypatch.setattr(store._manifest, "quarantine", failing)
    store.quarantine(0, 3, "flipped bit")
    assert store.quarantined() == [(0, 3)]
    assert (0, 3) not in nvme.stored(store)
    assert (store.stats().stored_blocks, store.stats().quarantined_slots) == (7, 1)
    with pytest.raises(TransferError, match="quarantined"):
        nvme.read(store, 0, 3, keys[0, 3])
    assert not store.accepts_writes
    clock.now += 31
    assert "disk is full" in str(store.write_blocks([nvme.item(4, "new")])[0])
    monkeypatch.setattr(store._manifest, "quarantine", real)
    clock.now += 61
    assert store.write_blocks([nvme.item(4, "new")]) == [None]
    store = nvme.reopen()
    assert store.quarantined() == [(0, 3)]


def test_a_read_of_something_that_is_not_there_is_an_error(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store, slots=[1, 2])
    with pytest.raises(TransferError, match="no block is stored"):
        nvme.read(store, 0, 5, keys[0, 1])
    with pytest.raises(TransferError, match="holds the block"):
        nvme.read(store, 0, 1, keys[0, 2])
    store.discard(0, [1])
    with pytest.raises(TransferError, match="no block is stored"):
        nvme.read(store, 0, 1, keys[0, 1])
    for group, slot in ((0, 8), (0, -1), (2, 0), (-1, 0)):
        with pytest.raises(TransferError, match=r"counted from 0|groups 0\.\.1"):
            store.read_block(group, slot, keys[0, 2], np.empty(8192, np.uint8))
    assert store.stats().read_errors == 0


@pytest.mark.parametrize("out", [np.empty(8191, np.uint8), np.empty(8192, np.int8), np.empty((2, 4096), np.uint8),
                                 np.empty(16384, np.uint8)[::2], np.frombuffer(bytes(8192), np.uint8)])
def test_a_buffer_that_does_not_fit_is_an_error_that_names_both_sizes(nvme, out: np.ndarray) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    with pytest.raises(TransferError, match=r"cannot read into .*8192"):
        store.read_block(0, 0, keys[0, 0], out)


@pytest.mark.parametrize("out", [np.empty(8191, np.uint8), np.empty(4999, np.uint8), np.empty(5000, np.uint8), np.empty(8192, np.int8),
                                 np.empty(16384, np.uint8)[::2], np.frombuffer(bytes(8192), np.uint8)])
def test_read_ahead_takes_whole_rows_only(nvme, out: np.ndarray) -> None:
    store = nvme.open()
    nvme.fill(store, 1)
    good = np.zeros(8192, np.uint8)
    with pytest.raises(TransferError, match=r"8192"):
        store.read_ahead(1, 0, [good, out])
    assert not good.any(), "nothing was read"
    for first, count in ((-1, 2), (7, 2), (8, 1)):
        with pytest.raises(TransferError, match="counted from 0"):
            store.read_ahead(1, first, [good] * count)


def test_a_failed_read_is_a_transfer_error_and_the_next_one_goes_through(nvme) -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=1, errno=errno.EIO)])
    store = nvme.open(faults=faults)
    keys = nvme.fill(store)
    with pytest.raises(TransferError, match=r"read failed.*Input/output error") as caught:
        nvme.read(store, 0, 0, keys[0, 0])
    assert not isinstance(caught.value, CorruptBlock)
    assert nvme.reads_right(store, 0, 0, keys[0, 0])
    assert store.stats().read_errors == 1
    assert store.accepts_writes


@pytest.mark.parametrize("operation", [FaultOperation.READ, FaultOperation.WRITE])
def test_a_bit_flipped_on_the_way_is_never_served(nvme, operation: FaultOperation) -> None:
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, operation, count=1)])
    store = nvme.open(faults=faults)
    items = [nvme.item(slot, slot) for slot in range(4)]
    originals = [item.data.copy() for item in items]
    assert store.write_blocks(items) == [None] * 4
    assert all(np.array_equal(item.data, original) for item, original in zip(items, originals, strict=True))
    with pytest.raises(CorruptBlock):
        nvme.read(store, 0, 0, items[0].key)
    assert all(nvme.reads_right(store, 0, item.slot, item.key) for item in items[1:])
    assert faults.counts() == {f"nvme.{operation.value}.bit_flip": 1}


def test_a_slab_truncated_under_a_running_store_gives_errors_and_the_store_goes_on(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    os.truncate(nvme.slab(), nvme.geometries[0].offset(4) + 5000)
    with pytest.raises(TransferError, match="short read"):
        nvme.read(store, 0, 4, keys[0, 4])
    assert nvme.reads_right(store, 0, 3, keys[0, 3])
    assert store.write_blocks([nvme.item(6, "new")]) == [None]
    assert nvme.reads_right(store, 0, 6, nvme.key("new"))


def test_a_block_discarded_while_it_was_read_is_not_served(nvme, monkeypatch) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    slab = store._slabs[0]
    real = slab.read

    def overtaken(slot: int, key: bytes, out: np.ndarray) -> None:
        real(slot, key, out)
        store.discard(0, [slot])

    monkeypatch.setattr(slab, "read", overtaken)
    with pytest.raises(TransferError, match="no block is stored"):
        nvme.read(store, 0, 0, keys[0, 0])


def test_a_block_reset_while_it_was_read_is_neither_served_nor_counted_as_corrupt(nvme, monkeypatch) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    slab = store._slabs[0]
    real = slab.read

    def overtaken(slot: int, key: bytes, out: np.ndarray) -> None:
        store.clear()
        real(slot, key, out)

    monkeypatch.setattr(slab, "read", overtaken)
    with pytest.raises(TransferError, match="no block is stored") as caught:
        nvme.read(store, 0, 0, keys[0, 0])
    assert not isinstance(caught.value, CorruptBlock)
    assert store.stats().checksum_failures == 0


def test_hits_are_counted_over_restarts(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    for _ in range(3):
        nvme.read(store, 0, 2, keys[0, 2])
    assert {block.slot: block.hits for block in store.stored_blocks()}[2] == 3
    store = nvme.reopen()
    nvme.read(store, 0, 2, keys[0, 2])
    store.write_blocks([nvme.item(7, "new")])
    assert {block.slot: block.hits for block in store.stored_blocks()}[2] == 4
    assert {block.slot: block.hits for block in nvme.reopen().stored_blocks()}[2] == 4


def test_many_threads_read_and_one_writes_and_every_served_block_is_right(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    stop = threading.Event()
    wrong: list[object] = []

    def reader(seed: int) -> None:
        out = aligned_buffer(8192)
        choice = np.random.default_rng(seed)
        while not stop.is_set():
            slot = int(choice.integers(0, 4))  # the writer only touches the others
            store.read_block(0, slot, keys[0, slot], out)
            if not np.array_equal(out, nvme.content(keys[0, slot])):
                wrong.append(slot)

    def run(seed: int) -> None:
        try:
            reader(seed)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for round_number in range(40):
        items = [nvme.item(slot, (round_number, slot)) for slot in range(4, 8)]
        assert store.write_blocks(items) == [None] * 4
        store.discard(0, [4])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    for slot in range(5, 8):
        assert nvme.reads_right(store, 0, slot, nvme.key((39, slot)))


def test_several_threads_find_the_same_damage_and_quarantine_it_once(nvme, caplog) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    nvme.flip(nvme.slab(), nvme.geometries[0].offset(3) + 5000)

    def work() -> None:
        try:
            nvme.read(store, 0, 3, keys[0, 3])
        except CorruptBlock as error:
            store.quarantine(0, 3, str(error))
        except TransferError:
            pass  # another thread was first

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.quarantined() == [(0, 3)]
    assert caplog.text.count("is quarantined") == 1
    assert store.stats().quarantined_slots == 1

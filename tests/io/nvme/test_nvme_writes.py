"""How blocks get in: row after data, deletion before overwriting, and a drive that refuses is left alone for a while."""

from __future__ import annotations

import errno
import logging
import threading

import numpy as np
import pytest

from kvtier.errors import TransferError
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.store_messages import BlockWrite
from kvtier.io.write_pause import FIRST_SECONDS, LONGEST_SECONDS
from kvtier.pools.nvme_geometry import NvmeGeometry


@pytest.fixture
def trace(monkeypatch):
    """Records deletions, writes and row commits of a store in their order."""
    def attach(store) -> list[tuple[str, list[int]]]:
        events: list[tuple[str, list[int]]] = []
        delete, put = store._manifest.delete, store._manifest.put
        file, stride = store._slabs[0].file, store._slabs[0].geometry.stride
        write = file.write

        def traced_delete(places) -> int:
            places = list(places)
            events.append(("delete", [slot for _, slot in places if store._manifest.row(0, slot)]))
            return delete(places)

        def traced_put(rows, hits=None) -> None:
            events.append(("put", [row.slot for row in rows]))
            put(rows, hits)

        def traced_write(offset: int, buffers) -> None:
            slots = list(range(offset // stride, (offset + sum(buffer.nbytes for buffer in buffers)) // stride))
            assert all(store._manifest.row(0, slot) is None for slot in slots), "a slot is overwritten while its old row is still there"
            events.append(("write", slots))
            write(offset, buffers)

        monkeypatch.setattr(store._manifest, "delete", traced_delete)
        monkeypatch.setattr(store._manifest, "put", traced_put)
        monkeypatch.setattr(file, "write", traced_write)
        return events
    return attach


def hold(place, verb: str) -> tuple[threading.Event, threading.Event]:
    """The next calls of ``place.verb`` do nothing until the second event is set; the first one says that there is such a call."""
    real = getattr(place, verb)
    begun, goes_on = threading.Event(), threading.Event()

    def held(*arguments) -> None:
        begun.set()
        assert goes_on.wait(60.0)
        real(*arguments)

    setattr(place, verb, held)
    return begun, goes_on


def test_old_rows_go_before_and_new_rows_come_after_the_data(nvme, trace) -> None:
    store = nvme.open()
    nvme.fill(store, slots=[0, 1])
    events = trace(store)
    store.write_blocks([nvme.item(1, "b"), nvme.item(2, "c")])
    assert events == [("delete", [1]), ("write", [1, 2]), ("put", [1, 2])]


def test_two_blocks_for_one_slot_in_one_call_leave_the_later_one(nvme, trace) -> None:
    store = nvme.open()
    events = trace(store)
    assert store.write_blocks([nvme.item(1, "a"), nvme.item(2, "b"), nvme.item(1, "c")]) == [None] * 3
    assert events == [("delete", []), ("write", [1, 2]), ("put", [1, 2]),
                      ("delete", [1]), ("write", [1]), ("put", [1])]
    assert nvme.reads_right(store, 0, 1, nvme.key("c"))


def test_an_overwritten_block_is_gone_and_the_new_one_is_there(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    assert store.write_blocks([nvme.item(3, "new", priority=80, expiry=9.5)]) == [None]
    with pytest.raises(TransferError):
        nvme.read(store, 0, 3, keys[0, 3])
    for restarted in (False, True):
        store = nvme.reopen() if restarted else store
        assert nvme.reads_right(store, 0, 3, nvme.key("new"))
        [block] = [block for block in store.stored_blocks() if block.slot == 3]
        assert (block.key, block.priority, block.expiry, block.group) == (nvme.key("new"), 80, 9.5, 0)


def test_a_padded_aligned_row_is_written_in_place_and_any_other_buffer_gives_the_same_bytes(nvme) -> None:
    store = nvme.open()
    for group in (0, 1):
        geometry, key = nvme.geometries[group], nvme.key("x")
        block = nvme.content(key, group)
        row = aligned_buffer(geometry.payload_bytes)
        row[:] = 99
        row[:geometry.block_bytes] = block
        odd = np.empty(geometry.block_bytes + 1, np.uint8)[1:]
        odd[:] = block
        odd.setflags(write=False)
        assert store.write_blocks([BlockWrite(group, 0, key, row, 35, 0.0), BlockWrite(group, 1, key, row[:geometry.block_bytes], 35, 0.0),
                                   BlockWrite(group, 2, key, odd, 35, 0.0)]) == [None] * 3
        for slot in range(3):
            assert nvme.reads_right(store, group, slot, key)


def test_a_malformed_item_is_refused_by_itself_and_the_others_are_stored(nvme) -> None:
    store = nvme.open()
    good = nvme.item(0, "a")
    bad = [BlockWrite(0, 8, good.key, good.data, 35, 0.0), BlockWrite(2, 0, good.key, good.data, 35, 0.0),
           BlockWrite(0, -1, good.key, good.data, 35, 0.0), BlockWrite(0, 1, b"short", good.data, 35, 0.0),
           BlockWrite(0, 1, good.key, good.data[:-1], 35, 0.0), BlockWrite(0, 1, good.key, good.data.astype(np.int16), 35, 0.0),
           BlockWrite(0, 1, good.key, np.zeros(16384, np.uint8)[::2], 35, 0.0), BlockWrite(0, 1, good.key, good.data, 35, float("nan")),
           BlockWrite(0, 1, good.key, good.data, 1 << 40, 0.0)]
    errors = store.write_blocks([*bad, good])
    assert all(isinstance(error, TransferError) for error in errors[:-1])
    assert errors[-1] is None
    for error, named in zip(errors, ["slot 8", "group 2", "slot -1", "5 bytes", "8191", "int16", "strided", "expiry=nan", "priority="],
                            strict=False):
        assert named in str(error)
    assert list(nvme.stored(store)) == [(0, 0)]
    assert store.accepts_writes


def test_a_negative_zero_as_expiry_survives_a_restart(nvme) -> None:
    store = nvme.open()
    assert store.write_blocks([nvme.item(0, "a", expiry=-0.0), nvme.item(1, "b", expiry=1e300)]) == [None, None]
    store = nvme.reopen()
    assert len(store.stored_blocks()) == 2
    assert store.stats().dropped_rows == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_drive_that_refuses_pauses_stores_with_one_warning_and_reads_go_on_and_it_recovers(nvme, clock, caplog, number: int) -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=3, errno=number)])
    store = nvme.open(clock=clock)
    keys = nvme.fill(store)
    store = nvme.reopen(clock=clock, faults=faults)
    assert store.accepts_writes
    with caplog.at_level(logging.INFO):
        [error, shed] = store.write_blocks([nvme.item(0, "a"), nvme.item(1, "b")])
        assert isinstance(error, TransferError)
        assert isinstance(shed, TransferError)
        pause = FIRST_SECONDS
        for _ in range(2):
            assert not store.accepts_writes
            clock.now += pause - 1
            assert "takes no blocks" in str(store.write_blocks([nvme.item(0, "a")])[0])
            assert not store.accepts_writes
            clock.now += 1
            assert store.accepts_writes
            assert "injected" in str(store.write_blocks([nvme.item(0, "a")])[0])
            pause *= 2  # it failed again: the next pause is longer
        assert nvme.reads_right(store, 0, 5, keys[0, 5])
        assert (0, 0) not in nvme.stored(store)
        clock.now += pause
        assert store.write_blocks([nvme.item(0, "a")]) == [None]
    assert store.accepts_writes
    assert nvme.reads_right(store, 0, 0, nvme.key("a"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if "no new blocks are stored" in text]) == 1
    assert len([text for text in warnings if "storing blocks again" in text]) == 1
    assert store.stats().write_pauses == 3
    assert store.stats().write_errors == 2 + 2 * 2


def test_pauses_grow_up_to_a_limit_and_start_over_after_a_success(nvme, clock) -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=8)])
    store = nvme.open(clock=clock, faults=faults)
    lengths = []
    for _ in range(8):
        assert store.write_blocks([nvme.item(0, "a")]) != [None]
        start = clock.now
        while not store.accepts_writes:
            clock.now += 10
        lengths.append(clock.now - start)
    assert lengths == [30, 60, 120, 240, 480, LONGEST_SECONDS, LONGEST_SECONDS, LONGEST_SECONDS]
    assert store.write_blocks([nvme.item(0, "a")]) == [None]
    store._pause.failed("again")
    assert store._pause.remaining() == FIRST_SECONDS


def test_a_clock_that_is_set_back_does_not_stretch_the_pause(nvme, clock) -> None:
    store = nvme.open(clock=clock, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=1)]))
    store.write_blocks([nvme.item(0, "a")])
    assert not store.accepts_writes
    clock.now -= 100_000
    assert store.accepts_writes


def test_blocks_complete_before_the_failure_are_stored(nvme) -> None:
    nvme.geometries[0] = NvmeGeometry(8192, 64)
    store = nvme.open()
    file, stride = store._slabs[0].file, store._slabs[0].geometry.stride
    real, calls = file.write, []

    def one_fails(offset: int, buffers) -> None:
        calls.append(offset // stride)
        if offset == 4 * stride:
            raise OSError(errno.EIO, "Input/output error")
        real(offset, buffers)

    file.write = one_fails
    slots = list(range(0, 64, 2))  # no neighbours: a call for each
    errors = store.write_blocks([nvme.item(slot, slot) for slot in slots])
    stored = [slot for slot, error in zip(slots, errors, strict=True) if error is None]
    assert stored[:2] == [0, 2]
    assert 4 not in stored
    assert len(calls) < 16, "writing went on after the failure"
    assert all("Input/output error" in str(error) for error in errors if error is not None)
    assert not store.accepts_writes
    assert sorted(nvme.stored(store)) == [(0, slot) for slot in stored]
    store = nvme.reopen()
    assert all(nvme.reads_right(store, 0, slot, nvme.key(slot)) for slot in stored)


def test_neighbouring_slots_travel_in_one_call_whatever_the_order_they_come_in(nvme, trace) -> None:
    store = nvme.open()
    events = trace(store)
    items = [nvme.item(slot, slot) for slot in (5, 2, 7, 1, 6)]
    assert store.write_blocks(items) == [None] * 5
    assert sorted(slots for verb, slots in events if verb == "write") == [[1, 2], [5, 6, 7]]
    assert all(nvme.reads_right(store, 0, slot, nvme.key(slot)) for slot in (5, 2, 7, 1, 6))


def test_blocks_that_do_not_fill_their_slots_are_written_one_by_one(nvme) -> None:
    store = nvme.open()
    assert store.write_blocks([nvme.item(slot, slot, group=1) for slot in range(8)]) == [None] * 8
    assert all(nvme.reads_right(store, 1, slot, nvme.key(slot)) for slot in range(8))


def test_a_slot_whose_write_failed_holds_no_block(nvme, clock) -> None:
    store = nvme.open(clock=clock)
    keys = nvme.fill(store)
    store = nvme.reopen(clock=clock, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE)]))
    store.write_blocks([nvme.item(3, "new")])
    for restarted in (False, True):
        store = nvme.reopen() if restarted else store
        assert (0, 3) not in nvme.stored(store)
        with pytest.raises(TransferError, match="no block"):
            nvme.read(store, 0, 3, keys[0, 3])
        assert store.quarantined() == []


@pytest.mark.parametrize("step", ["delete", "put"])
def test_an_index_that_cannot_commit_is_an_error_for_the_batch_and_the_block_is_not_there(nvme, clock, monkeypatch, step: str) -> None:
    store = nvme.open(clock=clock)
    keys = nvme.fill(store)

    def failing(*arguments: object) -> None:
        raise TransferError("database or disk is full")

    monkeypatch.setattr(store._manifest, step, failing)
    errors = store.write_blocks([nvme.item(0, "a"), nvme.item(1, "b")])
    monkeypatch.undo()
    assert all("disk is full" in str(error) for error in errors)
    assert not store.accepts_writes
    old_survives = step == "delete"  # nothing was overwritten yet
    assert ((0, 0) in nvme.stored(store)) == old_survives
    if old_survives:
        assert nvme.reads_right(store, 0, 0, keys[0, 0])
    clock.now += 31
    assert store.write_blocks([nvme.item(0, "a")]) == [None]
    assert nvme.reads_right(nvme.reopen(), 0, 0, nvme.key("a"))


def test_with_sync_the_data_is_made_durable_between_writing_and_the_row(nvme, trace, monkeypatch) -> None:
    store = nvme.open(sync=True)
    events = trace(store)
    real = store._slabs[0].file.sync
    monkeypatch.setattr(store._slabs[0].file, "sync", lambda: (events.append(("sync", [])), real()))
    assert store.write_blocks([nvme.item(1, "a")]) == [None]
    assert [name for name, _ in events] == ["delete", "write", "sync", "put"]


def test_discarded_blocks_are_gone_and_their_slots_can_be_used_again(nvme) -> None:
    store = nvme.open()
    nvme.fill(store)
    store.discard(0, [1, 2, 2])
    store.discard(0, [2, 7_000])
    assert sorted(nvme.stored(store)) == [(0, slot) for slot in (0, 3, 4, 5, 6, 7)]
    assert store.write_blocks([nvme.item(1, "new")]) == [None]
    assert sorted(nvme.stored(nvme.reopen())) == [(0, slot) for slot in (0, 1, 3, 4, 5, 6, 7)]


def test_a_closed_store_refuses_everything_and_close_is_idempotent(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    assert store.close(60.0)
    assert store.close(60.0)
    assert not store.accepts_writes
    with pytest.raises(TransferError, match="closed"):
        nvme.read(store, 0, 0, keys[0, 0])
    assert all("closed" in str(error) for error in store.write_blocks([nvme.item(0, "a"), nvme.item(1, "b")]))
    with pytest.raises(TransferError, match="closed"):
        store.discard(0, [1])
    with pytest.raises(TransferError, match="closed"):
        store.clear()
    store.quarantine(0, 1, "too late")
    assert len(nvme.open().stored_blocks()) == 8


def test_close_waits_for_a_running_read_but_not_for_ever_and_can_be_repeated(nvme) -> None:
    store = nvme.open()
    keys = nvme.fill(store)
    begun, goes_on = hold(store._slabs[0], "read")
    served: list[bool] = []
    thread = threading.Thread(target=lambda: served.append(nvme.reads_right(store, 0, 0, keys[0, 0])))
    thread.start()
    assert begun.wait(60.0)
    assert not store.close(timeout=0.05)
    assert served == [], "closing was over before the read was"
    threading.Timer(0.05, goes_on.set).start()
    assert store.close(timeout=60.0)
    assert goes_on.is_set()
    thread.join()
    assert served == [True]


def test_a_reset_waits_for_a_running_batch_and_leaves_nothing_of_it(nvme) -> None:
    store = nvme.open()
    begun, goes_on = hold(store._slabs[0].file, "write")
    thread = threading.Thread(target=store.write_blocks, args=([nvme.item(slot, slot) for slot in range(4)],))
    thread.start()
    assert begun.wait(60.0)
    threading.Timer(0.05, goes_on.set).start()
    store.clear()
    assert goes_on.is_set()
    thread.join()
    assert store.stored_blocks() == []
    assert store.write_blocks([nvme.item(0, "a")]) == [None]
    assert nvme.reads_right(store, 0, 0, nvme.key("a"))

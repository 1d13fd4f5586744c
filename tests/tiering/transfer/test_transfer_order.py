"""The order of Moves: every read after the slot's last write, every write after its last write and its reads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.errors import TransferError
from kvtier.io import cpu_stream
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import PRIMARY, SECONDARY, pool_index

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))
SLOW = Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.02)])

Make = Callable[..., Any]


def test_case_G1_offload_then_onboard_then_offload_gives_zeros(make_rig: Make) -> None:
    rig = make_rig(faults=SLOW)
    rig.fill(P[0], 0)
    rig.fill(S[0], 1)
    rig.transfers.issue([rig.move(P[0], S[0])])
    rig.transfers.issue([rig.move(S[0], P[0])])
    assert rig.transfers.order_before_engine(None, 0, [P[0], S[0]], 10.0)
    rig.transfers.issue([rig.move(P[0], S[0])])
    assert all(result.error is None for result in rig.settle().values())
    assert rig.value(S[0]) == 0


def test_a_read_after_a_write_sees_what_was_written(make_rig: Make) -> None:
    rig = make_rig(faults=SLOW)
    rig.fill(P[0], 5)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], P[1]), rig.move(P[1], S[1])])
    rig.settle()
    assert rig.value(S[1]) == 5


def test_a_slot_is_overwritten_by_a_copy_only_after_its_pending_copy_read(make_rig: Make) -> None:
    """The offload of a slot is slow; the onboard into the same slot, on the other stream, must not overtake it."""
    rig = make_rig(faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.05, count=1)]))
    rig.fill(P[0], 5)
    rig.fill(S[1], 6)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[1], P[0])])
    rig.settle()
    assert (rig.value(S[0]), rig.value(P[0])) == (5, 6)


def test_a_slot_is_overwritten_only_after_its_pending_file_write(make_rig: Make) -> None:
    rig = make_rig()
    rig.fill(P[0], 9)
    rig.fill(S[0], 5)
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(S[0], N[0]), rig.move(P[0], S[0]), rig.move(P[0], S[1])])
    assert rig.transfers.wait(0, [S[1]], 10.0)  # what is independent goes ahead
    assert (rig.value(S[0]), rig.value(S[1])) == (5, 9)
    rig.store.write_gate.set()
    rig.settle()
    assert (rig.value(N[0]), rig.value(S[0])) == (5, 9)


def test_two_writes_of_one_slot_end_with_the_later_one(make_rig: Make) -> None:
    rig = make_rig(faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.05, count=1)]))
    rig.fill(P[0], 5)
    rig.fill(S[1], 6)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[1], S[0]), rig.move(S[0], P[3])])
    rig.settle()
    assert (rig.value(S[0]), rig.value(P[3])) == (6, 6)


def test_a_file_write_waits_for_the_copy_into_its_source(make_rig: Make) -> None:
    rig = make_rig(faults=SLOW)
    rig.fill(P[0], 5)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], N[0])])
    rig.settle()
    assert rig.value(N[0]) == 5


def test_a_file_read_waits_for_the_file_write_of_its_source(make_rig: Make) -> None:
    rig = make_rig()
    rig.fill(S[0], 5)
    rig.store.largest_pause = 0.02
    rig.transfers.issue([rig.move(S[0], N[0]), rig.move(N[0], P[0])])
    rig.settle()
    assert rig.value(P[0]) == 5


@pytest.mark.parametrize("level", [PRIMARY, SECONDARY])
def test_what_depends_on_a_file_read_is_held_back_and_the_rest_goes_ahead(make_rig: Make, until: Make, level: int) -> None:
    rig = make_rig()
    here, there = (P, S) if level == PRIMARY else (S, P)
    rig.fill(N[0], 5)
    rig.fill(P[1], 6)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], here[0]), rig.move(here[0], there[4]), rig.move(there[4], here[5]),
                         rig.move(P[1], S[1])])
    until(lambda: [result.move.source for result in rig.results + rig.transfers.drain()] == [P[1]])
    assert rig.value(S[1]) == 6
    for index in (here[0], there[4], here[5]):
        assert rig.transfers.pending_files(0, [index])
    assert not rig.transfers.pending_files(0, [P[1], S[1]])
    rig.store.read_gate.set()
    rig.settle()
    assert [rig.value(index) for index in (here[0], there[4], here[5])] == [5, 5, 5]
    assert not rig.transfers.pending_files(0, [*P, *S, *N])


def test_no_stream_is_given_anything_that_waits_for_a_file(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.io.cpu_stream import CpuStream
    rig = make_rig()
    rig.fill(N[0], 5)
    rig.store.read_gate.clear()
    submitted: list[str] = []
    submit = CpuStream.submit

    def spy(self: CpuStream, *arguments: Any, **keywords: Any) -> Any:
        submitted.append(self.name)
        return submit(self, *arguments, **keywords)

    monkeypatch.setattr(CpuStream, "submit", spy)
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(P[0], S[0]), rig.move(S[1], P[0])])
    time.sleep(0.05)
    assert submitted == []
    rig.store.read_gate.set()
    rig.settle()
    assert submitted == ["onboard", "offload", "onboard"]


def test_independent_copies_of_one_call_share_one_piece_of_work(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tiering.copy_batch import CopyBatch
    rig = make_rig()
    batches: list[int] = []
    run = CopyBatch.run

    def spy(self: CopyBatch, number: int) -> None:
        batches.append(len(self.nodes))
        run(self, number)

    monkeypatch.setattr(CopyBatch, "run", spy)
    rig.transfers.issue([rig.move(P[slot], S[slot]) for slot in range(6)])
    rig.settle()
    assert batches == [6]
    batches.clear()
    # the second needs the first, so it cannot share its work; nor can a partial copy share that of whole ones
    rig.transfers.issue([rig.move(P[0], P[1]), rig.move(P[1], P[2]), rig.move(P[3], P[4], num_tokens=2)])
    rig.settle()
    assert sorted(batches) == [1, 1, 1]
    batches.clear()
    # partial copies of as many tokens share theirs
    rig.transfers.issue([rig.move(P[0], P[slot], num_tokens=tokens) for slot, tokens in ((3, 2), (4, 1), (5, 2), (6, 2))])
    rig.settle()
    assert sorted(batches) == [1, 3]
    batches.clear()
    # victims and what takes their slots, in turns: two pieces of work less than Moves would be the naive count
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[1], S[1]), rig.move(S[6], P[0]), rig.move(S[7], P[1])])
    rig.settle()
    assert batches == [2, 2]


def test_a_partial_copy_waits_for_one_that_writes_its_source_and_for_one_that_writes_its_destination(make_rig: Make) -> None:
    rig = make_rig(faults=SLOW)
    for slot in range(4):
        rig.fill(P[slot], slot + 1)
    rig.transfers.issue([rig.move(P[0], P[5], num_tokens=2), rig.move(P[1], P[5], num_tokens=2),  # over the first
                         rig.move(P[5], P[6], num_tokens=1),                                      # what the second has written
                         rig.move(P[2], P[5]), rig.move(P[5], P[7], num_tokens=2)])               # and what a whole copy has
    assert all(result.error is None for result in rig.settle().values())
    first, second, third = ([rig.rows(PRIMARY)[slot].reshape(-1, 4, 32)[:, :tokens] for slot, tokens in ((5, 4), (6, 1), (7, 2))])
    assert (first == 3).all()
    assert (second == 2).all()
    assert (third == 3).all()


def test_issuing_lets_the_copying_thread_begin(make_rig: Make, until: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the thread that issued keeps the GIL, and a copy that could begin waits for it."""
    monkeypatch.setattr(cpu_stream, "_LONGEST_TURN", 10.0)
    rig = make_rig()
    streams = [rig.transfers._offload, rig.transfers._onboard]
    until(lambda: not any(stream._woken.is_done() for stream in streams))  # both sleep
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        rig.transfers.issue([rig.move(P[0], S[0])])
        rig.transfers.let_begin()
        assert all(stream._queue.empty() for stream in streams)
    finally:
        sys.setswitchinterval(interval)


def test_a_batch_ends_at_its_size_limit(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tiering import transfer
    rig = make_rig()
    monkeypatch.setattr(transfer, "MAX_BATCH_BYTES", 2 * rig.block_bytes)
    for slot in range(5):
        rig.fill(P[slot], slot)
    rig.transfers.issue([rig.move(P[slot], S[slot]) for slot in range(5)])
    rig.settle()
    assert rig.transfers._sequence == 3
    assert [rig.value(S[slot]) for slot in range(5)] == [0, 1, 2, 3, 4]


def test_groups_with_equal_slot_numbers_do_not_wait_for_each_other(make_rig: Make) -> None:
    rig = make_rig(groups=2)
    rig.fill(N[0], 5)
    rig.store.read_gate.clear()
    rig.rows(PRIMARY, group=1)[0] = 8
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(P[0], S[0], group=1)])
    assert rig.transfers.wait(1, [S[0]], 10.0)
    assert (rig.rows(SECONDARY, group=1)[0] == 8).all()
    assert not rig.transfers.pending_files(1, [P[0]])
    assert rig.transfers.pending_files(0, [P[0]])


def test_copies_of_two_groups_in_one_call_go_to_their_own_pools(make_rig: Make) -> None:
    rig = make_rig(groups=2)
    for group in range(2):
        for slot in range(3):
            rig.rows(PRIMARY, group)[slot] = 10 * group + slot
    rig.transfers.issue([rig.move(P[slot], S[slot], group=group) for slot in range(3) for group in range(2)])
    rig.settle()
    for group in range(2):
        assert rig.rows(SECONDARY, group)[:3, 0].tolist() == [10 * group, 10 * group + 1, 10 * group + 2]


def test_a_discard_waits_for_the_read_of_its_slot_and_comes_before_the_next_write(make_rig: Make) -> None:
    rig = make_rig()
    rig.store.largest_pause = 0.01
    rig.fill(N[0], 5)
    rig.fill(S[0], 7)
    rig.transfers.issue([rig.move(N[0], P[0]), rig.discard(0), rig.move(S[0], N[0])])
    results = rig.settle()
    assert rig.store.discarded == [(0, 0)]
    assert (rig.value(P[0]), rig.value(N[0])) == (5, 7)
    assert sorted(results) == [0, 2], "a discard is not reported"


def test_writes_are_handed_to_the_store_in_batches_of_at_most_64(make_rig: Make, until: Make) -> None:
    rig = make_rig(secondary=150)
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(pool_index(1, 0), N[0])])
    until(lambda: rig.store.write_batches == [1])
    rig.transfers.issue([rig.move(pool_index(1, slot), pool_index(2, slot)) for slot in range(1, 141)])
    rig.store.write_gate.set()
    rig.settle()
    assert rig.store.write_batches == [1, 64, 64, 12]


def test_two_writes_of_one_nvme_slot_are_never_in_one_batch(make_rig: Make, until: Make) -> None:
    rig = make_rig()
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(S[0], N[7])])
    until(lambda: rig.store.write_batches == [1])
    for slot in range(4):
        rig.fill(S[slot], slot)
    rig.transfers.issue([rig.discard(0), rig.move(S[1], N[0]), rig.move(S[2], N[1]), rig.discard(1), rig.move(S[3], N[1])])
    rig.store.write_gate.set()
    rig.settle()
    assert rig.store.write_batches == [1, 2, 1]
    assert (rig.value(N[0]), rig.value(N[1])) == (1, 3)


def test_reads_never_wait_behind_writes(make_rig: Make, until: Make) -> None:
    rig = make_rig()
    rig.fill(N[0], 5)
    rig.store.write_gate.clear()
    rig.transfers.issue([rig.move(S[slot], N[slot + 1]) for slot in range(4)])
    until(lambda: bool(rig.store.write_batches))
    rig.transfers.issue([rig.move(N[0], P[0])])
    assert rig.transfers.wait(0, [P[0]], 10.0)
    assert rig.value(P[0]) == 5


def test_a_partial_move_leaves_the_rest_of_the_destination(make_rig: Make) -> None:
    rig = make_rig()
    blocks = rig.pools[0].primary.tensor
    rig.fill(N[0], 0x40)
    for slot in (1, 2):
        rig.fill(P[slot], slot)
    rest = blocks[1:3, :, :, :, 3:].clone()
    rig.transfers.issue([rig.move(N[0], P[1], num_tokens=3), rig.move(P[1], P[2], num_tokens=3)])
    results = rig.settle()
    assert blocks[1:3, :, :, :, 3:].equal(rest)
    first = np.full(blocks[1, :, :, :, :3].numel() * 4, 0x40, np.uint8).view(np.float32)
    for slot in (1, 2):
        assert np.array_equal(blocks[slot, :, :, :, :3].numpy().ravel(), first)
    assert [result.num_bytes for result in results.values()] == [rig.block_bytes // 4 * 3] * 2


def test_more_reads_than_staging_buffers_do_not_deadlock(make_rig: Make) -> None:
    """Each read's copy depends on copies that depend on the read before: a buffer held by a later one would hang."""
    rig = make_rig(staging_blocks=1, read_threads=4)
    rig.store.largest_pause = 0.003
    records = []
    for slot in range(8):
        rig.fill(N[slot], slot + 1)
        records += [rig.move(N[slot], P[0]), rig.move(P[0], S[slot])]
    rig.transfers.issue(records)
    assert all(result.error is None for result in rig.settle().values())
    assert [rig.value(S[slot]) for slot in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_staging_buffers_are_bounded(make_rig: Make, until: Make) -> None:
    rig = make_rig(staging_blocks=2, read_threads=4)
    for slot in range(8):
        rig.fill(N[slot], slot)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[slot], P[slot]) for slot in range(8)])
    until(lambda: rig.store.reads_running == 2)
    time.sleep(0.02)
    assert rig.store.reads_running == 2
    rig.store.read_gate.set()
    rig.settle()
    assert [rig.value(P[slot]) for slot in range(8)] == list(range(8))


def test_an_impossible_route_is_refused_and_nothing_of_the_call_is_queued(make_rig: Make) -> None:
    bare = make_rig(with_store=False, secondary=None)
    for source, destination in ((P[0], S[0]), (P[0], N[0]), (N[0], P[0])):
        with pytest.raises(TransferError, match="no way from"):
            bare.transfers.issue([bare.move(P[1], P[2]), bare.move(source, destination)])
    with pytest.raises(TransferError, match="no NVMe store"):
        bare.transfers.issue([bare.discard(0)])
    assert bare.transfers.idle(0.0)
    assert bare.transfers.drain() == []
    rig = make_rig()
    for source, destination in ((P[0], N[0]), (N[0], N[1])):
        with pytest.raises(TransferError, match="no way from"):
            rig.transfers.issue([rig.move(source, destination)])


@pytest.mark.parametrize("seed", range(8))
def test_copies_issued_after_order_after_engine_wait_for_the_engine(make_rig: Make, cuda_device: Make, seed: int) -> None:
    device = cuda_device(seed)
    rig = make_rig(device=device)
    engine = device.stream("engine")
    runtime = device._cuda.runtime
    source = np.full(rig.block_bytes, 9, np.uint8)
    runtime.paused = True
    runtime.memcpyAsync(rig.rows(PRIMARY)[0].ctypes.data, source.ctypes.data, rig.block_bytes, 4, engine.handle)
    rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[0], P[1])])
    runtime.paused = False
    rig.settle()
    assert (rig.value(S[0]), rig.value(P[1])) == (9, 9)
    engine.close(1.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_engine_is_ordered_behind_copies_without_the_host_waiting(
        make_rig: Make, cuda_device: Make, seed: int) -> None:
    device = cuda_device(seed)
    rig = make_rig(device=device)
    engine = device.stream("engine")
    runtime = device._cuda.runtime
    rig.fill(S[0], 7)
    rig.fill(P[1], 8)
    runtime.paused = True
    for slot in (2, 3, 4):
        rig.transfers.issue([rig.move(P[5], P[slot])])
    rig.transfers.issue([rig.move(S[0], P[0]), rig.move(P[1], S[1])])
    assert rig.transfers.order_before_engine(engine, 0, [P[2], P[0], P[1], P[3]], 10.0)  # who waits for what is paused runs out of time
    seen = np.zeros(rig.block_bytes, np.uint8)
    runtime.memcpyAsync(seen.ctypes.data, rig.rows(PRIMARY)[0].ctypes.data, rig.block_bytes, 4, engine.handle)
    over = np.full(rig.block_bytes, 3, np.uint8)
    runtime.memcpyAsync(rig.rows(PRIMARY)[1].ctypes.data, over.ctypes.data, rig.block_bytes, 4, engine.handle)
    runtime.paused = False
    assert engine.synchronize(5.0)
    rig.settle()
    assert (seen == 7).all()
    assert (rig.value(S[1]), rig.value(P[1])) == (8, 3)
    engine.close(1.0)


def test_many_threads_may_issue(make_rig: Make) -> None:
    rig = make_rig(primary=64, secondary=64)
    lock = threading.Lock()

    def work(first: int) -> None:
        for slot in range(first, first + 8):
            with lock:  # the ledger's numbering
                rig.transfers.issue([rig.move(pool_index(0, slot), pool_index(1, slot))])

    threads = [threading.Thread(target=work, args=(8 * part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(rig.settle()) == 64

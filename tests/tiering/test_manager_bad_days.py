"""Reads and copies that fail, hang or come late; disks that are full: a miss or a clear error, and the rest goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

import pytest
from gate import Gate
from toy_engine import OTHER, PATIENCE, PROMPT, MakeCache, ToyEngine, WarmCache, delays, fails, tokens_of, wait_until

from kvtier import CapacityError, CorruptBlock, Level, Request, RequestError, TransferError
from kvtier.io import write_pause
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

READ, WRITE, COPY = FaultOperation.READ, FaultOperation.WRITE, FaultOperation.COPY


# -- reads that fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_before", [True, False])
def test_blocks_computed_by_an_engine_that_did_not_wait_are_lost_with_the_read(warm_cache: WarmCache, ends_before: bool) -> None:
    """Whoever shares them meanwhile is told of fewer tokens, as after a bad read of its own."""
    gate = Gate(READ, rules=[fails(READ, 3)])
    cache = warm_cache(gate=gate, primary=16)
    prompt = [*PROMPT[:12], *range(20, 29)]
    cache.add_sequence(Request(1, prompt))
    cache.mark_computed(1, len(prompt))
    cache.store_context(1)
    if ends_before:
        cache.remove_sequence(1)
    assert cache.match(prompt).reusable_blocks == 5
    shared = cache.add_sequence(Request(2, [*prompt, 30]))
    assert shared.prepopulated_tokens >= 20
    gate.open()
    assert cache.wait_ready(2) == 0
    assert cache.match(prompt).reusable_blocks == 0
    cache.verify()
    if not ends_before:
        assert cache.wait_ready(1) == 0
        cache.mark_computed(1, len(prompt))
        cache.store_context(1)
        assert cache.match(prompt).reusable_blocks == 5
        cache.verify()


def test_a_failed_read_is_a_miss_and_the_others_go_on(warm_cache: WarmCache) -> None:
    cache = warm_cache(fails(READ), primary=12)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT), Request(2, OTHER))
    valid = engine.learn(1) + engine.learn(2)
    assert valid in (12 + 8, 12 + 4, 12), "the failed block and those behind it"
    assert sorted(engine.forward([1, 2])) == [1, 2]
    engine.remove(1)
    engine.remove(2)
    stats = cache.stats()
    assert (stats.lost, stats.quarantined, stats.checksum_failures, stats.transfer_failures, stats.fallbacks) == (1, 1, 0, 1, 1)
    assert stats.hit_tokens.nvme == valid
    cache.verify()
    assert engine.serve(Request(3, PROMPT)) == 12
    assert engine.serve(Request(4, OTHER)) == 12


def test_a_lease_says_which_of_its_blocks_never_arrived(warm_cache: WarmCache) -> None:
    gate = Gate(READ, rules=[fails(READ, 3)])  # all three of PROMPT's
    cache = warm_cache(gate=gate, primary=16)
    cache.add_sequence(Request(1, PROMPT))
    with cache.pin(1) as pinned:
        reused, own = pinned.block_ids[:3], pinned.block_ids[3:]
        assert own
        gate.open()
        assert cache.wait_ready(1) == 0
        assert pinned.lost_block_ids() == reused
        cache.add_sequence(Request(2, OTHER))
        with cache.pin(2) as sound:
            assert cache.wait_ready(2) == 12
            assert sound.lost_block_ids() == []
            assert pinned.lost_block_ids(0) == reused
        with pytest.raises(RequestError, match="group=1"):
            pinned.lost_block_ids(1)
    cache.verify()


def test_a_lease_says_which_of_its_blocks_were_found_bad_on_nvme_and_their_slots_are_not_used_again(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=4)
    engine = ToyEngine(cache)
    engine.serve(Request(0, PROMPT))
    engine.serve(Request(1, OTHER))  # and PROMPT is on NVMe only, as before
    engine.admit(Request(2, PROMPT, skip_read=True))
    engine.learn(2)
    engine.forward([2])
    lease = cache.store_and_pin(2)
    cache.remove_sequence(2)
    bad = lease.block_ids[0]
    assert cache.block(bad).level == Level.NVME, "the tree had it there, and keeps it"
    cache.condemn(0, cache.block(bad).slot, CorruptBlock("as the scrubber and read_block do"))
    assert lease.lost_block_ids() == [bad]
    cache.verify()
    lease.release()
    cache.verify()


def test_a_bit_flipped_on_the_way_is_never_served(warm_cache: WarmCache) -> None:
    cache = warm_cache(FaultRule(FaultKind.BIT_FLIP, READ))
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0
    assert cache.stats().checksum_failures == 3
    assert cache.stats().hit_tokens.nvme == 0


def test_sequences_that_share_a_failed_block_are_all_told(warm_cache: WarmCache) -> None:
    gate = Gate(READ, rules=[fails(READ)])
    cache = warm_cache(gate=gate, primary=16)
    engine = ToyEngine(cache)
    # Three that share the failing block, before and after its read has begun.
    engine.admit(Request(1, PROMPT), Request(2, [*PROMPT[:12], 5, 6]))
    wait_until(lambda: gate.arrived > 0)
    engine.admit(Request(3, [*PROMPT[:9], 7]))
    assert cache.block_ids(1)[:2] == cache.block_ids(2)[:2] == cache.block_ids(3)[:2]
    gate.open()
    valid = [engine.learn(request_id) for request_id in (1, 2, 3)]
    assert max(valid) < 12
    assert valid[0] == valid[1]
    assert len({cache.block_ids(request_id)[valid[0] // 4] for request_id in (1, 2)}) == 2, "each has its own now"
    assert engine.forward([1, 2, 3]) == [1, 2, 3]
    for request_id in (1, 2, 3):
        engine.sample(request_id)
    assert engine.forward([1, 2, 3]) == [1, 2, 3]
    for request_id in (1, 2, 3):
        engine.remove(request_id)
    cache.verify()
    assert cache.stats().lost == 1


def test_a_sequence_whose_failed_block_cannot_be_replaced_is_named(warm_cache: WarmCache) -> None:
    gate = Gate(READ, rules=[fails(READ)])
    cache = warm_cache(gate=gate, primary=5)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.admit(Request(2, PROMPT))  # shares three of the four blocks: now the pool is full
    assert cache.num_free_blocks(Level.PRIMARY) == 0
    gate.open()
    wait_until(lambda: cache.is_ready(1) and cache.is_ready(2))
    assert engine.forward([1, 2]) == []
    with pytest.raises(CapacityError, match="request 1: a block that could not be read") as caught:
        engine.learn(1)
    assert caught.value.preempt == (1,)
    cache.verify()
    engine.remove(1)
    cache.verify()
    with pytest.raises(CapacityError) as caught:  # it may have been too late for this one as well
        engine.learn(2)
    assert caught.value.preempt == (2,)
    engine.remove(2)
    cache.verify()
    assert cache.num_free_blocks(Level.PRIMARY) == 5
    assert engine.serve(Request(3, PROMPT)) <= 8
    assert engine.serve(Request(4, PROMPT)) == 12


def test_what_a_sequence_lost_is_not_stored_before_it_knows(warm_cache: WarmCache) -> None:
    cache = warm_cache(FaultRule(FaultKind.FAILURE, READ))
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    wait_until(lambda: cache.is_ready(1))
    for careless in (lambda: cache.mark_computed(1, 13), lambda: cache.append_tokens(1, [5])):
        with pytest.raises(RequestError, match="request 1: a read failed and 0 of 12 reused tokens are left"):
            careless()
    engine.remove(1)
    assert engine.serve(Request(2, PROMPT)) == 0


# -- reads that come late ----------------------------------------------------------------------------------------------------


def test_a_slow_read_is_waited_for_as_long_as_asked(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.admit(Request(2, tokens_of(3, 5)))
    assert not cache.is_ready(1)
    with pytest.raises(TimeoutError, match=r"request 1: not ready after 0\.05 s"):
        cache.wait_ready(1, timeout=0.05)
    with pytest.raises(TimeoutError):
        cache.wait_ready(1, timeout=0)
    assert engine.learn(2) == 0
    assert engine.forward([1, 2]) == [2], "the others do not wait for the file"
    assert cache.stats().hit_tokens.nvme == 0
    gate.open()
    assert engine.learn(1) == 12
    assert cache.is_ready(1)
    assert engine.forward([1, 2]) == [1, 2]


async def test_ready_leaves_the_loop_free(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    cache.add_sequences([Request(1, PROMPT), Request(2, OTHER)])
    waiting = asyncio.gather(cache.ready(1), cache.ready(2, layer=1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.open()  # would never happen if the loop were not free
    assert await waiting == [12, 12]
    assert await cache.ready(1) == 12, "again, at once"


async def test_waiting_can_be_cancelled(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    waiting = asyncio.create_task(cache.ready(1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await cache.ready(1)
    gate.open()
    assert await cache.ready(1) == 12
    engine.sequences[1].computed = 12
    assert engine.forward([1]) == [1]


def test_a_sequence_may_go_while_its_reads_are_in_flight(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate, primary=4)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.remove(1)
    assert cache.num_free_blocks(Level.PRIMARY) == 1, "slots that are read into cannot be given away"
    with pytest.raises(CapacityError, match="3 primary blocks needed, 1 available of 4; try again when 3 blocks are free that a file"):
        engine.admit(Request(2, tokens_of(3, 9)))
    assert cache.stats().hit_tokens.nvme == 0
    gate.open()
    wait_until(lambda: cache.num_free_blocks(Level.PRIMARY) == 4)
    assert engine.serve(Request(2, tokens_of(3, 13))) == 0
    assert engine.serve(Request(3, PROMPT)) == 12
    cache.verify()


def test_blocks_of_a_sequence_that_went_are_reused_at_once_with_the_right_bytes(make_cache: MakeCache) -> None:
    cache = make_cache(8, 8, 0, faults=Faults([delays(COPY, 0.02)]))
    engine = ToyEngine(cache)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 13)))
    for round_number in range(6):
        # Promotions of the one are under way when its blocks go to the next.
        engine.admit(Request(1, tokens_of(round_number % 4, 13)))
        engine.remove(1)
        engine.admit(Request(2, tokens_of(100 + round_number, 13)))
        engine.admit(Request(3, tokens_of((round_number + 1) % 4, 13)))
        engine.learn(3)
        engine.learn(2)
        assert engine.forward([2, 3]) == [2, 3]
        engine.remove(2)
        engine.remove(3)
        cache.verify()


# -- copies that fail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_failed_copy_loses_only_what_it_carried(make_cache: MakeCache, count: int) -> None:
    faults = Faults([fails(COPY, count)])
    cache = make_cache(8, 8, 0, faults=faults)
    engine = ToyEngine(cache)

    def serve_all() -> None:
        for user in range(4):
            engine.serve(Request(user, tokens_of(user, 13)), answer=2)
            cache.verify()

    for _ in range(6):  # how many copies go together, and fail together, is the streams' doing
        serve_all()
        assert cache.transfers.idle(PATIENCE)
        if sum(faults.counts().values()) == count:
            break
    assert sum(faults.counts().values()) == count
    for _ in range(2):
        serve_all()
    cache.flush()
    stats = cache.stats()
    assert stats.transfer_failures >= count
    assert 1 <= stats.lost <= stats.transfer_failures
    assert stats.quarantined == 0
    assert stats.hit_tokens.secondary > 0
    assert stats.primary.free_blocks == stats.primary.max_blocks


def test_a_block_computed_again_after_a_failure_can_be_copied_again(warm_cache: WarmCache) -> None:
    cache = warm_cache(fails(READ, count=3))
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0
    engine.serve(Request(2, tokens_of(3, 29)))  # pushes it down: a copy out of the slot whose read failed
    assert engine.serve(Request(3, PROMPT)) == 12
    stats = cache.stats()
    assert (stats.transfer_failures, stats.hit_tokens.secondary) == (3, 12)


def test_a_failed_copy_does_not_condemn_the_file_it_came_from(warm_cache: WarmCache) -> None:
    cache = warm_cache(fails(COPY, count=3))
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0, "read and verified, and then it did not get into its slots"
    stats = cache.stats()
    assert (stats.transfer_failures, stats.quarantined, stats.checksum_failures) == (3, 0, 0)
    assert (stats.nvme.free_blocks, cache.store.quarantined()) == (16, [])
    assert engine.serve(Request(2, PROMPT)) == 12
    cache.verify()


def test_a_tail_whose_private_copy_failed_is_computed_again(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0, 0, faults=Faults([fails(COPY)]))
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(1, 6)))
    engine.learn(1)
    engine.forward([1])
    with cache.pin(1):
        engine.sample(1)  # a pinned block is not written: the tail is copied first, and that fails
        wait_until(lambda: cache.stats().lost == 1)
        assert engine.forward([1]) == []
        assert engine.learn(1) == 4, "the first block is as it was"
        assert engine.forward([1]) == [1]
    engine.sample(1)
    assert engine.forward([1]) == [1]
    engine.remove(1)
    cache.verify()


# -- a disk that is full -----------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_stores_for_a_while_and_nothing_else(make_cache: MakeCache, caplog: pytest.LogCaptureFixture,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(4, 4, 16, write_ahead_share=1.0, faults=Faults([fails(WRITE, number=errno.ENOSPC)]))
    now = [0.0]
    monkeypatch.setattr(cache.store._pause, "_clock", lambda: now[0])
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    caplog.clear()  # that faults are injected has been said
    with caplog.at_level(logging.INFO):
        assert not cache.flush(), "nothing of it is durable"
        for user in range(2, 5):
            engine.serve(Request(user, tokens_of(user, 13)))
        assert not cache.store.accepts_writes
        failures = cache.stats().transfer_failures
        for _ in range(50):
            cache.refresh()
        assert cache.stats().transfer_failures == failures, "a store that takes nothing is not asked again and again"
        assert cache.store.stored_blocks() == []
        now[0] += write_pause.FIRST_SECONDS
        assert cache.store.accepts_writes
        assert engine.serve(Request(9, tokens_of(4, 13))) == 12
        assert cache.flush()
    assert len(cache.store.stored_blocks()) >= 6
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, warnings
    assert "no new blocks are stored" in warnings[0]
    assert "storing blocks again" in warnings[1]
    cache.verify()


def test_a_full_disk_costs_nothing_that_is_on_it(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 6)
    engine = ToyEngine(cache)
    for user in (1, 2):
        engine.serve(Request(user, tokens_of(user, 13)))
    assert cache.flush()
    cache.close()
    cache = make_cache(4, 4, 6, write_ahead_share=1.0, faults=Faults([FaultRule(FaultKind.FAILURE, WRITE, errno=errno.ENOSPC)]))
    engine = ToyEngine(cache)
    for user in range(3, 9):
        engine.serve(Request(user, tokens_of(user, 13)))
        assert cache.transfers.idle(10)
        cache.refresh()
    assert cache.stats().nvme.evictable_blocks >= 3, "the first three writes found out, and no other was tried"
    assert len(cache.store.stored_blocks()) >= 3


def test_a_failed_write_leaves_the_block_where_it_is(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4, 16, faults=Faults([FaultRule(FaultKind.FAILURE, WRITE)]))
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    assert not cache.flush()
    cache.verify()
    assert engine.serve(Request(2, PROMPT)) == 12
    stats = cache.stats()
    assert (stats.lost, stats.quarantined, stats.fallbacks) == (0, 0, 0)
    assert stats.nvme.free_blocks == 16


def test_a_copy_that_is_still_being_written_is_not_relied_on(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4, 16, keep_backing=False, write_ahead_share=1.0, faults=Faults([delays(WRITE, 0.3, count=1)]))
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 5)))
    engine.serve(Request(2, tokens_of(2, 16)))  # pushes it down, and its refresh begins to write it
    assert engine.serve(Request(3, tokens_of(1, 5))) == 4
    for user in range(3, 6):  # it goes down again, to another slot, and has to leave that one too
        engine.serve(Request(user, tokens_of(user, 16)))
    assert cache.transfers.idle(10)
    cache.verify()
    engine.serve(Request(9, tokens_of(1, 5)))
    stats = cache.stats()
    assert (stats.transfer_failures, stats.lost, stats.quarantined) == (0, 0, 0)


# -- tools -------------------------------------------------------------------------------------------------------------------


def test_a_block_whose_content_was_lost_cannot_be_read_by_tools(warm_cache: WarmCache, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(READ, rules=[FaultRule(FaultKind.FAILURE, READ)])
    cache = warm_cache(gate=gate)
    cache.add_sequence(Request(1, PROMPT))
    block_id = cache.block_ids(1)[0]
    wait = cache.transfers.wait

    def open_and_wait(*arguments: Any) -> bool:  # the tool has begun: it has seen which slot the block is read into
        gate.open()
        return wait(*arguments)

    monkeypatch.setattr(cache.transfers, "wait", open_and_wait)
    with pytest.raises(TransferError, match=f"block {block_id}: .*content is lost"):
        cache.read_block(block_id)
    cache.verify()

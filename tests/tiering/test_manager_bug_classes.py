"""Bugs of this kind of code at the front door, each as the rule that would have prevented it: threads, connectors, 8-bit caches.

The numbers name issues and pull requests of TensorRT-LLM in which the symptom was seen; ``tests/test_proofs.py`` lists them all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from crew import Crew
from group_engine import GroupEngine
from toy_engine import PROMPT, MakeCache, ToyEngine, tokens_of

from kvtier import KVCacheManager, KVLayout, LayerSpec, Level, Request, RequestError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

SLOW_COPIES = [FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.3, seconds=0.002)]

# -- illegal memory access after an offload; a block id was used as a slot ------------------------------------------------------


def test_the_block_table_names_slots_also_of_blocks_whose_id_is_another(make_cache: MakeCache) -> None:
    """Bug 13124: handles that began on the host level are primary now, and their ids are no slots of the pool."""
    cache = make_cache(4, 8, 0)
    engine = ToyEngine(cache)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 9)))
    engine.admit(Request(9, tokens_of(1, 13)))
    assert engine.learn(9) == 8
    ids = cache.block_ids(9)
    assert max(ids) >= 4, "so that the case means something"
    views = [cache.block(block_id) for block_id in ids]
    pages = engine.cache.layout.groups[0].num_layers * engine.cache.layout.groups[0].kv_factor
    assert cache.block_table([9])[0, 0, :4].tolist() == [view.slot * pages for view in views]
    assert engine.forward([9]) == [9], "every byte that it reads is right"
    primary = cache.pool().primary
    assert [cache.read_block(block_id) for block_id in ids] == [bytes(primary.read_block(view.slot).numpy()) for view in views]
    engine.remove(9)


# -- a sequence was pinned from another thread, without the lock --------------------------------------------------------------

CALLS: dict[str, Callable[[KVCacheManager], object]] = {
    "pin": lambda cache: cache.pin(1),
    "store_and_pin": lambda cache: cache.store_and_pin(1),
    "add_sequence": lambda cache: cache.add_sequence(Request(2, tokens_of(2, 5))),
    "remove_sequence": lambda cache: cache.remove_sequence(1),
    "append_tokens": lambda cache: cache.append_tokens(1, [7]),
    "mark_computed": lambda cache: cache.mark_computed(1, 13),
    "store_context": lambda cache: cache.store_context(1),
    "rewind": lambda cache: cache.rewind(1, 0),
    "propose_drafts": lambda cache: cache.propose_drafts(1, [1], [-1]),
    "drop_drafts": lambda cache: cache.drop_drafts(1),
    "match": lambda cache: cache.match(PROMPT),
    "truncate": lambda cache: cache.truncate(PROMPT, 0),
    "needed_blocks_one_step": lambda cache: cache.needed_blocks_one_step(1),
    "num_free_blocks": lambda cache: cache.num_free_blocks(Level.PRIMARY),
    "scheduling_remove_sequence": lambda cache: cache.scheduling_remove_sequence(1),
    "block_ids": lambda cache: cache.block_ids(1),
    "block_table": lambda cache: cache.block_table([1]),
    "block_hashes": lambda cache: cache.block_hashes(1),
    "read_block": lambda cache: cache.read_block(0),
    "offload": lambda cache: cache.offload(0),
    "wait_ready": lambda cache: cache.wait_ready(1),
    "is_ready": lambda cache: cache.is_ready(1),
    "refresh": lambda cache: cache.refresh(),
    "stats": lambda cache: cache.stats(),
    "verify": lambda cache: cache.verify(),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_no_call_gets_past_the_lock_while_another_thread_holds_it(make_cache: MakeCache, name: str) -> None:
    """Bug 13055."""
    cache = make_cache(8, 4, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(9, PROMPT))
    engine.admit(Request(1, tokens_of(1, 13)))
    begun = threading.Event()

    def call() -> None:
        begun.set()
        try:
            CALLS[name](cache)
        except RequestError:
            pass  # the call may make no sense just now

    thread = threading.Thread(target=call, daemon=True)
    with cache.turn.lock:
        thread.start()
        assert begun.wait(10.0)
        thread.join(0.01)
        assert thread.is_alive(), f"{name} does not take the lock"
    thread.join(10.0)
    assert not thread.is_alive()
    cache.verify()


def test_a_lease_is_not_released_past_the_lock(make_cache: MakeCache) -> None:
    """Bug 13055."""
    cache = make_cache(8, 4, 0)
    cache.add_sequence(Request(1, PROMPT))
    lease = cache.pin(1)
    thread = threading.Thread(target=lease.release, daemon=True)
    with cache.turn.lock:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert cache.stats().leases == 1
    thread.join(10.0)
    assert cache.stats().leases == 0


def test_pins_from_other_threads_hold_what_they_say_while_blocks_come_and_go(make_cache: MakeCache) -> None:
    """Bug 13055: what a lease names is neither taken nor moved before it is released, and nothing is pinned in the end."""
    cache = make_cache(12, 6, 0, faults=Faults(SLOW_COPIES))
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    assert engine.forward([1]) == [1]
    expected = [cache.read_block(block_id) for block_id in cache.block_ids(1)]
    crew = Crew(0.8)

    def pin() -> None:
        lease = cache.pin(1)
        views = [cache.block(block_id) for block_id in lease.block_ids]
        assert all(view.ref_count >= 2 and view.level == Level.PRIMARY for view in views)
        assert [cache.read_block(block_id) for block_id in lease.block_ids] == expected
        lease.release()

    def churn() -> None:
        ToyEngine(cache).serve(Request(2, tokens_of(crew.rounds.get("churn", 0) % 7 + 2, 17)))
        cache.verify()

    for number in range(3):
        crew.add(f"pin {number}", pin)
    crew.add("churn", churn)
    crew.run()
    assert min(crew.rounds.values()) > 1, crew.rounds
    engine.remove(1)
    stats = cache.stats()
    assert (stats.leases, stats.primary.free_blocks) == (0, 12)


# -- blocks were sent elsewhere while they were being offloaded, and the transfer manager had no lock --------------------------


def test_threads_issue_moves_one_at_a_time_in_the_order_of_their_numbers(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 16913."""
    cache = make_cache(12, 6, 0)
    issue = cache.transfers.issue
    inside = threading.Lock()
    numbers: list[int] = []

    def watched(records: Sequence[Any]) -> None:
        assert inside.acquire(blocking=False), "two threads issue at once"
        try:
            time.sleep(0.0005)  # long enough for somebody else to come in
            numbers.extend(record.number for record in records)
            issue(records)
        finally:
            inside.release()

    monkeypatch.setattr(cache.transfers, "issue", watched)
    crew = Crew(0.8)

    def serve(number: int) -> None:
        cache.add_sequence(Request(number, tokens_of(random.randrange(6), 9)))
        cache.wait_ready(number, timeout=10.0)
        cache.mark_computed(number, 9)
        cache.remove_sequence(number)

    for number in range(3):
        crew.add(f"engine {number}", lambda number=number: serve(number))
    crew.run()
    cache.verify()
    assert numbers == list(range(len(numbers)))
    assert numbers, "so that the case means something"


def test_a_connector_reads_right_bytes_of_a_block_that_is_being_moved(make_cache: MakeCache) -> None:
    """Bug 16913."""
    cache = make_cache(8, 8, 0, faults=Faults(SLOW_COPIES))
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    assert engine.forward([1]) == [1]
    ids = cache.block_ids(1)[:3]
    expected = {block_id: cache.read_block(block_id) for block_id in ids}
    engine.remove(1)
    crew = Crew(0.8, lambda: sum(cache.stats().offload_blocks.values()) > 0)

    def move() -> None:
        block_id = random.choice(ids)
        try:
            random.choice([cache.offload, cache.onboard])(block_id)
        except RequestError:
            time.sleep(0.0002)  # it is there already, or somebody reads it just now

    def read() -> None:
        block_id = random.choice(ids)
        assert cache.read_block(block_id) == expected[block_id]

    crew.add("moves", move)
    crew.add("connector 1", read)
    crew.add("connector 2", read)
    crew.run()
    cache.verify()
    stats = cache.stats()
    assert sum(stats.offload_blocks.values()) > 0
    assert engine.serve(Request(2, PROMPT)) == 12


def test_a_tool_that_writes_a_block_never_writes_into_its_slots_next_owner(
        make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 16913: while the tool waits for transfers the sequence ends, and somebody else gets the slot."""
    cache = make_cache(4, 0, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(1, 13)))
    [block_id, *_rest] = cache.block_ids(1)
    order = cache.transfers.order_before_engine

    def meanwhile(*arguments: Any) -> bool:
        monkeypatch.undo()
        engine.remove(1, store=False)
        engine.admit(Request(2, tokens_of(2, 9)))
        assert engine.forward([2]) == [2]
        return order(*arguments)

    monkeypatch.setattr(cache.transfers, "order_before_engine", meanwhile)
    cache.write_block(block_id, b"\xee" * cache.layout.groups[0].block_bytes)
    engine.sample(2)
    assert engine.forward([2]) == [2], "reads everything it has written before"
    engine.remove(2)
    cache.verify()
    assert cache.num_free_blocks(Level.PRIMARY) == 4


# -- wrong output with an 8-bit cache and reuse ----------------------------------------------------------------------------------

EIGHT_BITS = {
    "with scales": KVLayout([LayerSpec.attention(2, 8, dtype="float8_e4m3fn", scale_bytes=4)] * 2, "float32", 4),
    "and a window": KVLayout([LayerSpec.attention(2, 8, dtype="float8_e4m3fn", scale_bytes=2),
                              LayerSpec.attention(2, 8, dtype="float8_e4m3fn", window=8, scale_bytes=2)], "float32", 4),
    "without scales": KVLayout([LayerSpec.attention(2, 8, dtype="float8_e4m3fn")] * 2, "float32", 4),
}


@pytest.mark.parametrize("name", list(EIGHT_BITS))
@pytest.mark.parametrize(("length", "reused"), [(13, (12, 12, 12)), (11, (10, 10, 8))])  # the last two tokens of the ten are a copy
def test_eight_bit_values_are_reused_together_with_their_own_scales(make_cache: MakeCache, name: str, length: int,
                                                                    reused: tuple[int, int, int]) -> None:
    """Bug 2699: other prompts' values and scales lie in the slots by then, on every level."""
    cache = make_cache(8, 6, 64, layout=EIGHT_BITS[name])
    engine = GroupEngine(cache)
    long = tokens_of(1, 17)
    engine.serve(engine.request(1, long))
    # What comes between pushes it from the device to host memory, and from there to NVMe.
    for others, expected in zip((range(0), range(2, 3), range(3, 9)), reused, strict=True):
        for user in others:
            engine.serve(engine.request(100 + user, tokens_of(user, 17)))
            assert cache.flush()
        checked = engine.checked
        assert engine.serve(engine.request(2, [*long[:length - 1], 99], skip_write=True), answer=2) == expected
        assert engine.checked > checked + 8
    cache.verify()

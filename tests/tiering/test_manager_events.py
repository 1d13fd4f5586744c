"""Events as a router sees them: in order, with gaps that show, and with the hashes that ``block_hashes`` gives."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from gate import Gate
from toy_engine import PATIENCE, MakeCache, ToyEngine, tokens_of, wait_until

from kvtier import ConfigError, KVCacheManager, KVTierError, Level, Request, RetentionConfig, TokenRange
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule
from kvtier.tiering.event_stream import EventStream
from kvtier.tiering.ledger.events import Created, Event, Removed, Stored, Updated

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def events(cache: KVCacheManager) -> list[Event]:
    cache.flush_events()
    return cache.poll_events()


class Subscriber:
    """Rebuilds what is stored, and on which level, from nothing but events."""

    def __init__(self) -> None:
        self.levels: dict[bytes, int] = {}
        self.priorities: dict[bytes, int] = {}
        self.next_id = 0

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            assert event.event_id == self.next_id, "ids ascend by one"
            assert event.group == 0
            self.next_id += 1
            data = event.data
            if isinstance(data, Stored):
                assert data.parent_hash is None or data.parent_hash in self.levels
                for block in data.blocks:
                    assert block.block_hash not in self.levels, "stored once"
                    self.levels[block.block_hash] = block.level
                    self.priorities[block.block_hash] = block.priority
            elif isinstance(data, Removed):
                for block_hash in data.block_hashes:
                    del self.levels[block_hash]
            elif isinstance(data, Updated):
                if data.level is not None:
                    assert self.levels[data.block_hash] == data.level[0]
                    self.levels[data.block_hash] = data.level[1]
                if data.priority is not None:
                    assert self.priorities[data.block_hash] == data.priority[0]
                    self.priorities[data.block_hash] = data.priority[1]


def test_the_first_event_names_the_sizes(make_cache: MakeCache) -> None:
    assert events(make_cache(8, 2)) == [Event(0, 0, Created((8, 2)))]
    assert [event.data for event in events(make_cache(8, 4, 16))] == [Created((8, 4, 16))]


def test_hashes_of_a_sequence_are_those_of_its_events(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    events(cache)
    prompt = tokens_of(1, 10)
    engine.admit(Request(1, prompt, lora_id=42, cache_salt="tenant"))
    engine.learn(1)
    engine.forward([1])
    hashes = cache.block_hashes(1)
    cache.store_context(1)
    engine.sample(1)
    engine.sample(1)
    engine.sample(1)
    assert cache.block_hashes(1)[:2] == hashes
    assert all(len(block_hash) == 32 for block_hash in hashes)
    engine.forward([1])
    engine.remove(1)
    first, second = [event.data for event in events(cache)]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert first.parent_hash is None
    assert [block.block_hash for block in first.blocks] == hashes
    assert [block.tokens for block in first.blocks] == [tuple(prompt[:4]), tuple(prompt[4:8])]
    assert {(block.lora_id, block.cache_salt, block.level, block.priority) for block in first.blocks} == {(42, "tenant", 0, 35)}
    assert second.parent_hash == hashes[1]
    assert len(second.blocks) == 1


def test_a_subscriber_always_knows_where_each_block_is(make_cache: MakeCache) -> None:
    cache = make_cache(12, 6, 24, event_buffer_max_size=100_000)
    engine = ToyEngine(cache)
    subscriber = Subscriber()
    for turn in range(4):
        requests = [Request(user, tokens_of(user % 4, 7 + 3 * turn + user), retention=RetentionConfig([TokenRange(0, 8, 40 + user)]))
                    for user in range(8)]
        engine.run(requests, answer=2)
        subscriber.take(events(cache))
        stats = cache.stats()
        found = [list(subscriber.levels.values()).count(level) for level in Level]
        # Blocks that are busy with a file are in no queue, but they are still there.
        assert stats.primary.evictable_blocks <= found[0] <= stats.primary.evictable_blocks + stats.primary.busy_blocks
        assert stats.secondary.evictable_blocks <= found[1] <= stats.secondary.evictable_blocks + stats.secondary.busy_blocks
        assert stats.nvme.evictable_blocks == found[2]
    assert min(found) > 0
    cache.flush()
    cache.reset()
    subscriber.take(events(cache))
    assert subscriber.levels == {}


def test_what_was_removed_is_told_before_it_is_stored_again(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    subscriber = Subscriber()
    engine.serve(Request(1, tokens_of(1, 9)))
    subscriber.take(events(cache))
    before = dict(subscriber.levels)
    cache.truncate(tokens_of(1, 9), 0)
    engine.admit(Request(2, tokens_of(1, 9)))
    engine.learn(2)
    engine.forward([2])
    engine.remove(2)
    batch = events(cache)
    assert [type(event.data) for event in batch] == [Removed, Stored]
    subscriber.take(batch)
    assert subscriber.levels == before


def test_events_beyond_the_buffer_leave_a_gap_that_shows(make_cache: MakeCache) -> None:
    cache = make_cache(16, 0, event_buffer_max_size=3)
    engine = ToyEngine(cache)
    for number in range(5):
        engine.serve(Request(number, tokens_of(number, 9)))  # one Stored each, after Created
    assert [event.event_id for event in cache.poll_events()] == [3, 4, 5], "the newest are kept"
    assert cache.stats().dropped_events == 3
    engine.serve(Request(9, tokens_of(9, 9)))
    assert cache.poll_events()[0].event_id == 6


def test_a_poll_waits_as_long_as_asked(make_cache: MakeCache) -> None:
    cache = make_cache()
    events(cache)
    started = time.monotonic()
    assert cache.poll_events(timeout=0.1) == []
    assert time.monotonic() - started > 0.09
    assert cache.poll_events() == []


def test_a_poll_wakes_when_events_arrive(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    events(cache)
    polled: list[list[Event]] = []
    polling = threading.Thread(target=lambda: polled.append(cache.poll_events(timeout=3600.0)), daemon=True)
    polling.start()
    engine.serve(Request(1, tokens_of(1, 9)))  # its refresh flushes
    polling.join(PATIENCE)
    assert not polling.is_alive()
    assert [type(event.data) for event in polled[0]] == [Stored]


def test_a_poll_ends_when_the_cache_is_closed(make_cache: MakeCache) -> None:
    cache = make_cache()
    events(cache)
    polled: list[list[Event]] = []
    polling = threading.Thread(target=lambda: polled.append(cache.poll_events(timeout=3600.0)), daemon=True)
    polling.start()
    wait_until(lambda: bool(cache._events._changed._waiters))
    cache.close()
    polling.join(PATIENCE)
    assert polled == [[]]
    with pytest.raises(KVTierError, match="closed"):
        cache.poll_events(timeout=20)


async def test_events_can_be_awaited_by_several_readers(make_cache: MakeCache) -> None:
    cache = make_cache()
    polled = events(cache)
    engine = ToyEngine(cache)

    async def follow(stream: EventStream[Event]) -> list[Event]:
        return [event async for event in stream]

    readers = [asyncio.create_task(follow(cache.events())) for _ in range(2)]
    await asyncio.sleep(0)
    for number in range(3):
        await asyncio.to_thread(engine.serve, Request(number, tokens_of(number, 9)))
    polled += cache.poll_events()
    await asyncio.to_thread(cache.close)
    first, second = await asyncio.wait_for(asyncio.gather(*readers), 10)
    assert first == second == polled[1:], "all but what had been read before they came"
    assert [type(event.data) for event in first] == [Stored] * 3


def test_a_cache_without_a_buffer_has_no_readers(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="event_buffer_max_size=0"):
        make_cache(event_buffer_max_size=0).events()


def test_without_a_buffer_there_are_no_events(make_cache: MakeCache) -> None:
    cache = make_cache(event_buffer_max_size=0)
    ToyEngine(cache).serve(Request(1, tokens_of(1, 9)))
    cache.flush_events()
    assert cache.poll_events(timeout=3600.0) == [], "nothing is waited for"
    assert cache.stats().dropped_events == 0


def test_a_lost_block_is_taken_back(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9)))
    cache.flush()
    cache.close()
    gate = Gate(FaultOperation.READ, rules=[FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=1)])
    cache = make_cache(8, 4, 16, faults=gate)
    engine = ToyEngine(cache)
    subscriber = Subscriber()
    engine.admit(Request(1, tokens_of(1, 9)))
    hashes = cache.block_hashes(1)
    subscriber.take(events(cache))
    assert [subscriber.levels[block_hash] for block_hash in hashes] == [0, 0], "adopted, and promised to primary"
    gate.open()
    valid = engine.learn(1)
    batch = events(cache)
    assert [event.data for event in batch] == [Removed((hashes[valid // 4],))]
    subscriber.take(batch)
    engine.forward([1])
    engine.remove(1)
    subscriber.take(events(cache))
    assert set(subscriber.levels) == set(hashes)

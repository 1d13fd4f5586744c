"""KV events: what a subscriber learns, in which order, and that it is the truth."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
from naive_model import Driver
from pretend_tier import always

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger.events import Created, Event, EventLog, Removed, Stored, StoredBlock, Updated
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.key import KeyRun, Namespace
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import WarmRow
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules


def driver(primary: int, secondary: int = 0, nvme: int = 0, **rules: Any) -> Driver:
    settings: dict[str, Any] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30} | rules
    return Driver(Ledger([GroupSpec((primary, secondary, nvme))], 4, LedgerRules(**settings)))


def data(cache: Driver) -> list[Any]:
    return [event.data for event in cache.events.consume()]


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


def key(cache: Driver, block_id: int) -> bytes:
    return cache.ledger.allocators[0].chain_key(cache.ledger.block(block_id))


def prefilled(cache: Driver, request_id: int, tokens: Any, **keywords: Any) -> None:
    cache.add(Request(request_id, tokens, **keywords))
    assert cache.compute(request_id)


# -- the known answer ---------------------------------------------------------------------------------------------------------


def test_case_H1_the_event_stream() -> None:
    cache = driver(8, 2)
    assert data(cache) == [Created((8, 2))]
    assert data(cache) == []

    prefilled(cache, 0, range(10), lora_id=42)
    cache.store_context(0)
    (stored,) = data(cache)
    assert stored.parent_hash is None
    assert [(block.lora_id, block.level, block.priority, block.tokens) for block in stored.blocks] == [
        (42, PRIMARY, 35, (0, 1, 2, 3)), (42, PRIMARY, 35, (4, 5, 6, 7))]

    assert cache.append([0], [[77]])
    cache.release(0, 0)
    (tail,) = data(cache)
    assert tail.parent_hash == stored.blocks[-1].block_hash
    assert [block.tokens for block in tail.blocks] == [(8, 9, 77)]

    prefilled(cache, 1, range(9), lora_id=42)
    cache.store_context(1)
    cache.release(1)
    assert data(cache) == []

    cache.add(Request(2, [1, *range(1, 13)]), Request(3, [2, *range(1, 13)]))
    moved = data(cache)
    assert kinds(moved) == ["Updated", "Updated", "Updated", "Removed"]
    assert [event.level for event in moved[:3]] == [(0, 1)] * 3
    assert moved[3] == Removed((moved[0].block_hash,))

    cache.release(2)
    cache.release(3)
    both = data(cache)
    assert [(event.parent_hash, len(event.blocks)) for event in both] == [(None, 3), (None, 3)]

    cache.add(Request(4, [0, 1, 2, 3, 1, 1, 1, 1, 0], lora_id=42))
    exchanged = data(cache)
    assert sorted(kinds(exchanged)) == ["Removed", "Updated", "Updated"]
    assert {event.level for event in exchanged if isinstance(event, Updated)} == {(0, 1), (1, 0)}
    assert cache.compute(4)
    cache.store_context(4)
    assert kinds(data(cache))[0] == "Stored"
    cache.events.check()


# -- the log itself -------------------------------------------------------------------------------------------------------------


def run_of(*tokens: int, **keywords: Any) -> KeyRun:
    """A run of blocks of one token each at the start of a prompt."""
    namespace = Namespace(b"model", Request(0, tokens, **keywords))
    return KeyRun(namespace, 4, array("i", tokens).tobytes(), len(tokens), True, None, [])


def stored_block(run: KeyRun, position: int, level: int = PRIMARY, priority: int = 35) -> StoredBlock:
    return StoredBlock(run.chain_key(position), run.token_ids(position), None, None, level, priority)


def test_removed_blocks_are_collected_and_published_before_the_next_stored_of_their_group() -> None:
    log = EventLog(1024, 2)
    run = run_of(1, 2, 3, 4, 5)
    log.removed(0, run, 0)
    log.removed(1, run, 4)
    log.removed(0, run, 2)
    log.stored(0, [(run, 0, 1)], PRIMARY, [35])
    key = run.chain_key
    assert [(event.group, event.data) for event in log.flush()] == [
        (0, Removed((key(0), key(2)))), (0, Stored(None, (stored_block(run, 0),))), (1, Removed((key(4),)))]


def test_blocks_of_several_runs_are_one_stored_event_behind_the_block_before_the_first() -> None:
    log = EventLog(1024, 1)
    upper = run_of(1, 2, 3)
    lower = KeyRun(upper.namespace, 4, array("i", [4, 5]).tobytes(), 2, True, upper, [])
    log.stored(0, [(upper, 1, 2), (lower, 0, 2)], NVME, [35, 36, 37, 38])
    (event,) = log.flush()
    assert event.data == Stored(upper.chain_key(0), (stored_block(upper, 1, NVME), stored_block(upper, 2, NVME, 36),
                                                     stored_block(lower, 0, NVME, 37), stored_block(lower, 1, NVME, 38)))


@pytest.mark.parametrize("order", [[4, 3, 2], [0, 1, 2, 3], [2, 3, 2], [1, 2, 4, 3, 0], [3], [2, 2]])
def test_removed_hashes_come_in_the_order_of_removal(order: list[int]) -> None:
    log = EventLog(1024, 1)
    run = run_of(1, 2, 3, 4, 5)
    for position in order:
        log.removed(0, run, position)
    (event,) = log.flush()
    assert event.data == Removed(tuple(run.chain_key(position) for position in order))


def test_a_removed_span_goes_from_its_end_to_its_start_and_joins_single_ones() -> None:
    log = EventLog(1024, 1)
    run = run_of(*range(9))
    log.removed(0, run, 8)
    log.removed_span(0, run, 5, 8)
    log.removed_span(0, run, 5, 5)
    log.removed(0, run, 4)
    log.removed_span(0, run, 0, 2)
    (event,) = log.flush()
    assert event.data == Removed(tuple(run.chain_key(position) for position in (8, 7, 6, 5, 4, 1, 0)))


def test_ids_ascend_by_one_over_all_flushes() -> None:
    log = EventLog(1024, 1)
    run = run_of(1)
    log.created(0, (4,))
    first = log.flush()
    log.level_changed(0, run, 0, 0, 1)
    log.priority_changed(0, run, 0, 35, 80)
    both = log.flush()
    assert [event.event_id for event in first + both] == [0, 1, 2]
    assert [event.data for event in both] == [Updated(run.chain_key(0), (0, 1)), Updated(run.chain_key(0), None, (35, 80))]
    assert log.flush() == []


def test_of_more_events_than_the_log_keeps_the_oldest_are_dropped_and_their_ids_show_it() -> None:
    log = EventLog(3, 1)
    run = run_of(*range(20))
    for number in range(10):
        log.level_changed(0, run, number, 0, 1)
    assert [event.event_id for event in log.flush()] == [7, 8, 9]
    for number in range(0, 20, 2):
        log.removed(0, run, number)
    events = log.flush()
    assert [event.event_id for event in events] == [11, 12, 13]
    assert [len(event.data.block_hashes) for event in events if isinstance(event.data, Removed)] == [3, 3, 1]


def test_a_stored_event_without_blocks_is_none() -> None:
    log = EventLog(1024, 1)
    log.stored(0, [], PRIMARY, [])
    assert log.flush() == []


def test_events_are_equal_by_content_and_cannot_be_changed() -> None:
    log = EventLog(1024, 1)
    run = run_of(1, 2)
    log.removed_span(0, run, 0, 2)
    (event,) = log.flush()
    same = Event(0, 0, Removed((run.chain_key(1), run.chain_key(0))))
    assert event == same
    assert hash(event) == hash(same)
    assert repr(event) == repr(same)
    assert event != Event(1, 0, same.data)
    assert event != Event(0, 1, same.data)
    assert event != Event(0, 0, Removed(()))
    for name in ("event_id", "group", "data"):
        with pytest.raises(AttributeError):
            setattr(event, name, 1)


def test_nothing_is_hashed_before_somebody_reads_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing, evicting and moving blocks computes no SHA-256; reading the events later does."""
    calls: list[bytes] = []
    real = hashlib.sha256
    monkeypatch.setattr("hashlib.sha256", lambda *parts: calls.append(b"") or real(*parts))
    cache = driver(4, 1)
    for number in range(3):
        request = Request(number, range(10 * number, 10 * number + 9))
        sequence = cache.ledger.add_sequences([request])[0]
        cache.ledger.mark_computed(sequence.id, 9)
        cache.ledger.store_context(sequence.id)
        cache.ledger.remove_sequence(sequence.id, True)
    cache.ledger.moves.take()
    events = cache.ledger.events.flush()
    assert calls == []
    assert {type(event.data) for event in events} >= {Created, Stored, Removed, Updated}
    assert calls


def test_a_log_that_is_off_says_nothing() -> None:
    cache = driver(3, 1, max_events=0)
    for request_id in range(3):
        prefilled(cache, request_id, range(10 * request_id, 10 * request_id + 9))
        cache.release(request_id)
    assert data(cache) == []


# -- created --------------------------------------------------------------------------------------------------------------------


def test_created_names_the_levels_that_have_blocks() -> None:
    assert data(driver(8)) == [Created((8,))]
    assert data(driver(8, 4)) == [Created((8, 4))]
    assert data(driver(8, 4, 2)) == [Created((8, 4, 2))]
    assert data(driver(8, 0, 2)) == [Created((8, 0, 2))]


# -- stored -----------------------------------------------------------------------------------------------------------------------


def test_a_refilled_hole_is_stored_behind_its_predecessor_and_what_lies_behind_is_not_stored_again() -> None:
    cache = driver(8)
    prefilled(cache, 0, range(13))
    cache.release(0)
    first = key(cache, 0)
    cache.ledger.allocators[0].forget(cache.ledger.block(1))
    data(cache)
    prefilled(cache, 1, range(13))
    cache.release(1)
    (stored,) = data(cache)
    assert stored.parent_hash == first
    assert [block.tokens for block in stored.blocks] == [(4, 5, 6, 7)]
    cache.events.check()


def test_two_separate_holes_are_two_stored_events() -> None:
    cache = driver(12)
    prefilled(cache, 0, range(17))
    cache.release(0)
    for block_id in (0, 2):
        cache.ledger.allocators[0].forget(cache.ledger.block(block_id))
    data(cache)
    prefilled(cache, 1, range(17))
    cache.release(1)
    assert [(event.parent_hash, len(event.blocks)) for event in data(cache)] == [(None, 1), (key(cache, 1), 1)]
    cache.events.check()


def test_a_stored_block_carries_salt_adapter_and_priority() -> None:
    cache = driver(8)
    data(cache)
    prefilled(cache, 0, range(5), lora_id=3, cache_salt="a", retention=RetentionConfig([TokenRange(0, None, 80)]))
    cache.release(0)
    (stored,) = data(cache)
    assert [(block.lora_id, block.cache_salt, block.priority) for block in stored.blocks] == [(3, "a", 80)]


def test_blocks_found_on_nvme_are_stored_there_when_a_request_names_their_tokens() -> None:
    source = driver(8)
    prefilled(source, 0, range(9))
    source.release(0)
    keys = [key(source, block_id) for block_id in (0, 1)]
    cache = driver(8, 2, 4)
    cache.ledger.adopt_store([WarmRow(0, slot, chain) for slot, chain in enumerate(keys)], [])
    assert data(cache) == [Created((8, 2, 4))]
    cache.ledger.add_sequences([Request(1, range(9))])
    events = data(cache)
    assert kinds(events) == ["Stored", "Updated", "Updated"]
    assert [(block.block_hash, block.level, block.tokens) for block in events[0].blocks] == [
        (keys[0], NVME, (0, 1, 2, 3)), (keys[1], NVME, (4, 5, 6, 7))]
    assert [event.level for event in events[1:]] == [(NVME, PRIMARY)] * 2


# -- removed ------------------------------------------------------------------------------------------------------------------------


def test_a_block_that_is_dropped_lost_or_forgotten_is_removed() -> None:
    cache = driver(4, 1)
    prefilled(cache, 0, range(9))
    cache.release(0)
    keys = {key(cache, 0), key(cache, 1)}
    data(cache)
    cache.ledger.offload(1)
    cache.tier.settle(always)
    lost = [event for event in data(cache) if isinstance(event, Removed)]
    assert len(lost) == 1
    assert set(lost[0].block_hashes) < keys
    cache.ledger.reset()
    assert kinds(data(cache)) == ["Removed"]
    assert cache.events.blocks == {}


# -- updated -------------------------------------------------------------------------------------------------------------------------


def test_a_block_changes_level_at_every_step_and_its_subscriber_knows_where_it_is() -> None:
    cache = driver(2, 1, 2, keep_backing=True, write_ahead_share=1.0)
    prefilled(cache, 0, range(5))
    cache.release(0)
    name = key(cache, 0)
    data(cache)
    cache.ledger.offload(0)
    assert data(cache) == [Updated(name, (PRIMARY, SECONDARY))]
    cache.tier.settle()
    cache.refresh(1.0)
    cache.tier.settle()
    assert data(cache) == [], "a backing is no move of the block"
    prefilled(cache, 1, range(50, 55))
    cache.release(1)
    data(cache)
    cache.ledger.offload(next(block.id for block in cache.ledger.allocators[0].blocks if block.node is not None and block.id != 0))
    assert Updated(name, (SECONDARY, NVME)) in data(cache)
    cache.tier.settle()
    cache.ledger.onboard(0)
    assert Updated(name, (NVME, PRIMARY)) in data(cache)
    cache.tier.settle()
    cache.events.check()


def test_a_priority_changes_by_match_by_hand_and_by_expiry() -> None:
    cache = driver(8)
    prefilled(cache, 0, range(5))
    cache.release(0)
    name = key(cache, 0)
    data(cache)
    prefilled(cache, 1, range(5), retention=RetentionConfig([TokenRange(0, None, 80, 2.0)]))
    assert data(cache) == [Updated(name, None, (35, 80))]
    cache.release(1)
    cache.refresh(2.0)
    assert data(cache) == [Updated(name, None, (80, 35))]
    cache.ledger.set_priority(0, 50)
    assert data(cache) == [Updated(name, None, (35, 50))]
    cache.ledger.set_priority(0, 50)
    assert data(cache) == [], "nothing changed"
    cache.events.check()

"""Known answers of an existing KV cache manager, through the public names. Conventions: see ``case_cache``."""

from __future__ import annotations

import pytest
from case_cache import CaseCache, Make

from kvtier import (
    CapacityError,
    MultimodalItem,
    Request,
    RequestError,
    RetentionConfig,
    TokenRange,
    UnknownBlock,
)


def keep(*ranges: tuple[int, int | None, int], decode: int = 35) -> RetentionConfig:
    return RetentionConfig([TokenRange(*r) for r in ranges], decode_priority=decode)


@pytest.mark.parametrize("ranges", [[(0, None), (64, 128)], [(0, 64), (64, 32)], [(0, 64), (30, 128)]])
def test_case_A7_bad_retention_ranges_are_refused(ranges: list[tuple[int, int | None]]) -> None:
    with pytest.raises(RequestError):
        RetentionConfig([TokenRange(start, end, 35) for start, end in ranges])


@pytest.mark.parametrize(("priority", "goes_down"), [(35, True), (5, False), (30, True), (29, False)])
def test_case_A4_what_is_evicted_goes_down_from_the_threshold_on(make: Make, priority: int, goes_down: bool) -> None:
    cache = make(8, 4)
    cache.add(0, list(range(5)), retention=keep((0, None, priority), decode=priority))
    cache.release(0)
    cache.add(1, list(range(100, 125)), retention=keep((0, None, 80)))  # all others; its last block stays empty
    cache.release(1)
    cache.events()
    cache.add(2, list(range(200, 208)))  # the empty block, and one that holds something
    (event,) = cache.events()
    assert kinds([event]) == (["Updated"] if goes_down else ["Removed"]), "the low one goes first, though it is as old as the others"
    assert cache.add(3, [0, 1, 2, 3, 9]) == (4 if goes_down else 0)


PROMPT = [100, 101, 102, 103, 104, 105, 0, 1, 2]


def test_case_D3_extra_ids_separate_blocks(make: Make) -> None:
    cache = make(16)
    assert cache.add(0, PROMPT, extra_ids=[1, 1, 2, 2, 3, 3, 0, 0, 0]) == 0
    cache.append(0, 3, 4)
    cache.release(0)
    assert cache.add(1, PROMPT, extra_ids=[1, 1, 2, 2, 3, 3, 0, 0, 0]) == 8
    cache.append(1, 3, 4)
    cache.release(1)
    assert cache.add(2, PROMPT, extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0]) == 0
    assert cache.add(3, PROMPT, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4


def test_case_D3_multimodal_content_separates_blocks(make: Make) -> None:
    cache = make(16)
    one, two, three = (bytes([n]) * 32 for n in (1, 2, 3))
    steps = [([MultimodalItem(one, [(2, 4)])], 0, [0, 1, 2]), ([MultimodalItem(one, [(2, 4)])], 8, [0, 1, 3]),
             ([MultimodalItem(two, [(2, 4)])], 0, [3, 4, 5]),
             ([MultimodalItem(one, [(2, 2)]), MultimodalItem(two, [(4, 2)])], 4, [0, 6, 7]),
             ([MultimodalItem(one, [(2, 2)]), MultimodalItem(three, [(4, 2)])], 4, None)]
    for request_id, (items, pos, ids) in enumerate(steps):
        assert cache.add(request_id, PROMPT, multimodal=items) == pos
        assert ids is None or cache.ids(request_id) == ids
        cache.append(request_id, 3, 4)
        cache.release(request_id)


def test_case_D3_adapters_separate_blocks(make: Make) -> None:
    cache = make(16)
    for request_id, lora, expected in [(0, 0, 0), (1, 0, 8), (2, 1, 0), (3, None, 0)]:
        assert cache.add(request_id, PROMPT, lora_id=lora) == expected
        cache.append(request_id, 3, 4)
        cache.release(request_id)


def test_case_D3_adapter_and_extra_ids_combine(make: Make) -> None:
    cache = make(16)
    for request_id, lora in ((0, 1), (1, 2)):
        assert cache.add(request_id, PROMPT, lora_id=lora, extra_ids=[1, 1, 2, 2, 3, 3, 0, 0, 0]) == 0
        cache.append(request_id, 3, 4)
        cache.release(request_id)
    assert cache.add(2, PROMPT, lora_id=2, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert cache.add(3, PROMPT, lora_id=1, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]) == 4
    assert cache.ids(2)[0] != cache.ids(3)[0]


def test_case_D3_salts_separate_blocks(make: Make) -> None:
    cache = make(16)
    steps = [(None, 0, [0, 1, 2]), ("tenant-A", 0, [3, 4, 5]), ("tenant-A", 8, [3, 4, 6]), ("tenant-B", 0, [6, 7, 8]), (None, 8, [0, 1, 9])]
    for request_id, (salt, pos, ids) in enumerate(steps):
        assert cache.add(request_id, PROMPT, cache_salt=salt) == pos
        assert cache.ids(request_id) == ids
        cache.append(request_id, 3, 4)
        cache.release(request_id)


def test_case_D4_statistics_of_a_request(make: Make) -> None:
    cache = make(16)
    first = cache.manager.add_sequence(Request(0, list(range(9))))
    assert (first.total_blocks, first.new_blocks, first.reused_blocks, first.missed_blocks) == (3, 3, 0, 3)
    cache.manager.mark_computed(0, 9)
    cache.release(0)
    again = cache.manager.add_sequence(Request(1, list(range(9))))
    assert (again.total_blocks, again.new_blocks, again.reused_blocks, again.missed_blocks) == (1, 1, 2, 1)
    assert cache.manager.request_stats(1).hit_rate == pytest.approx(2 / 3)


def test_case_D6_pinned_blocks_are_not_free_until_released(make: Make) -> None:
    cache = make(4)
    cache.add(0, list(range(8)))
    lease = cache.manager.pin(0)
    cache.release(0)
    assert cache.free() < 4
    assert cache.manager.stats().leases == 1
    lease.release()
    assert cache.free() == 4
    assert cache.manager.stats().leases == 0


def test_case_D8_a_block_has_its_range_s_priority_and_unknown_ids_are_errors(make: Make) -> None:
    cache = make(4)
    cache.add(0, list(range(8)), retention=keep((0, None, 80)))
    assert {cache.manager.block(block_id).priority for block_id in cache.ids(0)} == {80}
    for unknown in (-1, 9999):
        with pytest.raises(UnknownBlock):
            cache.manager.block(unknown)


def test_case_E1_low_priorities_are_evicted_first(make: Make) -> None:
    cache = make(4)
    cache.add(0, list(range(8)), retention=keep((0, 4, 90), (4, 8, 10)))
    cache.add(1, list(range(8, 16)))
    cache.release(0, 1)
    cache.add(2, list(range(16, 24)), retention=keep((0, None, 20)))
    cache.release(2)
    assert cache.add(3, list(range(8, 16))) == 4
    cache.release(3)
    assert cache.free() == 4
    assert cache.add(4, list(range(8))) == 4
    cache.release(4)
    assert cache.add(5, list(range(16, 24))) == 0


def test_case_E2_generated_blocks_have_the_decode_priority(make: Make) -> None:
    cache = make(8)
    cache.add(0, list(range(12)), retention=keep((0, None, 90), decode=90))
    assert cache.free() == 5
    cache.append(0, 77)
    assert cache.free() == 4
    cache.add(1, list(range(12, 24)), retention=keep((0, None, 5), decode=5))
    assert cache.free() == 1
    cache.append(1, 77)
    assert cache.free() == 0
    cache.release(0, 1)
    assert cache.free() == 8
    cache.add(2, list(range(24, 36)))
    cache.release(2)
    assert cache.add(3, list(range(12))) == 11


def test_case_E7_a_leaf_is_reused_in_place(make: Make) -> None:
    cache = make(4)
    cache.add(0, [0, 1, 2, 3])
    cache.store(0)
    cache.append(0, 0)
    cache.release(0)
    assert cache.add(1, [1, 1, 2, 3]) == 0
    assert cache.ids(1) == [1]
    twelve = [2, *range(1, 12)]
    cache.add(2, twelve)
    cache.release(1, 2)
    assert cache.add(3, twelve) == 11
    assert cache.free() == 1
    cache.append(3, 5)
    assert cache.free() == 0
    with pytest.raises(CapacityError) as error:
        cache.add(4, [9])
    assert (error.value.needed, error.value.available, error.value.preempt) == (1, 0, (3,))


def seeded(make: Make, *prompts: list[int]) -> CaseCache:
    cache = make(16)
    for number, prompt in enumerate(prompts):
        cache.add(100 + number, prompt)
        cache.release(100 + number)
    return cache


def test_case_F1_of_two_partial_matches_the_last_keeps_the_block(make: Make) -> None:
    cache = seeded(make, list(range(7)))
    assert cache.add_batch([Request(0, [0, 1, 2, 3, 4, 10]), Request(1, [0, 1, 2, 3, 4, 20])]) == [5, 5]
    assert cache.ids(1)[1] == 1
    assert cache.ids(0)[1] != 1


def test_case_F3_a_full_match_beats_a_partial_one(make: Make) -> None:
    cache = seeded(make, list(range(9)))
    assert cache.add_batch([Request(0, [*range(7), 10]), Request(1, list(range(9)))]) == [7, 8]
    assert cache.ids(1)[:2] == [0, 1]
    assert cache.ids(0)[1] != 1


def test_case_F6_two_copies_of_one_inner_block(make: Make) -> None:
    cache = seeded(make, list(range(8)), [0, 1, 2, 3, 10, 11, 12, 13])
    assert cache.add_batch([Request(0, [0, 1, 2, 50]), Request(1, [0, 1, 60, 70])]) == [3, 2]
    assert [len(cache.ids(request_id)) for request_id in (0, 1)] == [1, 1]
    cache.release(0, 1)
    assert cache.free() == 16


def kinds(events: list[object]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_case_H1_the_event_stream(make: Make) -> None:
    cache = make(8, 2, event_buffer_max_size=1024)
    created = cache.events()
    assert kinds(created) == ["Created"]
    assert created[0].num_blocks_per_level == (8, 2)
    assert cache.events() == []

    cache.add(0, list(range(10)), lora_id=42)
    cache.store(0)
    (stored,) = cache.events()
    assert stored.parent_hash is None
    assert [(block.lora_id, block.level) for block in stored.blocks] == [(42, 0), (42, 0)]

    cache.append(0, 0)
    cache.release(0)
    cache.manager.flush_events()
    (envelope,) = cache.manager.poll_events()
    assert envelope.event_id == 2, "the one after Created and the first Stored"
    tail = envelope.data
    assert kinds([tail]) == ["Stored"]
    assert tail.parent_hash == stored.blocks[-1].block_hash
    assert len(tail.blocks) == 1

    cache.add(1, list(range(9)), lora_id=42)
    cache.store(1)
    cache.release(1)
    assert cache.events() == []

    cache.add_batch([Request(2, [1, *range(1, 13)]), Request(3, [2, *range(1, 13)])])
    moved = cache.events()
    assert kinds(moved) == ["Updated", "Updated", "Updated", "Removed"]
    assert [event.level for event in moved[:3]] == [(0, 1)] * 3
    assert moved[3].block_hashes == (moved[0].block_hash,)

    cache.release(2, 3)
    both = cache.events()
    assert kinds(both) == ["Stored", "Stored"]
    assert [(event.parent_hash, len(event.blocks)) for event in both] == [(None, 3), (None, 3)]

    cache.add(4, [0, 1, 2, 3, 1, 1, 1, 1, 0], lora_id=42)
    exchanged = cache.events()
    assert sorted(kinds(exchanged)) == ["Removed", "Updated", "Updated"]
    assert {event.level for event in exchanged if hasattr(event, "level")} == {(1, 0), (0, 1)}
    cache.store(4)
    assert kinds(cache.events())[0] == "Stored"


def test_case_H1_event_ids_ascend_by_one(make: Make) -> None:
    cache = make(8, 2)
    for request_id in range(6):
        cache.add(request_id, [request_id, *range(20, 31)])
        cache.release(request_id)
    cache.manager.flush_events()
    ids = [event.event_id for event in cache.manager.poll_events()]
    assert ids == list(range(len(ids)))
    assert len(ids) > 6


def test_case_H4_polling_blocks_until_events_come_and_is_empty_without_a_buffer(make: Make) -> None:
    silent = make(8, event_buffer_max_size=0)
    silent.add(0, list(range(8)))
    silent.store(0)
    assert silent.events() == []
    cache = make(8)
    cache.manager.flush_events()
    assert len(cache.manager.poll_events(timeout=1)) == 1
    cache.add(0, list(range(8)))
    cache.store(0)
    cache.manager.flush_events()
    assert kinds([event.data for event in cache.manager.poll_events(timeout=1)]) == ["Stored"]

"""The eviction queues at their own door: who is given up next."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies.eviction import EvictionQueues, eviction_queues
from kvtier.policies.queue_record import NOT_QUEUED, QueueRecord
from kvtier.policies.retention import DEFAULT_PRIORITY

PRIMARY, SECONDARY = 0, 1


class Level8And4:
    """8 primary and 4 secondary handles with content of the default priority, in id order: the cases' starting point."""

    def __init__(self) -> None:
        self.queues = EvictionQueues(2)
        self.records = [QueueRecord() for _ in range(12)]
        for number, record in enumerate(self.records):
            self.queues.add_content(record, PRIMARY if number < 8 else SECONDARY, 0.0)

    def front(self, level: int = PRIMARY) -> int:
        record = self.queues.front(level)
        assert record is not None
        return self.records.index(record)

    def claim_front(self, level: int = PRIMARY) -> int:
        number = self.front(level)
        self.queues.claim(self.records[number])
        return number

    def release(self, number: int, priority: int = DEFAULT_PRIORITY, duration: float = 0.0, now: float = 0.0) -> None:
        record = self.records[number]
        record.priority = priority
        record.duration = duration
        self.queues.add_content(record, PRIMARY, now)


@pytest.fixture
def levels() -> Level8And4:
    return Level8And4()


def test_case_A1_claiming_lowers_the_free_count_of_its_own_level_only(levels: Level8And4) -> None:
    assert levels.queues.free == [8, 4]
    levels.claim_front(PRIMARY)
    assert levels.queues.free == [7, 4]
    levels.claim_front(SECONDARY)
    assert levels.queues.free == [7, 3]


def test_case_A2_looking_at_the_front_does_not_take_it(levels: Level8And4) -> None:
    assert levels.front() == levels.front() == 0
    levels.claim_front()
    assert levels.front() == 1


def test_case_A2_a_handle_given_back_without_content_comes_first(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.queues.add_empty_first(levels.records[number], PRIMARY)
    assert levels.front() == number


def test_case_A2_content_given_back_goes_to_the_back(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number)
    assert levels.front() != number
    assert levels.queues.members(PRIMARY)[-1] is levels.records[number]


def test_case_A3_the_least_recently_released_comes_first(levels: Level8And4) -> None:
    first, second = levels.claim_front(), levels.claim_front()
    levels.release(second)
    levels.release(first)
    for _ in range(6):
        levels.claim_front()
    assert levels.claim_front() == second
    assert levels.front() == first


def test_case_A4_the_lowest_priority_comes_first_however_fresh_it_is(levels: Level8And4) -> None:
    number = levels.claim_front()
    other = levels.claim_front()
    levels.release(other, priority=80)
    levels.release(number, priority=5)
    assert levels.front() == number
    for _ in range(7):
        levels.claim_front()
    assert levels.front() == other


def test_case_A5_a_duration_counts_from_the_release_and_ends_at_the_default_priority(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, priority=80, duration=0.001, now=0.0)
    assert levels.queues.refresh(0.0) == []
    assert levels.records[number].priority == 80
    assert levels.queues.refresh(0.002) == [(levels.records[number], 80)]
    assert levels.records[number].priority == DEFAULT_PRIORITY
    assert levels.queues.members(PRIMARY)[-1] is levels.records[number]
    assert levels.queues.refresh(10.0) == []


def test_what_expires_at_the_same_time_falls_in_the_order_of_release(levels: Level8And4) -> None:
    first, second = levels.claim_front(), levels.claim_front()
    levels.release(second, priority=5, duration=1.0)
    levels.release(first, priority=80, duration=1.0)
    levels.queues.refresh(1.0)
    assert levels.queues.members(PRIMARY)[-2:] == [levels.records[second], levels.records[first]]


def test_case_A_a_duration_at_the_default_priority_is_ignored(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, duration=1.0)
    assert levels.records[number].expires_at == 0.0
    before = levels.queues.members(PRIMARY)
    assert levels.queues.refresh(100.0) == []
    assert levels.queues.members(PRIMARY) == before


def test_claimed_content_does_not_expire(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, priority=80, duration=1.0)
    levels.queues.claim(levels.records[number])
    assert levels.queues.refresh(100.0) == []
    assert levels.records[number].priority == 80
    assert levels.records[number].queue == NOT_QUEUED


def test_a_second_release_starts_the_duration_again(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, priority=80, duration=1.0, now=0.0)
    levels.queues.claim(levels.records[number])
    levels.release(number, priority=80, duration=1.0, now=0.5)
    assert levels.queues.refresh(1.2) == []
    assert len(levels.queues.refresh(1.5)) == 1


def test_a_forgotten_block_s_duration_does_not_turn_its_empty_handle_into_content(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, priority=80, duration=1.0)
    levels.queues.claim(levels.records[number])
    levels.queues.add_empty_first(levels.records[number], PRIMARY)
    assert levels.queues.refresh(2.0) == []
    assert levels.queues.free[PRIMARY] - levels.queues.evictable[PRIMARY] == 1
    assert levels.front() == number


def test_releasing_again_and_again_leaves_no_heap_of_durations_behind(levels: Level8And4) -> None:
    number = levels.claim_front()
    for _ in range(10_000):
        levels.release(number, priority=80, duration=1e9)
        levels.queues.claim(levels.records[number])
    assert len(levels.queues.expiries) < 200
    levels.release(number, priority=80, duration=1.0)
    assert len(levels.queues.refresh(2.0)) == 1


def test_case_A_claiming_twice_is_harmless(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.queues.claim(levels.records[number])
    assert levels.queues.free == [7, 4]
    assert levels.queues.evictable == [7, 4]


def test_case_A_an_empty_level_has_no_front() -> None:
    queues = EvictionQueues(3)
    assert queues.front(2) is None
    assert queues.members(2) == []


def test_empty_handles_are_taken_before_backings_and_backings_before_content_of_any_priority() -> None:
    queues = EvictionQueues(1)
    worthless, backing, never_used, given_back = (QueueRecord() for _ in range(4))
    worthless.priority = 0
    queues.add_content(worthless, 0, 0.0)
    queues.add_backing(backing, 0)
    queues.add_empty_last(never_used, 0)
    queues.add_empty_first(given_back, 0)
    order = []
    while (record := queues.front(0)) is not None:
        order.append(record)
        queues.claim(record)
    assert order == [given_back, never_used, backing, worthless]


def test_handles_never_used_are_taken_in_id_order_and_those_given_back_latest_first() -> None:
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in range(5)]
    for record in records[:3]:
        queues.add_empty_last(record, 0)
    for record in records[3:]:
        queues.add_empty_first(record, 0)
    assert queues.members(0) == [records[4], records[3], *records[:3]]


def test_a_record_is_unlinked_from_the_list_it_was_inserted_in_though_its_priority_has_changed_since(levels: Level8And4) -> None:
    number = levels.claim_front()
    levels.release(number, priority=80)
    levels.records[number].priority = 5
    levels.queues.claim(levels.records[number])
    assert levels.queues.coldest(PRIMARY, DEFAULT_PRIORITY + 1, 1) == []
    assert levels.queues.evictable[PRIMARY] == 7
    assert len(levels.queues.members(PRIMARY)) == 7


def test_queueing_a_queued_record_is_a_bug_that_is_noticed(levels: Level8And4) -> None:
    with pytest.raises(AssertionError):
        levels.queues.add_content(levels.records[0], PRIMARY, 0.0)


def test_the_coldest_content_is_listed_in_the_order_in_which_it_would_be_given_up(levels: Level8And4) -> None:
    low, high = levels.claim_front(), levels.claim_front()
    levels.release(high, priority=80)
    levels.release(low, priority=5)
    everything = levels.queues.coldest(PRIMARY, 0, 100)
    assert everything == levels.queues.members(PRIMARY)
    assert everything[0] is levels.records[low]
    assert everything[-1] is levels.records[high]
    assert levels.queues.coldest(PRIMARY, 0, 3) == everything[:3]
    assert levels.queues.coldest(PRIMARY, 6, 2) == everything[1:3]
    assert levels.queues.coldest(PRIMARY, 5, 1) == [levels.records[low]], "the threshold is inclusive"
    assert levels.queues.coldest(PRIMARY, 81, 100) == []


def test_a_level_s_handles_enter_at_once_as_they_would_one_by_one() -> None:
    records = [QueueRecord() for _ in range(6)]
    queues = EvictionQueues(2)
    queues.add_never_used(records[:3], SECONDARY)
    queues.add_empty_last(records[3], SECONDARY)
    queues.add_never_used(records[4:], SECONDARY)
    queues.add_never_used([], PRIMARY)
    assert queues.members(SECONDARY) == records
    assert (queues.free, queues.evictable) == ([0, 6], [0, 0])
    queues.claim(records[4])
    assert queues.members(SECONDARY) == [*records[:4], records[5]]
    with pytest.raises(AssertionError):
        queues.add_never_used([records[0]], SECONDARY)


def test_what_was_found_at_start_is_newest_and_its_expiry_is_awaited(levels: Level8And4) -> None:
    found = QueueRecord()
    found.expires_at = 5.0
    found.priority = 35
    levels.queues.add_newest(found, PRIMARY)
    assert levels.queues.members(PRIMARY)[-1] is found
    assert [record for record, _ in levels.queues.refresh(6.0)] == [found]
    assert levels.queues.members(PRIMARY)[-1] is found


def test_content_is_counted_by_priority(levels: Level8And4) -> None:
    levels.claim_front()
    levels.release(0, priority=80)
    levels.claim_front()
    levels.release(1, priority=0)
    levels.claim_front(SECONDARY)
    assert levels.queues.content_by_priority(PRIMARY) == {0: 1, 35: 6, 80: 1}
    assert levels.queues.content_by_priority(SECONDARY) == {35: 3}


def test_backings_are_given_up_oldest_first() -> None:
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in range(3)]
    for record in records:
        queues.add_backing(record, 0)
    assert queues.members(0) == records
    assert queues.front(0) is records[0]
    assert queues.backing_count(0) == 3
    assert queues.free == [3]
    assert queues.evictable == [0]


def test_a_kept_backing_is_free_and_counted_and_never_taken() -> None:
    queues = EvictionQueues(1)
    kept, content = QueueRecord(), QueueRecord()
    queues.add_kept_backing(kept, 0)
    assert queues.front(0) is None
    queues.add_content(content, 0, 0.0)
    assert queues.front(0) is content
    assert queues.members(0) == [content, kept]
    assert (queues.free, queues.evictable, queues.backing_count(0)) == ([2], [1], 1)
    queues.claim(kept)
    assert (queues.free, queues.backing_count(0)) == ([1], 0)


def test_a_run_of_neighbours_leaves_its_list_at_once_and_another_joins_it() -> None:
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in range(6)]
    for record in records:
        queues.add_content(record, 0, 0.0)
    run = records[1:4]
    for record in run:
        record.queue = NOT_QUEUED
    queues.unlink(run[0], run[-1], DEFAULT_PRIORITY, 3)
    assert queues.members(0) == [records[0], *records[4:]]
    assert (queues.free, queues.evictable) == ([3], [3])
    for left in queues.members(0):
        queues.claim(left)
    assert queues.front(0) is None
    last = queues.heads[DEFAULT_PRIORITY].previous
    for record in run:
        record.queue, record.previous = DEFAULT_PRIORITY, last
        last.next = last = record
    queues.appended(last, DEFAULT_PRIORITY, 3)
    assert queues.members(0) == run
    assert (queues.free, queues.evictable) == ([3], [3])


def test_what_few_records_have_is_kept_only_while_they_have_it() -> None:
    record = QueueRecord()
    record.duration = 0.0
    assert record.extra is None
    record.duration = 2.0
    record.expires_at = 3.0
    assert (record.duration, record.expires_at) == (2.0, 3.0)
    record.duration = 0.0
    assert (record.duration, record.expires_at) == (0.0, 3.0)
    record.expires_at = 0.0
    assert record.extra is None


@pytest.mark.parametrize("policy", ["default", "lru"])
def test_both_policies_are_priority_lru_for_now(policy: str) -> None:
    assert isinstance(eviction_queues(policy, 3), EvictionQueues)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'fifo'"):
        eviction_queues("fifo", 3)


# -- against a naive model -----------------------------------------------------------------------------------------------


class NaiveQueues:
    """One list for each kind; the order of taking by sorting."""

    def __init__(self) -> None:
        self.empty: deque[int] = deque()
        self.backing: list[int] = []
        self.content: list[int] = []  # by last use
        self.priority: dict[int, int] = {}
        self.expires: dict[int, float] = {}

    def queued(self) -> list[int]:
        return [*self.empty, *self.backing, *self.content]

    def order(self) -> list[int]:
        return [*self.empty, *self.backing, *sorted(self.content, key=lambda number: self.priority[number])]

    def claim(self, number: int) -> None:
        for members in (self.empty, self.backing, self.content):
            if number in members:
                members.remove(number)

    def refresh(self, now: float) -> None:
        due = sorted((n for n in self.content if n in self.expires and self.expires[n] <= now),
                     key=lambda n: (self.expires[n], self.content.index(n)))
        for number in due:
            del self.expires[number]
            self.priority[number] = DEFAULT_PRIORITY
            self.content.remove(number)
            self.content.append(number)


operations = st.lists(st.tuples(st.sampled_from(("claim", "first", "last", "backing", "content", "content", "busy", "expire")),
                                st.integers(0, 7), st.sampled_from((0, 5, 35, 36, 100)), st.sampled_from((0.0, 1.0, 2.0))), max_size=60)


@given(operations)
def test_any_sequence_of_operations_gives_the_order_of_a_naive_model(steps: list[tuple[str, int, int, float]]) -> None:
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in range(8)]
    naive = NaiveQueues()
    now = 0.0
    for verb, number, priority, seconds in steps:
        record = records[number]
        if verb == "expire":
            now += seconds
            queues.refresh(now)
            naive.refresh(now)
        elif verb == "claim" or (verb != "busy" and number in naive.queued()):
            queues.claim(record)
            naive.claim(number)
        elif verb == "busy":
            # Content that a file operation uses is out of its queue for a while, and then back where it was.
            if number in naive.content:
                queues.claim(record)
                assert record not in queues.members(0)
                queues.restore_content(record, 0)
        elif verb == "first":
            queues.add_empty_first(record, 0)
            naive.empty.appendleft(number)
        elif verb == "last":
            queues.add_empty_last(record, 0)
            naive.empty.append(number)
        elif verb == "backing":
            queues.add_backing(record, 0)
            naive.backing.append(number)
        else:
            record.priority = priority
            record.duration = seconds
            queues.add_content(record, 0, now)
            naive.content.append(number)
            naive.priority[number] = priority
            naive.expires.pop(number, None)
            if seconds and priority != DEFAULT_PRIORITY:
                naive.expires[number] = now + seconds
        order = naive.order()
        assert queues.members(0) == [records[n] for n in order]
        assert queues.front(0) is (records[order[0]] if order else None)
        assert queues.free == [len(order)]
        assert queues.evictable == [len(naive.content)]
        assert queues.backing_count(0) == len(naive.backing)
        assert [records[n].priority for n in naive.content] == [naive.priority[n] for n in naive.content]


@given(st.permutations(range(8)), st.lists(st.sampled_from((5, 35, 80)), min_size=8, max_size=8))
def test_content_restored_in_any_order_stands_where_its_last_use_had_put_it(order: list[int], priorities: list[int]) -> None:
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in range(8)]
    for record, priority in zip(records, priorities, strict=True):
        record.priority = priority
        queues.add_content(record, 0, 0.0)
    before = queues.members(0)
    for number in order:
        queues.claim(records[number])
    for number in order:
        queues.restore_content(records[number], 0)
    assert queues.members(0) == before


def test_going_down_a_level_counts_as_a_use_but_does_not_start_the_duration_again() -> None:
    queues = EvictionQueues(2)
    record, other = QueueRecord(), QueueRecord()
    record.priority = other.priority = 80
    record.duration = 2.0
    queues.add_content(record, 0, 0.0)
    queues.add_content(other, 1, 0.0)
    queues.claim(record)
    queues.note_use(record)
    queues.restore_content(record, 1)
    assert queues.members(1) == [other, record]
    assert queues.refresh(2.0) == [(record, 80)]

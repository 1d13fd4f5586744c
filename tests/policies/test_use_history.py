"""The history of uses: grades outlive what they are about, and the shadows tell which weights pay."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies.eviction import GRADE_LISTS, EvictionQueues, kind_of
from kvtier.policies.named import HALVING, LRU, POLICIES, SEEN_FIRST, candidates_of
from kvtier.policies.queue_record import QueueRecord
from kvtier.policies.use_history import UseHistory


def parts(*numbers: int) -> list[bytes]:
    return [number.to_bytes(4, "little") for number in numbers]


def test_the_grade_of_a_place_is_how_often_its_prefix_was_used_before() -> None:
    history = UseHistory(100, 1, (SEEN_FIRST,))
    assert history.observe(parts(1, 2, 3)) == [0, 0, 0]
    assert history.observe(parts(1, 2, 4)) == [1, 1, 0]
    assert history.observe(parts(1, 2, 3)) == [2, 2, 1]
    assert history.observe(parts(1, 2, 3)) == [2, 2, 2]
    assert history.observe(parts(2, 3)) == [0, 0], "equal content behind another prefix is something else"


def test_what_was_not_used_for_long_is_forgotten_and_memory_stays_bounded() -> None:
    history = UseHistory(10, 1, (SEEN_FIRST,))
    history.observe(parts(1))
    for number in range(100, 130):
        history.observe(parts(number))
    assert history.observe(parts(1)) == [1], "three times the capacity ago"
    for number in range(1000, 1100):
        history.observe(parts(number))
    assert history.observe(parts(1)) == [0]
    assert len(history._young) + len(history._old) <= 2 * 4 * 10 + 2


def looped(history: UseHistory, rounds: int, prompts: int, scans: int) -> None:
    """Some prompts come again and again, and between them others come once: more than fits."""
    scan = 1 << 20
    for _ in range(rounds):
        for prompt in range(prompts):
            history.observe(parts(prompt))
            for _ in range(scans):
                scan += 1
                history.observe(parts(scan))


def test_where_prompts_come_back_later_than_lru_keeps_them_other_weights_win() -> None:
    history = UseHistory(100, 1, POLICIES["default"])
    looped(history, 30, 40, 3)  # 40 prompts return after 160 others
    assert history.weights != LRU


def test_where_lru_is_as_good_it_stays_lru() -> None:
    for prompts, scans in ((20, 1), (0, 0)):
        history = UseHistory(100, 1, POLICIES["default"])
        looped(history, 40, prompts, scans)
        assert history.weights == LRU
    history = UseHistory(100, 1, POLICIES["default"])
    for number in range(5000):
        history.observe(parts(number))
    assert history.weights == LRU


def test_a_policy_of_one_set_of_weights_uses_it_from_the_start() -> None:
    assert UseHistory(10, 1, candidates_of("halving")).weights == HALVING
    with pytest.raises(ConfigError, match=r"policy='best': unknown; use one of default, lru"):
        candidates_of("best")


def queued(*grades: int) -> tuple[EvictionQueues, list[QueueRecord]]:
    """Records of these grades, the first one released first."""
    queues = EvictionQueues(1)
    records = [QueueRecord() for _ in grades]
    for record, grade in zip(records, grades, strict=True):
        record.grade_list = GRADE_LISTS[grade]
        queues.add_content(record, 0, 0.0)
    return queues, records


@pytest.mark.parametrize(("weights", "expected"), [(LRU, [0, 1, 2, 3, 4, 5]), (HALVING, [1, 3, 0, 4, 2, 5]),
                                                    (SEEN_FIRST, [1, 3, 4, 0, 2, 5])])
def test_of_each_grades_coldest_the_one_of_the_largest_weighted_age_goes(weights: tuple[int, int, int], expected: list[int]) -> None:
    queues, records = queued(1, 0, 2, 0, 0, 1)
    queues.weights = weights
    planned = [records.index(record) for record in queues.coldest(0, 0, 99)]
    assert planned == [records.index(record) for record in queues.members(0)]
    assert queues.coldest(0, 0, 2) == [records[number] for number in planned[:2]]
    assert queues.content_by_priority(0) == {35: 6}, "of all grades"
    taken = []
    while (front := queues.front(0)) is not None:
        taken.append(records.index(front))
        queues.claim(front)
    assert taken == planned == expected
    assert queues.evictable == [0]
    assert queues.levels[0].occupied == []


def test_a_priority_counts_more_than_any_grade() -> None:
    queues, records = queued(2, 0)
    queues.claim(records[0])
    records[0].priority = 10
    queues.add_content(records[0], 0, 0.0)
    queues.weights = SEEN_FIRST
    assert queues.front(0) is records[0]


def test_every_list_is_of_one_kind() -> None:
    assert [kind_of(number) for number in (0, 100, 101, 102, 103, 104, 204, 205, 305)] == [0, 100, 101, 102, 103, 0, 100, 0, 100]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.sampled_from((LRU, HALVING, SEEN_FIRST, (3, 2, 5))))
@example([1, 1, 0], HALVING)  # the second and the third are equal: the lower grade goes
def test_a_lists_turn_ends_where_another_grades_begins(grades: list[int], weights: tuple[int, int, int]) -> None:
    queues, _records = queued(*grades)
    queues.weights = weights
    order = queues.coldest(0, 0, 99)
    head = queues.front_list(0)
    assert head is not None
    turn = next((number for number, record in enumerate(order) if record.queue != head.queue), len(order))
    last = queues.last_turn(head)
    assert [record for record in order if record.queue == head.queue and record.stamp <= last] == order[:turn]

"""Priorities by name, and the moment at which a priority ends."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import RequestError
from kvtier.policies.eviction import eviction_queues
from kvtier.policies.queue_record import QueueRecord
from kvtier.policies.retention import DEFAULT_PRIORITY, RetentionConfig, RetentionLevel, TokenRange


@pytest.mark.parametrize(("given", "number"), [("HIGH", RetentionLevel.HIGH), ("MEDIUM", DEFAULT_PRIORITY), ("LOW", RetentionLevel.LOW),
                                               ("high", RetentionLevel.HIGH), (RetentionLevel.LOW, RetentionLevel.LOW), (71, 71)])
def test_a_level_is_accepted_wherever_a_priority_is(given: Any, number: int) -> None:
    retention = RetentionConfig([TokenRange(0, None, given)], decode_priority=given)
    assert retention.for_position(5) == (number, None)
    assert retention.decode_priority == number
    assert TokenRange(0, None, given) == TokenRange(0, None, number)


def test_low_is_below_and_high_above_what_is_ordinary() -> None:
    assert 0 < RetentionLevel.LOW < RetentionLevel.MEDIUM == DEFAULT_PRIORITY < RetentionLevel.HIGH < 100


@pytest.mark.parametrize("name", ["", "HIGHEST", "35", "hi gh"])
def test_an_unknown_level_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(RequestError, match="HIGH, MEDIUM, LOW"):
        TokenRange(0, None, name)
    with pytest.raises(RequestError, match="HIGH, MEDIUM, LOW"):
        RetentionConfig(decode_priority=name)


def test_a_range_ends_after_a_duration_or_at_a_moment() -> None:
    retention = RetentionConfig([TokenRange(0, 8, 80, duration_seconds=5.0), TokenRange(8, 16, 80, expires_at=1e9), TokenRange(16, 20, 80)])
    assert [retention.for_position(position) for position in (0, 8, 16)] == [(80, 5.0), (80, -1e9), (80, None)]


def test_a_duration_together_with_a_moment_is_refused() -> None:
    with pytest.raises(RequestError, match="give one of them"):
        RetentionConfig([TokenRange(0, None, 80, duration_seconds=5.0, expires_at=1e9)])


@pytest.mark.parametrize("moment", [0.0, -1.0, float("nan"), float("inf"), "tomorrow", True])
def test_a_moment_is_a_positive_number_of_wall_clock_seconds(moment: Any) -> None:
    with pytest.raises(RequestError, match="wall-clock"):
        RetentionConfig([TokenRange(0, None, 80, expires_at=moment)])


def test_a_moment_counts_from_no_release() -> None:
    queues = eviction_queues("lru", 1)
    record = QueueRecord()
    record.priority = 80
    record.duration = -10.0
    for released in (1.0, 4.0, 9.0):
        queues.claim(record)
        queues.add_content(record, 0, released)
        assert record.expires_at == 10.0
    assert queues.refresh(9.9) == []
    assert queues.refresh(10.0) == [(record, 80)]
    assert (record.priority, record.duration, record.expires_at) == (35, 0.0, 0.0)


def test_a_moment_at_the_default_priority_means_nothing() -> None:
    queues = eviction_queues("lru", 1)
    record = QueueRecord()
    record.duration = -10.0
    queues.add_content(record, 0, 1.0)
    assert record.expires_at == 0.0

"""Retention: ranges, priorities and durations, and which range a block takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RequestError
from kvtier.policies import retention
from kvtier.policies.retention import RetentionConfig, TokenRange, check_priority
from kvtier.types import TransferMode

interpreted = pytest.mark.skipif(not str(retention.__file__).endswith(".py"), reason="compiled with mypyc, True is 1")


@pytest.mark.parametrize("ranges", [
    [(0, None), (64, 128)],
    [(0, 64), (64, 32)],
    [(0, 64), (30, 128)],
    [(0, 64), (63, 128)],
    [(-1, 64)],
    [(5, 5)],
    [(0, None), (64, None)],
])
def test_case_A7_ranges_that_overlap_are_empty_or_follow_an_open_one_are_refused(ranges: list[tuple[int, int | None]]) -> None:
    with pytest.raises(RequestError, match="TokenRange"):
        RetentionConfig([TokenRange(start, end, 50) for start, end in ranges])


@pytest.mark.parametrize("priority", [-1, 101, pytest.param(True, marks=interpreted), 1 << 70])
def test_a_priority_outside_0_to_100_is_refused(priority: int) -> None:
    with pytest.raises(RequestError, match="a whole number from 0"):
        RetentionConfig([TokenRange(0, 4, priority)])
    with pytest.raises(RequestError, match="decode_priority"):
        RetentionConfig(decode_priority=priority)
    with pytest.raises(RequestError, match="mine"):
        check_priority("mine", priority)


@pytest.mark.parametrize("priority", [0, 35, 100])
def test_the_bounds_of_a_priority_are_allowed(priority: int) -> None:
    assert RetentionConfig([TokenRange(0, 4, priority)], decode_priority=priority).for_position(0) == (priority, None)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e13])
def test_a_duration_that_is_not_positive_and_finite_is_refused(seconds: float) -> None:
    with pytest.raises(RequestError, match="duration"):
        RetentionConfig([TokenRange(0, 4, 80, seconds)])
    with pytest.raises(RequestError, match="duration"):
        RetentionConfig(decode_duration_seconds=seconds)


def test_case_A_a_block_takes_the_range_that_contains_its_first_token() -> None:
    config = RetentionConfig([TokenRange(0, 6, 80, 2.0), TokenRange(6, 9, 10)])
    assert config.for_position(0) == (80, 2.0)
    assert config.for_position(4) == (80, 2.0), "it goes on into the second range, and keeps the first one's priority"
    assert config.for_position(6) == (10, None)
    assert config.for_position(8) == (10, None)


def test_case_A_a_block_outside_every_range_takes_none() -> None:
    config = RetentionConfig([TokenRange(4, 8, 80)])
    assert config.for_position(3) == (None, None)
    assert config.for_position(8) == (None, None)
    assert RetentionConfig().for_position(0) == (None, None)


def test_an_open_range_reaches_to_the_end() -> None:
    assert RetentionConfig([TokenRange(4, None, 80)]).for_position(1_000_000) == (80, None)


def test_the_order_in_which_ranges_are_given_means_nothing() -> None:
    first, second = TokenRange(0, 4, 80), TokenRange(4, 8, 10)
    assert RetentionConfig([second, first]) == RetentionConfig([first, second])
    assert list(RetentionConfig([second, first]).ranges) == [first, second]


def test_touching_ranges_do_not_overlap() -> None:
    assert RetentionConfig([TokenRange(0, 4, 80), TokenRange(4, 5, 10)]).for_position(4) == (10, None)


def test_the_debug_file_mode_needs_a_directory() -> None:
    with pytest.raises(RequestError, match="directory"):
        RetentionConfig(transfer_mode=TransferMode.POSIX_DEBUG_FALLBACK)
    assert RetentionConfig(transfer_mode=TransferMode.POSIX_DEBUG_FALLBACK, directory="/x").directory == "/x"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 150), st.booleans())
def test_any_row_of_ranges_maps_every_position_as_a_table_does(lengths: list[int], position: int, is_open: bool) -> None:
    ranges: list[TokenRange] = []
    table: dict[int, int] = {}
    start = 0
    for number, length in enumerate(lengths):
        end = start + length
        last_open = is_open and number == len(lengths) - 1
        if number % 2 == 0 or last_open:
            ranges.append(TokenRange(start, None if last_open else end, number))
            table.update(dict.fromkeys(range(start, 200 if last_open else end), number))
        start = end
    assert RetentionConfig(ranges[::-1]).for_position(position)[0] == table.get(position)


def test_among_many_ranges_a_position_finds_the_one_it_lies_in() -> None:
    ranges = [TokenRange(10 * number, 10 * number + 5, number) for number in range(50)]
    config = RetentionConfig(list(reversed(ranges)))
    for position in range(520):
        expected = [item.priority for item in ranges if item.start <= position < (item.end or 0)]
        assert config.for_position(position) == ((expected[0], None) if expected else (None, None))

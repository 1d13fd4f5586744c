"""Coalescing of neighbouring slots into runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io.copy_runs import MAX_RUN_BYTES, check_slots, coalesce, rows_per_run

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=40, unique_by=lambda pair: pair[1])


@given(pairs=PAIRS, max_rows=st.integers(1, 9), source_piece=st.integers(0, 7), destination_piece=st.integers(0, 7))
def test_runs_cover_every_pair_exactly_once_and_keep_every_limit(
        pairs: list[tuple[int, int]], max_rows: int, source_piece: int, destination_piece: int) -> None:
    runs = coalesce(pairs, max_rows, source_piece, destination_piece)
    covered = [(run.source + row, run.destination + row) for run in runs for row in range(run.length)]
    assert sorted(covered) == sorted(pairs)
    assert [run.destination for run in runs] == sorted(run.destination for run in runs)
    for run in runs:
        assert 1 <= run.length <= max_rows
        for first, piece in ((run.source, source_piece), (run.destination, destination_piece)):
            assert piece == 0 or first // piece == (first + run.length - 1) // piece


def test_neighbours_on_both_sides_become_one_run_in_whatever_order_they_come() -> None:
    assert coalesce([(7, 3), (5, 1), (6, 2)], max_rows=100) == [(5, 1, 3)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    assert len(coalesce([(5, 1), (6, 3)], max_rows=100)) == 2
    assert len(coalesce([(5, 1), (7, 2)], max_rows=100)) == 2


def test_no_run_exceeds_one_gibibyte() -> None:
    block_bytes = 3 << 20
    rows = rows_per_run(block_bytes)
    assert rows * block_bytes <= MAX_RUN_BYTES < (rows + 1) * block_bytes
    runs = coalesce([(slot, slot) for slot in range(2 * rows + 1)], rows)
    assert [run.length for run in runs] == [rows, rows, 1]


def test_a_block_larger_than_the_limit_still_moves() -> None:
    assert rows_per_run(MAX_RUN_BYTES + 1) == 1


@pytest.mark.parametrize("pair", [(-1, 0), (0, -1), (4, 0), (0, 5)])
def test_a_slot_outside_its_memory_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match=f"slot {pair[0]} to slot {pair[1]}"):
        check_slots([(0, 0), pair], num_sources=4, num_destinations=5)

"""Neighbouring slots made into runs: what one memory copy can carry (design: transfer rules). Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

MAX_RUN_BYTES: Final = 1 << 30
"""No single copy is larger. Copies of several GiB have met 32-bit sizes in drivers and libraries."""

MAX_PITCH: Final = (1 << 31) - 1
"""The largest distance between two lines of a two-dimensional copy (``cudaDeviceProp::memPitch`` on every device so far)."""


class Run(NamedTuple):
    """``length`` blocks from slots ``source...`` to slots ``destination...``, neighbours on both sides."""

    source: int
    destination: int
    length: int


def rows_per_run(block_bytes: int) -> int:
    """How many blocks of this size one run may hold."""
    return max(1, MAX_RUN_BYTES // block_bytes)


def coalesce(pairs: Sequence[tuple[int, int]], max_rows: int, source_piece: int = 0,
             destination_piece: int = 0) -> list[Run]:
    """Join neighbouring slots into runs.

    Args:
        pairs: (source slot, destination slot), independent of each other, in any order.
        max_rows: the longest run.
        source_piece, destination_piece: a run never crosses a multiple of this many slots on that side; 0 for no such
            limit. (Host memory is registered with CUDA in pieces, and one copy must lie within one of them.)

    Returns:
        runs by ascending destination.
    """
    if len(pairs) == 1:
        return [Run(pairs[0][0], pairs[0][1], 1)]
    runs: list[Run] = []
    ordered = sorted(pairs, key=_by_destination)
    first_source, first_destination = ordered[0]
    count = 0
    for source, destination in ordered:
        joins = (source == first_source + count and destination == first_destination + count and count < max_rows
                 and not (source_piece and count and source % source_piece == 0)
                 and not (destination_piece and count and destination % destination_piece == 0))
        if not joins:
            runs.append(Run(first_source, first_destination, count))
            first_source, first_destination, count = source, destination, 0
        count += 1
    runs.append(Run(first_source, first_destination, count))
    return runs


def num_runs(pairs: Sequence[tuple[int, int]]) -> int:
    """How many runs there are, if none is too long."""
    ordered = sorted(pairs, key=_by_destination)
    return 1 + sum(1 for (source, destination), (next_source, next_destination) in pairwise(ordered)
                   if next_source != source + 1 or next_destination != destination + 1)


def check_slots(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int) -> None:
    """Raise IndexError for a slot outside its memory.

    A slice beyond the end is silently empty and a clipped index is silently another block, so both sides look first.
    """
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise IndexError(f"copy from slot {source} to slot {destination}: the source has slots 0 to "
                             f"{num_sources - 1}, the destination 0 to {num_destinations - 1}")


def _by_destination(pair: tuple[int, int]) -> int:
    return pair[1]

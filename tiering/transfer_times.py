"""``TransferTimes``: how long Moves take from their decision to their end, and how much of it they wait (design: statistics).

What is kept is a histogram for each route, whose buckets Prometheus can add up over ranks and machines.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.pools.pool_index import level_of
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer_results import MoveResult
from kvtier.types import Level

BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)
"""Upper ends of the buckets, in seconds: from one block over PCIe to a drive that hangs."""


@dataclass(frozen=True)
class TimeHistogram:
    """Durations by bucket. ``counts[n]``: those above ``BOUNDS[n - 1]`` and not above ``BOUNDS[n]``."""

    counts: tuple[int, ...]
    sum_seconds: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class _Counting:
    def __init__(self) -> None:
        self.counts = [0] * len(BOUNDS)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum_seconds += seconds

    def picture(self) -> TimeHistogram:
        return TimeHistogram(tuple(self.counts), self.sum_seconds)


class TransferTimes:
    """All Moves of one manager, those within the primary level included. Called under its lock; times are ``time.perf_counter``'s."""

    def __init__(self) -> None:
        self._issued: dict[int, float] = {}
        self._routes: dict[tuple[Level, Level], tuple[_Counting, _Counting]] = {}

    def issued(self, move: Move, now: float) -> None:
        """A Move has been decided."""
        self._issued[move.number] = now

    def ended(self, result: MoveResult) -> None:
        """It has ended. How long a failure took says nothing about the others."""
        issued = self._issued.pop(result.move.number, None)
        if issued is None or result.error is not None:
            return
        route = (Level(level_of(result.move.source)), Level(level_of(result.move.destination)))
        times = self._routes.get(route)
        if times is None:
            times = self._routes[route] = (_Counting(), _Counting())
        seconds = max(result.ended - issued, 0.0)
        times[0].observe(seconds)
        times[1].observe(max(seconds - result.seconds, 0.0))

    def durations(self) -> Mapping[tuple[Level, Level], TimeHistogram]:
        """By source and destination: seconds from the decision to the end."""
        return {route: times[0].picture() for route, times in self._routes.items()}

    def waits(self) -> Mapping[tuple[Level, Level], TimeHistogram]:
        """The same without each Move's own share of copies and file operations: what it waited for others."""
        return {route: times[1].picture() for route, times in self._routes.items()}

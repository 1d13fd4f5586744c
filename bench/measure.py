"""Interleaved timing: named alternatives take turns, so that a disturbance meets all of them alike.

The order of the turns is reversed from round to round. What a round prepares and checks is not timed. A ratio is the median
over rounds of the two times of one round: on a machine that others use too, only times that were taken side by side compare.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

LEAST_ROUNDS: Final = 5
"""Rounds that are run even when they take longer than the time allowed: a median and a range of fewer say little."""


def nothing() -> None:
    """The preparation and the check of an alternative that has none."""


@dataclass(frozen=True)
class Alternative:
    """One of the things compared.

    Attributes:
        name: what its times are kept under.
        run: the timed part. Returns None, or the seconds that it measured itself (a program with a clock of its own).
        prepare: called before ``run`` in every round, not timed.
        check: called after ``run`` in every round, not timed.
    """

    name: str
    run: Callable[[], float | None]
    prepare: Callable[[], None] = nothing
    check: Callable[[], None] = nothing


@dataclass(frozen=True)
class Spread:
    """A median and the range around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Interleaved:
    """The times of alternatives, round by round.

    Attributes:
        clock: seconds; only differences count.
    """

    clock: Callable[[], float] = time.perf_counter
    _seconds: dict[str, list[float]] = field(default_factory=dict)
    _rounds: int = 0

    def round(self, alternatives: Sequence[Alternative], warm_up: bool = False) -> None:
        """Give each alternative one turn; ``warm_up`` forgets the times. Every recorded round needs the same names."""
        ordered = alternatives if self._rounds % 2 == 0 else alternatives[::-1]
        collecting = gc.isenabled()
        gc.disable()  # a collection would fall to one of the turns by chance
        try:
            for alternative in ordered:
                seconds = self._turn(alternative)
                if not warm_up:
                    self._seconds.setdefault(alternative.name, []).append(seconds)
        finally:
            if collecting:
                gc.enable()
        if not warm_up:
            self._rounds += 1

    def _turn(self, alternative: Alternative) -> float:
        alternative.prepare()
        start = self.clock()
        own = alternative.run()
        seconds = self.clock() - start
        alternative.check()
        return seconds if own is None else own

    @property
    def rounds(self) -> int:
        """How many rounds have been recorded."""
        return self._rounds

    def has(self, name: str) -> bool:
        """Whether an alternative of this name was timed."""
        return name in self._seconds

    def seconds(self, name: str) -> Spread:
        """Seconds per turn."""
        return Spread.of(self._seconds[name])

    def rate(self, name: str, amount: float) -> Spread:
        """``amount`` per second, when one turn does ``amount``."""
        return Spread.of([amount / seconds for seconds in self._seconds[name]])

    def speed_ratio(self, name: str, other: str) -> float:
        """How many times as fast ``name`` is as ``other``: the median of the ratios within each round."""
        return self.speed_ratios(name, other).median

    def speed_ratios(self, name: str, other: str) -> Spread:
        """The same with the range that the rounds gave."""
        return Spread.of([theirs / ours for ours, theirs in zip(self._seconds[name], self._seconds[other], strict=True)])


def interleave(alternatives: Sequence[Alternative], rounds: int, *, warm_up: int = 1, seconds: float = float("inf"),
               clock: Callable[[], float] = time.perf_counter) -> Interleaved:
    """Run rounds of the same alternatives.

    Args:
        alternatives: what to compare; the limit first.
        rounds: how many are recorded.
        warm_up: rounds before that, which are forgotten.
        seconds: no further round begins after this time, once there are ``LEAST_ROUNDS``.
        clock: seconds, for the turns and for the time allowed.
    """
    measured = Interleaved(clock)
    start = clock()
    for _ in range(warm_up):
        measured.round(alternatives, warm_up=True)
    while measured.rounds < rounds and (measured.rounds < LEAST_ROUNDS or clock() - start < seconds):
        measured.round(alternatives)
    return measured

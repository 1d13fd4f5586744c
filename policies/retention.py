"""Retention: how long and how firmly a request's blocks are kept (design: public names; TensorRT-LLM's retention config)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, cast

from kvtier.errors import RequestError
from kvtier.types import TransferMode

DEFAULT_PRIORITY: Final = 35
MAX_PRIORITY: Final = 100
_start: Final = attrgetter("start")


def check_priority(name: str, priority: object) -> None:
    """Raise RequestError unless ``priority`` is a whole number in 0..100."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise RequestError(f"{name}={priority!r}: a priority is a whole number from 0 (drop first) to {MAX_PRIORITY}")


def check_duration(name: str, seconds: float | None) -> None:
    """Raise RequestError unless ``seconds`` is None or a positive finite number."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < 1e12):
        raise RequestError(f"{name}={seconds!r}: a duration is a positive number of seconds, or None for no limit")


def check_moment(name: str, seconds: float | None) -> None:
    """Raise RequestError unless ``seconds`` is None or a moment in wall-clock seconds. One that has passed is allowed."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < 1e12):
        raise RequestError(f"{name}={seconds!r}: a moment is a positive number of wall-clock seconds (time.time()), or None for never")


@dataclass(frozen=True)
class TokenRange:
    """Prompt tokens ``[start, end)`` and how their blocks are kept; ``end=None`` runs to the end of the prompt.

    ``priority`` is a number from 0 to 100, a :class:`RetentionLevel` or its name. It falls back to 35 when its time is over:
    ``duration_seconds`` after the block's last release, or at ``expires_at``, a moment in wall-clock seconds (``time.time()``) that no
    release moves. Not both.
    """

    start: int
    end: int | None
    priority: int | str  # a number once it is made
    duration_seconds: float | None = None
    expires_at: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", priority_of(f"TokenRange({self.start}, {self.end}): priority", self.priority))

    @property
    def lifetime(self) -> float | None:
        """Both kinds of time as one number: seconds from a release, or less than 0 for the moment in wall-clock seconds."""
        return self.duration_seconds if self.expires_at is None else -self.expires_at


@dataclass(frozen=True)
class RetentionConfig:
    """Retention of one request. A block takes the range that contains its first token, otherwise none.

    Raises:
        RequestError: a negative start, an empty or overlapping range, an open range that is not the last, a priority outside
            0..100, a duration together with a moment, POSIX_DEBUG_FALLBACK without a directory, a value of another type.
    """

    ranges: Sequence[TokenRange] = ()
    decode_priority: int | str = DEFAULT_PRIORITY  # a number once it is made
    decode_duration_seconds: float | None = None
    transfer_mode: TransferMode = TransferMode.DRAM
    directory: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ranges, Sequence) or any(not isinstance(item, TokenRange) for item in self.ranges):
            raise RequestError(f"ranges={self.ranges!r}: pass a list of TokenRange")
        for token_range in self.ranges:
            ends = token_range.start if token_range.end is None else token_range.end
            if type(token_range.start) is not int or type(ends) is not int:
                raise RequestError(f"TokenRange({token_range.start!r}, {token_range.end!r}): start and end are whole numbers "
                                   "(end may be None)")
        ordered = tuple(sorted(self.ranges, key=lambda r: r.start))
        object.__setattr__(self, "ranges", ordered)
        object.__setattr__(self, "decode_priority", priority_of("decode_priority", self.decode_priority))
        check_priority("decode_priority", self.decode_priority)
        check_duration("decode_duration_seconds", self.decode_duration_seconds)
        previous_end: int | None = 0
        for token_range in ordered:
            name = f"TokenRange({token_range.start}, {token_range.end})"
            check_priority(f"{name}: priority", token_range.priority)
            check_duration(f"{name}: duration_seconds", token_range.duration_seconds)
            check_moment(f"{name}: expires_at", token_range.expires_at)
            if token_range.duration_seconds is not None and token_range.expires_at is not None:
                raise RequestError(f"{name}: duration_seconds={token_range.duration_seconds} and expires_at={token_range.expires_at}; "
                                   "give one of them")
            if token_range.start < 0:
                raise RequestError(f"{name}: start must not be negative")
            if token_range.end is not None and token_range.end <= token_range.start:
                raise RequestError(f"{name}: end must be greater than start")
            if previous_end is None:
                raise RequestError(f"{name}: the range before it has no end; only the last range may be open")
            if token_range.start < previous_end:
                raise RequestError(f"{name}: overlaps the range that ends at {previous_end}; ranges must not overlap")
            previous_end = token_range.end
        if not isinstance(self.transfer_mode, TransferMode):
            raise RequestError(f"transfer_mode={self.transfer_mode!r}: pass a TransferMode")
        if self.directory is not None and not isinstance(self.directory, str):
            raise RequestError(f"directory={self.directory!r}: pass the path as text, or None")
        if self.transfer_mode is TransferMode.POSIX_DEBUG_FALLBACK and not self.directory:
            raise RequestError("transfer_mode=POSIX_DEBUG_FALLBACK needs directory=..., a folder for one file per block")

    def for_position(self, position: int) -> tuple[int | None, float | None]:
        """(priority, lifetime) of the prompt block whose first token is at ``position``; (None, None) outside every range."""
        before = bisect_right(self.ranges, position, key=_start)  # the ranges that start at or before it; they are sorted
        if before:
            token_range = self.ranges[before - 1]
            if token_range.end is None or position < token_range.end:
                return cast(int, token_range.priority), token_range.lifetime
        return None, None


class RetentionLevel:
    """Priorities by name, accepted wherever a priority is: as these numbers, or as the strings "HIGH", "MEDIUM" and "LOW"."""

    HIGH: Final = 80    # given up after everything ordinary, on every level
    MEDIUM: Final = DEFAULT_PRIORITY
    LOW: Final = 10     # given up first, and below the default thresholds: never offloaded to host memory or NVMe


LEVELS: Final = {"HIGH": RetentionLevel.HIGH, "MEDIUM": RetentionLevel.MEDIUM, "LOW": RetentionLevel.LOW}


def priority_of(name: str, priority: int | str) -> int:
    """The number that a level's name stands for; numbers as they are. Raises RequestError for an unknown name."""
    if not isinstance(priority, str):
        return priority
    value = LEVELS.get(priority.upper())
    if value is None:
        raise RequestError(f"{name}={priority!r}: a level is one of {', '.join(LEVELS)}, or a whole number from 0 to {MAX_PRIORITY}")
    return value

"""``QueueRecord``: what an eviction queue keeps in each handle (design: policies own the intrusive queue record)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.policies.retention import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled; plain ints otherwise

NOT_QUEUED: Final = -1


class RecordExtra:
    """What few records have, kept apart so that the others need not pay for it: how long a priority lasts."""

    __slots__ = ("duration", "expires_at")

    def __init__(self) -> None:
        self.duration = 0.0
        self.expires_at = 0.0


class QueueRecord:
    """What a queue keeps in each handle. ``Block`` extends it.

    Attributes:
        previous, next: neighbours in its list; stale while it is in none.
        queue: the list the record was inserted in (level and priority), so that it is unlinked from there even after its level
            or priority changed.
        stamp: orders records by their last release.
        grade_list: where the lists of its grade begin, see ``GRADE_LISTS``.
        extra: its rarely used part, if it has any.
    """

    __slots__ = ("extra", "grade_list", "next", "previous", "priority", "queue", "stamp")

    def __init__(self) -> None:
        self.previous: QueueRecord = self
        self.next: QueueRecord = self
        self.queue: i64 = NOT_QUEUED
        self.stamp: i64 = 0
        self.priority: i64 = DEFAULT_PRIORITY
        self.grade_list: i64 = 0
        self.extra: RecordExtra | None = None

    @property
    def duration(self) -> float:
        """Seconds from release until the priority falls back to 35; 0.0 = for ever; -t = until t, on the clock of release()."""
        extra = self.extra
        return 0.0 if extra is None else extra.duration

    @duration.setter
    def duration(self, seconds: float) -> None:
        if seconds != 0.0 or self.extra is not None:
            self.own_extra().duration = seconds
            self.tidy_extra()

    @property
    def expires_at(self) -> float:
        """On the clock of release(); 0.0 = never."""
        extra = self.extra
        return 0.0 if extra is None else extra.expires_at

    @expires_at.setter
    def expires_at(self, moment: float) -> None:
        if moment != 0.0 or self.extra is not None:
            self.own_extra().expires_at = moment
            self.tidy_extra()

    def own_extra(self) -> RecordExtra:
        """The rarely used part, made when there is none."""
        if self.extra is None:
            self.extra = RecordExtra()
        return self.extra

    def tidy_extra(self) -> None:
        """Let go of the rarely used part when it says nothing."""
        extra = self.extra
        if extra is not None and extra.duration == 0.0 and extra.expires_at == 0.0:
            self.extra = None

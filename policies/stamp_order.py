"""Where a record belongs in a list that is ordered by stamps, the oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.policies.queue_record import QueueRecord

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled; plain ints otherwise

NEAR: Final = 64  # records looked at around an old neighbour before a list is searched from its ends
NOWHERE: Final = QueueRecord()
"""In no list."""


def beside(neighbour: QueueRecord, stamp: int) -> QueueRecord:
    """The warmest record of the neighbour's list that is not warmer than ``stamp``, if it is near; otherwise one that is in no list."""
    steps: i64 = NEAR
    place = neighbour
    while place.stamp > stamp:  # the head's is 0
        place = place.previous
        steps -= 1
        if steps == 0:
            return NOWHERE
    while place.next.stamp <= stamp and place.next.stamp != 0:
        place = place.next
        steps -= 1
        if steps == 0:
            return NOWHERE
    return place


def from_both_ends(head: QueueRecord, stamp: int) -> QueueRecord:
    """The warmest record of a list that is not warmer than ``stamp``; the head when there is none."""
    colder = head.previous
    warmer = head.next
    while colder is not head and colder.stamp > stamp:
        if warmer is head or warmer.stamp > stamp:
            return warmer.previous
        colder = colder.previous
        warmer = warmer.next
    return colder

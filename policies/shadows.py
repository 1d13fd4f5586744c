"""``Shadows``: what several sets of weights would do with the same traffic, tried on a sample of its keys.

A shadow is a cache of keys without content under one set of weights. Of each sampled key all shadows keep an entry in one place, so that a
use looks the key up once. Source: miniature simulations (Waldspurger et al., USENIX ATC'17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled; plain ints otherwise

NUM_GRADES: Final = 3
ABSENT: Final = -1

Weights = tuple[int, int, int]
"""By grade, what an age counts for: 1 as it is, 4 as four times as old."""


class Entry:
    """One key in one shadow, in the list of its grade; ABSENT while the shadow does not have it. Also both ends of such a list."""

    __slots__ = ("grade", "next", "owner", "previous", "stamp")

    def __init__(self, owner: SampledKey | None = None) -> None:
        self.owner = owner
        self.previous: Entry = self
        self.next: Entry = self
        self.grade: i64 = ABSENT
        self.stamp: i64 = 0


class SampledKey:
    """A key that at least one shadow has, with its entry in each of them."""

    __slots__ = ("entries", "key", "num_present")

    def __init__(self, num_shadows: int) -> None:
        self.key: object = None
        self.num_present: i64 = 0
        self.entries = [Entry(self) for _ in range(num_shadows)]


class Shadow:
    """A cache of keys under one set of weights.

    Attributes:
        room: how many more keys it has room for; negative until :meth:`give_up` has been called as often.
        hits: uses of keys that it had.
    """

    def __init__(self, weights: Weights, capacity: int) -> None:
        self.weights = weights
        self.room: i64 = capacity
        self.hits = 0.0
        self._new = Entry()  # the head of each grade's list, oldest key first
        self._known = Entry()
        self._popular = Entry()

    def use(self, entry: Entry, grade: i64, stamp: i64) -> bool:
        """A request uses a key, which becomes the youngest of its grade. Returns whether the shadow had it."""
        is_hit = entry.grade != ABSENT
        if is_hit:
            self.hits += 1.0
            if entry.grade > grade:
                grade = entry.grade
            before = entry.previous
            after = entry.next
            before.next = after
            after.previous = before
        else:
            self.room -= 1
        head = self._new if grade == 0 else self._known if grade == 1 else self._popular
        last = head.previous
        entry.previous = last
        entry.next = head
        last.next = entry
        head.previous = entry
        entry.grade = grade
        entry.stamp = stamp
        return is_hit

    def give_up(self, now: i64) -> Entry:
        """Of each grade's oldest key, the one of the largest age x weight is there no more."""
        head = self._new
        most: i64 = -1
        if head.next is not head:
            most = (now - head.next.stamp) * self.weights[0]
        other = self._known
        if other.next is not other:
            age: i64 = (now - other.next.stamp) * self.weights[1]
            if age > most:
                most = age
                head = other
        other = self._popular
        if other.next is not other and (now - other.next.stamp) * self.weights[2] > most:
            head = other
        entry = head.next
        after = entry.next
        head.next = after
        after.previous = head
        entry.grade = ABSENT
        self.room += 1
        return entry


class Shadows:
    """Several shadows of one size.

    Args:
        candidates: their weights.
        capacity: keys that each of them holds.
    """

    def __init__(self, candidates: tuple[Weights, ...], capacity: int) -> None:
        self._shadows = [Shadow(weights, capacity) for weights in candidates]
        self._keys: dict[object, SampledKey] = {}
        self._spare: list[SampledKey] = []  # of keys that no shadow has any more, to be used again
        self._stamp: i64 = 0

    def use(self, keys: list[object], grades: list[int]) -> None:
        """A request uses keys, each with its grade. The end of a prompt is used before its beginning."""
        stamp = self._stamp
        shadows = self._shadows
        known = self._keys
        for place in range(len(keys) - 1, -1, -1):
            sampled = known.get(keys[place])
            if sampled is None:
                sampled = self._spare.pop() if self._spare else SampledKey(len(shadows))
                sampled.key = keys[place]
                known[sampled.key] = sampled
            stamp += 1
            grade: i64 = grades[place]
            entries = sampled.entries
            for number, shadow in enumerate(shadows):
                if not shadow.use(entries[number], grade, stamp):
                    sampled.num_present += 1
        self._stamp = stamp
        for shadow in shadows:
            while shadow.room < 0:
                owner = shadow.give_up(stamp + 1).owner
                assert owner is not None
                owner.num_present -= 1
                if owner.num_present == 0:
                    del known[owner.key]
                    self._spare.append(owner)

    def forget_half(self) -> None:
        """Older hits count half."""
        for shadow in self._shadows:
            shadow.hits /= 2

    def best(self, least_gain: float) -> Weights:
        """The weights with the most hits; the first ones unless others have more than ``least_gain`` times as many."""
        best = self._shadows[0]
        least = best.hits * least_gain
        for shadow in self._shadows[1:]:
            if shadow.hits > least and shadow.hits > best.hits:
                best = shadow
        return best.weights

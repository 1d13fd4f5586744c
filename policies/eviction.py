"""Eviction queues: which slot of a level is given up next (design: taking a slot of a level).

Every unreferenced handle of a group stands in exactly one intrusive, doubly linked list: per level one list of empty handles,
two of backings, and three per priority (0..100) of cached content, one for each grade, least recently used first. The order of taking
is: an empty handle, then a backing, then one of the fronts of the lowest non-empty priority: that of the largest age x weight of its
grade. Without a history of uses (``lru``) everything has grade 0. Source of the scheme: the priority-LRU eviction policy of
TensorRT-LLM's KV cache manager; empties first, backings and grades (``use_history``) are ours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvtier.policies.named import candidates_of
from kvtier.policies.queue_record import NOT_QUEUED, QueueRecord
from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.policies.shadows import NUM_GRADES, Weights
from kvtier.policies.stamp_order import beside, from_both_ends

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled; plain ints otherwise

NUM_PRIORITIES: Final = 101
EMPTY: Final = 101          # list of empty handles, behind the lists of priorities 0..100
BACKING: Final = 102        # list of backings that are given up before content
KEPT_BACKING: Final = 103   # list of backings that are given up only together with what they back
GRADE_LISTS: Final = (0, 104, 205)  # by grade, where its lists of priorities 0..100 begin
LISTS_PER_LEVEL: Final = 306


class LevelQueues:
    """Counters of one level. ``occupied``: ascending priorities that hold content."""

    __slots__ = ("evictable", "free", "occupied")

    def __init__(self) -> None:
        self.free: i64 = 0
        self.evictable: i64 = 0
        self.occupied: list[int] = []


class ListHead(QueueRecord):
    """Both ends of one list: ``next`` is its front, ``previous`` its back. ``queue`` is its own number.

    Attributes:
        kind: the priority, or EMPTY, BACKING, KEPT_BACKING.
        grades: of content, the lists of this priority by grade; the first of them counts for all (``content``).
    """

    __slots__ = ("content", "grades", "kind", "length", "level")

    def __init__(self, level: LevelQueues, kind: int, queue: int) -> None:
        super().__init__()
        self.level = level
        self.kind: i64 = kind
        self.queue = queue
        self.length: i64 = 0
        self.content: i64 = 0
        self.grades: list[ListHead] = [self]


class EvictionQueues:
    """The queues of one group over all its levels. Each operation is O(1) except expiry (a heap) and ``restore_content``."""

    def __init__(self, num_levels: int) -> None:
        self.levels: list[LevelQueues] = [LevelQueues() for _ in range(num_levels)]
        self.heads: list[ListHead] = []
        for level in self.levels:
            first = len(self.heads)
            for number in range(LISTS_PER_LEVEL):
                self.heads.append(ListHead(level, kind_of(number), len(self.heads)))
            for priority in range(NUM_PRIORITIES):
                grades = [self.heads[first + start + priority] for start in GRADE_LISTS]
                for head in grades:
                    head.grades = grades
        self.weights: Weights = (1, 1, 1)
        self.next_stamp: i64 = 1
        self.expiries: list[tuple[float, int, QueueRecord]] = []

    # -- entering a queue ------------------------------------------------------------------------------------------------

    def add_empty_first(self, record: QueueRecord, level: int) -> None:
        """A handle given back without content: taken before every other one."""
        head = self.heads[level * LISTS_PER_LEVEL + EMPTY]
        _insert_after(head, record, head)

    def add_empty_last(self, record: QueueRecord, level: int) -> None:
        """A handle never used, or the spare of a promotion: taken after the other empty ones."""
        head = self.heads[level * LISTS_PER_LEVEL + EMPTY]
        _insert_after(head.previous, record, head)

    def add_never_used(self, records: Sequence[QueueRecord], level: int) -> None:
        """The same for all handles of a level at once, in this order: a large level has millions."""
        head = self.heads[level * LISTS_PER_LEVEL + EMPTY]
        queue = head.queue
        last = head.previous
        for record in records:
            assert record.queue == NOT_QUEUED
            record.queue = queue
            record.previous = last
            last.next = record
            last = record
        last.next = head
        head.previous = last
        count = len(records)
        head.length += count
        head.level.free += count

    def add_backing(self, record: QueueRecord, level: int) -> None:
        """A spare that holds the lower copy of a promoted block."""
        head = self.heads[level * LISTS_PER_LEVEL + BACKING]
        _insert_after(head.previous, record, head)

    def add_kept_backing(self, record: QueueRecord, level: int) -> None:
        """A lower copy that nobody may take from what it backs."""
        head = self.heads[level * LISTS_PER_LEVEL + KEPT_BACKING]
        _insert_after(head.previous, record, head)

    def add_content(self, record: QueueRecord, level: int, now: float) -> None:
        """Cached content, just released: to the back of its priority. Its duration, if any, starts now."""
        self.note_release(record, now)
        self.restore_content(record, level)

    def note_release(self, record: QueueRecord, now: float) -> None:
        """The moment of a release, from which LRU order and duration count, for a record that is busy and queued only later."""
        self.note_use(record)
        extra = record.extra
        if extra is not None:
            if extra.duration == 0.0 or record.priority == DEFAULT_PRIORITY:
                extra.expires_at = 0.0
            else:
                extra.expires_at = now + extra.duration if extra.duration > 0.0 else -extra.duration

    def note_use(self, record: QueueRecord) -> None:
        """Most recently used from now on, without a release: what is left of its duration stays."""
        record.stamp = self.next_stamp
        self.next_stamp += 1

    def add_newest(self, record: QueueRecord, level: int) -> None:
        """Content found at start: most recently used of all, without a release. What is left of its duration stays."""
        self.note_use(record)
        self.restore_content(record, level)

    def restore_content(self, record: QueueRecord, level: int) -> None:
        """Queue content where its last release or use puts it. It may have been busy since, without being used.

        What was just released belongs at the back. What was busy is looked for beside the neighbour it had, then from both ends.
        """
        head = self.heads[level * LISTS_PER_LEVEL + record.priority + record.grade_list]
        stamp = record.stamp
        colder = head.previous
        if colder is not head and colder.stamp > stamp:
            neighbour = record.previous
            colder = beside(neighbour, stamp) if neighbour.queue == head.queue else neighbour
            if colder.queue != head.queue:
                colder = from_both_ends(head, stamp)
        extra = record.extra
        if extra is not None and extra.expires_at > 0.0:
            self._await_expiry(record, extra.expires_at)
        _insert_after(colder, record, head)

    # -- leaving a queue -------------------------------------------------------------------------------------------------

    def claim(self, record: QueueRecord) -> None:
        """Take the record out of the queue it was inserted in. Harmless on a record that is in none."""
        queue = record.queue
        if queue != NOT_QUEUED:
            record.queue = NOT_QUEUED
            self.unlink(record, record, queue, 1)

    def unlink(self, coldest: QueueRecord, warmest: QueueRecord, queue: int, count: int) -> None:
        """Take a run of ``count`` neighbours out of their list at once. The caller marks each of them as NOT_QUEUED."""
        before = coldest.previous
        after = warmest.next
        before.next = after
        after.previous = before
        head = self.heads[queue]
        level = head.level
        level.free -= count
        head.length -= count
        if head.kind < NUM_PRIORITIES:
            level.evictable -= count
            first = head.grades[0]
            first.content -= count
            if first.content == 0:
                del level.occupied[bisect_left(level.occupied, head.kind)]

    def appended(self, warmest: QueueRecord, queue: int, count: int) -> None:
        """Close a run of ``count`` records of content that the caller has linked to the back of this list, and marked and stamped."""
        head = self.heads[queue]
        warmest.next = head
        head.previous = warmest
        level = head.level
        first = head.grades[0]
        if first.content == 0:
            insort(level.occupied, head.kind)
        first.content += count
        level.free += count
        level.evictable += count
        head.length += count

    def front_list(self, level: int) -> ListHead | None:
        """The list whose front would be taken next at this level. None when nothing can be taken."""
        base = level * LISTS_PER_LEVEL
        head = self.heads[base + EMPTY]
        if head.length > 0:
            return head
        head = self.heads[base + BACKING]
        if head.length > 0:
            return head
        return self._content_list(level)

    def _content_list(self, level: int) -> ListHead | None:
        """The list whose front is the content that goes next at this level."""
        occupied = self.levels[level].occupied
        if not occupied:
            return None
        head = self.heads[level * LISTS_PER_LEVEL + occupied[0]]
        return head if head.content == head.length else self._worst_grade(head)

    def coldest_content(self, level: int) -> QueueRecord | None:
        """The content that goes next at this level, after what is empty and the backings."""
        head = self._content_list(level)
        return None if head is None else head.next

    def _worst_grade(self, first: ListHead) -> ListHead:
        """Of one priority's lists, the one whose front is to go next."""
        worst = first
        most: i64 = -1
        for grade in range(NUM_GRADES):
            head = first.grades[grade]
            if head.length > 0:
                weight: i64 = self.weights[grade]
                age = (self.next_stamp - head.next.stamp) * weight
                if age > most:
                    most = age
                    worst = head
        return worst

    def last_turn(self, head: ListHead) -> int:
        """The stamp up to which the records of a list, from whose front one is to go next, go before those of all other grades."""
        first = head.grades[0]
        if first.content == head.length:
            return int(self.next_stamp)
        least: i64 = 0
        own: i64 = 1
        is_behind = False
        for grade in range(NUM_GRADES):
            other = first.grades[grade]
            weight: i64 = self.weights[grade]
            if other is head:
                own = weight
                is_behind = True
            elif other.length > 0:
                age = (self.next_stamp - other.next.stamp) * weight
                if not is_behind:
                    age += 1  # of two that are equal the lower grade goes
                if age > least:
                    least = age
        return int(self.next_stamp - (least + own - 1) // own)

    def front(self, level: int) -> QueueRecord | None:
        """The handle that would be taken next at this level; it stays queued. None when nothing can be taken."""
        head = self.front_list(level)
        return None if head is None else head.next

    def refresh(self, now: float) -> list[tuple[QueueRecord, int]]:
        """Expire: content whose duration has passed falls to priority 35, at the back. Returns what fell, and from where."""
        fallen: list[tuple[QueueRecord, int]] = []
        expiries = self.expiries
        while expiries and expiries[0][0] <= now:
            entry = heapq.heappop(expiries)
            if not _is_awaited(entry):
                continue
            record = entry[2]
            level = record.queue // LISTS_PER_LEVEL
            fallen.append((record, record.priority))
            self.claim(record)
            record.priority = DEFAULT_PRIORITY
            record.duration = 0.0
            record.expires_at = 0.0
            self.add_content(record, level, now)
        return fallen

    # -- looking ---------------------------------------------------------------------------------------------------------

    def num_free(self, level: int) -> int:
        """Handles queued at a level, whatever they hold."""
        return self.levels[level].free

    @property
    def free(self) -> list[int]:
        """:meth:`num_free` of each level."""
        return [level.free for level in self.levels]

    @property
    def evictable(self) -> list[int]:
        """Handles queued that hold content, by level."""
        return [level.evictable for level in self.levels]

    def backing_count(self, level: int) -> int:
        base = level * LISTS_PER_LEVEL
        return self.heads[base + BACKING].length + self.heads[base + KEPT_BACKING].length

    def content_by_priority(self, level: int) -> dict[int, int]:
        """How many records of content there are of each priority that has any, ascending."""
        base = level * LISTS_PER_LEVEL
        return {priority: int(self.heads[base + priority].content) for priority in self.levels[level].occupied}

    def coldest(self, level: int, min_priority: int, limit: int) -> list[QueueRecord]:
        """Up to ``limit`` records of content of at least ``min_priority``, in the order in which they would be given up."""
        found: list[QueueRecord] = []
        for priority in self.levels[level].occupied:
            if priority < min_priority:
                continue
            head = self.heads[level * LISTS_PER_LEVEL + priority]
            if head.content > head.length:
                found.extend(self._merged(head, limit - len(found)))
                if len(found) >= limit:
                    return found
                continue
            record = head.next
            while record is not head:
                if len(found) >= limit:
                    return found
                found.append(record)
                record = record.next
        return found

    def _merged(self, first: ListHead, limit: int) -> list[QueueRecord]:
        """Up to ``limit`` records of one priority, over all grades, in the order in which they would be given up."""
        found: list[QueueRecord] = []
        places: list[QueueRecord] = [head.next for head in first.grades]
        now = self.next_stamp
        while True:
            worst = -1
            most: i64 = -1
            least: i64 = 0  # from which on this list's records go before every other's
            for grade in range(NUM_GRADES):
                if places[grade] is not first.grades[grade]:
                    value = (now - places[grade].stamp) * self.weights[grade]
                    if value > most:
                        least = most + 1
                        most = value
                        worst = grade
                    elif value > least:
                        least = value
            if worst < 0:
                return found
            head = first.grades[worst]
            record = places[worst]
            weight: i64 = self.weights[worst]
            while record is not head and (now - record.stamp) * weight >= least:
                if len(found) >= limit:
                    return found
                found.append(record)
                record = record.next
            places[worst] = record

    def members(self, level: int) -> list[QueueRecord]:
        """Every record queued at a level, in the order of taking, kept backings last. For checks and tools: O(n)."""
        found: list[QueueRecord] = []
        for kind in (EMPTY, BACKING, *self.levels[level].occupied, KEPT_BACKING):
            head = self.heads[level * LISTS_PER_LEVEL + kind]
            if head.content > head.length:
                found.extend(self._merged(head, head.content))
                continue
            record = head.next
            while record is not head:
                found.append(record)
                record = record.next
        return found

    def _await_expiry(self, record: QueueRecord, moment: float) -> None:
        """Entries that no longer count stay in the heap until their time or, where they are the most, until they are swept."""
        if len(self.expiries) > 2 * sum([level.evictable for level in self.levels]) + 64:
            self.expiries = [entry for entry in self.expiries if _is_awaited(entry)]
            heapq.heapify(self.expiries)
        heapq.heappush(self.expiries, (moment, record.stamp, record))


def _insert_after(place: QueueRecord, record: QueueRecord, head: ListHead) -> None:
    assert record.queue == NOT_QUEUED
    after = place.next
    record.previous = place
    record.next = after
    after.previous = record
    place.next = record
    record.queue = head.queue
    level = head.level
    level.free += 1
    if head.kind < NUM_PRIORITIES:
        first = head.grades[0]
        if first.content == 0:
            insort(level.occupied, head.kind)
        first.content += 1
        level.evictable += 1
    head.length += 1


def _is_awaited(entry: tuple[float, int, QueueRecord]) -> bool:
    """Whether the record still is the content whose expiry was noted: neither claimed, nor released again, nor forgotten since."""
    expires_at, stamp, record = entry
    is_content = record.queue != NOT_QUEUED and kind_of(record.queue % LISTS_PER_LEVEL) < NUM_PRIORITIES
    return is_content and record.stamp == stamp and record.expires_at == expires_at


def kind_of(number: int) -> int:
    """What a list holds, by its number within its level: a priority, or EMPTY, BACKING, KEPT_BACKING."""
    for start in GRADE_LISTS:
        if start <= number < start + NUM_PRIORITIES:
            return number - start
    return number


def eviction_queues(policy: str, num_levels: int) -> EvictionQueues:
    """The queues for a policy's name. ConfigError for one that there is not."""
    queues = EvictionQueues(num_levels)
    queues.weights = candidates_of(policy)[0]
    return queues

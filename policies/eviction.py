"""Eviction queues: which slot of a level is given up next (design: taking a slot of a level).

Every unreferenced handle of a group stands in exactly one intrusive, doubly linked list: per level one list of empty handles,
one of backings, and one per priority (0..100) of cached content, least recently used first. The order of taking is: an empty
handle, then a backing, then the front of the lowest non-empty priority. Source of the scheme: the priority-LRU eviction policy
of TensorRT-LLM's KV cache manager; empties first and backings are ours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Final

from kvtier.errors import ConfigError
from kvtier.policies.retention import DEFAULT_PRIORITY

NUM_PRIORITIES: Final = 101
EMPTY: Final = 101          # list of empty handles, behind the lists of priorities 0..100
BACKING: Final = 102        # list of backings
LISTS_PER_LEVEL: Final = 103
NOT_QUEUED: Final = -1


class QueueRecord:
    """What a queue keeps in each handle. ``Block`` extends it.

    ``queue`` remembers the list the record was inserted in (level and priority), so that it is unlinked from there even after
    its level or priority changed. ``stamp`` orders records by their last release.
    """

    def __init__(self) -> None:
        self.previous: QueueRecord = self
        self.next: QueueRecord = self
        self.queue = NOT_QUEUED
        self.stamp = 0
        self.priority = DEFAULT_PRIORITY
        self.duration = 0.0     # seconds from release until the priority falls back to 35; 0.0 = for ever; -t = at t, on release's clock
        self.expires_at = 0.0   # on the clock of release(); 0.0 = never


class EvictionQueues:
    """The queues of one group over all its levels. Each operation is O(1) except expiry (a heap) and ``restore_content``."""

    def __init__(self, num_levels: int) -> None:
        self.heads: list[QueueRecord] = [QueueRecord() for _ in range(num_levels * LISTS_PER_LEVEL)]
        self.lengths: list[int] = [0] * (num_levels * LISTS_PER_LEVEL)
        self.occupied: list[list[int]] = [[] for _ in range(num_levels)]  # ascending priorities that hold content
        self.free: list[int] = [0] * num_levels
        self.evictable: list[int] = [0] * num_levels
        self.next_stamp = 1
        self.expiries: list[tuple[float, int, QueueRecord]] = []

    # -- entering a queue ------------------------------------------------------------------------------------------------

    def add_empty_first(self, record: QueueRecord, level: int) -> None:
        """A handle given back without content: taken before every other one."""
        queue = level * LISTS_PER_LEVEL + EMPTY
        self._insert_after(self.heads[queue], record, queue, level)

    def add_empty_last(self, record: QueueRecord, level: int) -> None:
        """A handle never used, or the spare of a promotion: taken after the other empty ones."""
        queue = level * LISTS_PER_LEVEL + EMPTY
        self._insert_after(self.heads[queue].previous, record, queue, level)

    def add_backing(self, record: QueueRecord, level: int) -> None:
        """A spare that holds the lower copy of a promoted block."""
        queue = level * LISTS_PER_LEVEL + BACKING
        self._insert_after(self.heads[queue].previous, record, queue, level)

    def add_content(self, record: QueueRecord, level: int, now: float) -> None:
        """Cached content, just released: to the back of its priority. Its duration, if any, starts now."""
        self.note_release(record, now)
        self.restore_content(record, level)

    def note_release(self, record: QueueRecord, now: float) -> None:
        """The moment of a release, from which LRU order and duration count, for a record that is busy and queued only later."""
        self.note_use(record)
        duration = record.duration
        if duration == 0.0 or record.priority == DEFAULT_PRIORITY:
            record.expires_at = 0.0
        else:
            record.expires_at = now + duration if duration > 0.0 else -duration

    def note_use(self, record: QueueRecord) -> None:
        """Most recently used from now on, without a release: what is left of its duration stays."""
        record.stamp = self.next_stamp
        self.next_stamp += 1

    def restore_content(self, record: QueueRecord, level: int) -> None:
        """Queue content where its last release or use puts it. It may have been busy since, without being used.

        Looked for from both ends: what was just released belongs at the back, what was written ahead near the front.
        """
        queue = level * LISTS_PER_LEVEL + record.priority
        head = self.heads[queue]
        colder = head.previous
        warmer = head.next
        while colder is not head and colder.stamp > record.stamp:
            if warmer is head or warmer.stamp > record.stamp:
                colder = warmer.previous
                break
            colder = colder.previous
            warmer = warmer.next
        if record.expires_at > 0.0:
            self._await_expiry(record)
        self._insert_after(colder, record, queue, level)

    # -- leaving a queue -------------------------------------------------------------------------------------------------

    def claim(self, record: QueueRecord) -> None:
        """Take the record out of the queue it was inserted in. Harmless on a record that is in none."""
        queue = record.queue
        if queue == NOT_QUEUED:
            return
        record.previous.next = record.next
        record.next.previous = record.previous
        record.previous = record
        record.next = record
        record.queue = NOT_QUEUED
        level = queue // LISTS_PER_LEVEL
        self.lengths[queue] -= 1
        self.free[level] -= 1
        kind = queue - level * LISTS_PER_LEVEL
        if kind < NUM_PRIORITIES:
            self.evictable[level] -= 1
            if self.lengths[queue] == 0:
                priorities = self.occupied[level]
                del priorities[bisect_left(priorities, kind)]

    def front(self, level: int) -> QueueRecord | None:
        """The handle that would be taken next at this level; it stays queued. None when the level has no free handle."""
        base = level * LISTS_PER_LEVEL
        if self.lengths[base + EMPTY] > 0:
            return self.heads[base + EMPTY].next
        if self.lengths[base + BACKING] > 0:
            return self.heads[base + BACKING].next
        priorities = self.occupied[level]
        if priorities:
            return self.heads[base + priorities[0]].next
        return None

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

    def coldest(self, level: int, min_priority: int, limit: int) -> list[QueueRecord]:
        """Up to ``limit`` records of content of at least ``min_priority``, in the order in which they would be given up."""
        found: list[QueueRecord] = []
        for priority in self.occupied[level]:
            if priority < min_priority:
                continue
            head = self.heads[level * LISTS_PER_LEVEL + priority]
            record = head.next
            while record is not head:
                if len(found) >= limit:
                    return found
                found.append(record)
                record = record.next
        return found

    def backings(self, level: int, limit: int) -> list[QueueRecord]:
        """Up to ``limit`` backings, in the order in which they would be given up."""
        found: list[QueueRecord] = []
        head = self.heads[level * LISTS_PER_LEVEL + BACKING]
        record = head.next
        while record is not head and len(found) < limit:
            found.append(record)
            record = record.next
        return found

    def empty_count(self, level: int) -> int:
        return self.lengths[level * LISTS_PER_LEVEL + EMPTY]

    def backing_count(self, level: int) -> int:
        return self.lengths[level * LISTS_PER_LEVEL + BACKING]

    def members(self, level: int) -> list[QueueRecord]:
        """Every record queued at a level, in the order of taking. For checks and tools: O(n)."""
        found: list[QueueRecord] = []
        for kind in (EMPTY, BACKING, *self.occupied[level]):
            head = self.heads[level * LISTS_PER_LEVEL + kind]
            record = head.next
            while record is not head:
                found.append(record)
                record = record.next
        return found

    def _await_expiry(self, record: QueueRecord) -> None:
        """Entries that no longer count stay in the heap until their time or, where they are the most, until they are swept."""
        if len(self.expiries) > 2 * sum(self.evictable) + 64:
            self.expiries = [entry for entry in self.expiries if _is_awaited(entry)]
            heapq.heapify(self.expiries)
        heapq.heappush(self.expiries, (record.expires_at, record.stamp, record))

    def _insert_after(self, place: QueueRecord, record: QueueRecord, queue: int, level: int) -> None:
        assert record.queue == NOT_QUEUED
        record.previous = place
        record.next = place.next
        place.next.previous = record
        place.next = record
        record.queue = queue
        self.free[level] += 1
        if queue - level * LISTS_PER_LEVEL < NUM_PRIORITIES:
            if self.lengths[queue] == 0:
                insort(self.occupied[level], record.priority)
            self.evictable[level] += 1
        self.lengths[queue] += 1


def _is_awaited(entry: tuple[float, int, QueueRecord]) -> bool:
    """Whether the record still is the content whose expiry was noted: neither claimed, nor released again, nor forgotten since."""
    expires_at, stamp, record = entry
    is_content = record.queue != NOT_QUEUED and record.queue % LISTS_PER_LEVEL < NUM_PRIORITIES
    return is_content and record.expires_at == expires_at and record.stamp == stamp


def eviction_queues(policy: str, num_levels: int) -> EvictionQueues:
    """The queues for a policy's name. ``default`` and ``lru`` are both priority-LRU for now."""
    if policy not in ("default", "lru"):
        raise ConfigError(f"policy={policy!r}: unknown; use 'default' or 'lru'")
    return EvictionQueues(num_levels)

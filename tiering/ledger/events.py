"""KV events: what a router learns about the cache (design: public names; TensorRT-LLM's created/stored/removed/updated).

Removed hashes are collected and published before the next Stored of their group, or at ``flush``. Event ids ascend by one from 0,
so that a subscriber sees a gap when events were dropped.

The ledger only notes which keys an event is about (a ``KeyRun`` and positions in it). Hashes and token tuples are made when
somebody reads ``Event.data``, on the reader's time and without the ledger's lock; most events are read by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.tiering.ledger.key import KeyRun


@dataclass(frozen=True)
class Created:
    """Published once per group at the start. ``num_blocks_per_level``: blocks of each level that has any."""

    num_blocks_per_level: tuple[int, ...]


@dataclass(frozen=True)
class StoredBlock:
    """One block that entered the reuse tree.

    ``block_hash`` is its SHA-256 chain key; ``level`` 0, 1 or 2; ``multimodal`` (digest, offset inside the item) of each run of a
    multimodal item that it overlaps.
    """

    block_hash: bytes
    tokens: tuple[int, ...]
    lora_id: int | None
    cache_salt: str | None
    level: int
    priority: int
    multimodal: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True)
class Stored:
    """Consecutive blocks that entered the tree behind ``parent_hash`` (None at the start of a prompt)."""

    parent_hash: bytes | None
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True)
class Removed:
    """Blocks that left the tree."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Updated:
    """A block changed its level or its priority: (old, new), or None where it did not change."""

    block_hash: bytes
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None


EventData = Created | Stored | Removed | Updated


class Note:
    """What an event is about, before anybody has read it."""

    __slots__ = ()

    def data(self) -> EventData:
        raise NotImplementedError


class StoredNote(Note):
    """Blocks of ``spans``, each (run, first position, count), on one level."""

    __slots__ = ("_level", "_priorities", "_spans")

    def __init__(self, spans: list[tuple[KeyRun, int, int]], level: int, priorities: list[int]) -> None:
        self._spans = spans
        self._level = level
        self._priorities = priorities

    def data(self) -> EventData:
        blocks: list[StoredBlock] = []
        is_mixed = len(self._priorities) > 1
        for run, first, count in self._spans:
            run.chain_key(first + count - 1)  # the last one first: that computes all of them in one go
            for position in range(first, first + count):
                blocks.append(StoredBlock(run.chain_key(position), run.token_ids(position), run.namespace.lora_id, run.namespace.cache_salt,
                                          self._level, self._priorities[len(blocks) if is_mixed else 0], run.multimodal(position)))
        run, first, _count = self._spans[0]
        return Stored(run.parent_chain_key(first), tuple(blocks))


class RemovedRange:
    """Neighbouring positions of a run, in the order in which they were removed: from ``oldest`` to ``newest``."""

    __slots__ = ("newest", "oldest", "run")

    def __init__(self, run: KeyRun, oldest: int, newest: int) -> None:
        self.run = run
        self.oldest = oldest
        self.newest = newest


class RemovedNote(Note):
    """Blocks of ranges."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: list[RemovedRange]) -> None:
        self._ranges = ranges

    def data(self) -> EventData:
        hashes: list[bytes] = []
        for removed in self._ranges:
            run, oldest, newest = removed.run, removed.oldest, removed.newest
            run.chain_key(max(oldest, newest))
            step = 1 if newest >= oldest else -1
            for position in range(oldest, newest + step, step):
                hashes.append(run.chain_key(position))
        return Removed(tuple(hashes))


class UpdatedNote(Note):
    """One block's change."""

    __slots__ = ("_is_level", "_new", "_old", "_position", "_run")

    def __init__(self, run: KeyRun, position: int, is_level: bool, old: int, new: int) -> None:
        self._run = run
        self._position = position
        self._is_level = is_level
        self._old = old
        self._new = new

    def data(self) -> EventData:
        change = (self._old, self._new)
        key = self._run.chain_key(self._position)
        return Updated(key, change, None) if self._is_level else Updated(key, None, change)


class Event:
    """One event of one group. Immutable; equal when the content is. ``data`` is made when first read."""

    __slots__ = ("_content", "_event_id", "_group")

    def __init__(self, event_id: int, group: int, data: EventData | Note) -> None:
        self._event_id = event_id
        self._group = group
        self._content = data

    @property
    def event_id(self) -> int:
        return self._event_id

    @property
    def group(self) -> int:
        return self._group

    @property
    def data(self) -> EventData:
        content = self._content
        if isinstance(content, Note):  # two threads that get here at once make the same
            made = content.data()
            self._content = made
            return made
        return content

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, Event) and self._event_id == other._event_id and self._group == other._group
                and self.data == other.data)

    def __hash__(self) -> int:
        return hash((self._event_id, self._group, self.data))

    def __repr__(self) -> str:
        return f"Event(event_id={self._event_id}, group={self._group}, data={self.data!r})"


class EventLog:
    """Collects events until ``flush`` hands them over as one batch.

    Keeps the newest ``max_events``: whoever never flushes must not fill the memory. With 0 nothing is collected.
    """

    def __init__(self, max_events: int, num_groups: int) -> None:
        self.enabled = max_events > 0
        self._max_events = max_events
        self._next_id = 0
        self._removed: list[list[RemovedRange]] = [[] for _ in range(num_groups)]
        self._events: list[Event] = []

    def created(self, group: int, num_blocks_per_level: tuple[int, ...]) -> None:
        if self.enabled:
            self._publish(group, Created(num_blocks_per_level))

    def stored(self, group: int, spans: list[tuple[KeyRun, int, int]], level: int, priorities: list[int]) -> None:
        """Consecutive blocks entered the tree, all on one level. The lists are the log's from now on.

        Args:
            spans: (run, first position, count), in prompt order.
            priorities: one for each block, or a single one that all of them have.
        """
        if self.enabled and spans:
            self._publish_removed(group)
            self._publish(group, StoredNote(spans, level, priorities))

    def removed(self, group: int, run: KeyRun, position: int) -> None:
        """One block left the tree. Evictions go along a run, so neighbours are kept as a range."""
        if not self.enabled:
            return
        ranges = self._removed[group]
        if ranges:
            last = ranges[len(ranges) - 1]
            if last.run is run and ((position == last.newest - 1 and last.newest <= last.oldest)
                                    or (position == last.newest + 1 and last.newest >= last.oldest)):
                last.newest = position
                return
        self._remove_range(group, run, position, position)

    def removed_span(self, group: int, run: KeyRun, first: int, end: int) -> None:
        """Blocks ``end - 1`` down to ``first`` of a run left the tree."""
        if not self.enabled or first >= end:
            return
        ranges = self._removed[group]
        if ranges:
            last = ranges[len(ranges) - 1]
            if last.run is run and end == last.newest and last.newest <= last.oldest:
                last.newest = first
                return
        self._remove_range(group, run, end - 1, first)

    def level_changed(self, group: int, run: KeyRun, position: int, old: int, new: int) -> None:
        if self.enabled:
            self._publish(group, UpdatedNote(run, position, True, old, new))

    def priority_changed(self, group: int, run: KeyRun, position: int, old: int, new: int) -> None:
        if self.enabled:
            self._publish(group, UpdatedNote(run, position, False, old, new))

    def flush(self) -> list[Event]:
        """Everything since the last flush, in order; of more than ``max_events`` the newest."""
        for group in range(len(self._removed)):
            self._publish_removed(group)
        batch = self._events
        if not batch:
            return []
        self._events = []
        if len(batch) > self._max_events:
            del batch[:len(batch) - self._max_events]
        return batch

    def _remove_range(self, group: int, run: KeyRun, oldest: int, newest: int) -> None:
        ranges = self._removed[group]
        ranges.append(RemovedRange(run, oldest, newest))
        if len(ranges) >= self._max_events:
            self._publish_removed(group)

    def _publish_removed(self, group: int) -> None:
        ranges = self._removed[group]
        if ranges:
            self._removed[group] = []
            self._publish(group, RemovedNote(ranges))

    def _publish(self, group: int, content: EventData | Note) -> None:
        events = self._events
        events.append(Event(self._next_id, group, content))
        self._next_id += 1
        if len(events) >= 2 * self._max_events:  # the oldest ones go, many at a time
            del events[:len(events) - self._max_events]

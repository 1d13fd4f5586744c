"""KV events: what a router learns about the cache (design: public names; TensorRT-LLM's created/stored/removed/updated).

Removed hashes are collected and published before the next Stored, or at ``flush``. Event ids ascend by one from 0, so that a
subscriber sees a gap when events were dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Created:
    """Published once per group at the start. ``num_blocks_per_level``: blocks of each level that has any."""

    num_blocks_per_level: tuple[int, ...]


@dataclass(frozen=True)
class StoredBlock:
    """One block that entered the reuse tree. ``block_hash`` is its SHA-256 chain key; ``level`` 0, 1 or 2."""

    block_hash: bytes
    tokens: tuple[int, ...]
    lora_id: int | None
    cache_salt: str | None
    level: int
    priority: int


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


@dataclass(frozen=True)
class Event:
    """One event of one group."""

    event_id: int
    group: int
    data: EventData


class EventLog:
    """Collects events until ``flush`` hands them over as one batch.

    Keeps the newest ``max_events``: whoever never flushes must not fill the memory. With 0 nothing is collected.
    """

    def __init__(self, max_events: int, num_groups: int) -> None:
        self.enabled = max_events > 0
        self._max_events = max_events
        self._next_id = 0
        self._removed: list[list[bytes]] = [[] for _ in range(num_groups)]
        self._events: deque[Event] = deque(maxlen=max_events)

    def created(self, group: int, num_blocks_per_level: tuple[int, ...]) -> None:
        if self.enabled:
            self._publish(group, Created(num_blocks_per_level))

    def stored(self, group: int, parent_hash: bytes | None, blocks: list[StoredBlock]) -> None:
        if self.enabled and blocks:
            self._publish_removed(group)
            self._publish(group, Stored(parent_hash, tuple(blocks)))

    def removed(self, group: int, block_hash: bytes) -> None:
        if self.enabled:
            self._removed[group].append(block_hash)
            if len(self._removed[group]) >= self._max_events:
                self._publish_removed(group)

    def level_changed(self, group: int, block_hash: bytes, old: int, new: int) -> None:
        if self.enabled:
            self._publish(group, Updated(block_hash, (old, new), None))

    def priority_changed(self, group: int, block_hash: bytes, old: int, new: int) -> None:
        if self.enabled:
            self._publish(group, Updated(block_hash, None, (old, new)))

    def flush(self) -> list[Event]:
        """Everything since the last flush, in order."""
        for group in range(len(self._removed)):
            self._publish_removed(group)
        batch = list(self._events)
        self._events.clear()
        return batch

    def _publish_removed(self, group: int) -> None:
        hashes = self._removed[group]
        if hashes:
            self._removed[group] = []
            self._publish(group, Removed(tuple(hashes)))

    def _publish(self, group: int, data: EventData) -> None:
        self._events.append(Event(self._next_id, group, data))
        self._next_id += 1

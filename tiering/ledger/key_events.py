"""Events of a keyed tier: which keys came to a level and which left it (design: two ways to attach; self-describing, one presence each).

A key may be on both levels at once. Whoever follows the events from the first one on knows exactly what each level holds: verified
bytes, not what is still on its way.
"""

from __future__ import annotations

from typing import Final

MAX_KEYS: Final = 4096
"""Of one event: what nobody reads must not grow without an end."""


class KeyEvent:
    """Keys of one group that came to, or left, one level.

    Attributes:
        event_id: ascending by one from 0, so that a reader sees a gap where events were dropped.
        group: of all keys.
        level: 1 (``Level.SECONDARY``) or 2 (``Level.NVME``).
        keys: in the order in which it happened.
        is_removed: they left it; otherwise they came to it.
    """

    __slots__ = ("event_id", "group", "is_removed", "keys", "level")

    def __init__(self, event_id: int, group: int, level: int, keys: tuple[bytes, ...], is_removed: bool) -> None:
        self.event_id: Final = event_id
        self.group: Final = group
        self.level: Final = level
        self.keys: Final = keys
        self.is_removed: Final = is_removed

    def __repr__(self) -> str:
        what = "removed" if self.is_removed else "stored"
        return f"KeyEvent({self.event_id}, group={self.group}, level={self.level}, {what}={self.keys!r})"


class KeyEventLog:
    """Collects events, neighbours of one kind as one; of more than ``max_events`` the newest are kept. With 0 nothing is collected."""

    def __init__(self, max_events: int) -> None:
        self.enabled = max_events > 0
        self.dropped = 0
        self._max_events = max_events
        self._next_id = 0
        self._events: list[KeyEvent] = []
        self._kind = -1  # group, level and direction of the keys being collected
        self._keys: list[bytes] = []

    def stored(self, group: int, level: int, key: bytes) -> None:
        if self.enabled:
            self._add(group << 3 | level << 1, key)

    def removed(self, group: int, level: int, key: bytes) -> None:
        if self.enabled:
            self._add(group << 3 | level << 1 | 1, key)

    def flush(self) -> list[KeyEvent]:
        """Everything since the last flush, in order."""
        self._close()
        batch = self._events
        if not batch:
            return []
        self._events = []
        self._cut(batch)
        return batch

    def _add(self, kind: int, key: bytes) -> None:
        if kind != self._kind or len(self._keys) >= MAX_KEYS:
            self._close()
            self._kind = kind
        self._keys.append(key)

    def _close(self) -> None:
        keys = self._keys
        if not keys:
            return
        kind = self._kind
        self._keys = []
        self._events.append(KeyEvent(self._next_id, kind >> 3, kind >> 1 & 3, tuple(keys), kind & 1 == 1))
        self._next_id += 1
        if len(self._events) >= 2 * self._max_events:
            self._cut(self._events)

    def _cut(self, events: list[KeyEvent]) -> None:
        surplus = len(events) - self._max_events
        if surplus > 0:
            del events[:surplus]
            self.dropped += surplus

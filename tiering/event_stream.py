"""One bounded buffer and its readers: every reader sees every event, and a slow one sees a gap (design: events).

Events are kept once. A reader is nothing but a position, so that one more of them costs no copy. What all readers have read is
let go; what comes before the first reader is kept for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from kvtier.errors import ConfigError
from kvtier.tiering import arguments

logger = logging.getLogger(__name__)

T = TypeVar("T")
EVENTS_IN_A_ROW: Final = 64  # a reader that always finds another one lets the event loop's other tasks run after so many


class EventBuffer(Generic[T]):
    """The newest ``max_size`` events that some reader has not had yet.

    Thread-safe. ``dropped`` counts events that went before everybody had them.
    """

    def __init__(self, max_size: int, name: str = "events", limit_name: str = "event_buffer_max_size") -> None:
        self.max_size = max_size
        self.dropped = 0
        self._name = name
        self._limit_name = limit_name
        self._kept: deque[T] = deque()
        self._first = 0  # how many came before the first one kept: readers' positions count from the same start
        self._taker: EventStream[T] | None = None
        self._readers: list[weakref.ref[EventStream[T]]] = []
        self._sleepers: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_warned = False
        self._has_informed = False

    def put(self, batch: Sequence[T], lost_before: int = 0) -> None:
        """Add a batch; over the limit the oldest go first. ``lost_before``: events that went before they came here."""
        if not self.max_size:
            return
        with self._changed:
            self._let_go()
            self._kept.extend(batch)
            too_many = max(len(self._kept) - self.max_size, 0)
            for _ in range(too_many):
                self._kept.popleft()
            self._first += too_many
            self.dropped += too_many + lost_before
            if too_many or lost_before:
                self._warn()
            self._wake()

    def stream(self) -> EventStream[T]:
        """A new reader. It starts with the oldest event still kept: what it has missed shows in the ids.

        Raises:
            ConfigError: events are turned off.
        """
        if not self.max_size:
            raise ConfigError(f"{self._limit_name}=0 turns {self._name} off; give it a size to read them")
        with self._changed:
            stream = EventStream(self, self._first)
            self._readers.append(weakref.ref(stream))
            return stream

    def take(self, timeout: float) -> list[T]:
        """What has come since the last call; waits up to ``timeout`` seconds for the first. Empty when none came or events are off.

        All callers together are one reader, from the first call on.
        """
        if not self.max_size:
            return []
        with self._changed:
            if self._taker is None:
                self._taker = self.stream()
        return self._taker.poll(timeout)

    def close(self) -> None:
        """Nothing more comes: wake everybody who waits. What is kept can still be read."""
        with self._changed:
            self._is_closed = True
            self._wake()

    # -- for EventStream, which holds the lock -----------------------------------------------------------------------------

    def _read(self, position: int, limit: int) -> tuple[list[T], int]:
        """Up to ``limit`` events from a position on, and the position after them."""
        start = max(position, self._first)
        end = min(self._first + len(self._kept), start + limit)
        if start == self._first and end - start == len(self._kept):
            return list(self._kept), end
        return [self._kept[number - self._first] for number in range(start, end)], end

    def _let_go(self) -> None:
        """Forget what every reader has read. Readers that were closed or dropped count no more."""
        readers = [reader for reference in self._readers if (reader := reference()) is not None and not reader.is_closed]
        if len(readers) < len(self._readers):
            self._readers = [weakref.ref(reader) for reader in readers]
        if not readers:
            return
        needed = min(reader.position for reader in readers)
        while self._first < needed:
            self._kept.popleft()
            self._first += 1

    def _wake(self) -> None:
        self._changed.notify_all()
        for sleeper, loop in self._sleepers.items():
            try:
                loop.call_soon_threadsafe(_end_sleep, sleeper)
            except RuntimeError:  # the loop was closed while somebody slept in it
                pass
        self._sleepers.clear()

    def _warn(self) -> None:
        """Once: a warning where somebody reads and has missed events, a hint where nobody does."""
        if self._readers and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: more than %d waited to be read, the oldest are dropped; the ids show the gap. Read more often or raise %s",
                           self._name, self.max_size, self._limit_name)
        elif not self._readers and not self._has_informed:
            self._has_informed = True
            logger.info("%s: more than %d came and nobody reads any, the oldest are dropped; %s=0 turns them off", self._name,
                        self.max_size, self._limit_name)


class EventStream(Generic[T]):
    """One reader: ``async for event in stream``, or :meth:`poll` from a thread.

    It sees every event from where it started, also what other readers read. Two tasks that read the same stream share it:
    each event goes to one of them. A stream that is dropped or closed holds nothing back; a cancelled wait has taken nothing,
    and the stream may be read on.
    """

    def __init__(self, buffer: EventBuffer[T], position: int) -> None:
        self.position = position
        self.is_closed = False
        self._buffer = buffer
        self._rest: deque[T] = deque()  # after close(): what had come until then
        self._in_a_row = 0

    @property
    def max_size(self) -> int:
        """Most events that wait to be read."""
        return self._buffer.max_size

    @property
    def is_over(self) -> bool:
        """Nothing more will come, apart from what can be read now."""
        return self.is_closed or self._buffer._is_closed

    def poll(self, timeout: float = 0.0) -> list[T]:
        """All events that have come, oldest first; waits up to ``timeout`` seconds for the first. Empty when none came."""
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        with self._buffer._changed:
            while True:
                found = self._take(self._buffer.max_size)
                left = deadline - time.monotonic()
                if found or self.is_over or left <= 0:
                    return found
                self._buffer._changed.wait(left)

    def __aiter__(self) -> EventStream[T]:
        return self

    async def __anext__(self) -> T:
        """The next event, waited for without holding up the event loop. Ends when the buffer or the stream is closed."""
        if self._in_a_row >= EVENTS_IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        while True:
            with self._buffer._changed:
                found = self._take(1)
                if found:
                    self._in_a_row += 1
                    return found[0]
                if self.is_over:
                    raise StopAsyncIteration
                sleeper: asyncio.Future[None] = loop.create_future()
                self._buffer._sleepers[sleeper] = loop
            self._in_a_row = 0
            try:
                await sleeper
            finally:
                with self._buffer._changed:
                    self._buffer._sleepers.pop(sleeper, None)

    def close(self) -> None:
        """Take no more events, and wake whoever waits for one. Those that have come can still be read."""
        with self._buffer._changed:
            if not self.is_closed:
                self._rest.extend(self._take(self._buffer.max_size))
                self.is_closed = True
                self._buffer._let_go()
                self._buffer._wake()

    async def aclose(self) -> None:
        """:meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    def _take(self, limit: int) -> list[T]:
        if self.is_closed:
            return [self._rest.popleft() for _ in range(min(limit, len(self._rest)))]
        found, self.position = self._buffer._read(self.position, limit)
        if found:
            self._buffer._let_go()
        return found


def _end_sleep(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():  # cancelled meanwhile
        sleeper.set_result(None)

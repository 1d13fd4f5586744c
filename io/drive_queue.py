"""``DriveQueue``: how many file operations a drive gets at once, and which go first (design: reads before writes).

A load that waits overtakes stores: it keeps somebody's first token waiting, a store keeps nobody. More operations at once than
the drive needs only add latency to each of them, so the depth is found by measuring.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

YIELD_SECONDS: Final = 0.05
"""The longest that one write stands back behind reads: a load without end must not end all storing."""

_PATIENCE: Final = 5.0
"""Seconds after which an operation takes the place of one before it: that one hangs, and depth is only about speed."""

_WINDOW_BYTES: Final = 64 << 20
_WINDOW_TURNS: Final = 8
_WORTH_IT: Final = 1.05
"""One more operation at once has to bring this much throughput."""
_NO_LOSS: Final = 0.98
_REST: Final = 8
"""Windows between two trials, more after each one that was not worth it: a trial of one too few costs throughput."""
_LONGEST_REST: Final = 256


class AdaptiveDepth:
    """Finds the least number of operations at once that reaches the drive's throughput, by trying one more or one fewer.

    Args:
        most: never more than this.
        start: where to begin.

    Attributes:
        depth: the number now, at least 1.
    """

    def __init__(self, most: int, start: int) -> None:
        self.depth = max(1, min(start, most))
        self._most = most
        self._step = 1
        self._before = 0  # the depth that a trial is held against; 0 while there is none
        self._rate = 0.0
        self._rest = _REST  # windows until the next trial
        self._next_rest = 2 * _REST
        self._start = 0.0
        self._bytes = 0
        self._operations = 0

    def note(self, num_bytes: int, now: float, is_saturated: bool) -> None:
        """An operation has ended. ``is_saturated``: another one has been waiting for its turn; otherwise the drive was not the limit,
        and its throughput says nothing."""
        if not is_saturated:
            self._bytes = self._operations = 0
            return
        if self._operations == 0:
            self._start = now
        else:
            self._bytes += num_bytes
        self._operations += 1
        if self._bytes >= _WINDOW_BYTES and self._operations > _WINDOW_TURNS * self.depth and now > self._start:
            self._judge(self._bytes / (now - self._start))
            self._bytes = self._operations = 0

    def _judge(self, rate: float) -> None:
        """The throughput of one window at the present depth."""
        if self._before:
            worth = _WORTH_IT if self.depth > self._before else _NO_LOSS
            if rate >= worth * self._rate:
                self._rest, self._next_rest = _REST, 2 * _REST
            else:
                self.depth = self._before
                self._step = -self._step
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._before = 0
            return
        self._rate = rate
        self._rest -= 1
        if self._rest > 0:
            return
        if not 1 <= self.depth + self._step <= self._most:
            self._step = -self._step
        if 1 <= self.depth + self._step <= self._most:
            self._before = self.depth
            self.depth += self._step


class _Turn:
    """One operation's turn. No generator: that takes longer, and every block comes by here."""

    __slots__ = ("_num_bytes", "_queue")

    def __init__(self, queue: DriveQueue, num_bytes: int) -> None:
        self._queue = queue
        self._num_bytes = num_bytes


class ReadTurn(_Turn):
    """One read's turn; see :meth:`DriveQueue.reading`."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._queue.begin_read(self)

    def __exit__(self, *_: object) -> None:
        self._queue.end_read(self, self._num_bytes)


class WriteTurn(_Turn):
    """One write's turn; see :meth:`DriveQueue.writing`."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._queue.begin_write(self, self._num_bytes)

    def __exit__(self, *_: object) -> None:
        self._queue.end_write(self, self._num_bytes)


class DriveQueue:
    """Turns for reads and writes of one drive. Thread-safe.

    Args:
        read_depth, write_depth: most reads, and most writes, at once.
        write_bytes_per_second: stores are spread out to this rate; None for no limit.
        clock: seconds, for tests.
    """

    def __init__(self, read_depth: int, write_depth: int, write_bytes_per_second: float | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._write_rate = write_bytes_per_second
        self._next_write = 0.0
        self._hurries = threading.Event()
        self._lock = threading.Lock()
        self._read_turn = threading.Condition(self._lock)
        self._write_turn = threading.Condition(self._lock)
        self._read_depth = AdaptiveDepth(read_depth, start=2)
        self._write_depth = AdaptiveDepth(write_depth, start=write_depth)
        self._reads: dict[object, float] = {}  # in the drive, oldest first and since when, without those whose place was taken
        self._writes: dict[object, None] = {}
        self._waiting_reads = self._waiting_writes = 0

    def reading(self, num_bytes: int) -> ReadTurn:
        """``with queue.reading(n):`` around a read of so many bytes."""
        return ReadTurn(self, num_bytes)

    def begin_read(self, turn: ReadTurn) -> None:
        """Wait for this turn."""
        with self._lock:
            if len(self._reads) >= self._read_depth.depth:
                self._waiting_reads += 1
                try:
                    if not self._read_turn.wait_for(lambda: len(self._reads) < self._read_depth.depth, _PATIENCE):
                        del self._reads[next(iter(self._reads))]
                finally:
                    self._waiting_reads -= 1
            self._reads[turn] = self._clock()

    def end_read(self, turn: ReadTurn, num_bytes: int) -> None:
        """This turn is over."""
        with self._lock:
            self._read_depth.note(num_bytes, self._clock(), self._waiting_reads > 0)
            self._reads.pop(turn, None)  # not there when another one has its place
            if self._waiting_reads:
                self._read_turn.notify(2)  # after a step up there are two places
            elif self._waiting_writes and not self._is_read_from():
                self._write_turn.notify_all()

    def writing(self, num_bytes: int) -> WriteTurn:
        """``with queue.writing(n):`` around a write of so many bytes: behind all reads that wait or run, for a while."""
        return WriteTurn(self, num_bytes)

    def begin_write(self, turn: WriteTurn, num_bytes: int) -> None:
        """Wait for this turn."""
        self._keep_to_rate(num_bytes)
        with self._lock:
            self._waiting_writes += 1
            try:
                if self._is_read_from():
                    self._write_turn.wait_for(lambda: not self._is_read_from(), YIELD_SECONDS)
                if len(self._writes) >= self._write_depth.depth \
                        and not self._write_turn.wait_for(lambda: len(self._writes) < self._write_depth.depth, _PATIENCE):
                    del self._writes[next(iter(self._writes))]
            finally:
                self._waiting_writes -= 1
            self._writes[turn] = None

    def end_write(self, turn: WriteTurn, num_bytes: int) -> None:
        """This turn is over."""
        with self._lock:
            self._write_depth.note(num_bytes, self._clock(), self._waiting_writes > 0)
            self._writes.pop(turn, None)
            if self._waiting_writes:
                self._write_turn.notify_all()

    def hurry(self) -> None:
        """From now on stores are not spread out any more: somebody who closes the store waits for those that have begun."""
        self._hurries.set()

    def _is_read_from(self) -> bool:
        """Whether a read waits or runs that writes stand back for: not for one that hangs. Lock held."""
        return self._waiting_reads > 0 or any(self._clock() - start < _PATIENCE for start in self._reads.values())

    def _keep_to_rate(self, num_bytes: int) -> None:
        if self._write_rate is None or self._hurries.is_set():
            return
        with self._write_turn:
            now = self._clock()
            start = max(now, self._next_write)
            self._next_write = start + num_bytes / self._write_rate
        if start > now:
            self._hurries.wait(start - now)

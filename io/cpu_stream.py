"""``CpuStream``: a stream on the CPU, one worker thread that takes work from a queue.

A copy releases the GIL, so what is to be done in Python after one copy can be done while the next one runs: a second thread
calls back when there is a next one. Small blocks need it: their bookkeeping takes a good part of the time of their copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from kvtier.errors import ConfigError, TransferError
from kvtier.io.streams import Event
from kvtier.io.threads import start_thread

_log = logging.getLogger(__name__)

_PATIENCE: Final = 0.5
"""Seconds between two looks at whether the stream was given up, while it waits for another stream's event."""

_LONGEST_TURN: Final = 0.001
"""Seconds for which a thread makes way for a worker that has not woken up yet: some 50 microseconds are usual, and on a machine whose
cores are all busy nobody knows when the worker will be given one. To go on the thread needs the GIL again, as after everything that gives
it up: beside Python threads that never do, that takes a switch interval (5 ms) for each of them."""


class CpuEvent:
    """The end of one piece of work.

    A lock that is held until the work has ended serves as the gate: one C call each for making, opening and passing it,
    where ``threading.Event`` builds a condition with a Python-level waiter list.
    """

    __slots__ = ("_done", "_gate", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the work has ended, at most ``timeout`` seconds; False when time ran out."""
        if self._done:
            return True
        if timeout is None or timeout > threading.TIMEOUT_MAX:
            timeout = -1.0
        elif timeout < 0.0:
            timeout = 0.0
        if not self._gate.acquire(timeout=timeout):
            return self._done
        self._gate.release()
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """The work has ended. Called once, by the stream."""
        self.error = error
        self._done = True
        self._gate.release()


def finished_event() -> CpuEvent:
    """An event that is done already: on the CPU the engine has no stream of its own to wait for."""
    event = CpuEvent()
    event.finish()
    return event


_Item = tuple[Callable[[], None], Sequence[Event], CpuEvent, Callable[[Event], None] | None]


class CpuStream:
    """One worker thread that carries out work in submission order, and one that reports it while the worker is busy.

    The threads are daemons: work that hangs in the kernel must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._given_up = False
        self._over: SimpleQueue[tuple[Callable[[Event], None], Event] | None] = SimpleQueue()
        self._num_handed_over = 0  # written by the worker only
        self._num_reported = 0  # written by the reporter only
        self._reporter: threading.Thread | None = None  # until it is needed
        self._woken = finished_event()  # not done: the worker sleeps, or has something to do and has not woken up yet
        try:
            self._thread = start_thread(self._run, f"kvtier-{name}")
        except BaseException:  # cut short, it may have been started
            self._queue.put(None)
            raise

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (),
               done: Callable[[Event], None] | None = None) -> CpuEvent:
        """Queue ``work`` behind ``after``; see ``Stream.submit``."""
        event = CpuEvent()
        # The lock keeps work from slipping in behind the closing mark, where nobody would ever take it.
        with self._lock:
            if self._closed:
                raise TransferError(f"stream {self.name}: closed, it takes no more work")
            self._queue.put((work, after, event, done))
        return event

    def let_begin(self) -> None:
        """Make way for a worker that slept until now; see ``Stream.let_begin``."""
        if not self._queue.empty():
            self._woken.wait(_LONGEST_TURN)

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for everything submitted so far, its completion callbacks included; False when time ran out."""
        reported = CpuEvent()
        self.submit(_nothing, done=lambda _event: reported.finish())
        return reported.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is queued and end the threads; False when that took more than ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            self._given_up = True
            return False
        if self._reporter is not None:
            self._reporter.join(max(deadline - time.monotonic(), 0.0))
            return not self._reporter.is_alive()
        return True

    def _run(self) -> None:
        while (item := self._next()) is not None:
            work, after, event, done = item
            error: BaseException | None = None
            try:
                for earlier in after:
                    self._wait_for(earlier)
                if self._given_up:
                    raise TransferError(f"stream {self.name}: closed before this work began")
                work()
            except BaseException as caught:  # whatever it is, it belongs to this work and not to the next
                error = caught
            event.finish(error)
            if done is not None:
                self._report(done, event)
            # An idle worker must not keep the last batch and what it refers to alive.
            del item, work, after, event, done, error
        if self._reporter is not None:
            self._over.put(None)

    def _next(self) -> _Item | None:
        woken = self._woken = CpuEvent()
        item = self._queue.get()
        woken.finish()
        return item

    def _report(self, done: Callable[[Event], None], event: Event) -> None:
        """Call back, in submission order: here when nothing else waits, otherwise beside the next work."""
        if self._queue.empty() and self._num_handed_over == self._num_reported:
            self._call(done, event)
            return
        if self._reporter is None:
            try:
                self._reporter = start_thread(self._run_reporter, f"kvtier-{self.name}-report")
            except ConfigError:  # slower, but nothing waits for ever; nothing has been handed over yet that this could overtake
                self._call(done, event)
                return
        self._num_handed_over += 1
        self._over.put((done, event))

    def _run_reporter(self) -> None:
        while (item := self._over.get()) is not None:
            self._call(*item)
            del item
            self._num_reported += 1

    def _call(self, done: Callable[[Event], None], event: Event) -> None:
        try:
            done(event)
        except Exception:
            _log.exception("stream %s: the completion callback failed", self.name)

    def _wait_for(self, earlier: Event) -> None:
        while not earlier.wait(_PATIENCE):
            if self._given_up:
                raise TransferError(f"stream {self.name}: closed while another stream's work was not over")


def _nothing() -> None:
    """Work that only marks a place in a stream."""

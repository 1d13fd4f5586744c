"""``CpuStream``: a stream on the CPU, one worker thread that takes work from a queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from kvtier.errors import TransferError
from kvtier.io.streams import Event

_log = logging.getLogger(__name__)

_PATIENCE: Final = 0.5
"""Seconds between two looks at whether the stream was given up, while it waits for another stream's event."""


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
    """One worker thread that carries out work in submission order.

    The thread is a daemon: work that hangs in the kernel must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        self._thread.start()

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

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for everything submitted so far; False when time ran out."""
        return self.submit(_nothing).wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is queued and end the thread; False when that took more than ``timeout`` seconds."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            self._given_up = True
            return False
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
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
                try:
                    done(event)
                except Exception:
                    _log.exception("stream %s: the completion callback failed", self.name)
            # An idle worker must not keep the last batch and what it refers to alive.
            del item, work, after, event, done, error

    def _wait_for(self, earlier: Event) -> None:
        while not earlier.wait(_PATIENCE):
            if self._given_up:
                raise TransferError(f"stream {self.name}: closed while another stream's work was not over")


def _nothing() -> None:
    """Work that only marks a place in a stream."""

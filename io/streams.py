"""``Stream`` and ``Event``: the two small interfaces behind which CPU and CUDA look alike (design: one sentence, no. 7).

A stream carries out work in submission order, beside the thread that submits it. An event marks the end of one piece of
work. Worker threads implement them on the CPU, CuPy streams and events on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Event(Protocol):
    """The end of one piece of work on a stream."""

    @property
    def error(self) -> BaseException | None:
        """Why the work failed; None while it is not done, and when it went well."""

    def is_done(self) -> bool:
        """Whether the work has ended, well or not. Never blocks."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until the work has ended, at most ``timeout`` seconds; False when time ran out."""


class Stream(Protocol):
    """Work in submission order. Submitting is thread-safe; the order is that of the calls."""

    @property
    def name(self) -> str:
        """What the stream is for, as it appears in thread names and messages."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (),
               done: Callable[[Event], None] | None = None) -> Event:
        """Queue ``work`` and return at once.

        Args:
            work: carries out or enqueues the copy. On CUDA it is called by the submitting thread, before this returns,
                and must only enqueue on the stream (see ``cuda_stream.current_handle``).
            after: events of the same device that must be over first, whether they went well or not. A failed one
                orders, it does not fail this work: who depends on its result has to look at its error.
            done: called once, from a thread of the stream and with no lock held, when the work has ended and the event
                says so. Completion is reported this way because polling every event costs more than one call per batch.

        An exception in ``work`` becomes the event's error; the stream goes on with what follows.

        Raises:
            TransferError: the stream is closed.
        """

    def let_begin(self) -> None:
        """Let what was just submitted begin, where that takes another thread of this process.

        A thread that goes on in Python keeps the GIL for a switch interval (5 ms), and a copy that could begin has to wait for it:
        longer than many a copy takes. Called after submitting, with no lock held that ``work`` or ``done`` needs. Returns soon, whatever
        the work waits for.
        """

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for everything submitted so far, at most ``timeout`` seconds; False when time ran out."""

    def close(self, timeout: float) -> bool:
        """Take no more work, finish what is queued, and end; False when that took more than ``timeout`` seconds.

        After a False, work that had not begun is not begun any more (its event fails), and work that hangs is left
        behind.
        """

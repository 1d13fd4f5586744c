"""``StagingRing``: host buffers that a device reads later than they were written, taken in turn (spec: offset table copy).

A copy that the host does not wait for reads its source when the stream gets there. With one buffer the next step's table would be
written over this step's (TensorRT-LLM 15546, 15349); with several, each is written again only after its copy is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

from kvtier.errors import TransferError

TIMEOUT: Final = 60.0   # seconds; a copy of a table takes microseconds
_FIRST_PAUSE: Final = 20e-6
_LONGEST_PAUSE: Final = 1e-3

Buffer = TypeVar("Buffer")


class CopyEvent(Protocol):
    """What a stream has reached, as ``torch.cuda.Event`` tells it."""

    def record(self) -> object:
        """Mark the end of what was submitted to the current stream so far."""

    def query(self) -> bool:
        """Whether the stream got there; True before the first ``record``."""


class StagingRing(Generic[Buffer]):
    """Hands out ``buffers`` in turn. One thread at a time.

    Args:
        buffers: at least one; with one the host waits for the copy before.
        new_event: makes the event of one buffer.
        timeout: seconds that :meth:`buffer` waits at most.
    """

    def __init__(self, buffers: Sequence[Buffer], new_event: Callable[[], CopyEvent], timeout: float = TIMEOUT) -> None:
        assert buffers, "a ring needs a buffer"
        self._ring = [(buffer, new_event()) for buffer in buffers]
        self._next = 0
        self._timeout = timeout

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """The next buffer, once its last copy is done. Write it and submit its copy to the current stream inside.

        Raises:
            TransferError: the copy is not done in time. Nothing has been written then.
        """
        buffer, event = self._ring[self._next]
        self._wait(event)
        self._next = (self._next + 1) % len(self._ring)
        try:
            yield buffer
        finally:
            event.record()   # also after an error: a copy may be under way

    def _wait(self, event: CopyEvent) -> None:
        if event.query():
            return
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not event.query():   # torch's own wait has no deadline
            if time.monotonic() > deadline:
                raise TransferError(f"a staging buffer was not read within {self._timeout} s: the stream that copies block tables stands "
                                    "still; look for a kernel that never ends, or a stream that waits for one")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

"""The limit of ``kvtier bench nvme``: plain ``pwrite`` and ``pread`` of whole blocks on a fresh preallocated file.

Written without the store's own file class on purpose: a yardstick must not share the code that it measures.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError

Rows = npt.NDArray[np.uint8]


class RawFile:
    """A new file with room for ``num_blocks`` blocks, every byte of it allocated.

    Args:
        path: must not exist.
        num_blocks, block_bytes: its size; with direct I/O ``block_bytes`` is a multiple of 4096.
        direct: open with O_DIRECT.

    Raises:
        OSError: the file cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, num_blocks: int, block_bytes: int, direct: bool) -> None:
        self._block_bytes = block_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, num_blocks * block_bytes)
        except OSError:
            self.close()
            raise

    def write(self, slots: Sequence[int], rows: Rows) -> None:
        """Write the rows of these slots (uint8 [num_blocks, block_bytes], page-aligned), one call each.

        Raises:
            OSError: the system could not write.
            TransferError: it wrote less than asked.
        """
        for slot in slots:
            self._check(os.pwrite(self._descriptor, rows[slot].data, slot * self._block_bytes), slot)

    def read(self, slots: Sequence[int], rows: Rows) -> None:
        """Read these slots into their rows; the reverse of :meth:`write`, with the same errors."""
        for slot in slots:
            self._check(os.preadv(self._descriptor, [rows[slot].data], slot * self._block_bytes), slot)

    def _check(self, moved: int, slot: int) -> None:
        if moved != self._block_bytes:
            raise TransferError(f"plain I/O moved {moved} of {self._block_bytes} bytes of block {slot}; is the disk full?")

    def close(self) -> None:
        """Close the file; it stays where it is. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def share_out(threads: Executor, num_threads: int, num_blocks: int, work: Callable[[Sequence[int]], None]) -> None:
    """Call ``work`` with every ``num_threads``-th slot in each of that many threads, and wait for all of them; Ctrl-C, too, comes then.

    Raises:
        Exception: the first one that ``work`` raised; all threads have ended then.
    """
    waiting: list[Future[None]] = []
    with _signals_held():
        try:
            for first in range(num_threads):
                waiting.append(threads.submit(work, range(first, num_blocks, num_threads)))
        finally:  # also when there are no more threads: what they work on is closed next
            wait(waiting)
    for future in waiting:
        future.result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM come at the end of this block. In the middle of a future it would leave that one's lock taken, and its thread
    without an end, or free, and be covered up by the lock's own error."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal comes here
        return
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    before = [(number, signal.signal(number, hold)) for number in (signal.SIGTERM, signal.SIGINT)]  # SIGTERM's asks for that of SIGINT
    try:
        yield
    finally:
        for number, handler in reversed(before):
            signal.signal(number, handler)
        for first in held[:1]:
            signal.raise_signal(first)

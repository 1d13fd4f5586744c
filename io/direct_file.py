"""``DirectFile``: reads and writes of page-aligned ranges that bypass the page cache (design: transfer and NVMe rules).

One vectored call per range (``preadv`` / ``pwritev``), which releases the GIL and is repeated after an interrupted call by
Python itself (PEP 475). Where the mount refuses O_DIRECT the same calls go through the page cache, and the log says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.io.drive_queue import DriveQueue
from kvtier.pools.nvme_geometry import PAGE_BYTES

Buffer: TypeAlias = npt.NDArray[np.uint8]
"""One-dimensional contiguous uint8 array."""

_VectoredCall: TypeAlias = Callable[[int, list[memoryview], int], int]

_log = logging.getLogger(__name__)
_IOV_MAX: Final = 1024  # Linux takes no longer vector in one call
_PROBE_NAME: Final = "direct-probe.tmp"


def aligned_buffer(num_bytes: int) -> Buffer:
    """New zeroed memory, uint8 [num_bytes], that starts on a page boundary, as direct I/O needs it."""
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), np.uint8, num_bytes)


def is_aligned(buffer: Buffer) -> bool:
    """True when direct I/O can use ``buffer`` in place: address and length are whole pages."""
    address: int = buffer.__array_interface__["data"][0]
    return address % PAGE_BYTES == 0 and buffer.nbytes % PAGE_BYTES == 0


def refuses_direct(directory: Path) -> str | None:
    """Try direct I/O in ``directory`` with a page of a temporary file: written, read back, compared.

    Returns:
        ``None`` when it works, else the reason in words.

    Raises:
        OSError: the directory cannot be written at all.
    """
    path = directory / _PROBE_NAME
    written = aligned_buffer(PAGE_BYTES)
    written[:] = np.arange(PAGE_BYTES, dtype=np.uint32).astype(np.uint8)
    read = aligned_buffer(PAGE_BYTES)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600))
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return f"open with O_DIRECT: {error.strerror}"
        try:
            os.pwritev(descriptor, [written.data], 0)
            os.preadv(descriptor, [read.data], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return f"direct read or write: {error.strerror}"
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return None if np.array_equal(written, read) else "a page written directly reads back differently"


class _NotAligned(Exception):
    """Direct I/O has refused buffers that do not start on page boundaries, or are not whole pages."""


class _ThreadMemory(threading.local):
    """One bounce buffer per thread, as large as the largest range that the thread has bounced."""

    def __init__(self) -> None:
        self._buffer = aligned_buffer(0)

    def take(self, num_bytes: int) -> Buffer:
        if self._buffer.nbytes < num_bytes:
            self._buffer = aligned_buffer(num_bytes)
        return self._buffer[:num_bytes]


_bounce = _ThreadMemory()


class DirectFile:
    """A file read and written in ranges that start on page boundaries. Thread-safe.

    Buffers that start on a page boundary and are whole pages long travel in place; any other are copied through an aligned
    buffer of the calling thread. The last page of a range may be partial: direct I/O still moves all of it, and what a
    write leaves behind the range up to the page's end is undefined.

    Args:
        path: the file.
        create: make the file (mode 0600) if it is not there.
        direct: ask for O_DIRECT; ``False`` goes through the page cache from the start.

    Attributes:
        queue: whose turns reads and writes take; None for as many as come.
        direct: True while direct I/O is in use; becomes False, with one warning in the log, when the mount refuses it.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = False, direct: bool = True) -> None:
        self.path = path
        self.direct = direct
        self.queue: DriveQueue | None = None
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        if direct:
            try:
                self._descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._say_buffered("open with O_DIRECT")
        self.direct = False
        self._descriptor = os.open(path, flags, 0o600)

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers`` one after the other with the bytes from ``offset`` (a multiple of the page size) on.

        Raises:
            TransferError: the file ends inside the range; the message names what was read and what was wanted.
            OSError: the system could not read.
        """
        wanted = self._check(offset, buffers)
        try:  # where each buffer lies is looked up only when the system refuses them: that takes as long as a short call
            self._read(offset, buffers, wanted)
            return
        except _NotAligned:
            bounce = _bounce.take(_whole_pages(wanted))
        self._read(offset, [bounce], wanted)
        start = 0
        for buffer in buffers:
            np.copyto(buffer, bounce[start:start + buffer.nbytes])
            start += buffer.nbytes

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write ``buffers`` one after the other from ``offset`` (a multiple of the page size) on.

        Raises:
            TransferError: the system wrote nothing and gave no reason.
            OSError: the system could not write (ENOSPC, EIO, ...). The range may be partly written then.
        """
        wanted = self._check(offset, buffers)
        try:  # as in read
            self._write(offset, buffers, wanted)
            return
        except _NotAligned:
            bounce = _bounce.take(_whole_pages(wanted))
        start = 0
        for buffer in buffers:
            np.copyto(bounce[start:start + buffer.nbytes], buffer)
            start += buffer.nbytes
        bounce[start:] = 0
        self._write(offset, [bounce], wanted)

    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._descriptor).st_size

    def allocated(self) -> int:
        """Bytes that the file occupies on its filesystem now."""
        return os.fstat(self._descriptor).st_blocks * 512

    def is_deleted(self) -> bool:
        """Whether the file has no name any more: what is written to it goes when it is closed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def resize(self, num_bytes: int) -> None:
        """Make the file exactly ``num_bytes`` long, with every byte of it allocated on the filesystem.

        Raises:
            OSError: there is no room (ENOSPC, EDQUOT, EFBIG); the file has its old length again.
        """
        before = self.size()
        try:
            if num_bytes > 0:
                os.posix_fallocate(self._descriptor, 0, num_bytes)
            os.ftruncate(self._descriptor, num_bytes)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.ftruncate(self._descriptor, before)
            raise

    def sync(self) -> None:
        """Wait until what was written survives a loss of power (``fdatasync``)."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file. Idempotent; no read or write may be running."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _check(self, offset: int, buffers: Sequence[Buffer]) -> int:
        assert offset % PAGE_BYTES == 0, f"offset {offset} is not a multiple of {PAGE_BYTES}"
        return sum(buffer.nbytes for buffer in buffers)

    def _read(self, offset: int, buffers: Sequence[Buffer], wanted: int) -> None:
        if self.queue is None:
            self._move(os.preadv, "read", offset, buffers, wanted)
        else:
            with self.queue.reading(wanted):
                self._move(os.preadv, "read", offset, buffers, wanted)

    def _write(self, offset: int, buffers: Sequence[Buffer], wanted: int) -> None:
        if self.queue is None:
            self._move(os.pwritev, "write", offset, buffers, wanted)
        else:
            with self.queue.writing(wanted):
                self._move(os.pwritev, "write", offset, buffers, wanted)

    def _move(self, call: _VectoredCall, verb: str, offset: int, buffers: Sequence[Buffer], wanted: int) -> None:
        """Repeat a vectored call until ``wanted`` bytes have travelled: the kernel may move fewer (2 GiB at most)."""
        done = 0
        views = [buffer.data for buffer in buffers]
        while done < wanted:
            was_direct = self.direct  # another thread may find out at the same time
            try:
                count = call(self._descriptor, _rest(views, done), offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                if not all(map(is_aligned, buffers)):
                    raise _NotAligned from error
                self._go_buffered(f"direct {verb}")
                continue
            after = done + count
            if after < wanted and self.direct:
                # The next direct call must start on a page boundary, so a page that came in part is moved again.
                after -= after % PAGE_BYTES
            if after <= done:
                raise TransferError(f"short {verb} of {self.path} at offset {offset}: {done + count} of {wanted} bytes, the "
                                    f"file has {self.size()}; was it truncated?")
            done = after

    def _go_buffered(self, what: str) -> None:
        with self._lock:
            if not self.direct:
                return
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.direct = False
        self._say_buffered(what)

    def _say_buffered(self, what: str) -> None:
        _log.warning("%s: the mount refuses direct I/O (%s: invalid argument); using the page cache instead", self.path, what)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` behind the first ``done`` bytes, as much as one call takes."""
    if not done and len(views) <= _IOV_MAX:
        return views
    for position, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[position + 1:position + _IOV_MAX]] if done else views[position:position + _IOV_MAX]
        done -= view.nbytes
    return []

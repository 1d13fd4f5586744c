"""Locks on a file, and on single bytes of it: who uses which part of it now (design: two ways to attach).

They belong to the open file and not to the process, so that two parts may be held by one process; and they end with it however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable


def lock_byte(file: int, number: int) -> bool:
    """Take the byte for as long as the file is open; False when another open file has it. OSError where there are no locks."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _bytes_of(fcntl.F_WRLCK, number))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(file: int, number: int) -> None:
    """Give the byte back."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _bytes_of(fcntl.F_UNLCK, number))


def is_locked(file: int, number: int, count: int = 1) -> bool:
    """Whether another open file has one of ``count`` bytes."""
    kind: int = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_OFD_GETLK, _bytes_of(fcntl.F_WRLCK, number, count)))[0]
    return kind != fcntl.F_UNLCK


def lock_whole(file: int) -> bool:
    """Take the file or folder itself; False when another open file has it. OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_in_time(take: Callable[[], bool], seconds: float, pause: float) -> bool:
    """Try to take a lock until it is taken, ``pause`` seconds between two attempts; False when that took ``seconds``."""
    deadline = time.monotonic() + seconds
    while not take():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def _bytes_of(kind: int, number: int, count: int = 1) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, number, count, 0)

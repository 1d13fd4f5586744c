"""``alone_on``: one process at a time preallocates on a file system (design: NVMe rules, "the cap").

Ranks start together, each with a store of its own on one drive. Each looks at what is free and then takes it: without turns several find
room for what fits once, and the reserve, or the last of them, pays for it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.io.byte_locks import lock_whole, take_in_time
from kvtier.pools.host_memory import mount_of

_log = logging.getLogger(__name__)

TURN_SECONDS: Final = 300.0
"""Longest wait for the others: a file system that cannot preallocate writes whole files instead."""
SAID_AFTER: Final = 5.0
"""Seconds without a turn after which it is said: whoever can read the mount point can hold its lock, and a start that waits looks hung."""
_PAUSE: Final = 0.01


@contextmanager
def alone_on(folder: Path, timeout: float = TURN_SECONDS) -> Iterator[None]:
    """Nobody else who asks for the same is between looking and taking on the file system of ``folder``. The lock is on its mount point, and
    ends with the process. Where there is no such lock, or it is not to be had in time, it goes on without."""
    file = -1
    try:
        with suppress(OSError):  # a mount point that we may not read, a file system without locks
            mount_point = mount_of(folder)[1]
            file = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _take_turn(file, folder, mount_point, timeout)
        yield
    finally:
        if file >= 0:
            try:  # no function of Python's before this one: Ctrl-C would come in it, and this process keep the turn as long as it lives
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open for longer
            except OSError:
                pass
            finally:
                os.close(file)


def _take_turn(file: int, folder: Path, mount_point: str, timeout: float) -> None:
    take = partial(lock_whole, file)
    if take_in_time(take, min(SAID_AFTER, timeout), _PAUSE):
        return
    rest = timeout - SAID_AFTER
    if rest > 0:
        _log.warning("%s: waits for another process that preallocates on this file system, up to %.0f s more (it holds a lock on %s, see "
                     "`lslocks`)", folder, rest, mount_point)
        if take_in_time(take, rest, _PAUSE):
            return
    _log.warning("%s: another process is still preallocating on this file system; its space is not waited for", folder)

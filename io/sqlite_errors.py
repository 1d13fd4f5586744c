"""Why SQLite failed: through the file itself, or through a full disk or a foreign lock, which say nothing about the file.

SQLite reports a lack of room in several ways: as SQLITE_FULL, as an I/O error when it extends its shared-memory file, as
"cannot open" when it makes a side file. sqlite3 does not hand out the errno, so in doubt the room itself is tried.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
"""errno values of a disk or a quota that is used up."""

SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""What sqlite3 raises: SQLite quotes damaged names in its messages, and sqlite3 then fails to decode its own error."""

_PROBE_NAME: Final = "room-probe.tmp"
_PROBE_BYTES: Final = 64 << 10  # the first shared-memory file is 32 KiB


def primary_code(error: BaseException | None) -> int:
    """SQLite's primary result code, 0 when the error carries none."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF
    return sqlite3.SQLITE_FULL if isinstance(error, sqlite3.Error) and "disk is full" in str(error) else 0


def outer_cause(error: Exception, directory: Path) -> str | None:
    """What outside the database made it fail, with the remedy; ``None`` when the database itself may be damaged."""
    code = primary_code(error)
    if code == sqlite3.SQLITE_FULL or (code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and has_no_room(directory)):
        return f"the disk is full ({error}): free some space and try again"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"another program holds a lock on it ({error}): close that one and try again"
    return None


def has_no_room(directory: Path) -> bool:
    """Whether not even a small file can be made in ``directory``, for lack of space, inodes or quota."""
    path = directory / _PROBE_NAME
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
    except OSError as error:
        return error.errno in NO_ROOM
    return False

"""Has the end of a SQLite write-ahead log been lost? (design: a damaged manifest is never silently shortened)

SQLite stops reading its log at the first frame whose checksum fails and says nothing: every transaction from there on is
gone. Frames carry the two salts of the log's current run (SQLite, "WAL-mode File Format"), so counting the frames that claim
to belong to it, and comparing with how many SQLite believed, tells whether something was dropped.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct(">IIIIIIII")  # magic, version, page size, checkpoint number, salt 1, salt 2, checksum
_FRAME: Final = struct.Struct(">IIIIII")     # page number, database size, salt 1, salt 2, checksum


def claimed_frames(path: Path) -> int:
    """Frames of the log at ``path`` that claim to be current; 0 when there is no log. Call before SQLite opens the file.

    One equal salt is enough: an older run differs in both, a flipped bit in one.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(content) < _HEADER.size + _FRAME.size:
        return 0
    _, _, page_bytes, _, salt_1, salt_2, _, _ = _HEADER.unpack_from(content)
    if page_bytes not in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        return 1  # the header is damaged, and SQLite will believe no frame at all
    frames = 0
    for number, start in enumerate(range(_HEADER.size, len(content) - _FRAME.size + 1, _FRAME.size + page_bytes), start=1):
        _, _, frame_salt_1, frame_salt_2, _, _ = _FRAME.unpack_from(content, start)
        if frame_salt_1 == salt_1 or frame_salt_2 == salt_2:
            frames = number
    return frames

"""Has the end of a SQLite write-ahead log been lost? (design: a damaged manifest is never silently shortened)

SQLite stops reading its log at the first frame whose checksum fails and says nothing: every transaction from there on is
gone. Frames carry the two salts of the log's current run, and the last frame of a transaction the size of the database
(SQLite, "WAL-mode File Format"). So the frames that only a finished transaction can have left are counted, and compared with
how many SQLite believed.

A process that is killed in the middle of a transaction leaves sound frames without a last one, or an incomplete frame at the
end of the file. Nothing was promised for them, nothing is lost. In a log that is written over again, a kill between the header
and the page of a frame looks like a flipped bit: it counts, for a flipped bit can also make a last frame look like another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HEADER: Final = struct.Struct(">IIIIIIII")
"""Magic, version, page size, checkpoint number, salt 1, salt 2, checksum 1, checksum 2."""

FRAME: Final = struct.Struct(">IIIIII")
"""Page number, size of the database after the transaction (0 except in its last frame), salt 1, salt 2, checksum 1, checksum 2."""

_MAGIC: Final = 0x377F0682  # the lowest bit tells whether the checksums read their words with the high byte first
_COVERED_OF_HEADER: Final = 24
_COVERED_OF_FRAME: Final = 8  # and the page


def wal_path(path: Path) -> Path:
    """The write-ahead log that SQLite keeps beside a database."""
    return path.with_name(path.name + "-wal")


def claimed_frames(path: Path) -> int:
    """How many frames SQLite must believe for nothing to be lost; 0 when there is no log. Call before SQLite opens the file.

    That is the number of the last whole frame of the current run which ends a transaction or whose checksum is wrong. One
    equal salt is enough: an older run differs in both, a flipped bit in one.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(content) < HEADER.size + FRAME.size:
        return 0
    magic, _, page_bytes, _, salt_1, salt_2, *seed = HEADER.unpack_from(content)
    order = ">" if magic & 1 else "<"
    if magic | 1 != _MAGIC | 1 or frame_checksum(content[:_COVERED_OF_HEADER], (0, 0), order) != tuple(seed):
        return 1  # the header is damaged, and SQLite will believe no frame at all
    frame_bytes = FRAME.size + page_bytes
    for number in range((len(content) - HEADER.size) // frame_bytes, 0, -1):
        start = HEADER.size + (number - 1) * frame_bytes
        _, database_pages, frame_salt_1, frame_salt_2, *checksum = FRAME.unpack_from(content, start)
        if frame_salt_1 != salt_1 and frame_salt_2 != salt_2:
            continue
        if database_pages != 0:
            return number
        before = seed if number == 1 else FRAME.unpack_from(content, start - frame_bytes)[-2:]
        covered = content[start:start + _COVERED_OF_FRAME] + content[start + FRAME.size:start + frame_bytes]
        if frame_checksum(covered, before, order) != tuple(checksum):
            return number
    return 0


def frame_checksum(content: bytes, before: Sequence[int], order: str) -> tuple[int, int]:
    """SQLite's checksum of a log ("WAL-mode File Format", "Checksum Algorithm"), carried on from the one before.

    Args:
        content: a multiple of 8 bytes.
        before: the two numbers stored in the frame before, or in the log's header for the first frame.
        order: ">" or "<", of the bytes of a word.
    """
    first, second = before
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = first + even + second & 0xFFFFFFFF
        second = second + odd + first & 0xFFFFFFFF
    return first, second

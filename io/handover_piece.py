"""One rank's part of a handover, as a file: written once, read by each rank that wants some of it, removed by the last of them.

A page for the state, a table of checksums, and the blocks of each group one behind the other. A checksum is seeded with what its block is
and where in a prompt it stands, and the whole table has a digest that travels with the ticket: neither a flipped bit nor another file in
its place passes for good.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.byte_locks import is_locked, lock_byte
from kvtier.io.checksum import CHECKSUM_BYTES, block_checksum, page_checksum
from kvtier.io.handover_folder import FIRST_READER, MOST_READERS, HandoverFolder, turn

Bytes = npt.NDArray[np.uint8]

_PAGE: Final = 4096
_SEATS: Final = struct.Struct("<I")  # at the file's beginning: how many ranks read; 0 until the first does
_MARKS: Final = 1024                 # where the state has one byte for each of them: 1 when it has taken what it wanted


class PieceGone(TransferError):
    """It was taken by somebody, its time is over, or it has never been there."""


class PieceBusy(TransferError):
    """Somebody else with the same rank is reading it."""


@dataclass(frozen=True)
class PieceShape:
    """What lies in the file. ``block_bytes``, ``num_blocks``: by group."""

    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]

    @property
    def table_bytes(self) -> int:
        return sum(self.num_blocks) * CHECKSUM_BYTES

    def offset(self, group: int, number: int) -> int:
        """Where a group's block begins."""
        before = sum(size * count for size, count in zip(self.block_bytes[:group], self.num_blocks[:group], strict=True))
        return _PAGE + -(-self.table_bytes // _PAGE) * _PAGE + before + number * self.block_bytes[group]

    def table_place(self, group: int, number: int) -> int:
        return (sum(self.num_blocks[:group]) + number) * CHECKSUM_BYTES

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.offset(len(self.num_blocks) - 1, self.num_blocks[-1])


class PieceWriter:
    """Writes one file. As a context manager: what was not finished is removed.

    Raises:
        CapacityError, TransferError: as ``HandoverFolder.create``.
    """

    def __init__(self, folder: HandoverFolder, shape: PieceShape) -> None:
        self.shape = shape
        self._folder = folder
        self._table = bytearray(shape.table_bytes)
        self._is_published = False
        self._file, self.name = folder.create(shape.num_bytes)

    def write(self, group: int, first: int, rows: Bytes, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        """Blocks of a group from number ``first`` on: uint8 ``[blocks, block_bytes]``, contiguous, with their keys and places in a prompt.

        TransferError when the file cannot be written.
        """
        for number, (row, key, position) in enumerate(zip(rows, keys, positions, strict=True)):
            place = self.shape.table_place(group, first + number)
            self._table[place:place + CHECKSUM_BYTES] = block_checksum(row, key, group, position)
        _write(self._file, rows.reshape(-1).data, self.shape.offset(group, first))

    def finish(self, deadline: float) -> bytes:
        """Everything is written: readers may have it until the deadline (wall-clock seconds), under what is its :attr:`name` from now on.
        Returns the digest (16 bytes) that the ticket carries."""
        _write(self._file, memoryview(self._table), _PAGE)
        self.name = self._folder.publish(self.name, deadline)
        self._is_published = True
        return page_checksum(memoryview(self._table))

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_details: object) -> None:
        if not self._is_published:
            self._folder.unlink(self.name)
        os.close(self._file)


class PieceReader:
    """Reads one file, on behalf of one importing rank. Nobody else with this rank can read it meanwhile.

    Args:
        name, shape, digest: as the ticket says.
        rank, num_ranks: who reads.
        readers: the ranks that want something of it.

    Raises:
        PieceGone: it is not there, or this rank has taken it before.
        PieceBusy: another process with this rank is reading it.
        CorruptBlock: another file than the ticket speaks of, or its table is damaged.
        TransferError: it cannot be read.
    """

    def __init__(self, folder: HandoverFolder, name: str, shape: PieceShape, digest: bytes, rank: int, num_ranks: int,
                 readers: Collection[int]) -> None:
        self.name = name
        self.shape = shape
        self._folder = folder
        self._rank = rank
        self._readers = readers
        file = folder.open(name)
        if file is None:
            raise PieceGone(f"{folder.directory / name}: has been taken already, or its time is over")
        self._file = file
        try:
            with turn(file):
                self._claim(num_ranks)
            self._table = bytes(_read(file, bytearray(shape.table_bytes), _PAGE))
            if os.fstat(file).st_size != shape.num_bytes or page_checksum(memoryview(self._table)) != digest:
                raise CorruptBlock(f"{folder.directory / name}: is not what its ticket speaks of, or is damaged")
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise TransferError(f"{folder.directory / name}: {error.strerror}") from error
            raise

    def _claim(self, num_ranks: int) -> None:
        path = self._folder.directory / self.name
        if os.fstat(self._file).st_nlink == 0 or self._folder.is_over(self.name):
            raise PieceGone(f"{path}: has been taken already, or its time is over")
        seats: int = _SEATS.unpack(_read(self._file, bytearray(_SEATS.size), 0))[0]
        # Ranks of another number that have taken nothing and are gone do not count.
        if seats not in (0, num_ranks) and (is_locked(self._file, FIRST_READER, MOST_READERS) or any(
                _read(self._file, bytearray(MOST_READERS), _MARKS))):
            raise PieceGone(f"{path}: is being taken by {seats} ranks, this is one of {num_ranks}")
        if self._has_taken(self._rank):
            raise PieceGone(f"{path}: rank {self._rank} has taken it already")
        if not lock_byte(self._file, FIRST_READER + self._rank):
            raise PieceBusy(f"{path}: another process with rank {self._rank} is reading it")
        if seats != num_ranks:
            _write(self._file, memoryview(_SEATS.pack(num_ranks)), 0)

    def read(self, group: int, first: int, keys: Sequence[bytes], positions: Sequence[int]) -> Bytes:
        """A private copy of blocks of a group from number ``first`` on, as many as there are keys, up to the first that is damaged.

        Returns:
            uint8 ``[good blocks, block_bytes]``.
        """
        rows: Bytes = np.empty((len(keys), self.shape.block_bytes[group]), dtype=np.uint8)
        _read(self._file, rows.reshape(-1).data, self.shape.offset(group, first))
        for number, (key, position) in enumerate(zip(keys, positions, strict=True)):
            place = self.shape.table_place(group, first + number)
            # Of the copy, not of the file: what is checked is what will be served, whoever writes into the file meanwhile.
            if block_checksum(rows[number], key, group, position) != self._table[place:place + CHECKSUM_BYTES]:
                return rows[:number]
        return rows

    def acknowledge(self) -> None:
        """This rank has what it wanted. The last rank removes the file, without a mark before: killed between the two, it would leave a
        file that nobody can have any more."""
        try:
            with turn(self._file):
                if all(self._has_taken(rank) for rank in self._readers if rank != self._rank):
                    self._folder.unlink(self.name)
                if os.fstat(self._file).st_nlink:
                    _write(self._file, memoryview(b"\1"), _MARKS + self._rank)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of it without having taken it: somebody else may try."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _has_taken(self, rank: int) -> bool:
        return bytes(_read(self._file, bytearray(1), _MARKS + rank)) == b"\1"


def withdraw(folder: HandoverFolder, name: str) -> bool:
    """Remove a file of which nobody has taken or is reading anything; False otherwise."""
    return folder.remove(name, lambda file: any(_read(file, bytearray(MOST_READERS), _MARKS)))


def _write(file: int, data: memoryview, offset: int) -> None:
    try:
        while data:
            count = os.pwrite(file, data, offset)
            data, offset = data[count:], offset + count
    except OSError as error:
        raise TransferError(f"a file that is handed over cannot be written: {error.strerror}") from error


def _read(file: int, out: bytearray | memoryview, offset: int) -> bytearray | memoryview:
    """Fill ``out``. TransferError when the file cannot be read or ends before."""
    left = memoryview(out)
    try:
        while left:
            count = os.preadv(file, [left], offset)
            if count == 0:
                raise TransferError(f"a file that is handed over ends {len(left)} bytes early")
            left, offset = left[count:], offset + count
    except OSError as error:
        raise TransferError(f"a file that is handed over cannot be read: {error.strerror}") from error
    return out

"""``SharedArena``: host slots in shared memory, for an index and workers in several processes (design: two ways to attach).

A file in /dev/shm, named after the engine. Whoever comes first makes it, for nobody knows whether workers or scheduler start first; all
compute the same shape. Every process holds a lock on it for as long as it lives: the last one that closes it removes it, and a file whose
owners were killed is known to be stale and is made anew, or removed by the next one that starts. All its pages are taken when it is made:
a /dev/shm that is too small is a clear error at the start, not a bus error in the middle of a copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.io.byte_locks import is_locked, lock_byte, unlock_byte
from kvtier.io.job_board import JobBoard
from kvtier.pools.host_arena import ALIGNMENT, HostArena
from kvtier.pools.host_memory import host_memory
from kvtier.pools.sizing import format_bytes

_log = logging.getLogger(__name__)

FOLDER: Final = Path("/dev/shm")
OPEN_SECONDS: Final = 300.0
"""How long one process waits for another that is making the arena: taking hundreds of GiB takes a while."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PREFIX, _SUFFIX = "kvtier-", ".arena"
_MAGIC: Final = b"kvtier arena 1\0\0"
_HEADER: Final = ALIGNMENT
_READY: Final = 64  # where the header says that all is made
_INDEX_BYTE: Final = 0  # of the locks on single bytes of the file: the index's, then one for each rank
_PAUSE: Final = 0.01


@dataclass(frozen=True)
class ArenaShape:
    """What all processes must agree on.

    Attributes:
        engine_id: letters, digits, ``._-``.
        block_bytes, slots: by group, bytes of one block over all ranks, and how many slots there are.
        ranks: workers.
        copies: ranks whose pages a slot holds.
    """

    engine_id: str
    block_bytes: tuple[int, ...]
    slots: tuple[int, ...]
    ranks: int
    copies: int

    def stride(self, group: int) -> int:
        """Bytes from slot to slot."""
        return -(-self.block_bytes[group] // ALIGNMENT) * ALIGNMENT

    def offset(self, group: int) -> int:
        """Where a group's slots begin in the file."""
        return _HEADER + self._board_bytes + sum(self.slots[number] * self.stride(number) for number in range(group))

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.offset(len(self.slots))

    @property
    def _board_bytes(self) -> int:
        return -(-8 * JobBoard.num_words(self.slots, self.ranks, self.copies) // ALIGNMENT) * ALIGNMENT

    @property
    def digest(self) -> bytes:
        """Of everything, 32 bytes."""
        return hashlib.sha256(json.dumps([self.block_bytes, self.slots, self.ranks, self.copies]).encode()).digest()

    def describe(self) -> str:
        """For messages."""
        return (f"{self.ranks} ranks, " + ", ".join(f"group {number}: {count} slots of {self.block_bytes[number]} bytes"
                                                     for number, count in enumerate(self.slots)))


class SharedArena:
    """The slots of all groups, mapped into this process.

    Args:
        shape: as all others have it.
        rank: of a worker; None for the index. Each may be there once.
        pin: register the slots with CUDA (see ``HostArena``).
        folder: where the file lies; for tests.
        timeout: seconds to wait for another process that is making it.

    Attributes:
        path: the file.
        groups: by group, its slots; None of a group without any.
        board: what ranks say of their jobs.

    Raises:
        ConfigError: no shared memory of this size (named per rank and in total), an arena of another shape under this name, another
            process with the same part, CUDA would not pin it.
    """

    def __init__(self, shape: ArenaShape, rank: int | None = None, pin: bool = False, folder: Path = FOLDER,
                 timeout: float = OPEN_SECONDS) -> None:
        if not _NAME.fullmatch(shape.engine_id):
            raise ConfigError(f"engine_id={shape.engine_id!r}: it names a file; use up to 128 letters, digits, '.', '_' and '-'")
        self.shape = shape
        self.path = folder / f"{_PREFIX}{shape.engine_id}{_SUFFIX}"
        self.groups: list[HostArena | None] = []
        self._memory: mmap.mmap | None = None
        self._part: int | None = None  # of the locks, and whose: a child that is forked has the same file open
        self._owner = os.getpid()
        remove_stale(folder, self.path)
        self._file = _open(self.path, shape, time.monotonic() + timeout)
        try:
            part = _INDEX_BYTE if rank is None else 1 + rank
            if not lock_byte(self._file, part):
                who = "index" if rank is None else f"worker of rank {rank}"
                raise ConfigError(f"{self.path}: another {who} of engine_id={shape.engine_id!r} is running; give each engine an id of its "
                                  "own")
            self._part = part
            self._memory = mmap.mmap(self._file, shape.num_bytes, flags=mmap.MAP_SHARED)
            whole: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
            count = JobBoard.num_words(shape.slots, shape.ranks, shape.copies)
            self.board = JobBoard(whole[_HEADER:_HEADER + 8 * count].view(np.int64), shape.slots, shape.ranks, shape.copies)
            for group, slots in enumerate(shape.slots):
                start = shape.offset(group)
                self.groups.append(HostArena(slots, shape.block_bytes[group], pin, whole[start:start + slots * shape.stride(group)])
                                   if slots else None)
            if rank is not None:
                self.board.note_opened(rank)
            elif self.board.note_index():
                raise ConfigError(f"{self.path}: workers of an earlier index of engine_id={shape.engine_id!r}, which was killed, are still "
                                  "running and may be copying; end them first")
        except BaseException:
            self.close()
            raise

    def is_alive(self, rank: int) -> bool:
        """Whether a process has the rank's part now: its end, however it came, gives the part back."""
        return is_locked(self._file, 1 + rank)

    @property
    def has_index(self) -> bool:
        """Whether an index has this very file now: not one that was made under the same name before, or since."""
        return is_locked(self._file, _INDEX_BYTE)

    def unlink(self) -> None:
        """Nobody else will open it: from here on the memory ends with the processes, however they end."""
        with suppress(OSError):
            if os.stat(self.path).st_ino == os.fstat(self._file).st_ino:
                os.unlink(self.path)

    def close(self) -> None:
        """Let go of it. No copy may be running on it. May be called again."""
        for arena in self.groups:
            if arena is not None:
                arena.close()
        self.groups = []
        if hasattr(self, "board"):
            del self.board
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(BufferError):  # while a view exists; the mapping then ends with the last one
                memory.close()
        if self._file >= 0:
            if self._owner == os.getpid():  # a forked child may have it open for longer
                if self._part is not None:
                    unlock_byte(self._file, self._part)
                if _lock_file(self._file, fcntl.LOCK_EX):  # nobody else has it: its memory goes with the last one
                    self.unlink()
                _lock_file(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1


def remove_stale(folder: Path, but: Path | None = None) -> int:
    """Remove arenas that no process holds any more, because all of them were killed. Returns how many there were."""
    count = 0
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        if path == but:
            continue
        with suppress(OSError):  # gone meanwhile, or somebody else's
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock_file(file, fcntl.LOCK_EX) and _is_linked(path, file):  # else it is gone, and the name may be another's
                    os.unlink(path)
                    count += 1
                    _log.warning("%s: removed, its processes have ended without removing it", path)
            finally:
                os.close(file)
    return count


def _open(path: Path, shape: ArenaShape, deadline: float) -> int:
    """The file, made and complete, with a lock that says that it is in use."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: the arena in shared memory cannot be opened: {error.strerror}") from error
        try:
            if _lock_file(file, fcntl.LOCK_EX) and _is_linked(path, file):  # nobody uses it: it is new, or stale
                _make(path, file, shape)
            if _lock_file(file, fcntl.LOCK_SH) and _is_linked(path, file) and _is_ready(path, file, shape):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if time.monotonic() > deadline:
            raise ConfigError(f"{path}: another process of engine_id={shape.engine_id!r} has not made the arena in time; end it, or use "
                              "another engine_id")
        time.sleep(_PAUSE)


def _is_linked(path: Path, file: int) -> bool:
    """Whether the name still leads to this file, and not to one that was made after somebody removed it."""
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except OSError:
        return False


def _make(path: Path, file: int, shape: ArenaShape) -> None:
    """Give the file its size, all its memory and its header. Exclusive lock held."""
    size = shape.num_bytes
    slots = sum(count * shape.stride(group) for group, count in enumerate(shape.slots))
    wanted = (f"secondary: {format_bytes(size)} of shared memory wanted, {format_bytes(slots // shape.copies)} for each of "
              f"{shape.copies} ranks")
    host = host_memory()
    if size > host.available_bytes:
        os.unlink(path)
        raise ConfigError(f"{wanted}; {format_bytes(host.available_bytes)} of memory are free ({host.limited_by}); lower secondary=...")
    try:
        os.ftruncate(file, 0)
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.unlink(path)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise ConfigError(f"{wanted}; {path}: {error.strerror}") from error
        found = os.statvfs(path.parent)
        raise ConfigError(f"{wanted}; {path.parent} has {format_bytes(found.f_bavail * found.f_frsize)} free of "
                          f"{format_bytes(found.f_blocks * found.f_frsize)}; lower secondary=..., or make it larger (in a container: "
                          "--shm-size, or a memory volume on /dev/shm)") from error
    os.pwrite(file, _MAGIC + shape.digest, 0)
    os.pwrite(file, b"\1", _READY)


def _is_ready(path: Path, file: int, shape: ArenaShape) -> bool:
    """Whether it is complete. ConfigError when it is, and of another shape. Shared lock held."""
    if os.pread(file, 1, _READY) != b"\1":
        return False
    if os.pread(file, len(_MAGIC) + 32, 0) != _MAGIC + shape.digest or os.fstat(file).st_size != shape.num_bytes:
        raise ConfigError(f"{path}: a process with the same engine_id={shape.engine_id!r} has another arena than this one's "
                          f"({shape.describe()}); give index and workers the same settings, and each engine an id of its own")
    return True


def _lock_file(file: int, how: int) -> bool:
    """Lock the whole file for as long as it is open; False when somebody's lock is in the way."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

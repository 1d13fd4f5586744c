"""``HandoverFolder``: where one process leaves blocks for another on the same machine, on a drive or in shared memory.

Each handover is a file, and all that two processes must agree on lies in the file system, which outlives both of them:

* ``<id>-0.part`` is being written. Its writer holds a lock on it, which ends with the process.
* ``<id>-<deadline>.kv`` is complete and may be read until its deadline (milliseconds of wall-clock time). A reader holds a lock on it while
  it reads, and removes it when it has what it wanted: so it is handed over once, and a reader that dies has taken nothing.

What nobody holds and nobody will want any more is removed by whoever looks next: :meth:`HandoverFolder.collect`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.errors import CapacityError, ConfigError, TransferError
from kvtier.io.byte_locks import is_locked, lock_byte, lock_whole, take_in_time, unlock_byte
from kvtier.io.store_directory import expand
from kvtier.pools.host_memory import host_memory
from kvtier.pools.sizing import SizeKind, format_bytes, parse_size

logger = logging.getLogger(__name__)

WRITER: Final = 0
"""Bytes whose locks say who uses a file: its writer; whoever looks at its state or changes it; and from here on one for each rank that
reads."""
TURN: Final = 1
FIRST_READER: Final = 2
MOST_READERS: Final = 2048

_SHARED_MEMORY: Final = Path("/dev/shm")
_FOLDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9]{1,16})\.(kv|part)")
_TURN_SECONDS: Final = 10.0
_PAUSE: Final = 0.001


class HandoverFolder:
    """A folder that an exporting and an importing process share.

    Args:
        directory: made when it is missing, also later; only files of handovers in it are ever touched. ``~`` and ``$VARS`` are filled
            in.
        capacity: most that lies in it at a time, a size in bytes ("64GiB").
        clock: wall-clock seconds, the same in all processes; for tests.

    Attributes:
        directory: the folder.

    Raises:
        ConfigError: it cannot be made or written, belongs to another user, names a variable or user that there is not, or ``capacity`` is
            no size in bytes.
    """

    def __init__(self, directory: str | Path, capacity: str, clock: Callable[[], float] = time.time) -> None:
        size = parse_size(capacity, "capacity")
        if size.kind is not SizeKind.BYTES or size.amount < 1:
            raise ConfigError(f"capacity={capacity!r}: the folder of handovers has a size in bytes, for example capacity=\"64GiB\"")
        if not isinstance(directory, str | Path):
            raise ConfigError(f"directory={directory!r}: give the path of a folder, as text or pathlib.Path")
        self.directory = expand(directory, "directory")
        self.capacity_bytes = int(size.amount)
        self._clock = clock
        self._open_now: _OpenFolder | None = None
        self._is_memory = _SHARED_MEMORY in self.directory.parents
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.stat(self.directory)
        except OSError as error:
            raise ConfigError(f"directory={str(directory)!r}: {error.strerror}; give a folder that can be written") from error
        if found.st_uid != os.getuid() or not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"directory={str(directory)!r}: belongs to user {found.st_uid}, mode {stat.filemode(found.st_mode)}; this "
                              f"process is user {os.getuid()}, give a folder of its own that it may read and write")
        self.collect()

    @classmethod
    def in_shared_memory(cls, name: str, capacity: str, clock: Callable[[], float] = time.time) -> HandoverFolder:
        """A folder of this name in shared memory: host memory that lasts until a handover has ended, or its deadline.

        Raises:
            ConfigError: as above; a name that is no simple file name (64 letters, digits, ``._-``), or is that of a link.
        """
        if not isinstance(name, str) or not _FOLDER.fullmatch(name):
            raise ConfigError(f"name={name!r}: it names a folder in {_SHARED_MEMORY}; use up to 64 letters, digits, '.', '_' and '-'")
        directory = _SHARED_MEMORY / f"kvtier-handover-{name}"
        if directory.is_symlink():  # everybody may write there
            raise ConfigError(f"name={name!r}: {directory} is a link, which may lead anywhere; remove it, or use another name")
        return cls(directory, capacity, clock)

    # -- writing ---------------------------------------------------------------------------------------------------------

    def create(self, num_bytes: int) -> tuple[int, str]:
        """A new file that nobody may read yet, with all its memory. Returns it, open and locked, and its name.

        Raises:
            CapacityError: the folder, its file system or the host's memory has too little room.
            TransferError: the file cannot be made.
        """
        name = f"{uuid.uuid4().hex}-0.part"
        file = -1
        try:
            with self._alone():
                self._require_room(num_bytes)
                file = self._create(name, num_bytes)
            os.posix_fallocate(file, 0, num_bytes)  # so that a full file system is an error here, and not in the middle
            return file, name
        except BaseException as error:  # Ctrl-C too: a file that stays open would count as being written as long as this process lives
            if file >= 0:
                self.unlink(name)
                os.close(file)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise CapacityError(f"{self.directory}: its file system has no room for {format_bytes(num_bytes)}; hand over later, or "
                                    "enlarge it") from error
            raise TransferError(f"{self.directory}: a file of {format_bytes(num_bytes)} cannot be made: {error.strerror}") from error

    def publish(self, name: str, deadline: float) -> str:
        """The file is complete. Returns the name under which readers open it until the deadline, in wall-clock seconds. TransferError when
        it cannot be renamed."""
        published = f"{name.partition('-')[0]}-{math.ceil(deadline * 1000)}.kv"
        try:
            os.rename(self.directory / name, self.directory / published)
        except OSError as error:
            raise TransferError(f"{self.directory / name}: {error.strerror}") from error
        return published

    # -- reading ---------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> int | None:
        """A complete file, open; None when there is none of this name, or its time is over."""
        if not name.endswith(".kv") or self.is_over(name):
            return None
        try:
            return os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TransferError(f"{self.directory / name}: {error.strerror}") from error

    def is_over(self, name: str) -> bool:
        """Whether the file's deadline has passed, or it can be no file of ours."""
        match = _NAME.fullmatch(name)
        return match is None or self._clock() * 1000 > int(match[2])

    def has(self, name: str) -> bool:
        """Whether the file is still there, so that nobody has taken all of it; also while that cannot be seen."""
        try:
            os.lstat(self.directory / name)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def now(self) -> float:
        """Wall-clock seconds, as deadlines count."""
        return self._clock()

    @property
    def identity(self) -> object | None:
        """Which folder it is: another one once it was deleted and made again. None while there is none, or it cannot be seen."""
        try:
            known, found = self._open_now, os.stat(self.directory)
            if known is None or (known.device, known.number) != (found.st_dev, found.st_ino):
                known = self._open_now = _OpenFolder(self.directory)
        except OSError:
            return None
        return known

    def remove(self, name: str, unless: Callable[[int], bool] = lambda _file: False) -> bool:
        """Remove a file that nobody is reading or writing. False when it was gone, somebody is, it can be no file of ours, or its content
        says so (``unless``, called with the open file while nobody else changes it)."""
        if not _NAME.fullmatch(name):
            return False
        with suppress(OSError, TransferError):  # gone meanwhile, or somebody is looking at it now
            file = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                with turn(file, 0.0):
                    if os.fstat(file).st_nlink == 0 or is_locked(file, WRITER) or is_locked(
                            file, FIRST_READER, MOST_READERS) or unless(file):
                        return False
                    os.unlink(self.directory / name)
                    return True
            finally:
                os.close(file)
        return False

    def collect(self) -> int:
        """Remove files whose deadline has passed, and those whose writers were killed. Not while somebody reads or writes them.

        Returns how many there were. What cannot be seen or removed now is left for the next time.
        """
        try:
            names = self._names()
        except TransferError as error:
            logger.warning("old handovers are left for later: %s", error)
            return 0
        return sum(self.remove(name) for name in names if name.endswith(".part") or self.is_over(name))

    @property
    def used_bytes(self) -> int:
        """What all files in the folder take."""
        total = 0
        for name in self._names():
            with suppress(OSError):  # gone meanwhile
                total += os.stat(self.directory / name, follow_symlinks=False).st_size
        return total

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.directory) if _NAME.fullmatch(name))
        except FileNotFoundError:
            return []  # the folder was deleted with all that was in it; the next file makes it again
        except OSError as error:
            raise TransferError(f"{self.directory}: {error.strerror}") from error

    def _create(self, name: str, num_bytes: int) -> int:
        while True:
            file = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(file, num_bytes)  # what it will take counts from here on
                # Somebody who collects before it is locked takes it for a dead writer's, and must not see it so while it becomes ours.
                with turn(file):
                    if lock_byte(file, WRITER) and os.fstat(file).st_nlink:
                        return file
            except BaseException:
                self.unlink(name)
                os.close(file)
                raise
            os.close(file)

    def _require_room(self, num_bytes: int) -> None:
        if self.used_bytes + num_bytes > self.capacity_bytes:
            self.collect()
        used = self.used_bytes
        if used + num_bytes > self.capacity_bytes:
            raise CapacityError(f"{self.directory}: {format_bytes(num_bytes)} to hand over, {format_bytes(used)} of "
                                f"{format_bytes(self.capacity_bytes)} are in use; hand over later, or raise capacity=...")
        if self._is_memory:
            host = host_memory()
            if num_bytes > host.available_bytes:
                raise CapacityError(f"{self.directory}: {format_bytes(num_bytes)} to hand over, {format_bytes(host.available_bytes)} of "
                                    f"memory are free ({host.limited_by}); hand over later, or through a folder on a drive")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else makes files here meanwhile: two that each fit might not fit together."""
        folder = self._open_folder()
        try:
            if not take_in_time(partial(lock_whole, folder), _TURN_SECONDS, _PAUSE):
                raise TransferError(f"{self.directory}: another process has kept it locked for {_TURN_SECONDS:.0f} s")
            yield
        finally:
            os.close(folder)

    def _open_folder(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            folder = os.open(self.directory, flags)
        except FileNotFoundError:  # it was deleted: shared memory is, by some systems, when its user logs out
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.directory, flags)
        if os.fstat(folder).st_uid != os.getuid():
            os.close(folder)
            raise TransferError(f"{self.directory}: it belongs to another user now; remove it")
        return folder

    def unlink(self, name: str) -> None:
        """Remove a file, whoever uses it. It stays usable to those who have it open."""
        with suppress(OSError):
            os.unlink(self.directory / name)


class _OpenFolder:
    """A folder, held open: until then its number is its own, which file systems give to the next folder once it is deleted.

    Args:
        directory: its path now.

    Attributes:
        device, number: of the file system, and in it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, file)
        found = os.fstat(file)
        self.device, self.number = found.st_dev, found.st_ino

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OpenFolder) and (self.device, self.number) == (other.device, other.number)

    def __hash__(self) -> int:
        return hash((self.device, self.number))


@contextmanager
def turn(file: int, timeout: float = _TURN_SECONDS) -> Iterator[None]:
    """Nobody else looks at the file's state or changes it meanwhile.

    TransferError when others keep their turn for ``timeout`` seconds, or its file system has no locks.
    """
    try:
        if not take_in_time(partial(lock_byte, file, TURN), timeout, _PAUSE):
            raise TransferError(f"a handed over file has been locked by another process for {timeout:.0f} s")
    except OSError as error:
        raise TransferError(f"a handed over file cannot be locked: {error.strerror}; use a folder on a file system with locks") from error
    try:
        yield
    finally:
        unlock_byte(file, TURN)

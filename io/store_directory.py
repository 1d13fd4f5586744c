"""``StoreDirectory``: whose NVMe directory this is, and that only one process uses it (design: NVMe rules).

The identity file names in clear what the blocks belong to: format version, namespace (model, layout, ...), slots per group
and a generation. The generation goes up at every reset; it is part of the namespace digest that each slot header carries,
so no block from before a reset verifies afterwards, whatever else survives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io.byte_locks import lock_whole
from kvtier.io.slab import FORMAT_VERSION
from kvtier.io.sqlite_errors import NO_ROOM

IDENTITY_NAME: Final = "kvtier-store.json"
LOCK_NAME: Final = "kvtier.lock"
MANIFEST_NAME: Final = "manifest.sqlite"
TEMPORARY_SUFFIX: Final = ".tmp"
KEPT_SUFFIX: Final = ".damaged-"
"""And a time: a damaged manifest that was replaced."""

NOT_CONTENT: Final = {LOCK_NAME, "lost+found"}
"""May be there before the directory is ours."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreIdentity:
    """What the identity file says.

    Attributes:
        namespace: JSON object that the keys of all blocks presuppose (model, dtype, layout, ranks, ...).
        block_bytes: bytes per block of each group.
        num_slots: slots that each group's slab has, 0 until it has been preallocated.
        generation: number of resets so far.
    """

    namespace: dict[str, object]
    block_bytes: tuple[int, ...]
    num_slots: tuple[int, ...]
    generation: int = 0

    @property
    def namespace_digest(self) -> bytes:
        """SHA-256 over format version, namespace and generation: 32 bytes for every slot header."""
        return hashlib.sha256(_canonical([FORMAT_VERSION, self.namespace, self.generation])).digest()

    def to_json(self) -> str:
        """The identity as indented JSON with a digest of itself."""
        content = {"kvtier_store": FORMAT_VERSION, "namespace": self.namespace, "block_bytes": list(self.block_bytes),
                   "num_slots": list(self.num_slots), "generation": self.generation}
        return json.dumps(content | {"sha256": hashlib.sha256(_canonical(content)).hexdigest()}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StoreIdentity:
        """The reverse of :meth:`to_json`.

        Raises:
            ValueError: no JSON, another format version, a field missing, or it does not match its own digest.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or "kvtier_store" not in content:
            raise ValueError("no identity of a kvtier store")
        if content["kvtier_store"] != FORMAT_VERSION:
            raise ValueError(f"its format version is {content['kvtier_store']!r}, this kvtier reads and writes {FORMAT_VERSION}")
        digest = content.pop("sha256", None)
        if digest != hashlib.sha256(_canonical(content)).hexdigest():
            raise ValueError("it does not match its own sha256")
        try:
            return cls(dict(content["namespace"]), tuple(map(int, content["block_bytes"])), tuple(map(int, content["num_slots"])),
                       int(content["generation"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"field missing or of the wrong kind: {error}") from error


class StoreDirectory:
    """An opened, locked directory whose identity has been checked. Make one with :meth:`open`."""

    def __init__(self, path: Path, lock_descriptor: int, identity: StoreIdentity) -> None:
        self.path = path
        self.identity = identity
        self._lock_descriptor = lock_descriptor

    @classmethod
    def open(cls, directory: str | Path, namespace: str, block_bytes: Sequence[int]) -> StoreDirectory:
        """Take possession of a directory, making it when it is missing.

        Args:
            directory: ``~`` and ``$VARS`` are expanded.
            namespace: JSON object as text; must equal what the directory already carries.
            block_bytes: bytes per block of each group, likewise.

        Raises:
            ConfigError: it cannot be made or written; another process owns it; it holds something else; it belongs to
                another model, layout or format version. The message names both sides and what to do.
        """
        path = expand(directory)
        wanted = StoreIdentity(parse_namespace(namespace), tuple(block_bytes), (0,) * len(block_bytes))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(path)
            lock_descriptor = take_lock(path)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            path.chmod(0o700)
            remove_temporary(path)
            identity = read_identity(path)
            if identity is None:
                identity = wanted
                write_atomically(path / IDENTITY_NAME, identity.to_json())
            _require_equal(path, identity, wanted)
            return cls(path, lock_descriptor, identity)
        except BaseException as error:  # Ctrl-C too: a lock that nobody gives back would keep this very process out
            os.close(lock_descriptor)
            if isinstance(error, OSError):
                raise unusable(path, error) from error
            raise

    def slab_path(self, group: int) -> Path:
        return self.path / f"group-{group}.slab"

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST_NAME

    def require_present(self) -> None:
        """Raise OSError (ENOENT) when somebody deleted the directory: one that has its name now is another, and not ours."""
        if os.fstat(self._lock_descriptor).st_nlink == 0:
            raise deleted(self.path)

    def record_slots(self, num_slots: Sequence[int]) -> None:
        """Write down how many slots each slab has now.

        Raises:
            OSError: the identity file cannot be written; ``identity`` says which one is in force.
        """
        self._replace_identity(replace(self.identity, num_slots=tuple(num_slots)))

    def start_generation(self) -> None:
        """Begin a new generation: no block written so far verifies from here on.

        Raises:
            OSError: as :meth:`record_slots`.
        """
        self._replace_identity(replace(self.identity, generation=self.identity.generation + 1))

    def close(self) -> None:
        """Give the directory up. Idempotent."""
        descriptor, self._lock_descriptor = self._lock_descriptor, -1
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still hold the descriptor
            os.close(descriptor)

    def _replace_identity(self, identity: StoreIdentity) -> None:
        if identity != self.identity:
            self.require_present()
            try:
                write_atomically(self.path / IDENTITY_NAME, identity.to_json())
                self.identity = identity
            except BaseException:  # it may be in place all the same: what is stored from now on must belong to what the next start reads
                with contextlib.suppress(OSError, ConfigError):
                    self.identity = read_identity(self.path) or self.identity
                raise


def deleted(path: Path) -> FileNotFoundError:
    """The error for a file or directory that somebody deleted while it was in use."""
    return FileNotFoundError(errno.ENOENT, "it was deleted while it was in use; restart to begin it anew", str(path))


def why_not_written(folder: Path) -> OSError | None:
    """What the system says to a file in this folder, which is made for the time being where it is missing; None where all is well."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
    return None


def unusable(path: Path, error: OSError) -> ConfigError:
    """The error for a store directory that the system will not let us use: what failed and the remedy that fits it."""
    if error.errno in (*NO_ROOM, errno.EFBIG):
        remedy = "Free some space, lower the size of the NVMe level or give another directory"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "Give this user permission to read and write it, or give a directory that this user may write to"
    elif error.errno == errno.EISDIR:
        remedy = "A folder is in the way where a file belongs: move it away or give another directory"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        remedy = "A file is in the way where a folder belongs: move it away or give another directory"
    elif error.errno == errno.EROFS:
        remedy = "The filesystem is mounted read-only: mount it writable or give another directory"
    elif error.errno == errno.ENOENT:
        remedy = "Give a directory that this user may write to"
    else:
        remedy = "Check the drive and its mount, or give a directory that this user may write to"
    use = "used" if os.path.lexists(path) else "created"
    return ConfigError(f"nvme_directory={str(path)!r} cannot be {use}: {error}. {remedy}")


def occupied_bytes(directory: Path) -> int:
    """What the slab files in a directory have allocated already; 0 where there is none.

    Raises:
        ConfigError: the directory cannot be looked into.
    """
    try:
        return sum(path.stat().st_blocks * 512 for path in directory.glob("*.slab")) if directory.is_dir() else 0
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be looked into ({error.strerror}); choose a folder that this user may use") from error


def expand(directory: str | Path, setting: str = "nvme_directory") -> Path:
    """The absolute path with ``~`` and ``$VARS`` filled in. ``setting``: whose value it is.

    Raises:
        ConfigError: a variable is not set or the user is unknown: such a name is never taken literally.
    """
    text = os.path.expanduser(os.path.expandvars(str(directory)))
    if not text or "$" in text or text.startswith("~") or "\0" in text:
        raise ConfigError(f"{setting}={str(directory)!r}: empty, or it names a variable or user that does not exist; "
                          "set the variable or write the path out")
    return Path(os.path.abspath(text))


def parse_namespace(namespace: str) -> dict[str, object]:
    """The namespace as a JSON object.

    Raises:
        ConfigError: it is something else.
    """
    try:
        parsed = json.loads(namespace)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(f"namespace={namespace[:80]!r}: must be a JSON object such as {{\"model\": \"name@revision\"}}")
    return parsed


def refuse_foreign(path: Path) -> None:
    """Raise ConfigError when the directory holds something and is not a store of ours. Nothing in it is touched."""
    names = {entry.name for entry in path.iterdir()}
    if IDENTITY_NAME in names:
        return
    content = sorted(name for name in names - NOT_CONTENT if not (LOCK_NAME in names and name.endswith(TEMPORARY_SUFFIX)))
    if content:
        raise ConfigError(f"nvme_directory={str(path)!r} holds {len(content)} other entries ({', '.join(content[:3])}, ...) and no "
                          f"{IDENTITY_NAME}: it is not a kvtier store. Give an empty directory or one that does not exist yet")


def take_lock(path: Path) -> int:
    """Lock the directory for this process and return the descriptor that holds the lock.

    The kernel drops the lock when its owner dies, so there is no stale lock to clean up.

    Raises:
        ConfigError: another process, or another store in this one, holds it; names its pid.
    """
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_whole(descriptor):
            owner = os.pread(descriptor, 256, 0).decode("utf-8", "replace").strip() or "that has just started"
            raise ConfigError(f"nvme_directory={str(path)!r} is in use by process {owner} (this is process {os.getpid()}): stop that "
                              "one or give each its own directory")
        with contextlib.suppress(OSError):  # on a full disk the lock still counts; only the pid is missing from the message
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def is_temporary(name: str) -> bool:
    """Whether a file of this name is half of something that was being written."""
    return name.endswith((TEMPORARY_SUFFIX, TEMPORARY_SUFFIX + "-wal", TEMPORARY_SUFFIX + "-shm"))


def remove_temporary(path: Path) -> None:
    """Delete what an interrupted run left behind. Only called under the lock."""
    for entry in path.iterdir():
        if is_temporary(entry.name):
            _log.info("%s: removing %s, left by an interrupted run", path, entry.name)
            entry.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a crash leaves the old or the new one, never a part."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read_identity(path: Path) -> StoreIdentity | None:
    """What the directory says it holds; ``None`` where there is no identity file.

    Raises:
        ConfigError: the file is damaged or of another format version.
        OSError: it cannot be read.
    """
    file = path / IDENTITY_NAME
    try:
        return StoreIdentity.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise ConfigError(f"{file} cannot be used: {error}. Restore it, give another directory, or delete this one to start with "
                          "an empty store") from error


def _require_equal(path: Path, found: StoreIdentity, wanted: StoreIdentity) -> None:
    differing = []
    for name in sorted(found.namespace.keys() | wanted.namespace.keys()):
        have, want = found.namespace.get(name), wanted.namespace.get(name)
        if have != want:
            differing.append(f"{name} is {json.dumps(have)}, configured is {json.dumps(want)}")
    if found.block_bytes != wanted.block_bytes:
        differing.append(f"bytes per block of each group are {list(found.block_bytes)}, configured are {list(wanted.block_bytes)}")
    if differing:
        raise ConfigError(f"nvme_directory={str(path)!r} belongs to another cache: {'; '.join(differing)}. Give another directory, "
                          "or delete this one if its blocks are no longer wanted")

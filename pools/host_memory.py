"""What this process may use of the host: free memory, cgroup limits, memlock, ``/dev/shm``, disk.

A container's own limit counts, not only what the machine has: a check that reads ``MemAvailable`` alone ends with the
out-of-memory killer. Reads ``/proc`` and ``/sys`` only; ``root`` is for tests.
"""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

_OCTAL: Final = re.compile(rb"\\([0-7]{3})")  # how mountinfo writes spaces
_UNLIMITED_ABOVE: Final = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True)
class CgroupMemory:
    """Memory limit of one cgroup and how much of it is taken; ``path`` is the folder that says so."""

    path: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class HostMemory:
    """Host memory that may still be taken: the least of what the machine and each enclosing cgroup leave."""

    available_bytes: int
    total_bytes: int
    limited_by: str
    """What bounds ``available_bytes``: "MemAvailable" or "cgroup limit of PATH"."""
    cgroup: CgroupMemory | None
    """The tightest limited cgroup; None when there is no limit."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read what is free now.

    Raises:
        ConfigError: ``/proc/meminfo`` is missing or has no MemAvailable (Linux before 3.14, or no Linux).
    """
    fields = _meminfo(root / "proc/meminfo")
    cgroup = min(_cgroups(root), key=lambda found: found.free_bytes, default=None)
    available, total = fields["MemAvailable"], fields["MemTotal"]
    if cgroup is not None and cgroup.free_bytes < available:
        return HostMemory(cgroup.free_bytes, total, f"cgroup limit of {cgroup.path}", cgroup)
    return HostMemory(available, total, "MemAvailable", cgroup)


def memlock_limit() -> int | None:
    """Soft RLIMIT_MEMLOCK in bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def shared_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(free, total) bytes of ``/dev/shm``; None where there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def free_disk_bytes(directory: Path) -> int:
    """Bytes that an ordinary user may still write where ``directory`` is or, while it does not exist, would be.

    Raises:
        ConfigError: the file system cannot be asked.
    """
    existing = directory.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        found = os.statvfs(existing)
    except OSError as error:
        raise ConfigError(f"{directory}: free space is not known ({error.strerror}); choose another folder") from error
    return found.f_bavail * found.f_frsize


def mount_of(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """(file system type, mount point) of the mount that holds ``folder``; ("unknown", "/") where the kernel does not say."""
    resolved = folder.resolve()
    best = ("unknown", "/")
    depth = -1
    try:
        lines = mountinfo.read_bytes().rstrip(b"\n").split(b"\n")
    except OSError:
        return best
    for line in lines:
        before, _, after = line.partition(b" - ")
        mount = Path(os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), before.split(b" ")[4])))
        # Of mounts on the same folder the last one hides the others.
        if (mount == resolved or mount in resolved.parents) and len(mount.parts) >= depth:
            best, depth = (os.fsdecode(after.split(b" ")[0]), str(mount)), len(mount.parts)
    return best


def usable_cpus() -> int:
    """CPUs this process may run on (affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def _meminfo(path: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); kvtier needs Linux and /proc") from error
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        raise ConfigError(f"{path}: has no MemAvailable; kvtier needs Linux 3.14 or newer")
    return fields


def _cgroups(root: Path) -> list[CgroupMemory]:
    """Every cgroup above this process that limits its memory, version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # a kernel without cgroups limits nothing
    found: list[CgroupMemory] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                found += _limits(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file")
    return found


def _limits(mount: Path, path: str, limit_file: str, used_file: str, cache_field: str) -> list[CgroupMemory]:
    """Limits from the process's cgroup up to the mount.

    In a container the mount often *is* the process's cgroup while ``path`` is the host's name for it: folders that do
    not exist are skipped, the mount itself is always looked at.
    """
    found: list[CgroupMemory] = []
    folder = Path(os.path.normpath(mount / path.lstrip("/")))
    if mount not in folder.parents:
        folder = mount
    while True:
        limit = _number(folder / limit_file)
        used = _number(folder / used_file)
        if limit is not None and used is not None and limit < _UNLIMITED_ABOVE:
            # Page cache that is not in use counts as used, yet the kernel gives it back before it refuses memory.
            found.append(CgroupMemory(str(folder), limit, max(0, used - _stat(folder / "memory.stat", cache_field))))
        if folder == mount:
            return found
        folder = folder.parent


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for "max" or no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    """One field of ``memory.stat``; 0 when it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0

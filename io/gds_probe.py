"""Whether GPUDirect Storage works between this device and this directory: written, read back and compared, or not at all.

The cheap reasons against it come first. What is left is tried in a process of its own with a deadline, because on a machine
that is not set up for it cuFile's driver may spin for ever, and nobody can end a thread. That process is this module, run as
``python -m kvtier.io.gds_probe DIRECTORY DEVICE``; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvtier.io.direct_file import Buffer, DirectFile, aligned_buffer
from kvtier.io.gds_driver import CuFileSettings, GdsUnavailable, KvikioModule, is_kvikio_installed, load_kvikio, no_detours
from kvtier.pools.host_memory import mount_of
from kvtier.pools.nvme_geometry import PAGE_BYTES

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})
NO_GDS_FILE_SYSTEMS: Final = frozenset({"overlay", "fuse", "nfs", "nfs4", "9p", "virtiofs", *MEMORY_FILE_SYSTEMS})

PROBE_NAME: Final = "gds-probe.tmp"
PROBE_BYTES: Final = 1 << 20
PATIENCE: Final = 60.0
"""Seconds for the whole probe: a Python process that starts CUDA and cuFile and moves 2 MiB."""


@dataclass(frozen=True)
class NvmePath:
    """How bytes travel between device and NVMe.

    Attributes:
        name: "gds": directly; "posix": through host memory; "none": there is no NVMe level.
        reason: why it is not "gds"; empty where it is.
    """

    name: str
    reason: str = ""


NO_NVME: Final = NvmePath("none", "there is no NVMe level")


def obstacle(device: str, directory: Path | None) -> str | None:
    """Why there can be no GPUDirect Storage here, as far as that can be told without trying; None when it has to be tried.

    Args:
        device: "cpu" or "cuda:N".
        directory: where the files are to be; None where it is not known yet.
    """
    if device == "cpu":
        return "device='cpu' has no GPU memory; GPUDirect needs device='cuda'"
    if directory is not None:
        kind, mount = mount_of(directory)
        if kind.split(".")[0] in NO_GDS_FILE_SYSTEMS:
            return f"{mount} is a mount of {kind}, which has no GPUDirect; choose a folder on ext4 or xfs on a local NVMe drive"
    if not is_kvikio_installed():
        return "KvikIO is not installed; pip install 'kvtier[cuda]'"
    return None


def try_directory(directory: Path, device: str, *, patience: float = PATIENCE,
                  command: Sequence[str] = (sys.executable, "-m", "kvtier.io.gds_probe")) -> str | None:
    """Write, read back and compare in ``directory`` with another process. Blocks for a few seconds, ``patience`` at most.

    Returns:
        None when every byte was right both ways without a detour, else the reason. Never raises.
    """
    path = directory / PROBE_NAME
    try:
        done = subprocess.run([*command, str(directory), device], capture_output=True, text=True, timeout=patience, check=False,
                              stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    except subprocess.TimeoutExpired:
        return (f"the probe in {directory} did not end within {patience:.0f} s: cuFile's driver hangs; see gdscheck -p, and "
                "/etc/cufile.json")
    except OSError as error:
        return f"the probe cannot be started ({error}); run it by hand: python -m kvtier.io.gds_probe {directory} {device}"
    finally:
        path.unlink(missing_ok=True)
    lines = done.stdout.splitlines()
    try:
        said: dict[str, Any] = json.loads(lines[-1])
        is_working, reason = bool(said["works"]), str(said["reason"])
    except (IndexError, ValueError, KeyError, TypeError):
        last_words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"the probe in {directory} ended with exit code {done.returncode}: {last_words}"
    return None if is_working else reason


class ProbeMemory(Protocol):
    """Memory that KvikIO reads and writes, ``PROBE_BYTES`` long from a page boundary on."""

    @property
    def buffer(self) -> object:
        """As KvikIO takes it."""

    def put(self, data: Buffer) -> None:
        """Fill it; over when this returns."""

    def get(self) -> Buffer:
        """What it holds now."""


def write_read_compare(kvikio: KvikioModule, path: Path, memory: ProbeMemory) -> str | None:
    """Both ways, each against the host's own reads and writes of the same file, with bytes that nobody has seen before.

    The range begins behind one page, like the block of a slot.

    Returns:
        None when all bytes were right, else what was wrong.
    """
    path.unlink(missing_ok=True)
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        plain = undo.enter_context(closing(DirectFile(path, create=True)))
        plain.resize(PAGE_BYTES + PROBE_BYTES)
        handle = undo.enter_context(closing(kvikio.CuFile(path, "r+")))
        written, seen = _random(), aligned_buffer(PROBE_BYTES)
        memory.put(written)
        moved = handle.pwrite(memory.buffer, PROBE_BYTES, PAGE_BYTES, PROBE_BYTES).get()
        plain.read(PAGE_BYTES, [seen])
        if moved != PROBE_BYTES or not np.array_equal(seen, written):
            return f"what KvikIO wrote to {path.parent} is not what the host reads there ({moved} of {PROBE_BYTES} bytes moved)"
        written = _random()
        plain.write(PAGE_BYTES, [written])
        plain.sync()
        memory.put(np.invert(written))
        moved = handle.pread(memory.buffer, PROBE_BYTES, PAGE_BYTES, PROBE_BYTES).get()
        if moved != PROBE_BYTES or not np.array_equal(memory.get(), written):
            return f"what KvikIO reads from {path.parent} is not what the host wrote there ({moved} of {PROBE_BYTES} bytes moved)"
    return None


def _random() -> Buffer:
    data = aligned_buffer(PROBE_BYTES)
    data[:] = np.frombuffer(os.urandom(PROBE_BYTES), np.uint8)
    return data


class _DeviceMemory:
    """``PROBE_BYTES`` of a GPU, through CuPy."""

    def __init__(self, cupy: Any) -> None:
        whole = cupy.empty(PROBE_BYTES + PAGE_BYTES, dtype=cupy.uint8)
        start = -whole.data.ptr % PAGE_BYTES
        self.buffer = whole[start:start + PROBE_BYTES]
        self._cupy = cupy

    def put(self, data: Buffer) -> None:
        self.buffer.set(np.ascontiguousarray(data))
        self._cupy.cuda.runtime.deviceSynchronize()

    def get(self) -> Buffer:
        found: Buffer = self.buffer.get()
        return found


def _on_device(directory: Path, device: int) -> str | None:
    """The probe itself, in its own process."""
    try:
        import cupy
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # whatever CuPy and the driver raise: it is the reason
        return f"CUDA cannot be used: {error}"
    if device >= count:  # KvikIO is not touched before this is known: without a GPU cuFile spins
        return f"there are {count} CUDA devices, numbered from 0"
    try:
        kvikio = load_kvikio()
        settings = CuFileSettings.loaded()
        settings.forbid_compat_mode()
        with cupy.cuda.Device(device), no_detours(kvikio):
            memory = _DeviceMemory(cupy)
            kvikio.memory_register(memory.buffer)
            settings.require_no_compat_mode()
            return write_read_compare(kvikio, directory / PROBE_NAME, memory)
    except GdsUnavailable as error:
        return str(error)
    except Exception as error:  # KvikIO raises RuntimeError and more for everything that cuFile refuses
        return f"KvikIO in {directory}: {error}"


def main(arguments: Sequence[str], probe: Callable[[Path, int], str | None] = _on_device) -> int:
    """Print the verdict as JSON on the last line. Exit code 0 whether it works or not, 2 when used wrongly."""
    if len(arguments) != 2:
        print("usage: python -m kvtier.io.gds_probe DIRECTORY cuda:N", file=sys.stderr)
        return 2
    reason = probe(Path(arguments[0]), int(arguments[1].partition(":")[2] or 0))
    print(json.dumps({"works": reason is None, "reason": reason or ""}), flush=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # cuFile's own threads may hang at exit on a broken set-up, and all there is to say has been said

"""NVMe slots read and written through KvikIO, straight between the drive and staging memory on the device (design: NVMe rules).

The slab's format is the same whichever way a block travels: the payload goes through KvikIO, the header page through the host,
and the checksum is computed on the device and equal to the host's. So what one way wrote the other reads.

The staging memory is registered with cuFile once. A block is verified there, on the host's word, before a copy within the
device brings it into its slot: the pool itself need neither be registered nor have its blocks on page boundaries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kvtier.errors import TransferError
from kvtier.io.checksum import block_checksum, block_seed
from kvtier.io.direct_file import Buffer, aligned_buffer
from kvtier.io.direct_row import PendingIO
from kvtier.io.gds_driver import CuFileSettings, GdsUnavailable, KvikioFuture, KvikioModule, configure_kvikio, load_kvikio, no_detours
from kvtier.kernels.page_checksum import BlockChecksum
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.host_arena import HostArena
from kvtier.pools.nvme_geometry import NvmeGeometry

Arena = DeviceArena | HostArena


class RowMemory(Protocol):
    """The memory of one row, wherever it is."""

    nbytes: int

    @property
    def buffer(self) -> object:
        """As KvikIO takes it, ``payload_bytes`` long."""

    def checksum(self, key: bytes, group: int, slot: int) -> bytes: ...
    def to_host(self) -> Buffer: ...
    def from_host(self, data: Buffer) -> None: ...


class HostRowMemory:
    """A padded row of a host arena. Not GPUDirect: it lets the same code run where there is no GPU."""

    def __init__(self, arena: HostArena, slot: int) -> None:
        self.buffer: Buffer = arena.padded_rows[slot]
        self.nbytes = self.buffer.nbytes
        self._block: Buffer = arena.rows[slot]

    def checksum(self, key: bytes, group: int, slot: int) -> bytes:
        return block_checksum(self._block, key, group, slot)

    def to_host(self) -> Buffer:
        copy = aligned_buffer(self.nbytes)
        np.copyto(copy, self.buffer)
        return copy

    def from_host(self, data: Buffer) -> None:
        np.copyto(self.buffer, data)


class DeviceRowMemory:
    """A row of a device arena."""

    def __init__(self, arena: DeviceArena, slot: int) -> None:
        self._row = arena.padded_rows[slot]
        self.buffer = self._row
        self.nbytes = arena.stride
        self._checksum = BlockChecksum(arena.rows[slot])

    def checksum(self, key: bytes, group: int, slot: int) -> bytes:
        return self._checksum.digest(block_seed(key, group, slot))

    def to_host(self) -> Buffer:
        copy = aligned_buffer(self.nbytes)
        copy[:] = self._row.cpu().numpy()
        return copy

    def from_host(self, data: Buffer) -> None:
        self._row.copy_(torch.from_numpy(data))
        if self._row.is_cuda:
            torch.cuda.current_stream(self._row.device).synchronize()


class GdsFile:
    """One slab, as KvikIO opened it. Thread-safe.

    Args:
        kvikio: the module.
        path: an existing file, opened for reading and writing. It must keep its size: a file that ends inside a range fails.
        task_size: bytes that one of KvikIO's threads moves at a time.

    Raises:
        GdsUnavailable: KvikIO cannot open it.
    """

    def __init__(self, kvikio: KvikioModule, path: Path, task_size: int) -> None:
        self.path = path
        self._task_size = task_size
        try:
            self._handle = kvikio.CuFile(path, "r+")
        except (RuntimeError, OSError, ValueError) as error:
            raise GdsUnavailable(f"KvikIO cannot open {path}: {error}") from error

    def start_read(self, buffer: object, num_bytes: int, offset: int) -> PendingIO:
        """Begin to read ``num_bytes`` at ``offset``, all of them multiples of a page."""
        return self._start("read", self._handle.pread, buffer, num_bytes, offset)

    def start_write(self, buffer: object, num_bytes: int, offset: int) -> PendingIO:
        """Begin to write ``num_bytes`` at ``offset``, all of them multiples of a page."""
        return self._start("write", self._handle.pwrite, buffer, num_bytes, offset)

    def close(self) -> None:
        """Close the file; nothing may be under way."""
        self._handle.close()

    def _start(self, verb: str, call: Callable[[object, int, int, int], KvikioFuture], buffer: object, num_bytes: int,
               offset: int) -> PendingIO:
        what = f"KvikIO: {verb} of {num_bytes} bytes at offset {offset} of {self.path}"
        try:
            return _Pending(call(buffer, num_bytes, offset, self._task_size), num_bytes, what)
        except (RuntimeError, OSError, ValueError) as error:
            raise TransferError(f"{what}: {error}") from error


class _Pending:
    """A future of KvikIO's whose errors are ours."""

    def __init__(self, future: KvikioFuture, num_bytes: int, what: str) -> None:
        self._future = future
        self._num_bytes = num_bytes
        self._what = what

    def wait(self) -> None:
        try:
            moved = self._future.get()
        except (RuntimeError, OSError, ValueError) as error:
            raise TransferError(f"{self._what}: {error}") from error
        if moved != self._num_bytes:
            raise TransferError(f"{self._what}: short, {moved} bytes")


class GdsRow:
    """A ``DirectRow``: one row of staging memory and the file it belongs to."""

    def __init__(self, file: GdsFile, memory: RowMemory) -> None:
        self._file = file
        self._memory = memory
        self.nbytes = memory.nbytes
        self.checksum = memory.checksum
        self.to_host = memory.to_host
        self.from_host = memory.from_host

    def start_read(self, offset: int) -> PendingIO:
        return self._file.start_read(self._memory.buffer, self.nbytes, offset)

    def start_write(self, offset: int) -> PendingIO:
        return self._file.start_write(self._memory.buffer, self.nbytes, offset)


@dataclass(frozen=True)
class GdsGroup:
    """The staging memory of one group, and a row for each of its slots."""

    arena: Arena
    rows: Sequence[GdsRow]


class GdsPath:
    """The direct way of all groups: files open, memory registered. Make one with :func:`open_gds`, or :meth:`of_host` in tests."""

    def __init__(self, groups: Sequence[GdsGroup], undo: ExitStack) -> None:
        self.groups = groups
        self._undo = undo
        self._lock = threading.Lock()

    @classmethod
    def of_host(cls, kvikio: KvikioModule, paths: Sequence[Path], geometries: Sequence[NvmeGeometry], num_rows: int,
                task_size: int) -> GdsPath:
        """The same with host memory in the place of the device's: KvikIO's own reads and writes, and no GPUDirect."""
        with ExitStack() as undo:
            groups = []
            for path, geometry in zip(paths, geometries, strict=True):
                arena = HostArena(num_rows, geometry.block_bytes, pin=False)
                undo.callback(arena.close)
                file = GdsFile(kvikio, path, task_size)
                undo.callback(file.close)
                groups.append(GdsGroup(arena, [GdsRow(file, HostRowMemory(arena, slot)) for slot in range(num_rows)]))
            return cls(groups, undo.pop_all())

    @classmethod
    def of_device(cls, kvikio: KvikioModule, paths: Sequence[Path], geometries: Sequence[NvmeGeometry], device: int, num_rows: int,
                  task_size: int, registered: Callable[[], None]) -> GdsPath:
        """With staging memory on a CUDA device, in the compatibility mode that KvikIO is set to now. ``registered`` is called once the
        first registration has started cuFile's driver; what it raises ends this."""
        with ExitStack() as undo:
            groups = []
            for path, geometry in zip(paths, geometries, strict=True):
                arena = DeviceArena(num_rows, geometry.block_bytes, device)
                undo.callback(arena.close)
                try:
                    kvikio.memory_register(arena.whole)
                except RuntimeError as error:  # CUDA and KvikIO
                    raise GdsUnavailable(f"memory on cuda:{device} cannot be registered: {error}") from error
                undo.callback(_unregister, kvikio, arena, kvikio.defaults.get("compat_mode"))
                registered()
                file = GdsFile(kvikio, path, task_size)
                undo.callback(file.close)
                memories = [DeviceRowMemory(arena, slot) for slot in range(num_rows)]
                require_right_checksum(memories[0], geometry.block_bytes)
                groups.append(GdsGroup(arena, [GdsRow(file, memory) for memory in memories]))
            return cls(groups, undo.pop_all())

    def close(self) -> None:
        """Close files, unregister and free the memory. Nothing may be under way. May be called again."""
        with self._lock:
            undo, self._undo = self._undo, ExitStack()
        undo.close()


def require_right_checksum(memory: RowMemory, block_bytes: int) -> None:
    """Check that the checksum of bytes never seen before is the host's. It also compiles the kernels, before a read waits for them.

    Raises:
        GdsUnavailable: it is another, or cannot be computed (no Triton, say): every read would condemn a good slot.
    """
    data = aligned_buffer(memory.nbytes)
    data[:] = np.frombuffer(os.urandom(memory.nbytes), np.uint8)
    key = os.urandom(32)
    try:
        memory.from_host(data)
        found = memory.checksum(key, 1, 2)
    except Exception as error:  # whatever Triton, its compiler and CUDA raise: it is the reason
        raise GdsUnavailable(f"the checksum of a block cannot be computed on the device: {type(error).__name__}: {error}") from error
    expected = block_checksum(data[:block_bytes], key, 1, 2)
    if found != expected:
        raise GdsUnavailable(f"the checksum of {block_bytes} bytes on the device is {found.hex()}, the host's is {expected.hex()}: a bug "
                             "of kvtier or of Triton, please report it")


def open_gds(paths: Sequence[Path], geometries: Sequence[NvmeGeometry], device: int, num_rows: int, num_threads: int,
             task_size: int) -> GdsPath:
    """Open the slabs for GPUDirect, and register staging memory for ``num_rows`` blocks of each group on the device.

    Call it only after ``gds_probe.try_directory`` has come back with a yes: on a machine that is not set up it may hang.

    Raises:
        GdsUnavailable: KvikIO, cuFile or the device refuse, or a detour cannot be ruled out. Nothing stays open then.
    """
    kvikio = load_kvikio()
    settings = CuFileSettings.loaded()
    settings.forbid_compat_mode()
    configure_kvikio(kvikio, num_threads, task_size)
    with no_detours(kvikio):
        return GdsPath.of_device(kvikio, paths, geometries, device, num_rows, task_size, settings.require_no_compat_mode)


def _unregister(kvikio: KvikioModule, arena: DeviceArena, mode: object) -> None:
    """In the mode that it was registered in: in compatibility mode KvikIO does neither, and says nothing. A refusal is of no consequence
    here: the memory goes next."""
    with suppress(RuntimeError), kvikio.defaults.set({"compat_mode": mode}):
        kvikio.memory_deregister(arena.whole)

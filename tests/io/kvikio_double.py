"""A double of the ``kvikio`` module for host buffers: it moves bytes itself, and can be told to go wrong.

It is not KvikIO and shows nothing about it: ``test_gds_kvikio.py`` runs the real one. Here are the bad days, which the real
one cannot be asked for: short transfers, wrong bytes in silence, errors, a handle that opens nowhere.

Loaded by path from tests, because test folders are no packages.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.io.direct_file import Buffer, aligned_buffer
from kvtier.io.gds_probe import PROBE_BYTES


class HostMemory:
    """Plain memory in the place of a GPU's, for ``write_read_compare``."""

    def __init__(self) -> None:
        self.buffer = aligned_buffer(PROBE_BYTES)

    def put(self, data: Buffer) -> None:
        self.buffer[:] = data

    def get(self) -> Buffer:
        return self.buffer.copy()


class Future:
    def __init__(self, value: int | Exception) -> None:
        self._value = value

    def get(self) -> int:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class DoubleFile:
    def __init__(self, owner: KvikioDouble, path: Path, flags: str) -> None:
        assert flags == "r+", "another mode would truncate the slab"
        self._owner = owner
        self._descriptor = os.open(path, os.O_RDWR)
        self.closed = False

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> Future:
        return self._move("pread", buf, size, file_offset)

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> Future:
        return self._move("pwrite", buf, size, file_offset)

    def _move(self, verb: str, buf: Any, size: int, offset: int) -> Future:
        owner = self._owner
        owner.note(verb, buf, size, offset)
        if owner.error is not None:
            return Future(owner.error)
        view = np.asarray(buf)[:size]
        if verb == "pwrite":
            data = view.copy()
            if owner.corrupts_writes:
                data[size // 2] ^= 1
            moved = os.pwritev(self._descriptor, [data.data], offset)
        elif owner.reads_nothing:
            moved = size
        else:
            moved = os.preadv(self._descriptor, [view.data], offset)
        return Future(moved - owner.short_by)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        os.close(self._descriptor)


class _Restored(AbstractContextManager[None]):
    def __init__(self, settings: dict[str, object], before: dict[str, object]) -> None:
        self._settings = settings
        self._before = before

    def __exit__(self, *_: object) -> None:
        self._settings.update(self._before)


class KvikioDouble:
    """What kvtier uses of ``kvikio``."""

    CompatMode = SimpleNamespace(OFF="off", ON="on")

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.open_error: Exception | None = None
        self.short_by = 0
        self.corrupts_writes = False
        self.reads_nothing = False
        self.calls: list[tuple[str, int, int]] = []
        self.settings: dict[str, object] = {}
        self.registered: list[int] = []
        self.files: list[DoubleFile] = []
        self.defaults = self
        self._lock = threading.Lock()

    def get(self, config_name: str) -> object:
        return self.settings.get(config_name)

    def set(self, config: dict[str, object]) -> AbstractContextManager[None]:
        """At once, and back again only where it is entered."""
        before = {name: self.settings.get(name) for name in config}
        self.settings.update(config)
        return _Restored(self.settings, before)

    def note(self, verb: str, buf: Any, size: int, offset: int) -> None:
        assert np.asarray(buf).ctypes.data % 4096 == 0, "GPUDirect wants the buffer on a page boundary"
        assert size % 4096 == 0, "GPUDirect wants whole pages"
        assert offset % 4096 == 0, "GPUDirect wants page boundaries in the file"
        with self._lock:
            self.calls.append((verb, size, offset))

    def CuFile(self, file: Path, flags: str) -> DoubleFile:
        if self.open_error is not None:
            raise self.open_error
        self.files.append(DoubleFile(self, file, flags))
        return self.files[-1]

    def memory_register(self, buf: Any) -> None:
        if self.settings.get("compat_mode") != self.CompatMode.ON:
            self.registered.append(np.asarray(buf).ctypes.data)

    def memory_deregister(self, buf: Any) -> None:
        if self.settings.get("compat_mode") != self.CompatMode.ON:
            self.registered.remove(np.asarray(buf).ctypes.data)

"""A stand-in for ``cupy.cuda`` that carries out streams, events and copies on host memory, lazily and out of order.

It is not CUDA and shows nothing about a GPU. It holds to the part of CUDA's rules that our code relies on: a stream keeps
its order, an event is what had been enqueued when it was recorded, a wait holds a stream back, and otherwise streams make
progress in any order, only when somebody looks. So code that forgot an order goes wrong here as well.

Loaded by path from conftest files and tests, because test folders are no packages.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_BROKEN = 700  # cudaErrorIllegalAddress, and every call returns it from then on
_LONGEST_PITCH = 2**31 - 1


class CudaError(RuntimeError):
    """CuPy's errors are RuntimeErrors as well."""


class Runtime:
    """The functions of ``cupy.cuda.runtime`` that kvtier uses."""

    memcpyDefault = 4

    def __init__(self, seed: int = 0, devices: int = 1) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._streams: dict[int, deque[tuple[str, tuple[int, ...]]]] = {}
        self._recorded: dict[int, int] = {}  # event -> its latest record
        self._passed: set[int] = set()       # records that a stream has reached
        self._numbers = itertools.count(1)
        self._devices = devices
        self.broken: str | None = None       # a sticky error of the device
        self.refuse_copies: str | None = None
        self.paused = False                  # the device makes no progress
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self._with_context: set[int] = set()  # threads that have called the runtime, which the driver's own calls presuppose

    def getDeviceCount(self) -> int:
        if self._devices == 0:
            raise CudaError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self._devices

    def new_handle(self) -> int:
        with self._lock:
            self._with_context.add(threading.get_ident())
            return next(self._numbers)

    def new_stream(self) -> int:
        handle = self.new_handle()
        self._streams[handle] = deque()
        return handle

    def eventRecord(self, event: int, stream: int) -> None:
        self._check()
        with self._lock:
            record = next(self._numbers)
            self._recorded[event] = record
            self._streams[stream].append(("record", (record,)))

    def CUDARuntimeError(self, status: int) -> CudaError:
        return CudaError(self.broken if status == _BROKEN else f"status {status}")

    def eventQuery(self, event: int) -> int:
        """The one function of CuPy's that returns the status of CUDA and raises nothing."""
        if self.broken is not None:
            return _BROKEN
        with self._lock:
            self._progress(self._random.randrange(6))
            return 0 if self._is_over(event) else 600

    def eventSynchronize(self, event: int) -> None:
        self._check()
        with self._lock:
            while not self._is_over(event):
                self._progress(8)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self._check()
        with self._lock:
            if event in self._recorded:
                self._streams[stream].append(("wait", (self._recorded[event],)))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.enqueue("memcpyAsync", stream, (dst, size, src, size, size, 1))

    def memcpy2DAsync(self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int,
                      stream: int) -> None:
        if not width <= min(dpitch, spitch) <= max(dpitch, spitch) <= _LONGEST_PITCH:
            raise CudaError("cudaErrorInvalidPitchValue")
        self.enqueue("memcpy2DAsync", stream, (dst, dpitch, src, spitch, width, height))

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self.registered[address] = size

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]

    def enqueue(self, name: str, stream: int, arguments: tuple[int, ...]) -> None:
        self._check()
        if self.refuse_copies is not None:
            raise CudaError(self.refuse_copies)
        with self._lock:
            self.calls.append(name)
            self._streams[stream].append(("copy", arguments))

    def require_context(self) -> None:
        """As the driver does, in whose calls nothing makes a context for a thread that has none."""
        if threading.get_ident() not in self._with_context:
            raise CudaError("CUDA_ERROR_INVALID_CONTEXT")

    def _check(self) -> None:
        self._with_context.add(threading.get_ident())
        if self.broken is not None:
            raise CudaError(self.broken)

    def _is_over(self, event: int) -> bool:
        record = self._recorded.get(event)
        return record is None or record in self._passed

    def _progress(self, steps: int) -> None:
        if self.paused:
            return
        for _ in range(steps):
            movable = [queue for queue in self._streams.values()
                       if queue and (queue[0][0] != "wait" or queue[0][1][0] in self._passed)]
            if not movable:
                return
            kind, arguments = self._random.choice(movable).popleft()
            if kind == "record":
                self._passed.add(arguments[0])
            elif kind == "copy":
                dst, dpitch, src, spitch, width, height = arguments
                for line in range(height):
                    ctypes.memmove(dst + line * dpitch, src + line * spitch, width)


class Handle:
    """A stream or an event."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class StandInCuda:
    """What kvtier uses of ``cupy.cuda``."""

    def __init__(self, seed: int = 0, devices: int = 1) -> None:
        self.runtime = Runtime(seed, devices)

    def Stream(self, *, non_blocking: bool) -> Handle:
        assert non_blocking, "a blocking stream would synchronise with the legacy default stream"
        return Handle(self.runtime.new_stream())

    def Event(self, *, block: bool, disable_timing: bool) -> Handle:
        if self.runtime.broken is not None:
            raise CudaError(self.runtime.broken)
        return Handle(self.runtime.new_handle())

    def Device(self, device: int) -> AbstractContextManager[object]:
        return nullcontext()


class StandInBatch:
    """In place of ``BatchCopy``: its copies are carried out in any order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.counts: list[int] = []
        self.refuses: Exception | None = None

    def copy(self, destinations: Any, sources: Any, sizes: Any, stream: int) -> None:
        assert destinations.dtype == sources.dtype == sizes.dtype == "uint64"
        assert sizes.all(), "CUDA refuses a copy of nothing"
        self._runtime.require_context()
        if self.refuses is not None:
            raise self.refuses
        self.counts.append(len(sizes))
        entries = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        random.Random(len(entries)).shuffle(entries)
        for to_address, from_address, size in entries:
            self._runtime.enqueue("batch", stream, (to_address, size, from_address, size, size, 1))


class StandInKernel:
    """In place of ``RowKernel``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.counts: list[int] = []

    def copy(self, destination: Any, source: Any, pairs: Any, num_layers: int, num_bytes: int, stream: int) -> None:
        self.counts.append(len(pairs) * num_layers)
        for from_row, to_row in pairs:
            self._runtime.enqueue("kernel", stream, (destination.address + to_row * destination.stride, destination.layer_stride,
                                                     source.address + from_row * source.stride, source.layer_stride, num_bytes, num_layers))

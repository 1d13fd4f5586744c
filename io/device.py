"""``Device``: where the engine computes, and how its stream is ordered against ours (design: transfer rules).

``open_device("cpu" | "cuda" | "cuda:N")`` is the only place that decides between the two worlds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from kvtier.errors import ConfigError
from kvtier.io.cpu_stream import CpuStream, finished_event
from kvtier.io.cuda_stream import CudaEvent, CudaModule, CudaStream, load_cuda
from kvtier.io.streams import Event, Stream

_LEGACY_HANDLES: Final = (0, 1)
"""``cudaStream_t`` of the legacy default stream: null, and cudaStreamLegacy."""

EngineStream = object
"""The engine's stream as it has it: a ``torch.cuda.Stream``, a CuPy stream, a raw ``cudaStream_t``. None on the CPU, and
for torch's current stream on CUDA."""


class Device(Protocol):
    """Makes our streams, and orders the engine's stream against them."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda:N"."""

    def stream(self, name: str) -> Stream:
        """A new stream of ours; ``name`` appears in thread names and messages. Whoever asked closes it."""

    def engine_waits(self, engine_stream: EngineStream | None, events: Iterable[Event], timeout: float | None) -> bool:
        """Let the engine go on only after ``events``.

        On CUDA the engine's stream is told to wait and the call returns True at once. On the CPU the engine is the
        calling thread: it waits, at most ``timeout`` seconds, and False means that time ran out.
        """

    def engine_event(self, engine_stream: EngineStream | None) -> Event:
        """An event that is done when the engine has done all it enqueued so far (on the CPU: now)."""

    def on_engine(self, engine_stream: EngineStream | None) -> AbstractContextManager[object]:
        """Within it, torch works on the engine's stream."""


class CpuDevice:
    """The engine runs in ordinary threads and memory; our streams are worker threads."""

    name = "cpu"

    def stream(self, name: str) -> Stream:
        """A worker thread."""
        return CpuStream(name)

    def engine_waits(self, engine_stream: EngineStream | None, events: Iterable[Event], timeout: float | None) -> bool:
        """Wait on the host; False when time ran out."""
        if timeout is None:
            return all(event.wait() for event in events)
        deadline = time.monotonic() + timeout
        return all(event.wait(deadline - time.monotonic()) for event in events)

    def engine_event(self, engine_stream: EngineStream | None) -> Event:
        """Done: what the engine computed before this call has been computed."""
        return finished_event()

    def on_engine(self, engine_stream: EngineStream | None) -> AbstractContextManager[object]:
        """The calling thread is the engine."""
        return nullcontext()


class CudaDevice:
    """One CUDA device, through CuPy."""

    def __init__(self, cuda: CudaModule, number: int) -> None:
        self.name = f"cuda:{number}"
        self._cuda = cuda
        self._number = number

    def stream(self, name: str) -> Stream:
        """A non-blocking stream on this device."""
        return CudaStream(self._cuda, self._number, name)

    def engine_waits(self, engine_stream: EngineStream | None, events: Iterable[Event], timeout: float | None) -> bool:
        """The engine's stream waits on the device; the host goes on. Always True."""
        handle = self._handle(engine_stream)
        with self._cuda.Device(self._number):  # the default stream has the same handle on every device
            for event in events:
                assert isinstance(event, CudaEvent)
                if event.handle is not None:
                    self._cuda.runtime.streamWaitEvent(handle, event.handle)
        return True

    def engine_event(self, engine_stream: EngineStream | None) -> Event:
        """Recorded now on the engine's stream."""
        with self._cuda.Device(self._number):
            event = CudaEvent(self._cuda)
            event.record(self._handle(engine_stream))
        return event

    def on_engine(self, engine_stream: EngineStream | None) -> AbstractContextManager[object]:
        """torch's current stream is the engine's."""
        import torch
        handle = self._handle(engine_stream)
        if handle in _LEGACY_HANDLES:  # torch takes a null handle for none given, and makes a stream of its own
            return torch.cuda.stream(torch.cuda.default_stream(self.name))
        return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=self.name))  # type: ignore[no-untyped-call]

    def _handle(self, engine_stream: EngineStream | None) -> int:
        """The ``cudaStream_t`` behind what the engine calls its stream."""
        if engine_stream is None:
            import torch
            engine_stream = torch.cuda.current_stream(self._number)
        for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, ours
            handle = getattr(engine_stream, attribute, None)
            if isinstance(handle, int):
                return handle
        if isinstance(engine_stream, int) and not isinstance(engine_stream, bool):
            return engine_stream
        raise ConfigError(f"stream={engine_stream!r}: pass a torch.cuda.Stream, a cupy.cuda.Stream, a cudaStream_t as "
                          "an integer, or None for torch's current stream")


def open_device(name: str) -> Device:
    """The device called ``name``: "cpu", "cuda" (device 0) or "cuda:N".

    Raises:
        ConfigError: an unknown name, no CuPy, no CUDA driver, or no device with this number.
    """
    if name == "cpu":
        return CpuDevice()
    kind, colon, digits = name.partition(":")
    if kind != "cuda" or (colon and not (digits.isascii() and digits.isdigit())):
        raise ConfigError(f"device={name!r}: unknown; use 'cpu', 'cuda' or 'cuda:N'")
    number = int(digits) if colon else 0
    cuda = load_cuda()
    try:
        count = cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: no CUDA device can be used here ({error}); use device='cpu'") from error
    if number >= count:
        raise ConfigError(f"device={name!r}: this machine has {count} CUDA devices, numbered from 0")
    return CudaDevice(cuda, number)

"""``CudaStream`` and ``CudaEvent``: streams and events on CUDA through CuPy, the twin of ``cpu_stream``.

CuPy is imported when the first stream is made, never by importing this file. Handles are passed to the runtime API
directly: an engine's stream is only a handle, and wrapping each one costs more than the call.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Final, Protocol, TypeAlias, cast

from kvtier.errors import ConfigError, TransferError
from kvtier.io.capture_mode import beside_captures
from kvtier.io.streams import Event
from kvtier.io.threads import start_thread

_log = logging.getLogger(__name__)

_SUCCESS: Final = 0      # cudaSuccess
_NOT_READY: Final = 600  # cudaErrorNotReady

_FIRST_PAUSE: Final = 20e-6
_LONGEST_PAUSE: Final = 1e-3


class _Handle(Protocol):
    """What is used of ``cupy.cuda.Stream`` and ``cupy.cuda.Event``: they own the handle and destroy it."""

    ptr: int


class CudaRuntime(Protocol):
    """What is used of ``cupy.cuda.runtime``. Its functions raise ``CUDARuntimeError``, a ``RuntimeError``, on errors; those that
    copy or wait release the GIL. ``eventQuery`` alone returns the status, whatever it is.
    """

    memcpyDefault: int

    def CUDARuntimeError(self, status: int) -> RuntimeError: ...
    def getDeviceCount(self) -> int: ...
    def eventRecord(self, event: int, stream: int) -> None: ...
    def eventQuery(self, event: int) -> int: ...
    def eventSynchronize(self, event: int) -> None: ...
    def streamWaitEvent(self, stream: int, event: int) -> None: ...
    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None: ...
    def memcpy2DAsync(self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int,
                      stream: int) -> None: ...


class CudaModule(Protocol):
    """What is used of ``cupy.cuda``. CuPy has no type information, so what we rely on is written down here."""

    runtime: CudaRuntime

    def Stream(self, *, non_blocking: bool) -> _Handle: ...
    def Event(self, *, block: bool, disable_timing: bool) -> _Handle: ...
    def Device(self, device: int) -> AbstractContextManager[object]: ...


def load_cuda() -> CudaModule:
    """``cupy.cuda``, imported now.

    Raises:
        ConfigError: CuPy is not installed, or does not find its CUDA libraries.
    """
    try:
        return cast(CudaModule, importlib.import_module("cupy.cuda"))
    except ImportError as error:
        raise ConfigError(f"device='cuda' needs CuPy, which cannot be imported ({error}); "
                          "install kvtier[cuda] or use device='cpu'") from error


class CudaEvent:
    """The end of what had been enqueued on a stream when it was recorded.

    ``error`` is set at once when enqueuing failed, and when the device reports an error while the event is asked.
    """

    __slots__ = ("_cuda", "_event", "error")

    def __init__(self, cuda: CudaModule) -> None:
        self._cuda = cuda
        self._event: _Handle | None = None
        self.error: BaseException | None = None

    @property
    def handle(self) -> int | None:
        """The ``cudaEvent_t``; None before it is recorded, and when the device refused to make one."""
        return self._event.ptr if self._event is not None else None

    def make(self) -> None:
        """Have the current device make the event. With it the runtime makes the device's context this thread's."""
        # block: a host thread that waits sleeps instead of spinning on a core that the engine needs.
        self._event = self._cuda.Event(block=True, disable_timing=True)

    def record(self, stream: int) -> None:
        """Mark the place in the stream (a ``cudaStream_t``) that has been reached by enqueuing. Called once."""
        if self._event is None:
            self.make()
        assert self._event is not None
        self._cuda.runtime.eventRecord(self._event.ptr, stream)

    def is_done(self) -> bool:
        """Whether the device has got there. An event never recorded, or a device in error, counts as done."""
        if self._event is None:
            return True
        status = beside_captures(self._cuda.runtime.eventQuery, self._event.ptr)
        if status == _NOT_READY:
            return False
        if status != _SUCCESS and self.error is None:
            # A CUDA error is sticky: nothing enqueued will happen any more, and a waiter must not wait for it.
            self.error = self._cuda.runtime.CUDARuntimeError(status)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the device has got there.

        CUDA has no wait with a time-out: with one, this asks again and again, ever more rarely.
        """
        if timeout is None:
            if self._event is None:
                return True
            try:
                beside_captures(self._cuda.runtime.eventSynchronize, self._event.ptr)
            except RuntimeError as error:
                if self.error is None:
                    self.error = error
            return True
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not self.is_done():
            left = deadline - time.monotonic()
            if left <= 0.0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True


_place = threading.local()


def current_handle() -> int:
    """The ``cudaStream_t`` on which the work now being submitted by this thread has to enqueue its copies."""
    handle: int = _place.handle
    return handle


_Watched: TypeAlias = tuple[CudaEvent, Callable[[Event], None]]


class CudaStream:
    """A non-blocking CUDA stream: it does not synchronise with the legacy default stream.

    ``submit`` calls the work at once, to enqueue; ordering behind other events is left to the device. A watcher thread
    waits for the events in order and makes the completion calls, because a host function on the stream may not call
    CUDA and would need the GIL while the device waits for it.
    """

    def __init__(self, cuda: CudaModule, device: int, name: str) -> None:
        self.name = name
        self._cuda = cuda
        self._device = device
        with cuda.Device(device):
            self._stream = cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()
        self._closed = False
        self._given_up = False
        self._watched: SimpleQueue[_Watched | None] = SimpleQueue()
        self._left: _Watched | None = None  # what the watcher was at when it gave up
        self._watcher = start_thread(self._watch, f"kvtier-{name}")

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""
        return self._stream.ptr

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (),
               done: Callable[[Event], None] | None = None) -> CudaEvent:
        """Enqueue ``work`` behind ``after``; see ``Stream.submit``. ``after`` holds events of CUDA streams."""
        with self._lock:
            if self._closed:
                raise TransferError(f"stream {self.name}: closed, it takes no more work")
            event = CudaEvent(self._cuda)
            try:
                with self._cuda.Device(self._device):
                    event.make()  # before the work: calls of the driver need the context that comes with it in a new thread
                    event.error = self._enqueue(work, after)
                    # Also after a failure: part of the work may be enqueued, and the next writer must come after that part.
                    event.record(self._stream.ptr)
            except RuntimeError as caught:  # from a broken device every call may come back like this
                event.error = event.error or caught
            if done is not None:
                self._watched.put((event, done))
        return event

    def _enqueue(self, work: Callable[[], None], after: Sequence[Event]) -> Exception | None:
        try:
            for earlier in after:
                assert isinstance(earlier, CudaEvent), "a CUDA stream can only wait for CUDA events"
                if earlier.handle is not None:
                    self._cuda.runtime.streamWaitEvent(self._stream.ptr, earlier.handle)
            _place.handle = self._stream.ptr
            work()
        except Exception as caught:
            return caught
        return None

    def let_begin(self) -> None:
        """Nothing to do: submitting has enqueued it on the device."""

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for everything submitted so far; False when time ran out."""
        with self._cuda.Device(self._device):
            event = CudaEvent(self._cuda)
            event.record(self._stream.ptr)
            return event.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is enqueued and end the watcher; False when that took more than ``timeout`` seconds. May be called again: that
        waits on for what the device still works on."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if not self._closed:
                    self._closed = True
                    self._watched.put(None)
                self._given_up = False
                if self._left is not None and not self._watcher.is_alive():
                    try:
                        self._watcher = start_thread(self._watch, f"kvtier-{self.name}")
                    except ConfigError:
                        return False
                watcher = self._watcher
            watcher.join(max(deadline - time.monotonic(), 0.0))
            if watcher.is_alive():
                self._given_up = True
                return False
            if self._left is None:
                return True

    def _watch(self) -> None:
        with self._cuda.Device(self._device):
            with suppress(RuntimeError):
                CudaEvent(self._cuda).make()  # gives the thread its context, without which it cannot look beside captures
            while (item := self._left or self._watched.get()) is not None:
                self._left = None
                event, done = item
                while not event.wait(0.5):
                    if self._given_up:
                        # The device still works on it: nobody may be told that these bytes are no longer in use.
                        self._left = item
                        _log.warning("stream %s: closed while work was running on the device", self.name)
                        return
                try:
                    done(event)
                except Exception:
                    _log.exception("stream %s: the completion callback failed", self.name)
                del item, event, done

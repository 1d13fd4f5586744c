"""``BatchCopy``: many copies by one call of the CUDA driver, ``cuMemcpyBatchAsync`` (design: copy engine).

CuPy does not have it, and cuda-bindings wants a Python list of every address; here the driver reads three arrays. The call came with
CUDA 12.8 and lost an argument with 13.0, so the driver is asked for the one that fits its version.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError

Addresses = npt.NDArray[np.uint64]

_FIRST_VERSION: Final = 12080       # with the index of the entry that failed
_WITHOUT_FAILURE: Final = 13000     # without it
_IN_STREAM_ORDER: Final = 1         # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_LEGACY_STREAMS: Final = (0, 1)     # null and CU_STREAM_LEGACY: the call refuses them, or falls back to something slow
_NO_ENTRY: Final = ctypes.c_size_t(-1).value

MOST_ENTRIES: Final = 1024
"""Of one call. Drivers of CUDA 13.0 are reported to crash or hang on tens of thousands of them (vLLM 49276), and what a call costs is no
matter beside so many."""


class _Location(ctypes.Structure):
    """``CUmemLocation``; all zero: no hint. Hints count for managed memory only."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (("source_access_order", ctypes.c_int), ("source_hint", _Location), ("destination_hint", _Location),
                ("flags", ctypes.c_uint))


class Driver(Protocol):
    """What is used of ``libcuda.so.1``."""

    cuDriverGetVersion: Any
    cuGetProcAddress_v2: Any
    cuThreadExchangeStreamCaptureMode: Any


def load_driver() -> Driver:
    """The driver's library. OSError where there is none."""
    driver: Driver = ctypes.CDLL("libcuda.so.1")
    return driver


class BatchCopy:
    """Enqueues batches of copies. Thread-safe.

    Sources are read in stream order. CUDA would also let them be read earlier, which is faster to schedule, but only where nothing that
    the stream waits for still writes them: ours may be on their way from the other stream.

    Args:
        driver: ``libcuda.so.1``; needs an initialised CUDA when it is called, not before.

    Raises:
        TransferError: this driver does not have the call.
    """

    def __init__(self, driver: Driver) -> None:
        version = ctypes.c_int()
        try:
            status = driver.cuDriverGetVersion(ctypes.byref(version))
            find = driver.cuGetProcAddress_v2
        except AttributeError as error:
            raise TransferError(f"the CUDA driver cannot be asked for cuMemcpyBatchAsync ({error})") from error
        if status or version.value < _FIRST_VERSION:
            raise TransferError(f"cuMemcpyBatchAsync needs a CUDA driver of version 12.8, this is {version.value / 1000:.2f}; update it")
        self._tells_entry = version.value < _WITHOUT_FAILURE
        address, found = ctypes.c_void_p(), ctypes.c_int()
        status = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _FIRST_VERSION if self._tells_entry else _WITHOUT_FAILURE,
                      ctypes.c_uint64(0), ctypes.byref(found))
        if status or not address.value:
            raise TransferError(f"the CUDA driver {version.value / 1000:.2f} has no cuMemcpyBatchAsync (error {status}, {found.value})")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        entry = (pointer,) if self._tells_entry else ()
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, *entry, pointer)(address.value)
        self._attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
        self._first = size(0)

    def copy(self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueue one copy for each entry. In which order they are carried out is open.

        Args:
            destinations, sources: addresses, uint64 ``[n]``, contiguous. Each copy lies within one allocation or registration.
            sizes: bytes, likewise; none of them 0.
            stream: a ``cudaStream_t`` that is not the legacy default stream.

        Raises:
            TransferError: the driver refuses; some of the copies may have been enqueued all the same.
        """
        if stream in _LEGACY_STREAMS:
            raise TransferError("cuMemcpyBatchAsync does not take the legacy default stream; use a stream of your own")
        count = len(sizes)
        for first in range(0, count, MOST_ENTRIES):
            failed = ctypes.c_size_t(_NO_ENTRY)
            entry = (ctypes.byref(failed),) if self._tells_entry else ()
            starts = [array[first:].ctypes.data for array in (destinations, sources, sizes)]
            status = self._call(*starts, min(MOST_ENTRIES, count - first), ctypes.addressof(self._attributes),
                                ctypes.addressof(self._first), 1, *entry, stream)
            if status:
                place = f" at entry {first + failed.value}" if failed.value != _NO_ENTRY else ""
                raise TransferError(f"cuMemcpyBatchAsync of {count} copies: CUDA error {status}{place}")

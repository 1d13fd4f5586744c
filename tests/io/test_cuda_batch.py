"""The driver's batched copy: found by version, called with its version's arguments. The driver here is a few functions of our own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvtier.errors import TransferError
from kvtier.io import cuda_batch
from kvtier.io.cuda_batch import BatchCopy

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
STREAM = 77


class FakeDriver:
    """``libcuda`` of one version; carries copies out at once and checks what it is given."""

    def __init__(self, version: int, *, status: int = 0, has_call: bool = True) -> None:
        self.version = version
        self.status = status
        self.asked: list[tuple[bytes, int]] = []
        self.streams: list[int] = []
        self._has_call = has_call
        common = (POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE)
        if version < 13000:
            self._function: Any = ctypes.CFUNCTYPE(ctypes.c_int, *common, ctypes.POINTER(SIZE), POINTER)(self._with_index)
        else:
            self._function = ctypes.CFUNCTYPE(ctypes.c_int, *common, POINTER)(self._copy)

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuGetProcAddress_v2(self, name: bytes, out: Any, version: int, flags: Any, found: Any) -> int:
        self.asked.append((name, version))
        out._obj.value = ctypes.cast(self._function, POINTER).value if self._has_call else None
        return 0

    def _with_index(self, *arguments: Any) -> int:
        *common, index, stream = arguments
        status = self._copy(*common, stream)
        if status:
            index[0] = 1
        return status

    def _copy(self, destinations: int, sources: int, sizes: int, count: int, attributes: int, indices: int, num_attributes: int,
              stream: int) -> int:
        self.streams.append(stream)
        assert num_attributes == 1
        assert SIZE.from_address(indices).value == 0
        words = (ctypes.c_int * 6).from_address(attributes)
        assert list(words) == [1, 0, 0, 0, 0, 0], "sources are read in stream order, without hints"
        if self.status:
            return self.status
        for number in range(count):
            to, of, size = ((ctypes.c_uint64 * count).from_address(array)[number] for array in (destinations, sources, sizes))
            ctypes.memmove(to, of, size)
        return 0


def arrays(source: np.ndarray, destination: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row 0 to row 2 and row 1, its first half, to row 0."""
    starts = [memory.ctypes.data for memory in (destination, source)]
    width = source.shape[1]
    return (np.array([starts[0] + 2 * width, starts[0]], np.uint64), np.array([starts[1], starts[1] + width], np.uint64),
            np.array([width, width // 2], np.uint64))


@pytest.mark.parametrize(("version", "asks_for"), [(12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)])
def test_each_version_is_called_as_it_wants(version: int, asks_for: int) -> None:
    driver = FakeDriver(version)
    source, destination = np.arange(64, dtype=np.uint8).reshape(2, 32), np.zeros((3, 32), np.uint8)
    BatchCopy(driver).copy(*arrays(source, destination), STREAM)
    assert driver.asked == [(b"cuMemcpyBatchAsync", asks_for)]
    assert driver.streams == [STREAM]
    assert (destination[2] == source[0]).all()
    assert (destination[0, :16] == source[1, :16]).all()
    assert not destination[0, 16:].any()
    assert not destination[1].any()


def test_nothing_to_copy_is_no_call() -> None:
    driver = FakeDriver(13000)
    nothing = np.zeros(0, np.uint64)
    BatchCopy(driver).copy(nothing, nothing, nothing, STREAM)
    assert driver.streams == []


@pytest.mark.parametrize("version", [12080, 13000])
def test_many_copies_are_several_calls_and_a_failure_is_counted_through(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_batch, "MOST_ENTRIES", 3)
    driver = FakeDriver(version)
    source, destination = np.random.default_rng(1).integers(0, 256, (8, 32), np.uint8), np.zeros((8, 32), np.uint8)
    rows = np.arange(8, dtype=np.uint64) * np.uint64(32)
    entries = destination.ctypes.data + rows, source.ctypes.data + rows[::-1].copy(), np.full(8, 32, np.uint64)
    batch = BatchCopy(driver)
    batch.copy(*entries, STREAM)
    assert driver.streams == [STREAM] * 3
    assert (destination == source[::-1]).all()
    driver.status = 1
    with pytest.raises(TransferError, match="at entry 1$" if version < 13000 else "error 1$"):
        batch.copy(*entries, STREAM)


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_stream_is_refused(stream: int) -> None:
    driver = FakeDriver(12080)
    one = np.ones(1, np.uint64)
    with pytest.raises(TransferError, match="legacy default stream"):
        BatchCopy(driver).copy(one, one, one, stream)
    assert driver.streams == []


@pytest.mark.parametrize(("version", "message"), [(12080, r"of 2 copies: CUDA error 801 at entry 1$"), (13000, r"CUDA error 801$")])
def test_what_the_driver_refuses_is_said(version: int, message: str) -> None:
    source, destination = np.zeros((2, 32), np.uint8), np.zeros((3, 32), np.uint8)
    with pytest.raises(TransferError, match=message):
        BatchCopy(FakeDriver(version, status=801)).copy(*arrays(source, destination), STREAM)


@pytest.mark.parametrize(("driver", "message"), [
    (FakeDriver(12060), r"version 12\.8, this is 12\.06"),
    (FakeDriver(13000, has_call=False), "has no cuMemcpyBatchAsync"),
    (object(), "cannot be asked"),
])
def test_a_driver_without_the_call_says_so(driver: Any, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        BatchCopy(driver)

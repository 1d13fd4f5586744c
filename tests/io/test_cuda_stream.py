"""The CUDA twin's own logic, run against a stand-in for CuPy. What only a GPU can show is not shown here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, TransferError
from kvtier.io import capture_mode, row_kernel
from kvtier.io.copiers import open_copiers
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_copier import CudaCopier
from kvtier.io.cuda_memory import CudaMemory
from kvtier.io.cuda_row_copier import CudaRowCopier
from kvtier.io.cuda_stream import CudaStream, current_handle
from kvtier.io.device import CudaDevice, open_device
from kvtier.kernels.row_moves import RowPlaces
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import PrimaryPool


def load_stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("cuda_stand_in", Path(__file__).with_name("cuda_stand_in.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = load_stand_in().StandInCuda()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made)
    return made


@pytest.fixture
def stream(cuda: Any) -> Iterator[CudaStream]:
    made = CudaStream(cuda, 0, "test")
    yield made
    cuda.runtime.broken = None
    cuda.runtime.paused = False
    made.close(60.0)


def copy(cuda: Any, source: np.ndarray, destination: np.ndarray) -> None:
    cuda.runtime.memcpyAsync(destination.ctypes.data, source.ctypes.data, source.nbytes, 4, current_handle())


def test_work_is_enqueued_at_once_and_done_when_the_device_has_done_it(cuda: Any, stream: CudaStream) -> None:
    source, destination = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    cuda.runtime.paused = True
    event = stream.submit(lambda: copy(cuda, source, destination))
    assert cuda.runtime.calls == ["memcpyAsync"]
    assert not event.is_done()
    assert not event.wait(0.02)
    assert not stream.synchronize(0.02)
    cuda.runtime.paused = False
    assert event.wait(60.0)
    assert event.wait()
    assert (destination == 7).all()
    assert event.error is None


def test_a_stream_waits_for_the_events_of_another(cuda: Any, stream: CudaStream) -> None:
    other = CudaStream(cuda, 0, "other")
    for _ in range(30):
        a, b, c = np.full(64, 7, np.uint8), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        first = other.submit(lambda a=a, b=b: copy(cuda, a, b))  # type: ignore[misc]
        second = stream.submit(lambda b=b, c=c: copy(cuda, b, c), after=(first,))  # type: ignore[misc]
        assert second.wait(60.0)
        assert (c == 7).all()
    assert other.close(60.0)


def test_the_completion_call_comes_after_the_event_from_another_thread(cuda: Any, stream: CudaStream) -> None:
    called = threading.Event()
    seen: list[tuple[bool, int]] = []

    def done(event: Any) -> None:
        seen.append((event.is_done(), threading.get_ident()))
        called.set()
        raise ValueError("on purpose")

    stream.submit(lambda: None, done=done)
    assert called.wait(60.0)
    again = threading.Event()
    stream.submit(lambda: None, done=lambda event: again.set())
    assert again.wait(60.0)
    assert seen[0][0]
    assert seen[0][1] != threading.get_ident()


def test_work_that_cannot_be_enqueued_is_the_events_error_and_still_ends(cuda: Any, stream: CudaStream) -> None:
    cuda.runtime.refuse_copies = "cudaErrorInvalidValue"
    called = threading.Event()
    buffer = np.zeros(8, np.uint8)
    event = stream.submit(lambda: copy(cuda, buffer, buffer), done=lambda event: called.set())
    assert called.wait(60.0)
    assert "cudaErrorInvalidValue" in str(event.error)
    cuda.runtime.refuse_copies = None
    assert stream.submit(lambda: None).error is None


def test_a_broken_device_ends_every_event_with_its_error(cuda: Any, stream: CudaStream) -> None:
    cuda.runtime.paused = True
    called = threading.Event()
    event = stream.submit(lambda: None, done=lambda event: called.set())
    cuda.runtime.broken = "cudaErrorIllegalAddress"
    assert called.wait(60.0)
    assert event.is_done()
    assert event.wait()
    assert "cudaErrorIllegalAddress" in str(event.error)
    called_late = threading.Event()
    late = stream.submit(lambda: None, after=(event,), done=lambda event: called_late.set())
    assert called_late.wait(60.0), "not even an event can be made then, and still the work has to end"
    assert late.is_done()
    assert late.wait()
    assert "cudaErrorIllegalAddress" in str(late.error)
    later = stream.submit(lambda: None, after=(late,))
    assert "cudaErrorIllegalAddress" in str(later.error)


def test_close_is_bounded_when_the_device_hangs_and_reports_nothing_as_done(cuda: Any) -> None:
    stream = CudaStream(cuda, 0, "test")
    cuda.runtime.paused = True
    calls: list[int] = []
    stream.submit(lambda: None, done=lambda event: calls.append(1))
    assert not stream.close(0.05)
    with pytest.raises(TransferError, match="closed"):
        stream.submit(lambda: None)
    stream._watcher.join(60.0)
    assert not stream._watcher.is_alive()
    assert calls == []
    assert not stream.close(0.05), "the device still works on it"
    cuda.runtime.paused = False
    assert stream.close(60.0)
    assert calls == [1]
    assert stream.close(0.0)


def test_the_engines_stream_is_ordered_both_ways_without_the_host_waiting(cuda: Any, stream: CudaStream) -> None:
    device = open_device("cuda:0")
    engine = cuda.Stream(non_blocking=True)
    source, middle, end = np.full(64, 5, np.uint8), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    event = stream.submit(lambda: copy(cuda, source, middle))
    assert device.engine_waits(engine, [event], timeout=0.0)
    cuda.runtime.memcpyAsync(end.ctypes.data, middle.ctypes.data, 64, 4, engine.ptr)
    after = device.engine_event(engine.ptr)
    back = np.zeros(64, np.uint8)
    assert stream.submit(lambda: copy(cuda, end, back), after=(after,)).wait(60.0)
    assert (back == 5).all()


@pytest.mark.parametrize("engine_stream", ["main", 1.5, True, object()])
def test_something_that_is_no_stream_is_refused(cuda: Any, engine_stream: object) -> None:
    with pytest.raises(ConfigError, match="cudaStream_t"):
        CudaDevice(cuda, 0).engine_waits(engine_stream, [], None)


@pytest.mark.parametrize(("handle", "wanted"), [
    (0, "default of cuda:1"), (1, "default of cuda:1"), (2, "2 on cuda:1"), (77, "77 on cuda:1")])
def test_torch_works_on_the_engines_stream_also_where_that_is_the_default_one(
        cuda: Any, monkeypatch: pytest.MonkeyPatch, handle: int, wanted: str) -> None:
    """``ExternalStream`` of a null handle is no error and no default stream: torch then takes one out of its pool."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"{handle} on {device}")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    with CudaDevice(cuda, 1).on_engine(handle) as stream:
        assert stream == wanted


def test_the_first_call_of_a_new_thread_may_be_one_of_the_driver(cuda: Any, stream: CudaStream) -> None:
    """The runtime makes a context for a thread that has none; the driver, and so the batched copy, does not."""
    batch = sys.modules["cuda_stand_in"].StandInBatch(cuda.runtime)
    source, destination = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    entry = [np.array([number], np.uint64) for number in (destination.ctypes.data, source.ctypes.data, 64)]
    events: list[Any] = []
    thread = threading.Thread(target=lambda: events.append(stream.submit(lambda: batch.copy(*entry, current_handle()))))
    thread.start()
    thread.join()
    assert events[0].wait(5.0)
    assert events[0].error is None
    assert (destination == 7).all()


def test_asking_after_an_event_leaves_a_graph_that_another_thread_captures_alone(
        cuda: Any, stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> None:
    event = stream.submit(lambda: None)
    modes = [0]  # this thread's, and what it was before
    asked: list[int] = []

    def exchange(mode: Any) -> int:
        modes[0], mode._obj.value = mode._obj.value, modes[0]
        return 0

    monkeypatch.setattr(capture_mode, "exchange_of_driver", lambda: exchange)
    for name in ("eventQuery", "eventSynchronize"):
        call = getattr(cuda.runtime, name)
        monkeypatch.setattr(cuda.runtime, name, lambda event, call=call: asked.append(modes[0]) or call(event))
    assert event.wait(5.0)
    assert event.wait()
    assert set(asked) == {capture_mode.RELAXED}
    assert modes == [0], "the thread's own mode has come back"
    monkeypatch.setattr(capture_mode, "exchange_of_driver", lambda: lambda mode: 201)  # there is no context: nothing was exchanged
    assert event.wait()
    assert asked[-1] == 0


def test_the_copy_kernel_is_launched_beside_what_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks after its own events when it pins the numbers of rows, or pins more memory."""
    modes, seen = [0], {}

    def exchange(mode: Any) -> int:
        modes[0], mode._obj.value = mode._obj.value, modes[0]
        return 0

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen["pinned"] = modes[0]
        return tensor

    monkeypatch.setattr(capture_mode, "exchange_of_driver", lambda: exchange)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(row_kernel, "move_rows", lambda *_: seen.update(launched=modes[0]))
    row_kernel.RowKernel("cpu").copy(RowPlaces(0, 8, 8), RowPlaces(0, 8, 8), [(0, 1)], 1, 8, 5)
    assert seen == {"pinned": capture_mode.RELAXED, "launched": capture_mode.RELAXED}
    assert modes == [0]


# -- copies --------------------------------------------------------------------------------------------------------------

SHAPES = [(3, 8, "float32", 4), (2, 64, "bfloat16", 8)]  # 1,536 bytes: gaps in the arena; 8,192: none


@pytest.fixture(params=SHAPES, ids=["strided", "dense"])
def pools(request: pytest.FixtureRequest) -> tuple[GroupPools, HostArena]:
    heads, head_dim, dtype, tokens = request.param
    group = KVLayout.uniform(2, heads, head_dim, dtype, tokens).groups[0]
    made = GroupPools(group, PrimaryPool(group, 8, "cpu"), HostArena(8, group.block_bytes, pin=False))
    staging = HostArena(8, group.block_bytes, pin=False)
    generator = np.random.default_rng(5)
    for rows in (made.primary.rows.numpy(), made.secondary.rows if made.secondary else staging.rows, staging.rows):
        rows[:] = generator.integers(0, 256, rows.shape, dtype=np.uint8)
    return made, staging


@pytest.mark.parametrize("num_tokens", [0, 3, 8])
@pytest.mark.parametrize("route", [(PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (PRIMARY, NVME), (PRIMARY, PRIMARY)])
def test_cuda_copies_move_the_same_bytes_as_host_copies(
        cuda: Any, stream: CudaStream, pools: tuple[GroupPools, HostArena], route: tuple[int, int], num_tokens: int) -> None:
    pairs = [(1, 4), (2, 5), (3, 6), (0, 7)]
    group_pools, staging = pools
    assert group_pools.secondary is not None
    target = group_pools.primary.rows.numpy() if route[0] == PRIMARY else group_pools.secondary.rows
    before = target.copy()
    open_copiers(group_pools, staging, "cpu")[route].copy(pairs, num_tokens)
    expected = target.copy()
    target[:] = before
    copier = open_copiers(group_pools, staging, "cuda:0")[route]
    assert isinstance(copier, CudaCopier)
    event = stream.submit(lambda: copier.copy(pairs, num_tokens))
    assert event.wait(60.0)
    assert event.error is None
    np.testing.assert_array_equal(target, expected)
    if num_tokens in (0, 8):
        assert len(cuda.runtime.calls) == 2, "a run of neighbours is one copy"


def test_no_cuda_copy_crosses_the_border_of_two_registrations(cuda: Any, stream: CudaStream) -> None:
    memory = np.zeros((8, 512), np.uint8)
    pairs = [(slot, slot) for slot in range(8)]
    whole = CudaMemory(memory.ctypes.data, 512, 512, 8, 0, on_host=True)
    pieces = CudaMemory(memory.ctypes.data, 512, 512, 8, 3, on_host=True)
    for source, destination in ((whole, pieces), (pieces, whole)):
        cuda.runtime.calls.clear()
        copier = CudaRowCopier(CopyTools(cuda.runtime), source, destination, 512, 1)
        stream.submit(lambda copier=copier: copier.copy(pairs, current_handle()))  # type: ignore[misc]
        assert len(cuda.runtime.calls) == 3


def test_a_slot_outside_the_pool_is_the_events_error(
        cuda: Any, stream: CudaStream, pools: tuple[GroupPools, HostArena]) -> None:
    copier = open_copiers(pools[0], pools[1], "cuda:0")[SECONDARY, PRIMARY]
    event = stream.submit(lambda: copier.copy([(0, 1), (8, 0)]))
    assert isinstance(event.error, IndexError)
    assert cuda.runtime.calls == []


# -- what a machine may lack ---------------------------------------------------------------------------------------------


def test_without_cupy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ConfigError, match=r"install kvtier\[cuda\]"):
        open_device("cuda")


def test_without_a_gpu_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_stand_in().StandInCuda(devices=0)
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made)
    with pytest.raises(ConfigError, match="no CUDA device can be used here"):
        open_device("cuda:0")


def test_a_device_number_beyond_the_last_is_refused(cuda: Any) -> None:
    with pytest.raises(ConfigError, match="this machine has 1 CUDA devices"):
        open_device("cuda:1")


def test_importing_the_twin_imports_no_cupy() -> None:
    code = "import sys, kvtier.io.device, kvtier.io.cuda_stream; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

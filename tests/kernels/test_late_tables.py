"""A device reads a block table later than the host has written it: no step may see the table of the next one.

The device here is a stand-in: a stream that does nothing until it is looked at. It shows nothing about a GPU, but holds to the rules of
one that matter: what is submitted reads its source late, in order, and an event is reached when all before it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.errors import RequestError, TransferError
from kvtier.kernels import OffsetTable, offsets
from kvtier.kernels.block_offsets import fill_offsets_host
from kvtier.kernels.staging_ring import StagingRing


class LateDevice:
    """One stream. Each look at an event lets it do one more piece of work, unless it hangs."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], object]] = deque()
        self.hangs = False

    def step(self) -> None:
        if self.work and not self.hangs:
            self.work.popleft()()

    def synchronize(self) -> None:
        while self.work:
            self.step()


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._open = 0

    def record(self) -> None:
        self._open += 1
        self._device.work.append(self._reached)

    def _reached(self) -> None:
        self._open -= 1

    def query(self) -> bool:
        if self._open:
            self._device.step()
        return not self._open


class LateMemory:
    """Device memory: a view of it may be copied to, late, and handed to a kernel."""

    def __init__(self, device: LateDevice, memory: torch.Tensor) -> None:
        self._device = device
        self.memory = memory

    def __getitem__(self, part: slice) -> LateMemory:
        return LateMemory(self._device, self.memory[part])

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self._device.work.append(lambda: self.memory.copy_(source))


class LateTable:
    """An :class:`OffsetTable` on that device, and the steps that read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, buffers: int = offsets.STAGING_BUFFERS, timeout: float = 5.0) -> None:
        self.device = LateDevice()
        self.table = OffsetTable(max_rows=3, max_blocks=4, num_layers=1, kv_factor=1, num_blocks=64)
        size = 4 + 3 * 4
        self.table._staged = LateMemory(self.device, torch.full((size,), -7, dtype=torch.int32))  # type: ignore[assignment]
        self.table._ring = StagingRing([torch.full((size,), -9, dtype=torch.int32) for _ in range(buffers)],
                                       lambda: LateEvent(self.device), timeout)
        self.seen: list[list[list[int]]] = []

        class Paths:
            @staticmethod
            def fill_offsets(tables: torch.Tensor, indptr: LateMemory, slots: LateMemory, *rest: object) -> None:
                self.device.work.append(lambda: fill_offsets_host(tables, indptr.memory, slots.memory, *rest))  # type: ignore[arg-type]

        monkeypatch.setattr(offsets, "kernel_paths", lambda device_type: Paths)

    def step(self, rows: list[list[int]]) -> None:
        """Plan a step, and launch a kernel that reads all of the table."""
        self.table.fill(rows)
        self.device.work.append(lambda: self.seen.append(self.table.tensor[:, 0].tolist()))


STEPS = [[[5, 6, 7]], [[8, 9], [10]], [[11]], [[12, 13], [14], [15, 16, 17, 18]], [], [[1]], [[2], [3, 4]]]


def padded(rows: list[list[int]]) -> list[list[int]]:
    return [row + [-1] * (4 - len(row)) for row in rows] + [[-1] * 4] * (3 - len(rows))


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_the_table_of_a_step_is_not_overwritten_by_those_of_steps_planned_meanwhile(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """Bugs 15546, 15349: with an overlap scheduler the staging buffer was filled again before its copy had been made."""
    late = LateTable(monkeypatch, buffers)
    for rows in STEPS:
        late.step(rows)
    late.device.synchronize()
    assert late.seen == [padded(rows) for rows in STEPS], "and the rows of sequences that have ended are null"


def test_the_host_goes_on_while_a_buffer_is_free_and_then_waits_for_the_oldest_copy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateTable(monkeypatch)
    for rows in STEPS[:3]:
        late.step(rows)
    assert len(late.device.work) == 3 * 4   # copy, kernel, event, reader: nothing has been done
    late.step(STEPS[3])
    assert len(late.device.work) == 4 * 4 - 3   # the first copy, its kernel, its event
    assert late.seen == []


def test_a_table_is_not_copied_before_the_kernels_that_read_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 15546, 15349: the other half of the order, on the device."""
    late = LateTable(monkeypatch)
    late.step([[5]])
    late.table.fill([[6]])
    late.device.synchronize()
    assert late.seen == [padded([[5]])]
    assert late.table.tensor[0, 0].tolist() == [6, -1, -1, -1]


def test_a_stream_that_stands_still_is_an_error_after_a_while_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateTable(monkeypatch, buffers=1, timeout=0.01)
    late.step([[5]])
    late.device.hangs = True
    with pytest.raises(TransferError, match=r"not read within 0\.01 s"):
        late.table.fill([[6]])
    late.device.hangs = False
    late.step([[7]])
    late.device.synchronize()
    assert late.seen == [padded([[5]]), padded([[7]])]


def test_an_error_while_a_buffer_is_written_leaves_the_ring_usable() -> None:
    device = LateDevice()
    ring = StagingRing([1, 2], lambda: LateEvent(device))
    with pytest.raises(ZeroDivisionError), ring.buffer():
        raise ZeroDivisionError
    for wanted in (2, 1, 2):
        with ring.buffer() as buffer:
            assert buffer == wanted


def test_a_buffers_event_is_recorded_on_the_tables_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current device's stream, when that is another one, it would be done at once, and the buffer written again too early."""
    late, entered = LateTable(monkeypatch), []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            entered.append(self.number)

        def __exit__(self, *error: object) -> None:
            assert len(late.device.work) == 3, "copy, kernel and event"
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Device)
    late.table.fill([[5]])
    assert entered == [late.table.tensor.get_device(), None]


def test_a_very_negative_slot_is_null_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged in 32 bits it would be slot 5, somebody else's block."""
    late = LateTable(monkeypatch)
    late.step([[7, 5 - 2**32]])
    late.device.synchronize()
    assert late.seen == [padded([[7, -1]])]


@pytest.mark.parametrize("row", [np.array([1.5]), [float("nan")], [2**70], [1.5], [2.0, None], (1, 2.5), ["3"]])
def test_what_is_no_slot_is_refused(row: list[int]) -> None:
    table = OffsetTable(max_rows=1, max_blocks=2, num_layers=1, kv_factor=1, num_blocks=4)
    table.fill([[3]])
    with pytest.raises(RequestError, match="pass whole numbers"):
        table.fill([row])
    assert table.tensor.tolist() == [[[3, -1]] * 2]

"""A device reads a block table later than the host has written it: no step may see the table of the next one.

The device here is a stand-in: a stream that does nothing until it is looked at. It shows nothing about a GPU, but holds to the rules of
one that matter: a copy that the host does not wait for reads its source late, one that it waits for comes behind all work before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from kvtier.kernels.offsets import OffsetTable


class LateDevice:
    """Device memory behind one stream."""

    def __init__(self, like: torch.Tensor) -> None:
        self.memory = like.clone()
        self.work: deque[Callable[[], object]] = deque()
        self.seen: list[list[list[int]]] = []  # the key rows that each launched kernel has read

    def launch(self, num_rows: int) -> None:
        """A kernel of a step that reads the first rows of the table."""
        self.work.append(lambda: self.seen.append(self.memory[:num_rows, 0].tolist()))

    def synchronize(self) -> None:
        while self.work:
            self.work.popleft()()

    def __getitem__(self, rows: slice) -> LateView:
        return LateView(self, rows)


class LateView:
    """Some rows of the device's memory."""

    def __init__(self, device: LateDevice, rows: slice) -> None:
        self._device = device
        self._rows = rows

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> LateView:
        self._device.work.append(lambda: self._device.memory[self._rows].copy_(source))
        if not non_blocking:
            self._device.synchronize()
        return self


def late_table() -> tuple[OffsetTable, LateDevice]:
    """A table whose device part is late. Its host part is staging memory of its own, as on a GPU."""
    table = OffsetTable(max_rows=3, max_blocks=4, num_layers=1, kv_factor=1, num_blocks=64)
    device = LateDevice(table.tensor)
    table._tensor = device  # type: ignore[assignment]
    return table, device


def test_the_table_of_a_step_is_not_overwritten_by_that_of_the_next_step_planned_meanwhile() -> None:
    """Bugs 15546, 15349: with an overlap scheduler the staging buffer was filled again before its copy had been made."""
    table, device = late_table()
    steps = [[[5, 6, 7]], [[8, 9], [10]], [[11]], [[12, 13], [14], [15, 16, 17, 18]]]
    for rows in steps:
        table.fill(rows)
        device.launch(len(rows))
    device.synchronize()
    assert device.seen == [[row + [-1] * (4 - len(row)) for row in rows] for rows in steps]


def test_a_table_is_not_copied_before_the_kernels_that_read_the_one_before_it() -> None:
    """Bugs 15546, 15349: the other half of the order, on the device."""
    table, device = late_table()
    table.fill([[5]])
    device.launch(1)
    table.fill([[6]])
    assert device.seen == [[[5, -1, -1, -1]]], "the copy is behind the kernel, and over when fill returns"
    assert device.memory[0, 0].tolist() == [6, -1, -1, -1]

"""The kernel's launches: what of them can be seen without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvtier.io import capture_mode, row_kernel
from kvtier.io.row_kernel import RowKernel
from kvtier.kernels.row_moves import RowPlaces, move_rows


def test_a_launch_leaves_a_graph_that_another_thread_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is found by asking after events, and may have to be taken: in CUDA's default mode either ends the capture."""
    modes = [0]  # this thread's
    seen: list[tuple[str, int]] = []

    def exchange(mode: Any) -> int:
        modes[0], mode._obj.value = mode._obj.value, modes[0]
        return 0

    def move(*arguments: Any) -> None:
        seen.append(("launch", modes[0]))
        move_rows(*arguments)

    monkeypatch.setattr(capture_mode, "exchange_of_driver", lambda: exchange)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda numbers: seen.append(("memory", modes[0])) or numbers)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(row_kernel, "move_rows", move)
    kernel = RowKernel.__new__(RowKernel)
    kernel._device = torch.device("cpu")
    monkeypatch.setattr(kernel, "_stream", lambda handle: handle)
    source, destination = torch.arange(8, dtype=torch.uint8).view(4, 1, 2), torch.zeros(4, 1, 2, dtype=torch.uint8)
    kernel.copy(RowPlaces.of(destination), RowPlaces.of(source), [(1, 3)], 1, 2, 7)
    assert destination[3].tolist() == [[2, 3]]
    assert seen == [("memory", capture_mode.RELAXED), ("launch", capture_mode.RELAXED)]
    assert modes == [0], "the thread's own mode has come back"

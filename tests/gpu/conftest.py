"""Tests that need a CUDA device. Everywhere else they are collected and skipped, each with the reason.

They ask for no pytest plugin. What a test needs beside torch and CuPy it asks for with ``importorskip``, because a machine
with a GPU often has the packages that it came with and no others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from gpu_rig import GpuRig

sys.path.append(str(Path(__file__).parent))  # so that test modules can import gpu_rig: importlib mode puts no folder there


@pytest.fixture(autouse=True, scope="session")
def _needs_a_device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    # CUDA loads a kernel when it is first used, and may wait for the whole device then. The tests of order rely on calls that
    # return while the device is busy.
    torch.cuda._sleep(1)
    torch.zeros(64, dtype=torch.uint8, device="cuda").fill_(1).clone()
    torch.cuda.synchronize()


@pytest.fixture
def engine() -> torch.cuda.Stream:
    """The engine's stream. Not the default one, with which an ordinary stream would synchronise by itself."""
    import torch

    return torch.cuda.Stream()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., GpuRig]]:
    """Makes a ``GpuRig`` and closes it at the end, when nothing may be running on its memory any more."""
    from gpu_rig import GpuRig

    made: list[GpuRig] = []

    def make(*arguments: Any, **options: Any) -> GpuRig:
        made.append(GpuRig(*arguments, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()

"""How every benchmark on a GPU begins: one report that names device and libraries, and the wait that belongs into each timed part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from kvtier.bench.build import compiled
from kvtier.bench.measure import LEAST_ROUNDS
from kvtier.bench.report import Report
from kvtier.errors import ConfigError

DEVICE_COPY: Final = "device copy, bytes read and written"
"""The limit of kernels that do little but read and write: a copy within the device that moves as many bytes in all."""

WARM_UP: Final = 2
"""Rounds that are forgotten: kernels are compiled, clocks go up."""


def open_gpu_report(what: str, device: str, rounds: int, config: Mapping[str, object]) -> Report:
    """A report of a benchmark on a GPU.

    Args:
        what: "copy", or "kernels, write path"; its first word is the command.
        device: "cuda" or "cuda:N". With "cpu" everything runs and says nothing about a GPU: that is for tests.
        rounds: recorded for each row.
        config: the benchmark's own settings.

    Raises:
        ConfigError: too few rounds for a median and a range, or no such device.
    """
    if rounds < LEAST_ROUNDS:
        raise ConfigError(f"{rounds} rounds: a benchmark on a GPU needs at least {LEAST_ROUNDS}")
    command, *rest = what.split(", ")
    return Report(f"kvtier bench {command} ({', '.join(['GPU', *rest])})", {
        "command": command, "device": device, "compiled": compiled(), "gpu": None if device == "cpu" else device_name(device),
        "rounds": rounds, "torch": torch.__version__, "cuda": torch.version.cuda, **config})


def device_name(device: str) -> str:
    """What the driver calls it. ConfigError where there is no such device, or a torch that cannot use it."""
    if not device.startswith("cuda"):
        raise ConfigError(f'device={device!r}: unknown; use "cpu", "cuda" or "cuda:N"')
    try:
        return torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError, ValueError) as error:  # no driver, a torch without CUDA, no such number or name
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ConfigError(f"device={device!r}: {reason}; use one that nvidia-smi lists, or cpu") from error


def until_done(device: str, work: Callable[[], object]) -> Callable[[], None]:
    """``work``, and the wait on the host until the device is done with it: both are timed."""
    def turn() -> None:
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
    return turn

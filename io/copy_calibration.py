"""Calibration: times the ways to copy on a device for a few unit sizes, and lets ``copy_paths.decide`` choose (design: copy engine).

``python -m kvtier.io.copy_calibration cuda:N`` prints the choice as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Final

import numpy as np
import torch

from kvtier.errors import KVTierError, TransferError
from kvtier.io.copy_paths import UNIT_SIZES, CopyPath, CopyPaths, Direction, decide
from kvtier.io.copy_tools import CopyTools, copy_tools
from kvtier.io.cuda_memory import CudaMemory
from kvtier.io.cuda_row_copier import CudaRowCopier
from kvtier.io.cuda_stream import CudaModule, CudaStream, load_cuda
from kvtier.pools.host_arena import HostArena

AREA_BYTES: Final = 16 << 20
"""Memory at each end of a trial. Half of it is gaps between the units, and they change their order, so that nothing can be joined."""

MOST_UNITS: Final = 256
ROUNDS: Final = 3
PATIENCE: Final = 10.0  # seconds for one trial, which takes milliseconds


class CopyTrial:
    """Copies scattered units by any path, and compares every byte.

    Args:
        cuda, tools: of the device.
        number: the device's.
        memory: makes uint8 memory of the device; for tests, the host's.
        pin: whether the host's memory is to be registered.
    """

    def __init__(self, cuda: CudaModule, tools: CopyTools, number: int, memory: Callable[[int], torch.Tensor], pin: bool = True) -> None:
        self._tools = tools
        with ExitStack() as undo:
            self._host = HostArena(1, AREA_BYTES, pin)
            undo.callback(self._host.close)
            self._device = memory(2 * AREA_BYTES).random_(0, 256)
            self._host.rows[0] = np.random.default_rng(0).integers(0, 256, AREA_BYTES, np.uint8)
            if self._device.is_cuda:
                torch.cuda.synchronize(self._device.device)
            self._stream = CudaStream(cuda, number, "calibration")
            undo.pop_all()

    def seconds(self, direction: Direction, unit_bytes: int, path: CopyPath) -> float:
        """How long copying some scattered units takes, until it is done.

        Raises:
            TransferError: it failed, did not end, or brought wrong bytes.
        """
        count = min(MOST_UNITS, AREA_BYTES // (2 * unit_bytes))
        source, destination = self._ends(direction)
        pairs = [(slot, count - 1 - slot) for slot in range(count)]
        copier = CudaRowCopier(self._tools, CudaMemory(source.data_ptr(), 2 * unit_bytes, unit_bytes, count, 0, direction is Direction.UP),
                               CudaMemory(destination.data_ptr(), 2 * unit_bytes, unit_bytes, count, 0, direction is Direction.DOWN),
                               unit_bytes, 1)
        started = time.perf_counter()
        event = self._stream.submit(lambda: copier.copy_by(path, pairs, self._stream.handle))
        deadline = time.perf_counter() + PATIENCE  # a kernel has been compiled until here
        while not event.is_done():  # to wait is to sleep, for longer than many a trial takes
            if time.perf_counter() > deadline:
                raise TransferError(f"{path.value}: not over after {PATIENCE:.0f} s")
        taken = time.perf_counter() - started
        if event.error is not None:
            raise TransferError(f"{path.value}: {event.error}") from event.error
        units = [area[:2 * count * unit_bytes].cpu().view(count, 2, unit_bytes)[:, 0] for area in (source, destination)]
        if not torch.equal(units[0][[pair[0] for pair in pairs]], units[1][[pair[1] for pair in pairs]]):
            raise TransferError(f"{path.value}: wrong bytes")
        destination.bitwise_not_()  # nobody gets away with the bytes of the trial before
        if destination.is_cuda:
            torch.cuda.synchronize(destination.device)
        return taken

    def close(self) -> None:
        """Give the memory back, unless something may still be using it."""
        if self._stream.close(PATIENCE):
            self._host.close()

    def _ends(self, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.from_numpy(self._host.rows[0])
        if direction is Direction.WITHIN:
            return self._device[:AREA_BYTES], self._device[AREA_BYTES:]
        return (host, self._device[:AREA_BYTES]) if direction is Direction.UP else (self._device[:AREA_BYTES], host)

Taken = dict[Direction, dict[int, dict[CopyPath, float]]]


def measure(seconds: Callable[[Direction, int, CopyPath], float], paths: Sequence[CopyPath],
            sizes: Sequence[int]) -> tuple[Taken, dict[CopyPath, str]]:
    """Median times of all paths; and of those that fail, which are not tried again, why.

    Args:
        seconds: makes one trial; TransferError when it fails.
    """
    timings: Taken = {}
    failures: dict[CopyPath, str] = {}
    for direction in Direction:
        for size in sizes:
            taken: dict[CopyPath, list[float]] = {path: [] for path in paths if path not in failures}
            for number in range(1 + ROUNDS):  # in turn, so that a disturbance meets all; the first is for warming up
                for path in list(taken):
                    try:
                        found = seconds(direction, size, path)
                    except TransferError as error:
                        failures[path] = str(error)
                        del taken[path]
                        continue
                    if number:
                        taken[path].append(found)
            timings.setdefault(direction, {})[size] = {path: median(values) for path, values in taken.items()}
    for by_size in timings.values():
        for by_path in by_size.values():
            for path in failures:
                by_path.pop(path, None)
    return timings, failures


def calibrate(cuda: CudaModule, device: str, tools: CopyTools) -> CopyPaths:
    """Measure a device. What fails, or copies wrong bytes, is not used: ``tools.missing`` says so."""
    trial = CopyTrial(cuda, tools, int(device.partition(":")[2] or 0),
                      lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device))
    try:
        timings, failures = measure(trial.seconds, tools.available(), UNIT_SIZES)
    finally:
        trial.close()
    for path, error in failures.items():
        tools.give_up(path, TransferError(error))
    return decide(timings)


def main(arguments: Sequence[str]) -> int:
    """Print what was chosen as JSON on the last line. Exit code 0 whether it was measured or not, 2 when used wrongly."""
    if len(arguments) != 1:
        print("usage: python -m kvtier.io.copy_calibration cuda:N", file=sys.stderr)
        return 2
    try:
        tools = copy_tools(load_cuda(), arguments[0])
        chosen, reason = tools.paths.describe(), tools.paths.reason
        missing = {path.value: why for path, why in tools.missing.items()}
    except (KVTierError, RuntimeError) as error:
        chosen, reason, missing = {}, str(error), {}
    print(json.dumps({"paths": chosen, "reason": reason, "missing": missing}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

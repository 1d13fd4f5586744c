"""``CopyTools``: what a CUDA device can copy with, and which of it for what (design: copy engine). Found out once per process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import TransferError
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction
from kvtier.io.cuda_batch import BatchCopy, load_driver
from kvtier.io.cuda_stream import CudaModule, CudaRuntime
from kvtier.io.row_kernel import RowKernel, RowMover

_log = logging.getLogger(__name__)


@dataclass
class CopyTools:
    """The calls of one device, and the choice among them.

    Attributes:
        runtime: ``cupy.cuda.runtime``.
        batch, kernel: None where the device, the driver or the packages do not have them; ``missing`` says why.
        paths: what was measured to be fastest.
        missing: why a path cannot be taken.
    """

    runtime: CudaRuntime
    batch: BatchCopy | None = None
    kernel: RowMover | None = None
    paths: CopyPaths = field(default_factory=CopyPaths)
    missing: dict[CopyPath, str] = field(default_factory=dict)

    @classmethod
    def of(cls, cuda: CudaModule, device: str) -> CopyTools:
        """Everything that is there, not measured yet."""
        tools = cls(cuda.runtime)
        try:
            tools.batch = BatchCopy(load_driver())
        except (OSError, TransferError) as error:
            tools.missing[CopyPath.BATCH] = str(error)
        try:
            tools.kernel = RowKernel(device)
        except TransferError as error:
            tools.missing[CopyPath.KERNEL] = str(error)
        return tools

    def available(self) -> list[CopyPath]:
        """Paths that can be taken."""
        have = {CopyPath.RUNS: True, CopyPath.BATCH: self.batch is not None, CopyPath.KERNEL: self.kernel is not None}
        return [path for path, is_there in have.items() if is_there]

    def path(self, direction: Direction | None, unit_bytes: int) -> CopyPath:
        """How to copy units of this size."""
        path = self.paths.path(direction, unit_bytes)
        return CopyPath.RUNS if path in self.missing else path

    def give_up(self, path: CopyPath, error: Exception) -> None:
        """A path has failed: from now on it is not taken any more. Said once."""
        if path not in self.missing:
            self.missing[path] = str(error)
            _log.warning("copies by %s fail, from now on each unit gets a call of its own: %s", path.value, error)


_lock = threading.Lock()
_found: dict[str, tuple[CudaModule, CopyTools]] = {}


def copy_tools(cuda: CudaModule, device: str, calibrate: Callable[[CudaModule, str, CopyTools], CopyPaths] | None = None) -> CopyTools:
    """The tools of a device, measured when this process asks for the first time, which takes a moment.

    Args:
        cuda: ``cupy.cuda``.
        device: "cuda:N".
        calibrate: measures; ``copy_calibration.calibrate`` when left out.
    """
    with _lock:
        known = _found.get(device)
        if known is not None and known[0] is cuda:
            return known[1]
        tools = CopyTools.of(cuda, device)
        if len(tools.available()) == 1:
            tools.paths = CopyPaths(reason="; ".join(tools.missing.values()))
        else:
            try:
                tools.paths = (calibrate or _calibrate)(cuda, device, tools)
            except Exception as error:  # a measurement that cannot be made must not keep a cache from starting
                tools.paths = CopyPaths(reason=f"could not be measured: {error}")
        chosen = "; ".join([f"{direction}: {path}" for direction, path in tools.paths.describe().items()])
        _log.info("%s: copies of many units: %s", device, chosen or f"{CopyPath.RUNS.value} ({tools.paths.reason})")
        _found[device] = (cuda, tools)
        return tools


def _calibrate(cuda: CudaModule, device: str, tools: CopyTools) -> CopyPaths:
    from kvtier.io.copy_calibration import calibrate  # it measures what is built on this file
    return calibrate(cuda, device, tools)

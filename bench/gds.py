"""``kvtier bench gds``: blocks between GPU and NVMe through the store, beside KvikIO's own plain reads and writes of the same size.

Run for each combination of KvikIO's threads and task size, because which one is best depends on the drive: the last line names it
as settings. Ours does what KvikIO alone does not: header, checksum on the device, manifest. Every block that is read is verified.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.bench.build import compiled
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.nvme import working_folder
from kvtier.bench.report import Report, size_name, throughput_row
from kvtier.errors import ConfigError
from kvtier.io import gds_probe
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.gds import GdsPath, open_gds
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.host_memory import free_disk_bytes
from kvtier.pools.nvme_geometry import HEADER_BYTES, NvmeGeometry
from kvtier.tiering.config_sources import expand_path

OURS: Final = "kvtier"
KVIKIO: Final = "KvikIO alone"

OpenPath = Callable[[Sequence[Path], Sequence[NvmeGeometry], int, int, int], GdsPath]
"""Paths, geometries, rows, KvikIO's threads, task size."""


@dataclass(frozen=True)
class GdsPlan:
    """How much is measured: ``num_blocks`` blocks per turn, ``at_once`` of them at the same time."""

    block_bytes: int = 2 << 20
    num_blocks: int = 128
    at_once: int = 4
    rounds: int = 7
    threads: tuple[int, ...] = (1, 4, 8, 16)
    task_sizes: tuple[int, ...] = (512 << 10, 1 << 20, 4 << 20)


QUICK: Final = GdsPlan(num_blocks=32, rounds=5, threads=(1, 8), task_sizes=(1 << 20,))


def measure_gds(directory: Path | None = None, quick: bool = False, device: str = "cuda:0", *, plan: GdsPlan | None = None,
                open_path: OpenPath | None = None) -> Report:
    """Measure every combination of settings.

    Args:
        directory: a folder on the drive; the current folder when None. What is written there is removed again.
        quick: less of everything.
        device: "cuda:N".
        plan: sizes; the usual ones when None.
        open_path: opens slabs in another way than GPUDirect, for tests.

    Returns:
        A report that has not been printed. Its config says which rows did not hold, under "invalid".

    Raises:
        ConfigError: there is no GPUDirect here (says why), or too little room.
    """
    plan = plan if plan is not None else QUICK if quick else GdsPlan()
    parent = expand_path(directory, "directory") if directory is not None else Path.cwd()
    geometry = NvmeGeometry(plan.block_bytes, plan.num_blocks)
    with working_folder(parent) as folder:
        if free_disk_bytes(parent) < 2 * geometry.file_bytes:
            raise ConfigError(f"{parent}: the benchmark writes {geometry.file_bytes} bytes and leaves as much free; choose another folder")
        if open_path is None:
            reason = gds_probe.obstacle(device, folder) or _missing_package() or gds_probe.try_directory(folder, device)
            if reason is not None:
                raise ConfigError(f"there is no GPUDirect Storage between {device} and {parent}: {reason}")
            number = int(device.partition(":")[2] or 0)

            def open_path(paths: Sequence[Path], geometries: Sequence[NvmeGeometry], rows: int, threads: int, task: int) -> GdsPath:
                return open_gds(paths, geometries, number, rows, threads, task)

        report = Report("kvtier bench gds", {
            "command": "gds", "quick": quick, "device": device, "compiled": compiled(), "block_bytes": plan.block_bytes,
            "num_blocks": plan.num_blocks, "at_once": plan.at_once, "rounds": plan.rounds}, parent)
        best = (0.0, "")
        for threads in plan.threads:
            for task in plan.task_sizes:
                with _stage(plan, geometry, folder / f"{threads}-{task}", threads, task, open_path) as stage:
                    rate = _measure(report, stage, f"{threads}x{size_name(task)}")
                best = max(best, (rate, f'gds_threads={threads}, gds_task_size="{size_name(task)}"'))
        report.note(f"gds: {plan.num_blocks} blocks, {plan.at_once} at the same time. "
                    + (f"Fastest reads here: {best[1]}." if best[0] else "No reads held."))
    return report


def _missing_package() -> str | None:
    """What the probe would only say in Python's words."""
    return None if importlib.util.find_spec("cupy") is not None else "CuPy is not installed; pip install 'kvtier[cuda]'"


class _Stage:
    """A store with the direct way, filled with blocks that differ."""

    def __init__(self, plan: GdsPlan, store: NvmeStore, path: GdsPath, threads: ThreadPoolExecutor) -> None:
        self.plan = plan
        self.store = store
        self.rows = path.groups[0].rows
        self._threads = threads
        self._geometry = store.slabs()[0][1]
        self.keys = [hashlib.sha256(str(slot).encode()).digest() for slot in range(plan.num_blocks)]
        generator = np.random.default_rng(1)
        self.blocks = [generator.integers(0, 256, self._geometry.payload_bytes, dtype=np.uint8) for _ in range(plan.at_once)]
        for row, block in zip(self.rows, self.blocks, strict=True):
            row.from_host(block)

    def write(self) -> None:
        """Through the store, as many at once as there are rows."""
        for start in range(0, self.plan.num_blocks, self.plan.at_once):
            errors = self.store.write_blocks([BlockWrite(0, slot, self.keys[slot], self.rows[slot - start], 35, 0.0)
                                              for slot in range(start, min(start + self.plan.at_once, self.plan.num_blocks))])
            for error in filter(None, errors):
                raise error

    def read(self) -> None:
        """Through the store, one thread for each row."""
        list(self._threads.map(self._read_some, range(self.plan.at_once)))

    def _read_some(self, number: int) -> None:
        for slot in range(number, self.plan.num_blocks, self.plan.at_once):
            self.store.read_block(0, slot, self.keys[slot], self.rows[number])

    def write_plainly(self) -> None:
        """The same payloads to the same places with KvikIO alone."""
        list(self._threads.map(lambda number: self._move_plainly(number, False), range(self.plan.at_once)))

    def read_plainly(self) -> None:
        list(self._threads.map(lambda number: self._move_plainly(number, True), range(self.plan.at_once)))

    def _move_plainly(self, number: int, is_read: bool) -> None:
        row = self.rows[number]
        start = row.start_read if is_read else row.start_write
        for slot in range(number, self.plan.num_blocks, self.plan.at_once):
            start(self._geometry.offset(slot) + HEADER_BYTES).wait()

    def wrong_rows(self) -> int:
        """Rows that hold something else than the blocks that were written out of them."""
        return sum(not np.array_equal(row.to_host(), block) for row, block in zip(self.rows, self.blocks, strict=True))

    def spoil(self) -> None:
        """Before a read: what is right afterwards has come from the drive."""
        nothing = aligned_buffer(self._geometry.payload_bytes)
        for row in self.rows:
            row.from_host(nothing)


@contextmanager
def _stage(plan: GdsPlan, geometry: NvmeGeometry, folder: Path, threads: int, task: int, open_path: OpenPath) -> Iterator[_Stage]:
    with ExitStack() as undo:
        undo.callback(_remove, folder)
        store = NvmeStore.open(folder, '{"model": "benchmark"}', [geometry], free_space_reserve=0)
        undo.callback(store.close, 10.0)
        path = open_path([path for path, _geometry in store.slabs()], [geometry], plan.at_once, threads, task)
        undo.callback(path.close)
        yield _Stage(plan, store, path, undo.enter_context(ThreadPoolExecutor(plan.at_once)))


def _measure(report: Report, stage: _Stage, settings: str) -> float:
    """Rows for both directions; the rate of our reads in bytes per second, 0.0 where they did not hold."""
    plan = stage.plan
    num_bytes = plan.num_blocks * plan.block_bytes
    label = size_name(plan.block_bytes)
    writes = interleave([Alternative(KVIKIO, stage.write_plainly), Alternative(OURS, stage.write)], plan.rounds)
    stage.write()
    reads = interleave([Alternative(KVIKIO, stage.read_plainly, stage.spoil), Alternative(OURS, stage.read, stage.spoil)], plan.rounds)
    wrong, detours = stage.wrong_rows(), stage.store.stats().gds_detours
    if wrong or detours:
        report.reject(f"gds/{label}/{settings}", f"{wrong} rows were wrong, {detours} blocks went through the host")
        return 0.0
    report.add(throughput_row(f"gds/write/{label}/{settings}", writes, OURS, KVIKIO, num_bytes))
    report.add(throughput_row(f"gds/read/{label}/{settings}", reads, OURS, KVIKIO, num_bytes))
    return reads.rate(OURS, num_bytes).median


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()

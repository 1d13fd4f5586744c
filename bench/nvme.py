"""``kvtier bench nvme``: the NVMe store beside fio, or plain direct I/O, of the same blocks at the same depth in the same directory.

Each round has fresh preallocated files on every side, so that no side writes over blocks that the other has not. Ours does
all that serving needs: header page, checksum, verification, manifest rows. After each round every byte that was read is
compared, outside the timed part. The limit is the faster of fio, where it is on the PATH, and a plain loop of our own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.bench import INSTALL_DEMO
from kvtier.bench.build import compiled
from kvtier.bench.fio import Fio, find_fio
from kvtier.bench.measure import LEAST_ROUNDS, Interleaved
from kvtier.bench.nvme_point import OURS, Buffers, CpuTimes, NvmePlan, Point
from kvtier.bench.removal import remove_folder
from kvtier.bench.report import (
    Limit,
    Report,
    ResultRow,
    noise_row,
    require_memory,
    size_name,
    throughput_row,
)
from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.io.direct_file import refuses_direct
from kvtier.io.faults import Faults
from kvtier.io.gds_probe import MEMORY_FILE_SYSTEMS
from kvtier.io.store_directory import expand
from kvtier.io.store_open import default_reserve
from kvtier.pools.host_memory import free_disk_bytes, mount_of
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.sizing import format_bytes
from kvtier.tiering.write_lane import MAX_WRITE_BATCH

__all__ = ["NvmePlan", "measure_nvme"]

FIRST_TOKEN: Final = "nvme/first-token"
WARM_START: Final = "nvme/warm_start"
AGAIN: Final = "the limit again"


def measure_nvme(directory: Path | None = None, quick: bool = False, *, plan: NvmePlan | Sequence[NvmePlan] | None = None,
                 faults: Faults | None = None, first_token: bool = True, warm_start: bool = True) -> Report:
    """Measure.

    Args:
        directory: a folder on the drive to measure; the current folder when None. What is written there is removed again.
        quick: smaller files, fewer sizes and rounds, about a minute.
        plan: sizes; the usual ones when None.
        faults: injected into the store, for tests.
        first_token: also measure the time to first token of a prefix that is on the drive.
        warm_start: also measure how long a manager takes to start over a directory with many blocks.

    Returns:
        A report that has not been printed. Its config says under "invalid" where a write or read failed or bytes differed.

    Raises:
        ConfigError: the directory cannot be used, or disk or memory have too little room.
    """
    plans = NvmePlan.usual(quick) if plan is None else [plan] if isinstance(plan, NvmePlan) else list(plan)
    for each in plans:
        each.check()
    parent = expand(directory) if directory is not None else Path.cwd()
    program = find_fio()
    with working_folder(parent) as folder:
        _require_space(max(plans, key=lambda each: each.file_bytes), parent, num_files=3 if program is None else 4)
        require_memory("kvtier bench nvme", 2 * max(each.file_bytes for each in plans),
                       "end other programs" if quick else "end other programs, or use --quick, which needs less")
        refusal = refuses_direct(folder)
        report = _open_report(plans, quick, parent, refusal)
        with report.interruptible():
            with _said_once() if refusal is not None else contextlib.nullcontext():
                for each in plans:
                    _measure(report, each, folder, refusal is None, program, faults)
            if warm_start:
                _add_warm_start(report, folder, quick)
            if first_token:
                _add_first_token(report, folder, quick)
    return report


def _open_report(plans: Sequence[NvmePlan], quick: bool, directory: Path, refusal: str | None) -> Report:
    plan = plans[0]
    report = Report("kvtier bench nvme", {
        "command": "nvme", "quick": quick, "compiled": compiled(), "block_bytes": plan.block_bytes, "num_blocks": plan.num_blocks,
        "rounds": plan.rounds, "depth": plan.depth, "read_threads": plan.read_threads, "write_batch": MAX_WRITE_BATCH, "sync": False,
        "sizes": [{"block_bytes": each.block_bytes, "num_blocks": each.num_blocks, "rounds": each.rounds} for each in plans],
        "direct_io": refusal is None, "direct_io_refusal": refusal}, directory)
    if refusal is not None:
        report.note(f"The mount refuses direct I/O ({refusal}): these are page-cache figures, they say nothing about the drive.")
    kind, mount = mount_of(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        report.note(f"{mount} is {kind}, which is memory: these figures say nothing about a drive.")
    report.baselines = ("recomputing",)
    report.note("cpu: CPU time of all threads, kernel included, beside the plain loop's. noise: fio, or the plain loop where there is no "
                "fio, against itself.")
    return report


def _measure(report: Report, plan: NvmePlan, folder: Path, direct: bool, program: str | None, faults: Faults | None) -> None:
    size = size_name(plan.block_bytes)
    names = f"nvme/write/{size}", f"nvme/read/{size}"
    how = "O_DIRECT" if direct else "page-cache"
    plain = f"{how} pread and pwrite, {_count(plan.depth)}"
    report.say(f"measuring {names[0]} and {names[1]} in {folder.parent}")
    fio = _working_fio(report, plan, folder, direct, program)
    fio_name = f"fio, {how} psync, {_count(plan.depth)}"
    yardsticks = [plain] if fio is None else [fio_name, plain]
    writes, reads = Interleaved(), Interleaved()
    cpu = CpuTimes(), CpuTimes()
    with Buffers(plan) as buffers:
        warm_up = True
        start = time.monotonic()
        while writes.rounds < plan.rounds and (writes.rounds < LEAST_ROUNDS or time.monotonic() - start < plan.seconds):
            with Point(plan, folder, direct, buffers, plain, fio, fio_name, faults, cpu) as point:
                writes.round(point.writes(AGAIN), warm_up)
                reads.round(point.reads(AGAIN), warm_up)
            warm_up = False
            if point.failure:
                for name in names:  # what was not read back right has not been shown to be written right
                    report.reject(name, point.failure)
                return
    for name, measured, times in zip(names, (writes, reads), cpu, strict=True):
        limit = _fastest(measured, yardsticks)
        report.add(throughput_row(name, measured, OURS, limit, plan.file_bytes, {other: other for other in yardsticks if other != limit}))
        ours, theirs = (times.per_block(who, measured.rounds, plan.num_blocks) for who in (OURS, plain))
        report.add(ResultRow(f"{name}/cpu", "us/block", ours.median, ours.low, ours.high, Limit(plain, theirs.median),
                             theirs.median / ours.median))
        report.add(noise_row(f"{name}/noise", measured, AGAIN, yardsticks[0]))


def _fastest(measured: Interleaved, names: Sequence[str]) -> str:
    return min(names, key=lambda name: measured.seconds(name).median)


_CALM: Final = 1.0  # seconds after which a program that had just been started when the run was ended has made all its files


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """A new folder in the directory that is measured, removed at the end whatever happens."""
    if not parent.is_dir():
        raise ConfigError(f"--directory {parent}: {'not a folder' if parent.exists() else 'does not exist'}; name a folder on the "
                          "drive to measure")
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=parent))
    except OSError as error:
        raise ConfigError(f"--directory {parent} cannot be written ({error.strerror}); name a folder that user {os.getuid()} may "
                          "write to") from error
    try:
        yield folder
    except BaseException:
        remove_folder(folder, calm=_CALM)
        raise
    remove_folder(folder)


def _require_space(plan: NvmePlan, directory: Path, num_files: int) -> None:
    wanted = num_files * NvmeGeometry(plan.block_bytes, plan.num_blocks).file_bytes + default_reserve(directory)
    free = free_disk_bytes(directory)
    if wanted > free:
        raise ConfigError(f"--directory {directory}: kvtier bench nvme wants {format_bytes(wanted)} free there (with a reserve that "
                          f"stays free), available are {format_bytes(free)}; free some space, name another drive or use --quick")


def _working_fio(report: Report, plan: NvmePlan, folder: Path, direct: bool, program: str | None) -> Fio | None:
    """fio when it is there and runs here; otherwise a line says why it is left out."""
    if program is None:
        report.say("fio is not installed: a plain loop is the limit")
        return None
    fio = Fio(program, plan.num_blocks, plan.block_bytes, direct)
    trial = folder / "fio-trial"
    try:
        fio.run("write", trial, plan.depth)
        fio.run("read", trial, plan.depth)
    except TransferError as error:
        report.note(f"A plain loop is the limit, not fio: {error}")
        return None
    finally:
        trial.unlink(missing_ok=True)
    return fio


def _add_warm_start(report: Report, folder: Path, quick: bool) -> None:
    """Time to start over a directory with many blocks: 100,000, or quick 10,000."""
    # Not at the top: it brings the manager with it.
    from kvtier.bench.warm_start import NUM_BLOCKS, warm_start_rows
    report.say(f"measuring {WARM_START}")
    place = folder / "warm-start"
    place.mkdir()
    try:
        for row in warm_start_rows(place, num_blocks=NUM_BLOCKS // 10 if quick else NUM_BLOCKS):
            report.add(row)
    except ConfigError as error:
        report.note(f"{WARM_START} is left out: {error}")
    except KVTierError as error:
        report.reject(WARM_START, str(error))


def _add_first_token(report: Report, folder: Path, quick: bool) -> None:
    """Time to first token of a prefix on the drive beside recomputing it, where the demo's model is installed."""
    report.say(f"measuring {FIRST_TOKEN}")
    try:
        # Not at the top: it brings transformers with it, which only the demo extra installs.
        from kvtier.bench.first_token import first_token_row
        report.add(first_token_row(folder / "first-token", quick=quick, say=report.say))
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "kvtier":
            raise
        report.note(f"{FIRST_TOKEN} is left out: the package {error.name} is not usable here ({error}); {INSTALL_DEMO}")
    except ConfigError as error:
        report.note(f"{FIRST_TOKEN} is left out: {error}")
    except KVTierError as error:
        report.reject(FIRST_TOKEN, str(error))


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """The report says that direct I/O is refused; the store would warn about it again in every round."""
    log = logging.getLogger("kvtier.io.store_open")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _count(threads: int) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"

"""``kvtier bench nvme``: the NVMe store beside plain direct I/O of the same blocks in the same directory.

Each round has fresh preallocated files on both sides, so that no side writes over blocks that the other has not. Ours does
all that serving needs: header page, checksum, verification, manifest rows. After each round every byte that was read is
compared, outside the timed part.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.bench import INSTALL_DEMO
from kvtier.bench.fio import Fio, find_fio
from kvtier.bench.measure import LEAST_ROUNDS, Alternative, Interleaved
from kvtier.bench.raw_io import RawFile, share_out
from kvtier.bench.report import Report, check_writable, require_memory, size_name, spread_row, throughput_row
from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.io.direct_file import refuses_direct
from kvtier.io.faults import Faults
from kvtier.io.nvme_store import BlockWrite, NvmeStore
from kvtier.io.store_directory import expand
from kvtier.io.store_open import default_reserve
from kvtier.pools.host_arena import HostArena
from kvtier.pools.host_memory import free_disk_bytes, mount_of
from kvtier.pools.nvme_geometry import PAGE_BYTES, NvmeGeometry
from kvtier.pools.sizing import format_bytes
from kvtier.tiering.doctor import MEMORY_FILE_SYSTEMS
from kvtier.tiering.file_workers import MAX_WRITE_BATCH

OURS: Final = "kvtier"
FIO: Final = "fio"
FIRST_TOKEN: Final = "nvme/first-token"
_NAMESPACE: Final = '{"model": "kvtier bench nvme"}'
_WRITE_THREADS: Final = 1
"""As the transfer manager has."""

_PATIENCE: Final = 60.0


@dataclass(frozen=True)
class NvmePlan:
    """How much is measured.

    Attributes:
        num_blocks: blocks per file, a multiple of ``read_threads``.
        rounds: recorded; fewer, but at least three, when ``seconds`` are over before.
        seconds: time allowed for the rounds.
        block_bytes: whole pages.
        read_threads: as the transfer manager has by default.
    """

    num_blocks: int
    rounds: int
    seconds: float
    block_bytes: int = 2 << 20
    read_threads: int = 2

    @classmethod
    def usual(cls, quick: bool) -> NvmePlan:
        """128 MiB files and 7 rounds, or 512 MiB and 15."""
        return cls(num_blocks=64, rounds=7, seconds=30.0) if quick else cls(num_blocks=256, rounds=15, seconds=240.0)

    def check(self) -> None:
        """Raise ConfigError for sizes that cannot be measured."""
        if self.num_blocks < 1 or self.rounds < 1 or self.read_threads < 1 or self.num_blocks % self.read_threads \
                or self.block_bytes < 1 or self.block_bytes % PAGE_BYTES:
            raise ConfigError(f"{self}: needs at least 1 round, blocks of whole pages ({PAGE_BYTES} bytes), and a number of blocks "
                              "that is a multiple of the read threads")


def run_nvme(directory: Path | None = None, json_file: Path | None = None, quick: bool = False, *, plan: NvmePlan | None = None,
             faults: Faults | None = None, first_token: bool = True) -> int:
    """Measure, print a table, write the JSON.

    Args:
        directory: a folder on the drive to measure; the current folder when None. What is written there is removed again.
        json_file: where the figures go; None writes none.
        quick: smaller files and fewer rounds, under a minute.
        plan: sizes; the usual ones when None.
        faults: injected into the store, for tests.
        first_token: also measure the time to first token of a prefix that is on the drive.

    Returns:
        0, or 1 when a write or read failed or bytes differed.

    Raises:
        ConfigError: the directory or ``json_file`` cannot be used, or disk or memory have too little room.
    """
    if json_file is not None:
        check_writable(json_file)
    plan = plan if plan is not None else NvmePlan.usual(quick)
    plan.check()
    parent = expand(directory) if directory is not None else Path.cwd()
    fio = find_fio()
    with working_folder(parent) as folder:
        _require_space(plan, parent, num_files=2 if fio is None else 3)
        require_memory("kvtier bench nvme", 2 * plan.num_blocks * plan.block_bytes,
                       "end other programs" if quick else "end other programs, or use --quick, which needs less")
        refusal = refuses_direct(folder)
        report = _open_report(plan, quick, parent, refusal)
        with _said_once() if refusal is not None else contextlib.nullcontext():
            _measure(report, plan, folder, refusal is None, fio, faults)
        if first_token:
            _add_first_token(report, folder, quick)
    return report.finish(json_file)


def _open_report(plan: NvmePlan, quick: bool, directory: Path, refusal: str | None) -> Report:
    report = Report("kvtier bench nvme", {
        "command": "nvme", "quick": quick, "block_bytes": plan.block_bytes, "num_blocks": plan.num_blocks, "rounds": plan.rounds,
        "write_threads": _WRITE_THREADS, "read_threads": plan.read_threads, "write_batch": MAX_WRITE_BATCH, "sync": False,
        "direct_io": refusal is None, "direct_io_refusal": refusal}, directory)
    if refusal is not None:
        report.note(f"The mount refuses direct I/O ({refusal}): these are page-cache figures, they say nothing about the drive.")
    kind, mount = mount_of(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        report.note(f"{mount} is {kind}, which is memory: these figures say nothing about a drive.")
    return report


def _measure(report: Report, plan: NvmePlan, folder: Path, direct: bool, fio: str | None, faults: Faults | None) -> None:
    size = size_name(plan.block_bytes)
    write_row, read_row = f"nvme/write/{size}", f"nvme/read/{size}"
    how = "O_DIRECT" if direct else "page-cache"
    raw_write = f"{how} pwrite, {_count(_WRITE_THREADS)}"
    raw_read = f"{how} pread, {_count(plan.read_threads)}"
    writes, reads = Interleaved(), Interleaved()
    report.say(f"measuring {write_row} and {read_row} in {folder.parent}")
    with _Buffers(plan) as buffers:
        yardstick = _working_fio(report, plan, folder, direct, fio)
        warm_up = True
        start = time.monotonic()
        while writes.rounds < plan.rounds and (writes.rounds < LEAST_ROUNDS or time.monotonic() - start < plan.seconds):
            with _Point(plan, folder, direct, buffers, yardstick, faults) as point:
                writes.round(point.writes(raw_write), warm_up)
                reads.round(point.reads(raw_read), warm_up)
            warm_up = False
            if point.failure:
                for name in (write_row, read_row):  # what was not read back right has not been shown to be written right
                    report.reject(name, point.failure)
                return
    num_bytes = plan.num_blocks * plan.block_bytes
    for name, measured, limit in ((write_row, writes, raw_write), (read_row, reads, raw_read)):
        peers = {FIO: FIO} if measured.has(FIO) else {}
        report.add(throughput_row(name, measured, OURS, limit, num_bytes, peers))
        if peers:
            report.add(spread_row(f"{name}/fio", "GB/s", measured.rate(FIO, num_bytes / 1e9)))


class _Buffers:
    """Blocks to be written, blocks that were read, and the threads: made once, so that no timed part meets a fresh page."""

    def __init__(self, plan: NvmePlan) -> None:
        # Arenas, because the store's data lies in one when it is served.
        self._arenas = [HostArena(plan.num_blocks, plan.block_bytes, pin=False) for _ in range(2)]
        self.written, self.read = (arena.padded_rows for arena in self._arenas)
        self.written[:] = np.random.default_rng(5).integers(0, 256, self.written.shape, dtype=np.uint8)
        self.threads = ThreadPoolExecutor(max(_WRITE_THREADS, plan.read_threads), "kvtier-bench")

    def forget_read(self) -> None:
        """So that bytes of an earlier read cannot pass for this one's."""
        self.read.fill(0)

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        del self.written, self.read
        for arena in self._arenas:
            arena.close()


class _Point:
    """One round: fresh files on both sides, and the comparison of every byte read from them."""

    def __init__(self, plan: NvmePlan, folder: Path, direct: bool, buffers: _Buffers, fio: Fio | None, faults: Faults | None) -> None:
        self._plan = plan
        self._buffers = buffers
        self._fio = fio
        self._folder = Path(tempfile.mkdtemp(prefix="round-", dir=folder))
        self.failure = ""
        self._keys = [hashlib.sha256(b"block %d" % slot).digest() for slot in range(plan.num_blocks)]
        self._items = [BlockWrite(0, slot, self._keys[slot], buffers.written[slot], 35, 0.0) for slot in range(plan.num_blocks)]
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._raw = RawFile(self._folder / "raw", plan.num_blocks, plan.block_bytes, direct)
            undo.callback(self._raw.close)
            self._store = NvmeStore.open(self._folder / "store", _NAMESPACE, [NvmeGeometry(plan.block_bytes, plan.num_blocks)],
                                         faults=faults)
            undo.callback(self._store.close, _PATIENCE)
            self._undo = undo.pop_all()

    def __enter__(self) -> _Point:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def writes(self, limit: str) -> list[Alternative]:
        """The alternatives that write all blocks."""
        found = [Alternative(limit, self._write_plainly), Alternative(OURS, self._write)]
        if self._fio is not None:
            found.append(Alternative(FIO, lambda: self._run_fio("write", _WRITE_THREADS)))
        return found

    def reads(self, limit: str) -> list[Alternative]:
        """The alternatives that read all blocks."""
        forget, compare = self._buffers.forget_read, self._compare
        found = [Alternative(limit, self._read_plainly, forget, lambda: compare("plain read")),
                 Alternative(OURS, self._read, forget, lambda: compare("kvtier"))]
        if self._fio is not None:
            found.append(Alternative(FIO, lambda: self._run_fio("read", self._plan.read_threads)))
        return found

    def _write_plainly(self) -> None:
        share_out(self._buffers.threads, _WRITE_THREADS, self._plan.num_blocks,
                  lambda slots: self._raw.write(slots, self._buffers.written))

    def _write(self) -> None:
        """As the transfer manager's writer does it: batch after batch, in a thread of its own."""
        errors = self._buffers.threads.submit(self._write_batches).result()
        for error in filter(None, errors):
            self._fail(str(error))

    def _write_batches(self) -> list[Exception | None]:
        errors: list[Exception | None] = []
        for start in range(0, len(self._items), MAX_WRITE_BATCH):
            errors += self._store.write_blocks(self._items[start:start + MAX_WRITE_BATCH])
        return errors

    def _read_plainly(self) -> None:
        share_out(self._buffers.threads, self._plan.read_threads, self._plan.num_blocks,
                  lambda slots: self._raw.read(slots, self._buffers.read))

    def _read(self) -> None:
        try:
            share_out(self._buffers.threads, self._plan.read_threads, self._plan.num_blocks, self._read_blocks)
        except TransferError as error:
            self._fail(str(error))

    def _read_blocks(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._store.read_block(0, slot, self._keys[slot], self._buffers.read[slot])

    def _run_fio(self, mode: str, num_threads: int) -> float:
        assert self._fio is not None
        return self._fio.run(mode, self._folder / "fio", num_threads)

    def _compare(self, who: str) -> None:
        for slot in range(self._plan.num_blocks):
            if not np.array_equal(self._buffers.read[slot], self._buffers.written[slot]):
                self._fail(f"{who}: block {slot} reads back differently")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_space(plan: NvmePlan, directory: Path, num_files: int) -> None:
    wanted = num_files * NvmeGeometry(plan.block_bytes, plan.num_blocks).file_bytes + default_reserve(directory)
    free = free_disk_bytes(directory)
    if wanted > free:
        raise ConfigError(f"--directory {directory}: kvtier bench nvme wants {format_bytes(wanted)} free there (with a reserve that "
                          f"stays free), available are {format_bytes(free)}; free some space, name another drive or use --quick")


def _working_fio(report: Report, plan: NvmePlan, folder: Path, direct: bool, program: str | None) -> Fio | None:
    """fio when it is there and runs here; otherwise a line says why it is left out."""
    if program is None:
        report.say("fio is not installed: its rows are left out")
        return None
    fio = Fio(program, plan.num_blocks, plan.block_bytes, direct)
    trial = folder / "fio-trial"
    try:
        fio.run("write", trial, _WRITE_THREADS)
        fio.run("read", trial, plan.read_threads)
    except TransferError as error:
        report.note(f"The rows of fio are left out: {error}")
        return None
    finally:
        trial.unlink(missing_ok=True)
    return fio


def _add_first_token(report: Report, folder: Path, quick: bool) -> None:
    """Time to first token of a prefix on the drive beside recomputing it, where the demo's model is installed."""
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

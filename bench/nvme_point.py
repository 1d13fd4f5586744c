"""One size of ``kvtier bench nvme``: fresh files on every side in each round, and the comparison of every byte read from them."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.bench.fio import Fio
from kvtier.bench.measure import Alternative, Spread
from kvtier.bench.raw_io import RawFile, share_out
from kvtier.bench.removal import remove_folder
from kvtier.errors import ConfigError, TransferError
from kvtier.io.drive_queue import DriveQueue
from kvtier.io.faults import Faults
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.host_arena import HostArena
from kvtier.pools.nvme_geometry import PAGE_BYTES, NvmeGeometry
from kvtier.tiering.write_lane import MAX_WRITE_BATCH

OURS: Final = "kvtier"
_NAMESPACE: Final = '{"model": "kvtier bench nvme"}'
_PATIENCE: Final = 60.0


@dataclass(frozen=True)
class NvmePlan:
    """How much is measured of one block size.

    Attributes:
        num_blocks: blocks per file, a multiple of ``depth``.
        rounds: recorded; fewer, but at least five, when ``seconds`` are over before.
        seconds: time allowed for the rounds.
        block_bytes: whole pages.
        depth: reads or writes in the drive at once, for everybody.
        read_threads: that read and verify, as the transfer manager has by default; no more than ``depth`` of them are reading.
    """

    num_blocks: int
    rounds: int
    seconds: float
    block_bytes: int = 2 << 20
    depth: int = 2
    read_threads: int = 4

    @classmethod
    def usual(cls, quick: bool) -> list[NvmePlan]:
        """2 MiB first: files of 512 MiB and 15 rounds, quick of 128 MiB and 7. Then from 64 KiB to 8 MiB; quick only 256 KiB."""
        if quick:
            return [cls(64, 7, 20.0), cls(256, 7, 15.0, 256 << 10)]
        return [cls(256, 15, 150.0), *(cls((256 << 20) // size, 7, 30.0, size) for size in (64 << 10, 256 << 10, 1 << 20, 8 << 20))]

    @property
    def file_bytes(self) -> int:
        """Bytes of blocks that one turn moves."""
        return self.num_blocks * self.block_bytes

    def check(self) -> None:
        """Raise ConfigError for sizes that cannot be measured."""
        if self.num_blocks < 1 or self.rounds < 1 or self.depth < 1 or self.read_threads < 1 or self.num_blocks % self.depth \
                or self.block_bytes < 1 or self.block_bytes % PAGE_BYTES:
            raise ConfigError(f"{self}: needs at least 1 round, blocks of whole pages ({PAGE_BYTES} bytes), and a number of blocks "
                              "that is a multiple of the depth")


@dataclass
class CpuTimes:
    """CPU seconds of this process, all threads, kernel included, in each turn of ours and of the plain loop."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def around(self, name: str, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, with its CPU time kept under ``name``."""
        def timed() -> None:
            start = time.process_time()
            work()
            self.seconds.setdefault(name, []).append(time.process_time() - start)
        return timed

    def per_block(self, name: str, rounds: int, num_blocks: int) -> Spread:
        """Microseconds for each block in the last ``rounds`` turns."""
        return Spread.of([seconds * 1e6 / num_blocks for seconds in self.seconds[name][-rounds:]])


class Buffers:
    """Blocks to be written, blocks that were read, and the threads: made once, so that no timed part meets a fresh page."""

    def __init__(self, plan: NvmePlan) -> None:
        # Arenas, because the store's data lies in one when it is served.
        self._arenas = [HostArena(plan.num_blocks, plan.block_bytes, pin=False) for _ in range(2)]
        self.written, self.read = (arena.padded_rows for arena in self._arenas)
        self.written[:] = np.random.default_rng(5).integers(0, 256, self.written.shape, dtype=np.uint8)
        self.threads = ThreadPoolExecutor(max(plan.depth, plan.read_threads), "kvtier-bench")

    def forget_read(self) -> None:
        """So that bytes of an earlier read cannot pass for this one's."""
        self.read.fill(0)

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        del self.written, self.read
        for arena in self._arenas:
            arena.close()


class Point:
    """One round.

    Args:
        plan: sizes.
        folder: where files are made; they are removed when the round ends.
        direct: with O_DIRECT.
        buffers: of this plan.
        plain: the name of the plain loop.
        fio, fio_name: the program and its name; None where there is none.
        faults: injected into the store.
        cpu: where CPU times of writes and of reads go.
    """

    def __init__(self, plan: NvmePlan, folder: Path, direct: bool, buffers: Buffers, plain: str, fio: Fio | None, fio_name: str,
                 faults: Faults | None, cpu: tuple[CpuTimes, CpuTimes]) -> None:
        self._plan = plan
        self._buffers = buffers
        self._plain = plain
        self._fio = fio
        self._fio_name = fio_name
        self._cpu = cpu
        self._direct = direct
        self._folder = Path(tempfile.mkdtemp(prefix="round-", dir=folder))
        self.failure = ""
        self._keys = [hashlib.sha256(b"block %d" % slot).digest() for slot in range(plan.num_blocks)]
        self._items = [BlockWrite(0, slot, self._keys[slot], buffers.written[slot], 35, 0.0) for slot in range(plan.num_blocks)]
        with contextlib.ExitStack() as undo:
            undo.callback(remove_folder, self._folder)
            self._raw = [RawFile(self._folder / name, plan.num_blocks, plan.block_bytes, direct)
                         for name in (("raw", "raw-again") if fio is None else ("raw",))]
            for raw in self._raw:
                undo.callback(raw.close)
            self._store = NvmeStore.open(self._folder / "store", _NAMESPACE, [NvmeGeometry(plan.block_bytes, plan.num_blocks)],
                                         faults=faults, drive=DriveQueue(plan.depth, plan.depth))
            undo.callback(self._store.close, _PATIENCE)
            self._undo = undo.pop_all()

    def __enter__(self) -> Point:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def writes(self, again: str) -> list[Alternative]:
        """The alternatives that write all blocks: the limit, ours, the other yardstick, and the limit again."""
        cpu, raw = self._cpu[0], self._raw
        plain = Alternative(self._plain, cpu.around(self._plain, lambda: self._write_plainly(raw[0])))
        ours = Alternative(OURS, cpu.around(OURS, self._write))
        if self._fio is None:
            return [plain, ours, Alternative(again, lambda: self._write_plainly(raw[1]))]
        return [Alternative(self._fio_name, lambda: self._run_fio("write", "fio")), ours, plain,
                Alternative(again, lambda: self._run_fio("write", "fio-again"))]

    def reads(self, again: str) -> list[Alternative]:
        """The alternatives that read all blocks."""
        cpu, raw = self._cpu[1], self._raw
        forget, compare = self._buffers.forget_read, self._compare
        plain = Alternative(self._plain, cpu.around(self._plain, lambda: self._read_plainly(raw[0])), forget, lambda: compare("plain read"))
        ours = Alternative(OURS, cpu.around(OURS, self._read), forget, lambda: compare("kvtier"))
        if self._fio is None:
            return [plain, ours, Alternative(again, lambda: self._read_plainly(raw[1]), forget, lambda: compare("plain read"))]
        return [Alternative(self._fio_name, lambda: self._run_fio("read", "fio")), ours, plain,
                Alternative(again, lambda: self._run_fio("read", "fio-again"))]

    def _write_plainly(self, raw: RawFile) -> None:
        share_out(self._buffers.threads, self._plan.depth, self._plan.num_blocks, lambda slots: raw.write(slots, self._buffers.written))

    def _write(self) -> None:
        """As the transfer manager's writer does it: batch after batch, in a thread of its own."""
        share_out(self._buffers.threads, 1, self._plan.num_blocks, self._write_batches)

    def _write_batches(self, slots: Sequence[int]) -> None:
        items = [self._items[slot] for slot in slots]
        for start in range(0, len(items), MAX_WRITE_BATCH):
            for error in filter(None, self._store.write_blocks(items[start:start + MAX_WRITE_BATCH])):
                self._fail(str(error))

    def _read_plainly(self, raw: RawFile) -> None:
        share_out(self._buffers.threads, self._plan.depth, self._plan.num_blocks, lambda slots: raw.read(slots, self._buffers.read))

    def _read(self) -> None:
        try:
            share_out(self._buffers.threads, self._plan.read_threads, self._plan.num_blocks, self._read_blocks)
        except TransferError as error:
            self._fail(str(error))

    def _read_blocks(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._store.read_block(0, slot, self._keys[slot], self._buffers.read[slot])

    def _run_fio(self, mode: str, name: str) -> float:
        assert self._fio is not None
        return self._fio.run(mode, self._folder / name, self._plan.depth)

    def _compare(self, who: str) -> None:
        for slot in range(self._plan.num_blocks):
            if not np.array_equal(self._buffers.read[slot], self._buffers.written[slot]):
                self._fail(f"{who}: block {slot} reads back differently")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

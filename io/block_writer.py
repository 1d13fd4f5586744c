"""``BlockWriter``: writes a batch of blocks into their slabs (design: one vectored I/O per run; checksums overlap with writing).

The calling thread computes checksums and headers, a few threads write. So the drive has the next run waiting when it is done with
one, as it would from a program that checks nothing. Neighbouring slots of a slab become one ``pwritev``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.errors import TransferError
from kvtier.io.cpu_stream import CpuEvent, CpuStream
from kvtier.io.direct_file import Buffer, aligned_buffer
from kvtier.io.manifest_rows import ManifestRow
from kvtier.io.slab import SlabFile, SlotHeader
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import HEADER_BYTES

RUN_BYTES: Final = 1 << 20
"""The most that one call writes, unless a single block is larger: a read that comes meanwhile waits for no more than this."""

RUN_SLOTS: Final = 64

_AHEAD: Final = 2  # runs prepared for each writing thread
_PATIENCE: Final = 0.5  # seconds between two looks, no limit


class BlockWriter:
    """Writes into the slabs of one store, for one caller at a time.

    Args:
        slabs: by group.
        threads: how many runs are written at once.
    """

    def __init__(self, slabs: Sequence[SlabFile], threads: int) -> None:
        self._slabs = slabs
        self._num_threads = threads
        self._streams: list[CpuStream] = []  # made with the first batch that is more than one run
        self._pages: list[Buffer] = []

    def write(self, items: Sequence[BlockWrite], written: float) -> list[SlotHeader | Exception | None]:
        """Write the blocks, in order of slots.

        After a failure nothing more is begun; what has been begun is finished.

        Args:
            items: valid ones, no slot twice; their data must not change until the call returns.
            written: wall-clock seconds, for the headers.

        Returns:
            for each item its header when header and block are complete, the error when its own write failed, None when it was not
            begun.
        """
        outcome: list[SlotHeader | Exception | None] = [None] * len(items)
        runs = self._runs(items)
        if len(runs) == 1 or any(slab.one_by_one for slab in self._slabs) or any(not isinstance(item.data, np.ndarray) for item in items):
            for run in runs:
                if not self._write_run(items, run, written, self._page_for(0), outcome):
                    break
            return outcome
        self._start()
        begun: list[CpuEvent] = []
        failed: list[int] = []  # offsets; a thread that fails says so here at once
        ahead = _AHEAD * len(self._streams)
        try:
            for number, run in enumerate(runs):
                if number >= ahead:
                    _wait(begun[number - ahead])  # its header pages are free again
                if failed:
                    break
                headers, buffers, offset, slab = self._prepare(items, run, written, self._page_for(number % ahead))
                for position, header in zip(run, headers, strict=True):
                    outcome[position] = header  # as long as nothing is said against it
                begun.append(self._streams[number % len(self._streams)].submit(_Write(slab, offset, buffers, failed)))
            for event in begun:
                _wait(event)
        except BaseException:  # cut short: a write that is still under way must neither find other data nor come after its slot's next one
            for stream in self._streams:
                stream.synchronize()
            raise
        for event, run in zip(begun, runs, strict=False):
            if event.error is not None:
                error = event.error if isinstance(event.error, Exception) else TransferError(f"broken off: {event.error!r}")
                for position in run:
                    outcome[position] = error
        return outcome

    def close(self, timeout: float) -> bool:
        """End the threads; False when one is still writing after ``timeout`` seconds. Nothing may be written any more."""
        ended = [stream.close(timeout) for stream in self._streams]
        return all(ended)

    def _start(self) -> None:
        while len(self._streams) < self._num_threads:
            self._streams.append(CpuStream(f"write-{len(self._streams)}"))

    def _page_for(self, number: int) -> Buffer:
        """Header pages of the run with this number among those being prepared or written, uint8 [RUN_SLOTS * 4096]."""
        while len(self._pages) <= number:
            self._pages.append(aligned_buffer(RUN_SLOTS * HEADER_BYTES))
        return self._pages[number]

    def _runs(self, items: Sequence[BlockWrite]) -> list[list[int]]:
        """Positions of the items in runs: neighbouring slots of one slab, whose blocks lie as they travel."""
        most = [slots_per_run(slab) for slab in self._slabs]
        runs: list[list[int]] = []
        group = next_slot = -1  # what would continue the last run; -1: nothing
        for position in sorted(range(len(items)), key=lambda position: (items[position].group, items[position].slot)):
            item = items[position]
            is_plain = _is_plain(self._slabs[item.group], item)
            if is_plain and item.slot == next_slot and item.group == group and len(runs[-1]) < most[group]:
                runs[-1].append(position)
            else:
                runs.append([position])
            group, next_slot = item.group, item.slot + 1 if is_plain else -1
        return runs

    def _write_run(self, items: Sequence[BlockWrite], run: list[int], written: float, pages: Buffer,
                   outcome: list[SlotHeader | Exception | None]) -> bool:
        """Prepare and write here; False when it failed."""
        first = items[run[0]]
        slab = self._slabs[first.group]
        try:
            if len(run) == 1:
                outcome[run[0]] = slab.write(first.slot, first.key, first.data, first.priority, _positive_zero(first.expiry),
                                             written)
                return True
            headers, buffers, offset, _ = self._prepare(items, run, written, pages)
            slab.file.write(offset, buffers)
        except (OSError, TransferError) as error:
            for position in run:
                outcome[position] = error
            return False
        for position, header in zip(run, headers, strict=True):
            outcome[position] = header
        return True

    def _prepare(self, items: Sequence[BlockWrite], run: list[int], written: float,
                 pages: Buffer) -> tuple[list[SlotHeader], list[Buffer], int, SlabFile]:
        """(headers, what the call writes, its offset, its slab)."""
        slab = self._slabs[items[run[0]].group]
        headers: list[SlotHeader] = []
        buffers: list[Buffer] = []
        for number, position in enumerate(run):
            item = items[position]
            assert isinstance(item.data, np.ndarray), "direct rows are written one by one"
            page = pages[number * HEADER_BYTES:(number + 1) * HEADER_BYTES]
            headers.append(slab.seal(page, item.slot, item.key, item.data, item.priority, _positive_zero(item.expiry), written))
            buffers += [page, item.data]
        return headers, buffers, slab.geometry.offset(items[run[0]].slot), slab


def slots_per_run(slab: SlabFile) -> int:
    """How many neighbouring slots one call may read or write."""
    return 1 if slab.one_by_one else max(1, min(RUN_SLOTS, RUN_BYTES // slab.geometry.stride))


def rows_of(items: Sequence[BlockWrite], outcome: Sequence[SlotHeader | Exception | None]) -> tuple[list[ManifestRow],
                                                                                                      list[TransferError | None]]:
    """What :meth:`BlockWriter.write` returned, as the rows of what is complete, and for each item why it is not stored, or None."""
    rows: list[ManifestRow] = []
    failures: list[TransferError | None] = []
    first = next((result for result in outcome if isinstance(result, Exception)), None)
    for item, result in zip(items, outcome, strict=True):
        if isinstance(result, SlotHeader):
            rows.append(ManifestRow(item.group, item.slot, item.key, result.length, result.checksum, item.priority, result.expiry, 0))
            failures.append(None)
            continue
        reason = result if result is not None else f"an earlier write of the batch failed ({first})"
        failures.append(TransferError(f"group {item.group}, slot {item.slot}: not stored: {reason}"))
    return rows, failures


class _Write:
    """One call of a writing thread."""

    __slots__ = ("_buffers", "_failed", "_offset", "_slab")

    def __init__(self, slab: SlabFile, offset: int, buffers: list[Buffer], failed: list[int]) -> None:
        self._slab = slab
        self._offset = offset
        self._buffers = buffers
        self._failed = failed

    def __call__(self) -> None:
        try:
            self._slab.file.write(self._offset, self._buffers)
        except BaseException:
            self._failed.append(self._offset)
            raise


def _is_plain(slab: SlabFile, item: BlockWrite) -> bool:
    """Whether a block fills its place in the slab, so that the next slot's header can follow in the same call."""
    return isinstance(item.data, np.ndarray) and item.data.nbytes == slab.geometry.payload_bytes


def _positive_zero(expiry: float) -> float:
    """SQLite does not keep the sign of -0.0, and the digest of the row would differ."""
    return float(expiry) + 0.0


def _wait(event: CpuEvent) -> None:
    while not event.wait(_PATIENCE):
        pass

"""Copies between an engine's pages and slots of the host arena, in both directions (design: two ways to attach).

A block in a slot is a rank's pages one behind the other, each with its part of every tensor. A run of neighbouring pages whose places in
the arena have equal distances is one copy for each tensor: many pages in one call on the CPU, one two-dimensional copy on CUDA. Many runs
on CUDA go the way that was measured to be fastest (``copy_paths``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import TransferError
from kvtier.io.copy_paths import CopyPath, Direction
from kvtier.io.copy_runs import MAX_PITCH, MAX_RUN_BYTES
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_batch import Addresses
from kvtier.io.cuda_stream import current_handle
from kvtier.io.row_copier import halves
from kvtier.io.row_kernel import RowMover
from kvtier.kernels.compiled_copy import CopyRuns, copy_runs
from kvtier.kernels.row_moves import RowPlaces
from kvtier.pools.host_arena import HostArena

Flat = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class PageRun(NamedTuple):
    """``length`` pages from ``page`` on; in the arena they lie ``step`` bytes apart from ``offset`` on."""

    page: int
    length: int
    offset: int
    step: int


class PagePlaces(NamedTuple):
    """Where a rank's part lies in a group's slots.

    Attributes:
        stride: bytes from slot to slot.
        first: bytes before the rank's part of a slot.
        page_bytes: of all tensors together.
        pages_per_block: pages of one block.
        slots_per_piece: a copy must not cross a multiple of so many slots (see ``HostArena``).
    """

    stride: int
    first: int
    page_bytes: int
    pages_per_block: int
    slots_per_piece: int


def page_runs(places: PagePlaces, pages: Sequence[int], slots: Sequence[int], skip_pages: int) -> list[PageRun]:
    """The runs of a copy, in order.

    Args:
        places: of the group.
        pages: page numbers, block by block.
        slots: of the blocks; the first one's first ``skip_pages`` pages are left out, and the last one may be short.
    """
    runs: list[PageRun] = []
    most = max(1, MAX_RUN_BYTES // places.stride)
    piece = places.slots_per_piece * places.stride
    first_page = first_offset = step = count = 0
    position = skip_pages
    for page in pages:
        block, within = divmod(position, places.pages_per_block)
        offset = slots[block] * places.stride + places.first + within * places.page_bytes
        position += 1
        if count and page == first_page + count and count < most and offset // piece == first_offset // piece:
            distance = offset - first_offset - (count - 1) * step
            if count == 1:
                step = distance if 0 < distance <= MAX_PITCH else 0
            if distance == step > 0:
                count += 1
                continue
        if count:
            runs.append(PageRun(first_page, count, first_offset, step or places.page_bytes))
        first_page, first_offset, step, count = page, offset, 0, 1
    if count:
        runs.append(PageRun(first_page, count, first_offset, step or places.page_bytes))
    return runs


class PageCopier(Protocol):
    """Copies one group's pages of one rank."""

    def store(self, runs: Sequence[PageRun]) -> None:
        """Pages into slots: now, or enqueued on the stream whose work this is called from."""

    def load(self, runs: Sequence[PageRun]) -> None:
        """Slots into pages, likewise."""


class HostPageCopier:
    """Pages in the host's memory.

    Args:
        tensors: uint8 or int8 ``[pages, bytes]``, rows contiguous.
        arena: the group's slots.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], arena: HostArena) -> None:
        self._arena: Flat = arena.padded_rows.reshape(-1)
        self._tensors: list[tuple[int, Flat]] = []  # where in a page of the arena, and the pages
        at = 0
        for tensor in tensors:
            rows: Flat = tensor.detach().view(torch.uint8).numpy()
            self._tensors.append((at, rows))
            at += rows.shape[1]
        self._page_bytes = at
        self._num_pages = min((len(rows) for _at, rows in self._tensors), default=0)

    def store(self, runs: Sequence[PageRun]) -> None:
        """Copy now, in the calling thread."""
        self._copy(runs, Direction.DOWN)

    def load(self, runs: Sequence[PageRun]) -> None:
        """Copy now, in the calling thread."""
        self._copy(runs, Direction.UP)

    def _copy(self, runs: Sequence[PageRun], direction: Direction) -> None:
        table = np.array(runs, np.int64).reshape(-1, 4)
        self._check(table)
        if copy_runs is not None:
            self._copy_compiled(copy_runs, table, direction)
            return
        for run in runs:
            for at, rows in self._tensors:
                slots = np.ndarray((run.length, rows.shape[1]), np.uint8, self._arena.data, run.offset + at, (run.step, 1))
                pages = rows[run.page:run.page + run.length]
                for to_rows, from_rows in halves(slots, pages) if direction is Direction.DOWN else halves(pages, slots):
                    np.copyto(to_rows, from_rows)

    def _check(self, runs: Numbers) -> None:
        """IndexError for a run outside the tensors or the arena: by address it would lead anywhere, and numpy writes a row that is the only
        one as often as there is room for it."""
        pages, lengths, offsets, steps = runs.T
        outside = (pages < 0) | (pages + lengths > self._num_pages)
        outside |= (offsets < 0) | (offsets + (lengths - 1) * steps + self._page_bytes > len(self._arena))
        if outside.any():
            run = PageRun(*runs[outside.argmax()].tolist())
            raise IndexError(f"{run}: the tensors have {self._num_pages} pages of {self._page_bytes} bytes, the arena has "
                             f"{len(self._arena)} bytes")

    def _copy_compiled(self, copy_runs: CopyRuns, runs: Numbers, direction: Direction) -> None:
        """One call for each tensor. Page by page: runs may have as many distances in the arena as there are runs."""
        lengths = runs[:, 1]
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        pages, _lengths, offsets, steps = np.repeat(runs, lengths, axis=0).T
        pages, offsets = pages + within, offsets + within * steps
        places = np.ones((len(within), 3), np.int64)
        for at, rows in self._tensors:
            ends = [(self._arena.ctypes.data + at, offsets), (rows.ctypes.data, pages * rows.strides[0])]
            (to, places[:, 0]), (source, places[:, 1]) = ends if direction is Direction.DOWN else reversed(ends)
            copy_runs(to, source, places, 0, 0, 1, 0, 0, rows.shape[1], 1, True)


class _Tensor(NamedTuple):
    """One of an engine's tensors: where in a page of the arena its part is, how wide that is, its address, and bytes from row to row."""

    at: int
    width: int
    address: int
    pitch: int


class CudaPageCopier:
    """Pages in device memory, by the path that was measured to be fastest for units of their size.

    Args:
        tools: of the device.
        tensors, arena: as of :class:`HostPageCopier`. The arena must be pinned.
    """

    def __init__(self, tools: CopyTools, tensors: Sequence[torch.Tensor], arena: HostArena) -> None:
        self._tools = tools
        self._runtime = tools.runtime
        self._address = arena.address
        self._tensors: list[_Tensor] = []
        self._keep = list(tensors)
        at = 0
        for tensor in tensors:
            width = tensor.shape[1]
            self._tensors.append(_Tensor(at, width, tensor.data_ptr(), tensor.stride(0)))
            at += width

    def store(self, runs: Sequence[PageRun]) -> None:
        """Enqueue the copies."""
        self._copy(runs, Direction.DOWN)

    def load(self, runs: Sequence[PageRun]) -> None:
        """Enqueue the copies."""
        self._copy(runs, Direction.UP)

    def _copy(self, runs: Sequence[PageRun], direction: Direction) -> None:
        stream = current_handle()
        pages = sum(run.length for run in runs)
        calls = len(runs) * len(self._tensors)
        unit = sum(tensor.width for tensor in self._tensors) // len(self._tensors)
        path = self._tools.path(direction, unit) if pages and calls > 1 else CopyPath.RUNS
        try:
            if path is CopyPath.BATCH and self._tools.batch is not None:
                to, source = self._units(runs, direction)
                sizes = np.repeat(np.array([tensor.width for tensor in self._tensors], np.uint64), pages)
                self._tools.batch.copy(to, source, sizes, stream)
                return
            if path is CopyPath.KERNEL and self._tools.kernel is not None:
                self._launch(self._tools.kernel, runs, direction, stream)
                return
        except (TransferError, RuntimeError) as error:  # the device itself may be in error: then the next call says so
            self._tools.give_up(path, error)
        for run in runs:
            for tensor in self._tensors:
                self._copy_run(run, tensor, direction, stream)

    def _copy_run(self, run: PageRun, tensor: _Tensor, direction: Direction, stream: int) -> None:
        """One run of one tensor: a line for each page."""
        runtime, width = self._runtime, tensor.width
        ends = [(self._address + run.offset + tensor.at, run.step), (tensor.address + run.page * tensor.pitch, tensor.pitch)]
        (to, to_pitch), (source, source_pitch) = ends if direction is Direction.DOWN else reversed(ends)
        if run.length == 1 or to_pitch == source_pitch == width:
            runtime.memcpyAsync(to, source, width * run.length, runtime.memcpyDefault, stream)
        else:
            runtime.memcpy2DAsync(to, to_pitch, source, source_pitch, width, run.length, runtime.memcpyDefault, stream)

    def _units(self, runs: Sequence[PageRun], direction: Direction) -> tuple[Addresses, Addresses]:
        """Destinations and sources of each page of each tensor, tensor by tensor."""
        places = np.array(_places(runs), np.uint64)
        pages, offsets = places[:, 0], places[:, 1]
        on_device = np.concatenate([pages * np.uint64(tensor.pitch) + np.uint64(tensor.address) for tensor in self._tensors])
        in_arena = np.concatenate([offsets + np.uint64(self._address + tensor.at) for tensor in self._tensors])
        return (in_arena, on_device) if direction is Direction.DOWN else (on_device, in_arena)

    def _launch(self, kernel: RowMover, runs: Sequence[PageRun], direction: Direction, stream: int) -> None:
        """One launch for each tensor. Places in the arena have no common distance: they are counted in the largest unit that they are
        multiples of, so that the kernel can use words."""
        places = _places(runs)
        grain = math.gcd(*[offset for _page, offset in places], 64)
        is_store = direction is Direction.DOWN
        pairs = [(page, offset // grain) if is_store else (offset // grain, page) for page, offset in places]
        for tensor in self._tensors:
            arena = RowPlaces(self._address + tensor.at, grain, 0)
            device = RowPlaces(tensor.address, tensor.pitch, 0)
            kernel.copy(arena if is_store else device, device if is_store else arena, pairs, 1, tensor.width, stream)


def _places(runs: Sequence[PageRun]) -> list[tuple[int, int]]:
    """Page and offset of each page."""
    return [(run.page + number, run.offset + number * run.step) for run in runs for number in range(run.length)]

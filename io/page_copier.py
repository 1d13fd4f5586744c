"""Copies between an engine's pages and slots of the host arena, in both directions (design: two ways to attach).

A block in a slot is a rank's pages one behind the other, each with its part of every tensor. A run of neighbouring pages whose places in
the arena have equal distances is one copy for each tensor: many pages in one call on the CPU, one two-dimensional copy on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.io.copy_runs import MAX_RUN_BYTES
from kvtier.io.cuda_stream import CudaModule, current_handle
from kvtier.pools.host_arena import HostArena

Flat = npt.NDArray[np.uint8]


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
            if count == 1 and distance > 0:
                step = distance
            if distance == step:
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

    def store(self, runs: Sequence[PageRun]) -> None:
        """Copy now, in the calling thread."""
        for run in runs:
            for at, rows in self._tensors:
                np.copyto(self._places(run, at, rows.shape[1]), rows[run.page:run.page + run.length])

    def load(self, runs: Sequence[PageRun]) -> None:
        """Copy now, in the calling thread."""
        for run in runs:
            for at, rows in self._tensors:
                np.copyto(rows[run.page:run.page + run.length], self._places(run, at, rows.shape[1]))

    def _places(self, run: PageRun, at: int, width: int) -> Flat:
        return np.ndarray((run.length, width), np.uint8, self._arena.data, run.offset + at, (run.step, 1))


class CudaPageCopier:
    """Pages in device memory; arguments as of :class:`HostPageCopier`. The arena must be pinned."""

    def __init__(self, cuda: CudaModule, tensors: Sequence[torch.Tensor], arena: HostArena) -> None:
        self._runtime = cuda.runtime
        self._address = arena.address
        self._tensors: list[tuple[int, int, int, int]] = []  # where in a page of the arena, width, address, distance of rows
        self._keep = list(tensors)
        at = 0
        for tensor in tensors:
            width = tensor.shape[1]
            self._tensors.append((at, width, tensor.data_ptr(), tensor.stride(0)))
            at += width

    def store(self, runs: Sequence[PageRun]) -> None:
        """Enqueue the copies."""
        stream = current_handle()
        for run in runs:
            for at, width, address, pitch in self._tensors:
                self._copy(self._address + run.offset + at, run.step, address + run.page * pitch, pitch, width, run.length, stream)

    def load(self, runs: Sequence[PageRun]) -> None:
        """Enqueue the copies."""
        stream = current_handle()
        for run in runs:
            for at, width, address, pitch in self._tensors:
                self._copy(address + run.page * pitch, pitch, self._address + run.offset + at, run.step, width, run.length, stream)

    def _copy(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int) -> None:
        runtime = self._runtime
        if height == 1 or to_pitch == source_pitch == width:
            runtime.memcpyAsync(to, source, width * height, runtime.memcpyDefault, stream)
        else:
            runtime.memcpy2DAsync(to, to_pitch, source, source_pitch, width, height, runtime.memcpyDefault, stream)

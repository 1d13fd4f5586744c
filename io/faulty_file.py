"""``FaultyFile``: a slab file to which the faults of a rule really happen, each where a drive or a user would do it.

The store above does not know: it calls what it always calls. A failure comes instead of the call, a short count comes from the system
call inside it, and what is lost, torn, misdirected or flipped is reported as a success.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.io.direct_file import Buffer, DirectFile, aligned_buffer
from kvtier.io.faults import FaultKind, FaultOperation, Faults
from kvtier.pools.nvme_geometry import PAGE_BYTES, NvmeGeometry


class FaultyFile(DirectFile):
    """A slab file under ``faults``. In each call header pages and blocks take turns, as ``SlabFile`` hands them over."""

    def __init__(self, path: Path, geometry: NvmeGeometry, faults: Faults, *, direct: bool) -> None:
        super().__init__(path, create=True, direct=direct)
        self._geometry = geometry
        self._faults = faults

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """As :meth:`DirectFile.read`, or otherwise."""
        self._happen_before(FaultOperation.READ)
        super().read(offset, buffers)
        if self._faults.hits(FaultOperation.READ, FaultKind.BIT_FLIP):
            self._flip_bit(buffers)

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """As :meth:`DirectFile.write`, or otherwise. The caller's bytes stay right: only what reaches the file is not."""
        faults = self._faults
        self._happen_before(FaultOperation.WRITE)
        if faults.hits(FaultOperation.WRITE, FaultKind.BIT_FLIP):
            buffers = _copies(buffers)
            self._flip_bit(buffers)
        if faults.hits(FaultOperation.WRITE, FaultKind.TORN_WRITE):
            pages = sum(buffer.nbytes for buffer in buffers) // PAGE_BYTES
            buffers = _front(buffers, (1 + faults.below(max(pages - 1, 1))) * PAGE_BYTES)
        if faults.hits(FaultOperation.WRITE, FaultKind.MISDIRECTED_WRITE):
            places = range(0, self._geometry.file_bytes - sum(buffer.nbytes for buffer in buffers) + 1, self._geometry.stride)
            others = [place for place in (faults.below(len(places)) * self._geometry.stride for _ in range(16)) if place != offset]
            if not others:
                return  # a slab of one slot: it is written nowhere
            offset = others[0]
        super().write(offset, buffers)

    def _happen_before(self, operation: FaultOperation) -> None:
        self._faults.before(operation)
        if self._faults.hits(operation, FaultKind.LOST_FILE):
            self.path.unlink(missing_ok=True)
        if self._faults.hits(operation, FaultKind.DELETED_DIRECTORY):
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _flip_bit(self, buffers: Sequence[Buffer]) -> None:
        number = self._faults.below(len(buffers))
        # Of a block, what is padding belongs to nobody and is in no checksum.
        self._faults.flip_bit(buffers[number][:self._geometry.block_bytes] if number % 2 else buffers[number])

    def _move(self, call: Any, verb: str, offset: int, buffers: Sequence[Buffer], wanted: int) -> None:
        """With system calls that may come back early: after some whole pages, or after nothing at all."""
        operation, kind = ((FaultOperation.READ, FaultKind.SHORT_READ) if call is os.preadv
                           else (FaultOperation.WRITE, FaultKind.SHORT_WRITE))

        def shortened(descriptor: int, views: list[memoryview], place: int) -> int:
            if self._faults.hits(operation, kind):
                pages = -(-sum(view.nbytes for view in views) // PAGE_BYTES)
                views = [view for view in _front(views, self._faults.below(pages) * PAGE_BYTES) if view.nbytes]
                if not views:
                    return 0
            count: int = call(descriptor, views, place)
            return count

        super()._move(shortened, verb, offset, buffers, wanted)


def _copies(buffers: Sequence[Buffer]) -> list[Buffer]:
    copies = [aligned_buffer(buffer.nbytes) for buffer in buffers]
    for copy, buffer in zip(copies, buffers, strict=True):
        copy[:] = buffer
    return copies


def _front(views: Sequence[Any], num_bytes: int) -> list[Any]:
    """The first bytes of a vector of buffers or views."""
    front = []
    for view in views:
        front.append(view[:min(view.nbytes, num_bytes)])
        num_bytes -= front[-1].nbytes
    return front

"""``PieceCopier``: copies blocks between two memories of the host by one call for a whole batch, in the compiled build.

Whatever the two memories look like, a block is rows of pieces at equal distances on each side: a slot is one piece; the layers of a
layer-first pool are rows; the first tokens of each head are pieces. ``kvtier.kernels.host_copy`` copies them for any slots in any order,
without the GIL, and past the cache: what is moved between levels is not read again soon, and the engine keeps its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvtier.io.row_copier import CALL_BYTES, Call, Numbers, Rows
from kvtier.kernels.compiled_copy import CopyRuns, copy_runs

_DIMENSIONS: Final = 3
"""Of a block, as far as distances tell: rows, pieces, bytes."""


class PieceCopier:
    """Copies blocks in the calling thread.

    Args:
        copy_runs: of the module in C.
        source, destination: uint8 ``[slots, ...]``, any strides, in the host's memory, which they keep alive.
        shape: of a block: rows, pieces, bytes of a piece.
        source_strides, destination_strides: bytes from one row to the next, and from one piece to the next.
    """

    def __init__(self, copy_runs: CopyRuns, source: Rows, destination: Rows, shape: Sequence[int],
                 source_strides: Sequence[int], destination_strides: Sequence[int]) -> None:
        self._copy_runs = copy_runs
        self._source = source
        self._destination = destination
        self._rows, self._pieces, self._bytes = shape
        self._source_strides = source_strides
        self._destination_strides = destination_strides
        self._call_blocks = max(1, CALL_BYTES // (self._rows * self._pieces * self._bytes))

    def plan(self, sources: Numbers, destinations: Numbers) -> list[Call]:
        """The calls that copy block ``sources[i]`` to block ``destinations[i]``, for each i.

        Each keeps its memory alive and can be made in any thread, in any order.

        Args:
            sources, destinations: intp ``[n]``, n at least 1, inside their arrays. No destination occurs twice, or is a source.
        """
        runs = np.empty((len(sources), 3), np.int64)
        np.multiply(destinations, self._destination.strides[0], runs[:, 0])
        np.multiply(sources, self._source.strides[0], runs[:, 1])
        runs[:, 2] = self._rows
        return [partial(self._copy, runs[first:first + self._call_blocks]) for first in range(0, len(runs), self._call_blocks)]

    def _copy(self, runs: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        from_row, from_piece = self._source_strides
        to_row, to_piece = self._destination_strides
        self._copy_runs(self._destination.ctypes.data, self._source.ctypes.data, runs, to_row, from_row, self._pieces, to_piece,
                        from_piece, self._bytes, 1, True)


def piece_copier(source: Rows, destination: Rows) -> PieceCopier | None:
    """The copier of blocks uint8 ``[slots, ...]`` of one shape, any strides; None where only library calls can copy them.

    That is in the plain build, and where neither neighbouring dimensions join to rows of pieces.
    """
    if copy_runs is None:
        return None
    assert source.shape[1:] == destination.shape[1:], f"blocks of {source.shape[1:]} and of {destination.shape[1:]}"
    dimensions: list[tuple[int, int, int]] = []   # length, strides of source and destination; from the last one
    for length, *strides in reversed(list(zip(source.shape[1:], source.strides[1:], destination.strides[1:], strict=True))):
        if length == 1 and dimensions:
            continue
        if dimensions:
            inner, *apart = dimensions[-1]
            if [inner * stride for stride in apart] == strides:
                dimensions[-1] = (inner * length, apart[0], apart[1])
                continue
        dimensions.append((length, strides[0], strides[1]))
    if not dimensions or len(dimensions) > _DIMENSIONS or dimensions[0][1:] != (1, 1):
        return None
    dimensions += [(1, 0, 0)] * (_DIMENSIONS - len(dimensions))
    (num_bytes, _, _), (pieces, from_piece, to_piece), (rows, from_row, to_row) = dimensions
    return PieceCopier(copy_runs, source, destination, (rows, pieces, num_bytes), (from_row, from_piece), (to_row, to_piece))

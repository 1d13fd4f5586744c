"""``RowCopier``: copies many rows between two arrays of the host in few calls (design: transfer rules).

A copy that releases the GIL has to get it back after each call, which costs up to a switch interval (5 ms) beside a busy
Python thread. So the aim is few calls: one for rows that arrive side by side, wherever they come from (``take``), one for rows
that lie side by side, wherever they go (``put``). Both end in one ``memmove`` for each row. Index assignment (``a[i] = b[j]``)
gathers into a temporary array first and is never used. ``put`` keeps the GIL when it is given few rows, however long they are, so a
few long rows are given to it as many shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Call = Callable[[], object]
Rows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.intp]

CALL_BYTES: Final = 64 << 20
"""The most that one call moves: large enough that handing the GIL back and forth does not count, small enough that a stream
which is closed, or a slot that is waited for, does not wait for a gigabyte."""

_PUT_KEEPS_GIL: Final = 500
"""Up to so many items ``put`` does not release the GIL (numpy's NPY_BEGIN_THREADS_THRESHOLDED). Every other Python thread, an engine's
too, would stand still while it copies a hundred megabytes."""

_WORTH_RELEASING: Final = 256 << 10
"""Bytes whose copy takes as long as it may take to get the GIL back (tens of microseconds): a smaller call may keep it."""

_MAX_ITEM_BYTES: Final = (1 << 31) - 1  # of a numpy type


class RowCopier:
    """Copies rows between two arrays of the host, uint8 ``[rows, bytes]``, in the calling thread."""

    def __init__(self, source: Rows, destination: Rows) -> None:
        num_bytes = destination.shape[1]
        self._source = source
        self._destination = destination
        self._call_rows = max(1, CALL_BYTES // num_bytes)
        # take and put cope with strides and with overlap by an extra copy of everything.
        self._can_scatter = bool(source.flags.c_contiguous and destination.flags.c_contiguous and num_bytes <= _MAX_ITEM_BYTES
                                 and not np.may_share_memory(source, destination))
        if self._can_scatter:
            item = np.dtype((np.void, num_bytes))  # one row: both functions then move whole rows
            self._source_items = source.reshape(-1).view(item)
            self._destination_items = destination.reshape(-1).view(item)

    def copy(self, sources: Numbers, destinations: Numbers) -> None:
        """Copy row ``sources[i]`` to row ``destinations[i]``, for each i; arguments as of :meth:`plan`."""
        for call in self.plan(sources, destinations):
            call()

    def plan(self, sources: Numbers, destinations: Numbers) -> list[Call]:
        """The calls that copy these rows. Each keeps its memory alive and can be made in any thread, in any order.

        Args:
            sources, destinations: intp ``[n]``, n at least 1, inside their arrays. No destination occurs twice.
        """
        if len(sources) == 1:
            return [partial(np.copyto, self._destination[destinations[0]], self._source[sources[0]])]
        if not bool((destinations[1:] > destinations[:-1]).all()):
            order = np.argsort(destinations)
            sources, destinations = sources[order], destinations[order]
        cuts = _cuts(destinations)
        if not self._can_scatter:
            return self._runs(sources, destinations, np.union1d(cuts, _cuts(sources)))
        if len(cuts) > 0:
            order = np.argsort(sources, kind="stable")
            by_source = sources[order]
            source_cuts = _cuts(by_source)
            if len(source_cuts) < len(cuts):
                return self._scatters(by_source, destinations[order], source_cuts)
        return self._gathers(sources, destinations, cuts)

    def _gathers(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbouring destinations.

        Also where the sources are neighbours as well: beyond about the last-level cache's size one memmove goes past the caches, which
        was slower than row by row. mode="clip": with the default, the result is buffered and copied once more.
        """
        return [partial(self._source_items.take, sources[start:end], None, self._destination_items[first:first + end - start], "clip")
                for start, end, first in self._stretches(destinations, cuts)]

    def _scatters(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbouring sources."""
        calls: list[Call] = []
        for start, end, first in self._stretches(sources, cuts):
            parts = _parts(end - start, self._destination.shape[1])
            places = destinations[start:end]
            if parts == 1:
                calls.append(partial(self._destination_items.put, places, self._source_items[first:first + end - start], "clip"))
                continue
            item = np.dtype((np.void, self._destination.shape[1] // parts))
            places = (places[:, None] * parts + np.arange(parts)).ravel()
            rows = self._source[first:first + end - start]
            calls.append(partial(self._destination.reshape(-1).view(item).put, places, rows.reshape(-1).view(item), "clip"))
        return calls

    def _runs(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbours on both sides."""
        return [partial(np.copyto, self._destination[first:first + end - start],
                        self._source[sources[start]:sources[start] + end - start])
                for start, end, first in self._stretches(destinations, cuts)]

    def _stretches(self, numbers: Numbers, cuts: Numbers) -> list[tuple[int, int, int]]:
        """(start, end, number at the start) of the stretches between the cuts, none longer than one call may be."""
        starts = [0, *cuts.tolist()]
        ends = [*starts[1:], len(numbers)]
        longest = self._call_rows
        return [(first, min(first + longest, end), int(numbers[first])) for start, end in zip(starts, ends, strict=True)
                for first in range(start, end, longest)]


def strided_copy(destination: Rows, source: Rows) -> Call:
    """The call that copies one array of any strides to another of its shape; they have no byte in common.

    Blocks of one layer-first pool lie between one another. numpy takes that for an overlap and copies twice; torch does not look.
    """
    if np.may_share_memory(destination, source):
        return partial(torch.from_numpy(destination).copy_, torch.from_numpy(source))
    return partial(np.copyto, destination, source)


def _parts(rows: int, row_bytes: int) -> int:
    """Into how many parts to cut each of so many rows, so that ``put`` releases the GIL: a power of two, 1 for whole rows."""
    if rows > _PUT_KEEPS_GIL or rows * row_bytes < _WORTH_RELEASING:
        return 1
    parts = 1
    while rows * parts <= _PUT_KEEPS_GIL and row_bytes % (2 * parts) == 0:
        parts *= 2
    return parts


def _cuts(numbers: Numbers) -> Numbers:
    """Positions of the numbers that do not follow the one before them."""
    return np.flatnonzero(np.diff(numbers) != 1) + 1

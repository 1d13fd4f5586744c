"""``RowCopier``: copies many rows between two arrays of the host in few calls (design: transfer rules).

A copy that releases the GIL has to get it back after each call, which costs up to a switch interval (5 ms) beside a busy
Python thread. So the aim is few calls: one for rows that arrive side by side, wherever they come from (``take``), one for rows
that lie side by side, wherever they go (``put``). Both end in one ``memmove`` for each item. Index assignment (``a[i] = b[j]``)
gathers into a temporary array first and is never used. A long row is given to them as several items: long ones are moved more slowly,
and ``put`` keeps the GIL when it is given few.
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

_ITEM_BYTES: Final = 256 << 10
"""What one ``memmove`` should move at most. libc moves so much by a single instruction, which writes past the second-level cache when it
is told to move as much as that holds (1 MiB, where it was seen): the same bytes took an eighth longer then."""

_LEAST_HALVED: Final = 2 << 20
"""Where only a call for each stretch will do, rows of this length are worth two: each moves a megabyte, and both gain that eighth."""

_PUT_KEEPS_GIL: Final = 500
"""Up to so many items ``put`` does not release the GIL (numpy's NPY_BEGIN_THREADS_THRESHOLDED). Every other Python thread, an engine's
too, would stand still while it copies a hundred megabytes."""

_WORTH_RELEASING: Final = 256 << 10
"""Bytes whose copy takes as long as it may take to get the GIL back (tens of microseconds): a smaller call may keep it."""

_MAX_ITEM_BYTES: Final = (1 << 31) - 1  # of a numpy type

_NO_CUTS: Final[Numbers] = np.empty(0, np.intp)


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
            self._parts = _parts(1, num_bytes, 0)
            self._source_items, self._destination_items = _items(source, self._parts), _items(destination, self._parts)
        self._halves = halves(destination, source)

    def copy(self, sources: Numbers, destinations: Numbers) -> None:
        """Copy row ``sources[i]`` to row ``destinations[i]``, for each i; arguments as of :meth:`plan`."""
        for call in self.plan(sources, destinations):
            call()

    def plan(self, sources: Numbers, destinations: Numbers) -> list[Call]:
        """The calls that copy these rows. Each keeps its memory alive and can be made in any thread, in any order.

        Args:
            sources, destinations: intp ``[n]``, n at least 1, inside their arrays. No destination occurs twice.
        """
        if len(sources) == 1 and not (self._can_scatter and self._destination.shape[1] > _ITEM_BYTES):
            return self._runs(sources, destinations, _NO_CUTS)
        if not bool((destinations[1:] > destinations[:-1]).all()):
            order = np.argsort(destinations)
            sources, destinations = sources[order], destinations[order]
        if not self._can_scatter:
            return self._runs(sources, destinations, _cuts(destinations, sources))
        cuts = _cuts(destinations)
        if len(cuts) > 0:
            order = np.argsort(sources, kind="stable")
            by_source = sources[order]
            source_cuts = _cuts(by_source)
            if len(source_cuts) < len(cuts):
                return self._scatters(by_source, destinations[order], source_cuts)
        return self._gathers(sources, destinations, cuts)

    def _gathers(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbouring destinations, also where the sources are neighbours as well: one ``memmove`` for all
        of them would be a long one.

        mode="clip": with the default, the result is buffered and copied once more.
        """
        parts = self._parts
        places = _places(sources, parts)
        return [partial(self._source_items.take, places[start * parts:end * parts], None,
                        self._destination_items[first * parts:(first + end - start) * parts], "clip")
                for start, end, first in self._stretches(destinations, cuts)]

    def _scatters(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbouring sources. Rows that are alone are gathered, which needs no short items."""
        row_bytes = self._destination.shape[1]
        calls: list[Call] = []
        alone: list[int] = []
        for start, end, first in self._stretches(sources, cuts):
            count = end - start
            if count == 1:
                alone.append(start)
                continue
            parts = _parts(count, row_bytes, _PUT_KEEPS_GIL if count * row_bytes >= _WORTH_RELEASING else 0)
            calls.append(partial(_items(self._destination, parts).put, _places(destinations[start:end], parts),
                                 _items(self._source[first:first + count], parts), "clip"))
        if alone:
            calls += self._gathers(sources[alone], destinations[alone], _cuts(destinations[alone]))
        return calls

    def _runs(self, sources: Numbers, destinations: Numbers, cuts: Numbers) -> list[Call]:
        """One call for each stretch of neighbours on both sides; two where rows are long."""
        starts = sources.tolist()
        return [partial(np.copyto, to_rows[first:first + end - start], from_rows[starts[start]:starts[start] + end - start])
                for start, end, first in self._stretches(destinations, cuts) for to_rows, from_rows in self._halves]

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


def halves(destination: Rows, source: Rows) -> list[tuple[Rows, Rows]]:
    """Both sides of a copy of whole rows, in halves where rows are long: numpy makes one ``memmove`` of what lies side by side, and so each
    half has every other item. Any strides between rows."""
    if destination.shape[1] < _LEAST_HALVED:
        return [(destination, source)]
    parts = _parts(1, destination.shape[1], 0)
    to_items, from_items = [rows.reshape(len(rows), parts, -1) for rows in (destination, source)]
    return [(to_items[:, half::2], from_items[:, half::2]) for half in (0, 1)]


def _parts(rows: int, row_bytes: int, least: int) -> int:
    """Into how many items to cut each of so many rows: a power of two; then none is too long, and there are more than ``least``."""
    parts = 1
    while (row_bytes > parts * _ITEM_BYTES or rows * parts <= least) and row_bytes % (2 * parts) == 0:
        parts *= 2
    return parts


def _items(rows: Rows, parts: int) -> npt.NDArray[np.void]:
    """Contiguous rows as the items that they are cut into: ``take`` and ``put`` move each of them whole."""
    return rows.reshape(-1).view(np.dtype((np.void, rows.shape[1] // parts)))


def _places(numbers: Numbers, parts: int) -> Numbers:
    """Where the items of these rows are."""
    return numbers if parts == 1 else (numbers[:, None] * parts + np.arange(parts)).ravel()


def _cuts(*columns: Numbers) -> Numbers:
    """Positions of the numbers that do not follow the one before them, in one of the columns at least."""
    follows = [numbers[1:] - numbers[:-1] == 1 for numbers in columns]
    return np.flatnonzero(~np.logical_and.reduce(follows)) + 1

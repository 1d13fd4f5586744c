"""``CudaRowCopier``: one section of blocks copied on CUDA, by few calls (design: transfer rules, coalescing; copy engine)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import TransferError
from kvtier.io.copy_paths import CopyPath, Direction
from kvtier.io.copy_runs import MAX_PITCH, Run, coalesce, rows_per_run
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_batch import Addresses
from kvtier.io.cuda_memory import CudaMemory
from kvtier.io.layer_pieces import Layers
from kvtier.kernels.row_moves import RowPlaces

Pairs = Sequence[tuple[int, int]]


class CudaRowCopier:
    """Copies rows, or some layers of them, by the path that was measured to be fastest for units of their size.

    A unit is what lies together on both sides. One alone, or one run of neighbours, is a ``cudaMemcpyAsync``, a two-dimensional one where
    there are gaps: padding between slots, the layers of a block that a piece leaves out, the other blocks' layers of a layer-first pool.
    The first tokens of a block are a two-dimensional copy as well: one line for each layer, field and head. A tensor operation would do
    for copies within the device, but between host and device it waits on the host.

    Args:
        tools: of the device.
        source, destination: where from and where to.
        width: bytes to copy of each slot.
        num_layers: layers in them.
    """

    def __init__(self, tools: CopyTools, source: CudaMemory, destination: CudaMemory, width: int, num_layers: int) -> None:
        self._tools = tools
        self._runtime = tools.runtime
        self.source = source
        self.destination = destination
        self._num_layers = num_layers
        self._layer_bytes = width // num_layers
        self._max_rows = rows_per_run(max(source.stride, destination.stride))
        self._is_together = source.layer_stride == destination.layer_stride == self._layer_bytes  # a block's layers, on both sides
        self._direction = _direction(source, destination)

    def copy(self, pairs: Pairs, stream: int, layers: Layers | None = None) -> None:
        """Enqueue copies of whole rows, or of some of their layers. IndexError is not looked for here."""
        first, end = (0, self._num_layers) if layers is None else layers
        runs = coalesce(pairs, self._max_rows, self.source.piece, self.destination.piece)
        path = CopyPath.RUNS
        if len(runs) > 1:
            width = self._width(first, end)
            path = self._tools.path(self._direction, width * len(pairs) // len(runs) if self._is_dense(width) else width)
        if path is not CopyPath.RUNS:
            try:
                self._copy_by(path, pairs, runs, first, end, stream)
                return
            except (TransferError, RuntimeError) as error:  # the device itself may be in error: then the next call says so
                self._tools.give_up(path, error)
        self._copy_runs(runs, first, end, stream)

    def copy_by(self, path: CopyPath, pairs: Pairs, stream: int) -> None:
        """Enqueue copies of whole rows by this path, whatever is fastest."""
        runs = coalesce(pairs, self._max_rows, self.source.piece, self.destination.piece)
        self._copy_by(path, pairs, runs, 0, self._num_layers, stream)

    def copy_first(self, pairs: Pairs, pitch: int, num_bytes: int, stream: int) -> None:
        """Enqueue copies of the first ``num_bytes`` of every ``pitch`` bytes of a row."""
        together = self._num_layers if self._is_together else 1
        for from_slot, to_slot in pairs:
            for layer in range(0, self._num_layers, together):
                self._runtime.memcpy2DAsync(_place(self.destination, to_slot, layer), pitch, _place(self.source, from_slot, layer), pitch,
                                            num_bytes, together * self._layer_bytes // pitch, self._runtime.memcpyDefault, stream)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _width(self, first: int, end: int) -> int:
        """Bytes of a block that lie together on both sides."""
        return (end - first) * self._layer_bytes if self._is_together else self._layer_bytes

    def _is_dense(self, width: int) -> bool:
        """Whether neighbouring slots leave no gap between such units."""
        return self.source.stride == self.destination.stride == width

    def _copy_by(self, path: CopyPath, pairs: Pairs, runs: list[Run], first: int, end: int, stream: int) -> None:
        if path is CopyPath.BATCH and self._tools.batch is not None:
            self._tools.batch.copy(*self._units(pairs, runs, first, end), stream)
        elif path is CopyPath.KERNEL and self._tools.kernel is not None:
            self._tools.kernel.copy(_places(self.destination, first), _places(self.source, first), pairs,
                                    1 if self._is_together else end - first, self._width(first, end), stream)
        else:
            self._copy_runs(runs, first, end, stream)

    def _units(self, pairs: Pairs, runs: list[Run], first: int, end: int) -> tuple[Addresses, Addresses, Addresses]:
        """Destination, source and bytes of each unit."""
        width = self._width(first, end)
        layers = np.arange(first, first + 1 if self._is_together else end, dtype=np.uint64)
        if self._is_dense(width):
            slots = np.array([(run.source, run.destination) for run in runs], np.uint64)
            sizes = np.array([run.length * width for run in runs], np.uint64)
        else:
            slots = np.array(pairs, np.uint64)
            sizes = np.full(len(pairs), width, np.uint64)
        return (_addresses(self.destination, slots[:, 1], layers), _addresses(self.source, slots[:, 0], layers),
                np.repeat(sizes, len(layers)))

    def _copy_runs(self, runs: list[Run], first: int, end: int, stream: int) -> None:
        for run in runs:
            if self._is_together:
                self._copy_lines(run, first, end - first, stream)
            elif run.length < end - first and max(self.source.layer_stride, self.destination.layer_stride) <= MAX_PITCH:
                self._copy_layers(run, first, end, stream)
            else:
                for layer in range(first, end):
                    self._copy_lines(run, layer, 1, stream)

    def _copy_lines(self, run: Run, layer: int, num_layers: int, stream: int) -> None:
        """Layers that lie together, a line for each block of the run."""
        runtime, source, destination = self._runtime, self.source, self.destination
        from_address, to_address = _place(source, run.source, layer), _place(destination, run.destination, layer)
        width = num_layers * self._layer_bytes
        if run.length == 1 or self._is_dense(width):
            runtime.memcpyAsync(to_address, from_address, run.length * width, runtime.memcpyDefault, stream)
        else:
            runtime.memcpy2DAsync(to_address, destination.stride, from_address, source.stride, width, run.length, runtime.memcpyDefault,
                                  stream)

    def _copy_layers(self, run: Run, first: int, end: int, stream: int) -> None:
        """Layers that lie apart, a line for each of them."""
        runtime, source, destination = self._runtime, self.source, self.destination
        for number in range(run.length):
            runtime.memcpy2DAsync(_place(destination, run.destination + number, first), destination.layer_stride,
                                  _place(source, run.source + number, first), source.layer_stride,
                                  self._layer_bytes, end - first, runtime.memcpyDefault, stream)


def _place(memory: CudaMemory, slot: int, layer: int) -> int:
    return memory.address + slot * memory.stride + layer * memory.layer_stride


def _places(memory: CudaMemory, first: int) -> RowPlaces:
    return RowPlaces(_place(memory, 0, first), memory.stride, memory.layer_stride)


def _addresses(memory: CudaMemory, slots: Addresses, layers: Addresses) -> Addresses:
    """Of these layers of these slots, slot by slot."""
    places: Addresses = slots[:, None] * np.uint64(memory.stride) + layers * np.uint64(memory.layer_stride) + np.uint64(memory.address)
    return places.ravel()


def _direction(source: CudaMemory, destination: CudaMemory) -> Direction | None:
    if source.on_host:
        return None if destination.on_host else Direction.UP
    return Direction.DOWN if destination.on_host else Direction.WITHIN

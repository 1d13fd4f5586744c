"""``CudaRowCopier``: one section of blocks copied on CUDA, by few calls of the runtime (design: transfer rules, coalescing)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.io.copy_runs import Run, coalesce, rows_per_run
from kvtier.io.cuda_memory import CudaMemory
from kvtier.io.cuda_stream import CudaModule
from kvtier.io.layer_pieces import Layers

MAX_PITCH: Final = (1 << 31) - 1
"""The largest distance between two lines of a two-dimensional copy (``cudaDeviceProp::memPitch`` on every device so far)."""


class CudaRowCopier:
    """One ``cudaMemcpyAsync`` for each run of neighbouring slots; a two-dimensional one where there are gaps.

    Gaps are padding between slots, the layers of a block that a piece leaves out, and the other blocks' layers of a layer-first pool.
    The first tokens of a block are a two-dimensional copy as well: one line for each layer, field and head. A tensor operation would do
    for copies within the device, but between host and device it waits on the host.

    Args:
        cuda: ``cupy.cuda``.
        source, destination: where from and where to.
        width: bytes to copy of each slot.
        num_layers: layers in them.
    """

    def __init__(self, cuda: CudaModule, source: CudaMemory, destination: CudaMemory, width: int, num_layers: int) -> None:
        self._runtime = cuda.runtime
        self.source = source
        self.destination = destination
        self._num_layers = num_layers
        self._layer_bytes = width // num_layers
        self._max_rows = rows_per_run(max(source.stride, destination.stride))
        self._is_together = source.layer_stride == destination.layer_stride == self._layer_bytes  # a block's layers, on both sides

    def copy(self, pairs: Sequence[tuple[int, int]], stream: int, layers: Layers | None = None) -> None:
        """Enqueue copies of whole rows, or of some of their layers."""
        first, end = (0, self._num_layers) if layers is None else layers
        for run in coalesce(pairs, self._max_rows, self.source.piece, self.destination.piece):
            if self._is_together:
                self._copy_lines(run, first, end - first, stream)
            elif run.length < end - first and max(self.source.layer_stride, self.destination.layer_stride) <= MAX_PITCH:
                self._copy_layers(run, first, end, stream)
            else:
                for layer in range(first, end):
                    self._copy_lines(run, layer, 1, stream)

    def copy_first(self, pairs: Sequence[tuple[int, int]], pitch: int, num_bytes: int, stream: int) -> None:
        """Enqueue copies of the first ``num_bytes`` of every ``pitch`` bytes of a row."""
        together = self._num_layers if self._is_together else 1
        for from_slot, to_slot in pairs:
            for layer in range(0, self._num_layers, together):
                self._runtime.memcpy2DAsync(_place(self.destination, to_slot, layer), pitch, _place(self.source, from_slot, layer), pitch,
                                            num_bytes, together * self._layer_bytes // pitch, self._runtime.memcpyDefault, stream)

    def _copy_lines(self, run: Run, layer: int, num_layers: int, stream: int) -> None:
        """Layers that lie together, a line for each block of the run."""
        runtime, source, destination = self._runtime, self.source, self.destination
        from_address, to_address = _place(source, run.source, layer), _place(destination, run.destination, layer)
        width = num_layers * self._layer_bytes
        if run.length == 1 or source.stride == destination.stride == width:
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

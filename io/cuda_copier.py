"""``CudaCopier``: block copies from, to and within device memory, enqueued on a CUDA stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.io.copy_runs import check_slots, coalesce, rows_per_run
from kvtier.io.cuda_stream import CudaModule, current_handle
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.primary import PrimaryPool


@dataclass(frozen=True)
class CudaMemory:
    """One end of a copy.

    Attributes:
        address: of slot 0, as the device sees it (host memory is registered and has the same address there).
        stride: bytes from slot to slot.
        num_slots: slots.
        piece: a copy must not cross a multiple of this many slots; 0 where there is no such limit.
    """

    address: int
    stride: int
    num_slots: int
    piece: int

    @classmethod
    def of(cls, memory: PrimaryPool | HostArena) -> CudaMemory:
        """Describe a pool."""
        if isinstance(memory, HostArena):
            return cls(memory.rows.ctypes.data, memory.stride, memory.num_slots, memory.slots_per_piece)
        return cls(memory.rows.data_ptr(), memory.group.block_bytes, memory.num_blocks, 0)


class CudaCopier:
    """One ``cudaMemcpyAsync`` for each run of neighbouring slots; a two-dimensional one where the strides have gaps.

    The first tokens of a block are a two-dimensional copy as well: one line for each layer, field and head. A tensor
    operation would do for copies within the device, but between host and device it waits on the host.
    """

    def __init__(self, cuda: CudaModule, source: CudaMemory, destination: CudaMemory, group: LayerGroup) -> None:
        self._runtime = cuda.runtime
        self._source = source
        self._destination = destination
        self._block_bytes = group.block_bytes
        self._tokens_per_block = group.tokens_per_block
        self._head_bytes = group.page_bytes // group.spec.num_kv_heads
        self._max_rows = rows_per_run(max(source.stride, destination.stride))
        self._is_dense = source.stride == destination.stride == group.block_bytes

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        """Enqueue the copies on the stream whose work this is called from."""
        if not pairs:
            return
        check_slots(pairs, self._source.num_slots, self._destination.num_slots)
        stream = current_handle()
        if 0 < num_tokens < self._tokens_per_block:
            self._copy_first_tokens(pairs, num_tokens, stream)
        else:
            self._copy_blocks(pairs, stream)

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]], stream: int) -> None:
        runtime, source, destination, width = self._runtime, self._source, self._destination, self._block_bytes
        for run in coalesce(pairs, self._max_rows, source.piece, destination.piece):
            from_address = source.address + run.source * source.stride
            to_address = destination.address + run.destination * destination.stride
            if self._is_dense or run.length == 1:
                runtime.memcpyAsync(to_address, from_address, run.length * width, runtime.memcpyDefault, stream)
            else:
                runtime.memcpy2DAsync(to_address, destination.stride, from_address, source.stride, width, run.length,
                                      runtime.memcpyDefault, stream)

    def _copy_first_tokens(self, pairs: Sequence[tuple[int, int]], num_tokens: int, stream: int) -> None:
        runtime, pitch = self._runtime, self._head_bytes
        width = pitch // self._tokens_per_block * num_tokens
        for from_slot, to_slot in pairs:
            runtime.memcpy2DAsync(self._destination.address + to_slot * self._destination.stride, pitch,
                                  self._source.address + from_slot * self._source.stride, pitch,
                                  width, self._block_bytes // pitch, runtime.memcpyDefault, stream)

"""``CudaCopier``: block copies from, to and within device memory, enqueued on a CUDA stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.io.copy_runs import check_slots, coalesce, rows_per_run
from kvtier.io.cuda_stream import CudaModule, current_handle
from kvtier.pools.block_sections import BlockSection
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.group_pools import BlockGroup
from kvtier.pools.host_arena import HostArena
from kvtier.pools.primary import PrimaryPool

Memory = PrimaryPool | HostArena | DeviceArena


@dataclass(frozen=True)
class CudaMemory:
    """One end of a copy: the blocks of a memory, or one section of them.

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
    def of_rows(cls, arena: HostArena) -> CudaMemory:
        """Whole slots of a host arena."""
        return cls(arena.address, arena.stride, arena.num_slots, arena.slots_per_piece)

    @classmethod
    def of_section(cls, memory: Memory, number: int, section: BlockSection) -> CudaMemory:
        """The section with this number in all slots of a memory."""
        if not isinstance(memory, PrimaryPool):
            return cls(memory.address + section.offset, memory.stride, memory.num_slots, memory.slots_per_piece)
        rows = memory.sections[number].rows
        return cls(rows.data_ptr(), section.num_bytes, memory.num_blocks, 0)


class CudaCopier:
    """Copies blocks of one group between two memories: section by section, or row by row where both ends are host memory."""

    def __init__(self, cuda: CudaModule, source: Memory, destination: Memory, group: BlockGroup) -> None:
        self._tokens_per_block = group.tokens_per_block
        self._sections = [(section, CudaRowCopier(cuda, CudaMemory.of_section(source, number, section),
                                                  CudaMemory.of_section(destination, number, section), section.num_bytes))
                          for number, section in enumerate(group.sections)]
        self._whole = [copier for _section, copier in self._sections]
        if isinstance(source, HostArena) and isinstance(destination, HostArena):
            self._whole = [CudaRowCopier(cuda, CudaMemory.of_rows(source), CudaMemory.of_rows(destination), group.block_bytes)]

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        """Enqueue the copies on the stream whose work this is called from."""
        if not pairs:
            return
        self._whole[0].check(pairs)
        stream = current_handle()
        if not 0 < num_tokens < self._tokens_per_block:
            for copier in self._whole:
                copier.copy(pairs, stream)
            return
        for section, copier in self._sections:
            if section.is_by_token:
                copier.copy_first(pairs, section.head_bytes, section.head_bytes // self._tokens_per_block * num_tokens, stream)
            else:
                copier.copy(pairs, stream)


class CudaRowCopier:
    """One ``cudaMemcpyAsync`` for each run of neighbouring slots; a two-dimensional one where the strides have gaps.

    The first tokens of a block are a two-dimensional copy as well: one line for each layer, field and head. A tensor
    operation would do for copies within the device, but between host and device it waits on the host.

    Args:
        cuda: ``cupy.cuda``.
        source, destination: where from and where to.
        width: bytes to copy of each slot.
    """

    def __init__(self, cuda: CudaModule, source: CudaMemory, destination: CudaMemory, width: int) -> None:
        self._runtime = cuda.runtime
        self._source = source
        self._destination = destination
        self._width = width
        self._max_rows = rows_per_run(max(source.stride, destination.stride))
        self._is_dense = source.stride == destination.stride == width

    def check(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise IndexError for a slot outside its memory."""
        check_slots(pairs, self._source.num_slots, self._destination.num_slots)

    def copy(self, pairs: Sequence[tuple[int, int]], stream: int) -> None:
        """Enqueue copies of whole rows."""
        runtime, source, destination, width = self._runtime, self._source, self._destination, self._width
        for run in coalesce(pairs, self._max_rows, source.piece, destination.piece):
            from_address = source.address + run.source * source.stride
            to_address = destination.address + run.destination * destination.stride
            if self._is_dense or run.length == 1:
                runtime.memcpyAsync(to_address, from_address, run.length * width, runtime.memcpyDefault, stream)
            else:
                runtime.memcpy2DAsync(to_address, destination.stride, from_address, source.stride, width, run.length,
                                      runtime.memcpyDefault, stream)

    def copy_first(self, pairs: Sequence[tuple[int, int]], pitch: int, num_bytes: int, stream: int) -> None:
        """Enqueue copies of the first ``num_bytes`` of every ``pitch`` bytes of a row."""
        runtime = self._runtime
        for from_slot, to_slot in pairs:
            runtime.memcpy2DAsync(self._destination.address + to_slot * self._destination.stride, pitch,
                                  self._source.address + from_slot * self._source.stride, pitch,
                                  num_bytes, self._width // pitch, runtime.memcpyDefault, stream)

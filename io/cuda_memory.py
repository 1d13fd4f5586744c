"""``CudaMemory``: where the blocks of a memory are, as a copy on CUDA has to know it. Addresses and strides only."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.pools.block_sections import BlockSection
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.host_arena import HostArena
from kvtier.pools.primary import PrimaryPool

Memory = PrimaryPool | HostArena | DeviceArena


@dataclass(frozen=True)
class CudaMemory:
    """One end of a copy: the blocks of a memory, or one section of them. A byte of layer l of slot s is at
    ``address + s * stride + l * layer_stride + ...``.

    Attributes:
        address: of slot 0, as the device sees it (host memory is registered and has the same address there).
        stride: bytes from slot to slot.
        layer_stride: bytes from layer to layer; a layer's own size where a block's layers lie together.
        num_slots: slots.
        piece: a copy must not cross a multiple of this many slots; 0 where there is no such limit.
        on_host: whether it is the host's memory.
    """

    address: int
    stride: int
    layer_stride: int
    num_slots: int
    piece: int
    on_host: bool

    @classmethod
    def of_rows(cls, arena: HostArena) -> CudaMemory:
        """Whole slots of a host arena, taken for one layer."""
        return cls(arena.address, arena.stride, arena.block_bytes, arena.num_slots, arena.slots_per_piece, True)

    @classmethod
    def of_section(cls, memory: Memory, number: int, section: BlockSection) -> CudaMemory:
        """The section with this number in all slots of a memory."""
        layer_bytes = section.num_bytes // section.shape[0]
        if not isinstance(memory, PrimaryPool):
            return cls(memory.address + section.offset, memory.stride, layer_bytes, memory.num_slots, memory.slots_per_piece,
                       isinstance(memory, HostArena))
        address = memory.sections[number].rows.data_ptr()
        if memory.layer_first:
            return cls(address, layer_bytes, memory.num_blocks * layer_bytes, memory.num_blocks, 0, False)
        return cls(address, section.num_bytes, layer_bytes, memory.num_blocks, 0, False)

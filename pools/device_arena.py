"""``DeviceArena``: slots of device memory laid out like those of a host arena, for blocks on their way to and from files.

Its memory comes from ``cudaMalloc`` itself and not from torch's allocator: cuFile registers the whole allocation that a
buffer lies in, which would otherwise be memory of others too.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvtier.errors import ConfigError

ALIGNMENT: Final = 4096


class DeviceArena:
    """Memory for ``num_slots`` blocks on a CUDA device, each slot starting on a 4096-byte boundary.

    Attributes:
        whole: uint8 ``[num_slots * stride]``.
        rows: uint8 ``[num_slots, block_bytes]``, strided: the blocks without their padding.
        padded_rows: uint8 ``[num_slots, stride]``: what files are read into.
        stride: bytes from slot to slot, ``block_bytes`` rounded up to 4096.
        address: of slot 0.
        slots_per_piece: 0; a copy of neighbouring slots may have any length.

    Raises:
        ConfigError: the device has too little memory.
    """

    slots_per_piece = 0

    def __init__(self, num_slots: int, block_bytes: int, device: int) -> None:
        import cupy

        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        num_bytes = num_slots * self.stride
        try:
            with cupy.cuda.Device(device):
                memory: Any = cupy.cuda.Memory(num_bytes + ALIGNMENT)
                whole = cupy.ndarray((num_bytes + ALIGNMENT,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"GPUDirect staging: {num_slots} slots of {self.stride} bytes could not be allocated on cuda:{device} "
                              f"({error}); lower primary=... or set gds='off'") from error
        start = -whole.data.ptr % ALIGNMENT
        self.whole: torch.Tensor = torch.as_tensor(whole[start:start + num_bytes], device=f"cuda:{device}")
        self.whole.zero_()
        torch.cuda.synchronize(device)  # other streams use it next, and they do not wait for torch's
        self.address = self.whole.data_ptr()
        self.padded_rows = self.whole.view(num_slots, self.stride)
        self.rows = self.padded_rows[:, :block_bytes]

    def close(self) -> None:
        """Let go of the memory; it is freed once nobody else holds a view of it. May be called again."""
        self.whole = self.padded_rows = self.rows = torch.empty(0, dtype=torch.uint8)

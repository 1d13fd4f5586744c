"""``PrimaryPool``: one group's blocks in device memory, where the engine's attention reads them (design: levels).

Block-first: all layers of a block lie together, so a whole block is one contiguous row for a copy and one I/O for a
file, and a layer's pages are a strided view into it.
"""

from __future__ import annotations

from typing import Final

import torch

from kvtier.errors import ConfigError
from kvtier.pools.layout import LayerGroup

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8,
}
"""The torch dtype of each name in ``layout.DTYPE_BYTES``."""

ALIGNMENT: Final = 4096
"""Direct I/O and GPUDirect Storage want device addresses, offsets and lengths in multiples of this."""

_RECYCLED_BELOW: Final = 64 << 20


class PrimaryPool:
    """Device memory for ``num_blocks`` blocks of one group.

    Attributes:
        tensor: ``[blocks, layers, kv_factor, heads, tokens_per_block, head_dim]`` in the group's dtype, contiguous.
            The first block starts on a 4096-byte boundary.
        rows: uint8 ``[blocks, block_bytes]``, the same memory, one contiguous row per block.
        pages: ``[blocks * layers * kv_factor, heads, tokens_per_block, head_dim]``, the same memory. The page of (slot,
            layer position l, field f) is ``slot * layers * kv_factor + l * kv_factor + f``; field 0 is keys, 1 values.

    Args:
        group: layers that share this pool.
        num_blocks: at least 1.
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: ``num_blocks`` below 1, a layout this pool cannot hold yet, or the device has too little memory.
    """

    def __init__(self, group: LayerGroup, num_blocks: int, device: str) -> None:
        if num_blocks < 1:
            raise ConfigError(f"primary: {num_blocks} blocks for group {group.number}; it needs at least 1 block")
        spec = group.spec
        if spec.kind == "recurrent":
            raise ConfigError(f"group {group.number}: recurrent layers are not included yet; use attention layers")
        if spec.value_dim != spec.head_dim:
            raise ConfigError(f"group {group.number} ({spec.kind}): value_dim={spec.value_dim} differs from "
                              f"head_dim={spec.head_dim}, which is not included yet; they must be equal")
        self.group = group
        self.num_blocks = num_blocks
        num_bytes = num_blocks * group.block_bytes
        try:
            memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:  # RuntimeError covers torch.OutOfMemoryError
            raise ConfigError(f"primary: {num_blocks} blocks of group {group.number} want {num_bytes} bytes on "
                              f"{device}, which could not be allocated; lower primary=...") from error
        start = -memory.data_ptr() % ALIGNMENT
        memory = memory[start:start + num_bytes]
        # Recycled memory may hold NaN bit patterns, and 0 * NaN in a masked position is NaN. On the CPU a large one is
        # fresh zero pages from the kernel already, and zeroing it would commit all of it before the first request.
        if memory.is_cuda or num_bytes < _RECYCLED_BELOW:
            memory.zero_()
        if memory.is_cuda:
            # Zeroing, and whatever else used this memory before, is ordered on torch's stream. The streams that will copy
            # into the pool do not wait for that one: a block brought back early would be zeroed afterwards.
            torch.cuda.synchronize(memory.device)
        self.rows: torch.Tensor = memory.view(num_blocks, group.block_bytes)
        self.tensor: torch.Tensor = memory.view(TORCH_DTYPES[group.dtype]).view(num_blocks, *group.block_shape)
        self.pages: torch.Tensor = self.tensor.view(-1, *group.block_shape[2:])

    def layer_buffer(self, position: int) -> torch.Tensor:
        """Pages of the layer at ``position``: strided ``[blocks, kv_factor, heads, tokens_per_block, head_dim]``.

        Raises:
            ConfigError: the group has no layer at this position.
        """
        if not 0 <= position < self.group.num_layers:
            raise ConfigError(f"position={position}: group {self.group.number} has layer positions "
                              f"0..{self.group.num_layers - 1}")
        return self.tensor[:, position]

    def close(self) -> None:
        """Let go of the memory. It is freed once nobody else holds a view of it. May be called again."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self.rows = self.tensor = self.pages = nothing

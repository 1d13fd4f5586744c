"""``PrimaryPool``: one group's blocks in device memory, where the engine's attention reads them (design: levels).

Block-first: all layers of a block lie together, so a whole block is one contiguous row for a copy and one I/O for a
file, and a layer's pages are a strided view into it. What lies beside keys and values (block scales, the indexer's keys)
has a tensor of its own with the same slots: so the pages of each kind follow one another, as block tables presuppose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from kvtier.errors import ConfigError
from kvtier.pools.block_sections import INDEXER, KEYS, KV, SCALES, STATE, VALUES, BlockSection
from kvtier.pools.host_arena import anonymous_memory
from kvtier.pools.layout import LayerGroup

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8,
}
"""The torch dtype of each name in ``layout.DTYPE_BYTES``."""

ALIGNMENT: Final = 4096
"""Direct I/O and GPUDirect Storage want device addresses, offsets and lengths in multiples of this."""


@dataclass(frozen=True)
class SectionPool:
    """The memory of one section of all blocks.

    Attributes:
        section: what it holds.
        rows: uint8 ``[blocks, section bytes]``, contiguous, from a 4096-byte boundary on; in a layer-first pool uint8
            ``[layers * blocks, bytes of one layer]``, layer after layer.
        tensor: the same memory, ``[blocks, *section.shape]`` in the section's dtype; strided in a layer-first pool.
    """

    section: BlockSection
    rows: torch.Tensor
    tensor: torch.Tensor


class PrimaryPool:
    """Device memory for ``num_blocks`` blocks of one group, zero at first.

    Attributes:
        sections: one :class:`SectionPool` for each of ``group.sections``; without side data and with keys and values of one
            width there is exactly one.

    Args:
        group: layers that share this pool.
        num_blocks: at least 1.
        device: "cpu", "cuda" or "cuda:N".
        layer_first: keep each layer's pages together, as engines with pools of their own do; a layer's buffer is then contiguous, and
            there are no pages over all layers.

    Raises:
        ConfigError: ``num_blocks`` below 1, or the device has too little memory.
    """

    def __init__(self, group: LayerGroup, num_blocks: int, device: str, layer_first: bool = False) -> None:
        if num_blocks < 1:
            raise ConfigError(f"primary: {num_blocks} blocks for group {group.number}; it needs at least 1 block")
        self.group = group
        self.num_blocks = num_blocks
        self.layer_first = layer_first
        num_bytes = num_blocks * group.block_bytes
        starts = [0]
        for section in group.sections:
            starts.append(-(-(starts[-1] + num_blocks * section.num_bytes) // ALIGNMENT) * ALIGNMENT)
        try:
            memory = _new_memory(starts[-1] + ALIGNMENT, device)
        except (RuntimeError, MemoryError, OSError, OverflowError, ValueError) as error:  # RuntimeError covers torch.OutOfMemoryError
            raise ConfigError(f"primary: {num_blocks} blocks of group {group.number} want {num_bytes} bytes on "
                              f"{device}, which could not be allocated; lower primary=...") from error
        memory = memory[-memory.data_ptr() % ALIGNMENT:][:starts[-1]]
        if memory.is_cuda:
            # Recycled memory may hold NaN bit patterns, and 0 * NaN in a masked position is NaN. On the CPU these are fresh
            # zero pages from the kernel, and zeroing them would commit all of them before the first request.
            memory.zero_()
            # Zeroing, and whatever else used this memory before, is ordered on torch's stream. The streams that will copy
            # into the pool do not wait for that one: a block brought back early would be zeroed afterwards.
            torch.cuda.synchronize(memory.device)
        made: list[SectionPool] = []
        for section, start in zip(group.sections, starts, strict=False):
            part = memory[start:start + num_blocks * section.num_bytes]
            elements = part.view(TORCH_DTYPES[section.dtype])
            if layer_first:
                layers = section.shape[0]
                made.append(SectionPool(section, part.view(layers * num_blocks, section.num_bytes // layers),
                                        elements.view(layers, num_blocks, *section.shape[1:]).transpose(0, 1)))
            else:
                made.append(SectionPool(section, part.view(num_blocks, section.num_bytes), elements.view(num_blocks, *section.shape)))
        self.sections = tuple(made)
        self._by_name = {pool.section.name: pool for pool in made}
        self._is_closed = False

    # -- whole blocks --------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> torch.Tensor:
        """uint8 ``[blocks, block_bytes]``, one contiguous row per block; of a group whose blocks have one section only."""
        if self._is_closed:
            return _nothing()
        assert not self.layer_first, f"group {self.group.number}: the layers of a block do not lie together in a layer-first pool"
        assert len(self.sections) == 1, f"group {self.group.number}: a block has {len(self.sections)} sections, and no single row"
        return self.sections[0].rows

    def read_block(self, slot: int) -> torch.Tensor:
        """A copy of one block on the CPU, as a slot of the lower levels holds it: uint8 ``[block_bytes]``."""
        if self.layer_first:
            return torch.cat([self._layers_of(pool)[:, slot].cpu().reshape(-1) for pool in self.sections])
        return torch.cat([pool.rows[slot].cpu() for pool in self.sections])

    def write_block(self, slot: int, data: torch.Tensor) -> None:
        """Overwrite one block with what :meth:`read_block` gives: uint8 ``[block_bytes]``."""
        assert data.shape == (self.group.block_bytes,), f"{data.shape} for a block of {self.group.block_bytes} bytes"
        for pool in self.sections:
            section = pool.section
            part = data[section.offset:section.offset + section.num_bytes]
            if self.layer_first:
                self._layers_of(pool)[:, slot].copy_(part.view(section.shape[0], -1))
            else:
                pool.rows[slot].copy_(part)

    # -- what kernels read ---------------------------------------------------------------------------------------------

    @property
    def tensor(self) -> torch.Tensor:
        """``[blocks, layers, kv_factor, heads, tokens_per_block, head_dim]``, contiguous. Not of split groups and states."""
        return self._tensor_of(KV)

    @property
    def pages(self) -> torch.Tensor:
        """``[blocks * layers * kv_factor, heads, tokens_per_block, head_dim]``. Not of split groups and states.

        The page of (slot, layer position l, field f) is ``slot * layers * kv_factor + l * kv_factor + f``; field 0 is keys,
        1 values.
        """
        return self._pages_of(KV)

    @property
    def key_pages(self) -> torch.Tensor:
        """Pages that the first row of a block table names: :attr:`pages`, or those of the keys alone in a split group."""
        return self._pages_of(KEYS if self.group.is_split else KV)

    @property
    def value_pages(self) -> torch.Tensor:
        """Pages that the second row of a block table names. Of a split group ``[blocks * layers, heads, tokens, value_dim]``."""
        return self._pages_of(VALUES if self.group.is_split else KV)

    @property
    def scale_pages(self) -> torch.Tensor:
        """uint8 ``[blocks * layers * kv_factor, heads, tokens_per_block, scale_bytes]``, page for page beside :attr:`pages`."""
        return self._pages_of(SCALES)

    def layer_buffer(self, position: int) -> torch.Tensor:
        """Pages of the layer at ``position``: strided ``[blocks, kv_factor, heads, tokens_per_block, head_dim]``.

        Of a recurrent group uint8 ``[blocks, state_bytes]``: slot s is entry s of the block table.

        Raises:
            ConfigError: the group has no layer at this position, or keys and values of different widths.
        """
        self._check_position(position)
        if self.group.is_split:
            spec = self.group.spec
            raise ConfigError(f"group {self.group.number}: keys of {spec.head_dim} and values of {spec.value_dim} elements do not fit "
                              "one tensor; use key_buffer and value_buffer")
        return self._tensor_of(STATE if self.group.kind == "recurrent" else KV)[:, position]

    def key_buffer(self, position: int) -> torch.Tensor:
        """Keys of the layer at ``position``: strided ``[blocks, heads, tokens_per_block, head_dim]``. ConfigError as above."""
        self._check_position(position)
        return self._tensor_of(KEYS if self.group.is_split else KV)[:, position, 0]

    def value_buffer(self, position: int) -> torch.Tensor:
        """Values of the layer at ``position``: strided ``[blocks, heads, tokens_per_block, value_dim]``; MLA's are in its keys."""
        self._check_position(position)
        if self.group.is_split:
            return self._tensor_of(VALUES)[:, position, 0]
        return self._tensor_of(KV)[:, position, self.group.kv_factor - 1, ..., :self.group.spec.value_dim]

    def scale_buffer(self, position: int) -> torch.Tensor:
        """Block scales of the layer: uint8, strided ``[blocks, kv_factor, heads, tokens_per_block, scale_bytes]``."""
        self._check_position(position)
        return self._tensor_of(SCALES)[:, position]

    def indexer_buffer(self, position: int) -> torch.Tensor:
        """Indexer keys of the layer: uint8, strided ``[blocks, tokens_per_block, 1, indexer_bytes]``."""
        self._check_position(position)
        return self._tensor_of(INDEXER)[:, position].unsqueeze(2)

    def close(self) -> None:
        """Let go of the memory. It is freed once nobody else holds a view of it. May be called again."""
        self._is_closed = True
        self.sections = ()
        self._by_name = {}

    def _layers_of(self, pool: SectionPool) -> torch.Tensor:
        """uint8 ``[layers, blocks, bytes of one layer]`` of a layer-first pool."""
        return pool.rows.view(pool.section.shape[0], self.num_blocks, -1)

    def _pages_of(self, name: str) -> torch.Tensor:
        if self.layer_first:  # flattening would silently be a copy
            raise ConfigError(f"group {self.group.number}: a layer-first pool has no pages over all layers; use layer_buffer")
        return self._tensor_of(name).flatten(0, 2)

    def _tensor_of(self, name: str) -> torch.Tensor:
        if self._is_closed:
            return _nothing().view(0, 0, 0, 0, 0, 0)
        pool = self._by_name.get(name)
        if pool is None:
            have = ", ".join(self._by_name)
            raise ConfigError(f"group {self.group.number} ({self.group.describe()}): its blocks hold no {name!r}, only {have}")
        return pool.tensor

    def _check_position(self, position: int) -> None:
        if not 0 <= position < self.group.num_layers:
            raise ConfigError(f"position={position}: group {self.group.number} has layer positions "
                              f"0..{self.group.num_layers - 1}")


def _new_memory(num_bytes: int, device: str) -> torch.Tensor:
    """uint8 [num_bytes]. torch's own allocator on the CPU has no huge pages, which copies of whole blocks are slower without."""
    if torch.device(device).type == "cpu":
        return torch.frombuffer(anonymous_memory(num_bytes), dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)

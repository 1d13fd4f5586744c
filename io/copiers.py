"""Copiers, chosen from a (destination level, source level) table: whole and partial block copies between memories.

The table has no entry for a file. What comes from NVMe is read and verified into staging memory first, so the entries
with NVMe as their source copy from staging slots; DIRECT stands for staging memory that files are read into, and written from,
without the host. A block of several sections (block scales, say) is copied row by row
between host memories, and section by section where one end is the primary pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch

from kvtier.io.copy_runs import check_slots, num_runs
from kvtier.io.copy_tools import copy_tools
from kvtier.io.cuda_copier import CudaCopier
from kvtier.io.cuda_memory import Memory as AnyMemory
from kvtier.io.cuda_stream import load_cuda
from kvtier.io.layer_copier import BlockCopier, BlockRows, layers_copier, section_copier
from kvtier.io.layer_pieces import Layers, piece_ends, pieces_by_layer, pieces_on_host
from kvtier.io.piece_copier import PieceCopier, piece_copier
from kvtier.io.row_copier import Call, Numbers, RowCopier, Rows
from kvtier.io.token_copier import TokenCopier
from kvtier.pools.block_sections import BlockSection
from kvtier.pools.device_arena import DeviceArena
from kvtier.pools.group_pools import BlockGroup, GroupMemory
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import TORCH_DTYPES, PrimaryPool, SectionPool

Memory = PrimaryPool | HostArena

DIRECT: Final = 3
"""Beside the levels in the table of copiers: staging memory of the direct way between device and NVMe."""


class Copier(Protocol):
    """Copies blocks of one group from one level's memory to another's."""

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: Layers | None = None) -> None:
        """Copy blocks, or enqueue their copies on the stream whose work this is called from.

        Args:
            pairs: (source slot, destination slot). No destination slot occurs twice or is a source of the same call.
            num_tokens: 0 for whole blocks, n > 0 for the first n tokens of each head, layer and field. What cannot be cut
                at a token (block scales, indexer keys, recurrent state) goes whole all the same.
            layers: positions of the layers to copy, of whole blocks; None for all of them.

        Raises:
            IndexError: a slot outside its pool; nothing has been copied then.
        """

    def layer_ends(self, pairs: Sequence[tuple[int, int]], most: int) -> tuple[int, ...]:
        """Behind which layers to cut a copy of these blocks into pieces, at most so many: as many as are worth their calls.

        The last end is the number of layers. One end: they are copied whole.
        """


class HostCopier:
    """Copies blocks of one group between two memories of the host."""

    def __init__(self, source: Memory, destination: Memory, group: BlockGroup) -> None:
        self._num_sources = num_slots(source)
        self._num_destinations = num_slots(destination)
        self._tokens_per_block = group.tokens_per_block
        self._block_bytes = group.block_bytes
        self._num_layers = group.sections[0].shape[0]
        self._rows_of_sections = [(section_rows(source, section), section_rows(destination, section)) for section in group.sections]
        self._of_layers: dict[Layers, list[BlockCopier]] = {}
        by_section = [section_copier(from_rows, to_rows) for from_rows, to_rows in self._rows_of_sections]
        self._whole: list[BlockCopier] = [*by_section]
        self._is_of_rows = isinstance(source, HostArena) and isinstance(destination, HostArena)
        if isinstance(source, HostArena) and isinstance(destination, HostArena):
            # Between two arenas a block is one row, whatever it consists of.
            self._whole = [piece_copier(source.rows, destination.rows) or RowCopier(source.rows, destination.rows)]
        self._has_short_plans = all(isinstance(copier, PieceCopier) for copier in by_section)
        self._beside = [copier for copier, section in zip(by_section, group.sections, strict=True) if not section.is_by_token]
        self._by_token = [TokenCopier(_bytes_of(source, section), _bytes_of(destination, section))
                          for section in group.sections if section.is_by_token]

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: Layers | None = None) -> None:
        """Copy now, in the calling thread."""
        for call in self.plan(pairs, num_tokens, layers) if pairs else ():
            call()

    def plan(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: Layers | None = None) -> list[Call]:
        """The calls that ``copy`` makes with these arguments, for a thread that is to do nothing but copy. IndexError as of ``copy``."""
        sources, destinations = self._checked(pairs)
        copiers = self._whole if layers is None else self._copiers_of(layers)
        calls: list[Call] = []
        if 0 < num_tokens < self._tokens_per_block:
            calls += [call for section in self._by_token for call in section.plan(sources, destinations, num_tokens)]
            copiers = self._beside
        for copier in copiers:
            calls += copier.plan(sources, destinations)
        return calls

    def layer_ends(self, pairs: Sequence[tuple[int, int]], most: int) -> tuple[int, ...]:
        """See ``Copier.layer_ends``. A piece takes a call for each section; by library calls, for each run of neighbours, and of a
        layer-first pool, for each layer."""
        num_bytes = len(pairs) * self._block_bytes
        if self._is_of_rows or pieces_on_host(most, num_bytes, 1) == 1:
            return (self._num_layers,)
        calls = len(self._rows_of_sections)
        if self._has_short_plans:
            return piece_ends(self._num_layers, pieces_on_host(most, num_bytes, calls))
        calls *= num_runs(pairs)
        if any(source.layers or destination.layers for source, destination in self._rows_of_sections):
            return piece_ends(self._num_layers, pieces_by_layer(most, num_bytes, calls * self._num_layers))
        return piece_ends(self._num_layers, pieces_on_host(most, num_bytes, calls))

    def _copiers_of(self, layers: Layers) -> list[BlockCopier]:
        found = self._of_layers.get(layers)
        if found is None:
            found = [layers_copier(source, destination, self._num_layers, *layers) for source, destination in self._rows_of_sections]
            self._of_layers[layers] = found
        return found

    def _checked(self, pairs: Sequence[tuple[int, int]]) -> tuple[Numbers, Numbers]:
        slots = np.array(pairs, np.intp)
        sources, destinations = slots[:, 0], slots[:, 1]
        if slots.min() < 0 or sources.max() >= self._num_sources or destinations.max() >= self._num_destinations:
            check_slots(pairs, self._num_sources, self._num_destinations)  # names the first that is outside
        return sources, destinations


def open_copiers(pools: GroupMemory, staging: HostArena | None, device: str,
                 direct: HostArena | DeviceArena | None = None) -> dict[tuple[int, int], Copier]:
    """The copiers of one group by (destination level, source level).

    Args:
        pools: memory of the group.
        staging: where blocks read from NVMe arrive; None without an NVMe level.
        device: a device's name, as ``Device.name`` gives it.
        direct: staging memory of the direct way, on the device or (with device "cpu") the host; None without one.
    """
    memories: dict[int, AnyMemory] = {}
    if pools.primary is not None:
        memories[PRIMARY] = pools.primary
    if pools.secondary is not None:
        memories[SECONDARY] = pools.secondary
    pairs = [(destination, source) for destination in memories for source in memories]
    if staging is not None:
        pairs += [(destination, NVME) for destination in memories]
        memories[NVME] = staging
    if direct is not None:
        pairs += [(PRIMARY, DIRECT), (DIRECT, PRIMARY)]
        memories[DIRECT] = direct
    if device == "cpu":
        return {(destination, source): HostCopier(_of_host(memories[source]), _of_host(memories[destination]), pools.group)
                for destination, source in pairs}
    tools = copy_tools(load_cuda(), device)
    return {(destination, source): CudaCopier(tools, memories[source], memories[destination], pools.group)
            for destination, source in pairs}


def _of_host(memory: AnyMemory) -> Memory:
    assert not isinstance(memory, DeviceArena), "on the CPU there is no device memory"
    return memory


def num_slots(memory: Memory) -> int:
    """Blocks that a memory holds."""
    return memory.num_slots if isinstance(memory, HostArena) else memory.num_blocks


def typed_blocks(memory: Memory, group: LayerGroup) -> torch.Tensor:
    """The blocks of a memory as ``[slots, layers, kv_factor, heads, tokens_per_block, head_dim]``, the group's dtype."""
    return section_blocks(memory, group.sections[0])


def section_rows(memory: Memory, section: BlockSection) -> BlockRows:
    """One section of all blocks; the primary pool has to be on the CPU."""
    if isinstance(memory, HostArena):
        return BlockRows(memory.rows[:, section.offset:section.offset + section.num_bytes])
    return BlockRows(_of(memory, section).rows.numpy(), section.shape[0] if memory.layer_first else 0)


def section_blocks(memory: Memory, section: BlockSection) -> torch.Tensor:
    """One section of all blocks, ``[slots, *section.shape]`` in the section's dtype."""
    if isinstance(memory, PrimaryPool):
        return _of(memory, section).tensor
    rows = torch.from_numpy(section_rows(memory, section).rows).view(TORCH_DTYPES[section.dtype])
    return rows.view(memory.num_slots, *section.shape)


def _bytes_of(memory: Memory, section: BlockSection) -> Rows:
    """One section of all blocks as uint8 ``[slots, layers, fields, heads, tokens_per_block, bytes of a token]``, strided."""
    rows: Rows = section_blocks(memory, section).view(torch.uint8).numpy()
    return rows


def _of(memory: PrimaryPool, section: BlockSection) -> SectionPool:
    return next(pool for pool in memory.sections if pool.section == section)

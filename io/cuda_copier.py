"""``CudaCopier``: block copies from, to and within device memory, enqueued on a CUDA stream."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.io.copy_runs import check_slots
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_memory import CudaMemory, Memory
from kvtier.io.cuda_row_copier import CudaRowCopier
from kvtier.io.cuda_stream import current_handle
from kvtier.io.layer_pieces import Layers, piece_ends, pieces_on_device
from kvtier.pools.group_pools import BlockGroup
from kvtier.pools.host_arena import HostArena


class CudaCopier:
    """Copies blocks of one group between two memories: section by section, or row by row where both ends are host memory."""

    def __init__(self, tools: CopyTools, source: Memory, destination: Memory, group: BlockGroup) -> None:
        self._tokens_per_block = group.tokens_per_block
        self._block_bytes = group.block_bytes
        self._num_layers = group.sections[0].shape[0]
        self._is_of_rows = isinstance(source, HostArena) and isinstance(destination, HostArena)
        self._sections = [(section, CudaRowCopier(tools, CudaMemory.of_section(source, number, section),
                                                  CudaMemory.of_section(destination, number, section), section.num_bytes, section.shape[0]))
                          for number, section in enumerate(group.sections)]
        self._whole = [copier for _section, copier in self._sections]
        if isinstance(source, HostArena) and isinstance(destination, HostArena):
            self._whole = [CudaRowCopier(tools, CudaMemory.of_rows(source), CudaMemory.of_rows(destination), group.block_bytes, 1)]
        self._num_sources = self._whole[0].source.num_slots
        self._num_destinations = self._whole[0].destination.num_slots

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: Layers | None = None) -> None:
        """Enqueue the copies on the stream whose work this is called from."""
        if not pairs:
            return
        check_slots(pairs, self._num_sources, self._num_destinations)
        stream = current_handle()
        if not 0 < num_tokens < self._tokens_per_block:
            copiers = self._whole if layers is None else [copier for _section, copier in self._sections]
            for copier in copiers:
                copier.copy(pairs, stream, layers)
            return
        for section, copier in self._sections:
            if section.is_by_token:
                copier.copy_first(pairs, section.head_bytes, section.head_bytes // self._tokens_per_block * num_tokens, stream)
            else:
                copier.copy(pairs, stream)

    def layer_ends(self, pairs: Sequence[tuple[int, int]], most: int) -> tuple[int, ...]:
        """See ``Copier.layer_ends``."""
        pieces = 1 if self._is_of_rows else pieces_on_device(most, len(pairs) * self._block_bytes, self._block_bytes)
        return piece_ends(self._num_layers, pieces)

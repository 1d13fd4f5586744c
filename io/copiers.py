"""Copiers, chosen from a (destination level, source level) table: whole and partial block copies between memories.

The table has no entry for a file. What comes from NVMe is read and verified into staging memory first, so the entries
with NVMe as their source copy from staging slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.io.copy_runs import Run, check_slots, coalesce, rows_per_run
from kvtier.io.cuda_copier import CudaCopier, CudaMemory
from kvtier.io.cuda_stream import load_cuda
from kvtier.kernels.partial_copy import copy_partial_blocks
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.primary import TORCH_DTYPES, PrimaryPool

Rows = npt.NDArray[np.uint8]

GATHER_BYTES: Final = 64 << 20
"""The most that one gathering call moves: large enough that handing the GIL back and forth does not count, small enough
that a stream which is closed, or a slot that is waited for, does not wait for a gigabyte."""


class Copier(Protocol):
    """Copies blocks of one group from one level's memory to another's."""

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        """Copy blocks, or enqueue their copies on the stream whose work this is called from.

        Args:
            pairs: (source slot, destination slot). No destination slot occurs twice or is a source of the same call.
            num_tokens: 0 for whole blocks, n > 0 for the first n tokens of each head, layer and field.

        Raises:
            IndexError: a slot outside its pool; nothing has been copied then.
        """


class HostCopier:
    """Copies between two memories of the host.

    A copy that releases the GIL has to get it back after each call, which costs up to a switch interval (5 ms) beside a
    busy Python thread. So the aim is few calls: one for each run of neighbours, one for many scattered sources whose
    destinations are neighbours. Index assignment (``a[i] = b[j]``) holds the GIL and is never used.
    """

    def __init__(self, source: Rows, destination: Rows, source_blocks: torch.Tensor,
                 destination_blocks: torch.Tensor) -> None:
        self._source = source
        self._destination = destination
        self._source_blocks = source_blocks
        self._destination_blocks = destination_blocks
        self._max_rows = rows_per_run(destination.shape[1])
        self._gather_rows = max(1, GATHER_BYTES // destination.shape[1])
        # np.take reads a strided source, writes a strided result and copes with overlap by an extra copy of everything.
        self._can_gather = bool(source.flags.c_contiguous and destination.flags.c_contiguous
                                and not np.may_share_memory(source, destination))

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        """Copy now, in the calling thread."""
        if not pairs:
            return
        check_slots(pairs, len(self._source), len(self._destination))
        if num_tokens > 0:
            copy_partial_blocks(self._destination_blocks, self._source_blocks, pairs, num_tokens)
            return
        runs = coalesce(pairs, self._max_rows)
        position = 0
        while position < len(runs):
            end = self._end_of_gather(runs, position)
            if end - position > 1:
                self._gather(runs[position:end])
            else:
                source, destination, length = runs[position]
                np.copyto(self._destination[destination:destination + length], self._source[source:source + length])
            position = end

    def _end_of_gather(self, runs: list[Run], start: int) -> int:
        """The end of the runs from ``start`` on whose destinations follow one another and that one call may carry."""
        if not self._can_gather:
            return start + 1
        rows = runs[start].length
        end = start + 1
        while end < len(runs) and runs[end].destination == runs[end - 1].destination + runs[end - 1].length:
            rows += runs[end].length
            if rows > self._gather_rows:
                break
            end += 1
        return end

    def _gather(self, runs: list[Run]) -> None:
        sources = np.concatenate([np.arange(run.source, run.source + run.length) for run in runs])
        first = runs[0].destination
        # mode="clip": with the default, the result is buffered and copied once more. The slots have been checked.
        np.take(self._source, sources, axis=0, out=self._destination[first:first + len(sources)], mode="clip")


def open_copiers(pools: GroupPools, staging: HostArena | None, device: str) -> dict[tuple[int, int], Copier]:
    """The copiers of one group by (destination level, source level).

    Args:
        pools: memory of the group.
        staging: where blocks read from NVMe arrive; None without an NVMe level.
        device: a device's name, as ``Device.name`` gives it.
    """
    memories: dict[int, PrimaryPool | HostArena] = {PRIMARY: pools.primary}
    if pools.secondary is not None:
        memories[SECONDARY] = pools.secondary
    pairs = [(destination, source) for destination in memories for source in memories]
    if staging is not None:
        pairs += [(destination, NVME) for destination in memories]
        memories[NVME] = staging
    if device == "cpu":
        rows = {level: host_rows(memory) for level, memory in memories.items()}
        blocks = {level: typed_blocks(memory, pools.group) for level, memory in memories.items()}
        return {(destination, source): HostCopier(rows[source], rows[destination], blocks[source], blocks[destination])
                for destination, source in pairs}
    cuda = load_cuda()
    places = {level: CudaMemory.of(memory) for level, memory in memories.items()}
    return {(destination, source): CudaCopier(cuda, places[source], places[destination], pools.group)
            for destination, source in pairs}


def host_rows(memory: PrimaryPool | HostArena) -> Rows:
    """The blocks of a memory as uint8 ``[slots, block_bytes]``; the primary pool has to be on the CPU."""
    if isinstance(memory, HostArena):
        return memory.rows
    rows: Rows = memory.rows.numpy()
    return rows


def typed_blocks(memory: PrimaryPool | HostArena, group: LayerGroup) -> torch.Tensor:
    """The blocks of a memory as ``[slots, layers, kv_factor, heads, tokens_per_block, head_dim]``, the group's dtype."""
    if isinstance(memory, PrimaryPool):
        return memory.tensor
    rows = torch.from_numpy(memory.rows).view(TORCH_DTYPES[group.dtype])
    return rows.view(memory.num_slots, *group.block_shape)

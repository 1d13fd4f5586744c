"""``Routes``: the ways between the levels, and the memory that a block passes on a way through a file (design: transfer rules)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.errors import TransferError
from kvtier.io.copiers import DIRECT, Copier, open_copiers
from kvtier.io.copy_tools import copy_tools
from kvtier.io.cuda_stream import load_cuda
from kvtier.io.gds import GdsPath
from kvtier.pools.group_pools import GroupMemory
from kvtier.pools.pool_index import LEVEL_NAMES, NVME, PRIMARY, SECONDARY, PoolIndex, level_of
from kvtier.tiering.debug_path import DebugPath
from kvtier.tiering.direct_writes import WRITE_ROWS
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.staging import DirectStaging, Staging, StagingPool
from kvtier.tiering.transfer_graph import TransferNode, Work


class Routes:
    """Copiers and staging memory of all groups.

    Args:
        device: where the primary pools are.
        has_store: whether there is an NVMe level.
        staging_blocks, staging_bytes, gds, debug: as for ``TransferManager``.

    Attributes:
        staging: host memory between file and slot, by group; empty without an NVMe level.
        direct: device memory between file and slot, by group; empty without the direct way.
        direct_write_rows: the same, for writes.

    Raises:
        ConfigError: no memory for the staging blocks.
    """

    def __init__(self, device: str, pools: Sequence[GroupMemory], has_store: bool, staging_blocks: int, staging_bytes: int,
                 gds: GdsPath | None, debug: DebugPath | None) -> None:
        self._device = device
        self._has_store = has_store
        self._debug = debug
        direct = gds.groups if gds is not None else []
        self.direct = [DirectStaging(group, range(staging_blocks)) for group in direct]
        self.direct_write_rows = [DirectStaging(group, range(staging_blocks, staging_blocks + WRITE_ROWS)) for group in direct]
        self.staging: list[StagingPool] = []
        self._copiers: list[dict[tuple[int, int], Copier]] = []
        self._debug_copiers: list[dict[tuple[int, int], Copier]] = []
        try:
            for pool in pools if has_store else ():
                size = pool.group.block_bytes
                self.staging.append(StagingPool(max(staging_blocks, staging_bytes // size), size, pin=device != "cpu"))
            self._copiers = [open_copiers(pool, self.staging[number].arena if has_store else None, device,
                                          direct[number].arena if direct else None) for number, pool in enumerate(pools)]
            self._debug_copiers = [] if debug is None else [open_copiers(pool, debug.staging[number].arena, device)
                                                            for number, pool in enumerate(pools)]
        except BaseException:
            self.close()
            raise

    def node(self, move: Move) -> TransferNode:
        """The node of a Move, with the way it takes.

        Raises:
            TransferError: its group has no way from its source to its destination.
        """
        source, destination = level_of(move.source), level_of(move.destination)
        copiers = self._copiers[move.group]
        is_debugged = self._debug is not None and self._debug.takes(move) and (destination, source) in copiers
        if is_debugged:
            work, exists = Work.READ, True
        elif destination == NVME:
            work = Work.WRITE
            exists = ((source == SECONDARY and self._has_store and (SECONDARY, SECONDARY) in copiers)
                      or (source == PRIMARY and bool(self.direct)))
        else:
            work = Work.READ if source == NVME else Work.COPY
            exists = (destination, source) in copiers
        if not exists:
            raise TransferError(f"{move}: group {move.group} has no way from {LEVEL_NAMES[source]} to {LEVEL_NAMES[destination]}")
        node = TransferNode(work, move.number, move.group, move.source, move.destination, move)
        node.is_debugged = is_debugged
        if self.direct and not is_debugged and {source, destination} == {PRIMARY, NVME}:
            node.via = DIRECT
        return node

    @property
    def copy_paths(self) -> Mapping[str, str]:
        """By direction, how copies of many units go on this device, as it was measured; empty where there is nothing to choose."""
        return {} if self._device == "cpu" else copy_tools(load_cuda(), self._device).paths.describe()

    def copier(self, group: int, source: int, destination: int) -> Copier:
        """What copies from one level, or kind of staging memory, to another."""
        return self._copiers[group][destination, source]

    def copier_behind_file(self, node: TransferNode) -> Copier:
        """What copies a block that was read from a file into its slot."""
        copiers = self._debug_copiers if node.is_debugged else self._copiers
        return copiers[node.group][level_of(PoolIndex(node.destination)), node.via]

    def staging_of(self, node: TransferNode) -> Staging:
        """The memory that a block read from a file passes."""
        if node.is_debugged and self._debug is not None:
            return self._debug.staging[node.group]
        return self.direct[node.group] if node.via == DIRECT else self.staging[node.group]

    def close(self) -> None:
        """Give the host's staging memory back, and let go of the levels' memory. Nothing may use either any more."""
        for staging in self.staging:
            staging.arena.close()
        self._copiers = [{} for _ in self._copiers]
        self._debug_copiers = []

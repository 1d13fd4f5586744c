"""``GroupPools``: the memory of one group on the two levels that are memory; ``HostPools``: the same where the engine owns the first."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.page_layout import PageBlock
from kvtier.pools.primary import PrimaryPool
from kvtier.pools.sizing import PoolSizes

BlockGroup = LayerGroup | PageBlock


class GroupMemory(Protocol):
    """What transfers need to know of a group's memory."""

    @property
    def group(self) -> BlockGroup: ...
    @property
    def primary(self) -> PrimaryPool | None: ...
    @property
    def secondary(self) -> HostArena | None: ...


@dataclass
class HostPools:
    """A group whose first level is the engine's own pool."""

    group: PageBlock
    secondary: HostArena | None
    primary: None = None


@dataclass
class GroupPools:
    """Primary pool and host arena of one group; ``secondary`` is None when that level has no blocks."""

    group: LayerGroup
    primary: PrimaryPool
    secondary: HostArena | None

    def close(self) -> None:
        """Let go of both. No copy may be running on them. May be called again."""
        self.primary.close()
        if self.secondary is not None:
            self.secondary.close()


def open_group_pools(layout: KVLayout, sizes: PoolSizes, device: str) -> list[GroupPools]:
    """The memory of all groups, by group number. Host memory is pinned unless the device is the CPU.

    Args:
        layout: whose groups.
        sizes: blocks for each group; a group without secondary blocks gets no arena.
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: memory that cannot be had or pinned. Nothing stays allocated then.
    """
    made: list[GroupPools] = []
    with ExitStack() as undo:  # pinned memory does not go away by itself
        for group, primary_blocks, secondary_blocks in zip(layout.groups, sizes.primary, sizes.secondary, strict=True):
            primary = PrimaryPool(group, primary_blocks, device)
            undo.callback(primary.close)
            secondary = HostArena(secondary_blocks, group.block_bytes, device != "cpu") if secondary_blocks else None
            made.append(GroupPools(group, primary, secondary))
            undo.callback(made[-1].close)
        undo.pop_all()
    return made

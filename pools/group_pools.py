"""``GroupPools``: the memory of one group on the two levels that are memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.primary import PrimaryPool


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

"""Counters of the ledger. Totals since the start; the manager turns them into the public statistics."""

from __future__ import annotations

from kvtier.pools.pool_index import NUM_LEVELS


class LedgerCounters:
    """Plain counters, incremented where things happen.

    ``hit_tokens`` and ``hit_blocks`` (by the level the block was found on) count when the bytes were delivered, not when they
    were promised. ``dropped`` counts blocks that lost their content although somebody might have matched it; ``host_dropped`` those
    of them whose content was on the secondary level: in host memory there is no other copy of it. Of ``dropped``, ``dropped_priority``
    had not earned the next level, ``dropped_unconfirmed`` had been computed from what never arrived; the others found no room.
    """

    def __init__(self) -> None:
        self.alloc_total = 0
        self.alloc_new = 0
        self.reused_full = 0
        self.reused_partial = 0
        self.missed = 0
        self.dropped = 0
        self.host_dropped = 0
        self.dropped_priority = 0
        self.dropped_unconfirmed = 0
        self.lost = 0          # blocks whose Move failed
        self.quarantined = 0
        self.hit_tokens: list[int] = [0] * NUM_LEVELS
        self.hit_blocks: list[int] = [0] * NUM_LEVELS

    def values(self) -> dict[str, int]:
        """The scalar counters by name."""
        return {"alloc_total": self.alloc_total, "alloc_new": self.alloc_new, "reused_full": self.reused_full,
                "reused_partial": self.reused_partial, "missed": self.missed, "dropped": self.dropped,
                "host_dropped": self.host_dropped, "dropped_priority": self.dropped_priority,
                "dropped_unconfirmed": self.dropped_unconfirmed, "lost": self.lost, "quarantined": self.quarantined}

"""Public statistics: what the tier holds, moved and delivered (design: stats fields)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.types import Level


class PerLevel(NamedTuple):
    """One number for each level; ``Level`` members index it too."""

    primary: int = 0
    secondary: int = 0
    nvme: int = 0


@dataclass(frozen=True)
class LevelStats:
    """Blocks of one level. ``free``: unreferenced, whether empty, a backing or cached content (``evictable``).

    ``busy``: neither free nor referenced, because a file operation uses the slot or because it is quarantined.
    ``max == free + used + busy``.
    """

    max_blocks: int
    free_blocks: int
    used_blocks: int
    busy_blocks: int
    evictable_blocks: int
    backing_blocks: int


@dataclass(frozen=True)
class TierCounters:
    """What is counted since the start (or, in iteration statistics, since the last ``refresh``).

    ``onboard_*`` and ``offload_*`` by (source, destination) level; bytes are payload. Hits count when the bytes were delivered.
    """

    hit_tokens: PerLevel
    hit_blocks: PerLevel
    onboard_blocks: Mapping[tuple[Level, Level], int]
    onboard_bytes: Mapping[tuple[Level, Level], int]
    offload_blocks: Mapping[tuple[Level, Level], int]
    offload_bytes: Mapping[tuple[Level, Level], int]
    transfer_seconds: Mapping[tuple[Level, Level], float]
    alloc_new: int
    alloc_total: int
    reused_full: int
    reused_partial: int
    missed: int
    dropped: int
    lost: int
    quarantined: int
    fallbacks: int
    checksum_failures: int
    transfer_failures: int


@dataclass(frozen=True)
class Stats(TierCounters):
    """A picture of the whole tier: the counters since the start, and what the levels hold now."""

    primary: LevelStats
    secondary: LevelStats
    nvme: LevelStats
    leases: int
    sequences: int
    dropped_events: int
    prefill_tokens_per_second: float | None


class TransferTotals:
    """Adds up what finished Moves carried."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Level, Level], int] = {}
        self.bytes: dict[tuple[Level, Level], int] = {}
        self.seconds: dict[tuple[Level, Level], float] = {}
        self.checksum_failures = 0
        self.failures = 0
        self.fallbacks = 0

    def add(self, source: int, destination: int, num_bytes: int, seconds: float) -> None:
        pair = (Level(source), Level(destination))
        self.blocks[pair] = self.blocks.get(pair, 0) + 1
        self.bytes[pair] = self.bytes.get(pair, 0) + num_bytes
        self.seconds[pair] = self.seconds.get(pair, 0.0) + seconds


def _onboard(values: Mapping[tuple[Level, Level], int]) -> dict[tuple[Level, Level], int]:
    return {pair: value for pair, value in values.items() if pair[0] > pair[1]}


def _offload(values: Mapping[tuple[Level, Level], int]) -> dict[tuple[Level, Level], int]:
    return {pair: value for pair, value in values.items() if pair[0] < pair[1]}


def collect_counters(ledger: Ledger, totals: TransferTotals) -> TierCounters:
    """The counters now."""
    counters = ledger.counters
    return TierCounters(PerLevel(*counters.hit_tokens), PerLevel(*counters.hit_blocks), _onboard(totals.blocks), _onboard(totals.bytes),
                        _offload(totals.blocks), _offload(totals.bytes), dict(totals.seconds), **counters.values(),
                        fallbacks=totals.fallbacks, checksum_failures=totals.checksum_failures, transfer_failures=totals.failures)


def since(now: TierCounters, before: TierCounters) -> TierCounters:
    """What was counted between two pictures."""
    changed: dict[str, Any] = {}
    for field in fields(TierCounters):
        new, old = getattr(now, field.name), getattr(before, field.name)
        if isinstance(new, PerLevel):
            changed[field.name] = PerLevel(*(a - b for a, b in zip(new, old, strict=True)))
        elif isinstance(new, Mapping):
            changed[field.name] = {pair: value - old.get(pair, 0) for pair, value in new.items()}
        else:
            changed[field.name] = new - old
    return TierCounters(**changed)


def collect_levels(ledger: Ledger) -> tuple[LevelStats, ...]:
    """Blocks of each level now."""
    allocator = ledger.allocators[0]
    held = {block.id for sequence in ledger.sequences.values() for block in sequence.blocks}
    held |= {block.id for lease in ledger.leases.values() for block in lease.rows[0]}
    found: list[LevelStats] = []
    for level in range(NUM_LEVELS):
        total = allocator.num_blocks[level]
        used = len(held) if level == PRIMARY else 0  # what somebody holds is primary
        free = allocator.queues.free[level]
        found.append(LevelStats(total, free, used, total - free - used, allocator.queues.evictable[level],
                                allocator.queues.backing_count(level)))
    assert found[NVME].busy_blocks >= len(allocator.quarantined)
    return tuple(found)

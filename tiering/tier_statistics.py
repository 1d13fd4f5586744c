"""Statistics of a tier whose engine owns its pool (design: stats fields): frozen pictures, made from counters under the index's lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.pools.pool_index import NVME, SECONDARY
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import KeyedLevel
from kvtier.tiering.statistics import LevelStats, PerLevel, Route, total_level
from kvtier.types import Level

_UP: Final[Route] = (Level.NVME, Level.SECONDARY)
_DOWN: Final[Route] = (Level.SECONDARY, Level.NVME)


@dataclass(frozen=True)
class KeyGroupStats:
    """The levels of one group. ``used``: leased by requests or held by jobs; ``busy``: used by a file operation, or found bad."""

    group: int
    secondary: LevelStats
    nvme: LevelStats


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """What a tier holds, and what it has done since the start. Counts are blocks unless they say bytes or seconds.

    Attributes:
        secondary, nvme: all groups together.
        groups: each by itself.
        hit_blocks: by level, delivered to the engine: found in host memory, and on NVMe.
        missed_blocks: asked for with ``lookup`` and not there, once its answer was final.
        stored_blocks, loaded_blocks: copied from and to the engine.
        known_blocks: not stored because they were there; refused_blocks: for want of room or priority, or on the request's wish.
        promoted_blocks, promoted_bytes: read from NVMe; nvme_written_blocks, nvme_written_bytes: written to it.
        read_seconds, write_seconds: their shares of the time spent in file calls.
        dropped: content given up for want of room or priority; host_dropped: of it, without a copy on NVMe; dropped_priority: of it, below
            the threshold of NVMe.
        lost: content that failed to arrive; quarantined: NVMe slots found bad.
        checksum_failures, transfer_failures: of NVMe.
        requests, leases, jobs: active now; abandoned_jobs: given up, whose slots may still be in use.
        expired_jobs, expired_lookups: by their deadlines, so far.
        events_dropped: because nobody polled.
        takes_writes: False while the NVMe level refuses them (full or failing disk).
    """

    secondary: LevelStats
    nvme: LevelStats
    groups: tuple[KeyGroupStats, ...]
    hit_blocks: PerLevel
    missed_blocks: int
    stored_blocks: int
    loaded_blocks: int
    known_blocks: int
    refused_blocks: int
    promoted_blocks: int
    promoted_bytes: int
    nvme_written_blocks: int
    nvme_written_bytes: int
    read_seconds: float
    write_seconds: float
    dropped: int
    host_dropped: int
    dropped_priority: int
    lost: int
    quarantined: int
    checksum_failures: int
    transfer_failures: int
    requests: int
    leases: int
    jobs: int
    abandoned_jobs: int
    expired_jobs: int
    expired_lookups: int
    events_dropped: int
    takes_writes: bool

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """``dropped``, by "room" and "priority"."""
        return {"room": self.dropped - self.dropped_priority, "priority": self.dropped_priority}

    # By the names of ``Stats``, so that both have the same metrics:

    @property
    def dropped_events(self) -> int:
        return self.events_dropped

    @property
    def onboard_blocks(self) -> Mapping[Route, int]:
        return {_UP: self.promoted_blocks}

    @property
    def onboard_bytes(self) -> Mapping[Route, int]:
        return {_UP: self.promoted_bytes}

    @property
    def offload_blocks(self) -> Mapping[Route, int]:
        return {_DOWN: self.nvme_written_blocks}

    @property
    def offload_bytes(self) -> Mapping[Route, int]:
        return {_DOWN: self.nvme_written_bytes}

    @property
    def transfer_seconds(self) -> Mapping[Route, float]:
        return {_UP: self.read_seconds, _DOWN: self.write_seconds}


@dataclass
class FileTotals:
    """What the index adds up as Moves end."""

    promoted_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    checksum_failures: int = 0
    failures: int = 0


def collect(ledger: KeyLedger, totals: FileTotals, takes_writes: bool) -> TierStats:
    """A picture of now. Under the index's lock."""
    groups = tuple(KeyGroupStats(level.group, level_stats(level, SECONDARY), level_stats(level, NVME)) for level in ledger.allocators)
    counters = ledger.counters
    return TierStats(
        secondary=total_level([group.secondary for group in groups]), nvme=total_level([group.nvme for group in groups]), groups=groups,
        hit_blocks=PerLevel(0, counters.hit_blocks[SECONDARY], counters.hit_blocks[NVME]),
        missed_blocks=counters.missed, stored_blocks=ledger.stored_blocks, loaded_blocks=ledger.loaded_blocks,
        known_blocks=ledger.known_blocks, refused_blocks=ledger.refused_blocks,
        promoted_blocks=ledger.promoted_blocks, promoted_bytes=totals.promoted_bytes,
        nvme_written_blocks=totals.written_blocks, nvme_written_bytes=totals.written_bytes, read_seconds=totals.read_seconds,
        write_seconds=totals.write_seconds, dropped=counters.dropped, host_dropped=counters.host_dropped,
        dropped_priority=counters.dropped_priority, lost=counters.lost,
        quarantined=counters.quarantined, checksum_failures=totals.checksum_failures, transfer_failures=totals.failures,
        requests=len(ledger.requests), leases=ledger.num_leases(), jobs=len(ledger.jobs), abandoned_jobs=len(ledger.abandoned),
        expired_jobs=ledger.expired_jobs, expired_lookups=ledger.expired_lookups, events_dropped=ledger.events.dropped,
        takes_writes=takes_writes)


def level_stats(level: KeyedLevel, place: int) -> LevelStats:
    """One level of one group: ``max == free + used + busy``."""
    free = level.queues.num_free(place)
    busy = level.num_unusable(place)
    return LevelStats(level.num_blocks[place], free, level.num_blocks[place] - free - busy, busy, level.queues.evictable[place],
                      level.queues.backing_count(place))

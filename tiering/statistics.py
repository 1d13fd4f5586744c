"""Public statistics: what the tier holds, moved and delivered (design: stats fields).

Pictures are frozen; the ``collect_*`` functions make them under the manager's lock, from counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

from kvtier.io.store_messages import NvmeStats
from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.transfer_times import TimeHistogram
from kvtier.types import Level

Route = tuple[Level, Level]
"""Source and destination of a Move."""


class PerLevel(NamedTuple):
    """One number for each level; ``Level`` members index it too."""

    primary: int = 0
    secondary: int = 0
    nvme: int = 0


def hit_rate(reused: int, missed: int) -> float:
    """Blocks found among those looked for; 0.0 where none was looked for."""
    return reused / (reused + missed) if reused + missed else 0.0


@dataclass(frozen=True)
class LevelStats:
    """Blocks of one level. ``free``: unreferenced, whether empty, a backing or cached content (``evictable``).

    ``used``: referenced by a sequence or a lease, which only primary blocks can be. ``busy``: neither free nor referenced,
    because a file operation uses the slot or because it is quarantined. ``max == free + used + busy``.
    """

    max_blocks: int
    free_blocks: int
    used_blocks: int
    busy_blocks: int
    evictable_blocks: int
    backing_blocks: int


@dataclass(frozen=True)
class LevelIteration(LevelStats):
    """A level at the end of an iteration. ``peak_used_blocks``: the most in use at the end of any call within it."""

    peak_used_blocks: int


L_co = TypeVar("L_co", bound=LevelStats, covariant=True)


@dataclass(frozen=True)
class GroupLevels(Generic[L_co]):
    """The three levels of one group of layers."""

    group: int
    primary: L_co
    secondary: L_co
    nvme: L_co


GroupStats = GroupLevels[LevelStats]
GroupIteration = GroupLevels[LevelIteration]


@dataclass(frozen=True, kw_only=True)
class TierCounters:
    """What is counted since the start (or, in iteration statistics, between two calls of ``refresh``).

    ``onboard_*`` and ``offload_*`` by (source, destination) level; ``copied_*`` within the primary level, when the front of a
    block is reused by copying it. Bytes are payload. Hits count when the bytes were delivered. ``dropped``: blocks that lost
    their content for want of room or of priority; ``host_dropped``: those of them that were on the secondary level. Of ``dropped``,
    ``dropped_priority`` had not earned the next level, ``dropped_unconfirmed`` had been computed from what never arrived; the others
    found no room.
    """

    hit_tokens: PerLevel
    hit_blocks: PerLevel
    onboard_blocks: Mapping[Route, int]
    onboard_bytes: Mapping[Route, int]
    offload_blocks: Mapping[Route, int]
    offload_bytes: Mapping[Route, int]
    copied_blocks: int
    copied_bytes: int
    transfer_seconds: Mapping[Route, float]
    alloc_new: int
    alloc_total: int
    reused_full: int
    reused_partial: int
    missed: int
    dropped: int
    host_dropped: int
    dropped_priority: int
    dropped_unconfirmed: int
    lost: int
    quarantined: int
    fallbacks: int
    checksum_failures: int
    transfer_failures: int

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """``dropped``, by "room", "priority" and "unconfirmed"."""
        return {"room": self.dropped - self.dropped_priority - self.dropped_unconfirmed, "priority": self.dropped_priority,
                "unconfirmed": self.dropped_unconfirmed}

    @property
    def hit_rate(self) -> float:
        """Prompt blocks reused, fully or in part, among all prompt blocks; 0.0 where there were none."""
        return hit_rate(self.reused_full + self.reused_partial, self.missed)


@dataclass(frozen=True)
class GdsStats:
    """How blocks travel between device and NVMe.

    Attributes:
        path: "gds": directly; "posix": through the host; "none": there is no NVMe level.
        reason: why it is not "gds"; empty where it is.
        read_blocks, written_blocks: moved the direct way.
        detours: how many of those KvikIO refused, so that they went through the host.
    """

    path: str
    reason: str
    read_blocks: int = 0
    written_blocks: int = 0
    detours: int = 0


@dataclass(frozen=True)
class RouteSpeed:
    """How fast blocks are loaded from one level to another: the default where ``bursts`` (loads measured so far) is 0."""

    latency_seconds: float
    bytes_per_second: float
    bursts: int


@dataclass(frozen=True)
class LoadDecision:
    """What was done about a prefix that lies in part on a lower level, and why.

    ``kind``: "loaded"; "split", its front loaded and the rest left to recompute; "recomputed", nothing loaded; "probed", a little loaded
    for the sake of knowing how long that takes; "undecided", loaded because too little is known. Estimates are seconds to load what was
    chosen, and seconds until the whole prompt is there if everything found were loaded, or nothing; None when undecided.
    """

    kind: str
    request_id: int
    blocks_found: int
    blocks_loaded: int
    tokens_left: int
    estimated_load_seconds: float
    estimated_seconds_all: float | None
    estimated_seconds_none: float | None


@dataclass(frozen=True, kw_only=True)
class LoadStats:
    """Decisions by kind (see :class:`LoadDecision`), and what they are based on.

    ``tokens_left``: found and left to recompute. ``prefill_*_seconds``: the parts of the cost of computing a prompt; None before enough
    reports. ``estimated_*`` and their counterparts: what was said before each load or prefill that was measured, and what it took.
    """

    loaded: int
    split: int
    recomputed: int
    probed: int
    undecided: int
    tokens_left: int
    last: LoadDecision | None
    speeds: Mapping[Route, RouteSpeed]
    prefill_overhead_seconds: float | None
    prefill_seconds_per_token: float | None
    prefill_seconds_per_pair: float | None
    estimated_load_seconds: float
    load_seconds: float
    estimated_prefill_seconds: float
    prefill_seconds: float


@dataclass(kw_only=True)
class PrefetchStats:
    """Prefetches by how they ended (see ``Prefetch``), and blocks of all of them. ``read_blocks``: from NVMe to the secondary level;
    ``raised_blocks``: from there to the primary one. ``lost_blocks`` could not be read, and are misses now."""

    asked: int = 0
    finished: int = 0
    overtaken: int = 0
    cancelled: int = 0
    read_blocks: int = 0
    raised_blocks: int = 0
    lost_blocks: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Stats(TierCounters):
    """A picture of the whole tier: the counters since the start, and what the levels hold now.

    ``primary``, ``secondary`` and ``nvme`` add up ``groups``. ``advice``: what to change where transfers have long been out of
    balance, otherwise None. ``faults``: how often each rule of the configuration's ``faults`` has hit; empty without. ``copy_paths``: on
    CUDA by direction, how many small pieces of memory are copied, as it was measured when the first cache of the process started.
    ``priorities``: evictable blocks of all groups by level and priority. ``move_seconds``: what Moves took from their decision to their
    end, by route; ``move_wait_seconds``: how much of it was waiting. ``store``: what the NVMe level itself counts; None without one.
    """

    primary: LevelStats
    secondary: LevelStats
    nvme: LevelStats
    groups: tuple[GroupStats, ...]
    priorities: Mapping[Level, Mapping[int, int]]
    move_seconds: Mapping[Route, TimeHistogram]
    move_wait_seconds: Mapping[Route, TimeHistogram]
    leases: int
    sequences: int
    dropped_events: int
    prefill_tokens_per_second: float | None
    advice: str | None
    loading: LoadStats
    prefetch: PrefetchStats
    faults: Mapping[str, int]
    gds: GdsStats
    copy_paths: Mapping[str, str]
    store: NvmeStats | None


@dataclass(frozen=True, kw_only=True)
class IterationStats(TierCounters):
    """What was counted between two calls of ``refresh``, and the levels at the second one.

    ``primary``, ``secondary`` and ``nvme`` add up ``groups``; the peak is that of the sum.
    """

    primary: LevelIteration
    secondary: LevelIteration
    nvme: LevelIteration
    groups: tuple[GroupIteration, ...]


@dataclass(frozen=True)
class RequestStats:
    """What one active sequence got from the cache when it was admitted, in blocks of all groups.

    ``total_blocks`` and ``new_blocks`` were taken for it, new ones without content in them. Its prompt's blocks are
    ``reused_full + reused_partial + missed``. ``hit_tokens``, by the level they were found on, are zero until the sequence is
    ready: only what was delivered counts, which after a bad read is less than ``prepopulated_tokens``.
    """

    request_id: int
    total_blocks: int
    new_blocks: int
    reused_full: int
    reused_partial: int
    missed: int
    prepopulated_tokens: int
    is_delivered: bool
    hit_tokens: PerLevel

    @property
    def hit_rate(self) -> float:
        """Prompt blocks reused, fully or in part, among all prompt blocks."""
        return hit_rate(self.reused_full + self.reused_partial, self.missed)


class TransferTotals:
    """Adds up what finished Moves carried."""

    def __init__(self) -> None:
        self.blocks: dict[Route, int] = {}
        self.bytes: dict[Route, int] = {}
        self.seconds: dict[Route, float] = {}
        self.checksum_failures = 0
        self.failures = 0
        self.fallbacks = 0

    def add(self, source: int, destination: int, num_bytes: int, seconds: float) -> None:
        pair = (Level(source), Level(destination))
        self.blocks[pair] = self.blocks.get(pair, 0) + 1
        self.bytes[pair] = self.bytes.get(pair, 0) + num_bytes
        self.seconds[pair] = self.seconds.get(pair, 0.0) + seconds


def _onboard(values: Mapping[Route, int]) -> dict[Route, int]:
    return {pair: value for pair, value in values.items() if pair[0] > pair[1]}


def _offload(values: Mapping[Route, int]) -> dict[Route, int]:
    return {pair: value for pair, value in values.items() if pair[0] < pair[1]}


def collect_counters(ledger: Ledger, totals: TransferTotals) -> TierCounters:
    """The counters now."""
    counters = ledger.counters
    within = (Level.PRIMARY, Level.PRIMARY)
    return TierCounters(hit_tokens=PerLevel(*counters.hit_tokens), hit_blocks=PerLevel(*counters.hit_blocks),
                        onboard_blocks=_onboard(totals.blocks), onboard_bytes=_onboard(totals.bytes),
                        offload_blocks=_offload(totals.blocks), offload_bytes=_offload(totals.bytes),
                        copied_blocks=totals.blocks.get(within, 0), copied_bytes=totals.bytes.get(within, 0),
                        transfer_seconds=dict(totals.seconds), **counters.values(), fallbacks=totals.fallbacks,
                        checksum_failures=totals.checksum_failures, transfer_failures=totals.failures)


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


def used_blocks(allocator: BlockAllocator) -> int:
    """Primary blocks that sequences or leases hold."""
    return allocator.num_blocks[PRIMARY] - allocator.queues.num_free(PRIMARY) - allocator.num_unreferenced_busy[PRIMARY]


def collect_levels(allocator: BlockAllocator) -> tuple[LevelStats, ...]:
    """Blocks of each level of one group now."""
    queues = allocator.queues
    found: list[LevelStats] = []
    for level in range(NUM_LEVELS):
        total = allocator.num_blocks[level]
        used = used_blocks(allocator) if level == PRIMARY else 0  # what somebody holds is primary
        free = queues.num_free(level)
        found.append(LevelStats(total, free, used, total - free - used, queues.evictable[level], queues.backing_count(level)))
    assert found[NVME].busy_blocks >= len(allocator.quarantined)
    return tuple(found)


def collect_groups(allocators: Sequence[BlockAllocator]) -> tuple[GroupStats, ...]:
    """Blocks of each level of each group now."""
    return tuple([GroupLevels(group, *collect_levels(allocator)) for group, allocator in enumerate(allocators)])


def collect_priorities(allocators: Sequence[BlockAllocator]) -> dict[Level, dict[int, int]]:
    """Evictable blocks of all groups by level and priority, ascending."""
    found: dict[Level, dict[int, int]] = {}
    for level in Level:
        counts: Counter[int] = Counter()
        for allocator in allocators:
            counts.update(allocator.queues.content_by_priority(int(level)))
        found[level] = dict(sorted(counts.items()))
    return found


def total_levels(groups: Sequence[GroupStats]) -> tuple[LevelStats, LevelStats, LevelStats]:
    """The three levels, added up over groups."""
    return (total_level([group.primary for group in groups]), total_level([group.secondary for group in groups]),
            total_level([group.nvme for group in groups]))


def total_level(levels: Sequence[LevelStats]) -> LevelStats:
    """One level, added up over groups."""
    if len(levels) == 1:
        return levels[0]
    return LevelStats(*[sum([getattr(level, field.name) for level in levels]) for field in fields(LevelStats)])


def collect_request(ledger: Ledger, sequence: ActiveSequence) -> RequestStats:
    """What one sequence got."""
    partial = len(ledger.prefix_groups) if sequence.prepopulated % ledger.tokens_per_block else 0  # a prefix has one block in each group
    hits = PerLevel(*sequence.hits()[0]) if sequence.delivered else PerLevel()
    return RequestStats(sequence.id, sequence.total_blocks, sequence.new_blocks, sequence.reused_blocks - partial, partial,
                        sequence.missed_blocks, sequence.prepopulated, sequence.delivered, hits)

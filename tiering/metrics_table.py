"""What ``/metrics`` shows, as one table: names and units by Prometheus' conventions, and where in the statistics each value stands.

The collector, docs/metrics.md and the dashboard are all checked against it. A cache whose statistics lack a field has no such metric.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvtier.io.store_messages import NvmeStats
from kvtier.tiering.statistics import GdsStats, GroupStats, LevelStats, LoadStats, PerLevel, PrefetchStats, Route
from kvtier.tiering.tier_statistics import KeyGroupStats
from kvtier.tiering.transfer_times import TimeHistogram
from kvtier.types import Level

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of the labels, and the number."""


class Kind(enum.Enum):
    """Prometheus' types, as far as they are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: without the ``_total`` that counters get when they are shown.
        kind, help, labels: as Prometheus has them.
        field: of the statistics object, from which ``samples`` (of a histogram: ``histograms``) makes the values.
    """

    name: str
    kind: Kind
    help: str
    field: str
    labels: tuple[str, ...] = ()
    samples: Callable[[Any], Iterable[Sample]] = lambda value: [((), value)]
    histograms: Callable[[Any], Iterable[tuple[tuple[str, ...], TimeHistogram]]] = lambda value: []

    @property
    def shown_name(self) -> str:
        """As a query writes it; a histogram's with ``_bucket``, ``_sum`` or ``_count`` behind it."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def _name(level: Level) -> str:
    return level.name.lower()


def _by_level(value: PerLevel) -> list[Sample]:
    return [((name,), number) for name, number in value._asdict().items()]


def _by_route(value: Mapping[Route, float]) -> list[Sample]:
    return [((_name(source), _name(destination)), number) for (source, destination), number in value.items()]


def _times(value: Mapping[Route, TimeHistogram]) -> list[tuple[tuple[str, ...], TimeHistogram]]:
    return [((_name(source), _name(destination)), histogram) for (source, destination), histogram in value.items()]


def _levels(group: GroupStats | KeyGroupStats) -> list[tuple[str, LevelStats]]:
    lower = [("secondary", group.secondary), ("nvme", group.nvme)]
    return lower if isinstance(group, KeyGroupStats) else [("primary", group.primary), *lower]


def _states(groups: Sequence[GroupStats | KeyGroupStats]) -> list[Sample]:
    """Each block in one state: they add up to the level's size."""
    found: list[Sample] = []
    for group in groups:
        for name, level in _levels(group):
            empty = level.free_blocks - level.evictable_blocks - level.backing_blocks
            for state, number in (("used", level.used_blocks), ("busy", level.busy_blocks), ("cached", level.evictable_blocks),
                                  ("backing", level.backing_blocks), ("empty", empty)):
                found.append(((str(group.group), name, state), number))
    return found


def _sizes(groups: Sequence[GroupStats | KeyGroupStats]) -> list[Sample]:
    return [((str(group.group), name), level.max_blocks) for group in groups for name, level in _levels(group)]


def _priorities(value: Mapping[Level, Mapping[int, int]]) -> list[Sample]:
    return [((_name(level), str(priority)), number) for level, numbers in value.items() for priority, number in numbers.items()]


def _known(value: float | None) -> list[Sample]:
    return [] if value is None else [((), value)]


def _decisions(value: LoadStats) -> list[Sample]:
    return [((kind,), getattr(value, kind)) for kind in ("loaded", "split", "recomputed", "probed", "undecided")]


def _speeds(value: LoadStats) -> list[Sample]:
    return [((_name(source), _name(destination)), speed.bytes_per_second) for (source, destination), speed in value.speeds.items()]


def _latencies(value: LoadStats) -> list[Sample]:
    return [((_name(source), _name(destination)), speed.latency_seconds) for (source, destination), speed in value.speeds.items()]


def _prefetches(value: PrefetchStats) -> list[Sample]:
    return [((outcome,), getattr(value, outcome)) for outcome in ("finished", "overtaken", "cancelled")]


def _prefetched(value: PrefetchStats) -> list[Sample]:
    return [(("nvme", "secondary"), value.read_blocks), (("secondary", "primary"), value.raised_blocks)]


def _direct(value: GdsStats) -> list[Sample]:
    return [(("read",), value.read_blocks), (("write",), value.written_blocks)]


def _of_store(field: str) -> Callable[[NvmeStats | None], list[Sample]]:
    return lambda store: [] if store is None else [((), getattr(store, field))]


def _by_name(value: Mapping[str, int]) -> list[Sample]:
    return [((name,), number) for name, number in value.items()]


_LEVEL: Final = ("level",)
_ROUTE: Final = ("source", "destination")
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: Final[tuple[Metric, ...]] = (
    # what it is good for
    Metric("kvtier_hit_tokens", _C, "Prompt tokens that were not computed again, by the level they were found on; counted when their bytes "
           "had been delivered", "hit_tokens", _LEVEL, _by_level),
    Metric("kvtier_hit_blocks", _C, "The same in blocks of all groups", "hit_blocks", _LEVEL, _by_level),
    Metric("kvtier_prompt_blocks_reused", _C, "Blocks of prompts that were found whole when the request was admitted", "reused_full"),
    Metric("kvtier_prompt_blocks_reused_partly", _C, "Blocks of prompts of which the first tokens were found", "reused_partial"),
    Metric("kvtier_prompt_blocks_missed", _C, "Blocks of prompts that were not found", "missed"),
    # what moves
    Metric("kvtier_onboarded_blocks", _C, "Blocks moved up", "onboard_blocks", _ROUTE, _by_route),
    Metric("kvtier_onboarded_bytes", _C, "Payload moved up", "onboard_bytes", _ROUTE, _by_route),
    Metric("kvtier_offloaded_blocks", _C, "Blocks moved or written down", "offload_blocks", _ROUTE, _by_route),
    Metric("kvtier_offloaded_bytes", _C, "Payload moved or written down", "offload_bytes", _ROUTE, _by_route),
    Metric("kvtier_copied_blocks", _C, "Blocks of which a part was copied within the primary level, for partial reuse", "copied_blocks"),
    Metric("kvtier_copied_bytes", _C, "Payload of those copies", "copied_bytes"),
    Metric("kvtier_transfer_work_seconds", _C, "Time inside copies and file operations, all threads together", "transfer_seconds", _ROUTE,
           _by_route),
    Metric("kvtier_move_duration_seconds", _H, "From the decision to move a block to its end", "move_seconds", _ROUTE, histograms=_times),
    Metric("kvtier_move_queue_seconds", _H, "How much of that was waiting for others", "move_wait_seconds", _ROUTE, histograms=_times),
    # what is lost
    Metric("kvtier_dropped_blocks", _C, "Blocks that lost content which somebody might have matched: for want of room, because their "
           "priority had not earned the next level, or because what they had been computed from never arrived (unconfirmed)",
           "dropped_by_reason", ("reason",), _by_name),
    Metric("kvtier_dropped_host_blocks", _C, "Of the dropped: those on the secondary level, with no copy on NVMe", "host_dropped"),
    Metric("kvtier_lost_blocks", _C, "Blocks that were to be delivered and whose move failed", "lost"),
    Metric("kvtier_quarantined_blocks", _C, "NVMe blocks taken out of service since the start", "quarantined"),
    Metric("kvtier_fallbacks", _C, "Blocks computed again, or moved another way, because a move failed or its way was not to be had",
           "fallbacks"),
    Metric("kvtier_checksum_failures", _C, "Blocks from NVMe that did not verify; none was served", "checksum_failures"),
    Metric("kvtier_transfer_failures", _C, "Moves that failed, for whatever reason", "transfer_failures"),
    Metric("kvtier_dropped_events", _C, "Cache events that went before they were read", "dropped_events"),
    # what is there
    Metric("kvtier_capacity_blocks", _G, "Size of a level", "groups", ("group", "level"), _sizes),
    Metric("kvtier_blocks", _G, "Blocks of a level by state, each in one: used by a sequence or lease; busy with a file operation or in "
           "quarantine; cached content; backing of a block further up; empty", "groups", ("group", "level", "state"), _states),
    Metric("kvtier_cached_blocks", _G, "Cached content of all groups by priority", "priorities", ("level", "priority"), _priorities),
    Metric("kvtier_sequences", _G, "Active sequences", "sequences"),
    Metric("kvtier_leases", _G, "Leases that hold blocks", "leases"),
    Metric("kvtier_allocated_blocks", _C, "Primary blocks taken for sequences", "alloc_total"),
    Metric("kvtier_allocated_empty_blocks", _C, "Of those: blocks that had held nothing", "alloc_new"),
    # deciding to load
    Metric("kvtier_load_decisions", _C, "What was done about a prefix found on a lower level", "loading", ("decision",), _decisions),
    Metric("kvtier_declined_tokens", _C, "Tokens found on a lower level and left to recompute", "loading",
           samples=lambda value: [((), value.tokens_left)]),
    Metric("kvtier_load_speed_bytes_per_second", _G, "Measured speed of loading", "loading", _ROUTE, _speeds),
    Metric("kvtier_load_latency_seconds", _G, "Measured time before the first byte of a load", "loading", _ROUTE, _latencies),
    Metric("kvtier_prefill_speed_tokens_per_second", _G, "How fast the engine computes prompts, as it reported",
           "prefill_tokens_per_second", samples=_known),
    Metric("kvtier_prefetches", _C, "Prefetches by how they ended", "prefetch", ("outcome",), _prefetches),
    Metric("kvtier_prefetched_blocks", _C, "Blocks raised by prefetches", "prefetch", _ROUTE, _prefetched),
    Metric("kvtier_prefetched_bytes", _C, "Payload read and copied by prefetches", "prefetch", samples=lambda value: [((), value.bytes)]),
    # the NVMe level
    Metric("kvtier_nvme_stored_blocks", _G, "Blocks in the store's index", "store", samples=_of_store("stored_blocks")),
    Metric("kvtier_nvme_quarantined_slots", _G, "Slots out of service", "store", samples=_of_store("quarantined_slots")),
    Metric("kvtier_nvme_read_bytes", _C, "Payload read", "store", samples=_of_store("read_bytes")),
    Metric("kvtier_nvme_written_bytes", _C, "Payload written", "store", samples=_of_store("written_bytes")),
    Metric("kvtier_nvme_read_errors", _C, "Reads that failed before their check", "store", samples=_of_store("read_errors")),
    Metric("kvtier_nvme_write_errors", _C, "Blocks that could not be stored, those shed during a pause included", "store",
           samples=_of_store("write_errors")),
    Metric("kvtier_nvme_write_pauses", _C, "Times that storing stopped for a while because the disk was full or failing", "store",
           samples=_of_store("write_pauses")),
    Metric("kvtier_gds_blocks", _C, "Blocks moved between device and NVMe without the host", "gds", ("direction",), _direct),
    Metric("kvtier_gds_detours", _C, "Of those: how many GPUDirect Storage refused, so that they went through the host", "gds",
           samples=lambda value: [((), value.detours)]),
    # a tier whose engine owns its pool (TierIndex)
    Metric("kvtier_engine_stored_blocks", _C, "Blocks copied from the engine's pool", "stored_blocks"),
    Metric("kvtier_engine_loaded_blocks", _C, "Blocks copied into the engine's pool", "loaded_blocks"),
    Metric("kvtier_engine_known_blocks", _C, "Blocks that the engine offered and the tier had already", "known_blocks"),
    Metric("kvtier_engine_refused_blocks", _C, "Blocks not stored for want of room or priority, or on the request's wish",
           "refused_blocks"),
    Metric("kvtier_engine_requests", _G, "Requests that look up or hold blocks", "requests"),
    Metric("kvtier_engine_jobs", _G, "Loads and stores that workers carry out now", "jobs"),
    Metric("kvtier_engine_abandoned_jobs", _G, "Jobs given up whose slots may still be in use", "abandoned_jobs"),
    Metric("kvtier_engine_expired_jobs", _C, "Jobs that passed their deadline", "expired_jobs"),
    Metric("kvtier_engine_expired_lookups", _C, "Lookups that passed their deadline and became misses", "expired_lookups"),
    Metric("kvtier_nvme_takes_writes", _G, "0 while the NVMe level refuses them (full or failing disk)", "takes_writes"),
    Metric("kvtier_injected_faults", _C, "Failures on demand, by rule", "faults", ("rule",), _by_name),
)

UP: Final = Metric("kvtier_up", Kind.GAUGE, "1 while the cache is open; 0, and nothing else, once it has been closed", "")
INFO: Final = Metric("kvtier_info", Kind.GAUGE, "1; what runs: version, model, way between device and NVMe (gds, posix, none)", "",
                     ("version", "model", "nvme_path"))


def reference_table() -> str:
    """All metrics as a Markdown table, for docs/metrics.md."""
    rows = [f"| `{metric.shown_name}` | {metric.kind.value} | {', '.join(metric.labels)} | {metric.help} |"
            for metric in (UP, INFO, *METRICS)]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"

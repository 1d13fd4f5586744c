"""The tier's statistics under vLLM's own metric names, so that dashboards made for vLLM's offloading show them.

The names are those of vLLM's CPU and tiering offload managers; a few numbers that vLLM has no name for have ``kvtier`` in theirs. Bytes
and times between device and host vLLM counts itself (``vllm:kv_offload_load_bytes`` and the like), from what the workers report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.tiering.tier_statistics import TierStats

HOST: Final = ("0:primary",)
NVME: Final = ("1:kvtier-nvme",)
"""Labels of the levels: vLLM calls its host memory the primary tier."""

ALLOCATION_SIZE: Final = "vllm:kv_offload_cpu_allocation_size"
_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class _Counter:
    name: str
    documentation: str
    value: Callable[[TierStats], float]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Gauge:
    name: str
    documentation: str
    value: Callable[[TierStats], float]


COUNTERS: Final = (
    _Counter("vllm:kv_offload_stores_skipped", "Chunks that were not stored: priority, no room, or the request's own wish.",
             lambda stats: stats.refused_blocks),
    _Counter("vllm:kv_offload_tiering_chunk_hits", "Chunks delivered, labeled by tier.", lambda stats: stats.hit_blocks.secondary, HOST),
    _Counter("vllm:kv_offload_tiering_chunk_hits", "Chunks delivered, labeled by tier.", lambda stats: stats.hit_blocks.nvme, NVME),
    _Counter("vllm:kv_offload_tiering_read_bytes", "Bytes read and verified, labeled by tier.", lambda stats: stats.promoted_bytes, NVME),
    _Counter("vllm:kv_offload_tiering_write_bytes", "Bytes written, labeled by tier.", lambda stats: stats.nvme_written_bytes, NVME),
    _Counter("vllm:kv_offload_tiering_read_time", "Seconds spent reading, labeled by tier.", lambda stats: stats.read_seconds, NVME),
    _Counter("vllm:kv_offload_tiering_write_time", "Seconds spent writing, labeled by tier.", lambda stats: stats.write_seconds, NVME),
    _Counter("vllm:kv_offload_kvtier_checksum_failures", "Chunks read from NVMe that did not verify; each is a miss.",
             lambda stats: stats.checksum_failures),
    _Counter("vllm:kv_offload_kvtier_transfer_failures", "Reads and writes of NVMe that failed.", lambda stats: stats.transfer_failures),
    _Counter("vllm:kv_offload_kvtier_dropped", "Chunks that lost their last copy for want of room.", lambda stats: stats.dropped),
    _Counter("vllm:kv_offload_kvtier_lost", "Chunks whose bytes were lost: failed copies, reads and writes.", lambda stats: stats.lost),
    _Counter("vllm:kv_offload_kvtier_expired_lookups", "Requests that stopped waiting for the tier.", lambda stats: stats.expired_lookups),
)

GAUGES: Final = (
    _Gauge("vllm:kv_offload_cpu_cache_usage_perc", "Share of the host level that transfers and leases hold.",
           lambda stats: (stats.secondary.used_blocks + stats.secondary.busy_blocks) / max(stats.secondary.max_blocks, 1)),
    _Gauge("vllm:kv_offload_kvtier_host_chunks", "Chunks in host memory.",
           lambda stats: stats.secondary.evictable_blocks + stats.secondary.used_blocks),
    _Gauge("vllm:kv_offload_kvtier_nvme_chunks", "Chunks on NVMe.", lambda stats: stats.nvme.evictable_blocks + stats.nvme.backing_blocks),
    _Gauge("vllm:kv_offload_kvtier_leases", "Chunks leased to requests.", lambda stats: stats.leases),
)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM announces to Prometheus."""
    found: dict[str, OffloadingMetricMetadata] = {
        counter.name: OffloadingCounterMetadata(counter.documentation, ("tier",) if counter.labels else ()) for counter in COUNTERS}
    found |= {gauge.name: OffloadingGaugeMetadata(gauge.documentation) for gauge in GAUGES}
    found[ALLOCATION_SIZE] = OffloadingHistogramMetadata("Chunks asked for by each store.", buckets=_BUCKETS)
    return found


class MetricsSinceLast:
    """Makes vLLM's statistics: counters since the last call, gauges of the moment."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}
        self._sizes: list[int] = []

    def asked(self, num_chunks: int) -> None:
        """A store asked for so many chunks."""
        self._sizes.append(num_chunks)

    def take(self, stats: TierStats) -> OffloadingConnectorStats:
        result = OffloadingConnectorStats()
        for counter in COUNTERS:
            value = counter.value(stats)
            before = self._last.get((counter.name, counter.labels), 0)
            if value != before:
                result.increase_counter(counter.name, value - before, counter.labels)
                self._last[counter.name, counter.labels] = value
        for gauge in GAUGES:
            result.set_gauge(gauge.name, gauge.value(stats))
        for size in self._sizes:
            result.observe_histogram(ALLOCATION_SIZE, size)
        self._sizes.clear()
        return result

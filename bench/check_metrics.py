"""What ``kvtier check`` and ``kvtier bench serve`` read in vLLM's metrics, by the names that ``tiering/attach/vllm_metrics.py`` gives them.

Those of that file are repeated here, because it can be imported only where vLLM is; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.tiering.metrics_reading import read_metrics

HOST: Final = "0:primary"
NVME: Final = "1:kvtier-nvme"
CHUNK_HITS: Final = "vllm:kv_offload_tiering_chunk_hits"
WRITTEN_BYTES: Final = "vllm:kv_offload_tiering_write_bytes"
SKIPPED: Final = "vllm:kv_offload_stores_skipped"
ASKED: Final = "vllm:kv_offload_cpu_allocation_size"
CHECKSUM_FAILURES: Final = "vllm:kv_offload_kvtier_checksum_failures"
TRANSFER_FAILURES: Final = "vllm:kv_offload_kvtier_transfer_failures"
EXPIRED_LOOKUPS: Final = "vllm:kv_offload_kvtier_expired_lookups"
HOST_CHUNKS: Final = "vllm:kv_offload_kvtier_host_chunks"
NVME_CHUNKS: Final = "vllm:kv_offload_kvtier_nvme_chunks"
OURS: Final = (CHUNK_HITS, WRITTEN_BYTES, SKIPPED, ASKED, CHECKSUM_FAILURES, TRANSFER_FAILURES, EXPIRED_LOOKUPS, HOST_CHUNKS, NVME_CHUNKS)
"""What the adapter adds."""

DEVICE_TOKENS: Final = "vllm:prefix_cache_hits"
TIER_TOKENS: Final = "vllm:external_prefix_cache_hits"
REQUESTS: Final = "vllm:request_success"
ACTIVE: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
CACHED_TOKENS: Final = "vllm:prompt_tokens_cached_by_source"
"""Labels: device, host, disk."""

CACHE_INFO: Final = "vllm:cache_config_info"

_MARK: Final = "vllm:kv_offload_kvtier_"
_LABELS: Final = ("tier", "source")


@dataclass(frozen=True)
class Metrics:
    """One look at an engine's metrics.

    Attributes:
        values: by name and the value of the label ``tier`` or ``source`` ("" without one), over all engines behind the address.
        names: all that there are, also those without a value so far.
        cache: vLLM's settings of its own cache, as text.
        num_engines: engines that report, such as data-parallel replicas.
    """

    values: Mapping[tuple[str, str], float] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    cache: Mapping[str, str] = field(default_factory=dict)
    num_engines: int = 1

    def total(self, name: str, tier: str | None = None) -> float:
        """Over all tiers, or of one."""
        return sum(value for (found, label), value in self.values.items() if found == name and tier in (None, label))

    @property
    def is_vllm(self) -> bool:
        return any(name.startswith("vllm:") for name in self.names)

    @property
    def has_tier(self) -> bool:
        """Whether a kvtier tier is attached."""
        return any(name.startswith(_MARK) for name in self.names)

    @property
    def pool_tokens(self) -> int | None:
        """Tokens that vLLM's own pool holds; None where it does not say."""
        blocks, tokens = self.cache.get("num_gpu_blocks", ""), self.cache.get("block_size", "")
        return int(blocks) * int(tokens) * self.num_engines if blocks.isdigit() and tokens.isdigit() else None


@dataclass(frozen=True)
class Growth:
    """What was counted between two looks."""

    before: Metrics
    after: Metrics

    def of(self, name: str, tier: str | None = None) -> int:
        return round(self.after.total(name, tier) - self.before.total(name, tier))

    def as_json(self) -> dict[str, int]:
        """What served a request: tokens from the device's cache and from the tier, chunks by level, and what went wrong."""
        return {"device_tokens": self.of(DEVICE_TOKENS), "tier_tokens": self.of(TIER_TOKENS), "host_chunks": self.of(CHUNK_HITS, HOST),
                "nvme_chunks": self.of(CHUNK_HITS, NVME), "stores_skipped": self.of(SKIPPED),
                "checksum_failures": self.of(CHECKSUM_FAILURES), "transfer_failures": self.of(TRANSFER_FAILURES),
                "expired_lookups": self.of(EXPIRED_LOOKUPS)}


def parse_metrics(text: str) -> Metrics:
    """Out of what ``/metrics`` answers. ValueError where that is something else."""
    page = read_metrics(text)
    return _metrics(page.families, page.samples)


def snapshot_metrics(metrics: Iterable[Any]) -> Metrics:
    """Out of what ``LLM.get_metrics()`` answers."""
    samples = []
    for metric in metrics:
        value = getattr(metric, "value", None)
        samples.append((metric.name, metric.labels, float(getattr(metric, "sum", 0.0) if value is None else value)))
    return _metrics((), samples)


def _metrics(names: Iterable[str], samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Metrics:
    values: dict[tuple[str, str], float] = {}
    found, engines = set(names), set()
    cache: Mapping[str, str] = {}
    for raw, labels, value in samples:
        name = raw.removesuffix("_total").removesuffix("_sum")
        key = (name, next((labels[label] for label in _LABELS if label in labels), ""))
        if not raw.endswith(("_bucket", "_count", "_created")):
            values[key] = values.get(key, 0.0) + value
        found.add(name)
        if "engine" in labels:
            engines.add(labels["engine"])
        if name == CACHE_INFO:
            cache = labels
    return Metrics(values, frozenset(found), cache, max(len(engines), 1))

"""``TierCollector``: a cache's statistics as Prometheus metrics (design: watching).

Nothing is counted here: each scrape takes one picture of the statistics, so that metrics and ``stats()`` can never disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

import kvtier
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiering.metrics_table import INFO, METRICS, UP, Kind, Metric, Sample
from kvtier.tiering.transfer_times import BOUNDS

_BUCKET_NAMES: Final = [*(str(bound) for bound in BOUNDS[:-1]), "+Inf"]
_OWN_LABELS: Final = {label for metric in (*METRICS, INFO) for label in metric.labels} | {"le"}


@runtime_checkable
class HasStats(Protocol):
    """``KVCacheManager``, ``TierIndex``, or whatever else has statistics with fields of the same names."""

    def stats(self) -> object:
        """A picture of the tier; a KVTierError once it has been closed."""


class TierCollector(Collector):
    """Register it: ``registry.register(TierCollector(cache))``. One cache for each registry.

    Args:
        cache: whose statistics are shown.
        labels: more labels for every metric, such as ``{"rank": "0"}``.

    Raises:
        ConfigError: a label's name is one of the metrics' own, or is none.
    """

    def __init__(self, cache: HasStats, labels: Mapping[str, str] | None = None) -> None:
        self._cache = cache
        self._labels = {name: str(value) for name, value in (labels or {}).items()}  # a number would fail every scrape
        for name in self._labels:
            if name in _OWN_LABELS or not name.isidentifier() or not name.isascii() or name.startswith("__"):
                raise ConfigError(f"labels={self._labels!r}: {name!r} cannot be a label here; name it otherwise, for example \"replica\"")

    def describe(self) -> list[Family]:
        """Nothing: a registry then does not take a picture when the collector is registered."""
        return []

    def collect(self) -> Iterator[Family]:
        """All metrics now."""
        try:
            stats = self._cache.stats()
        except KVTierError:
            yield self._family(UP, [((), 0.0)])
            return
        yield self._family(UP, [((), 1.0)])
        path = stats.gds.path if hasattr(stats, "gds") else "none"
        yield self._family(INFO, [((kvtier.__version__, getattr(self._cache, "model", None) or "", path), 1.0)])
        for metric in METRICS:
            if not hasattr(stats, metric.field):
                continue
            value = getattr(stats, metric.field)
            if metric.kind is Kind.HISTOGRAM:
                yield self._histogram(metric, value)
            else:
                yield self._family(metric, metric.samples(value))

    def _family(self, metric: Metric, samples: Iterable[Sample]) -> Family:
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=[*self._labels, *metric.labels])
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels], float(value))
        return family

    def _histogram(self, metric: Metric, value: object) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*self._labels, *metric.labels])
        for labels, histogram in metric.histograms(value):
            buckets = list(zip(_BUCKET_NAMES, map(float, itertools.accumulate(histogram.counts)), strict=True))
            family.add_metric([*self._labels.values(), *labels], buckets, histogram.sum_seconds)
        return family

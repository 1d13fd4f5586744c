"""The text that a ``/metrics`` answers, read: for ``kvtier top``, ``kvtier check`` and ``kvtier bench serve``.

The grammar is Prometheus' own (``prometheus_client.parser``); what it does not take is one kind of error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricsPage:
    """One answer.

    Attributes:
        families: names of all metrics, also of those without a sample so far.
        samples: (name, labels, value), in the order of the text; names as they stand there, with ``_total``, ``_bucket`` and the like.
    """

    families: frozenset[str]
    samples: tuple[tuple[str, Mapping[str, str], float], ...]


def read_metrics(text: str) -> MetricsPage:
    """Read an answer.

    Raises:
        ValueError: it is none.
    """
    from prometheus_client.parser import text_string_to_metric_families
    try:
        families = list(text_string_to_metric_families(text))
    except (IndexError, KeyError) as error:  # what the parser stumbles over in some texts that are none
        raise ValueError(f"no metrics: {error!r}") from error
    return MetricsPage(frozenset(family.name for family in families),
                       tuple((sample.name, sample.labels, sample.value) for family in families for sample in family.samples))

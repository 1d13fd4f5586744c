"""``/metrics``: the statistics under Prometheus' conventions; a hit counts when it was delivered; no more than loopback sees them."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tier_rig import TierRig, keys
from toy_engine import PROMPT, MakeCache, ToyEngine, WarmCache, fails, tokens_of

import kvtier
from kvtier import ConfigError, KVCacheManager, Request, RetentionConfig, TokenRange
from kvtier.io.faults import FaultOperation
from kvtier.tiering.metrics import TierCollector
from kvtier.tiering.metrics_server import MetricsServer, serve_metrics
from kvtier.tiering.metrics_table import INFO, METRICS, UP, Kind, reference_table
from kvtier.tiering.transfer_times import BOUNDS

ROOT = Path(__file__).resolve().parents[2]
Labels = frozenset[tuple[str, str]]


class Scrape:
    """What one request to ``/metrics`` brought: values by name and labels."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as answer:
            self.text = answer.read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.values = {(sample.name, frozenset(sample.labels.items())): sample.value
                       for family in self.families.values() for sample in family.samples}

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for (found, those), value in self.values.items() if found == name and set(labels.items()) <= those)


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[MetricsServer] = []

    def start(cache: Any, **settings: Any) -> MetricsServer:
        servers.append(serve_metrics(cache, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_metrics_are_what_the_statistics_say(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    for user in (1, 2, 3, 1, 2):
        engine.serve(Request(user, tokens_of(user, 14)))
        cache.refresh()
    assert cache.flush()
    scrape, stats = Scrape(serve(cache).url), cache.stats()
    assert stats.hit_blocks.primary + stats.hit_blocks.secondary + stats.hit_blocks.nvme > 0
    for level in ("primary", "secondary", "nvme"):
        assert scrape("kvtier_hit_tokens_total", level=level) == getattr(stats.hit_tokens, level)
        assert scrape("kvtier_hit_blocks_total", level=level) == getattr(stats.hit_blocks, level)
        assert scrape("kvtier_capacity_blocks", level=level, group="0") == getattr(stats, level).max_blocks
        assert scrape.sum("kvtier_blocks", level=level) == getattr(stats, level).max_blocks, "each block is in one state"
        assert scrape.sum("kvtier_blocks", level=level, state="cached") == scrape.sum("kvtier_cached_blocks", level=level)
    assert scrape("kvtier_cached_blocks", level="nvme", priority="35") == stats.nvme.evictable_blocks > 0
    assert scrape("kvtier_prompt_blocks_missed_total") == stats.missed > 0
    for (source, destination), number in stats.offload_bytes.items():
        assert scrape("kvtier_offloaded_bytes_total", source=source.name.lower(), destination=destination.name.lower()) == number > 0
    assert scrape("kvtier_nvme_written_bytes_total") == cache.store.stats().written_bytes > 0
    assert all(value >= 0 for value in scrape.values.values())


def test_a_hit_counts_when_it_was_delivered_and_not_when_it_was_promised(warm_cache: WarmCache, serve: Any) -> None:
    cache = warm_cache(fails(FaultOperation.READ))
    server = serve(cache)
    engine = ToyEngine(cache)
    admission, = engine.admit(Request(1, PROMPT))
    assert admission.prepopulated_tokens == 12
    assert engine.learn(1) == 0
    scrape = Scrape(server.url)
    assert scrape.sum("kvtier_hit_tokens_total") == 0
    assert scrape("kvtier_fallbacks_total") == cache.stats().fallbacks > 0
    assert scrape("kvtier_transfer_failures_total") > 0
    assert scrape.sum("kvtier_injected_faults_total") > 0


def test_drops_are_told_by_reason(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache(4, 4)
    engine = ToyEngine(cache)
    for user in (1, 2, 3):
        engine.serve(Request(user, tokens_of(user, 16)))
    stats = cache.stats()
    assert stats.dropped_by_reason == {"room": 4, "priority": 0, "unconfirmed": 0}
    engine.serve(Request(4, tokens_of(4, 16), retention=RetentionConfig([TokenRange(0, None, 10)])))
    engine.serve(Request(5, tokens_of(5, 16)))
    assert cache.stats().dropped_by_reason == {"room": 8, "priority": 4, "unconfirmed": 0}
    scrape = Scrape(serve(cache).url)
    assert scrape("kvtier_dropped_blocks_total", reason="priority") == 4
    assert scrape.sum("kvtier_dropped_blocks_total") == cache.stats().dropped


def test_the_time_that_moves_wait_is_a_histogram_whose_buckets_add_up(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache(8, 4)
    engine = ToyEngine(cache)
    for user in (1, 2, 3, 1):
        engine.serve(Request(user, tokens_of(user, 14)))
    assert cache.transfers.idle(20.0)
    scrape, stats = Scrape(serve(cache).url), cache.stats()
    down = {"source": "primary", "destination": "secondary"}
    moved = sum(stats.offload_blocks.values())
    for name in ("kvtier_move_queue_seconds", "kvtier_move_duration_seconds"):
        buckets = [scrape(f"{name}_bucket", le="+Inf" if bound == BOUNDS[-1] else str(bound), **down) for bound in BOUNDS]
        assert buckets == sorted(buckets), "cumulative"
        assert buckets[-1] == scrape(f"{name}_count", **down) == moved > 0
    assert 0 <= scrape("kvtier_move_queue_seconds_sum", **down) <= scrape("kvtier_move_duration_seconds_sum", **down)


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"kvtier_[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms", "_mib"))
        assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith("_seconds")
        assert metric.shown_name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help
        assert not metric.help.endswith(".")


def test_a_counter_never_goes_back(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache(8, 4, 16)
    server = serve(cache)
    engine = ToyEngine(cache)
    before = Scrape(server.url)
    for user in (1, 2, 3, 1):
        engine.serve(Request(user, tokens_of(user, 14)))
        now = Scrape(server.url)
        for key, value in now.values.items():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert value >= before.values.get(key, 0.0), key
        before = now
    cache.reset()
    assert Scrape(server.url).sum("kvtier_offloaded_blocks_total") >= before.sum("kvtier_offloaded_blocks_total") > 0


def test_after_the_cache_was_closed_only_that_is_said(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache()
    server = serve(cache)
    assert Scrape(server.url)("kvtier_up") == 1
    cache.close()
    assert Scrape(server.url).values == {("kvtier_up", frozenset()): 0.0}


def test_what_runs_is_a_metric_too_and_labels_may_be_added(make_cache: MakeCache, serve: Any) -> None:
    cache = make_cache(8, 4, 16)
    scrape = Scrape(serve(cache, labels={"replica": "a", "rank": 0}).url)
    assert scrape("kvtier_info", version=kvtier.__version__, model="toy@1:0123abcd", nvme_path="posix", replica="a", rank="0") == 1
    assert all({("replica", "a"), ("rank", "0")} <= labels for _name, labels in scrape.values)


@pytest.mark.parametrize("name", ["level", "le", "re plica", "__x", "", "é"])
def test_a_label_that_is_none_or_taken_is_refused(make_cache: MakeCache, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a label here"):
        TierCollector(make_cache(), {name: "a"})


def test_statistics_with_fewer_fields_have_fewer_metrics(serve: Any) -> None:
    index = SimpleNamespace(stats=lambda: SimpleNamespace(leases=3, fallbacks=0))
    assert Scrape(serve(index).url).values.keys() == {
        ("kvtier_up", frozenset()), ("kvtier_leases", frozenset()), ("kvtier_fallbacks_total", frozenset()),
        ("kvtier_info", frozenset({("version", kvtier.__version__), ("model", ""), ("nvme_path", "none")}))}


# -- the server ----------------------------------------------------------------------------------------------------------------


def test_only_loopback_is_listened_on_unless_told_otherwise(make_cache: MakeCache, serve: Any) -> None:
    server = serve(make_cache())
    assert server.url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)
    assert Scrape(serve(make_cache(), address="127.0.0.2").url)("kvtier_up") == 1


def test_a_port_that_is_taken_is_an_error_that_names_it(make_cache: MakeCache, serve: Any) -> None:
    server = serve(make_cache())
    with pytest.raises(ConfigError, match=rf"port {server.port} .*choose another port, 0 for any that is free"):
        serve_metrics(make_cache(), server.port)
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match=f"port {port} "):
            serve_metrics(make_cache(), port)
    with pytest.raises(ConfigError, match=r"'192\.0\.2\.1', port 0 .*an address of this machine"):
        serve_metrics(make_cache(), 0, "192.0.2.1")


def test_closing_waits_for_no_client_and_frees_the_port(make_cache: MakeCache, serve: Any) -> None:
    server = serve(make_cache())
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):  # says nothing
        assert Scrape(server.url)("kvtier_up") == 1, "and others are answered meanwhile"
        server.close()
        server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert serve(make_cache(), port=server.port).port == server.port


def test_a_server_without_its_thread_is_an_error_and_frees_the_port(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise ConfigError("no more threads")

    cache = make_cache()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr("kvtier.tiering.metrics_server.start_thread", refuse)
    with pytest.raises(ConfigError, match="no more threads"):
        serve_metrics(cache, port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


# -- documents -----------------------------------------------------------------------------------------------------------------


def names_shown() -> set[str]:
    names = {UP.name, INFO.name}
    for metric in METRICS:
        names |= {f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")} if metric.kind is Kind.HISTOGRAM else {metric.shown_name}
    return names


def test_the_reference_lists_every_metric_as_it_is() -> None:
    assert reference_table() in (ROOT / "docs" / "metrics.md").read_text(), \
        "paste the output of: python -c 'from kvtier.tiering.metrics_table import *; print(reference_table())'"


def expressions(panel: Any) -> Iterator[str]:
    if isinstance(panel, dict):
        for key, value in panel.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            yield from expressions(value)
    elif isinstance(panel, list):
        for value in panel:
            yield from expressions(value)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "kvtier.json").read_text())
    labels = {label for metric in (*METRICS, INFO) for label in metric.labels} | {"le", "instance", "job"}
    found: set[str] = set()
    for expression in expressions(dashboard):
        found |= set(re.findall(r"\bkvtier_\w+", expression))
        for inside in re.findall(r"(?:by|without) \(([^)]*)\)", expression):
            assert set(re.split(r"\s*,\s*", inside)) <= labels, expression
        for inside in re.findall(r"\{([^}]*)\}", expression):
            assert {match.strip() for match in re.findall(r"(\w+)\s*[=!]", inside)} <= labels, expression
    assert found <= names_shown()
    assert len(found) > 20
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["targets"] and panel["title"] and panel["description"] for panel in panels)


def test_a_manager_and_an_index_together_show_every_metric_of_the_table(make_cache: MakeCache, serve: Any) -> None:
    cache: KVCacheManager = make_cache(8, 4, 16)
    with TierRig() as rig:
        rig.store(keys(3))
        rig.load(keys(3))
        stats = rig.index.stats()
        of_index = Scrape(serve(rig.index).url)
        assert of_index("kvtier_engine_stored_blocks_total") == stats.stored_blocks == 3
        assert of_index("kvtier_hit_blocks_total", level="secondary") == stats.hit_blocks.secondary > 0
        assert of_index.sum("kvtier_blocks", level="secondary") == stats.secondary.max_blocks
        assert of_index.sum("kvtier_dropped_blocks_total") == stats.dropped
        assert of_index("kvtier_offloaded_bytes_total", source="secondary", destination="nvme") == stats.nvme_written_bytes
        assert of_index("kvtier_onboarded_blocks_total", source="nvme", destination="secondary") == stats.promoted_blocks
        assert "kvtier_hit_tokens" not in of_index.families
    of_manager = Scrape(serve(cache).url)
    assert not any(name.startswith("kvtier_engine") for name in of_manager.families)
    assert {*of_manager.families, *of_index.families} == {metric.name for metric in (UP, INFO, *METRICS)}

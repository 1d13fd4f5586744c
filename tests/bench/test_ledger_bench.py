"""``kvtier bench ledger`` on tiny pools: which rows there are, and that a wrong result never becomes a figure."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.bench import ledger as ledger_bench
from kvtier.bench import ledger_growth, ledger_keys, ledger_workloads
from kvtier.bench.build import compiled
from kvtier.bench.ledger import measure_ledger
from kvtier.bench.ledger_growth import size_of
from kvtier.bench.ledger_memory import bytes_per_block
from kvtier.bench.ledger_plan import LedgerPlan
from kvtier.bench.ledger_rig import Side, Workload
from kvtier.bench.report import Report
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.ledger import Ledger

TINY = LedgerPlan(rounds=3, seconds=30.0, match_tokens=1024, branch_every=4, insert_tokens=256, inserts=2, evict_pools=(32, 64),
                  decode_sequences=4, decode_tokens=40, decode_steps=40, users=3, history=200, added=40, turns=2, host_blocks=64,
                  growth=(32, 64), memory_blocks=512, siblings=(2, 8))
ROWS = ["ledger/W1", "ledger/W1/ready", "ledger/W1/list", "ledger/W1S", "ledger/W1S/ready", "ledger/W2", "ledger/W2/list",
        "ledger/W2/events-read", "ledger/W2/events-off", "ledger/W3", "ledger/W3/events-read", "ledger/W3/events-off",
        "ledger/W3/offload", "ledger/W3/first", "ledger/W3/64", "ledger/W3/64/events-read", "ledger/W3/64/events-off",
        "ledger/W3/64/offload", "ledger/W3/64/first",
        "ledger/W4", "ledger/W5", "ledger/W6", "ledger/W6/keys", "ledger/growth/32", "ledger/growth/64", "ledger/growth/ratio",
        "ledger/growth/siblings/2", "ledger/growth/siblings/8", "ledger/growth/siblings/ratio", "ledger/growth/bytes-per-block"]


@pytest.fixture(autouse=True)
def memory_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each test would make them slow; one test asks it for real."""
    monkeypatch.setattr(ledger_growth, "bytes_per_block", lambda num_blocks, who: 400.0)


def measure(tmp_path: Path, plan: LedgerPlan = TINY, peer: str | None = "none") -> tuple[int, dict]:
    figures = tmp_path / "ledger.json"
    code = measure_ledger(plan=plan, peer=peer).finish(figures)
    return code, json.loads(figures.read_text())


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave the other workloads out, and growth."""
    genuine = ledger_bench._workloads
    monkeypatch.setattr(ledger_bench, "_workloads", lambda plan, with_vllm: {
        name: make for name, make in genuine(plan, with_vllm).items() if name in names})
    monkeypatch.setattr(ledger_bench, "add_growth", lambda *_: None)


def invalid(written: dict) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in written["config"]["invalid"]}


def test_the_rows_are_named_as_the_design_says_and_have_its_keys(tmp_path: Path) -> None:
    code, written = measure(tmp_path)
    assert invalid(written) == {}
    assert code == 0
    assert [row["name"] for row in written["results"]] == ROWS
    assert set(written) == {"kvtier", "machine", "config", "results"}
    for row in written["results"]:
        assert set(row) == {"name", "unit", "median", "low", "high", "limit", "ratio", "peers"}
        assert 0.0 < row["low"] <= row["median"] <= row["high"]
        assert row["unit"] == {"ratio": "x", "bytes-per-block": "B"}.get(row["name"].rpartition("/")[2], "us")
        assert row["peers"] == {}
        assert (row["limit"] is not None) == row["name"].startswith("ledger/W1")


def test_what_the_figures_depend_on_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W4")
    config = measure(tmp_path)[1]["config"]
    assert config["levels"] == ["primary", "secondary", "nvme"]
    assert config["max_events"] == 1024
    assert config["tokens_per_block"] == 32
    assert config["compiled"] is compiled() is config["ledger_module"].endswith(".so")
    assert config["evict_pools"] == [32, 64]
    assert any("plain Python" in note for note in config["notes"]) != config["compiled"]


def test_a_match_that_finds_too_little_makes_the_rows_invalid_and_the_exit_code_1(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = ledger_workloads.capacity.match

    def short(ledger, request):
        found = genuine(ledger, request)
        found.reusable_blocks -= 1
        return found

    monkeypatch.setattr(ledger_workloads.capacity, "match", short)
    code, written = measure(tmp_path)
    assert code == 1
    assert invalid(written)["ledger/W1"] == "blocks matched: 30, expected 31"
    assert {"ledger/W1S", "ledger/W2", "ledger/W3", "ledger/W3/offload", "ledger/W5", "ledger/growth/32"} <= invalid(written).keys()
    assert {row["name"] for row in written["results"]} == {"ledger/W4", "ledger/W6", "ledger/W6/keys", *ROWS[-4:]}


def test_events_that_leave_blocks_out_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W3")
    genuine = EventLog.flush
    monkeypatch.setattr(EventLog, "flush", lambda self: genuine(self)[:-1])
    code, written = measure(tmp_path)
    assert code == 1
    assert "events tell of" in invalid(written)["ledger/W3"]
    assert "ledger/W3/events-off" not in invalid(written)


def test_an_eviction_that_offloads_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W3", "ledger/W6")
    genuine = ledger_workloads.new_ledger
    monkeypatch.setattr(ledger_workloads, "new_ledger",
                        lambda *levels, offload=True, events=True: genuine(*levels, offload=False, events=events))
    code, written = measure(tmp_path)
    assert code == 1
    assert "Moves" in invalid(written)["ledger/W3/offload"]
    assert "tokens found on the secondary level" in invalid(written)["ledger/W6"]
    assert "ledger/W3" not in invalid(written)


def test_a_decode_step_that_forgets_a_sequence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W4", "ledger/W5")
    genuine = Ledger.append_step
    monkeypatch.setattr(Ledger, "append_step", lambda self, ids, tokens: genuine(self, ids[1:], tokens[1:]))
    assert invalid(measure(tmp_path)[1]).keys() == {"ledger/W4"}


def test_a_workload_that_raises_is_invalid_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KVTierError("no step today")

    only(monkeypatch, "ledger/W4", "ledger/W5")
    monkeypatch.setattr(Ledger, "append_step", refuse)
    code, written = measure(tmp_path)
    assert code == 1
    assert invalid(written) == {"ledger/W4": "no step today"}
    assert [row["name"] for row in written["results"]] == ["ledger/W5"]


def test_vllm_that_is_asked_for_and_missing_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="'vllm' is not installed in this environment; install vllm"):
        measure_ledger(plan=TINY, peer="vllm")
    code, written = measure(tmp_path, peer=None)
    assert code == 0
    assert any("not installed" in note for note in written["config"]["notes"])


def test_an_unknown_peer_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_bench, "_measure", lambda *_: pytest.fail("measured all the same"))
    with pytest.raises(ConfigError, match="--peer nobody: unknown; use vllm or none"):
        measure_ledger(plan=TINY, peer="nobody")


class Fake(Side):
    """Does nothing, rightly or wrongly."""

    def __init__(self, failure: str = "") -> None:
        super().__init__(1)
        self._wrong = failure

    def run(self) -> None:
        pass

    def check(self) -> None:
        self.failure = self._wrong


def test_a_comparison_with_a_peer_that_gave_a_wrong_result_is_left_out() -> None:
    sides = {"ledger/X": Fake(), "ledger/X/vllm": Fake("tokens matched: 0, expected 1"), "ledger/X/other": Fake()}
    workload = Workload(sides, {"ledger/X": {"vllm": "ledger/X/vllm", "other": "ledger/X/other"}})
    report = Report("test", {})
    ledger_bench._measure(report, "ledger/X", lambda: workload, TINY)
    assert report.invalid == {"ledger/X/vllm": "tokens matched: 0, expected 1"}
    assert [row.name for row in report.rows] == ["ledger/X", "ledger/X/other"]
    assert set(report.rows[0].peers) == {"other"}


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    assert bytes_per_block(10_240, "kvtier") > 128.0  # the tokens alone


def test_a_memory_process_that_fails_makes_the_row_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_growth, "bytes_per_block", bytes_per_block)
    monkeypatch.setattr(ledger_bench, "_workloads", lambda *_: {})
    code, written = measure(tmp_path, replace(TINY, memory_blocks=100))
    assert code == 1
    assert "0 blocks are cached, expected 100" in invalid(written)["ledger/growth/bytes-per-block"]


def test_a_host_tier_that_does_not_find_all_its_blocks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ledger/W6")
    genuine = ledger_keys.KeyLedger
    monkeypatch.setattr(ledger_keys, "KeyLedger", lambda num_blocks, rules, max_events: genuine([(2, 0)], rules, max_events=max_events))
    code, written = measure(tmp_path)
    assert code == 1
    assert "blocks loaded and evicted" in invalid(written)["ledger/W6/keys"]
    assert "ledger/W6" not in invalid(written)


def test_sizes_are_named_in_short() -> None:
    assert [size_of(blocks) for blocks in (32, 1024, 65_536, 102_400, 1_024_000)] == ["32", "1k", "64k", "100k", "1M"]


@pytest.mark.vllm
def test_vllm_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, written = measure(tmp_path, peer="vllm")
    assert (code, invalid(written)) == (0, {})
    rows = {row["name"]: row for row in written["results"]}
    for name in ("ledger/W1", "ledger/W1S", "ledger/W2", "ledger/W3", "ledger/W4", "ledger/W5", "ledger/growth/64"):
        assert rows[name]["peers"]["vllm"] > 0.0
        assert rows[f"{name}/vllm"]["median"] > 0.0
    assert set(rows["ledger/W2/events-read"]["peers"]) == {"vllm", "vllm-events"}
    for name in ("ledger/W6", "ledger/W6/keys"):
        assert set(rows[name]["peers"]) == {"vllm-lru", "vllm-arc"}
    assert rows["ledger/W3/offload"]["peers"] == {}

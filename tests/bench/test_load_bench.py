"""``kvtier bench load`` on tiny blocks: which rows there are, what it refuses, and that a wrong byte never becomes a figure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.bench import load as load_bench
from kvtier.bench import load_engine
from kvtier.bench.build import compiled
from kvtier.bench.load import GRID, LOAD, RECOMPUTE, LoadPlan, measure_load
from kvtier.bench.load_engine import TimedEngine, block_content
from kvtier.errors import ConfigError
from kvtier.pools.primary import PrimaryPool

TINY = LoadPlan(block_bytes=(8192,), num_blocks=(4,), tokens_per_second=(1e6, 1e4), rounds=3, seconds=10.0)
ROWS = ["load/8KiB/4x32/1e+06", "load/8KiB/4x32/10000"]


def measure(directory: Path, plan: LoadPlan = TINY) -> tuple[int, dict]:
    figures = directory.parent / f"{directory.name}.json"
    code = measure_load(directory, plan=plan).finish(figures)
    return code, json.loads(figures.read_text())


def test_each_point_stands_beside_computing_and_loading(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    code, written = measure(tmp_path)
    assert code == 0
    rows = {row["name"]: row for row in written["results"]}
    assert list(rows) == [*ROWS, GRID]
    for name in ROWS:
        row = rows[name]
        assert row["unit"] == "ms"
        assert 0.0 < row["low"] <= row["median"] <= row["high"]
        assert row["limit"]["name"] == RECOMPUTE
        assert row["limit"]["value"] >= 1.0
        assert row["ratio"] > 0.0
        assert row["peers"][LOAD] > 0.0
        assert len(written["config"]["decisions"][name]) == 3
        assert set(written["config"]["decisions"][name]) <= {"loaded", "recomputed", "probed"}
    assert rows[GRID]["ratio"] == rows[GRID]["median"]
    assert written["config"]["compiled"] is compiled()
    assert written["config"]["invalid"] == []
    assert any("from the turns of all three" in note for note in written["config"]["notes"]), "what the one that decides has learned from"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_wrong_bytes_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_read = PrimaryPool.read_block

    def read(self: PrimaryPool, slot: int):
        block = true_read(self, slot)
        block[77] ^= 1
        return block

    monkeypatch.setattr(PrimaryPool, "read_block", read)
    code, written = measure(tmp_path)
    assert code == 1
    assert [entry["name"] for entry in written["config"]["invalid"]] == ROWS
    assert "other bytes" in written["config"]["invalid"][0]["reason"]


def test_a_turn_that_did_not_load_what_it_is_about_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = load_bench._Store._first_token

    def forgetful(self: load_bench._Store, engine: TimedEngine, way: str) -> None:
        genuine(self, engine, RECOMPUTE if way == LOAD else way)

    monkeypatch.setattr(load_bench._Store, "_first_token", forgetful)
    code, written = measure(tmp_path)
    assert code == 1
    assert "always load: 0 tokens came from NVMe and 0 were reused" in written["config"]["invalid"][0]["reason"]


@pytest.mark.parametrize("plan", [LoadPlan((1000,), (4,), (1e6,), 3, 1.0), LoadPlan((), (4,), (1e6,), 3, 1.0),
                                  LoadPlan((8192,), (0,), (1e6,), 3, 1.0), LoadPlan((8192,), (4,), (0.0,), 3, 1.0),
                                  LoadPlan((8192,), (4,), (1e6,), 0, 1.0)])
def test_a_plan_that_cannot_be_measured_is_refused(tmp_path: Path, plan: LoadPlan) -> None:
    with pytest.raises(ConfigError):
        measure_load(tmp_path, plan=plan)


def test_the_usual_plans_can_be_measured() -> None:
    for quick in (False, True):
        LoadPlan.usual(quick).check()
    assert len(LoadPlan.usual(False).block_bytes) >= 3


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        measure_load(tmp_path / "nowhere", plan=TINY)


def test_the_engine_takes_the_time_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(np.arange(0.0, 10.0, 0.01).tolist())
    monkeypatch.setattr(load_engine, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    engine = TimedEngine(1000.0)
    assert engine.prefill(0, 500) == pytest.approx(engine.cost.seconds(0, 500), abs=0.011)
    assert engine.cost.seconds(4000, 4500) > engine.cost.seconds(0, 500)


def test_other_tokens_have_other_bytes() -> None:
    first, again, other = block_content([1, 2], 64), block_content([1, 2], 64), block_content([1, 3], 64)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)

"""``kvtier bench copy`` on tiny pools: which rows there are, and that a wrong byte never becomes a figure."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.bench import copy as copy_bench
from kvtier.bench import report as report_module
from kvtier.bench.build import compiled
from kvtier.bench.copy import CopyPlan, measure_copy
from kvtier.bench.copy_point import Point, Route, Stage
from kvtier.errors import ConfigError, TransferError
from kvtier.io.copiers import Copier, HostCopier, open_copiers
from kvtier.kernels.compiled_copy import copy_runs
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.host_memory import HostMemory
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PRIMARY, SECONDARY
from kvtier.tiering import routes
from kvtier.tiering.copy_batch import CopyBatch

TINY = CopyPlan(num_blocks=8, batch_blocks=3, rounds=3)
SMALL_BLOCKS = CopyPlan(num_blocks=8, batch_blocks=3, rounds=3, group=KVLayout.uniform(2, 2, 64, "bfloat16", 8).groups[0])


def test_the_rows_are_named_as_the_design_says_and_each_stands_beside_memcpy(tmp_path: Path) -> None:
    figures = tmp_path / "copy.json"
    assert measure_copy(True, plan=TINY).finish(figures) == 0
    written = json.loads(figures.read_text())
    rows = {row["name"]: row for row in written["results"]}
    there, back = "copy/primary->secondary/2MiB", "copy/secondary->primary/2MiB"
    assert list(rows) == [
        there, f"{there}/submit", f"{there}/noise", back, f"{back}/submit", f"{back}/noise",
        "copy/primary->primary/2MiB", "copy/primary->primary/2MiB/submit", f"{there}/runs", f"{there}/scattered", f"{back}/scattered",
        "copy/both-directions/2MiB", "copy/primary->primary/2MiB/partial", f"{there}/layers", f"{back}/layers"]
    assert rows["copy/both-directions/2MiB"]["limit"]["name"] == "libc memcpy, 2 threads"
    for name, row in rows.items():
        assert 0.0 < row["low"] <= row["median"] <= row["high"]
        if name.endswith("/submit"):
            assert (row["unit"], row["limit"], row["ratio"]) == ("us/block", None, None)
        elif name.endswith("/noise"):
            assert (row["unit"], row["limit"], row["ratio"]) == ("x", None, None)
        else:
            assert row["unit"] == "GB/s"
            assert row["limit"]["name"].startswith("libc memcpy")
            assert row["limit"]["value"] > 0.0
            assert row["ratio"] > 0.0
    assert written["config"]["block_bytes"] == 2 << 20
    assert written["config"]["compiled"] is compiled()
    assert any("nothing crosses PCIe" in note for note in written["config"]["notes"])
    assert any("in a loop in Python" in note for note in written["config"]["notes"]), "what the limit is beside small blocks"


def test_the_copies_in_c_come_with_the_compiled_ledger_so_that_one_answer_holds_for_all_benchmarks() -> None:
    assert compiled() is (copy_runs is not None)


@pytest.mark.parametrize("both_ways", [False, True], ids=["one-way", "both-ways"])
def test_the_limit_copies_the_same_blocks_in_a_thread_of_its_own_for_each_direction(both_ways: bool) -> None:
    """As ours does: who copies in the calling thread is on the other core, and that may be a faster one."""
    with Stage(SMALL_BLOCKS.group, 8, layer_first=False) as stage:
        point = Point(stage, Route(PRIMARY, SECONDARY, both_ways=both_ways), 3, seed=1)
        point.choose_pairs()
        there, back = stage.plain_source, stage.plain_destination
        there[:] = np.random.default_rng(1).integers(0, 256, there.shape, dtype=np.uint8)
        back[:] = ~there
        before = [there.copy(), back.copy()]
        memcpy, threads = point._memcpy, set()

        def watched(destination: int, source: int, num_bytes: int) -> object:
            threads.add(threading.get_ident())
            return memcpy(destination, source, num_bytes)

        point._memcpy = watched
        assert point.copy_plainly() > 0.0
        assert len(threads - {threading.get_ident()}) == len(threads) == 1 + both_ways
        for (_, _, pairs), source, rows in zip(point._legs, before, (back, there), strict=False):
            assert all(np.array_equal(rows[to_slot], source[from_slot]) for from_slot, to_slot in pairs)


def test_a_limit_that_fails_is_not_measured() -> None:
    with Stage(SMALL_BLOCKS.group, 8, layer_first=False) as stage:
        point = Point(stage, Route(PRIMARY, SECONDARY), 3, seed=1)
        point.choose_pairs()

        def fail(_destination: int, _source: int, _num_bytes: int) -> object:
            raise OSError("no memory")

        point._memcpy = fail
        with pytest.raises(TransferError, match="no memory"):
            point.copy_plainly()


class WrongByte:
    """Copies, and then turns one bit of the last block's first token over."""

    def __init__(self, copier: Copier, destination: object) -> None:
        self._copier = copier
        self._destination = destination

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        self._copier.copy(pairs, num_tokens)
        self._destination[pairs[-1][1], 20] ^= 1  # type: ignore[index]


def test_one_wrong_byte_makes_a_row_invalid_and_the_exit_code_1(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def with_wrong_bytes(pools: GroupPools, staging: HostArena | None, device: str, _: object = None) -> dict[tuple[int, int], Copier]:
        copiers = open_copiers(pools, staging, device)
        if pools.primary.layer_first:
            return copiers
        copiers[PRIMARY, PRIMARY] = WrongByte(copiers[PRIMARY, PRIMARY], pools.primary.rows.numpy())
        return copiers

    monkeypatch.setattr(routes, "open_copiers", with_wrong_bytes)
    figures = tmp_path / "copy.json"
    assert measure_copy(plan=SMALL_BLOCKS).finish(figures) == 1
    written = json.loads(figures.read_text())
    invalid = {entry["name"]: entry["reason"] for entry in written["config"]["invalid"]}
    assert list(invalid) == ["copy/primary->primary/8KiB", "copy/primary->primary/8KiB/partial"]
    assert "byte 20 is" in invalid["copy/primary->primary/8KiB"]
    assert not invalid.keys() & {row["name"] for row in written["results"]}
    assert "INVALID" in capsys.readouterr().out


def test_a_copy_that_was_not_carried_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The bytes of the round before are still there: they must not pass for this round's.
    calls = 0
    genuine = HostCopier.copy

    def lazy_in_the_third_round(self: HostCopier, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        nonlocal calls
        calls += 1  # three batches per round
        if not 6 < calls <= 9:
            genuine(self, pairs, num_tokens)

    monkeypatch.setattr(CopyBatch, "plan", lambda *_: None)  # or the copier would be asked for its calls beforehand
    monkeypatch.setattr(HostCopier, "copy", lazy_in_the_third_round)
    figures = tmp_path / "copy.json"
    assert measure_copy(plan=SMALL_BLOCKS).finish(figures) == 1
    written = json.loads(figures.read_text())
    assert [entry["name"] for entry in written["config"]["invalid"]] == ["copy/primary->secondary/8KiB"]


def test_a_failed_copy_makes_its_row_invalid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(self: HostCopier, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        raise RuntimeError("the bus is on fire")

    monkeypatch.setattr(CopyBatch, "plan", lambda *_: None)  # or the copier would be asked for its calls beforehand
    monkeypatch.setattr(HostCopier, "copy", fail)
    assert measure_copy(plan=SMALL_BLOCKS).finish(None) == 1
    assert "the bus is on fire" in " ".join(capsys.readouterr().out.split())


def test_pools_that_do_not_fit_are_refused_before_they_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_bench, "_measure", lambda *_: pytest.fail("measured all the same"))
    monkeypatch.setattr(report_module, "host_memory", lambda: HostMemory(1 << 20, 1 << 30, "MemAvailable", None))
    with pytest.raises(ConfigError, match=r"wants 64\.00 MiB .* use --quick"):
        measure_copy(plan=TINY)


@pytest.mark.parametrize("plan", [CopyPlan(3, 1, 1), CopyPlan(8, 0, 1), CopyPlan(8, 1, 0)])
def test_a_plan_without_work_is_refused(plan: CopyPlan) -> None:
    with pytest.raises(ConfigError, match="needs at least"):
        measure_copy(plan=plan)


def test_the_pools_are_larger_than_the_last_level_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_bench, "last_level_cache_bytes", lambda: 512 << 20)
    for quick in (True, False):
        for plan in CopyPlan.for_this_machine(quick):
            assert plan.num_blocks // 2 * plan.group.block_bytes >= (512 << 20 if quick else 2 << 30)


def test_blocks_from_64_kib_to_8_mib_are_measured_with_at_least_seven_rounds() -> None:
    plans = CopyPlan.for_this_machine(quick=False)
    assert sorted(plan.group.block_bytes >> 10 for plan in plans) == [64, 256, 512, 1024, 2048, 8192]
    assert all(plan.rounds >= 7 for plan in plans)
    assert [plan.group.block_bytes for plan in plans if plan.is_main] == [2 << 20]


def test_a_size_that_is_not_the_main_one_has_its_main_rows_only(tmp_path: Path) -> None:
    figures = tmp_path / "copy.json"
    assert measure_copy(plan=[CopyPlan(8, 3, 3, SMALL_BLOCKS.group, is_main=False)]).finish(figures) == 0
    names = [row["name"] for row in json.loads(figures.read_text())["results"] if row["limit"]]
    assert names == ["copy/primary->secondary/8KiB", "copy/secondary->primary/8KiB", "copy/primary->secondary/8KiB/layers",
                     "copy/secondary->primary/8KiB/layers"]


def test_torch_has_as_many_threads_afterwards_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_copy(plan=SMALL_BLOCKS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

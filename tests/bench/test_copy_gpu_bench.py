"""The GPU copy benchmark's own logic, run on the CPU with tiny pools: its rows, and that a wrong byte never becomes a figure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.bench import copy_gpu
from kvtier.bench.copy_gpu import GpuCopyPlan, measure_gpu_copies
from kvtier.errors import ConfigError
from kvtier.io.copiers import Copier, HostCopier, open_copiers
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction
from kvtier.io.copy_tools import CopyTools
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PRIMARY, SECONDARY
from kvtier.tiering import routes
from kvtier.tiering.copy_batch import CopyBatch

TINY = GpuCopyPlan(num_blocks=8, batch_blocks=3, rounds=5)
SMALL_BLOCKS = GpuCopyPlan(num_blocks=8, batch_blocks=3, rounds=5, group=KVLayout.uniform(2, 2, 64, "bfloat16", 8).groups[0])


def test_there_is_a_row_for_each_direction_beside_one_large_copy_of_the_same_run() -> None:
    written = measure_gpu_copies(TINY, device="cpu").as_json()
    rows = {row["name"]: row for row in written["results"]}  # type: ignore[attr-defined]
    names = ["copy/primary->secondary/2MiB", "copy/secondary->primary/2MiB", "copy/primary->primary/2MiB", "copy/both/2MiB"]
    assert list(rows) == [name for main in names for name in (main, f"{main}/submit")]
    for name in names:
        assert rows[name]["unit"] == "GB/s"
        assert rows[name]["ratio"] > 0.0
        assert "cudaMemcpyAsync" in rows[name]["limit"]["name"]
        assert rows[name]["low"] <= rows[name]["median"] <= rows[name]["high"]
        assert rows[f"{name}/submit"]["unit"] == "us/block"
    assert GpuCopyPlan().num_blocks * GpuCopyPlan().group.block_bytes == 1 << 30


def test_the_note_names_the_ways_that_blocks_of_this_size_took(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {Direction.UP: ((4096, CopyPath.KERNEL), (1 << 20, CopyPath.BATCH)), Direction.DOWN: ((4096, CopyPath.BATCH),),
              Direction.WITHIN: ((4096, CopyPath.KERNEL),)}
    tools = CopyTools(None, paths=CopyPaths(chosen), missing={CopyPath.KERNEL: "it was given up"})  # type: ignore[arg-type]
    monkeypatch.setattr(copy_gpu, "load_cuda", lambda: None)
    monkeypatch.setattr(copy_gpu, "copy_tools", lambda *_: tools)
    with copy_gpu._Stage(TINY, "cpu") as stage:
        assert stage.ways() == "by the host"
        stage._on_gpu = True
        assert stage.ways() == "host to device: one batch, device to host: one batch, within the device: a call for each"
        stage._on_gpu = False
    assert "Blocks go by the host." in measure_gpu_copies(SMALL_BLOCKS, device="cpu").notes[0]


class WrongByte:
    """Copies, and then turns one bit of the last block over."""

    def __init__(self, copier: Copier, pools: GroupPools) -> None:
        self._copier = copier
        self._rows = pools.primary.rows.numpy()

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        self._copier.copy(pairs, num_tokens)
        self._rows[pairs[-1][1], 20] ^= 1


def test_one_wrong_byte_rejects_the_rows_that_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_wrong_bytes(pools: GroupPools, staging: HostArena | None, device: str, _: object = None) -> dict[tuple[int, int], Copier]:
        copiers = open_copiers(pools, staging, device)
        copiers[PRIMARY, SECONDARY] = WrongByte(copiers[PRIMARY, SECONDARY], pools)
        return copiers

    monkeypatch.setattr(routes, "open_copiers", with_wrong_bytes)
    report = measure_gpu_copies(SMALL_BLOCKS, device="cpu")
    assert list(report.invalid) == ["copy/secondary->primary/8KiB", "copy/both/8KiB"]
    assert "does not hold the bytes of secondary slot" in report.invalid["copy/both/8KiB"]
    assert [row.name for row in report.rows if not row.name.endswith("/submit")] == [
        "copy/primary->secondary/8KiB", "copy/primary->primary/8KiB"]


def test_a_copy_that_was_not_carried_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bytes of the round before are still there: they must not pass for this round's.
    calls = 0
    copy = HostCopier.copy

    def sometimes(self: HostCopier, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        nonlocal calls
        calls += 1
        copy(self, pairs if calls < 12 else pairs[:-1], num_tokens)

    monkeypatch.setattr(CopyBatch, "plan", lambda *_: None)  # or the copier would be asked for its calls beforehand
    monkeypatch.setattr(HostCopier, "copy", sometimes)
    assert measure_gpu_copies(SMALL_BLOCKS, device="cpu").invalid


@pytest.mark.parametrize("plan", [GpuCopyPlan(num_blocks=3), GpuCopyPlan(batch_blocks=0), GpuCopyPlan(rounds=4)])
def test_a_plan_that_means_nothing_is_refused(plan: GpuCopyPlan) -> None:
    with pytest.raises(ConfigError, match="needs at least"):
        measure_gpu_copies(plan, device="cpu")

"""``kvtier bench gds`` with host memory and a double of KvikIO in the place of a GPU: what it does, and what it must not let pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "io"))  # importlib mode puts no folder there

from kvikio_double import KvikioDouble

from kvtier.bench.build import compiled
from kvtier.bench.gds import GdsPlan, measure_gds
from kvtier.errors import ConfigError, CorruptBlock
from kvtier.io.gds import GdsPath
from kvtier.pools.nvme_geometry import NvmeGeometry

PLAN = GdsPlan(block_bytes=64 << 10, num_blocks=6, at_once=2, rounds=5, threads=(1, 2), task_sizes=(4096, 65_536))


def test_a_machine_without_cupy_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("kvtier.io.gds_probe.obstacle", lambda device, directory: None)
    with pytest.raises(ConfigError, match=r"no GPUDirect Storage between cuda:0 .*: CuPy is not installed; pip install 'kvtier\[cuda\]'$"):
        measure_gds(tmp_path, plan=PLAN)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_refused_as_by_the_other_benchmarks_of_a_drive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--directory .*none: does not exist; name a folder on the drive"):
        measure_gds(tmp_path / "none", plan=PLAN)


def through(kvikio: KvikioDouble) -> Callable[..., GdsPath]:
    def open_path(paths: Sequence[Path], geometries: Sequence[NvmeGeometry], rows: int, threads: int, task: int) -> GdsPath:
        return GdsPath.of_host(kvikio, paths, geometries, rows, task)
    return open_path


def test_each_setting_has_a_row_for_each_direction_and_the_best_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert measure_gds(tmp_path, plan=PLAN, open_path=through(KvikioDouble())).finish(file) == 0
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["results"]] == [
        f"gds/{verb}/64KiB/{setting}" for setting in ("1x4KiB", "1x64KiB", "2x4KiB", "2x64KiB") for verb in ("write", "read")]
    assert all(row["limit"]["name"] == "KvikIO alone" and row["ratio"] > 0 for row in written["results"])
    assert written["config"]["compiled"] is compiled()
    assert written["config"]["notes"][-1].startswith("gds: 6 blocks, 2 at the same time. Fastest reads here: gds_threads=")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_blocks_that_went_through_the_host_are_no_figures_of_this_way(tmp_path: Path) -> None:
    class Reluctant(KvikioDouble):
        """Refuses one read in three."""

        def note(self, verb: str, buf: object, size: int, offset: int) -> None:
            super().note(verb, buf, size, offset)
            self.short_by = 4096 if verb == "pread" and len(self.calls) % 3 == 0 and self.armed else 0

        armed = False

    kvikio = Reluctant()
    plan = GdsPlan(block_bytes=64 << 10, num_blocks=6, at_once=1, rounds=5, threads=(1,), task_sizes=(4096,))
    opened = through(kvikio)

    def open_path(*arguments: object) -> GdsPath:
        path = opened(*arguments)
        row = path.groups[0].rows[0]
        read = row.start_read

        def arm_for_ours(offset: int) -> object:
            kvikio.armed = sys._getframe(1).f_code.co_name == "_read_row"
            return read(offset)

        row.start_read = arm_for_ours  # type: ignore[method-assign]
        return path

    report = measure_gds(tmp_path, plan=plan, open_path=open_path)
    assert report.finish(None) == 1
    assert report.notes[-1].endswith("No reads held.")


def test_a_wrong_byte_ends_it(tmp_path: Path) -> None:
    kvikio = KvikioDouble()
    kvikio.corrupts_writes = True
    with pytest.raises(CorruptBlock):
        measure_gds(tmp_path, plan=PLAN, open_path=through(kvikio))
    assert list(tmp_path.iterdir()) == []


def test_without_gpudirect_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no GPUDirect Storage between cpu and .*: device='cpu'"):
        measure_gds(tmp_path, device="cpu", plan=PLAN)
    assert list(tmp_path.iterdir()) == []

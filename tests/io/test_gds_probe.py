"""The probe for GPUDirect Storage: no reason is swallowed, nothing that is not byte for byte right counts, and it always ends."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there

from kvikio_double import HostMemory, KvikioDouble

from kvtier.io import gds_probe
from kvtier.io.gds_probe import PROBE_BYTES, PROBE_NAME, main, obstacle, try_directory, write_read_compare


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_probe, "is_kvikio_installed", lambda: True)


def child(tmp_path: Path, text: str) -> tuple[str, ...]:
    script = tmp_path / "probe.py"
    script.write_text(text)
    return sys.executable, str(script)


# -- reasons that need no trying ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_installed")
def test_without_a_gpu_nothing_is_tried() -> None:
    assert "device='cpu'" in str(obstacle("cpu", None))
    assert obstacle("cuda:0", None) is None


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("kind", ["overlay", "tmpfs", "fuse.sshfs", "nfs4"])
def test_a_file_system_without_gpudirect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(gds_probe, "mount_of", lambda folder: (kind, "/mnt/some"))
    assert kind in str(obstacle("cuda:0", tmp_path))
    assert "/mnt/some" in str(obstacle("cuda:0", tmp_path))
    monkeypatch.setattr(gds_probe, "mount_of", lambda folder: ("xfs", "/"))
    assert obstacle("cuda:0", tmp_path) is None


def test_a_missing_kvikio_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_probe, "is_kvikio_installed", lambda: False)
    assert "kvtier[cuda]" in str(obstacle("cuda:0", None))


# -- the bytes ---------------------------------------------------------------------------------------------------------------


def test_right_bytes_both_ways_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    kvikio = KvikioDouble()
    assert write_read_compare(kvikio, tmp_path / PROBE_NAME, HostMemory()) is None
    assert [verb for verb, _size, _offset in kvikio.calls] == ["pwrite", "pread"]
    assert all(file.closed for file in kvikio.files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("attribute", "value", "reason"), [
    ("corrupts_writes", True, "wrote"), ("reads_nothing", True, "reads"), ("short_by", 4096, "of 1048576 bytes")])
def test_a_library_that_says_it_worked_and_is_wrong_does_not_pass(tmp_path: Path, attribute: str, value: int, reason: str) -> None:
    kvikio = KvikioDouble()
    setattr(kvikio, attribute, value)
    assert reason in str(write_read_compare(kvikio, tmp_path / PROBE_NAME, HostMemory()))
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_finds_what_lay_in_the_buffer_before_does_not_pass(tmp_path: Path) -> None:
    """The buffer is filled with something else in between: a read that does nothing must not look right."""
    memory = HostMemory()
    kvikio = KvikioDouble()
    kvikio.reads_nothing = True
    assert write_read_compare(kvikio, tmp_path / PROBE_NAME, memory) is not None
    assert not np.array_equal(memory.get(), np.zeros(PROBE_BYTES, np.uint8))


# -- the process that tries it -----------------------------------------------------------------------------------------------


def test_a_probe_that_hangs_is_ended_and_its_file_removed(tmp_path: Path) -> None:
    (tmp_path / PROBE_NAME).touch()  # not by the probe: it may not have begun when it is ended
    command = child(tmp_path, "import time\ntime.sleep(6000)\n")
    assert "did not end within" in str(try_directory(tmp_path, "cuda:0", patience=1.0, command=command))
    assert not (tmp_path / PROBE_NAME).exists()


@pytest.mark.parametrize(("text", "reason"), [
    ("raise SystemExit('boom')", "exit code 1: boom"), ("import os; os.abort()", "exit code -6"), ("print('{}')", "exit code 0"),
    ("print('[1]')", "exit code 0"), ("print()", "exit code 0"),
    ("print('{\"works\": false, \"reason\": \"no nvidia-fs\"}')", "no nvidia-fs"),
])
def test_whatever_the_probe_does_is_a_reason(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in str(try_directory(tmp_path, "cuda:0", command=child(tmp_path, text)))


def test_only_a_clear_yes_counts(tmp_path: Path) -> None:
    said = "import json, sys; print('noise'); print(json.dumps({'works': True, 'reason': ''}))"
    assert try_directory(tmp_path, "cuda:0", command=child(tmp_path, said)) is None
    assert "cannot be started" in str(try_directory(tmp_path, "cuda:0", command=(str(tmp_path / "no such program"),)))


def test_the_probe_finds_kvtier_and_says_why_not_on_this_machine(tmp_path: Path) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU here; tests/gpu says more")
    assert "CUDA cannot be used" in str(try_directory(tmp_path, "cuda:0", patience=240.0))
    assert os.listdir(tmp_path) == []


def test_the_verdict_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[Path, int]] = []

    def probe(directory: Path, device: int) -> str | None:
        asked.append((directory, device))
        return None if device else "no"

    assert main(["/some/folder", "cuda:3"], probe) == 0
    assert json.loads(capsys.readouterr().out) == {"works": True, "reason": ""}
    assert main(["/some/folder", "cuda"], probe) == 0
    assert json.loads(capsys.readouterr().out) == {"works": False, "reason": "no"}
    assert asked == [(Path("/some/folder"), 3), (Path("/some/folder"), 0)]
    assert main([], probe) == 2

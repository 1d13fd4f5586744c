"""Standard streams that cannot write every letter, that are closed, or whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench.trace_synthetic import write_synthetic
from kvtier.cli_output import prepare_streams

KVTIER = [sys.executable, "-m", "kvtier.cli"]
AROUND = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("träce") / "chäts…█.jsonl"
    write_synthetic(file, "chats", 30)
    return file


@pytest.mark.parametrize("around", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
                         ids=["encoding", "locale"])
def test_names_that_an_encoding_has_no_letters_for_are_written_around(trace: Path, around: dict[str, str]) -> None:
    done = subprocess.run([*KVTIER, "replay", str(trace), "--primary", "20 blocks", "--secondary", "30 blocks"], capture_output=True,
                          timeout=120, env=AROUND | around, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode("ascii")
    assert "ch\\xe4ts" in said or "ch\\udcc3\\udca4ts" in said  # the second where the file system's encoding is none either
    assert "primary" in said


def test_our_own_letters_have_others_that_stand_for_them() -> None:
    prepare_streams()
    assert "█▓▒░· host → NVMe ä".encode("ascii", "kvtier-plain") == b"#=-:. host > NVMe \\xe4"


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_no_file_takes_the_place_of_a_stream_that_is_closed(tmp_path: Path, descriptor: int) -> None:
    code = ("import sys; from kvtier.cli_output import prepare_streams; prepare_streams(); "
            "file = open(sys.argv[1], 'w'); sys.exit(0 if file.fileno() > 2 else 9)")
    command = ["sh", "-c", f'exec "$@" {descriptor}>&-', "sh", sys.executable, "-c", code, str(tmp_path / "slab")]
    assert subprocess.run(command, timeout=120, env=AROUND, check=False).returncode == 0


@pytest.mark.parametrize("command", [["config", "show"], ["config", "schema"], ["--help"], ["tune", "--list-models"], ["replay"], ["tune"]],
                         ids=" ".join)
def test_a_reader_who_has_had_enough_sees_no_traceback(trace: Path, command: list[str]) -> None:
    arguments = {"replay": [str(trace), "--primary", "20 blocks"], "tune": [str(trace), "--primary", "20 blocks"]}.get(command[-1], [])
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*KVTIER, *command, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=AROUND,
                              check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_is_for_a_standard_error_that_is_closed_does_not_come_out_of_the_standard_output(tmp_path: Path) -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *KVTIER, "store", "verify", str(tmp_path / "none")], stdout=subprocess.PIPE,
                          timeout=120, env=AROUND, check=False)
    assert (done.returncode, done.stdout) == (2, b"")

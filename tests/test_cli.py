"""The command line: quick help, one line for what a user can cause, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import kvtier
from kvtier import cli
from kvtier.errors import CapacityError, ConfigError, KVTierError, TransferError

ROOT = Path(__file__).resolve().parent.parent


def kvtier_command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    around = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
    return subprocess.run([sys.executable, "-m", "kvtier.cli", *arguments], capture_output=True, text=True, timeout=120,
                          env=around | (environment or {}), check=False)


def leaving(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """The exit code of ``main`` when a command raises ``error``."""
    def broken(app: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return raised.value.code


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["doctor", "--help"],
                                       ["bench", "--help"], ["bench", "copy", "--help"], ["bench", "nvme", "--help"],
                                       ["bench", "ledger", "--help"], ["bench", "integrity", "--help"],
                                       ["store", "--help"], ["store", "scrub", "--help"], ["replay", "--help"], ["tune", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = ("import sys\n"
            "from kvtier.cli import main\n"
            "try: main()\n"
            "except SystemExit as leaving: assert not leaving.code, leaving.code\n"
            "heavy = {'torch', 'numpy', 'pydantic_settings', 'yaml', 'transformers', 'cupy', 'kvikio'} & set(sys.modules)\n"
            "assert not heavy, heavy\n")
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert "kvtier" in found.stdout


def test_importing_kvtier_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, kvtier; assert 'torch' not in sys.modules"], check=True, timeout=120)


def test_version_is_the_package_version() -> None:
    assert kvtier_command("--version").stdout.strip() == f"kvtier {kvtier.__version__}"


@pytest.mark.parametrize("arguments", [
    ["serve"], ["demo", "--no-such-option"], ["demo", "--users", "0"], ["demo", "--turns", "many"],
    ["bench", "copy", "--json", "/no/such/folder/x.json"], ["bench", "nvme", "--json", "/"],
    ["bench", "ledger", "--peer", "nobody"], ["store", "ls"], ["store", "ls", "/no/such/folder"],
    ["store", "scrub", ".", "--bandwidth", "9"],
    ["demo", "--json", "/no/such/folder/x.json"], ["doctor", "--config"], ["demo", "--keep-nvme", "/etc/passwd"]])
def test_wrong_use_is_exit_code_2_without_a_traceback(arguments: list[str]) -> None:
    found = kvtier_command(*arguments)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert found.stderr.strip()


@pytest.mark.parametrize("command", [["doctor", "--directory"], ["bench", "nvme", "--directory"], ["demo", "--keep-nvme"]])
@pytest.mark.parametrize("folder", ["", "$KVTIER_NOPE/x", "${KVTIER_NOPE}", "~no-such-user-here/x"])
def test_a_folder_that_cannot_be_expanded_is_never_taken_literally(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], folder: str) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", *command, folder])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith(f"kvtier: {command[-1]}={folder!r}: ")


def test_doctor_expands_its_folder(tmp_path: Path) -> None:
    found = kvtier_command("doctor", "--json", "--directory", "$HERE_IT_IS", environment={"HERE_IT_IS": str(tmp_path / "new")})
    assert f"{tmp_path / 'new'} does not exist" in found.stdout


@pytest.mark.parametrize("command", [["demo"], ["bench", "copy"], ["bench", "nvme"]])
def test_an_empty_name_for_the_figures_is_refused_with_the_name_of_the_option(command: list[str]) -> None:
    found = kvtier_command(*command, "--json", "")
    assert found.returncode == 2
    assert "'--json': '' cannot be written" in found.stderr


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("primary=8: a size needs a unit"), 2), (CapacityError("5 blocks needed, 3 present"), 1),
    (TransferError("read failed"), 1), (KVTierError("something"), 1), (KeyboardInterrupt(), 130),
    (OSError(28, "No space left on device", "/data/x"), 1), (ModuleNotFoundError("no", name="transformers"), 2)])
def test_what_a_user_can_cause_is_one_line_on_stderr(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int) -> None:
    assert leaving(monkeypatch, error) == code
    output = capsys.readouterr()
    assert output.err.startswith("kvtier: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(("package", "remedy"), [("cupy", "'kvtier[cuda]'"), ("kvikio.buffer", "'kvtier[cuda]'"),
                                                 ("gguf", "'kvtier[demo]'"), ("matplotlib", "'kvtier[bench]'"), ("vllm", "'kvtier[vllm]'")])
def test_a_package_that_is_missing_is_named_with_what_installs_it(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, remedy: str) -> None:
    assert leaving(monkeypatch, ModuleNotFoundError("no", name=package)) == 2
    said = capsys.readouterr().err
    assert f"pip install {remedy}" in said
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][remedy.strip("']").partition("[")[2]]


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), AssertionError("a bug"),
                                   ModuleNotFoundError("a bug", name="kvtier.nowhere")])
def test_our_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(app: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(type(error)):
        cli.main()


WAITING = """
import asyncio, os, pathlib, signal, sys, time
from kvtier import cli

def wait(folder: pathlib.Path, number: int, at_once: bool = False, ignored: bool = False) -> None:
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder.mkdir()
    async def work() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
    try:
        if at_once:
            os.kill(os.getpid(), number)
            time.sleep(60)
        asyncio.run(work())
    finally:
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)
        folder.rmdir()

cli.app.command("wait")(wait)
cli.main()
"""


@pytest.mark.parametrize("inside", ["--at-once", "--no-at-once"])  # outside and inside an event loop
@pytest.mark.parametrize(("number", "code", "line"), [
    (signal.SIGINT, 130, "kvtier: interrupted\n"), (signal.SIGTERM, 143, "kvtier: ended by SIGTERM\n")])
def test_a_signal_ends_a_command_in_order_and_one_line_says_so(
        tmp_path: Path, number: int, code: int, line: str, inside: str) -> None:
    found = subprocess.run([sys.executable, "-c", WAITING, "wait", str(tmp_path / "temporary"), str(int(number)), inside],
                           capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (code, line)
    assert not (tmp_path / "temporary").exists()


@pytest.mark.parametrize("inside", ["--at-once", "--no-at-once"])
def test_sigterm_ends_a_background_job_whose_interrupts_are_ignored(tmp_path: Path, inside: str) -> None:
    found = subprocess.run([sys.executable, "-c", WAITING, "wait", str(tmp_path / "temporary"), str(int(signal.SIGTERM)), inside,
                            "--ignored"], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (143, "kvtier: ended by SIGTERM\n")
    assert not (tmp_path / "temporary").exists()


@pytest.mark.parametrize(("number", "code", "line"), [
    (signal.SIGINT, 130, "kvtier: interrupted\n"), (signal.SIGTERM, 143, "kvtier: ended by SIGTERM\n")])
def test_a_signal_in_the_middle_of_a_wait_for_a_thread_is_not_covered_up_by_the_error_of_its_lock(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, line: str) -> None:
    def wait_for_a_thread(app: object) -> int:
        condition = threading.Condition()
        release = condition._release_save  # type: ignore[attr-defined]

        def interrupted() -> object:
            state = release()
            signal.raise_signal(number)
            return state

        condition._release_save = interrupted  # type: ignore[attr-defined]
        with condition:
            condition.wait(60.0)
        return 0

    monkeypatch.setattr(cli, "run", wait_for_a_thread)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == code
    assert capsys.readouterr().err == line


def test_the_handler_of_sigterm_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert leaving(monkeypatch, ConfigError("x")) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_doctor_prints_json_and_fails_on_a_bad_configuration(tmp_path: Path) -> None:
    good = kvtier_command("doctor", "--json", "--directory", str(tmp_path))
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["ok"] is True
    bad = kvtier_command("doctor", environment={"KVTIER_PRIMRAY": "8 blocks"})
    assert bad.returncode == 1
    assert "did you mean 'primary'" in bad.stdout
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize(("command", "option"), [
    (["replay", "no-such-trace", "--primary", "8 blocks"], "--json"), (["replay", "no-such-trace", "--primary", "8 blocks"], "--plot"),
    (["tune", "no-such-trace"], "--json"), (["tune", "no-such-trace"], "--html"), (["tune", "no-such-trace"], "--config"),
    (["check", "--url", "http://127.0.0.1:1"], "--save")], ids=lambda part: part if isinstance(part, str) else part[0])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], option: str) -> None:
    for file in (tmp_path / "missing" / "x.png", tmp_path):
        monkeypatch.setattr(sys, "argv", ["kvtier", *command, option, str(file)])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert raised.value.code == 2
        assert f"'{option}': '{file}' cannot be written" in capsys.readouterr().err


def test_a_picture_of_no_format_is_refused_before_the_trace_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                                    tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvtier", "replay", "no-such-trace", "--primary", "8 blocks", "--plot", "x.txt"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
    assert "--plot x.txt: .txt is no format" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_models_that_are_known_can_be_listed_without_a_trace(monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", "tune", "--list-models"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 0
    assert "llama-3.1-8b" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "said"), [
    (["replay", "{trace}", "--primary", "8 blocks"], "trace.jsonl, line 2: not JSON"),
    (["tune", "{trace}"], "trace.jsonl, line 2: not JSON"),
    (["tune", "{trace}", "--model", "lama-3-8b"], "did you mean llama-3-8b"),
    (["replay", "{trace}", "--primary", "8 blocks", "--json", "{trace}/x.json"], "cannot be written")])
def test_a_trace_that_cannot_be_used_ends_with_exit_code_2(tmp_path: Path, command: list[str], said: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n{"timestamp"')
    ended = kvtier_command(*(part.format(trace=trace) for part in command))
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr

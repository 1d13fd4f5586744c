"""What typer says itself: refused in one line as everything else, and help that fits a terminal and names no Python types."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvtier import cli
from kvtier.bench.trace import EXAMPLE
from kvtier.cli_bench import bench
from kvtier.cli_config import config
from kvtier.cli_store import store


def paths(command: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """Every command and group, by what a user types."""
    yield names
    for name, below in getattr(command, "commands", {}).items():
        yield from paths(below, *names, name)


def name(path: tuple[str, ...]) -> str:
    """Of a test."""
    return " ".join(path) or "kvtier"


PATHS = list(paths(typer.main.get_command(cli.app)))
GROUPS = [(), ("bench",), ("config",), ("store",)]


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, standard output and error of ``kvtier`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    printed = capsys.readouterr()
    return leaving.value.code, printed.out, printed.err


@pytest.mark.parametrize(("arguments", "said"), [
    (["serve"], "No such command 'serve'"), (["demo", "--no-such-option"], "No such option: --no-such-option"),
    (["bench", "copy", "--js", "x"], "--json"), (["demo", "--turns", "many"], "'many'"), (["demo", "--users", "0"], "'0'"),
    (["store", "scrub", ".", "--seconds", "-1"], "'-1'"), (["bench", "ledger", "--peer", "x"], "'x' is not one of 'vllm', 'none'"),
    (["tune"], "TRACE"), (["config", "check"], "FILE"), (["doctor", "--config"], "'--config' requires an argument"),
    (["demo", "more"], "more"), (["bench", "copy", "--json", "/no/such/folder/x.json"], "name a file in a folder that exists"),
], ids=" ".join)
def test_wrong_use_is_one_line_that_names_the_value_and_where_to_read_on(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = ended(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1
    assert said in err
    assert "--help" in err


@pytest.mark.parametrize("file", ["a\nb.yaml", "a\x1b[2Jb.yaml", "a\rb.yaml"], ids=ascii)
def test_a_file_of_any_name_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str) -> None:
    code, out, err = ended(monkeypatch, capsys, "config", "check", file)
    assert (code, out) == (2, "")
    assert err.removesuffix("\n").isprintable()
    assert ascii(file).strip("'") in err


@pytest.mark.parametrize("group", GROUPS, ids=name)
def test_a_group_without_a_command_shows_its_help_and_was_used_wrongly(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: tuple[str, ...]) -> None:
    code, out, err = ended(monkeypatch, capsys, *group)
    assert (code, out) == (2, "")
    assert err.strip() == ended(monkeypatch, capsys, *group, "--help")[1].strip()


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_help_fits_a_terminal_and_names_no_types_of_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                           path: tuple[str, ...]) -> None:
    code, out, err = ended(monkeypatch, capsys, *path, "--help")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert not re.search(r"<[a-z][\w ]*>", out), "only choices, as <a|b>"
    assert "list[" not in out
    assert not {"│", "╭", "…"} & set(out)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_short_form_of_help_is_known_everywhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                    path: tuple[str, ...]) -> None:
    assert ended(monkeypatch, capsys, *path, "-h") == ended(monkeypatch, capsys, *path, "--help")


@pytest.mark.parametrize("option", [
    ["replay", "t", "--primary"], ["replay", "t", "--primary", "8 blocks", "--policy"], ["replay", "t", "--primary", "8 blocks", "--block"],
    ["replay", "t", "--primary", "8 blocks", "--copy-bandwidth"], ["replay", "t", "--primary", "8 blocks", "--model"],
    ["replay", "t", "--primary", "8 blocks", "--dtype"], ["replay", "t", "--primary", "8 blocks", "--tokenizer"],
    ["tune", "t", "--endurance"], ["tune", "t", "--host-limit"], ["tune", "t", "--model"], ["demo", "--turns"]], ids=name)
@pytest.mark.parametrize("value", ["9" * 5000, "x" * 5000], ids=["digits", "letters"])
def test_a_value_that_fills_the_screen_is_shown_shortened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                          tmp_path: Path, option: list[str], value: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text(EXAMPLE)
    code, _, err = ended(monkeypatch, capsys, *option, value)
    assert code == 2
    assert err.count("\n") == 1
    assert len(err) < 900


@pytest.mark.parametrize("group", GROUPS, ids=name)
def test_each_command_is_told_in_a_whole_line_of_its_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                          group: tuple[str, ...]) -> None:
    listed = ended(monkeypatch, capsys, *group, "--help")[1].partition("Commands:")[2].partition("\n\n")[0].strip().splitlines()
    assert len(listed) == len([path for path in PATHS if path[:-1] == group and path])
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_the_two_checks_are_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine, file = (ended(monkeypatch, capsys, *group, "--help")[1] for group in ((), ("config",)))
    assert re.search(r"^  check .*\bengine\b", engine, flags=re.MULTILINE)
    assert re.search(r"^  check .*\bfile\b", file, flags=re.MULTILINE)
    for path, other in ((("check",), "kvtier config check"), (("config", "check"), "with kvtier check")):
        assert other in " ".join(ended(monkeypatch, capsys, *path, "--help")[1].split())


def test_help_says_the_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(ended(monkeypatch, capsys, "--help")[1].split())
    assert all(f" {code} " in said.partition("Exit codes:")[2] for code in (0, 1, 2, 130, 143))


@pytest.mark.parametrize("path", [path for path in PATHS if path[:1] == ("bench",) and path[1:] not in ((), ("compare",))], ids=name)
def test_every_benchmark_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                path: tuple[str, ...]) -> None:
    said = " ".join(ended(monkeypatch, capsys, *path, "--help")[1].split())
    assert re.search(r"Takes (about \d|minutes|as long as).*; --quick (about|less|fewer|some)", said)


@pytest.mark.parametrize("group", [cli.app, bench, config, store], ids=["kvtier", "bench", "config", "store"])
def test_typer_draws_no_boxes_anywhere(group: typer.Typer) -> None:
    assert group.rich_markup_mode is None

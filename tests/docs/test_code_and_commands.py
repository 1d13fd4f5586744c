"""Every command and every piece of code in the documentation works."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
import yaml
from docs_pages import LANGUAGES, ROOT, Block, blocks_of, is_walked, pages, spans_of
from docs_session import Session, compare
from docs_shell import check, check_in_text, lines_of

MARKS = ("not run, ", "slow", "exit code ", "file ", "figures vary", "no output of ours")
BLOCKS = [block for page in pages() for block in blocks_of(page)]
WALKED = [page for page in pages() if is_walked(page) and any(block.is_run for block in blocks_of(page))]


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in languages], ids=lambda block: block.where)


@of("python")
def test_code_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@of("sh", "")
def test_commands_name_commands_options_targets_and_files_that_there_are(block: Block) -> None:
    if block.language == "sh":
        lines = lines_of(block)
    else:  # perhaps a picture: what begins as a command of ours is one
        lines = [line for line in block.text.splitlines() if line.startswith(("kvtier ", "make "))]
    for line in lines:
        check(line)


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_running_text_exist(page: Path) -> None:
    for span in spans_of(page):
        if span.startswith(("kvtier ", "make ")):
            check_in_text(span)


@of("yaml", "json")
def test_files_on_the_pages_are_what_they_say(block: Block) -> None:
    json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


@pytest.mark.parametrize("page", [page for page in pages() if is_walked(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_their_language_and_marks_that_are_known(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.where}: {block.language!r}; one of {', '.join(sorted(LANGUAGES))}"
        for mark in block.marks:
            assert mark.startswith(MARKS), f"{block.where}: {mark!r}; one of {', '.join(MARKS)}"


@pytest.fixture
def port() -> int:
    """A free one that the system gives nobody meanwhile who asks for any, and that another process of the tests does not try first."""
    for number in range(10_000 + os.getpid() % 20_000, 32_768):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", number))
            return number
    raise AssertionError("no port is free")


def test_code_of_the_adapters_pages_is_run_by_a_test_that_names_the_page() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "docs")
    for page in sorted((ROOT / "docs" / "attach").glob("*.md")):
        if any(block.language == "python" and block.is_run for block in blocks_of(page)):
            assert page.name in tests, f"no test runs {page.relative_to(ROOT)}; mark what cannot be run"


@pytest.mark.parametrize("page", WALKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    walk(page, tmp_path, monkeypatch, port)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in WALKED if any(block.is_slow for block in blocks_of(page))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_that_take_minutes_run_too(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    walk(page, tmp_path, monkeypatch, port, with_slow=True)


def walk(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, with_slow: bool = False) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    session = Session(page, folder, monkeypatch, port, with_slow)
    try:
        for block in blocks_of(page):
            session.run(block)
    finally:
        session.close()


@pytest.mark.parametrize(("shown", "vary"), [("a 2 MiB\nb 7", False), ("a\n", False), ("b 3\na 1 MiB", True), ("a 3 MiB\nc", True)])
def test_output_that_is_not_what_the_page_shows_is_noticed(shown: str, vary: bool) -> None:
    compare("here", "a ... MiB\n...\nb  3", "first\na 1 MiB\nb 3", figures_vary=False)
    compare("here", "a 512 KiB\nb 7", "first\na 1 MiB\nb 3", figures_vary=True)
    with pytest.raises(AssertionError, match="the page shows"):
        compare("here", shown, "first\na 1 MiB\nb 3", vary)


@pytest.mark.parametrize("line", [
    "kvtier no-such-command", "kvtier replay", "kvtier replay t.jsonl --primary 5% --no-such 1", "kvtier store", "make no-such-target",
    "make test ARGS=tests/no_such_file.py", "make demo ARGS=--no-such", "make test NOPE=1", "python -m kvtier.no_such_module",
    "python scripts/no_such.py", "pip install 'kvtier[nope]'"])
def test_a_command_that_there_is_not_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        check(line)


@pytest.mark.parametrize("span", ["kvtier no-such-command", "kvtier store nope", "kvtier bench nvme --no-such DIR", "make no-such-target"])
def test_a_command_in_running_text_that_there_is_not_is_noticed(span: str) -> None:
    check_in_text("kvtier store ls | verify | scrub")
    check_in_text("kvtier bench nvme --directory DIR")
    with pytest.raises(AssertionError):
        check_in_text(span)

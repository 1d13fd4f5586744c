"""A page as a session: its blocks run one after the other, in one folder and one namespace, as somebody who follows it would.

``python`` blocks share their names. ``kvtier`` and ``python FILE`` run in this process (torch takes seconds to import); a line with a pipe,
and other programs, run in a shell whose ``kvtier`` is ours. A ``text`` block behind a command or code is what it prints: every line of it
has to be found in the output, in this order; ``...`` stands for anything, in a line or for whole lines.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_before import BEFORE
from docs_pages import ROOT, Block
from docs_shell import lines_of, words_of

from kvtier import cli
from kvtier.kernels import use_reference

PORT = "9400"  # of the pages; another free one is taken in its place
_IN_SHELL = re.compile(r"[|<>]|&&|\$\(")
_TO_FILE = re.compile(r"^kvtier [^|<>&]* > [\w.]+\s*(#.*)?$")
_NUMBER = re.compile(r"\d[\d,.]*")
_UNIT = re.compile(r"(?<=#) ?(?:[KMGT]i?B|B|ms|s|us)\b")


class Session:
    """Runs the blocks of one page."""

    def __init__(self, page: Path, folder: Path, patch: pytest.MonkeyPatch, port: int, with_slow: bool = False) -> None:
        self.page, self.folder, self.port, self.with_slow = page, folder, str(port), with_slow
        self.names: dict[str, Any] = {"__name__": "page"}
        self.output: str | None = None  # of the block before, where it was run
        self.num_python = 0
        programs = folder.parent / "programs"
        programs.mkdir()
        (programs / "kvtier").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtier.cli "$@"\n')
        (programs / "kvtier").chmod(0o755)
        (programs / "python").symlink_to(sys.executable)
        for name in ("docs", "scripts", "Makefile"):  # pages are read in the repository's root
            (folder / name).symlink_to(ROOT / name)
        for name in [name for name in os.environ if name.startswith("KVTIER_")]:
            patch.delenv(name)
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("COLUMNS", "120")
        patch.chdir(folder)

    def run(self, block: Block) -> None:
        """Run a block, or hold it against what the one before printed. AssertionError where it does not do what the page says."""
        text = block.text.replace(PORT, self.port)
        if not block.is_run or (block.is_slow and not self.with_slow):
            self.output = None
        elif (name := block.marked("file ")) is not None:
            (self.folder / name).write_text(text)
            self.output = None
        elif block.language == "python":
            self.output = self._python(block, text)
            self.num_python += 1
        elif block.language == "sh":
            self.output = self._shell(block, text)
        elif block.language == "text" and block.marked("no output") is None and self.output is not None:
            compare(block.where, text, self.output, block.marked("figures vary") is not None)

    def close(self) -> None:
        """Close what the page has left open."""
        use_reference(False)  # what a page switches on for the whole process
        for value in reversed(list(self.names.values())):
            if type(value).__module__.startswith("kvtier.") and hasattr(value, "close"):
                value.close()

    def _python(self, block: Block, text: str) -> str:
        before = BEFORE.get((str(self.page.relative_to(ROOT)), self.num_python), "")
        with _printed() as output:
            for code, name in ((before, "what stands before the page"), ("\n" * (block.line - 1) + text, block.where)):
                running = eval(compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), self.names)
                if inspect.iscoroutine(running):
                    asyncio.run(running)
        return output.getvalue()

    def _shell(self, block: Block, text: str) -> str:
        said, code = "", 0
        wanted = int(block.marked("exit code") or 0)
        lines = lines_of(Block(block.page, block.line, block.language, text, ()))
        for number, line in enumerate(lines):
            words = words_of(line)
            line, _, file = line.partition(" > ") if _TO_FILE.search(line) else (line, "", "")
            outside = _IN_SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", line)) or "=" in line.split()[0]
            if not outside and words[0] == "kvtier":
                printed, code = _in_process(words)
                if file:
                    printed = "" if Path(words_of(file)[0]).write_text(printed) else printed
            elif not outside and words[0] == "python" and words[1].endswith(".py") and Path(words[1]).exists():
                with _printed() as output:
                    runpy.run_path(words[1], run_name="__main__")
                printed, code = output.getvalue(), 0
            else:
                ended = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800,
                                       check=False)
                printed, code = ended.stdout, ended.returncode
            said += printed
            assert code == (wanted if number == len(lines) - 1 else 0), f"{block.where}: {line}: exit code {code}\n{printed}"
        return said


def compare(where: str, shown: str, output: str, figures_vary: bool) -> None:
    """Every line that a page shows is in the output, in this order."""
    def plain(line: str) -> str:
        line = " ".join(line.split())
        return _UNIT.sub("", _NUMBER.sub("#", line)) if figures_vary else line

    lines = [plain(line) for line in output.splitlines()]
    place = 0
    for line in shown.splitlines():
        wanted = plain(line)
        if not wanted.strip("─━. "):  # empty, "...", or a rule of a table
            continue
        pattern = re.compile(".*".join(map(re.escape, wanted.split("..."))))
        found = next((number for number in range(place, len(lines)) if pattern.fullmatch(lines[number])), None)
        assert found is not None, f"{where}: the page shows\n  {line}\nwhich is not, or not there, in\n{output}"
        place = found + 1


def _in_process(words: list[str]) -> tuple[str, int]:
    """A command of kvtier, as its program would run it: what it prints on both outputs, and its exit code."""
    arguments = sys.argv
    sys.argv = words
    try:
        with _printed() as output:
            try:
                cli.main()
            except SystemExit as leaving:
                code = leaving.code
    finally:
        sys.argv = arguments
    return output.getvalue(), int(code or 0)


@contextlib.contextmanager
def _printed() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output

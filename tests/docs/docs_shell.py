"""Commands in ``sh`` blocks: split into lines, held against what they name, without running them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from typing import Any

import typer
from docs_pages import ROOT, Block

from kvtier.cli import app

COMMAND: Any = typer.main.get_command(app)  # typer brings a click of its own, or takes the installed one
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, flags=re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


def lines_of(block: Block) -> list[str]:
    """The block's commands, each one line: continued lines, open quotes and here-documents belong together."""
    found, current, ends = [], "", ""
    for line in block.text.splitlines():
        current = f"{current}\n{line}" if current else line
        if ends:
            if line != ends:
                continue
            ends = ""
        elif document := re.search(r"<<\s*'?(\w+)'?", line):
            ends = document[1]
            continue
        elif line.endswith("\\") or not _is_closed(current):
            continue
        if current.strip() and not current.lstrip().startswith("#"):
            found.append(current)
        current = ""
    assert not current, f"{block.where}: a quote or a here-document is left open"
    return found


def words_of(line: str) -> list[str]:
    """The words of a command, without comments, settings before it, redirections, and what stands behind a pipe."""
    head = line.partition("<<")[0].replace("\\\n", " ")
    words = shlex.split(head, comments=True)
    for end in ("|", "&&", ";", ">", ">>", "2>&1", "&"):
        if end in words:
            words = words[:words.index(end)]
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    return words


def check(line: str) -> None:
    """Hold a command against the command line, the Makefile, the modules and files that there are. AssertionError where it cannot work."""
    words = words_of(line)
    if not words:
        return
    program, arguments = words[0], words[1:]
    if program == "kvtier":
        check_kvtier(arguments)
    elif program == "make":
        check_make(arguments)
    elif program in ("python", "python3", "pytest"):
        check_python(program, arguments)
    elif program == "pip":
        for extra in re.findall(r"kvtier\[([\w,]+)\]", line):
            assert set(extra.split(",")) <= EXTRAS, f"{line}: pyproject.toml has no such extra"


def check_kvtier(arguments: list[str]) -> None:
    """Parse a command line of kvtier with the program's own parser, and run nothing."""
    if "--help" in arguments or "--version" in arguments:
        arguments = [word for word in arguments if word not in ("--help", "--version")]
        command = COMMAND
        for word in arguments:
            assert hasattr(command, "commands"), f"kvtier {arguments}: {word} is no command"
            assert word in command.commands, f"kvtier {arguments}: {word} is no command"
            command = command.commands[word]
        return
    command, rest = COMMAND, list(arguments)
    while hasattr(command, "commands"):
        assert rest, f"kvtier {arguments}: a command is missing"
        assert rest[0] in command.commands, f"kvtier {arguments}: {rest[0]} is no command"
        command, rest = command.commands[rest[0]], rest[1:]
    try:
        command.make_context(command.name, rest, resilient_parsing=False)
    except Exception as error:  # a usage error of either click
        raise AssertionError(f"kvtier {' '.join(arguments)}: {error}") from error


def check_in_text(line: str) -> None:
    """A command that running text mentions, perhaps without its arguments: the command and the options that it names exist."""
    words = shlex.split(line.partition(" | ")[0])
    if words[0] == "make":
        check_make(words[1:])
        return
    command = COMMAND
    for word in words[1:]:
        children = getattr(command, "commands", None)
        if children is not None and not word.startswith("-"):
            assert word in children, f"{line}: {word} is no command"
            command = children[word]
        elif word.startswith("--") and word not in ("--help", "--version"):
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert word in known, f"{line}: there is no {word}"


def check_make(arguments: list[str]) -> None:
    """Targets exist, options are named in the Makefile, and so do the tests that ARGS names."""
    for word in arguments:
        name, is_setting, value = word.partition("=")
        if not is_setting:
            assert word in TARGETS, f"make {word}: the Makefile has no such target"
            continue
        assert re.search(rf"\$\({name}\)|^{name}\s*\??=", MAKEFILE, flags=re.MULTILINE), f"make {word}: the Makefile knows no {name}"
        if name == "ARGS" and arguments[0] == "demo":
            check_kvtier(["demo", *shlex.split(value)])
        if name == "ARGS" and arguments[0] == "bench-ledger":
            check_kvtier(["bench", "ledger", *shlex.split(value)])
        for path in re.findall(r"\btests/[\w/.]+", value):
            assert (ROOT / path).exists(), f"make {word}: there is no {path}"


def check_python(program: str, arguments: list[str]) -> None:
    """Modules and scripts exist."""
    if arguments[:1] == ["-m"] and arguments[1].startswith("kvtier"):
        assert importlib.util.find_spec(arguments[1]) is not None, f"there is no module {arguments[1]}"
    for word in arguments:
        if re.match(r"(scripts|tests)/", word):
            assert (ROOT / word.partition("::")[0]).exists(), f"{program}: there is no {word}"


def _is_closed(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True

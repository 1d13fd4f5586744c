"""Typer's part of the command line, in our words: what it refuses is one line as everything else, and help names no Python types.

Part of ``cli``. Help is plain text (``rich_markup_mode=None``): tables in boxes cut long options short at 80 columns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import typer
import typer.main

from kvtier.errors import ConfigError
from kvtier.exit_codes import FINE, INTERRUPTED, USED_WRONGLY

_USAGE_ERROR: Final[Any] = typer.BadParameter.__mro__[1]  # click's UsageError: typer has it in another module from release to release

_LONG: Final = re.compile(r"(\S{200})\S+")
"""A word of a value that fills the screen."""


def run(app: typer.Typer, name: str = "kvtier") -> int:
    """Run the command that the arguments of this process name, and return its exit code.

    Raises:
        ConfigError: typer refuses a command, an option or a value.
    """
    program: Any = typer.main.get_command(app)
    for argument in _arguments(program):
        argument.display_type_rich = lambda ctx: None  # typer writes "FILE <list[Path]>"; the name says it
    try:
        code = program(prog_name=name, standalone_mode=False)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message(), file=sys.stderr)
            return USED_WRONGLY
        raise ConfigError(usage_line(error)) from None
    except typer.Abort:  # what earlier releases make of Ctrl-C
        return INTERRUPTED
    return code if isinstance(code, int) else FINE


def usage_line(error: Any) -> str:
    """What typer refuses, with the value, and where to read on."""
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if hasattr(error.__cause__, "errors"):  # pydantic's, which has the value; typer's text may not
        value = repr(error.__cause__.errors()[0]["input"])
        text = text if value in text else text.replace("Invalid value", f"Invalid value {value}", 1)
    text = _LONG.sub(r"\1...", text)
    asked = "the command with" if error.ctx is None else error.ctx.command_path
    return f"{text}{'' if text.endswith('?') else ';'} {asked} --help says what it takes"


def _arguments(command: Any) -> Iterator[Any]:
    """Of a command and all below it, without options."""
    yield from (each for each in command.params if each.param_type_name == "argument")
    for below in getattr(command, "commands", {}).values():
        yield from _arguments(below)

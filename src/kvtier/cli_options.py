"""Options that several commands have in common. Part of ``cli``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def writable_file(text: str) -> Path:
    """Refuse a file that cannot be written before minutes are spent on its content."""
    path = Path(text)  # the empty text would be the current folder
    if not text or path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{text!r} cannot be written; name a file in a folder that exists")
    return path


def folder(text: str | None, option: str) -> Path | None:
    """The folder that an option names, expanded as in a configuration; ConfigError where that cannot be done."""
    from kvtier.tiering.config_sources import expand_path
    return None if text is None else expand_path(text, option)


JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", parser=writable_file, help="Write all figures to FILE.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", parser=writable_file,
                                                       help="Draw the figures into FILE (png, svg, pdf).")]
CompareWith = Annotated[Path | None, typer.Option("--compare", metavar="FILE", show_default=False,
                                                  help="Figures of an earlier run here; exit code 1 where a row has become worse.")]
Quick = Annotated[bool, typer.Option("--quick", help="The short form, for a first look.")]
Directory = Annotated[str | None, typer.Option(metavar="DIR", help="Folder on the drive to measure; the current one when left out.")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help='"cpu", "cuda" or "cuda:N".')]

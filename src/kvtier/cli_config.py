"""``kvtier config``: what is set and where it came from, whether a file is good, and what may be set. Part of ``cli``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from kvtier.errors import ConfigError

config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Settings of the tier: show them, check a file of them.")

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="This file instead of the one KVTIER_CONFIG names.")]


@config.command()
def show(file: ConfigFile = None, json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Every setting's value, and where it came from.

    That is the environment, a file or the default. Keywords in code win over all of them.
    """
    from kvtier.tiering.config import TierConfig
    from kvtier.tiering.config_reference import settings_as_json, sizes_in_words
    found = TierConfig.from_file(file) if file is not None else TierConfig()
    if json:
        typer.echo(json_format.dumps({"settings": settings_as_json(found), "sizes": sizes_in_words(found)}, indent=2))
        return
    rows = found.effective()
    width = max(len(key) for key, _, _ in rows)
    for key, value, source in rows:
        typer.echo(f"{key:{width}}  {value:24} {source}")
    typer.echo("")
    for line in sizes_in_words(found):
        typer.echo(line)


@config.command()
def check(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="YAML or TOML, one or more.")]) -> None:
    """Whether a configuration file is good; asks no engine.

    What the environment sets counts too. A running engine is checked with kvtier check. Exit code 2 and one line for the first file that
    cannot be used.
    """
    from kvtier.tiering.config import TierConfig
    for file in files:
        try:
            found = TierConfig.from_file(file)
        except ConfigError as error:  # settings that contradict each other may come from several places
            raise error if str(file) in str(error) else ConfigError(f"{file}: {error}") from None
        changed = [key for key, _, source in found.effective() if source.startswith("file")]
        others = [key for key, _, source in found.effective() if source.startswith("environment")]
        typer.echo(f"{file}: good; it sets {', '.join(changed) or 'nothing'}"
                   + (f"; the environment sets {', '.join(others)}, and wins" if others else ""))


@config.command()
def schema(example: Annotated[bool, typer.Option("--example", help="A commented YAML file instead: every key and its default.")] = False,
           ) -> None:
    """The JSON schema of a configuration file, for editors."""
    from kvtier.tiering import config_reference
    typer.echo(config_reference.example() if example else json_format.dumps(config_reference.json_schema(), indent=2))

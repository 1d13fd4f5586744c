"""``kvtier check``: does the tier attached to a running vLLM serve, from which level, and the right answers? Part of ``cli``."""

from __future__ import annotations

import enum
import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli_options import writable_file
from kvtier.exit_codes import CHECK_FAILED, FINE


class CheckedLevel(enum.StrEnum):
    """Where the second answer must come from."""

    HOST = "host"
    NVME = "nvme"


def check(url: Annotated[str, typer.Option(metavar="URL", help="Address of vllm serve.")] = "http://127.0.0.1:8000",
          model: Annotated[str | None, typer.Option(metavar="NAME", show_default=False,
                                                    help="One of the models served there; the first by default.")] = None,
          level: Annotated[CheckedLevel, typer.Option(help="Where the second answer must come from.")] = CheckedLevel.HOST,
          tokens: Annotated[int, typer.Option(min=16, metavar="N", help="Length of the prompt; less where the model takes less.")] = 2048,
          timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="For the whole check.")] = 600.0,
          save: Annotated[Path | None, typer.Option(metavar="FILE", parser=writable_file, show_default=False,
                                                    help="Store a prompt, write it to FILE and stop: restart the engine, then --resume "
                                                    "FILE.")] = None,
          resume: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Go on, after a restart, with what --save "
                                                      "wrote.")] = None,
          api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", metavar="KEY", show_default=False,
                                                      help="If the server wants one.")] = None,
          json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    """Prove on a running engine that its tier gives right answers.

    The engine is vLLM; the answers come from host memory or NVMe. A configuration file is checked with kvtier config check. Exit code 1 if
    it does not hold, and where no engine with a tier answers.
    """
    from kvtier.bench.check import CheckOptions, run_check
    from kvtier.bench.check_http import HttpEngine
    options = CheckOptions(level.value, num_tokens=tokens, seconds=timeout, save=save, resume=resume)
    options.check()
    result = run_check(HttpEngine(url, model, api_key), options, (lambda text: None) if json else typer.echo)
    if json:
        typer.echo(json_format.dumps(result.as_json(), indent=2))
    else:
        result.show(typer.echo)
    raise typer.Exit(FINE if result.ok else CHECK_FAILED)

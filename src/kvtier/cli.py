"""``kvtier``: the command line. Commands are imported when they run, so that ``--help`` needs neither torch nor a GPU.

Exit codes: 0 fine, 1 the check failed, 2 used wrongly. What a user can cause ends in one line on stderr, never a traceback.
"""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError, RequestError

CHECK_FAILED = 1
USED_WRONGLY = 2
INTERRUPTED = 130

app = typer.Typer(name="kvtier", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The memory tier for LLM inference engines: KV cache in GPU memory, host memory and NVMe.")
bench = typer.Typer(no_args_is_help=True, help="Measure this machine: the limit first, then kvtier beside it.")
app.add_typer(bench, name="bench")


def _check_json_file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before minutes are spent on its content."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written; name a file in a folder that exists")
    return path


JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=_check_json_file,
                                               help="Write all figures to FILE.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short run, for a first look.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                                   help="Show the version and exit.")] = False) -> None:
    pass


@app.command()
def demo(device: Annotated[str, typer.Option(help='Where the model runs: "cpu", "cuda" or "cuda:N".')] = "cpu",
         model: Annotated[Path | None, typer.Option(help="Folder of another llama-type model.")] = None,
         config: Annotated[Path | None, typer.Option(help="Settings (YAML or TOML) instead of the demo's own.")] = None,
         keep_nvme: Annotated[Path | None, typer.Option(metavar="DIR", file_okay=False, help="Keep the NVMe level here; a "
                                                        "second run with the same folder starts warm.")] = None,
         json: JsonFile = None,
         users: Annotated[int | None, typer.Option(min=1, help="Conversations at the same time; all it has by default.")] = None,
         turns: Annotated[int | None, typer.Option(min=1, help="Questions per conversation; all by default, fewer with --quick.")] = None,
         quick: Quick = False) -> None:
    """Serve a small real model through the three tiers, and compare its answers with a run without reuse."""
    from kvtier.bench.demo import run_demo
    raise typer.Exit(run_demo(device=device, model=model, config=config, keep_nvme=keep_nvme, json_file=json, users=users,
                              turns=turns, quick=quick))


@app.command()
def doctor(directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the NVMe level.")] = None,
           config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings (YAML or TOML) to check.")] = None,
           json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Say what this machine can do, with the exact next step for whatever it cannot. Exit code 1 if a line fails."""
    from kvtier.tiering.doctor import examine, print_report
    report = examine(directory, config)
    if json:
        typer.echo(json_format.dumps(report.as_json(), indent=2))
    else:
        print_report(report, typer.echo)
    raise typer.Exit(0 if report.ok else CHECK_FAILED)


@bench.command("copy")
def bench_copy(json: JsonFile = None, quick: Quick = False) -> None:
    """Copies between primary and secondary beside a plain memory copy of the same block size."""
    from kvtier.bench.copy import run_copy
    raise typer.Exit(run_copy(json_file=json, quick=quick))


@bench.command("nvme")
def bench_nvme(directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder on the drive to measure.")] = None,
               json: JsonFile = None, quick: Quick = False) -> None:
    """Block reads and writes beside raw direct I/O of the same size, bytes verified."""
    from kvtier.bench.nvme import run_nvme
    raise typer.Exit(run_nvme(directory=directory, json_file=json, quick=quick))


def main() -> NoReturn:
    """Entry point: run the command and turn what a user can cause into one line and an exit code."""
    try:
        app(prog_name="kvtier")
    except KVTierError as error:
        _leave(str(error), USED_WRONGLY if isinstance(error, (ConfigError, RequestError)) else CHECK_FAILED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvtier":
            raise
        _leave(f"the package {error.name!r} is not installed; pip install 'kvtier[demo]', or run make venv", USED_WRONGLY)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has had enough
        sys.exit(CHECK_FAILED)
    except OSError as error:
        _leave(f"{error.filename or 'system'}: {error.strerror or error}", CHECK_FAILED)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    sys.exit(0)


def _leave(message: str, code: int) -> NoReturn:
    print(f"kvtier: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

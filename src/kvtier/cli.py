"""``kvtier``: the command line. Commands are imported when they run, so that ``--help`` needs neither torch nor a GPU.

What a user can cause ends in one line on stderr, never a traceback, and in one of the exit codes of ``exit_codes``.
"""

from __future__ import annotations

import json as json_format
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from kvtier import __version__
from kvtier.cli_bench import bench
from kvtier.cli_check import check
from kvtier.cli_config import config as config_commands
from kvtier.cli_options import JsonFile, Quick, folder
from kvtier.cli_output import prepare_streams
from kvtier.cli_store import store
from kvtier.cli_top import top
from kvtier.cli_tune import add_commands
from kvtier.cli_usage import run
from kvtier.errors import ConfigError, KVTierError, RequestError
from kvtier.exit_codes import CHECK_FAILED, INTERRUPTED, TERMINATED, USED_WRONGLY

app = typer.Typer(name="kvtier", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  context_settings={"help_option_names": ["-h", "--help"]},  # of all commands below it, too
                  help="The memory tier for LLM inference engines: KV cache in GPU memory, host memory and NVMe.",
                  epilog="Exit codes: 0 fine, 1 it did not hold or nobody answered, 2 used wrongly and nothing was begun, 130 and 143 "
                         "ended by Ctrl-C or SIGTERM, after tidying up.")


_EXTRAS: Final = {"cupy": "cuda", "kvikio": "cuda", "matplotlib": "bench", "vllm": "vllm"}
"""Which extra of pyproject.toml installs a package. The demo's other packages need more than one command."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                                   help="Show the version and exit.")] = False) -> None:
    pass


@app.command()
def demo(device: Annotated[str, typer.Option(metavar="DEVICE", help='Where the model runs: "cpu", "cuda" or "cuda:N".')] = "cpu",
         model: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of another llama-type model.")] = None,
         config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings (YAML or TOML) instead of the demo's own.")] = None,
         keep_nvme: Annotated[str | None, typer.Option(metavar="DIR", help="Keep the NVMe level here; a second run with the "
                                                       "same folder starts warm.")] = None,
         json: JsonFile = None,
         users: Annotated[int | None, typer.Option(min=1, metavar="N",
                                                   help="Conversations at the same time; all it has by default.")] = None,
         turns: Annotated[int | None, typer.Option(min=1, metavar="N",
                                                   help="Questions per conversation; all by default, fewer with --quick.")] = None,
         quick: Quick = False) -> None:
    """A small real model is served through the three tiers.

    Its answers are compared with those of a run without reuse; exit code 1 if they are not the same.
    """
    kept = folder(keep_nvme, "--keep-nvme")
    if kept is not None and kept.exists() and not kept.is_dir():
        raise ConfigError(f"--keep-nvme {kept}: not a folder; name a folder, which need not exist yet")
    from kvtier.bench.demo import run_demo
    raise typer.Exit(run_demo(device=device, model=model, config=config, keep_nvme=kept, json_file=json, users=users,
                              turns=turns, quick=quick))


@app.command()
def doctor(directory: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for the NVMe level.")] = None,
           config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings (YAML or TOML) to check.")] = None,
           json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """What this machine can do, and the next step for what it cannot.

    Exit code 1 if a line fails.
    """
    from kvtier.tiering.doctor import examine, print_report
    report = examine(folder(directory, "--directory"), config)
    if json:
        typer.echo(json_format.dumps(report.as_json(), indent=2))
    else:
        print_report(report, typer.echo)
    raise typer.Exit(0 if report.ok else CHECK_FAILED)


# Behind demo and doctor: --help lists commands in this order, and those two come first for who is new.
add_commands(app)  # replay, tune
app.command()(top)
app.command()(check)
app.add_typer(config_commands, name="config")
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")


def main() -> NoReturn:
    """Entry point: run the command and turn what a user can cause into one line and an exit code."""
    prepare_streams()
    try:
        with _terminated_in_order():
            code = run(app)
    except KVTierError as error:
        _leave(str(error), USED_WRONGLY if isinstance(error, (ConfigError, RequestError)) else CHECK_FAILED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvtier":
            raise
        from kvtier.bench import INSTALL_DEMO
        extra = _EXTRAS.get(error.name.partition(".")[0])
        remedy = INSTALL_DEMO if extra is None else f"pip install 'kvtier[{extra}]'"
        _leave(f"the package {error.name!r} is not installed; {remedy}", USED_WRONGLY)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has had enough
        sys.exit(CHECK_FAILED)
    except OSError as error:
        _leave(f"{error.filename or 'system'}: {error.strerror or error}", CHECK_FAILED)
    except _Terminated:
        _leave("ended by SIGTERM", TERMINATED)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    if code == INTERRUPTED:  # typer has turned Ctrl-C into this, and says nothing
        _leave("interrupted", INTERRUPTED)
    sys.exit(code)


class _Terminated(Exception):
    """SIGTERM ended the command."""


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM unwinds the command as Ctrl-C does: temporary folders are removed, levels closed. Raises _Terminated then."""
    received = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some senders repeat it at once, and tidying up must not end half-way
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # asyncio has its own while it runs; that of Python raises KeyboardInterrupt
            interrupt(signal.SIGINT, frame)
        else:  # a shell starts background jobs with SIGINT ignored
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not received:
            raise
    except RuntimeError as error:  # struck while a Condition was being waited for: its lock, free just then, cannot be given back
        if not isinstance(error.__context__, KeyboardInterrupt) or not str(error).endswith(" lock"):
            raise
        if not received:
            raise error.__context__ from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if received:  # typer makes an exit code of the interrupt
        raise _Terminated


def _leave(message: str, code: int) -> NoReturn:
    if code == USED_WRONGLY:  # files and values may have any characters; other messages may hold what another program has written
        message = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in message)
    print(f"kvtier: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

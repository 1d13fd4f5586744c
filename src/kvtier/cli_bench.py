"""``kvtier bench``: one command for each benchmark, and all of them. Part of ``cli``.

All take ``--json``, ``--plot``, ``--compare`` and ``--quick``, and refuse what they cannot do afterwards before they measure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvtier.cli_options import CompareWith, Device, Directory, JsonFile, PlotFile, Quick, folder
from kvtier.cli_serve import bench_serve

if TYPE_CHECKING:
    from kvtier.bench.report import Report

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this machine: the limit first, then kvtier beside it.")
bench.command("serve")(bench_serve)


@bench.command("copy")
def bench_copy(json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None, quick: Quick = False,
               device: Device = "cpu") -> None:
    """Copies between levels in memory beside a plain memory copy.

    Of blocks of the same size. Takes about 1 minute; --quick less.
    """
    _run_of_family("copy", None, device, json, plot, compare, quick)


@bench.command("kernels")
def bench_kernels(json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None, quick: Quick = False,
                  device: Device = "cpu") -> None:
    """Paged decode attention and append beside torch's.

    Beside attention over contiguous keys, and a plain copy. Takes about 1 minute; --quick less.
    """
    _run_of_family("kernels", None, device, json, plot, compare, quick)


@bench.command("nvme")
def bench_nvme(directory: Directory = None, json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None,
               quick: Quick = False) -> None:
    """Block reads and writes beside raw direct I/O.

    Of the same size, bytes verified. Takes about 4 minutes; --quick about 1.
    """
    _run_of_family("nvme", directory, "cpu", json, plot, compare, quick)


@bench.command("gds")
def bench_gds(directory: Directory = None, device: Annotated[str, typer.Option(metavar="cuda:N", help="Which GPU.")] = "cuda:0",
              json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None, quick: Quick = False) -> None:
    """Blocks between GPU and NVMe beside KvikIO's own.

    Reads and writes with each setting; needs GPUDirect Storage. Takes minutes; --quick about 1.
    """
    _run_of_family("gds", directory, device, json, plot, compare, quick)


@bench.command("load")
def bench_load(directory: Directory = None, json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None,
               quick: Quick = False) -> None:
    """Time to first token of a stored prefix, loaded or computed.

    The tier decides, beside always computing and always loading. Takes about 1 minute; --quick some seconds.
    """
    _run_of_family("load", directory, "cpu", json, plot, compare, quick)


@bench.command("integrity")
def bench_integrity(directory: Directory = None, json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None,
                    quick: Quick = False) -> None:
    """Crashes and damage: blocks lost, wrong bytes served.

    Kills, flipped bits, torn and misdirected writes, a full drive. Exit code 1 if a wrong byte is served, or more is lost than may be.
    Takes about 2 minutes; --quick less than 1.
    """
    _run_of_family("integrity", directory, "cpu", json, plot, compare, quick)


class Peer(enum.StrEnum):
    """Whose bookkeeping is measured beside ours."""

    VLLM = "vllm"
    NONE = "none"


@bench.command("ledger")
def bench_ledger(json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None, quick: Quick = False,
                 peer: Annotated[Peer | None, typer.Option(help="Whose bookkeeping is measured beside; vLLM's where it is installed.",
                                                           show_default=False)] = None) -> None:
    """The bookkeeping alone, beside vLLM's where it is installed.

    Match, insert, evict, decode, turns, host tier, growth. Takes about 4 minutes with vLLM's beside it; --quick about 1.
    """
    from kvtier.bench.family import Common
    from kvtier.bench.ledger import measure_ledger
    _run(lambda: measure_ledger(quick, None if peer is None else peer.value), "ledger", Common(quick=quick).settings(), None,
         json, plot, compare)


@bench.command("all")
def bench_all(directory: Directory = None, device: Device = "cpu", json: JsonFile = None, plot: PlotFile = None,
              compare: CompareWith = None, quick: Quick = False) -> None:
    """Every benchmark that can be measured here, one by one.

    One that fails does not stop the others; exit code 1 if any failed. Takes as long as all of them; --quick some minutes.
    """
    from kvtier.bench import openmp_waiting  # noqa: F401 # isort: skip - before torch is loaded
    from kvtier.bench.family import Common, run_all
    from kvtier.bench.outputs import Outputs
    raise typer.Exit(run_all(Common(folder(directory, "--directory"), quick, device), Outputs(json, plot, compare)))


@bench.command("compare")
def bench_compare(old: Annotated[Path, typer.Argument(metavar="OLD", help="Figures that --json has written.")],
                  new: Annotated[Path, typer.Argument(metavar="NEW", help="Later ones, of the same machine.")]) -> None:
    """Two files of figures, row by row.

    Measures nothing. Exit code 1 where a row has become worse beyond noise, 2 for two machines.
    """
    from kvtier.bench.outputs import compare_files
    raise typer.Exit(compare_files(old, new))


def _run_of_family(name: str, directory: str | None, device: str, json: Path | None, plot: Path | None, compare: Path | None,
                   quick: bool) -> NoReturn:
    from kvtier.bench import openmp_waiting  # noqa: F401 # isort: skip - before torch is loaded
    from kvtier.bench.family import FAMILY, IN_MEMORY, Common
    common = Common(folder(directory, "--directory"), quick, device)
    place = None if name in IN_MEMORY else common.directory or Path.cwd()
    _run(lambda: FAMILY[name].measure(common), name, common.settings(), place, json, plot, compare)


def _run(measure: Callable[[], Report], name: str, settings: Mapping[str, object], directory: Path | None, json: Path | None,
         plot: Path | None, compare: Path | None) -> NoReturn:
    from kvtier.bench.outputs import Outputs
    outputs = Outputs(json, plot, compare)
    outputs.check(name, settings, directory)
    raise typer.Exit(outputs.run(measure))

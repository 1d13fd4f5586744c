"""``kvtier replay`` and ``kvtier tune``: what traffic would get from tiers of given sizes, and which sizes to give them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli_options import JsonFile, writable_file

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Requests, one JSON object on each line (docs/tuning.md).")]
Block = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", show_default=False,
                                           help="Tokens of a block: 512, or 16 for text chats, when left out.")]
Tokenizer = Annotated[str | None, typer.Option(metavar="FILE", help='The trace is text chats; a tokenizer.json, or "bytes".')]
Model = Annotated[str, typer.Option(metavar="NAME",
                                    help="Sets how large a block is: a known model (kvtier tune --list-models), or a config.json.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="Element type of keys and values: bfloat16, float16, float32, fp8 or int8.")]
_SIZE = 'such as "4096 blocks", "64GiB", or "5%" of the trace\'s unique blocks'


def _list_models(wanted: bool) -> None:
    if wanted:
        from kvtier.bench.model_sizes import catalogue_lines
        typer.echo("\n".join(catalogue_lines()))
        raise typer.Exit


def add_commands(app: typer.Typer) -> None:
    """Give the command line its commands."""
    app.command()(replay)
    app.command()(tune)


def replay(trace: TraceFile,
           primary: Annotated[str, typer.Option(metavar="SIZE", help=f"Primary level, {_SIZE}.")],
           secondary: Annotated[str, typer.Option(metavar="SIZE", help="Secondary level.")] = "0 blocks",
           nvme: Annotated[str, typer.Option(metavar="SIZE", help="NVMe level.")] = "0 blocks",
           policy: Annotated[str, typer.Option(metavar="NAME", help="Eviction policy: default, lru, halving or seen-first.")] = "default",
           block: Block = None, tokenizer: Tokenizer = None, model: Model = "llama-3.1-8b", dtype: Dtype = "bfloat16",
           keep_backing: Annotated[bool, typer.Option(help="Keep the lower copy of a promoted block.")] = True,
           write_ahead_share: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="SHARE",
                                                        help="Of the secondary level: kept clean.")] = 0.25,
           nvme_min_uses: Annotated[int, typer.Option(min=0, max=2, metavar="N",
                                                  help="Earlier uses of a prompt before it is written to NVMe.")] = 0,
           nvme_max_depth: Annotated[int, typer.Option(min=0, metavar="BLOCKS",
                                                   help="Keep off NVMe blocks deeper in a prompt than this; 0: no limit.")] = 0,
           copy_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help='Simulated, such as "20GB/s"; at once by '
                                                              "default.")] = None,
           nvme_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Simulated, of reads and of writes.")] = None,
           json: JsonFile = None,
           plot: Annotated[Path | None, typer.Option(metavar="FILE", parser=writable_file,
                                                     help="Draw time lines into FILE (png, svg, pdf).")] = None) -> None:
    """What a trace would get from levels of given sizes.

    It runs through the real bookkeeping with counted bytes: hits by level, bytes moved and written, evictions.
    """
    from kvtier.bench.replay_report import ReplayOptions, run_replay
    raise typer.Exit(run_replay(ReplayOptions(
        trace, primary, secondary, nvme, policy, block, tokenizer, model, dtype, keep_backing, write_ahead_share, nvme_min_uses,
        nvme_max_depth, copy_bandwidth, nvme_bandwidth, json, plot)))


def tune(trace: TraceFile,
         primary: Annotated[str, typer.Option(metavar="SIZE", help="Device memory for cached blocks.")] = "40GiB",
         host_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Most host memory to recommend; by default 80% of what is "
                                                        "free.")] = None,
         nvme_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Most NVMe to recommend; by default 90% of what is "
                                                        "free.")] = None,
         nvme_directory: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the NVMe level; --measure measures it "
                                                             "there.")] = None,
         prefill_rate: Annotated[float, typer.Option(metavar="TOKENS", help="Tokens per second that the engine computes.")] = 5000.0,
         measured: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Figures of kvtier bench copy or nvme; may be "
                                                             "repeated.")] = None,
         measure: Annotated[bool, typer.Option(help="Measure this machine first, about a minute.")] = False,
         endurance: Annotated[str | None, typer.Option(metavar="SIZE", help='What the drive may be written, such as "600TB".')] = None,
         sample: Annotated[float | None, typer.Option(metavar="SHARE", help="Look at this share of the blocks; by default all of them "
                                                      "where that takes seconds.")] = None,
         block: Block = None, tokenizer: Tokenizer = None, model: Model = "llama-3.1-8b", dtype: Dtype = "bfloat16",
         json: JsonFile = None,
         html: Annotated[Path | None, typer.Option(metavar="FILE", parser=writable_file,
                                                   help="Write a report that needs no other file.")] = None,
         config: Annotated[Path | None, typer.Option(metavar="FILE", parser=writable_file,
                                                     help="Write a configuration (YAML) ready to use.")] = None,
         list_models: Annotated[bool, typer.Option("--list-models", callback=_list_models, is_eager=True,
                                                   help="Show the models that --model knows, and exit.")] = False) -> None:
    """How much host memory and NVMe a trace's traffic is worth.

    Says what each size buys, and how much of the drive's life it takes.
    """
    from kvtier.bench.tune_report import TuneOptions, run_tune
    from kvtier.tiering.config_sources import expand_path
    directory = None if nvme_directory is None else expand_path(nvme_directory, "--nvme-directory")
    raise typer.Exit(run_tune(TuneOptions(
        trace, primary, host_limit, nvme_limit, directory, prefill_rate, measured or (), measure, endurance, sample, block, tokenizer,
        model, dtype, json, html, config)))

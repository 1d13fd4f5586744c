"""``kvtier replay`` and ``kvtier tune``: what traffic would get from tiers of given sizes, and which sizes to give them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Requests, one JSON object on each line (docs/tuning.md).")]
Block = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", show_default=False,
                                           help="Tokens of a block: 512, or 16 for text chats, when left out.")]
Tokenizer = Annotated[str | None, typer.Option(metavar="FILE", help='The trace is text chats; a tokenizer.json, or "bytes".')]
Model = Annotated[str, typer.Option(metavar="NAME", help="A known model or a config.json: how large a block is.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="Element type of keys and values.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to FILE.")]
_SIZE = 'such as "4096 blocks", "64GiB", or "5%" of the trace\'s unique blocks'


def add_commands(app: typer.Typer) -> None:
    """Give the command line its commands."""
    app.command()(replay)


def replay(trace: TraceFile,
           primary: Annotated[str, typer.Option(metavar="SIZE", help=f"Primary level, {_SIZE}.")],
           secondary: Annotated[str, typer.Option(metavar="SIZE", help="Secondary level.")] = "0 blocks",
           nvme: Annotated[str, typer.Option(metavar="SIZE", help="NVMe level.")] = "0 blocks",
           policy: Annotated[str, typer.Option(metavar="NAME", help="Eviction policy.")] = "default",
           block: Block = None, tokenizer: Tokenizer = None, model: Model = "llama-3.1-8b", dtype: Dtype = "bfloat16",
           keep_backing: Annotated[bool, typer.Option(help="Keep the lower copy of a promoted block.")] = True,
           write_ahead_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the secondary level kept clean.")] = 0.25,
           copy_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help='Simulated, such as "20GB/s"; at once by '
                                                              "default.")] = None,
           nvme_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Simulated, of reads and of writes.")] = None,
           json: Json = None,
           plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time lines into FILE (png, svg, pdf).")] = None) -> None:
    """Run a trace through the real bookkeeping with counted bytes: hits by level, bytes moved and written, evictions."""
    from kvtier.bench.replay_report import ReplayOptions, run_replay
    raise typer.Exit(run_replay(ReplayOptions(
        trace, primary, secondary, nvme, policy, block, tokenizer, model, dtype, keep_backing, write_ahead_share, copy_bandwidth,
        nvme_bandwidth, json, plot)))

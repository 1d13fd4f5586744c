"""``kvtier bench serve``: a served workload with the tier and without it. Part of ``cli``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class ServedBy(enum.StrEnum):
    """Whose engine serves."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def bench_serve(engine: Annotated[ServedBy, typer.Option(help="Whose engine serves.")] = ServedBy.VLLM,
                model: Annotated[str | None, typer.Option(metavar="NAME", show_default=False,
                                                          help="A model's folder (vllm: or name); SmolLM2 by default.")] = None,
                directory: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False,
                                                               help="Folder on the drive of the NVMe level.")] = None,
                trace: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
                                                           help="Serve this trace's arrivals, with made-up text, instead.")] = None,
                block: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of a block of the trace.")] = 512,
                speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast the trace's requests arrive.")] = 1.0,
                device: Annotated[str, typer.Option(help="transformers: where the model runs.")] = "cpu",
                engine_arguments: Annotated[str, typer.Option("--vllm-arguments", metavar="TEXT",
                                                              help="Further arguments of vllm serve.")] = "",
                json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to FILE.")] = None,
                plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE",
                                                          help="Draw the figures into FILE (png, svg, pdf).")] = None,
                quick: Annotated[bool, typer.Option("--quick", help="A short run, for a first look.")] = False) -> None:
    """Time to first token, throughput and hits of a served workload, with the tier beside the engine alone."""
    from kvtier.bench.serve import ServePlan, run_serve
    from kvtier.bench.serve_engine import EngineMaker
    maker: EngineMaker
    if engine is ServedBy.VLLM:
        from kvtier.bench.serve_vllm import VllmMaker
        maker = VllmMaker(model, engine_arguments)
    else:
        from kvtier.bench.serve_transformers import TransformersMaker
        maker = TransformersMaker(model, device)
    raise typer.Exit(run_serve(maker, engine.value, ServePlan.usual(quick, trace, block, speed), directory, json, plot, quick))

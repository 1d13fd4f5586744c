"""``kvtier bench serve``: a served workload with the tier and without it. Part of ``cli``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli_options import CompareWith, Directory, JsonFile, PlotFile, Quick, folder


class ServedBy(enum.StrEnum):
    """Whose engine serves."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def bench_serve(engine: Annotated[ServedBy, typer.Option(help="Whose engine serves.")] = ServedBy.VLLM,
                model: Annotated[str | None, typer.Option(metavar="NAME", show_default=False,
                                                          help="A model's folder (vllm: or name); SmolLM2 by default.")] = None,
                directory: Directory = None,
                trace: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
                                                           help="Serve this trace's arrivals instead.")] = None,
                block: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of a block of the trace.")] = 512,
                speed: Annotated[float, typer.Option(min=0.001, metavar="FACTOR",
                                                       help="How many times as fast the trace's requests arrive.")] = 1.0,
                device: Annotated[str, typer.Option(metavar="DEVICE", help="transformers: where the model runs.")] = "cpu",
                engine_arguments: Annotated[str, typer.Option("--vllm-arguments", metavar="TEXT",
                                                              help="Further arguments of vllm serve.")] = "",
                more_engines: Annotated[bool | None, typer.Option(
                    "--more-engines/--no-more-engines", show_default=False,
                    help="Beside also kvtier without NVMe and an engine with room for everything: two engines more at the same time. By "
                    "default with transformers, unless --quick.")] = None,
                text: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
                                                          help="Text of the prompts; Python's language reference by default.")] = None,
                points: Annotated[str | None, typer.Option(metavar="KINDS", show_default=False,
                                                           help='Which points, of "none,returning,restart".')] = None,
                at_once: Annotated[str | None, typer.Option(metavar="N,...", show_default=False,
                                                            help="Requests in flight, one point for each.")] = None,
                users: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Of a round, at least.")] = None,
                rounds: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Recorded at each point.")] = None,
                shape: Annotated[str | None, typer.Option(
                    metavar="SHARED,TURN,ANSWER,TURNS", show_default=False,
                    help="Of conversations: tokens that all begin with, of a user's turn, of an answer; turns.")] = None,
                json: JsonFile = None, plot: PlotFile = None, compare: CompareWith = None, quick: Quick = False) -> None:
    """A served workload with the tier beside the engine alone.

    Time to first token, throughput and hits. Takes minutes, with vLLM most of them for its engines to start; --quick fewer.
    """
    if engine is ServedBy.TRANSFORMERS:
        from kvtier.bench import openmp_waiting  # noqa: F401 # isort: skip - before torch is loaded
    from kvtier.bench.build import compiled
    from kvtier.bench.outputs import Outputs
    from kvtier.bench.serve import ServePlan, measure_serve
    from kvtier.bench.serve_engine import EngineMaker
    place = folder(directory, "--directory")
    outputs = Outputs(json, plot, compare)
    outputs.check("serve", {"quick": quick, "compiled": compiled()}, place or Path.cwd())
    maker: EngineMaker
    if engine is ServedBy.VLLM:
        from kvtier.bench.serve_vllm import VllmMaker
        maker = VllmMaker(model, engine_arguments)
    else:
        from kvtier.bench.serve_transformers import TransformersMaker
        maker = TransformersMaker(model, device)
    further = engine is ServedBy.TRANSFORMERS and not quick if more_engines is None else more_engines
    plan = ServePlan.usual(quick, trace, block, speed, further).changed(points, at_once, users, rounds, shape)
    raise typer.Exit(outputs.run(lambda: measure_serve(maker, engine.value, plan, place, quick, text)))

"""``kvtier demo``: a real model served through three tiers, compared with the same serving without reuse.

Conversations that share a long system prompt are held twice over the same prompts: with a primary pool far too small for
them and two levels behind it, and with reuse off. The answers must be the same token by token.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvtier.bench import openmp_waiting  # isort: skip - before torch is loaded

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvtier.bench.demo_conversation import ChatFormat, stop_tokens
from kvtier.bench.demo_model import check_device, load_demo_model
from kvtier.bench.demo_plan import (
    DEFAULT_TURNS,
    DEFAULT_USERS,
    QUICK_TURNS,
    check_settings,
    check_size,
    plan_demo,
    recompute_config,
    tiered_config,
)
from kvtier.bench.demo_report import Totals, as_json, compare, print_report
from kvtier.bench.demo_run import Run, converse, repeat
from kvtier.bench.removal import remove_folder
from kvtier.bench.report import check_writable, write_json
from kvtier.bench.slow_stages import SlowStages, to_stderr
from kvtier.errors import ConfigError, KVTierError
from kvtier.io.store_directory import why_not_written
from kvtier.pools.host_memory import usable_cpus

SAME: Final = 0
DIFFERENT: Final = 1


def run_demo(device: str = "cpu", model: Path | None = None, config: Path | None = None, keep_nvme: Path | None = None,
             json_file: Path | None = None, users: int | None = None, turns: int | None = None, quick: bool = False,
             threads: int | None = None, console: Console | None = None) -> int:
    """Run the demo and print what it found.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        model: folder of a llama-, qwen- or smollm-type chat model; None for SmolLM2-135M-Instruct.
        config: YAML or TOML file whose keys replace the demo's own settings of the tier.
        keep_nvme: folder for the NVMe level that stays; a second run with the same folder starts warm.
        json_file: where to write all figures.
        users, turns: size of the demo; None for its own.
        quick: fewer turns.
        threads: torch threads; None for one per usable core.
        console: where to print; None for standard output.

    Returns:
        0 when all answers are the same (near ties counted), 1 when not or when a request could not be answered.

    Raises:
        ConfigError: something asked for cannot be used.
    """
    again = _same_run(device, model, config, users, turns, quick)
    users, turns = users or DEFAULT_USERS, turns or (QUICK_TURNS if quick else DEFAULT_TURNS)
    check_size(users, turns)
    if json_file is not None:
        check_writable(json_file)
    check_device(device)
    check_settings(config)
    if keep_nvme is not None:
        _check_kept(keep_nvme)
    console = console or Console()
    threads = threads or usable_cpus()
    with _torch_threads(threads), _scratch() as scratch, _stages(console) as stages:
        stages.begin("loading the model")
        loaded = load_demo_model(model, device=device, say=lambda text: console.print(Text(text, style="dim"), soft_wrap=True))
        stops = stop_tokens(loaded.model, loaded.tokenizer)
        chat = ChatFormat(loaded.tokenizer, stops)
        plan = plan_demo(chat, users, turns)
        tiered = tiered_config(plan, config, keep_nvme, scratch)
        console.print(f"[bold]{escape(loaded.origin)}[/bold] on {device}, float32, {threads} torch threads "
                      f"({openmp_waiting.openmp_waiting()})")
        console.print(f"{plan.users} users x {plan.turns} turns, {plan.shared_tokens} tokens of prompt in common; "
                      f"{plan.working_set_blocks} blocks of different content. Primary {tiered.primary}, secondary "
                      f"{tiered.secondary}, NVMe {tiered.nvme} in {escape(str(tiered.nvme_directory))}. "
                      f"Up to {tiered.max_batch_size} request{'s' if tiered.max_batch_size > 1 else ''} at a time.")
        if not plan.is_quarter:
            console.print("(so few users that a quarter of their blocks would not hold one request: primary is larger)")
        try:
            answers = plan.users * plan.turns
            with _progress(console, answers, stages) as (with_bar, without_bar):
                stages.begin("answers with kvtier", answers)
                with_tier = converse(loaded, chat, stops, plan, tiered, device, with_bar)
                stages.begin("the same answers without reuse", answers)
                without = repeat(loaded, stops, with_tier.turns, recompute_config(plan, tiered), device, without_bar)
        except ConfigError:
            raise
        except KVTierError as error:
            console.print(Text(f"serving stopped: {error}", style="red"))
            return DIFFERENT
        comparison, totals = compare(with_tier.turns, without.turns), Totals.of(with_tier, without)
        print_report(console, with_tier, without, comparison, totals)
        next_command, why = _next_command(again, tiered.nvme_directory if keep_nvme is not None else None, with_tier)
        if json_file is not None:
            write_json(json_file, as_json(loaded, device, threads, plan, tiered, with_tier, without, comparison, totals,
                                          next_command))
    console.print(f"Next: [bold]{escape(next_command)}[/bold]   ({why})", soft_wrap=True)
    return SAME if comparison.passed else DIFFERENT


def _check_kept(folder: Path) -> None:
    """Make sure that ``--keep-nvme`` can be made and written, before a model is loaded. Changes nothing. ConfigError where it cannot."""
    error = why_not_written(folder)
    if error is not None:
        raise ConfigError(f"--keep-nvme {folder}: cannot be written ({error.strerror}); name a folder that this user may make and write "
                          "to") from error


def _same_run(device: str, model: Path | None, config: Path | None, users: int | None, turns: int | None, quick: bool) -> list[str]:
    """The options that make this run what it is, as they were given: with others, a later run would ask for other prompts."""
    given = {"--device": None if device == "cpu" else device, "--model": model, "--config": config, "--users": users, "--turns": turns}
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*words, "--quick"] if quick else words


def _next_command(again: Sequence[str], kept: Path | None, run: Run) -> tuple[str, str]:
    """What to try next, and why."""
    program = _program()
    same_run = f"{program} {shlex.join(['demo', *again])} --keep-nvme"
    if kept is None:
        return f"{same_run} ~/kvtier-demo", "run it twice: the second run starts warm from NVMe"
    counters = run.turns[0].counters
    if counters is None or not counters.hit_tokens.nvme:
        return f"{same_run} {shlex.quote(str(kept))}", "once more: it starts warm from NVMe then"
    return f"{program} bench nvme --directory {shlex.quote(str(kept.parent))}", "how fast the drive is, and kvtier on it"


def _program() -> str:
    """What a shell in the current folder starts this program by: its name where that finds it, else its path."""
    started = Path(sys.argv[0])
    found = shutil.which("kvtier")
    if started.name != "kvtier" or not started.is_file():  # called out of another program
        return "kvtier"
    if found is not None and os.path.samefile(found, started):
        return "kvtier"
    relative = os.path.relpath(started)
    return shlex.quote(min(relative if os.sep in relative else f"./{relative}", str(started.absolute()), key=len))


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the NVMe level of this run only."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    try:
        yield folder / "nvme"
    finally:
        remove_folder(folder)


def _stages(console: Console) -> SlowStages:
    """Lines on the standard error in place of bars, for a log file or a pipe."""
    return SlowStages("kvtier demo", (lambda line: None) if console.is_terminal else to_stderr)


@contextmanager
def _progress(console: Console, answers: int, stages: SlowStages) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Two bars, one for each run."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("answers"),
                  TimeElapsedColumn(), console=console) as progress:
        with_tier = progress.add_task("with kvtier   ", total=answers)
        without = progress.add_task("without reuse ", total=answers, start=False)

        def tiered() -> None:
            stages.advance()
            progress.advance(with_tier)

        def reference() -> None:
            stages.advance()
            progress.start_task(without)
            progress.advance(without)

        yield tiered, reference

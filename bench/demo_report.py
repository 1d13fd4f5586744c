"""What the demo found out: are the answers the same, what was reused from where, and how long the first token took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import kvtier
from kvtier.bench.demo_model import DemoModel
from kvtier.bench.demo_plan import ANSWER_TOKENS, CHUNK_SIZE, TOKENS_PER_BLOCK, DemoPlan
from kvtier.bench.demo_run import Run, Turn
from kvtier.bench.openmp_waiting import openmp_waiting
from kvtier.bench.report import describe_machine
from kvtier.bench.whole_table import print_whole
from kvtier.tiering.attach.serving_sequence import Answer
from kvtier.tiering.config import TierConfig
from kvtier.types import Level

NEAR_TIE: Final = 1e-3
"""Logits closer than this are a tie as far as float32 rounding goes: either token may come first."""

FASTER: Final = ("faster: the median without reuse by the one with kvtier. The two runs came one after the other, so what else the "
                 "machine did is in it: an impression. kvtier bench load and kvtier bench serve measure it, in turns.")


@dataclass(frozen=True)
class Comparison:
    """Answers with the tier against answers without reuse, on the same prompts.

    ``near_ties`` counts answers whose first differing token was a near tie, ``wrong`` lists (turn, user) of all others.
    """

    answers: int
    identical: int
    near_ties: int
    wrong: tuple[tuple[int, int], ...]
    smallest_gap: float

    @property
    def passed(self) -> bool:
        """Whether every answer is the same, near ties aside."""
        return not self.wrong


def compare(with_tier: Sequence[Turn], without: Sequence[Turn]) -> Comparison:
    """Compare two runs answer by answer; ``without`` is the reference whose gaps decide what a near tie is."""
    identical = near_ties = 0
    wrong: list[tuple[int, int]] = []
    gaps: list[float] = []
    for turn, reference_turn in zip(with_tier, without, strict=True):
        for user, reference in reference_turn.answers.items():
            gaps += reference.top_gaps
            position = first_difference(turn.answers[user].tokens, reference.tokens)
            if position is None:
                identical += 1
            elif position < len(reference.top_gaps) and reference.top_gaps[position] < NEAR_TIE:
                near_ties += 1
            else:
                wrong.append((turn.number, user))
    return Comparison(identical + near_ties + len(wrong), identical, near_ties, tuple(wrong), min(gaps, default=0.0))


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token that differs, also where one ends early; None when both are the same."""
    for position, (token, expected) in enumerate(zip(tokens, reference, strict=False)):
        if token != expected:
            return position
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def first_token_median(answers: Iterable[Answer]) -> float:
    """Median seconds to the first token."""
    return statistics.median(answer.first_token_seconds for answer in answers)


@dataclass(frozen=True)
class Totals:
    """Bytes and rates by direction, ``"nvme_to_primary"`` and so on, and what they add up to."""

    transferred: dict[str, int]
    blocks: dict[str, int]
    gbps: dict[str, float]
    writes_per_hit: float | None
    seconds_saved: float

    @classmethod
    def of(cls, with_tier: Run, without: Run) -> Totals:
        """Totals of the run with the tier, and the waiting for first tokens that it saved."""
        stats = with_tier.stats
        pairs = {**stats.onboard_bytes, **stats.offload_bytes}
        blocks = {**stats.onboard_blocks, **stats.offload_blocks}
        rates = {pair: pairs[pair] / stats.transfer_seconds[pair] / 1e9 for pair in pairs if stats.transfer_seconds.get(pair)}
        written = sum(count for (_source, destination), count in blocks.items() if destination == Level.NVME)
        hits = stats.hit_blocks.nvme
        waited = [sum(answer.first_token_seconds for answer in run.answers) for run in (with_tier, without)]
        return cls({_direction(pair): size for pair, size in sorted(pairs.items())},
                   {_direction(pair): count for pair, count in sorted(blocks.items())},
                   {_direction(pair): rate for pair, rate in sorted(rates.items())},
                   written / hits if hits else None, waited[1] - waited[0])


def _direction(pair: tuple[Level, Level]) -> str:
    return f"{pair[0].name.lower()}_to_{pair[1].name.lower()}"


def print_report(console: Console, with_tier: Run, without: Run, comparison: Comparison, totals: Totals) -> None:
    """The table per turn, the totals, and the verdict."""
    table = Table(title="Tokens reused from each level (sums), time to first token (medians)",
                  title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("turn", "prompt", "primary", "secondary", "NVMe", "with kvtier", "without", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn, reference in zip(with_tier.turns, without.turns, strict=True):
        assert turn.counters is not None
        hits = turn.counters.hit_tokens
        pair = [first_token_median(run.answers.values()) for run in (turn, reference)]
        table.add_row(str(turn.number + 1), f"{sum(map(len, turn.prompts.values())):,}", f"{hits.primary:,}",
                      f"{hits.secondary:,}", f"{hits.nvme:,}", f"{pair[0] * 1000:,.0f} ms", f"{pair[1] * 1000:,.0f} ms",
                      f"{pair[1] / pair[0]:.1f}x")
    print_whole(console, table)
    console.print(FASTER)
    console.print()
    moves = Table(title="Moved between levels", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("direction", "blocks", "MB", "GB/s"):
        moves.add_column(heading, justify="left" if heading == "direction" else "right", no_wrap=True)
    for direction, size in totals.transferred.items():
        rate = totals.gbps.get(direction)
        moves.add_row(direction.replace("_to_", " to "), f"{totals.blocks[direction]:,}", f"{size / 1e6:,.1f}",
                      "" if rate is None else f"{rate:.2f}")
    print_whole(console, moves)
    stats = with_tier.stats
    hits = stats.hit_tokens
    prompt_tokens = sum(answer.prompt_tokens for answer in with_tier.answers)
    console.print(f"Reused tokens: {hits.primary:,} from primary, {hits.secondary:,} from secondary, {hits.nvme:,} from NVMe "
                  f"({sum(answer.reused_tokens for answer in with_tier.answers) / prompt_tokens:.0%} of all prompt tokens).")
    if totals.writes_per_hit is not None:
        console.print(f"NVMe blocks written per block hit there: {totals.writes_per_hit:.2f}. Blocks dropped for want of a "
                      f"copy below: {stats.dropped}. Checksum failures: {stats.checksum_failures}.")
    preempted = sum(answer.preemptions for answer in with_tier.answers)
    console.print(f"Waiting for first tokens: {totals.seconds_saved:,.1f} s less in all; serving took "
                  f"{with_tier.seconds:,.1f} s with kvtier, {without.seconds:,.1f} s without.")
    if preempted:
        console.print(f"{preempted} times a request had to make room and read back what it had computed: those reads count "
                      "as reuse too.")
    if comparison.passed:
        ties = (f" {comparison.near_ties} part at a near tie, where the two best logits are closer than {NEAR_TIE}."
                if comparison.near_ties else "")
        console.print(f"[green]{comparison.identical} of {comparison.answers} answers are identical to recomputing, "
                      f"token by token.{ties}[/green]")
    else:
        places = ", ".join(f"turn {turn + 1} user {user + 1}" for turn, user in comparison.wrong[:5])
        console.print(f"[red]{len(comparison.wrong)} of {comparison.answers} answers differ from recomputing where the two best "
                      f"logits are not close ({places}). This is a bug: please report it with the JSON of this run.[/red]")


def as_json(model: DemoModel, device: str, threads: int, plan: DemoPlan, config: TierConfig, with_tier: Run, without: Run,
            comparison: Comparison, totals: Totals, next_command: str) -> dict[str, object]:
    """Everything as one JSON object."""
    stats = with_tier.stats
    return {
        "kvtier": kvtier.__version__,
        "machine": {**describe_machine(config.nvme_directory), "device": device, "torch": torch.__version__,
                    "torch_threads": threads, "openmp_waiting": openmp_waiting()},
        "model": model.identity,
        "config": config.plain_values(),
        "plan": {"users": plan.users, "turns": plan.turns, "tokens_per_block": TOKENS_PER_BLOCK, "chunk_size": CHUNK_SIZE,
                 "answer_tokens": ANSWER_TOKENS, "shared_prompt_tokens": plan.shared_tokens,
                 "working_set_blocks": plan.working_set_blocks,
                 "level_blocks": {name: getattr(stats, name).max_blocks for name in ("primary", "secondary", "nvme")}},
        "tokens_identical": comparison.identical == comparison.answers,
        "near_tie_divergences": comparison.near_ties,
        "wrong_answers": [{"turn": turn, "user": user} for turn, user in comparison.wrong],
        "smallest_logit_gap": comparison.smallest_gap,
        "answers": comparison.answers,
        "prompt_tokens": sum(answer.prompt_tokens for answer in with_tier.answers),
        "reused_tokens": stats.hit_tokens._asdict(),
        "reused_blocks": stats.hit_blocks._asdict(),
        "ttft_seconds": {"with": first_token_median(with_tier.answers), "without": first_token_median(without.answers)},
        "serving_seconds": {"with": with_tier.seconds, "without": without.seconds},
        "seconds_saved": totals.seconds_saved,
        "bytes": totals.transferred,
        "blocks": totals.blocks,
        "gbps": totals.gbps,
        "nvme_writes_per_hit": totals.writes_per_hit,
        "preemptions": sum(answer.preemptions for answer in with_tier.answers),
        "dropped_blocks": stats.dropped,
        "checksum_failures": stats.checksum_failures,
        "turns": [_turn_json(turn, reference) for turn, reference in zip(with_tier.turns, without.turns, strict=True)],
        "next_command": next_command,
    }


def _turn_json(turn: Turn, reference: Turn) -> dict[str, object]:
    assert turn.counters is not None
    return {"turn": turn.number + 1, "prompt_tokens": sum(map(len, turn.prompts.values())),
            "reused_tokens": turn.counters.hit_tokens._asdict(),
            "ttft_seconds": {"with": first_token_median(turn.answers.values()),
                             "without": first_token_median(reference.answers.values())},
            "seconds": {"with": turn.seconds, "without": reference.seconds}}

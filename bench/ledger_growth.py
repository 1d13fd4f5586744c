"""The ledger benchmark's growth rows: does a block cost more when more blocks are cached, in time and in memory?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvtier.bench.ledger_memory import LOWER_BLOCKS, bytes_per_block
from kvtier.bench.ledger_plan import VLLM, LedgerPlan
from kvtier.bench.ledger_rig import Side
from kvtier.bench.ledger_workloads import Evict, Siblings, blocks_of
from kvtier.bench.measure import LEAST_ROUNDS, Interleaved, Spread, interleave
from kvtier.bench.report import Report, ResultRow, spread_row
from kvtier.errors import KVTierError

NAME: Final = "ledger/growth"
_MICRO: Final = 1e6


def size_of(num_blocks: int) -> str:
    """A number of blocks as row names carry it: 4k for 4,096, 1M for 1,024,000."""
    thousands = num_blocks // 1024
    return str(num_blocks) if thousands == 0 else f"{thousands}k" if thousands < 1000 else f"{thousands // 1000}M"


def add_growth(report: Report, plan: LedgerPlan, with_vllm: bool) -> None:
    """Time per block of insert and evict in full pools of growing size, time of an admission with more and more cached prompts
    that begin with the same token, and resident bytes per cached block."""
    pools = {f"{NAME}/{size_of(pool)}": pool for pool in plan.growth}
    _add_family(report, NAME, lambda: _full_pools(pools, plan.insert_tokens, with_vllm), plan)
    gc.collect()
    crowds = {f"{NAME}/siblings/{size_of(count)}": count for count in plan.siblings}
    _add_family(report, f"{NAME}/siblings", lambda: _siblings(crowds, plan.sibling_tokens, with_vllm), plan)
    gc.collect()
    _add_memory(report, plan.memory_blocks, with_vllm)


def _add_family(report: Report, name: str, make: Callable[[], dict[str, Side]], plan: LedgerPlan) -> None:
    """Rows of the same operation at growing sizes, smallest first, and what the largest costs compared with the smallest."""
    report.say(f"measuring {name}")
    try:
        sides = make()
        measured = interleave([side.alternative(row) for row, side in sides.items()], plan.rounds, seconds=plan.seconds)
    except KVTierError as error:
        report.reject(name, str(error))
        return
    for row, side in sides.items():
        if side.failure:
            report.reject(row, side.failure)
            continue
        spread = measured.seconds(row)
        peer = f"{row}/vllm"
        peers = {VLLM: measured.speed_ratio(row, peer)} if peer in sides and not sides[peer].failure else {}
        report.add(ResultRow(row, "us", spread.median * _MICRO, spread.low * _MICRO, spread.high * _MICRO, peers=peers))
    ours = [row for row in sides if not row.endswith("/vllm")]
    _add_ratio(report, f"{name}/ratio", measured, ours[0], ours[-1], sides)
    if f"{ours[0]}/vllm" in sides:
        _add_ratio(report, f"{name}/ratio/vllm", measured, f"{ours[0]}/vllm", f"{ours[-1]}/vllm", sides)


def _add_ratio(report: Report, name: str, measured: Interleaved, smallest: str, largest: str, sides: dict[str, Side]) -> None:
    """How many times as long a block takes in the largest pool as in the smallest."""
    if sides[smallest].failure or sides[largest].failure:
        return
    ratios = measured.speed_ratios(smallest, largest)
    report.add(ResultRow(name, "x", ratios.median, ratios.low, ratios.high))


def _add_memory(report: Report, num_blocks: int, with_vllm: bool) -> None:
    name = f"{NAME}/bytes-per-block"
    report.say(f"measuring {name}")
    ours: list[float] = []
    theirs: list[float] = []
    try:
        for _ in range(LEAST_ROUNDS):
            ours.append(bytes_per_block(num_blocks, "kvtier"))
            theirs += [bytes_per_block(num_blocks, VLLM)] if with_vllm else []
    except KVTierError as error:
        report.reject(name, str(error))
        return
    ratios = {VLLM: Spread.of([one / other for one, other in zip(theirs, ours, strict=True)]).median} if theirs else {}
    report.add(replace(spread_row(name, "B", Spread.of(ours)), peers=ratios))
    if theirs:
        report.add(spread_row(f"{name}/vllm", "B", Spread.of(theirs)))


def _full_pools(pools: Mapping[str, int], num_tokens: int, with_vllm: bool) -> dict[str, Side]:
    lower = min(LOWER_BLOCKS, *pools.values())
    sides: dict[str, Side] = {row: Evict(num_tokens, 1, pool, lower, offload=False) for row, pool in pools.items()}
    if with_vllm:
        from kvtier.bench.ledger_vllm import VllmInsert
        sides |= {f"{row}/vllm": VllmInsert(num_tokens, 1, pool) for row, pool in pools.items()}
    for side in sides.values():
        side.operations = blocks_of(num_tokens)  # the time of one prompt, per block
    return sides


def _siblings(crowds: Mapping[str, int], num_tokens: int, with_vllm: bool) -> dict[str, Side]:
    sides: dict[str, Side] = {row: Siblings(count, num_tokens, 4) for row, count in crowds.items()}
    if with_vllm:
        from kvtier.bench.ledger_vllm import VllmSiblings
        sides |= {f"{row}/vllm": VllmSiblings(count, num_tokens, 4) for row, count in crowds.items()}
    return sides

"""The ledger benchmark's growth rows: does a block cost more when more blocks are cached, in time and in memory?"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Final

from kvtier.bench.ledger_memory import LOWER_BLOCKS, bytes_per_block
from kvtier.bench.ledger_plan import VLLM, LedgerPlan
from kvtier.bench.ledger_rig import Side
from kvtier.bench.ledger_workloads import Evict, blocks_of
from kvtier.bench.measure import Interleaved, interleave
from kvtier.bench.report import Report, ResultRow
from kvtier.errors import KVTierError

NAME: Final = "ledger/growth"
_MICRO: Final = 1e6


def size_of(num_blocks: int) -> str:
    """A number of blocks as row names carry it: 4k for 4,096, 1M for 1,024,000."""
    thousands = num_blocks // 1024
    return str(num_blocks) if thousands == 0 else f"{thousands}k" if thousands < 1000 else f"{thousands // 1000}M"


def add_growth(report: Report, plan: LedgerPlan, with_vllm: bool) -> None:
    """Time per block of insert and evict in full pools of growing size, and resident bytes per cached block."""
    pools = plan.growth
    report.say(f"measuring {NAME}")
    names = {pool: f"{NAME}/{size_of(pool)}" for pool in pools}
    try:
        sides = _sides(pools, plan.insert_tokens, names, with_vllm)
        measured = interleave([side.alternative(row) for row, side in sides.items()], plan.rounds, seconds=plan.seconds)
    except KVTierError as error:
        report.reject(NAME, str(error))
        return
    for row, side in sides.items():
        if side.failure:
            report.reject(row, side.failure)
            continue
        spread = measured.seconds(row)
        peer = f"{row}/vllm"
        peers = {VLLM: measured.speed_ratio(row, peer)} if peer in sides and not sides[peer].failure else {}
        report.add(ResultRow(row, "us", spread.median * _MICRO, spread.low * _MICRO, spread.high * _MICRO, peers=peers))
    for end in ("", "/vllm") if with_vllm else ("",):
        _add_ratio(report, f"{NAME}/ratio{end}", measured, f"{names[pools[0]]}{end}", f"{names[pools[-1]]}{end}", sides)
    del sides
    gc.collect()
    _add_memory(report, plan.memory_blocks, with_vllm)


def _add_ratio(report: Report, name: str, measured: Interleaved, smallest: str, largest: str, sides: dict[str, Side]) -> None:
    """How many times as long a block takes in the largest pool as in the smallest."""
    if sides[smallest].failure or sides[largest].failure:
        return
    ratios = measured.speed_ratios(smallest, largest)
    report.add(ResultRow(name, "x", ratios.median, ratios.low, ratios.high))


def _add_memory(report: Report, num_blocks: int, with_vllm: bool) -> None:
    name = f"{NAME}/bytes-per-block"
    report.say(f"measuring {name}")
    try:
        ours = bytes_per_block(num_blocks, "kvtier")
        theirs = bytes_per_block(num_blocks, VLLM) if with_vllm else None
    except KVTierError as error:
        report.reject(name, str(error))
        return
    report.add(ResultRow(name, "B", ours, ours, ours, peers={} if theirs is None else {VLLM: theirs / ours}))
    if theirs is not None:
        report.add(ResultRow(f"{name}/vllm", "B", theirs, theirs, theirs))


def _sides(pools: tuple[int, ...], num_tokens: int, names: Mapping[int, str], with_vllm: bool) -> dict[str, Side]:
    lower = min(LOWER_BLOCKS, pools[0])
    sides: dict[str, Side] = {}
    for pool in pools:
        sides[names[pool]] = Evict(num_tokens, 1, pool, lower, offload=False)
    if with_vllm:
        from kvtier.bench.ledger_vllm import VllmInsert
        for pool in pools:
            sides[f"{names[pool]}/vllm"] = VllmInsert(num_tokens, 1, pool)
    for side in sides.values():
        side.operations = blocks_of(num_tokens)  # the time of one prompt, per block
    return sides

"""``kvtier bench copy``: block copies through the real transfer manager, beside libc's memcpy of the same blocks.

The limit works on memory of its own that is laid out as well as the machine allows (huge pages), one thread for each stream that
ours uses, block by block. Ours issues Moves and waits for them: bookkeeping, stream, events and copiers are inside the timed part.
The pairs of slots change from round to round, so after each one every byte of the destination is known to be new, and is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kvtier.bench.build import compiled
from kvtier.bench.copy_point import Point, Route, Stage
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.report import (
    Report,
    last_level_cache_bytes,
    noise_row,
    require_memory,
    size_name,
    spread_row,
    throughput_row,
)
from kvtier.errors import ConfigError
from kvtier.kernels.compiled_copy import copy_runs
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.pool_index import PRIMARY, SECONDARY

LIMIT: Final = "libc memcpy"
LIMIT_OF_TWO: Final = "libc memcpy, 2 threads"
OURS: Final = "kvtier"
AGAIN: Final = "libc memcpy again"
BATCH_BYTES: Final = 64 << 20
"""Moves issued in one call: what a step of a busy engine takes or gives."""

_COMPILED: Final = "Ours stores past the cache"
_LIBRARY: Final = ("Copies are library calls here, the compiled build is faster (make compiled, then PYTHONPATH=build/compiled); ours "
                   "moves blocks of more than 256 KiB in parts, which libc may move faster than a mebibyte in one call")

_KIB: Final = 1 << 10


def group_of_size(block_bytes: int) -> LayerGroup:
    """32 layers of heads of 128 in bfloat16, as many tokens as give blocks of this size: a power of two from 64 KiB on."""
    heads = 8 if block_bytes >= 128 * _KIB else 4
    return KVLayout.uniform(num_layers=32, num_kv_heads=heads, head_dim=128, dtype="bfloat16",
                            tokens_per_block=block_bytes // (32 * 2 * heads * 128 * 2)).groups[0]


def two_mebibyte_group() -> LayerGroup:
    """32 layers of 8 heads of 128 in bfloat16, 16 tokens per block: 64 pages of 32 KiB, 2 MiB per block."""
    return group_of_size(2 << 20)


@dataclass(frozen=True)
class CopyPlan:
    """How much is measured of one block size.

    Attributes:
        num_blocks: blocks of each of the two pools; each end of a copy should be larger than the last-level cache.
        batch_blocks: Moves per call of ``issue``.
        rounds: recorded per row.
        group: shape of the blocks.
        is_main: measure every row, not only the main ones.
    """

    num_blocks: int
    batch_blocks: int
    rounds: int
    group: LayerGroup = field(default_factory=two_mebibyte_group)
    is_main: bool = True

    @classmethod
    def for_this_machine(cls, quick: bool) -> list[CopyPlan]:
        """Blocks of 2 MiB in detail, then from 64 KiB to 8 MiB. Pools of 8 times the last-level cache (quick: twice, and fewer
        sizes and rounds), at least 256 MiB; copies inside a pool use halves."""
        pool_bytes = max(256 << 20, (2 if quick else 8) * last_level_cache_bytes())
        sizes = (2048, 256) if quick else (2048, 64, 256, 512, 1024, 8192)
        return [cls(pool_bytes // (size * _KIB), max(8, BATCH_BYTES // (size * _KIB)), 5 if quick else (21 if size == 2048 else 11),
                    group_of_size(size * _KIB), size == 2048) for size in sizes]

    @property
    def needed_bytes(self) -> int:
        """Both pools and the limit's two buffers."""
        return 4 * self.num_blocks * self.group.block_bytes

    def routes(self) -> list[Route]:
        """The rows."""
        main = [Route(PRIMARY, SECONDARY), Route(SECONDARY, PRIMARY), Route(PRIMARY, PRIMARY)]
        layers = [Route(PRIMARY, SECONDARY, layer_first=True), Route(SECONDARY, PRIMARY, layer_first=True)]
        if not self.is_main:
            return main[:2] + layers
        return [*main, Route(PRIMARY, SECONDARY, "runs"), Route(PRIMARY, SECONDARY, "scattered"), Route(SECONDARY, PRIMARY, "scattered"),
                Route(PRIMARY, SECONDARY, both_ways=True), Route(PRIMARY, PRIMARY, num_tokens=self.group.tokens_per_block // 2), *layers]


def measure_copy(quick: bool = False, *, plan: CopyPlan | Sequence[CopyPlan] | None = None) -> Report:
    """Measure.

    Args:
        quick: smaller pools, fewer sizes and rounds, some seconds in all.
        plan: sizes; chosen for this machine when None.

    Returns:
        A report that has not been printed. Its config says under "invalid" where a copy failed or bytes differed.

    Raises:
        ConfigError: the pools do not fit into free memory.
    """
    plans = CopyPlan.for_this_machine(quick) if plan is None else [plan] if isinstance(plan, CopyPlan) else list(plan)
    for each in plans:
        if each.num_blocks < 4 or each.batch_blocks < 1 or each.rounds < 1:
            raise ConfigError(f"{each.num_blocks} blocks, batches of {each.batch_blocks}, {each.rounds} rounds: a copy benchmark needs "
                              "at least 4 blocks, 1 and 1")
    require_memory("kvtier bench copy", max(each.needed_bytes for each in plans),
                   "end other programs" if quick else "end other programs, or use --quick, which needs less")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # partial copies are torch's: with its default they would run on more threads than the limit
    try:
        return _measure(plans, quick)
    finally:
        torch.set_num_threads(threads)


def _measure(plans: Sequence[CopyPlan], quick: bool) -> Report:
    first = plans[0]
    report = Report("kvtier bench copy", {
        "command": "copy", "quick": quick, "device": "cpu", "compiled": compiled(),
        "block_bytes": first.group.block_bytes, "num_blocks": first.num_blocks,
        "batch_blocks": first.batch_blocks, "rounds": first.rounds, "page_bytes": first.group.page_bytes, "copy_threads": 1,
        "torch_threads": torch.get_num_threads(), "layout": "block-first",
        "sizes": [{"block_bytes": plan.group.block_bytes, "num_blocks": plan.num_blocks, "batch_blocks": plan.batch_blocks,
                   "rounds": plan.rounds} for plan in plans]})
    report.note("CPU figures: the primary pool is ordinary memory here, nothing crosses PCIe.")
    half = first.group.tokens_per_block // 2
    report.note("Primary slots are scattered, host slots follow one another, as the ledger hands them out; in rows called scattered both "
                "are, in runs neither is. layers: the primary pool keeps each layer's pages together. partial: the first "
                f"{half} of {first.group.tokens_per_block} tokens of every page, beside a limit that copies as many bytes in one piece. "
                "both-directions: offloading and onboarding at once. "
                f"{LIMIT}: one call for each block, one thread for each direction that sleeps between its turns as ours does (waking up "
                "is timed with ours only), the same slots and bytes, its own buffers of the same size. Its calls are made in a loop in "
                "Python, which costs each of them about as long whatever the block's size: beside small blocks that is a good part of "
                "the limit, and two threads of it take turns there. "
                f"{_COMPILED if copy_runs is not None else _LIBRARY}: a ratio above 1 is no error there. "
                "submit: what the calling thread spends, apart from the copy, with the moment in which it lets the copying thread begin. "
                "noise: the limit against itself, in the same rounds.")
    number = 0
    for plan in plans:
        for layer_first in (False, True):
            with Stage(plan.group, plan.num_blocks, layer_first) as stage, report.interruptible():
                for route in plan.routes():
                    if route.layer_first is layer_first:
                        _measure_row(report, plan, stage, route, number)
                        number += 1
    return report


def _measure_row(report: Report, plan: CopyPlan, stage: Stage, route: Route, seed: int) -> None:
    size = size_name(plan.group.block_bytes)
    name = "/".join(filter(None, ("copy", route.direction, size, route.suffix)))
    limit = LIMIT_OF_TWO if route.both_ways else LIMIT
    report.say(f"measuring {name}")
    point = Point(stage, route, plan.batch_blocks, seed)
    measured = interleave([Alternative(limit, point.copy_plainly, point.choose_pairs),
                           Alternative(OURS, point.move, point.choose_pairs, point.verify),
                           Alternative(AGAIN, point.copy_plainly, point.choose_pairs)], plan.rounds)
    if point.failure:
        report.reject(name, point.failure)
        return
    report.add(throughput_row(name, measured, OURS, limit, point.num_bytes))
    if not route.suffix and not route.both_ways:
        report.add(spread_row(f"{name}/submit", "us/block", point.submit_per_block(measured)))
    if route.source != route.destination and not route.suffix and not route.both_ways:
        report.add(noise_row(f"{name}/noise", measured, AGAIN, limit))

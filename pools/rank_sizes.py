"""Sizes that hold on every rank: the minimum over ranks, and the check that all ranks have the same groups (spec: accounting).

One ledger decides for all ranks, so a slot must exist on each of them. How ranks talk to each other is the engine's business:
it passes a function that returns, element by element, the least of what all ranks passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Final

from kvtier.errors import ConfigError
from kvtier.pools.layout import KVLayout
from kvtier.pools.sizing import PoolSizes

AllreduceMin = Callable[[list[int]], list[int]]
"""Called by all ranks at the same time with lists of one length; every number fits signed 64 bits."""

_DIGEST_BYTES: Final = 7  # and so does its negation


def minimum_over_ranks(sizes: PoolSizes, allreduce_min: AllreduceMin, layout: KVLayout) -> PoolSizes:
    """Per group and level the least number of blocks that any rank has. Every rank calls this.

    Groups are the same when the ledger cannot tell them apart: block size, and by group number kind, window, sinks and snapshot
    interval. Layer numbers and heads may differ: pipeline and tensor parallel ranks hold different parts of a model.

    Args:
        sizes: what this rank would have.
        allreduce_min: see :data:`AllreduceMin`; called twice, or once when the groups differ.
        layout: this rank's.

    Raises:
        ConfigError: another rank has other groups, on every rank; names this rank's. Or what came back is no minimum.
    """
    digest = _digest_of_groups(layout)
    least, negated = _reduce(allreduce_min, [digest, -digest])
    if least != -negated:  # the same two numbers everywhere, so no rank goes on to wait for the others
        groups = "; ".join(f"{group.number}: {group.describe()}" for group in layout.groups)
        raise ConfigError(f"layout: the ranks have different groups; this rank's are [{groups}] with tokens_per_block="
                          f"{layout.tokens_per_block}. Give every rank layers of the same kinds, windows and sinks")
    count = len(layout.groups)
    mine = [*sizes.primary, *sizes.secondary, *sizes.nvme]
    counts = _reduce(allreduce_min, mine)
    return PoolSizes(tuple(counts[:count]), tuple(counts[count:2 * count]), tuple(counts[2 * count:]))


def _reduce(allreduce_min: AllreduceMin, mine: list[int]) -> list[int]:
    """The minimum, and whether it can be one."""
    result = [int(number) for number in allreduce_min(list(mine))]
    if len(result) != len(mine) or any(least > own for least, own in zip(result, mine, strict=False)):
        raise ConfigError(f"allreduce_min: {mine} came back as {result}, which is no minimum with this rank's numbers; pass a function "
                          "that returns the least over all ranks, element by element")
    return result


def _digest_of_groups(layout: KVLayout) -> int:
    groups = [[group.kind, group.window, group.sinks, group.snapshot_interval] for group in layout.groups]
    canonical = json.dumps([layout.tokens_per_block, groups]).encode()
    return int.from_bytes(hashlib.sha256(canonical).digest()[:_DIGEST_BYTES], "big")

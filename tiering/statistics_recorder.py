"""``StatisticsRecorder``: counters from iteration to iteration, peaks, and advice (design: statistics).

Everything here runs under the manager's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtier.io.store_messages import NvmeStats
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.statistics import (
    GdsStats,
    GroupLevels,
    GroupStats,
    IterationStats,
    LevelIteration,
    LevelStats,
    LoadStats,
    PrefetchStats,
    Route,
    Stats,
    TierCounters,
    TransferTotals,
    collect_counters,
    collect_groups,
    collect_priorities,
    since,
    total_levels,
    used_blocks,
)
from kvtier.tiering.transfer_balance import TransferBalance
from kvtier.tiering.transfer_times import TransferTimes
from kvtier.types import Level

logger = logging.getLogger(__name__)


class UsagePeaks:
    """The most primary blocks in use since ``restart``: of each group, and of all together. Other levels have none in use."""

    def __init__(self, allocators: Sequence[BlockAllocator]) -> None:
        self._allocators = allocators
        self.groups: list[int] = []
        self.total = 0
        self.restart()

    def note(self) -> None:
        """At the end of a call. A few additions, unless more seems to be in use than ever before."""
        at_most = [allocator.num_blocks[0] - allocator.queues.num_free(0) for allocator in self._allocators]  # also counts busy slots
        if sum(at_most) <= self.total and all(map(int.__le__, at_most, self.groups)):
            return
        used = [used_blocks(allocator) for allocator in self._allocators]
        self.groups = list(map(max, used, self.groups))
        self.total = max(sum(used), self.total)

    def restart(self) -> None:
        """A new iteration begins with what is in use now."""
        self.groups = [used_blocks(allocator) for allocator in self._allocators]
        self.total = sum(self.groups)


class StatisticsRecorder:
    """What the manager knows beyond the ledger's counters. ``totals`` and ``times`` are added to as Moves finish.

    Args:
        balances: who watches the traffic of which level; by default both lower levels where they have blocks.
    """

    def __init__(self, ledger: Ledger, balances: Sequence[TransferBalance] | None = None) -> None:
        self.totals = TransferTotals()
        self.times = TransferTimes()
        self._ledger = ledger
        self._peaks = UsagePeaks(ledger.allocators)
        if balances is None:
            balances = [TransferBalance(level) for level in (Level.SECONDARY, Level.NVME)
                        if any(allocator.num_blocks[level] for allocator in ledger.allocators)]
        self._balances = balances
        self._counters = collect_counters(ledger, self.totals)  # when the last iteration ended
        self._iteration: Callable[[], IterationStats]
        self._begin_next()

    def note_usage(self) -> None:
        """At the end of every call that may have changed the ledger."""
        self._peaks.note()

    def end_iteration(self) -> None:
        """Once per engine step: close one iteration, begin the next."""
        before = self._counters
        now = self._begin_next()
        for balance in self._balances:
            advice = balance.note(_moved(now.onboard_blocks, balance.level, 0) - _moved(before.onboard_blocks, balance.level, 0),
                                  _moved(now.offload_blocks, balance.level, 1) - _moved(before.offload_blocks, balance.level, 1),
                                  now.dropped - before.dropped)
            if advice is not None:
                logger.warning("transfers are out of balance: %s", advice)

    def _begin_next(self) -> TierCounters:
        self._peaks.note()
        before, now = self._counters, collect_counters(self._ledger, self.totals)
        groups, peaks, total_peak = collect_groups(self._ledger.allocators), self._peaks.groups, self._peaks.total
        self._iteration = lambda: _iteration(since(now, before), groups, peaks, total_peak)  # few ask: made when somebody does
        self._counters = now
        self._peaks.restart()
        return now

    @property
    def advice(self) -> str | None:
        """What to change, as long as transfers are out of balance."""
        return "; ".join([balance.advice for balance in self._balances if balance.advice is not None]) or None

    def stats(self, *, dropped_events: int, prefill_tokens_per_second: float | None, faults: Mapping[str, int], gds: GdsStats,
              loading: LoadStats, prefetch: PrefetchStats, store: NvmeStats | None, copy_paths: Mapping[str, str]) -> Stats:
        """Everything counted since the start, and what the levels hold now. Arguments: what others count, by the names of ``Stats``."""
        groups = collect_groups(self._ledger.allocators)
        primary, secondary, nvme = total_levels(groups)
        return Stats(**vars(collect_counters(self._ledger, self.totals)), primary=primary, secondary=secondary, nvme=nvme, groups=groups,
                     priorities=collect_priorities(self._ledger.allocators), move_seconds=self.times.durations(),
                     move_wait_seconds=self.times.waits(), store=store, leases=len(self._ledger.leases),
                     sequences=len(self._ledger.sequences), dropped_events=dropped_events,
                     prefill_tokens_per_second=prefill_tokens_per_second, advice=self.advice, faults=faults, gds=gds, loading=loading,
                     prefetch=replace(prefetch), copy_paths=copy_paths)

    def iteration_stats(self) -> IterationStats:
        """The iteration that ended last."""
        return self._iteration()


def _moved(blocks: Mapping[Route, int], level: Level, end: int) -> int:
    """Blocks of all routes with the level at this end."""
    return sum([number for route, number in blocks.items() if route[end] is level])


def _iteration(counters: TierCounters, groups: Sequence[GroupStats], peaks: Sequence[int], total_peak: int) -> IterationStats:
    primary, secondary, nvme = total_levels(groups)
    return IterationStats(**vars(counters), primary=_with_peak(primary, total_peak), secondary=_with_peak(secondary, 0),
                          nvme=_with_peak(nvme, 0), groups=tuple([
                              GroupLevels(group.group, _with_peak(group.primary, peak), _with_peak(group.secondary, 0),
                                          _with_peak(group.nvme, 0)) for group, peak in zip(groups, peaks, strict=True)]))


def _with_peak(level: LevelStats, peak: int) -> LevelIteration:
    return LevelIteration(**vars(level), peak_used_blocks=peak)

"""``LoadDecider``: whether a prefix found on a lower level is loaded, left to recompute, or both (design: deciding to load).

It brings together what the tier knows of its own speed (``load_speed``) and what the engine reports of its (``report_prefill``); the
choice itself is pure (``policies.load_decision``). The ledger asks once per request that would load anything, when everything is
planned and nothing has changed. Everything here runs under the ledger's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.policies.load_decision import LoadChoice, affordable, choose_load
from kvtier.policies.speed_models import PrefillModel
from kvtier.pools.pool_index import NUM_LEVELS, PRIMARY, level_of
from kvtier.tiering.ledger.admission import AdmissionPlan
from kvtier.tiering.load_speed import LoadMeter
from kvtier.tiering.statistics import LoadDecision, LoadStats, RouteSpeed
from kvtier.types import Level

PROBE_EVERY: Final = 16
"""So many decisions against a level without a single load from it, and the next one loads a little: a drive that was slow for a while
must not count as slow for ever."""

PROBE_SHARE: Final = 0.05
"""Of the time that computing takes: what such a trial may cost. At least one block is loaded."""

NEARLY: Final = 1.25
"""Where loading everything would take so many times as long as computing at most, the trial loads everything."""


class LoadDecider:
    """Decides, and counts what was decided.

    Args:
        meter: the tier's own speed.
        is_on: False always loads.
        can_split: whether any number of blocks may be loaded; False where layers need other blocks for a shorter prefix (windows) or
            only have some (kept states): then all or none.
    """

    def __init__(self, meter: LoadMeter, is_on: bool, can_split: bool) -> None:
        self.meter = meter
        self._is_on = is_on
        self._can_split = can_split
        self._prefill = PrefillModel()
        self._pending: list[LoadDecision] = []
        self._counts = {"loaded": 0, "split": 0, "recomputed": 0, "probed": 0, "undecided": 0}
        self._tokens_left = 0
        self._last: LoadDecision | None = None
        self._estimated_prefill = 0.0
        self._measured_prefill = 0.0
        self._denied = [0] * NUM_LEVELS  # by level: decisions against it since the last load from there

    def report_prefill(self, start: int, end: int, seconds: float) -> None:
        """The engine computed prompt tokens ``[start, end)``."""
        if self._prefill.is_known:
            self._estimated_prefill += self._prefill.cost().seconds(start, end)
            self._measured_prefill += seconds
        self._prefill.observe(start, end, seconds)

    # -- deciding --------------------------------------------------------------------------------------------------------

    def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
        """How many of the last plan's matched blocks it keeps; the plans before it are those of its batch."""
        plan = plans[-1]
        if not self._is_on:
            return plan.num_matched
        levels = self._levels(plans)
        if not any(levels):
            return plan.num_matched
        tokens_per_block = plan.keys.tokens_per_block
        seconds = self._block_seconds(levels)
        if not self._prefill.is_known:
            every = plan.num_matched
            self._pending.append(LoadDecision("undecided", plan.request.id, every, every, 0, sum(seconds), None, None))
            return every
        choice = choose_load(seconds, self._can_split, tokens_per_block, plan.prepopulated, plan.request.num_tokens, self._prefill.cost())
        chosen = choice.num_blocks
        kind = "recomputed" if not any(levels[:chosen]) else "loaded" if chosen == plan.num_matched else "split"
        if chosen < plan.num_matched and (trial := self._trial(choice, levels, seconds)) > chosen:
            chosen = trial
            kind = "probed"
        left = plan.prepopulated - chosen * tokens_per_block if chosen < plan.num_matched else 0
        self._pending.append(LoadDecision(kind, plan.request.id, plan.num_matched, chosen, left, sum(seconds[:chosen]), choice.seconds_all,
                                          choice.seconds_none))
        for level in set(levels):
            self._denied[level] = 0 if level in levels[:chosen] else self._denied[level] + 1
        return chosen

    def _levels(self, plans: Sequence[AdmissionPlan]) -> list[int]:
        """By position, the slowest level that it is loaded from. What others of the batch load already costs nothing more."""
        plan = plans[-1]
        levels = [PRIMARY] * plan.num_matched
        loaded: set[tuple[int, int]] = set()
        for earlier in plans[:-1]:
            if not earlier.is_primary:
                loaded.update((group, block.id) for group, row in enumerate(earlier.rows) for block in row)
        for group, row in enumerate(plan.rows):
            for position, block in enumerate(row):
                if block.id >= 0 and (level := level_of(block.index)) > levels[position] and (group, block.id) not in loaded:
                    levels[position] = level
        return levels

    def _block_seconds(self, levels: Sequence[int]) -> list[float]:
        """What each position adds. Levels are added up, though they overlap in part: all share the way into the primary level."""
        num_bytes = sum(self.meter.block_bytes)
        seconds: list[float] = []
        seen: set[int] = {PRIMARY}
        for level in levels:
            added = 0.0
            if level != PRIMARY:
                speed = self.meter.routes[level, PRIMARY].model.speed()
                added = num_bytes * speed.seconds_per_byte
                if level not in seen:
                    seen.add(level)
                    added += speed.latency + self.meter.waiting_seconds(level)
            seconds.append(added)
        return seconds

    def _trial(self, choice: LoadChoice, levels: Sequence[int], seconds: Sequence[float]) -> int:
        """How many blocks are loaded although that is thought to be slower, because too little is known of a level that would be left
        alone; otherwise what was chosen.

        A level that nothing was loaded from yet is tried at once, and once more with another number of blocks, so that latency and
        speed can be told apart; later once in a while.
        """
        end = chosen = choice.num_blocks
        for level in set(levels[chosen:]) - {PRIMARY}:
            model = self.meter.routes[level, PRIMARY].model
            if model.num_observed and (model.tells_latency or not self._can_split) and self._denied[level] < PROBE_EVERY:
                continue
            least = 2 if 0.0 < model.smallest < 2.0 * sum(self.meter.block_bytes) and not model.tells_latency else 1
            end = max(end, min(levels.index(level, chosen) + least, len(levels)))
            is_near = self._denied[level] >= PROBE_EVERY and choice.seconds_all <= NEARLY * choice.seconds_none
            if is_near or not (self._can_split or model.num_observed):
                end = len(levels)
        if not self._can_split:
            return len(levels) if end == len(levels) else chosen
        return end if end == chosen else max(end, chosen + affordable(list(seconds[chosen:]), PROBE_SHARE * choice.seconds_none))

    # -- counting --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch is about to be planned."""
        self._pending.clear()

    def commit(self) -> None:
        """It was admitted: what was decided for it counts."""
        for decision in self._pending:
            self._counts[decision.kind] += 1
            self._tokens_left += decision.tokens_left
            self._last = decision
        self._pending.clear()

    def stats(self) -> LoadStats:
        speeds: dict[tuple[Level, Level], RouteSpeed] = {}
        estimated = measured = 0.0
        for (source, destination), route in self.meter.routes.items():
            speed = route.model.speed()
            speeds[Level(source), Level(destination)] = RouteSpeed(speed.latency, 1.0 / speed.seconds_per_byte, route.num_bursts)
            estimated += route.estimated_seconds
            measured += route.measured_seconds
        cost = self._prefill.cost() if self._prefill.is_known else None
        return LoadStats(**self._counts, tokens_left=self._tokens_left, last=self._last, speeds=speeds,
                         prefill_overhead_seconds=None if cost is None else cost.overhead,
                         prefill_seconds_per_token=None if cost is None else cost.per_token,
                         prefill_seconds_per_pair=None if cost is None else cost.per_pair,
                         estimated_load_seconds=estimated, load_seconds=measured, estimated_prefill_seconds=self._estimated_prefill,
                         prefill_seconds=self._measured_prefill)

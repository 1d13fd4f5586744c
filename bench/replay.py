"""A trace through the real ledger, with bytes that are only counted (``kvtier replay``).

A block of the trace is one block of the ledger: the prompt that the ledger gets is the list of ids, with one token for each block. The
ledger never matches or stores a prompt's last token, which is just what the format asks for its last id. Requests come one after
another; each is complete before the next begins. A prompt of more blocks than the primary level holds is cut to what fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtier.bench.trace import Progress, Trace
from kvtier.errors import ConfigError
from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.at_once import finish_at_once, no_moves, write_ahead_at_once
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.uses import TOKENS_PER_KEY

Direction = tuple[int, int]
"""The levels that a Move leads from and to."""

MOMENTS: Final = 100  # of the time line
_WRITE_AHEAD_EVERY: Final = 32  # refresh when this part of the secondary level has come down: an engine refreshes in every step


@dataclass(frozen=True)
class ReplaySettings:
    """What a trace is replayed through.

    Attributes:
        num_blocks: of the three levels.
        rules: of the ledger; without a secondary level nothing goes down, whatever they say.
        seconds: simulated seconds for one block, by direction; Moves of one direction wait for each other. None at once.
    """

    num_blocks: tuple[int, int, int]
    rules: LedgerRules = field(default_factory=LedgerRules)
    seconds: Mapping[Direction, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """A part of the replay, for time lines: how far it was, and what happened since the moment before."""

    seconds: float
    input_tokens: int
    hit_tokens: tuple[int, ...]
    nvme_writes: int
    dropped: int
    content: tuple[int, ...]
    """Blocks with content on each level at its end."""


@dataclass
class ReplayResult:
    """What came of it. Counts are of blocks unless they say tokens.

    Attributes:
        input_tokens: of all prompts.
        hit_tokens, hit_blocks: by the level that they were found on.
        moves: by direction.
        dropped: contents lost; host_dropped: those of them on the secondary level, because there was no copy on NVMe.
        cut: requests cut to the primary level.
        load_seconds: simulated seconds that the requests waited for their blocks, in all.
        moments: the time line.
    """

    num_requests: int
    input_tokens: int
    hit_tokens: list[int]
    hit_blocks: list[int]
    moves: dict[Direction, int]
    dropped: int
    host_dropped: int
    cut: int
    load_seconds: float
    moments: list[Moment]

    @property
    def hit_ratio(self) -> float:
        """Reused tokens / input tokens."""
        return sum(self.hit_tokens) / self.input_tokens

    @property
    def nvme_writes(self) -> int:
        return sum(count for (_, level), count in self.moves.items() if level == NVME)

    @property
    def writes_per_hit(self) -> float | None:
        """NVMe blocks written for each block found there; None without such hits."""
        return self.nvme_writes / self.hit_blocks[NVME] if self.hit_blocks[NVME] else None


def replay(trace: Trace, settings: ReplaySettings, progress: Progress | None = None) -> ReplayResult:
    """Replay a trace. ``progress`` is called now and then with the requests done and all of them.

    Raises:
        ConfigError: no primary level, or NVMe without a secondary level.
    """
    if settings.num_blocks[PRIMARY] < 1:
        raise ConfigError(f"primary={settings.num_blocks[PRIMARY]} blocks: it needs at least 1")
    if settings.num_blocks[NVME] and not settings.num_blocks[SECONDARY]:
        raise ConfigError(f"nvme={settings.num_blocks[NVME]} blocks without a secondary level: give secondary at least 1 block")
    return _Replay(trace, settings).run(progress)


class _Replay:
    """One replay."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self.trace = trace
        self.num_blocks = settings.num_blocks
        settings.rules.history_stride = max(1, TOKENS_PER_KEY // trace.block)
        self.ledger = Ledger([GroupSpec(settings.num_blocks)], 1, settings.rules)
        self.moves = no_moves()  # by the levels that they lead from and to
        self.moments: list[Moment] = []
        self._seconds = settings.seconds
        self._free_at: dict[Direction, float] = {}
        self._under_way: list[tuple[float, int, Move]] = []  # a heap
        self._written_ahead_at = 0
        self._before = (0, [0] * NUM_LEVELS, 0, 0)

    def run(self, progress: Progress | None) -> ReplayResult:
        trace, ledger = self.trace, self.ledger
        primary = self.num_blocks[PRIMARY]
        arrivals = trace.milliseconds.tolist()
        lengths = trace.input_lengths.tolist()
        every = max(1, trace.num_requests // MOMENTS)
        cut = input_tokens = 0
        load_seconds = 0.0
        for number, prompt in enumerate(trace.prompts()):
            now = arrivals[number] / 1000
            if len(prompt) > primary:
                prompt = prompt[:primary]
                cut += 1
            ledger.set_time(now)
            self._finish_until(now)
            sequence = ledger.add_sequences([Request(number, prompt)])[0]
            ready = self._carry_out(now)
            self._finish_until(ready)
            load_seconds += ready - now
            ledger.deliver(sequence)
            ledger.mark_computed(number, len(prompt))
            ledger.remove_sequence(number, True)
            self._write_ahead(now)
            input_tokens += lengths[number]
            if (number + 1) % every == 0 or number + 1 == trace.num_requests:
                self._note_moment(now, input_tokens)
                if progress is not None:
                    progress(number + 1, trace.num_requests)
        counters = ledger.counters
        return ReplayResult(trace.num_requests, input_tokens, [blocks * trace.block for blocks in counters.hit_tokens],
                            list(counters.hit_blocks), self._moves_by_direction(), counters.dropped, counters.host_dropped, cut,
                            load_seconds, self.moments)

    def _carry_out(self, now: float) -> float:
        """Start what the ledger has decided. Returns when the last of it ends."""
        if not self._seconds:
            finish_at_once(self.ledger, self.moves)
            return now
        end = now
        moves = self.moves
        for record in self.ledger.moves.take():
            if not isinstance(record, Move):
                continue
            direction = level_of(record.source), level_of(record.destination)
            moves[direction[0]][direction[1]] += 1
            seconds = self._seconds.get(direction, 0.0)
            if seconds == 0.0:
                self.ledger.finish(record, False)
                continue
            done = max(now, self._free_at.get(direction, 0.0)) + seconds
            self._free_at[direction] = done
            heapq.heappush(self._under_way, (done, record.number, record))
            if direction[1] == PRIMARY:
                end = max(end, done)
        return end

    def _finish_until(self, moment: float) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= moment:
            self.ledger.finish(heapq.heappop(under_way)[2], False)

    def _write_ahead(self, now: float) -> None:
        """What an engine's steps between two requests write to NVMe: all that wants to be written, as far as time allows."""
        if not self.num_blocks[NVME]:
            return
        down = self.moves[PRIMARY][SECONDARY]
        if down - self._written_ahead_at < self.num_blocks[SECONDARY] // _WRITE_AHEAD_EVERY:
            return
        self._written_ahead_at = down
        if not self._seconds:
            write_ahead_at_once(self.ledger, now, self.moves)
            return
        records = -1
        while records != self.ledger.moves.next_number:  # what has ended makes room for more
            records = self.ledger.moves.next_number
            self.ledger.refresh(now)
            self._carry_out(now)

    def _moves_by_direction(self) -> dict[Direction, int]:
        return {(source, target): count for source, counts in enumerate(self.moves) for target, count in enumerate(counts) if count}

    def _note_moment(self, now: float, input_tokens: int) -> None:
        counters = self.ledger.counters
        hits = [blocks * self.trace.block for blocks in counters.hit_tokens]
        writes = sum(counts[NVME] for counts in self.moves)
        before = self._before
        allocator = self.ledger.allocators[0]
        content = tuple(allocator.queues.evictable)
        self.moments.append(Moment(now, input_tokens - before[0], tuple(new - old for new, old in zip(hits, before[1], strict=True)),
                                   writes - before[2], counters.dropped - before[3], content))
        self._before = (input_tokens, hits, writes, counters.dropped)

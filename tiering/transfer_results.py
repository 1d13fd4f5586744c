"""``MoveResult`` and ``CompletionQueue``: what the transfer manager reports (design: I/O threads fill a completion queue)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.pools.group_pools import BlockGroup
from kvtier.pools.pool_index import LEVEL_NAMES, level_of
from kvtier.tiering.ledger.moves import Move


@dataclass(slots=True)
class MoveResult:
    """How a Move ended.

    Attributes:
        move: the Move.
        error: None when the bytes are at the destination; otherwise the destination holds garbage.
        num_bytes: bytes copied; 0 after an error.
        seconds: its share of the time spent in copies and file calls (on CUDA, copies count by their submission).
        ended: when, by ``time.perf_counter``.
    """

    move: Move
    error: Exception | None
    num_bytes: int
    seconds: float
    ended: float = 0.0


@dataclass(slots=True)
class TransferCounters:
    """What has been moved from one level to another so far; ``seconds`` adds up work, not time on the clock."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class CompletionQueue:
    """Results in order of completion, and the sums over them.

    Results are added under the transfer manager's lock and drained without it: both ends of a deque are thread-safe.
    """

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self._groups = groups
        self._block_bytes = [group.block_bytes for group in groups]
        self._results: deque[MoveResult] = deque()
        self._counters: dict[int, TransferCounters] = {}

    def add(self, move: Move, error: Exception | None, seconds: float) -> None:
        """A Move has ended."""
        route = level_of(move.source) << 2 | level_of(move.destination)
        counters = self._counters.get(route)
        if counters is None:
            counters = self._counters[route] = TransferCounters()
        num_bytes = 0
        if error is None:
            num_bytes = self._groups[move.group].copied_bytes(move.num_tokens) if move.num_tokens else self._block_bytes[move.group]
            counters.blocks += 1
            counters.bytes += num_bytes
        else:
            counters.failures += 1
        counters.seconds += seconds
        self._results.append(MoveResult(move, error, num_bytes, seconds, time.perf_counter()))

    def drain(self) -> list[MoveResult]:
        """Everything added since the last call; each result is given out once, also to several callers."""
        drained: list[MoveResult] = []
        while self._results:
            try:
                drained.append(self._results.popleft())
            except IndexError:  # another thread took the last one
                break
        return drained

    def counters(self) -> dict[str, TransferCounters]:
        """By "source->destination" level names; routes never used are absent."""
        return {f"{LEVEL_NAMES[route >> 2]}->{LEVEL_NAMES[route & 3]}": replace(counters)
                for route, counters in self._counters.items()}

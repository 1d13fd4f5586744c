"""What the ledger benchmark is made of: ledgers, prompts, and ``Side``, one contestant's part in one workload.

Every ledger of the benchmark is made by :func:`new_ledger`: three levels, events on. Whatever the benchmark reads out of a
ledger that is not a call of an engine stands here too, so that a change inside the ledger touches this file alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.measure import Alternative
from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.pools.pool_index import PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.events import Event, Stored
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules

TOKENS_PER_BLOCK: Final = 32
MAX_EVENTS: Final = 1024
VOCABULARY: Final = 150_000

Tokens = npt.NDArray[np.int32]


def new_ledger(primary: int, secondary: int, nvme: int, *, offload: bool = True, events: bool = True) -> Ledger:
    """An empty ledger.

    Args:
        primary, secondary, nvme: blocks of each level.
        offload: whether blocks of the default priority may go down; False puts the threshold just above it, and they are
            dropped when their slot is taken, as in a cache of one level.
        events: whether events are collected.
    """
    threshold = DEFAULT_PRIORITY if offload else DEFAULT_PRIORITY + 1
    rules = LedgerRules(secondary_offload_min_priority=threshold, max_events=MAX_EVENTS if events else 0)
    return Ledger([GroupSpec((primary, secondary, nvme))], TOKENS_PER_BLOCK, rules)


def free_primary(ledger: Ledger) -> int:
    """Unreferenced primary blocks, cached content included."""
    return ledger.allocators[0].queues.num_free(PRIMARY)


def num_dropped(ledger: Ledger) -> int:
    """Blocks that have lost their content so far."""
    return ledger.counters.dropped


def num_cached(ledger: Ledger) -> int:
    """Blocks in the reuse tree."""
    return ledger.tree.num_nodes()


def store(ledger: Ledger, request: Request) -> None:
    """Serve a request that generates nothing, and keep what it computed."""
    ledger.add_sequences([request])
    ledger.mark_computed(request.id, request.num_tokens)
    ledger.remove_sequence(request.id, True)


def count_moves(records: Sequence[Move | Discard]) -> dict[tuple[int, int], int]:
    """How many Moves there are by the levels that they lead from and to."""
    found: dict[tuple[int, int], int] = {}
    for record in records:
        if isinstance(record, Move):
            ends = level_of(record.source), level_of(record.destination)
            found[ends] = found.get(ends, 0) + 1
    return found


DOWN: Final = (PRIMARY, SECONDARY)
UP: Final = (SECONDARY, PRIMARY)


def count_stored(events: Sequence[Event]) -> int:
    """Blocks that Stored events tell of."""
    return sum(len(event.data.blocks) for event in events if isinstance(event.data, Stored))


class Prompts:
    """Random prompts; the same seed gives the same prompts to every contestant. No two of them begin with the same token, so that
    none is reused by chance, not even in part."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._next_first = VOCABULARY

    def new(self, num_tokens: int) -> Tokens:
        tokens = self._random.integers(0, VOCABULARY, num_tokens, dtype=np.int32)
        tokens[0] = self._next_first
        self._next_first += 1
        return tokens


class Side:
    """One contestant's part in one workload.

    Attributes:
        operations: what one turn does; its time is divided by this.
        failure: what was found wrong outside the timed part; empty while nothing was.
    """

    def __init__(self, operations: int) -> None:
        self.operations = operations
        self.failure = ""

    def prepare(self) -> None:
        """Before every turn, not timed."""

    def run(self) -> None:
        """One turn."""
        raise NotImplementedError

    def check(self) -> None:
        """After every turn, not timed."""

    def require(self, what: str, found: object, expected: object) -> None:
        """Note the first thing that is not as expected."""
        if found != expected and not self.failure:
            self.failure = f"{what}: {found}, expected {expected}"

    def alternative(self, name: str) -> Alternative:
        """For :func:`kvtier.bench.measure.interleave`; its times are seconds per operation.

        Seconds are CPU time of this thread. Nothing here waits or starts threads, so on a quiet machine that is the time that
        passes. On a busy one, time that passes would favour whoever is done before the scheduler takes the CPU away.
        """
        return Alternative(name, self._timed, self.prepare, self.check)

    def _timed(self) -> float:
        start = time.thread_time()
        self.run()
        return (time.thread_time() - start) / self.operations


@dataclass(frozen=True)
class Workload:
    """Sides that take turns.

    Attributes:
        sides: by row name.
        peers: for a row, the rows to compare with, by the peer's name.
        limits: for a row, the row that is its limit; that one is not reported itself.
    """

    sides: Mapping[str, Side]
    peers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

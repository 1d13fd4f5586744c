"""Moves that end as soon as they are decided: for replays, where bytes are only counted.

Beside the ledger, so that it is compiled where the ledger is: a replay has millions of Moves.
"""

from __future__ import annotations

from kvtier.pools.pool_index import LEVEL_BITS, NUM_LEVELS
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move


def finish_at_once(ledger: Ledger, counts: list[list[int]]) -> None:
    """Take all records; every Move among them has ended well. Counted by the levels that they lead from and to."""
    for record in ledger.moves.take():
        if isinstance(record, Move):
            counts[record.source & LEVEL_BITS][record.destination & LEVEL_BITS] += 1
            ledger.finish(record, False)


def write_ahead_at_once(ledger: Ledger, now: float, counts: list[list[int]]) -> None:
    """Refresh until nothing is written any more: what an engine's steps write when nothing happens between them."""
    records = -1
    while records != ledger.moves.next_number:  # what has ended makes room for more
        records = ledger.moves.next_number
        ledger.refresh(now)
        finish_at_once(ledger, counts)
        for allocator in ledger.allocators:
            while allocator.write_on():
                finish_at_once(ledger, counts)


def no_moves() -> list[list[int]]:
    """Counts to begin with."""
    return [[0] * NUM_LEVELS for _ in range(NUM_LEVELS)]

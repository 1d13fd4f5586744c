"""Ranks whose events are gathered, all in one process, and the ways between them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Final

from kvtier.tiering.connection_transport import ConnectionTransport
from kvtier.tiering.event_gather import EventGather, RankedEvent
from kvtier.tiering.event_queue import EventQueue
from kvtier.tiering.event_transport import GatherTransport, InProcessTransport
from kvtier.tiering.ledger.events import Event, Removed

PATIENCE = 20.0
Transports = Callable[[int], list[GatherTransport]]


def event(event_id: int, rank: int = 0) -> Event:
    return Event(event_id, 0, Removed((bytes([rank]) * 32,)))


def piped(num_ranks: int) -> list[GatherTransport]:
    pipes = {rank: multiprocessing.Pipe() for rank in range(1, num_ranks)}
    return [ConnectionTransport(0, num_ranks, {rank: ends[0] for rank, ends in pipes.items()}),
            *[ConnectionTransport(rank, num_ranks, {0: ends[1]}) for rank, ends in pipes.items()]]


def in_process(num_ranks: int) -> list[GatherTransport]:
    return [*InProcessTransport.group(num_ranks)]


WAYS: Final[dict[str, Transports]] = {"in process": in_process, "connections": piped}


class Ranks:
    """A queue and a gather for each rank, all in this process."""

    def __init__(self, transports: list[GatherTransport], max_size: int = 100, period: float = 0.001, **settings: float) -> None:
        self.queues = [EventQueue(max_size) for _ in transports]
        self.gathers = [EventGather(queue.stream(), transport, period, **settings)
                        for queue, transport in zip(self.queues, transports, strict=True)]
        self.root = self.gathers[0]

    def put(self, rank: int, *ids: int) -> None:
        self.queues[rank].put([event(number, rank) for number in ids])

    def gathered(self, count: int) -> list[RankedEvent]:
        found: list[RankedEvent] = []
        while len(found) < count:
            batch = self.root.poll(PATIENCE)
            assert batch, f"{len(found)} of {count} events came"
            found += batch
        return found

    def close(self, timeout: float = PATIENCE) -> list[bool]:
        """Close all at the same time, as ranks do. What each one says."""
        agreed: dict[int, bool] = {}
        closing = [threading.Thread(target=lambda gather=gather: agreed.update({gather.rank: gather.close(timeout)}))
                   for gather in self.gathers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(PATIENCE)
        return [agreed[gather.rank] for gather in self.gathers]


def of_rank(found: list[RankedEvent], rank: int) -> list[int]:
    for ranked in found:
        assert ranked.event.data == Removed((bytes([ranked.rank]) * 32,)), "an event carries the rank it came from"
    return [ranked.event.event_id for ranked in found if ranked.rank == rank]

"""``GatherTransport``: how ranks hand messages to rank 0, and the way that works inside one process (design: events)."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtier.errors import ConfigError, TransferError


class GatherTransport(Protocol):
    """Messages between rank 0 and each other rank, in order, each arriving whole or not at all.

    One thread sends and one receives. Who sent a message is known from the way it came, never from what it says.
    """

    rank: int
    num_ranks: int

    def send(self, to: int, message: bytes) -> None:
        """Hand a message to rank ``to``. May wait for room; a rank that is gone is a TransferError."""

    def receive(self, timeout: float) -> list[tuple[int, bytes | None]]:
        """What has arrived as (rank, message), in order for each rank; waits up to ``timeout`` seconds for the first.

        (rank, None) comes once, when that rank's way has ended and nothing more can arrive. Whoever waits when this is closed gets
        what had come until then; after that it is a TransferError, so that nobody asks for ever.
        """

    def close(self) -> None:
        """End all ways, and whoever waits in ``send`` or ``receive``."""


def check_rank(rank: int, num_ranks: int) -> None:
    """Raise ConfigError unless there is such a rank."""
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"rank={rank} of num_ranks={num_ranks}: ranks are numbered from 0 to num_ranks - 1")


def closed_transport(rank: int) -> TransferError:
    """The error of ``receive`` after ``close``."""
    return TransferError(f"the transport of rank {rank} is closed, nothing arrives any more; close the EventGather that uses it, which "
                         "closes both")


class InProcessTransport:
    """Ranks that are threads of one process. Make all of them with :meth:`group`."""

    def __init__(self, rank: int, num_ranks: int, boxes: list[SimpleQueue[tuple[int, bytes | None]]], closed: set[int]) -> None:
        check_rank(rank, num_ranks)
        self.rank = rank
        self.num_ranks = num_ranks
        self._boxes = boxes
        self._closed = closed

    @classmethod
    def group(cls, num_ranks: int) -> list[InProcessTransport]:
        """One transport for each rank."""
        boxes: list[SimpleQueue[tuple[int, bytes | None]]] = [SimpleQueue() for _ in range(num_ranks)]
        closed: set[int] = set()
        return [cls(rank, num_ranks, boxes, closed) for rank in range(num_ranks)]

    def send(self, to: int, message: bytes) -> None:
        if to in self._closed or self.rank in self._closed:
            raise TransferError(f"rank {to} is gone; nothing can be sent to it from rank {self.rank}")
        self._boxes[to].put((self.rank, message))

    def receive(self, timeout: float) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        deadline = time.monotonic() + timeout
        box = self._boxes[self.rank]
        if self.rank in self._closed:
            raise closed_transport(self.rank)
        while self.rank not in self._closed:
            try:
                found.append(box.get(not found, max(deadline - time.monotonic(), 0.0)))
            except Empty:
                break
        return [(sender, message) for sender, message in found if sender != self.rank]

    def close(self) -> None:
        if self.rank not in self._closed:
            self._closed.add(self.rank)
            self._boxes[self.rank].put((self.rank, None))  # wakes our own receive
            for other in range(1, self.num_ranks) if self.rank == 0 else (0,):
                self._boxes[other].put((self.rank, None))

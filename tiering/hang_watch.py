"""``HangWatch``: which file operations do not come back (design: every wait has a deadline).

A call that hangs in the kernel cannot be ended from outside. What can be ended is waiting for it: whoever looks after the threads asks for
what is overdue, reports it as failed, and when no thread is left does the same with all that is queued. The call itself keeps its thread
and its memory until it returns, and nobody listens to it then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvtier.tiering.transfer_graph import TransferNode

HANG_SECONDS: Final = 30.0
"""A file operation of one block that takes longer hangs. Drives and their drivers have given up, or reset themselves, by then."""

_FURTHER_BLOCK: Final = 1 / 6  # of it for each further block of a batch: also on a slow drive, or one that is given little bandwidth


class HangWatch:
    """The threads that take their work from one queue. No lock: entries are made and taken out by single dictionary operations.

    Args:
        num_threads: how many threads there are.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._running: dict[TransferNode, tuple[float, Sequence[TransferNode]]] = {}  # until when, and who waits behind it
        self._overdue: dict[TransferNode, None] = {}  # one for each thread that hangs

    def begin(self, node: TransferNode, num_blocks: int = 1, behind: Sequence[TransferNode] = (),
              on_purpose: float = 0.0) -> None:
        """A thread is about to begin this node's file operation, which is that of so many blocks.

        ``behind``: nodes that the thread has taken too. They are in no queue, and nobody else would ever hear of them.
        ``on_purpose``: seconds of it that are no drive's fault, because writes are spread out to a rate.
        """
        self._running[node] = (time.monotonic() + HANG_SECONDS * (1.0 + (num_blocks - 1) * _FURTHER_BLOCK) + on_purpose, behind)

    def end(self, node: TransferNode) -> bool:
        """It is over. False when it had been overdue: it and those behind it have been reported, and nobody listens any more."""
        is_awaited = self._running.pop(node, None) is not None
        self._overdue.pop(node, None)
        return is_awaited

    def is_awaited(self, node: TransferNode) -> bool:
        """Whether it is running and not overdue."""
        return node in self._running

    def overdue(self) -> list[TransferNode]:
        """Operations that have become overdue since the last call, each with those behind it. One thread asks."""
        now = time.monotonic()
        found: list[TransferNode] = []
        for node, (end, _) in list(self._running.items()):
            if end < now:
                self._overdue[node] = None  # first: its thread takes it out of here when it returns
                taken = self._running.pop(node, None)
                if taken is None:
                    self._overdue.pop(node, None)
                else:
                    found += [node, *taken[1]]
        return found

    @property
    def is_stuck(self) -> bool:
        """Whether every thread is inside an overdue operation: what is queued would wait for ever."""
        return len(self._overdue) >= self._num_threads

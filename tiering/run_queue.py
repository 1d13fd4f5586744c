"""``RunQueue``: file reads waiting for a thread, of which one takes neighbours together (design: neighbouring slots are coalesced)."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty

from kvtier.pools.pool_index import SLOT_STEP
from kvtier.tiering.transfer_graph import TransferNode


class RunQueue:
    """First in, first out; ``None`` marks the end for one thread. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[TransferNode | None] = deque()
        self._filled = threading.Condition()

    def put(self, node: TransferNode | None) -> None:
        """Queue a node, or an end mark. Never blocks for long."""
        with self._filled:
            self._waiting.append(node)
            self._filled.notify()

    def put_back(self, nodes: list[TransferNode]) -> None:
        """These come first again, in this order."""
        with self._filled:
            self._waiting.extendleft(reversed(nodes))
            self._filled.notify(len(nodes))

    def get_nowait(self) -> TransferNode | None:
        """The first node or mark; ``queue.Empty`` when nothing waits."""
        with self._filled:
            if not self._waiting:
                raise Empty
            return self._waiting.popleft()

    def get_run(self, most: list[int]) -> list[TransferNode]:
        """Wait for a node, and take those right behind it whose source slots continue upwards, or downwards.

        Args:
            most: by group, how many together.

        Returns:
            nodes by ascending source slot; none after an end mark.
        """
        with self._filled:
            while not self._waiting:
                self._filled.wait()
            first = self._waiting.popleft()
            if first is None:
                return []
            run = [first]
            step = 0
            while self._waiting and len(run) < most[first.group]:
                node = self._waiting[0]
                if node is None or node.group != first.group:
                    break
                distance = node.source - run[-1].source
                if distance not in ((SLOT_STEP, -SLOT_STEP) if step == 0 else (step,)):
                    break
                step = distance
                run.append(node)
                self._waiting.popleft()
        return run if step >= 0 else run[::-1]

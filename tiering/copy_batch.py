"""``CopyBatch``: Moves that one copier carries out in one piece of work on a stream, with one event."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol

from kvtier.errors import TransferError
from kvtier.io.copiers import Copier, HostCopier
from kvtier.io.faults import FaultOperation
from kvtier.io.row_copier import Call
from kvtier.io.streams import Event, Stream
from kvtier.pools.pool_index import PoolIndex, level_of, slot_of
from kvtier.tiering.transfer_graph import NodeState, TransferNode
from kvtier.types import Level


class FaultPoint(Protocol):
    """What is used of ``kvtier.io.faults.Faults`` here."""

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        """Sleep or raise ``OSError``, as the rules say."""


class CopyBatch:
    """Copies of one group between one pair of memories.

    Attributes:
        nodes: in number order; none depends on another.
        after: events of the other stream that have to be over first, without repetition.
        staging_slot: the source of the single node when its bytes were read from a file; -1 otherwise.
        seconds: how long the copy (on CUDA: its submission) took.
        failure: why copying itself failed, and not something before it.
    """

    __slots__ = ("_calls", "_copier", "_faults", "_is_plain", "_num_tokens", "_pairs", "after", "failure", "nodes", "route", "seconds",
                 "staging_slot", "stream")

    def __init__(self, route: int, stream: Stream, copier: Copier, faults: FaultPoint | None, num_tokens: int = 0,
                 staging_slot: int = -1) -> None:
        self.route = route
        self.stream = stream
        self.nodes: list[TransferNode] = []
        self.after: dict[Event, None] = {}
        self.staging_slot = staging_slot
        self.seconds = 0.0
        self.failure: Exception | None = None
        self._copier = copier
        self._faults = faults
        self._num_tokens = num_tokens
        self._pairs: list[tuple[int, int]] = []
        self._is_plain = faults is None
        self._calls: list[Call] | None = None

    def add(self, node: TransferNode) -> None:
        """Take a node in, and the events of what it depends on."""
        node.batch = self
        node.state = NodeState.OPEN
        self.nodes.append(node)
        move = node.move
        assert move is not None
        # Done here, and not in the stream's thread: there it would stand between one copy and the next.
        source = self.staging_slot if self.staging_slot >= 0 else slot_of(move.source)
        self._pairs.append((source, slot_of(move.destination)))
        if node.writer is not None or node.error is not None:
            self._is_plain = False
        for earlier in node.depends:
            # What stands on the same stream comes first anyway.
            if earlier.event is not None and earlier.stream is not self.stream and not earlier.event.is_done():
                self.after[earlier.event] = None

    def plan(self) -> None:
        """Nothing is added any more: settle now which calls the copy takes, where the copier can say so.

        After each copy the stream's thread finds its caches full of blocks; what it then has to work out is several times as slow as
        here, and the next copy waits for it.
        """
        if self._is_plain and self._num_tokens == 0 and isinstance(self._copier, HostCopier):
            with suppress(Exception):  # whatever is wrong (a slot outside its pool), the copy itself says so
                self._calls = self._copier.plan(self._pairs)

    def run(self) -> None:
        """Copy what can be copied; what cannot gets its error. The stream calls it when everything before is over."""
        start = time.perf_counter()
        pairs, copied = (self._pairs, self.nodes) if self._is_plain else self._without_failures()
        if pairs:
            try:
                if self._calls is not None:
                    for call in self._calls:
                        call()
                else:
                    self._copier.copy(pairs, self._num_tokens)
            except Exception as error:
                self.failure = error
                for node in copied:
                    node.error = error
        self.seconds = time.perf_counter() - start

    def _without_failures(self) -> tuple[list[tuple[int, int]], list[TransferNode]]:
        """What can be copied: slots, and their nodes. The others get their errors."""
        pairs: list[tuple[int, int]] = []
        copied: list[TransferNode] = []
        for node, pair in zip(self.nodes, self._pairs, strict=True):
            node.error = node.error or node.source_failure() or self._fault(node)
            if node.error is None:
                pairs.append(pair)
                copied.append(node)
        return pairs, copied

    def _fault(self, node: TransferNode) -> TransferError | None:
        if self._faults is None:
            return None
        try:
            self._faults.before(FaultOperation.COPY, Level(level_of(PoolIndex(node.destination))))
        except OSError as error:
            failure = TransferError(f"{node.move}: the copy failed: {error}")
            failure.__cause__ = error
            self.failure = failure
            return failure
        return None

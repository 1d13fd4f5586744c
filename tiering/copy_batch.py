"""``CopyBatch``: Moves that one copier carries out together on a stream: whole, or in pieces by layers with an event for each.

Pieces let an engine begin with the first layers while the others are still arriving (design: layer-by-layer readiness). They follow
one another on one stream, so the last event stands for all of them, and to everybody else a batch is over with its last piece.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from kvtier.errors import TransferError
from kvtier.io.copiers import Copier, HostCopier
from kvtier.io.faults import FaultOperation
from kvtier.io.layer_pieces import Layers
from kvtier.io.row_copier import Call
from kvtier.io.streams import Event, Stream
from kvtier.pools.pool_index import PoolIndex, level_of, slot_of
from kvtier.tiering.transfer_graph import NodeState, TransferNode
from kvtier.types import Level

WHOLE: Final = 1 << 30
"""More layers than any block has: all of them."""


class FaultPoint(Protocol):
    """What is used of ``kvtier.io.faults.Faults`` here."""

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        """Sleep or raise ``OSError``, as the rules say."""


class Piece(NamedTuple):
    """A submitted piece: the layers it copies, its number among everything submitted, and its event."""

    layers: Layers
    sequence: int
    event: Event


class CopyBatch:
    """Copies of one group between one pair of memories.

    Attributes:
        nodes: in number order; none depends on another.
        after: events of the other stream that have to be over first, without repetition.
        copier: what copies them.
        staging_slots: for each node whose bytes were read from a file the buffer with them, -1 for none; empty otherwise.
        layer_ends: behind which layers it is cut; one end when it is copied whole.
        pieces: what was submitted of it, in order.
        arrived: leading layers that have been copied. What concerns a node only while it has no error.
        seconds: how long the copy (on CUDA: its submission) took.
        failure: why copying itself failed, and not something before it.
    """

    __slots__ = ("_calls", "_copied", "_faults", "_is_plain", "_num_tokens", "_pairs", "after", "arrived", "copier", "failure",
                 "layer_ends", "nodes", "pieces", "route", "seconds", "staging_slots", "stream")

    def __init__(self, route: int, stream: Stream, copier: Copier, faults: FaultPoint | None, num_tokens: int = 0) -> None:
        self.route = route
        self.stream = stream
        self.nodes: list[TransferNode] = []
        self.after: dict[Event, None] = {}
        self.staging_slots: list[int] = []
        self.layer_ends: tuple[int, ...] = (WHOLE,)
        self.pieces: list[Piece] = []
        self.arrived = 0
        self.seconds = 0.0
        self.failure: Exception | None = None
        self.copier = copier
        self._faults = faults
        self._num_tokens = num_tokens
        self._pairs: list[tuple[int, int]] = []
        self._copied = self.nodes
        self._is_plain = faults is None
        self._calls: list[list[Call]] | None = None

    def joins(self, route: int, copier: Copier, num_tokens: int) -> bool:
        """Whether a copy out of a staging buffer may be one of these: whole blocks that go the same way."""
        return self.route == route and self.copier is copier and not num_tokens and not self._num_tokens

    def add(self, node: TransferNode, staging_slot: int | None = None) -> None:
        """Take a node in, and the events of what it depends on. ``staging_slot``: where its bytes are, when a file was read; -1 nowhere."""
        node.batch = self
        node.state = NodeState.OPEN
        self.nodes.append(node)
        move = node.move
        assert move is not None
        # Done here, and not in the stream's thread: there it would stand between one copy and the next.
        if staging_slot is not None:
            self.staging_slots.append(staging_slot)
        self._pairs.append((slot_of(move.source) if staging_slot is None else staging_slot, slot_of(move.destination)))
        if node.writer is not None or node.error is not None:
            self._is_plain = False
        for earlier in node.depends:
            # What stands on the same stream comes first anyway.
            if earlier.event is not None and earlier.stream is not self.stream and not earlier.event.is_done():
                self.after[earlier.event] = None

    def plan(self, most_pieces: int) -> None:
        """Nothing is added any more: settle now into which pieces it is cut, and which calls these take, where the copier can say so.

        After each copy the stream's thread finds its caches full of blocks; what it then has to work out is several times as slow as
        here, and the next copy waits for it.
        """
        if self._num_tokens or self.staging_slots:
            most_pieces = 1
        with suppress(Exception):  # whatever is wrong (a slot outside its pool), the copy itself says so
            ends = self.copier.layer_ends(self._pairs, most_pieces) if most_pieces > 1 else ()
            if len(ends) > 1:
                self.layer_ends = ends
            if self._is_plain and isinstance(self.copier, HostCopier):
                self._calls = [self.copier.plan(self._pairs, self._num_tokens, self._layers_of(number))
                               for number in range(len(self.layer_ends))]

    def submitted(self, sequence: int, event: Event) -> None:
        """The next piece is on the stream."""
        self.pieces.append(Piece(self._span(len(self.pieces)), sequence, event))

    def piece_with(self, num_layers: int) -> Piece | None:
        """The piece that brings the last of the first ``num_layers`` layers; None for no layer."""
        if num_layers == 0:
            return None
        return next((piece for piece in self.pieces if piece.layers[1] >= num_layers), self.pieces[-1])

    def over(self, number: int) -> None:
        """A piece has ended. Called in order, under the lock under which ``arrived`` is read."""
        event = self.pieces[number].event
        if event.error is None:
            self.arrived = self.layer_ends[number]
            return
        for node in self.nodes:
            if node.error is None:
                node.error = _as_exception(event.error)

    def run(self, number: int) -> None:
        """Copy of one piece what can be copied; what cannot gets its error. The stream calls it when everything before is over.

        What failed in one piece is left out of the next ones: of a Move that fails nothing counts as there.
        """
        start = time.perf_counter()
        if number == 0 and not self._is_plain:
            self._pairs, self._copied = self._without_failures()
        if self._pairs:
            try:
                if self._calls is not None:
                    for call in self._calls[number]:
                        call()
                elif len(self.layer_ends) > 1:
                    self.copier.copy(self._pairs, layers=self._span(number))
                else:
                    self.copier.copy(self._pairs, self._num_tokens)
            except Exception as error:
                self.failure = error
                self._pairs = []
                for node in self._copied:
                    node.error = error
        self.seconds += time.perf_counter() - start

    def _span(self, number: int) -> Layers:
        """The layers of one piece."""
        return (self.layer_ends[number - 1] if number else 0, self.layer_ends[number])

    def _layers_of(self, number: int) -> Layers | None:
        """The same for a copier: None for whole blocks."""
        return None if len(self.layer_ends) == 1 else self._span(number)

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


def _as_exception(error: BaseException) -> Exception:
    """What ended a copy, as an error that a Move can have."""
    if isinstance(error, Exception):
        return error
    failure = TransferError(f"the copy was broken off: {error!r}")
    failure.__cause__ = error
    return failure

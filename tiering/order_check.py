"""``OrderCheck``: a second opinion on the order of copies, file operations and engine steps (design: transfer rules). A debug switch.

The transfer graph says what has to wait for what. This looks only at what really was submitted, and behind which events: two
accesses to a slot of which one is a write must be ordered by the streams' own order, by events waited for, directly or through
others, or because the earlier one is over. Vector clocks, as race detectors keep them (Mattern, "Virtual Time and Global States
of Distributed Systems", 1989). Bookkeeping only, used under the transfer manager's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvtier.errors import LedgerError
from kvtier.io.layer_pieces import Layers
from kvtier.io.streams import Event
from kvtier.pools.pool_index import LEVEL_NAMES, PoolIndex, level_of, slot_of
from kvtier.tiering.copy_batch import WHOLE, CopyBatch
from kvtier.tiering.transfer_graph import NodeState, TransferNode, Work

_log = logging.getLogger(__name__)

ENGINE: Final = "engine"
WRITER: Final = "NVMe writer"  # one thread, so its operations are in order like those of a stream
READER: Final = "NVMe readers"  # several, in no order
Clock: TypeAlias = dict[str, int]
"""By stream: the newest of its works that is known to be over first."""


_NEVER_WAITED_FOR: Final = 1 << 62


class Access(NamedTuple):
    """One use of a slot: the ``number``-th work of a stream, the ``order``-th of all, what it is, whether it is over, and which layers of
    the block it concerns."""

    stream: str
    number: int
    order: int
    what: str
    is_over: Callable[[], bool]
    layers: Layers = (0, WHOLE)

    def meets(self, other: Access) -> bool:
        """Whether both concern the same bytes."""
        return self.layers[0] < other.layers[1] and other.layers[0] < self.layers[1]

    def covers(self, other: Access) -> bool:
        """Whether everything that the other one concerns is concerned."""
        return self.layers[0] <= other.layers[0] and other.layers[1] <= self.layers[1]


class OrderCheck:
    """Remembers who used each slot last, and compares each new use with that."""

    def __init__(self) -> None:
        self._writes: dict[tuple[int, int], list[Access]] = {}  # the last one of each layer
        self._reads: dict[tuple[int, int], list[Access]] = {}
        self._clocks: dict[str, Clock] = {}
        self._events: dict[Event, Clock] = {}  # those that are not over
        self._engine_over = 0
        self.num_uses = 0
        self._violations: list[str] = []

    def copies(self, batch: CopyBatch) -> None:
        """The newest piece of a batch was given to its stream."""
        piece = batch.pieces[-1]
        reads = [(node.group, node.source) for node in batch.nodes if node.work is Work.COPY]
        self.submitted(batch.stream.name, batch.after if len(batch.pieces) == 1 else (), piece.event,
                       ", ".join([str(node.move) for node in batch.nodes]), reads, [(node.group, node.destination) for node in batch.nodes],
                       piece.layers)

    def file(self, node: TransferNode) -> None:
        """A file operation was queued. Its thread waits on the host for the copies that it stands behind."""
        after = [earlier.event for earlier in node.depends if earlier.event is not None]
        source, destination = (node.group, node.source), (node.group, node.destination)
        if node.work is Work.READ:  # the slot that it is for is written by the copy behind it
            self.began(READER, after, str(node.move), lambda: node.state in (NodeState.SUBMITTED, NodeState.DONE), [source], [])
        else:
            what = str(node.move or f"discard of NVMe slot {slot_of(PoolIndex(node.destination))}")
            self.began(WRITER, after, what, lambda: node.state is NodeState.DONE, [source] if node.source >= 0 else [], [destination])

    def submitted(self, stream: str, after: Iterable[Event], event: Event, what: str, reads: Iterable[tuple[int, int]],
                  writes: Iterable[tuple[int, int]], layers: Layers = (0, WHOLE)) -> None:
        """A piece of work was given to a stream behind these events; ``event`` is its own.

        Args:
            reads, writes: (group, pool index) of the slots that it uses.
            layers: of which layers.
        """
        clock = self._clocks.setdefault(stream, {})
        self._wait(clock, after)
        self._use(self._next(stream, what, event.is_done, layers), clock, reads, writes)
        self._events = {known: found for known, found in self._events.items() if not known.is_done()}
        self._events[event] = dict(clock)

    def began(self, stream: str, after: Iterable[Event], what: str, is_over: Callable[[], bool], reads: Iterable[tuple[int, int]],
              writes: Iterable[tuple[int, int]]) -> None:
        """A file operation may run as soon as these events are over: what it stands behind must be among them, or over."""
        clock = {} if stream == READER else self._clocks.setdefault(stream, {})
        self._wait(clock, after)
        if stream == READER:
            self._use(Access(READER, _NEVER_WAITED_FOR, self.num_uses, what, is_over), clock, reads, writes)
            return
        self._use(self._next(stream, what, is_over), clock, reads, writes)

    def engine_begins(self, events: Iterable[Event], slots: Iterable[tuple[int, int]], since: int, layers: Layers = (0, WHOLE)) -> None:
        """The engine reads and writes these layers of these slots from now on, behind these events.

        ``since``: ``num_uses`` when the events were looked up. Whoever reads one of the slots later reads what the engine does not write.
        """
        clock = self._clocks.setdefault(ENGINE, {})
        self._wait(clock, events)
        number = clock.get(ENGINE, 0) + 1
        access = self._next(ENGINE, "a step of the engine", lambda: number <= self._engine_over, layers)
        self._use(access, clock, (), slots, since)

    def engine_ends(self, streams: Sequence[str], is_over: bool) -> None:
        """What the engine has begun so far comes before all that these streams get from now on."""
        clock = self._clocks.setdefault(ENGINE, {})
        if is_over:
            self._engine_over = clock.get(ENGINE, 0)
        for stream in streams:
            _merge(self._clocks.setdefault(stream, {}), clock)

    def raise_if_violated(self) -> None:
        """Raise LedgerError naming the accesses that nothing orders, if there were any."""
        if self._violations:
            raise LedgerError(f"unordered access to a slot: {'; '.join(self._violations)}. This is a bug of kvtier, please report it")

    def _next(self, stream: str, what: str, is_over: Callable[[], bool], layers: Layers = (0, WHOLE)) -> Access:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return Access(stream, clock[stream], self.num_uses, what, is_over, layers)

    def _wait(self, clock: Clock, events: Iterable[Event]) -> None:
        for event in events:
            if event in self._events:
                _merge(clock, self._events[event])

    def _use(self, access: Access, clock: Clock, reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]],
             since: int | None = None) -> None:
        self.num_uses += 1
        for slot in reads:
            for writer in self._writes.get(slot, ()):
                # The engine writes only into what nobody else may read: behind the computed tokens of a block that is its own.
                if writer.stream != ENGINE and access.meets(writer):
                    self._require(access, clock, slot, writer)
            readers = [reader for reader in self._reads.get(slot, ()) if not reader.is_over()]
            self._reads[slot] = [*readers, access]
        for slot in writes:
            readers, writers = self._reads.pop(slot, []), self._writes.get(slot, [])
            for earlier in (*readers, *writers):
                if earlier is not access and access.meets(earlier) and (since is None or earlier.order < since):
                    self._require(access, clock, slot, earlier)
            left = [reader for reader in readers if not access.covers(reader)]
            if left:
                self._reads[slot] = left
            self._writes[slot] = [*[writer for writer in writers if not access.covers(writer)], access]

    def _require(self, access: Access, clock: Clock, slot: tuple[int, int], earlier: Access) -> None:
        if clock.get(earlier.stream, 0) >= earlier.number or earlier.is_over():
            return
        group, index = slot
        level = LEVEL_NAMES[level_of(PoolIndex(index))]
        violation = (f"group {group}, {level} slot {slot_of(PoolIndex(index))}: {access.what} ({access.stream}) does not wait for "
                     f"{earlier.what} ({earlier.stream})")
        self._violations.append(violation)
        _log.error("unordered access: %s", violation)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number

"""``TransferGraph``: which Move has to wait for which (design: transfer rules). Pure bookkeeping, used under one lock.

Every record becomes a node. Reads and writes that are not over are kept per (group, level, slot): a read waits for the
slot's last write, a write for its last write and its reads. What waits only for copies is submitted to a stream at
once, behind their events. What waits for a file is held back: no stream waits for a file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.errors import TransferError
from kvtier.io.streams import Event, Stream
from kvtier.pools.pool_index import NVME
from kvtier.tiering.ledger.moves import Move

if TYPE_CHECKING:
    from kvtier.tiering.copy_batch import CopyBatch


class Work(enum.Enum):
    """What carries a node out."""

    COPY = "copy"        #: a stream: both ends are memory
    READ = "read"        #: a reader thread, then a stream
    WRITE = "write"      #: the writer thread
    DISCARD = "discard"  #: the writer thread


class NodeState(enum.Enum):
    """How far a node has got."""

    HELD = "held"            #: something it waits for has neither ended nor an event yet
    OPEN = "open"            #: in a batch that is being put together; only while the lock is held
    QUEUED = "queued"        #: with the file threads, waiting or running
    SUBMITTED = "submitted"  #: on a stream, behind all it waits for; it has an event
    DONE = "done"            #: over and reported


class TransferNode:
    """A Move (or the discarding of an NVMe slot) on its way.

    Attributes:
        move: None for a discard.
        source, destination: pool indices; the source of a discard is -1.
        writer: what last wrote the source, for as long as this node may have to look at its error.
        depends: what has to be over before this node's bytes may move.
        dependents: nodes held back by this one.
        event, stream, sequence: from SUBMITTED on; sequence counts the batches of a stream.
        via: of a Move with an NVMe end, which staging memory it passes: NVME, the host's, or DIRECT, the device's.
        is_debugged: goes through a file of its request's own, and from there into its destination like a block from NVMe.
    """

    __slots__ = ("batch", "blockers", "dependents", "depends", "destination", "error", "event", "group", "is_debugged", "move",
                 "number", "seconds", "sequence", "source", "state", "stream", "via", "work", "writer")

    def __init__(self, work: Work, number: int, group: int, source: int, destination: int, move: Move | None) -> None:
        self.work = work
        self.number = number
        self.group = group
        self.source = source
        self.destination = destination
        self.move = move
        self.state = NodeState.HELD
        self.error: Exception | None = None
        self.seconds = 0.0
        self.writer: TransferNode | None = None
        self.depends: list[TransferNode] = []
        self.dependents: list[TransferNode] | None = None  # most nodes hold nothing back
        self.blockers = 0
        self.batch: CopyBatch | None = None
        self.event: Event | None = None
        self.stream: Stream | None = None
        self.sequence = 0
        self.via = NVME
        self.is_debugged = False

    def __lt__(self, other: TransferNode) -> bool:
        return self.number < other.number

    def source_failure(self) -> TransferError | None:
        """Why the source holds no content to copy: what wrote it failed. Asked once everything before it is over.

        A failure concerns the generation that the failed Move would have written. When the slot was given to another
        writer since (whose bytes came from the engine, not from a Move), the old failure says nothing about them.
        """
        writer = self.writer
        if writer is None or writer.error is None or writer.move is None or self.move is None \
                or writer.move.destination_generation != self.move.source_generation:
            return None
        failure = TransferError(f"{self.move}: not carried out, because {writer.move}, which was to write its source, "
                                f"failed: {writer.error}")
        failure.__cause__ = writer.error
        return failure


class TransferGraph:
    """The nodes that are not over, by the slots they read and write."""

    def __init__(self, num_groups: int) -> None:
        # The last write of each slot stays after it failed, until the next one: who reads the slot has to know.
        self._writes: list[dict[int, TransferNode]] = [{} for _ in range(num_groups)]
        self._reads: list[dict[int, list[TransferNode]]] = [{} for _ in range(num_groups)]

    def add(self, node: TransferNode) -> None:
        """Enter a node, in number order, and find what it waits for. It may start when ``blockers`` is 0."""
        writes = self._writes[node.group]
        reads = self._reads[node.group]
        depends = node.depends
        previous = writes.get(node.destination)
        if previous is not None and previous.state is not NodeState.DONE:
            depends.append(previous)
        # Whoever writes this slot next waits for this node, and so for these readers as well: they can be forgotten.
        readers = reads.pop(node.destination, None)
        if readers is not None:
            depends.extend(readers)
        source = node.source
        if source >= 0:
            writer = writes.get(source)
            if writer is not None:
                node.writer = writer
                if writer.state is not NodeState.DONE:
                    depends.append(writer)
            readers = reads.get(source)
            if readers is None:
                reads[source] = [node]
            else:
                readers.append(node)
        writes[node.destination] = node
        for earlier in depends:
            if _blocks(earlier, node):
                node.blockers += 1
                if earlier.dependents is None:
                    earlier.dependents = [node]
                else:
                    earlier.dependents.append(node)

    def release(self, node: TransferNode) -> list[TransferNode]:
        """The node has an event now, or is over: what it held back and nothing else holds back."""
        dependents, node.dependents = node.dependents, None
        free = []
        for dependent in dependents or ():
            dependent.blockers -= 1
            if dependent.blockers == 0:
                free.append(dependent)
        return free

    def finish(self, node: TransferNode) -> None:
        """The node is over: nothing waits for it any more, and it keeps nothing alive."""
        node.state = NodeState.DONE
        if node.source >= 0:
            reads = self._reads[node.group]
            readers = reads.get(node.source)
            if readers is not None and node in readers:
                if len(readers) == 1:
                    del reads[node.source]
                else:
                    readers.remove(node)
        writes = self._writes[node.group]
        if (node.error is None or node.move is None) and writes.get(node.destination) is node:
            del writes[node.destination]
        node.depends = []
        node.writer = None  # otherwise each node would keep the whole history of its bytes
        node.event = None
        node.batch = None

    def pending_writes(self, group: int, indices: Iterable[int]) -> list[TransferNode]:
        """Writes of these slots that are not over."""
        writes = self._writes[group]
        found = [writes[index] for index in indices if index in writes]
        return [node for node in found if node.state is not NodeState.DONE]

    def pending(self, group: int, indices: Iterable[int]) -> list[TransferNode]:
        """Writes and reads of these slots that are not over."""
        writes, reads = self._writes[group], self._reads[group]
        found: list[TransferNode] = []
        for index in indices:
            writer = writes.get(index)
            if writer is not None and writer.state is not NodeState.DONE:
                found.append(writer)
            readers = reads.get(index)
            if readers is not None:
                found += readers
        return found

    def size(self) -> int:
        """Entries kept, for the check that they do not grow without bound."""
        return (sum(len(writes) for writes in self._writes)
                + sum(len(readers) for reads in self._reads for readers in reads.values()))


def _blocks(earlier: TransferNode, node: TransferNode) -> bool:
    """Whether ``node`` is held back. Otherwise it goes behind the event of ``earlier``, or behind it in the writer's queue."""
    if earlier.state is NodeState.HELD:
        return True
    if earlier.state is not NodeState.QUEUED:
        return False
    # The writer thread takes its work in order, so what waits for it there only needs to stand behind.
    return not (earlier.work in _WRITER_WORK and node.work in _WRITER_WORK)


_WRITER_WORK = frozenset((Work.WRITE, Work.DISCARD))

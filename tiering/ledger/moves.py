"""``Move``: what the ledger decided, as a message to the transfer manager (design: the ledger decides, transfers execute).

Moves are numbered and carried out as if in that order. Each end is a pool index with the write generation that its slot had
when the Move was planned, so that a failure that comes late never touches a slot's next owner.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.pools.pool_index import NVME, PoolIndex, level_of


class Move:
    """Copy one block of one group from one slot to another. Nothing changes it; two with the same number are the same.

    Attributes:
        number: position in the order of all Moves, ascending from 0.
        group: group number.
        block_id: the handle whose content travels.
        source, source_generation: where from.
        destination, destination_generation: where to.
        num_tokens: 0 copies the whole block; n > 0 only the first n tokens of each head, layer and field.
        key: SHA-256 chain key of the content; empty unless one end is NVMe.
        priority, expiry: of the block when planned; expiry in wall-clock seconds, 0.0 for none.
        mode, directory: the request's transfer mode (a ``TransferMode`` value) and directory.
    """

    __slots__ = ("block_id", "destination", "destination_generation", "directory", "expiry", "group", "key", "mode",
                 "num_tokens", "number", "priority", "source", "source_generation")

    def __init__(self, number: int, group: int, block_id: int, source: PoolIndex, source_generation: int,
                 destination: PoolIndex, destination_generation: int, num_tokens: int = 0, key: bytes = b"",
                 priority: int = 35, expiry: float = 0.0, mode: str = "dram", directory: str = "") -> None:
        self.number: Final = number
        self.group: Final = group
        self.block_id: Final = block_id
        self.source: Final = source
        self.source_generation: Final = source_generation
        self.destination: Final = destination
        self.destination_generation: Final = destination_generation
        self.num_tokens: Final = num_tokens
        self.key: Final = key
        self.priority: Final = priority
        self.expiry: Final = expiry
        self.mode: Final = mode
        self.directory: Final = directory

    @property
    def is_host_ordered(self) -> bool:
        """True when one end is NVMe: its slots stay busy until the call has returned."""
        return level_of(self.source) == NVME or level_of(self.destination) == NVME

    def __repr__(self) -> str:
        return (f"Move({self.number}, group={self.group}, block={self.block_id}, {self.source & 3}:{self.source >> 2}"
                f" -> {self.destination & 3}:{self.destination >> 2}, tokens={self.num_tokens or 'all'})")


class Discard:
    """The content of an NVMe slot is no longer wanted: its manifest row is to be deleted. Numbered like a Move."""

    __slots__ = ("group", "number", "slot")

    def __init__(self, number: int, group: int, slot: int) -> None:
        self.number = number
        self.group = group
        self.slot = slot


class WarmRow(NamedTuple):
    """A block that a store directory already holds when the manager starts. ``expiry``: wall-clock seconds, 0.0 for none.

    A tuple, because a start makes one for every block: other tuples of the same columns will do.
    """

    group: int
    slot: int
    key: bytes
    priority: int = 35
    expiry: float = 0.0
    hits: int = 0


class MoveLog:
    """The numbered records that the ledger has decided on and nobody has fetched yet.

    ``mode`` and ``directory``: what every Move carries that is decided now. The ledger sets them for a call on behalf of a request that
    has chosen its own path, and back afterwards.
    """

    def __init__(self) -> None:
        self.next_number = 0
        self.mode = "dram"
        self.directory = ""
        self._records: list[Move | Discard] = []

    def use_path(self, mode: str, directory: str) -> None:
        """What is decided from now on travels like this."""
        self.mode = mode
        self.directory = directory

    def use_default_path(self) -> None:
        self.mode = "dram"
        self.directory = ""

    def move(self, group: int, block_id: int, source: PoolIndex, source_generation: int, destination: PoolIndex,
             destination_generation: int, num_tokens: int, key: bytes, priority: int, expiry: float) -> Move:
        move = Move(self.next_number, group, block_id, source, source_generation, destination, destination_generation, num_tokens, key,
                    priority, expiry, self.mode, self.directory)
        self._records.append(move)
        self.next_number += 1
        return move

    def discard(self, group: int, slot: int) -> None:
        self._records.append(Discard(self.next_number, group, slot))
        self.next_number += 1

    def take(self) -> list[Move | Discard]:
        """All records since the last call, in order."""
        records = self._records
        if records:
            self._records = []
        return records

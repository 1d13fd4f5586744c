"""``CheckedTransfers``: transfers that watch themselves, for debugging (design: transfer rules; ``check_transfers`` in the configuration).

Every Move is a read of one slot and a write of another. Here each of the two is noted when it really begins and ends, and it may
only begin when all accesses of its slot with lower numbers have ended, unless both are reads. What does not keep to that is an
unordered access: its Move fails, and ``TierCore.verify`` raises. On the CPU, where a copy is what its call does; a GPU copies after
the call, so there only the poison helps.

Primary slots that were handed out are filled with 0xFF, which is NaN in every float format: who attends to bytes that nobody
wrote for him sees it at once. The poison is a Move of a slot to itself, ordered like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvtier.errors import TransferError
from kvtier.io.copiers import DIRECT, Copier
from kvtier.io.cuda_stream import current_handle
from kvtier.io.device import Device, EngineStream
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.pool_index import LEVEL_NAMES, NVME, PRIMARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.file_workers import BlockStore
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.transfer import MoveResult, TransferManager
from kvtier.tiering.transfer_graph import TransferNode

POISON: Final = 0xFF
_Begun = tuple[int, int, "Access | None"]  # group, pool index, access


@dataclass(eq=False, slots=True)
class Access:
    """One read or write of a slot by the record with this number."""

    number: int
    is_write: bool
    has_begun: bool = False


class AccessLog:
    """Accesses that have not ended, by (group, pool index), in the order of their numbers. Thread-safe."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._open: dict[tuple[int, int], list[Access]] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def issued(self, record: Move | Discard) -> None:
        """A record has been accepted; in number order."""
        with self._lock:
            if isinstance(record, Discard):
                self._note(record.number, record.group, pool_index(NVME, record.slot), True)
                return
            if record.source != record.destination:
                self._note(record.number, record.group, record.source, False)
            self._note(record.number, record.group, record.destination, True)

    def begin(self, group: int, index: int, is_write: bool) -> Access | None:
        """The next such access of the slot begins.

        Returns:
            The access, for ``end``; None when nobody has announced one.

        Raises:
            TransferError: something before it has not ended.
        """
        with self._lock:
            accesses = self._open.get((group, index), [])
            for position, access in enumerate(accesses):
                if access.is_write == is_write and not access.has_begun:
                    access.has_begun = True
                    earlier = [other for other in accesses[:position] if other.is_write or is_write]
                    if earlier:
                        self._violate(f"record {access.number} {'writes' if is_write else 'reads'} {_name(group, index)} while record "
                                      f"{earlier[0].number}, which {'writes' if earlier[0].is_write else 'reads'} it, has not ended")
                    return access
            return None

    def begin_rest(self, number: int) -> list[tuple[int, int, Access]]:
        """What this record has announced and not begun begins too: (group, pool index, access), for ``end``."""
        with self._lock:
            waiting = [(place, access.is_write) for place in self._places.get(number, ()) for access in self._open.get(place, ())
                       if access.number == number and not access.has_begun]
        begun = []
        for (group, index), is_write in waiting:
            access = self.begin(group, index, is_write)
            if access is not None:
                begun.append((group, index, access))
        return begun

    def end(self, group: int, index: int, access: Access | None) -> None:
        """It is over."""
        with self._lock:
            accesses = self._open.get((group, index), [])
            if access in accesses:
                accesses.remove(access)
                if not accesses:
                    del self._open[group, index]

    def finished(self, number: int) -> None:
        """The record is over, also what of it never happened."""
        with self._lock:
            for place in self._places.pop(number, ()):
                left = [access for access in self._open.get(place, ()) if access.number != number]
                if left:
                    self._open[place] = left
                else:
                    self._open.pop(place, None)

    def pending(self, group: int, indices: Sequence[int]) -> list[tuple[int, Access]]:
        """(pool index, access) of everything on these slots that has not ended."""
        with self._lock:
            return [(index, access) for index in indices for access in self._open.get((group, index), ())]

    def require_over(self, group: int, pending: Sequence[tuple[int, Access]]) -> None:
        """The engine is about to use slots on which these were pending. Raises TransferError when one still is."""
        with self._lock:
            for index, access in pending:
                if access in self._open.get((group, index), ()):
                    self._violate(f"the engine uses {_name(group, index)} while record {access.number} has not ended")

    def _note(self, number: int, group: int, index: int, is_write: bool) -> None:
        self._open.setdefault((group, index), []).append(Access(number, is_write))
        self._places.setdefault(number, []).append((group, index))

    def _violate(self, what: str) -> None:
        self.violations.append(what)
        raise TransferError(f"unordered access: {what}")


def _name(group: int, index: int) -> str:
    place = PoolIndex(index)
    return f"{LEVEL_NAMES[level_of(place)]} slot {slot_of(place)} of group {group}"


class CheckedTransfers(TransferManager):
    """As :class:`TransferManager`."""

    def __init__(self, device: Device, pools: Sequence[GroupPools], store: BlockStore | None, **options: Any) -> None:
        self.log = AccessLog()
        self._observes = device.name == "cpu"
        super().__init__(device, pools, None if store is None else _CheckedStore(store, self.log) if self._observes else store, **options)
        self._copiers = [{route: _CheckedCopier(copier, number, route, pools[number].primary, self.log if self._observes else None)
                          for route, copier in copiers.items()} for number, copiers in enumerate(self._copiers)]

    def issue(self, records: Sequence[Move | Discard]) -> None:
        for record in records if self._observes else ():
            self.log.issued(record)
        try:
            super().issue(records)
        except TransferError:
            for record in records:
                self.log.finished(record.number)
            raise

    def drain(self) -> list[MoveResult]:
        return [result for result in super().drain() if result.move.source != result.move.destination]

    def order_before_engine(self, engine_stream: EngineStream | None, group: int, indices: Any, timeout: float | None) -> bool:
        slots = list(indices)
        pending = self.log.pending(group, slots)
        is_ordered = super().order_before_engine(engine_stream, group, slots, timeout)
        if is_ordered:
            self.log.require_over(group, pending)
        return is_ordered

    def _finish(self, node: TransferNode) -> None:
        self.log.finished(node.number)
        super()._finish(node)


class _CheckedCopier:
    """A copier that notes what it reads and writes, and fills a slot that is copied to itself with poison."""

    def __init__(self, copier: Copier, group: int, route: tuple[int, int], primary: PrimaryPool, log: AccessLog | None) -> None:
        self._copier = copier
        self._group = group
        self._destination, self._source = route
        self._primary = primary
        self._log = log

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0) -> None:
        with _noted(self._log, self._accesses(pairs)):
            if self._destination == self._source == PRIMARY:
                _fill_with_poison(self._primary, [source for source, destination in pairs if source == destination])
                pairs = [(source, destination) for source, destination in pairs if source != destination]
            self._copier.copy(pairs, num_tokens)

    def _accesses(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
        """Staging memory is no level: its slots belong to one Move from beginning to end."""
        found = []
        for source, destination in pairs:
            if self._source not in (NVME, DIRECT) and (source, self._source) != (destination, self._destination):
                found.append((self._group, int(pool_index(self._source, source)), False))
            if self._destination != DIRECT:
                found.append((self._group, int(pool_index(self._destination, destination)), True))
        return found


class _CheckedStore:
    """A store whose reads, writes and deletions are noted."""

    def __init__(self, store: BlockStore, log: AccessLog) -> None:
        self._store = store
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_block(self, group: int, slot: int, key: bytes, out: Any) -> None:
        with _noted(self._log, [(group, int(pool_index(NVME, slot)), False)]):
            self._store.read_block(group, slot, key, out)

    def write_blocks(self, items: Sequence[Any]) -> Sequence[Exception | None]:
        with _noted(self._log, [(item.group, int(pool_index(NVME, item.slot)), True) for item in items], and_rest=True):
            return self._store.write_blocks(items)

    def discard(self, group: int, slots: Sequence[int]) -> None:
        with _noted(self._log, [(group, int(pool_index(NVME, slot)), True) for slot in slots]):
            self._store.discard(group, slots)


@contextmanager
def _noted(log: AccessLog | None, accesses: Sequence[tuple[int, int, bool]], and_rest: bool = False) -> Iterator[None]:
    """Around the work: these accesses begin, and end. ``and_rest``: with all else that their records have announced."""
    begun: list[_Begun] = []
    try:
        for group, index, is_write in accesses if log is not None else ():
            assert log is not None
            access = log.begin(group, index, is_write)
            begun.append((group, index, access))
            if and_rest and access is not None:
                begun.extend(log.begin_rest(access.number))
        yield
    finally:
        for group, index, ended in begun:
            assert log is not None
            log.end(group, index, ended)


def _fill_with_poison(primary: PrimaryPool, slots: Sequence[int]) -> None:
    """On the stream whose work this is called from."""
    if not slots:
        return
    on_stream: AbstractContextManager[object] = nullcontext()
    if primary.sections[0].rows.is_cuda:
        on_stream = torch.cuda.stream(torch.cuda.ExternalStream(current_handle()))  # type: ignore[no-untyped-call]
    with on_stream:
        for section in primary.sections:
            for slot in slots:
                section.rows[slot].fill_(POISON)


class Handout:
    """Which primary slots a call has handed out, so that they can be poisoned."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._generations: list[list[int]] = []
        self._num_taken = 0

    def begin(self) -> None:
        """A call begins."""
        self._generations = self._now()
        self._num_taken = self._ledger.counters.alloc_total

    def poison(self, records: Sequence[Move | Discard]) -> list[Move]:
        """Moves of a slot to itself for slots taken since ``begin`` that somebody holds and none of ``records`` writes.

        When generations have changed for other reasons as well (a failure was worked off), none: what lies there may be good.
        """
        before, self._generations = self._generations, []
        if not before:
            return []
        now = self._now()
        if sum(map(sum, now)) - sum(map(sum, before)) != self._ledger.counters.alloc_total - self._num_taken:
            return []
        written = {(record.group, record.destination) for record in records if isinstance(record, Move)}
        moves = []
        log = self._ledger.moves
        for group, allocator in enumerate(self._ledger.allocators):
            for slot, generation in enumerate(now[group]):
                holder = allocator.holders[PRIMARY][slot]
                if generation == before[group][slot] or holder.ref_count == 0 or (group, holder.index) in written:
                    continue
                moves.append(Move(log.next_number, group, holder.id, holder.index, generation, holder.index, generation))
                log.next_number += 1
        return moves

    def _now(self) -> list[list[int]]:
        return [[holder.generation for holder in allocator.holders[PRIMARY]] for allocator in self._ledger.allocators]

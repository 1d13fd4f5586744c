"""Tiers that carry out the ledger's Moves on pretend bytes, in any order that the transfer manager might, with failures on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pretend_cells import GARBAGE, UNWRITTEN, Cell, tree_contents

from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow

LEGAL_MOVES: Final = {(PRIMARY, PRIMARY), (PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (SECONDARY, NVME), (NVME, PRIMARY),
                     (NVME, SECONDARY)}

Place = tuple[int, int]
Decide = Callable[[Move], bool]
"""Whether a Move fails."""


def never(_move: Move) -> bool:
    return False


def always(_move: Move) -> bool:
    return True


class PretendTier:
    """One group's slots with their cells, and the transfer manager's order: a read waits for the slot's last write, a write for its
    last write and its reads; what reads a slot whose last write failed fails too. Reports may come later, in any order.

    Attributes:
        cells: by (level, slot).
        rows: the manifest, NVMe slot to chain key; row_retention: and to priority and expiry.
        waiting: records not carried out yet, by number. ended: (Move, failed) not reported to the ledger yet.
        condemns: whether a failing read from NVMe shows that the slot is bad; otherwise only the way from there failed.
    """

    def __init__(self, tiers: Tiers, group: int) -> None:
        self.ledger = ledger = tiers.ledger
        self.group = group
        self.fetch = tiers.fetch
        self._all_records = tiers.records
        self.cells: dict[Place, list[Cell]] = {}
        self.rows: dict[int, bytes] = {}
        self.row_retention: dict[int, tuple[int, float]] = {}
        self.quarantined: set[int] = set()
        self.waiting: list[Move | Discard] = []
        self.ended: list[tuple[Move, bool]] = []
        self.carried_out: list[Move] = []
        self.condemns: Decide = always
        self._good_sources: set[int] = set()
        self._failed_writes: dict[Place, Move] = {}
        for level in range(NUM_LEVELS):
            for slot in range(ledger.allocators[group].num_blocks[level]):
                self.cells[level, slot] = [UNWRITTEN] * ledger.tokens_per_block

    @property
    def records(self) -> list[Move | Discard]:
        """Everything the ledger ever decided for this group."""
        return [record for record in self._all_records if record.group == self.group]

    def runnable(self) -> list[Move | Discard]:
        """Records that nothing waiting before them holds back."""
        found: list[Move | Discard] = []
        for position, record in enumerate(self.waiting):
            if not any(_conflict(earlier, record) for earlier in self.waiting[:position]):
                found.append(record)
        return found

    def carry_out(self, record: Move | Discard, fails: bool) -> None:
        """Move the bytes of one record. A failing Move leaves garbage; what depends on a failed one fails as well."""
        self.waiting.remove(record)
        if isinstance(record, Discard):
            self.rows.pop(record.slot, None)
            return
        source, target = place(record.source), place(record.destination)
        earlier = self._failed_writes.get(source)
        depends_on_failure = earlier is not None and earlier.destination_generation == record.source_generation
        if depends_on_failure:
            assert self.cells[source][0] == GARBAGE, f"{record} fails because of {earlier}, which its bytes have nothing to do with"
        if source[0] == NVME:
            assert self.rows.get(source[1]) == record.key, f"{record} reads a slot whose row is gone or another's"
        failed = fails or depends_on_failure
        count = record.num_tokens or self.ledger.tokens_per_block
        if target[0] == NVME and not depends_on_failure:
            self.rows.pop(target[1], None)  # the store deletes the old row before it touches the slot
        if failed:
            if target[0] != NVME or not depends_on_failure:
                self.cells[target][:count] = [GARBAGE] * count
            self._failed_writes[target] = record
            if source[0] == NVME and self.condemns(record):
                self.quarantine(source[1])
            elif source[0] == NVME:
                self._good_sources.add(record.number)
        else:
            self._failed_writes.pop(target, None)
            self.cells[target][:count] = self.cells[source][:count]
            if target[0] == NVME:
                self.rows[target[1]] = record.key
                self.row_retention[target[1]] = (record.priority, record.expiry)
            self.carried_out.append(record)
        self.ended.append((record, failed))

    def report(self, position: int = 0) -> None:
        """Tell the ledger of one ended Move."""
        move, failed = self.ended.pop(position)
        self.ledger.finish(move, failed, move.number not in self._good_sources)
        self.fetch()

    def quarantine(self, slot: int) -> None:
        """A slot that has a row is out of service, and the row is gone."""
        del self.rows[slot]
        self.quarantined.add(slot)

    def settle(self, decide: Decide = never) -> None:
        """Carry out and report everything, in number order, and what follows from it."""
        self.fetch()
        while self.waiting or self.ended:
            while self.waiting:
                record = self.waiting[0]
                self.carry_out(record, isinstance(record, Move) and decide(record))
            while self.ended:
                self.report()

    def settle_slots(self, places: Callable[[], set[Place]], decide: Decide = never) -> None:
        """Carry out and report what touches these slots, and what that has to wait for; leave the rest waiting."""
        while True:
            self.fetch()
            slots = places()
            touching = [record for record in self.waiting if touches(record, slots)]
            if not touching and not any(place(move.destination) in slots for move, _failed in self.ended):
                return
            if touching:
                needed = [touching[-1]]
                for earlier in reversed(self.waiting[:self.waiting.index(touching[-1])]):
                    if any(_conflict(earlier, record) for record in needed):
                        needed.append(earlier)
                for record in sorted(needed, key=lambda r: r.number):
                    self.carry_out(record, isinstance(record, Move) and decide(record))
            while self.ended:
                self.report()

    def being_written(self) -> set[Place]:
        """Slots whose bytes are not yet what the ledger expects of them, or whose loss (of a bad source too) it has not heard of."""
        found = {place(record.destination) for record in self.waiting if isinstance(record, Move)}
        return found | {place(end) for move, failed in self.ended if failed for end in (move.source, move.destination)}

    def is_touching(self, slots: set[Place]) -> bool:
        """Whether something still reads or writes these slots, or was to write them and has not been reported."""
        return any(touches(record, slots) for record in self.waiting) or any(place(move.destination) in slots for move, _ in self.ended)

    def is_used(self, slots: set[Place]) -> bool:
        """Whether a Move that reads or writes these slots is under way, as far as the ledger knows."""
        return self.is_touching(slots) or any(place(move.source) in slots for move, _ in self.ended)

    def check_contents(self) -> None:
        """Every handle in the tree, and every backing, has the bytes that the tree says it has."""
        unsettled = self.being_written()
        for block_id, expected in tree_contents(self.ledger, self.group).items():
            block = self.ledger.allocators[self.group].blocks[block_id]
            for holder in (block, block.secondary_backing, block.nvme_backing):
                if holder is None or place(holder.index) in unsettled:
                    continue
                actual = self.cells[place(holder.index)][:len(expected)]
                assert actual == expected, f"block {holder.id} at {place(holder.index)} has other bytes than block {block_id} stands for"
                if holder.index & 3 == NVME:
                    node = block.node
                    assert node is not None
                    assert node.namespace.is_persistent, "process-local ids mean nothing to the next process"
                if holder.index & 3 == NVME and not any(isinstance(r, Discard) and r.slot == slot_of(holder.index) for r in self.waiting):
                    assert self.rows.get(slot_of(holder.index)) == self.ledger.allocators[self.group].chain_key(block)

    def check_rows(self) -> None:
        """When nothing waits: the manifest names exactly what the ledger keeps on NVMe."""
        assert not self.waiting
        assert not self.ended
        expected: dict[int, bytes] = {}
        for holder in self.ledger.allocators[self.group].holders[NVME]:
            content = holder if holder.has_content else holder.owner
            if content is not None:
                expected[slot_of(holder.index)] = self.ledger.allocators[self.group].chain_key(content)
        assert self.rows == expected, f"group {self.group}: slots {sorted(self.rows)} have rows, the ledger keeps {sorted(expected)}"


class Tiers:
    """The slots of all groups. Records of different groups have nothing to do with each other and may be carried out in any order.

    Attributes:
        records: everything the ledger ever decided.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.records: list[Move | Discard] = []
        self.groups = [PretendTier(self, group) for group in range(len(ledger.groups))]

    def fetch(self) -> None:
        """Take the ledger's new records over and check their form."""
        for record in self.ledger.moves.take():
            assert record.number == len(self.records), "records are numbered without a gap"
            check_form(record)
            self.records.append(record)
            self.groups[record.group].waiting.append(record)

    @property
    def num_carried_out(self) -> int:
        return sum(len(tier.carried_out) for tier in self.groups)

    def is_busy(self) -> bool:
        return any(tier.waiting or tier.ended for tier in self.groups)

    def settle(self, decide: Decide = never) -> None:
        self.fetch()
        while self.is_busy():
            for tier in self.groups:
                tier.settle(decide)

    def settle_sequence(self, sequence: ActiveSequence, decide: Decide = never) -> None:
        """All that touches the sequence's slots; a loss in one group may exchange its blocks in others."""
        while True:
            for row, tier in zip(sequence.rows, self.groups, strict=True):
                tier.settle_slots(lambda row=row: places_of(row), decide)  # type: ignore[misc]
            if not any(tier.is_touching(places_of(row)) for row, tier in zip(sequence.rows, self.groups, strict=True)):
                return

    def is_settled(self, sequence: ActiveSequence) -> bool:
        return all(places_of(row).isdisjoint(tier.being_written()) for row, tier in zip(sequence.rows, self.groups, strict=True))


def blocks_of(row: SequenceRow) -> list[Block]:
    """The real blocks of all beams."""
    return [block for beam in range(len(row.other_beams) + 1) for block in row.beam(beam) if block.id >= 0]


def places_of(row: SequenceRow) -> set[Place]:
    return {place(block.index) for block in blocks_of(row)}


def check_form(record: Move | Discard) -> None:
    if isinstance(record, Move):
        ends = (level_of(record.source), level_of(record.destination))
        assert ends in LEGAL_MOVES, record
        assert record.source != record.destination, record
        assert (len(record.key) == 32) == record.is_host_ordered, record
        assert record.num_tokens == 0 or ends[0] != NVME != ends[1], record


def place(index: int) -> Place:
    return index & 3, index >> 2


def _writes(record: Move | Discard) -> Place:
    return (NVME, record.slot) if isinstance(record, Discard) else place(record.destination)


def _conflict(earlier: Move | Discard, later: Move | Discard) -> bool:
    written = _writes(earlier)
    if written == _writes(later) or (isinstance(later, Move) and written == place(later.source)):
        return True
    return isinstance(earlier, Move) and place(earlier.source) == _writes(later)


def touches(record: Move | Discard, slots: set[Place]) -> bool:
    return _writes(record) in slots or (isinstance(record, Move) and place(record.source) in slots)

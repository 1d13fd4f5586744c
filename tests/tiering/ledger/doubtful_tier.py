"""Pretend tiers that know what every cell was computed from, and an engine that need not wait for what it reads.

Such an engine writes what a model would write if everything it reads were there. Each cell remembers the Moves that had not been carried
out when it was computed; when one of them fails, the cell turns to garbage, and so does what is computed from garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naive_model import Driver
from pretend_cells import GARBAGE, tree_contents
from pretend_tier import Decide, Place, PretendTier, Tiers, _conflict, blocks_of, never, place, touches

from kvtier.tiering.ledger.confirming import awaited_slots
from kvtier.tiering.ledger.group import CROSS, RECURRENT
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow


class DoubtfulTier(PretendTier):
    """``origins``: by slot, for each of its cells the numbers of the Moves that its content depends on."""

    def __init__(self, tiers: DoubtfulTiers, group: int) -> None:
        super().__init__(tiers, group)
        self.doubtful = tiers
        self.origins: dict[Place, list[set[int]]] = {where: [set() for _ in cells] for where, cells in self.cells.items()}

    def carry_out(self, record: Move | Discard, fails: bool) -> None:
        super().carry_out(record, fails)
        if isinstance(record, Discard):
            return
        source, target = place(record.source), place(record.destination)
        failed = self.ended[-1][1]
        for offset in range(record.num_tokens or self.ledger.tokens_per_block):
            self.origins[target][offset] = self.origins[source][offset] | ({record.number} if failed else set())
        if failed:
            self.doubtful.spoil(record.number)

    def report(self, position: int = 0) -> None:
        move, failed = self.ended[position]
        if failed:
            self.doubtful.taken_along += sum(len(noted.blocks) for allocator in self.ledger.allocators
                                             for noted in allocator.unconfirmed.by_move.get(move.number, []))
        super().report(position)

    def coming(self, where: Place, offset: int) -> Move | None:
        """The Move that has yet to bring what this cell should hold: the last one into it."""
        for record in reversed(self.waiting):
            if (isinstance(record, Move) and place(record.destination) == where
                    and offset < (record.num_tokens or self.ledger.tokens_per_block)):
                return record
        return None

    def order(self, places: set[Place], decide: Decide) -> None:
        """Carry out what touches these slots, and what that has to wait for; report nothing."""
        self.fetch()
        needed: list[Move | Discard] = []
        for record in reversed(self.waiting):
            if touches(record, places) or any(_conflict(record, later) for later in needed):
                needed.append(record)
        for record in reversed(needed):
            self.carry_out(record, isinstance(record, Move) and decide(record))

    def check_contents(self) -> None:
        unsettled = self.being_written()
        untold = {move.number for tier in self.doubtful.groups for move, failed in tier.ended if failed}
        for block_id, expected in tree_contents(self.ledger, self.group).items():
            block = self.ledger.allocators[self.group].blocks[block_id]
            for holder in (block, block.secondary_backing, block.nvme_backing):
                if holder is None or place(holder.index) in unsettled:
                    continue
                for offset, cell in enumerate(expected):
                    actual = self.cells[place(holder.index)][offset]
                    if actual != cell:
                        assert actual == GARBAGE, f"block {holder.id} has other bytes than block {block_id} stands for"
                        assert self.origins[place(holder.index)][offset] & untold, f"block {block_id} stays, computed from what was lost"


class DoubtfulTiers(Tiers):
    """``taken_along``: blocks that failed Moves have cost beside their own."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.taken_along = 0
        self.groups: list[Any] = [DoubtfulTier(self, group) for group in range(len(ledger.groups))]

    def spoil(self, number: int) -> None:
        """What was computed from what this Move should have brought is garbage."""
        for tier in self.groups:
            for where, origins in tier.origins.items():
                for offset, numbers in enumerate(origins):
                    if number in numbers:
                        tier.cells[where][offset] = GARBAGE

    def awaited(self, sequence: ActiveSequence, row: SequenceRow) -> set[Place]:
        slots = {block.index for block in blocks_of(row)} | set(awaited_slots(self.ledger, sequence, row.group))
        return {place(index) for index in slots}

    def settle_sequence(self, sequence: ActiveSequence, decide: Decide = never) -> None:
        while True:
            for row, tier in zip(sequence.rows, self.groups, strict=True):
                tier.settle_slots(lambda row=row: self.awaited(sequence, row), decide)
            if not any(tier.is_touching(self.awaited(sequence, row)) for row, tier in zip(sequence.rows, self.groups, strict=True)):
                return

    def is_settled(self, sequence: ActiveSequence) -> bool:
        return not any(where in tier.being_written() for row, tier in zip(sequence.rows, self.groups, strict=True)
                       for where in self.awaited(sequence, row))


class RushingDriver(Driver):
    """An engine that may compute at once what it could only compute when its blocks have arrived."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.tiers: Any = DoubtfulTiers(ledger)
        self._origin: set[int] = set()
        self._is_garbage = False

    def rush(self, request_id: int, num_tokens: int | None = None, decide: Decide = never) -> bool:
        """Compute up to ``num_tokens`` (all by default) and say so; only the slots that are written are waited for, and nobody is told
        what became of them. False when the ledger has told of a loss that the engine has to hear of first."""
        sequence = self.ledger.sequence(request_id)
        if sequence.must_report or sequence.must_preempt:
            return False
        end = sequence.num_tokens if num_tokens is None else max(num_tokens, sequence.computed)
        for row, tier in zip(sequence.rows, self.tiers.groups, strict=True):
            tier.order({place(block.index) for block in self._written(sequence, row, end)}, decide)
        self._write(sequence, sequence.computed, end)
        self.ledger.mark_computed(request_id, end)
        self.tiers.fetch()
        return True

    def rush_on(self, request_id: int, tokens: Sequence[int], decide: Decide = never) -> bool:
        """Compute everything and append, all without waiting."""
        if not self.rush(request_id, None, decide):
            return False
        self.note_leaving(request_id)
        self.ledger.append_step([request_id], [list(tokens)])
        self.lives[request_id].append(tokens)
        self.tiers.fetch()
        sequence = self.ledger.sequence(request_id)
        for row, tier in zip(sequence.rows, self.tiers.groups, strict=True):
            tier.order({place(block.index) for block in self._written(sequence, row, sequence.num_tokens)}, decide)
        if len(tokens) > 1:
            self._write(sequence, sequence.num_tokens - len(tokens), sequence.computed)
        return True

    def _written(self, sequence: ActiveSequence, row: SequenceRow, end: int) -> list[Any]:
        kind = self.ledger.groups[row.group].kind
        if kind in (CROSS, RECURRENT):
            return blocks_of(row)
        first = self._place(row.group, min(sequence.computed, max(end - 1, 0)))[0]
        return [block for block in row.blocks[first:] if block.id >= 0]

    def _write(self, sequence: ActiveSequence, start: int, end: int) -> None:
        for position in range(start, end):
            self._origin, self._is_garbage = self._read_by(sequence, position)
            super()._write(sequence, position, position + 1)

    def _write_cell(self, sequence: ActiveSequence, row: SequenceRow, beam: int, number: int, offset: int, position: int) -> None:
        super()._write_cell(sequence, row, beam, number, offset, position)
        where = place(row.beam(beam)[number].index)
        tier = self.tiers.groups[row.group]
        tier.origins[where][offset] = set(self._origin)
        if self._is_garbage:
            tier.cells[where][offset] = GARBAGE

    def _read_by(self, sequence: ActiveSequence, position: int) -> tuple[set[int], bool]:
        """What the token at ``position`` depends on: what its layers read of the tokens before it, in every group."""
        numbers: set[int] = set()
        is_garbage = False
        for row, tier in zip(sequence.rows, self.tiers.groups, strict=True):
            group = self.ledger.groups[row.group]
            read: list[tuple[Any, int]] = []
            if group.kind == RECURRENT:
                read = [(row.blocks[-1], 0)] if position else []
            elif group.kind != CROSS:
                first = position - (group.window - group.sinks) + 1 if group.window else 0
                for before in range(position):
                    if before >= first or before < group.sinks:
                        number, offset = self._place(row.group, before)
                        read.append((row.blocks[number], offset))
            for block, offset in read:
                where = place(block.index)
                coming = tier.coming(where, offset)
                numbers |= tier.origins[where][offset] if coming is None else {coming.number}
                is_garbage = is_garbage or (coming is None and tier.cells[where][offset] == GARBAGE)
        return numbers, is_garbage

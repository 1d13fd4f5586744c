"""An engine that verifies trees of drafts, run by hand."""

from __future__ import annotations

from collections.abc import Sequence

from group_run import GroupRun
from pretend_cells import Cell

from kvtier.tiering.ledger.group import CROSS, WINDOW
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow


class DraftRun(GroupRun):
    """Adds drafts: each is written as the history of its own path, at its own place."""

    def propose(self, sequence: ActiveSequence, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.ledger.propose_drafts(sequence.id, tokens, parents)
        self.settle()

    def verify_drafts(self, sequence: ActiveSequence) -> None:
        """One step computes what is missing, the newest token and all drafts; each draft reads what it may see, and only that."""
        self.driver._write(sequence, sequence.computed, sequence.num_tokens)
        tree = self.ledger.pending_drafts(sequence.id)
        told = self.driver.lives[sequence.id].beams[0]
        cells: list[Cell] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            cells.append((told[-1] if parent < 0 else cells[parent], (token, None, None)))
        for row in sequence.rows:
            spec = self.ledger.groups[row.group]
            if spec.kind == CROSS:
                continue
            for last, places in enumerate(tree.visible_places()):
                position = sequence.num_tokens + tree.depths[last]
                assert places[-1] == sequence.num_tokens + last
                first = position + 1 - (spec.window - spec.sinks) if spec.kind == WINDOW else 0
                for read in (*range(min(spec.sinks, sequence.num_tokens)), *range(max(first, 0), sequence.num_tokens)):
                    assert self._cell(row, read) == told[read], f"draft {last} misses token {read}"
                for place, passed in zip(places[:-1], tree.path_to(last), strict=False):
                    assert self._cell(row, place) == cells[passed], f"draft {last} misses a parent"
                self._put(sequence, row, places[-1], cells[last])

    def accept(self, sequence: ActiveSequence, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Accept a path and carry out its moves in order."""
        tree = self.ledger.pending_drafts(sequence.id)
        rows = [list(row.blocks) for row in sequence.rows]  # those given back are read before anybody takes them
        moves = self.ledger.accept_drafts(sequence.id, nodes)
        for row in sequence.rows:
            if self.ledger.groups[row.group].kind == CROSS:
                continue
            blocks = rows[row.group]
            for source, target in moves:
                (read, offset), (written, into) = self.driver._place(row.group, source), self.driver._place(row.group, target)
                assert row.blocks[written] is blocks[written], "written into a block that stays"
                self.driver._cells(row.group, blocks[written])[into] = self.driver._cells(row.group, blocks[read])[offset]
        self.driver.lives[sequence.id].append([tree.tokens[node] for node in nodes])
        self.settle()
        return moves

    def _cell(self, row: SequenceRow, place: int) -> Cell:
        number, offset = self.driver._place(row.group, place)
        assert row.blocks[number].id >= 0
        return self.driver._cells(row.group, row.blocks[number])[offset]

    def _put(self, sequence: ActiveSequence, row: SequenceRow, place: int, cell: Cell) -> None:
        number, offset = self.driver._place(row.group, place)
        self.driver._check_writable(sequence, row, row.blocks[number], lambda _beam: True, offset)
        self.driver._cells(row.group, row.blocks[number])[offset] = cell

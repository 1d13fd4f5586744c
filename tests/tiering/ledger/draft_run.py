"""An engine that verifies trees of drafts, on the pretend bytes of ``GroupRun``."""

from __future__ import annotations

from collections.abc import Sequence

from group_run import GroupRun

from kvtier.tiering.ledger.group import CROSS, WINDOW
from kvtier.tiering.ledger.sequence import ActiveSequence


class DraftRun(GroupRun):
    """Adds drafts: each is written as the history of its own path, at its own place."""

    def propose(self, sequence: ActiveSequence, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.ledger.propose_drafts(sequence.id, tokens, parents)
        self.settle()

    def verify_drafts(self, sequence: ActiveSequence) -> None:
        """One step computes what is missing, the newest token and all drafts; each draft reads what it may see, and only that."""
        self._forward(sequence, sequence.computed, sequence.num_tokens)
        tree = self.ledger.pending_drafts(sequence.id)
        prefix = self._beams[sequence.id][0]
        paths = [self._path(self._start(sequence.request), [*prefix, *(tree.tokens[node] for node in tree.path_to(last))])
                 for last in range(tree.num_drafts)]
        for row in sequence.rows:
            spec = self.ledger.groups[row.group]
            if spec.kind == CROSS:
                continue
            for last, places in enumerate(tree.visible_places()):
                path, position = paths[last], sequence.num_tokens + tree.depths[last]
                assert places[-1] == sequence.num_tokens + last
                first = position + 1 - (spec.window - spec.sinks) if spec.kind == WINDOW else 0
                for read in (*range(min(spec.sinks, sequence.num_tokens)), *range(max(first, 0), sequence.num_tokens)):
                    assert self._cell(sequence, row.group, read) == path[read], f"draft {last} misses token {read}"
                for depth, place in enumerate(places[:-1]):
                    assert self._cell(sequence, row.group, place) == path[sequence.num_tokens + depth], f"draft {last} misses a parent"
                self._write(sequence, row, 0, places[-1], path[-1], False)

    def accept(self, sequence: ActiveSequence, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Accept a path and carry out its moves in order."""
        tree = self.ledger.pending_drafts(sequence.id)
        rows = [list(row.blocks) for row in sequence.rows]  # those given back are read before anybody takes them
        moves = self.ledger.accept_drafts(sequence.id, nodes)
        for row in sequence.rows:
            if self.ledger.groups[row.group].kind == CROSS:
                continue
            for source, target in moves:
                blocks = rows[row.group]
                read, written = self._place(row.group, source), self._place(row.group, target)
                tokens_per_block = self.ledger.tokens_per_block
                cell = self._at(row.group, blocks[read // tokens_per_block])[read % tokens_per_block]
                assert row.blocks[written // tokens_per_block] is blocks[written // tokens_per_block], "written into a block that stays"
                self._at(row.group, blocks[written // tokens_per_block])[written % tokens_per_block] = cell
        self._beams[sequence.id][0].extend(tree.tokens[node] for node in nodes)
        self.settle()
        return moves

    def _cell(self, sequence: ActiveSequence, group: int, place: int) -> int:
        place = self._place(group, place)
        block = sequence.rows[group].blocks[place // self.ledger.tokens_per_block]
        assert block.id >= 0
        return self._at(group, block)[place % self.ledger.tokens_per_block]

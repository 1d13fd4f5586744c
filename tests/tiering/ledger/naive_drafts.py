"""The naive engine with trees of drafts: each draft is written at a place of its own, and reads its own path and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from naive_model import Driver
from pretend_cells import Cell
from pretend_tier import Decide, never

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.draft_tree import DraftTree
from kvtier.tiering.ledger.group import CROSS, WINDOW
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow

Move = tuple[int, int]


class DraftingDriver(Driver):
    """An engine that proposes drafts, verifies them in one step, and accepts one path."""

    def make_ready(self, request_id: int, decide: Decide = never, num_tokens: int | None = None) -> bool:
        sequence = self.ledger.sequence(request_id)
        self.tiers.settle_sequence(sequence, decide)
        has_lost = sequence.must_report
        is_ready = super().make_ready(request_id, decide, num_tokens)
        assert not (has_lost and is_ready and sequence.drafts is not None), f"request {request_id}: drafts that attended to what is lost"
        return is_ready

    def propose(self, request_id: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        before = self._takes()
        self.ledger.propose_drafts(request_id, tokens, parents)
        self.taken = [now - then for now, then in zip(self._takes(), before, strict=True)]
        sequence = self.ledger.sequence(request_id)
        for row in sequence.rows:
            if self.ledger.groups[row.group].kind != CROSS:
                for place in range(sequence.num_tokens, sequence.num_tokens + len(tokens)):
                    block = row.blocks[self._place(row.group, place)[0]]
                    assert (block.ref_count, block.node) == (1, None), f"request {request_id}: a draft goes into what others have"
        self.tiers.fetch()

    def verify_drafts(self, request_id: int, node: int, decide: Decide = never) -> bool:
        """Compute what is missing and all drafts; accept the path to one of them, or none for -1. False when the sequence has to be
        pre-empted. A failed read drops the drafts; then nothing is accepted."""
        if not self.make_ready(request_id, decide):
            return False
        sequence = self.ledger.sequence(request_id)
        if sequence.drafts is None:
            return True
        self.write_drafts(request_id)
        self.accept(request_id, self.ledger.pending_drafts(request_id).path_to(node))
        return self.make_ready(request_id, decide)

    def write_drafts(self, request_id: int) -> None:
        """One step: what is missing, the newest token and all drafts."""
        sequence = self.ledger.sequence(request_id)
        self._write(sequence, sequence.computed, sequence.num_tokens)
        self._write_drafts(sequence, self.ledger.pending_drafts(request_id))

    def accept(self, request_id: int, path: Sequence[int]) -> list[Move]:
        """Accept drafts that have been computed, and carry their moves out in order."""
        sequence = self.ledger.sequence(request_id)
        tree = self.ledger.pending_drafts(request_id)
        planned = self.ledger.draft_moves(request_id, path)
        rows = [list(row.blocks) for row in sequence.rows]  # what is given back is read before anybody takes it
        self.note_leaving(request_id)
        moves = self.ledger.accept_drafts(request_id, path)
        assert moves == planned
        for row in sequence.rows:
            if self.ledger.groups[row.group].kind != CROSS:
                self._move(row, rows[row.group], moves)
        self.lives[request_id].append([tree.tokens[accepted] for accepted in path])
        assert sequence.computed == sequence.num_tokens == self.lives[request_id].num_tokens
        if self._stores_early:
            self.note_stored(request_id)
        self.check_end(sequence)
        self.tiers.fetch()
        return moves

    def drop_drafts(self, request_id: int) -> None:
        self.ledger.drop_drafts(request_id)
        self.check_end(self.ledger.sequence(request_id))
        self.tiers.fetch()

    def last_place(self, sequence: ActiveSequence) -> int:
        """Drafts need blocks, too; more of them than a request said it would have are not part of any estimate."""
        drafts = sequence.drafts
        if drafts is None:
            return super().last_place(sequence)
        asked = sequence.request
        is_as_asked = drafts.num_drafts <= asked.num_draft_tokens
        return sequence.num_tokens + drafts.num_drafts if is_as_asked else asked.num_tokens + asked.max_new_tokens + 1

    def check_end(self, sequence: ActiveSequence) -> None:
        """Without drafts, rows end with the newest token."""
        assert sequence.drafts is None
        for row in sequence.rows:
            if self.ledger.groups[row.group].kind != CROSS:
                assert len(row.blocks) == self._place(row.group, sequence.num_tokens - 1)[0] + 1

    # -- inside

    def _write_drafts(self, sequence: ActiveSequence, tree: DraftTree) -> None:
        told = self.lives[sequence.id].beams[0]
        cells: list[Cell] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            cells.append((told[-1] if parent < 0 else cells[parent], (token, self.lives[sequence.id].extra_id, None)))
        for row in sequence.rows:
            spec = self.ledger.groups[row.group]
            if spec.kind == CROSS:
                continue
            for draft, places in enumerate(tree.visible_places()):
                name = f"request {sequence.id}, group {row.group}, draft {draft}"
                position = tree.num_tokens + tree.depths[draft]
                first = max(position + 1 - (spec.window - spec.sinks), 0) if spec.kind == WINDOW else 0
                for read in {*range(min(spec.sinks, tree.num_tokens)), *range(first, tree.num_tokens)}:
                    assert self._cell(row, read) == told[read], f"{name}: misses token {read}"
                for place, passed in zip(places[:-1], tree.path_to(draft), strict=False):
                    assert self._cell(row, place) == cells[passed], f"{name}: misses draft {passed}"
                number, offset = self._place(row.group, places[-1])
                self._check_writable(sequence, row, row.blocks[number], lambda _beam: True, offset)
                self._cells(row.group, row.blocks[number])[offset] = cells[draft]

    def _move(self, row: SequenceRow, blocks: list[Block], moves: list[Move]) -> None:
        """The accepted drafts' cells go directly behind the sequence's, in order."""
        for source, target in moves:
            read, offset = self._place(row.group, source)
            cell = self._cells(row.group, blocks[read])[offset]
            written, offset = self._place(row.group, target)
            assert row.blocks[written] is blocks[written], "written into a block that stays"
            self._cells(row.group, blocks[written])[offset] = cell

    def _cell(self, row: SequenceRow, place: int) -> Cell:
        number, offset = self._place(row.group, place)
        assert row.blocks[number].id >= 0, f"group {row.group}: nothing at place {place}"
        return self._cells(row.group, row.blocks[number])[offset]

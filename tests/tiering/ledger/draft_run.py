"""An engine that verifies trees of drafts, run by hand."""

from __future__ import annotations

from collections.abc import Sequence

from group_run import GroupRun
from naive_drafts import DraftingDriver

from kvtier.tiering.ledger.sequence import ActiveSequence


class DraftRun(GroupRun):
    """Adds drafts."""

    make_driver = DraftingDriver
    driver: DraftingDriver

    def propose(self, sequence: ActiveSequence, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.driver.propose(sequence.id, tokens, parents)
        self.settle()

    def verify_drafts(self, sequence: ActiveSequence) -> None:
        """One step computes what is missing, the newest token and all drafts; each draft reads what it may see, and only that."""
        self.driver.write_drafts(sequence.id)

    def accept(self, sequence: ActiveSequence, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Accept a path and carry out its moves in order."""
        moves = self.driver.accept(sequence.id, nodes)
        self.settle()
        return moves

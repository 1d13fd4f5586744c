"""What was computed from blocks that had not arrived: good only if they do (design: all or nothing).

An engine should compute behind reused blocks when they have arrived. One that does not wait for them, or that hears of a failed copy
after the step that read it, may store what it computed from bytes that were never there. Such blocks are *unconfirmed* until the Moves
that they wait for have ended: the ledger notes them when they are stored, so that a failure takes them along.
"""

from __future__ import annotations

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.moves import Move

Waits = dict[int, Move]
"""By number, Moves that have not ended."""


class Unconfirmed:
    """Blocks that are good only if some Moves end well.

    Attributes:
        blocks: stored ones. None for a block that a sequence has read, and that has left its window since.
        position: of that block in the sequence.
        waits: the Moves. Empty as well once nobody cares any more.
        source: what the block that has left was noted in. Those noted together wait together: the first of them speaks for all.
    """

    __slots__ = ("blocks", "position", "source", "waits")

    def __init__(self, blocks: list[Block], position: int, waits: Waits, source: Unconfirmed | None = None) -> None:
        self.blocks = blocks
        self.position = position
        self.waits = waits
        self.source = source


class UnconfirmedBlocks:
    """The unconfirmed blocks of one group.

    Attributes:
        by_block: by block id, for handles that have not been taken for something else since.
        by_move: by Move number, what waits for it. Empty where engines wait for what they read: the rule.
    """

    def __init__(self) -> None:
        self.by_block: dict[int, Unconfirmed] = {}
        self.by_move: dict[int, list[Unconfirmed]] = {}

    def note(self, blocks: list[Block], waits: Waits) -> None:
        """The content of these blocks waits for these Moves, and no longer for those that it waited for before."""
        unconfirmed = Unconfirmed(blocks, -1, dict(waits))
        for block in blocks:
            self.by_block[block.id] = unconfirmed
        self._register(unconfirmed)

    def note_departed(self, position: int, waits: Waits, source: Unconfirmed | None) -> Unconfirmed:
        """A sequence lets go of a block that waits for these Moves: what it computes stays in doubt."""
        unconfirmed = Unconfirmed([], position, dict(waits), source)
        self._register(unconfirmed)
        return unconfirmed

    def copied(self, source: Block, target: Block) -> None:
        """A copy is as good as what it was made from."""
        unconfirmed = self.by_block.get(source.id)
        if unconfirmed is not None:
            self.note([target], unconfirmed.waits)

    def taken(self, block: Block) -> None:
        """The handle gets other content."""
        self.by_block.pop(block.id, None)

    def arrived(self, number: int) -> bool:
        """A Move has ended well. Returns whether something waited for it."""
        waiting = self.by_move.pop(number, None)
        if waiting is None:
            return False
        for unconfirmed in waiting:
            unconfirmed.waits.pop(number, None)
            if not unconfirmed.waits:
                self._forget(unconfirmed)
        return True

    def failed(self, number: int) -> list[Block]:
        """A Move has failed. Returns the blocks that are lost with it, which wait for nothing any more.

        A handle without content that nobody holds has been given up before; it may be the backing of another block by now.
        """
        lost: list[Block] = []
        for unconfirmed in self.by_move.pop(number, []):
            lost.extend([block for block in unconfirmed.blocks if self.by_block.get(block.id) is unconfirmed
                         and (block.ref_count > 0 or block.has_content)])
            if unconfirmed.blocks:
                self.give_up(unconfirmed)
        return lost

    def give_up(self, unconfirmed: Unconfirmed) -> None:
        """Nobody cares any more whether this is good."""
        unconfirmed.waits.clear()
        self._forget(unconfirmed)

    def _register(self, unconfirmed: Unconfirmed) -> None:
        for number in unconfirmed.waits:
            waiting = self.by_move.get(number)
            if waiting is None:
                self.by_move[number] = [unconfirmed]
            else:
                waiting.append(unconfirmed)

    def _forget(self, unconfirmed: Unconfirmed) -> None:
        for block in unconfirmed.blocks:
            if self.by_block.get(block.id) is unconfirmed:
                del self.by_block[block.id]

"""Whose content is given up when blocks are taken, from two looks at all blocks, before and after the call: empty handles go first, then
lower copies, then content of the lowest priority. (Which of equal priority: ``tests/policies/test_eviction.py``.)
"""

from __future__ import annotations

from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.ledger import Ledger


class Picture:
    """What could be taken of one level of a group: handles without content of their own, and unreferenced content with its priority."""

    def __init__(self, blocks: list[Block], group: int, level: int) -> None:
        self.group = group
        self.level = level
        self.spares = [(block, block.index) for block in blocks if self.is_spare(block)]
        self.cached = [(block, block.priority, block.stamp) for block in blocks if block.node is not None and self.is_free(block)]

    def is_free(self, block: Block) -> bool:
        return block.ref_count == 0 and level_of(block.index) == self.level and block.queue != NOT_QUEUED

    def is_spare(self, block: Block) -> bool:
        return not block.has_content and self.is_free(block)

    def check(self, reused_in_place: set[tuple[int, int]]) -> None:
        """After a call that took blocks. ``reused_in_place``: group and id of those taken for their first tokens, whatever their turn."""
        gone = [priority for block, priority, _stamp in self.cached
                if (block.node is None and (self.group, block.id) not in reused_in_place)
                or (block.ref_count == 0 and level_of(block.index) > self.level)]  # one that rises takes no slot of this level
        # What a new block starts as a copy of is held for the call, and stays whatever its priority; it is released again at its end.
        kept = [priority for block, priority, stamp in self.cached
                if block.node is not None and self.is_free(block) and block.stamp == stamp]
        name = f"group {self.group}, level {self.level}"
        if gone:
            left_over = [block for block, index in self.spares if self.is_spare(block) and block.index == index]
            assert not left_over, f"{name}: content went before a spare"
            assert not kept or max(gone) <= min(kept), f"{name}: content went that is worth more than what stayed"


def pictures(ledger: Ledger) -> list[Picture]:
    """Before a call that takes blocks."""
    return [Picture(allocator.blocks, allocator.group, level) for allocator in ledger.allocators for level in (PRIMARY, SECONDARY)]

"""``SlotTable``: which handle has which slot of each level, and which slots a file operation uses (design: a block is a handle)."""

from __future__ import annotations

from kvtier.pools.pool_index import NUM_LEVELS, level_of, pool_index, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.types import BlockId


class SlotTable:
    """Handles and slots of one group.

    Attributes:
        blocks: handles by id; ids follow the slots of the primary, the secondary and the NVMe level.
        holders: by level and slot, the handle that has the slot now.
        generations: how often a slot was given to a writer: a failure that comes late does not touch the slot's next owner.
        busy: host-ordered Moves (one end is a file) and tools that use the slot.
        num_busy: busy slots of each level.
    """

    def __init__(self, num_blocks: tuple[int, int, int]) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[Block] = []
        self.holders: list[list[Block]] = [[] for _ in range(NUM_LEVELS)]
        self.generations: list[list[int]] = [[0] * n for n in num_blocks]
        self.busy: list[list[int]] = [[0] * n for n in num_blocks]
        self.num_busy: list[int] = [0] * NUM_LEVELS
        for level in range(NUM_LEVELS):
            for slot in range(num_blocks[level]):
                block = Block(BlockId(len(self.blocks)), pool_index(level, slot))
                self.blocks.append(block)
                self.holders[level].append(block)

    def is_busy(self, block: Block) -> bool:
        return self.busy[level_of(block.index)][slot_of(block.index)] > 0

    def _exchange(self, left: Block, right: Block) -> None:
        left.index, right.index = right.index, left.index
        self.holders[level_of(left.index)][slot_of(left.index)] = left
        self.holders[level_of(right.index)][slot_of(right.index)] = right

    def _set_busy(self, block: Block) -> None:
        level = level_of(block.index)
        slot = slot_of(block.index)
        if self.busy[level][slot] == 0:
            self.num_busy[level] += 1
        self.busy[level][slot] += 1

    def _end_busy(self, level: int, slot: int) -> None:
        self.busy[level][slot] -= 1
        assert self.busy[level][slot] >= 0
        if self.busy[level][slot] == 0:
            self.num_busy[level] -= 1

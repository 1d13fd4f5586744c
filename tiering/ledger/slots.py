"""``SlotTable``: which handle has which slot of each level, and which slots a file operation uses (design: a block is a handle)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

from kvtier.pools.pool_index import LEVEL_BITS, NUM_LEVELS, SLOT_SHIFT, PoolIndex, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.types import BlockId

PLACEHOLDER_ID: Final = -2
NOWHERE: Final = -1
"""A pool index of no level and no slot."""


class SlotTable:
    """Handles and slots of one group.

    Attributes:
        blocks: handles by id; ids follow the slots of the primary, the secondary and the NVMe level.
        holders: by level and slot, the handle that has the slot now.
        placeholder: stands in a sequence where it has no block (out of the window, no snapshot). It has no slot, is in no queue, and
            ``hold_many`` and ``release_many`` pass it over; no other verb takes it.
        num_busy: busy slots of each level.
        num_unreferenced_busy: those whose handle nobody references. On the primary level, total - free - these = referenced.
    """

    def __init__(self, num_blocks: tuple[int, int, int]) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[Block] = []
        self.holders: list[list[Block]] = [[] for _ in range(NUM_LEVELS)]
        self.placeholder = Block(BlockId(PLACEHOLDER_ID), PoolIndex(NOWHERE))
        self.num_busy: list[int] = [0] * NUM_LEVELS
        self.num_unreferenced_busy: list[int] = [0] * NUM_LEVELS
        for level in range(NUM_LEVELS):
            first, count = len(self.blocks), num_blocks[level]
            ids = cast(Iterable[BlockId], range(first, first + count))  # at once: each call of a NewType takes its time
            indices = cast(Iterable[PoolIndex], range(pool_index(level, 0), pool_index(level, count), pool_index(0, 1)))
            holders = [Block(block_id, index) for block_id, index in zip(ids, indices, strict=True)]
            self.holders[level] = holders
            self.blocks.extend(holders)

    def generation(self, level: int, slot: int) -> int:
        """How often the slot was given to a writer: a failure that comes late does not touch the slot's next owner."""
        return self.holders[level][slot].generation

    def is_busy(self, block: Block) -> bool:
        return block.file_uses > 0

    @property
    def busy(self) -> dict[PoolIndex, int]:
        """By pool index, how many file operations use the slot; slots in use only. For checks and tools: O(n)."""
        return {block.index: int(block.file_uses) for block in self.blocks if block.file_uses > 0}

    def _exchange(self, left: Block, right: Block) -> None:
        """Each handle gets the other's slot, and with it the slot's generation."""
        is_busy = left.file_uses > 0 or right.file_uses > 0
        if is_busy:
            self._count_unreferenced(left, -1)
            self._count_unreferenced(right, -1)
        index = left.index
        other = right.index
        generation = left.generation
        left.index = other
        left.generation = right.generation
        right.index = index
        right.generation = generation
        holders = self.holders
        holders[other & LEVEL_BITS][other >> SLOT_SHIFT] = left
        holders[index & LEVEL_BITS][index >> SLOT_SHIFT] = right
        if is_busy:
            uses = left.file_uses
            left.file_uses = right.file_uses
            right.file_uses = uses
            self._count_unreferenced(left, 1)
            self._count_unreferenced(right, 1)

    def _set_busy(self, block: Block) -> None:
        if block.file_uses == 0:
            level = block.index & LEVEL_BITS
            self.num_busy[level] += 1
            if block.ref_count == 0:
                self.num_unreferenced_busy[level] += 1
        block.file_uses += 1

    def _end_busy(self, level: int, slot: int) -> None:
        block = self.holders[level][slot]
        assert block.file_uses > 0
        block.file_uses -= 1
        if block.file_uses == 0:
            self.num_busy[level] -= 1
            if block.ref_count == 0:
                self.num_unreferenced_busy[level] -= 1

    def _count_unreferenced(self, block: Block, change: int) -> None:
        """Count a busy slot in or out, if nobody references its handle. Before its references or slot change, and after."""
        if block.ref_count == 0 and block.file_uses > 0:
            self.num_unreferenced_busy[block.index & LEVEL_BITS] += change

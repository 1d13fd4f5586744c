"""``PoolIndex``: where a block's bytes are, as one integer (design: a block is a handle).

A pool index packs (level, slot) so that a move is the exchange of two integers. It is no address and no block id.
"""

from __future__ import annotations

from typing import Final, NewType, cast

from kvtier.types import Slot

PoolIndex = NewType("PoolIndex", int)
"""``slot * 4 + level``."""
LEVEL_BITS: Final = 3
SLOT_SHIFT: Final = 2
SLOT_STEP: Final = 4
"""Between the indices of neighbouring slots of one level."""

# Level values as plain constants: the ledger compares them in its hot paths, where an enum lookup costs more than the work.
PRIMARY: Final = 0
SECONDARY: Final = 1
NVME: Final = 2
NUM_LEVELS: Final = 3
LEVEL_NAMES: Final = ("primary", "secondary", "nvme")


def pool_index(level: int, slot: int) -> PoolIndex:
    """Pack a level (0, 1, 2) and a slot of that level."""
    return cast(PoolIndex, slot << SLOT_SHIFT | level)  # here and below: a cast costs compiled code nothing, calling a NewType does


def level_of(index: PoolIndex) -> int:
    """The level as a plain integer; ``Level(level_of(index))`` gives the enum."""
    return index & LEVEL_BITS


def slot_of(index: PoolIndex) -> Slot:
    """The slot inside that level's pool."""
    return cast(Slot, index >> SLOT_SHIFT)

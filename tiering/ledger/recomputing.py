"""Blocks that were found on a lower level and computed all the same, because that was faster (design: deciding to load).

When they are stored the tree has their content already, in slow slots. The computed block takes that place the way a promotion does,
by an exchange of pool indices, with no Move: the bytes are where they are wanted. The slow slot becomes the block's backing. Without
this a popular prefix would be computed again and again.
"""

from __future__ import annotations

from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.keeping import apply_retention
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState


def take_places(state: LedgerState, sequence: ActiveSequence) -> None:
    """Let a sequence's computed full blocks stand where the tree has lower ones of the same content.

    Nothing that they were computed from may still be on its way: what is in a place of the tree is taken to be good.
    """
    usable = sequence.storable_tokens()
    root = state.tree.find_root(sequence.namespace)
    if root is None or usable <= 0 or sequence.beam_width > 1:
        return
    walk = state.tree.walk(root, sequence.keys, usable)
    for row in sequence.rows:
        allocator = state.allocators[row.group]
        number = 0
        for node, count in zip(walk.nodes, walk.counts, strict=True):
            if node.lower[row.group]:
                values = node.values[row.group]
                for position in range(count):
                    stored = values[position]
                    if stored is not None and level_of(stored.index) != PRIMARY and number + position < len(row.blocks):
                        _take_place(state, sequence, row, number + position, stored)
            number += count
        allocator.end_call()


def _take_place(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, number: int, stored: Block) -> None:
    own = row.blocks[number]
    allocator = state.allocators[row.group]
    if own.id < 0 or own.node is not None or own.ref_count != 1 or allocator.is_busy(own) or allocator.is_busy(stored):
        return
    allocator.hold(stored)
    allocator.rise_into(stored, own)
    apply_retention(allocator, sequence.request, number, stored)
    row.blocks[number] = stored

"""Raising stored blocks towards the primary level before anybody asks for them (design: ``prefetch``).

Nothing here takes a slot from content that somebody uses, or that is worth more. NVMe content goes to the secondary level first: a
primary slot that a file is read into is nobody's meanwhile, and a request might find too few.
"""

from __future__ import annotations

from typing import cast

from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.admission import may_reuse, most_reusable
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.prefix import usable_prefix
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.state import LedgerState
from kvtier.tiering.ledger.storing import adopt_warm_blocks


class StoredBlock:
    """A block of a stored prefix, in one group."""

    __slots__ = ("block", "group", "position")

    def __init__(self, group: int, position: int, block: Block) -> None:
        self.group = group
        self.position = position
        self.block = block


def stored_prefix(state: LedgerState, request: Request) -> list[StoredBlock]:
    """What a request would reuse now, in prompt order. Blocks found on NVMe at start get their place in the tree."""
    if not may_reuse(state, request):
        return []
    usable = most_reusable(state, request)
    if state.has_warm():
        followed = state.follow(request, usable)
        adopt_warm_blocks(state.tree, state.allocators, state.groups, followed.namespace, followed.keys, request.num_tokens - 1)
    walk = state.follow(request, usable).walk
    if walk is None or not walk.num_blocks:
        return []
    rows = usable_prefix(state, walk)
    found: list[StoredBlock] = []
    for position in range(len(rows[state.leading_group])):
        for group, row in enumerate(rows):
            if position < len(row) and row[position].id >= 0:
                found.append(StoredBlock(group, position, row[position]))
    return found


def is_unused(state: LedgerState, stored: StoredBlock) -> bool:
    """Whether the block is still content that nobody references and no transfer of a file uses."""
    block = stored.block
    return block.node is not None and block.queue != NOT_QUEUED and block.ref_count == 0


def use_ahead(state: LedgerState, blocks: list[StoredBlock]) -> None:
    """The unused blocks of a prefix that is going to be raised are the most recently used ones, its beginning last: what has to make room
    is other content, as long as there is any."""
    for stored in reversed(blocks):
        if is_unused(state, stored):
            allocator = state.allocators[stored.group]
            allocator.queues.claim(stored.block)
            allocator.queue_as_used(stored.block)


def raise_to_secondary(state: LedgerState, stored: StoredBlock, kept: set[int]) -> bool:
    """Begin to read an unused NVMe block into the secondary level. False when that would cost content it must not cost: anything of
    higher priority, or one of the blocks ``kept`` (ids of the same group)."""
    allocator = state.allocators[stored.group]
    if not _may_give_up(cast("Block | None", allocator.queues.front(SECONDARY)), stored.block, kept):
        return False
    allocator.raise_from_file(stored.block)
    return True


def raise_to_primary(state: LedgerState, stored: StoredBlock, kept: set[int]) -> bool:
    """Copy an unused secondary block to the primary level. False as for :func:`raise_to_secondary`, also when one of the blocks ``kept``
    would have to make room for what goes down."""
    allocator = state.allocators[stored.group]
    block = stored.block
    victim = cast("Block | None", allocator.queues.front(PRIMARY))
    if not _may_give_up(victim, block, kept):
        return False
    allocator.queues.claim(block)
    below = allocator.displaced_by(victim)
    if below is not None and below.id in kept:
        allocator.queues.restore_content(block, SECONDARY)
        return False
    allocator.promote(block)
    allocator.end_call()
    allocator.queue_as_used(block)
    assert level_of(block.index) == PRIMARY
    return True


def _may_give_up(victim: Block | None, block: Block, kept: set[int]) -> bool:
    if victim is None:
        return False
    return not victim.has_content or (victim.priority <= block.priority and victim.id not in kept)

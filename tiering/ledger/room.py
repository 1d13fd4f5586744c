"""Is there room on the primary level, and whom to pre-empt when there is not (design: all or nothing)."""

from __future__ import annotations

from kvtier.errors import CapacityError
from kvtier.policies.eviction import NOT_QUEUED
from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.sequence import ActiveSequence

NOBODY: frozenset[int] = frozenset()


def require_room(allocator: BlockAllocator, sequences: dict[int, ActiveSequence], needed: int, wanted: set[int], what: str,
                 asking: frozenset[int] = NOBODY) -> None:
    """Raise CapacityError unless ``needed`` primary blocks can be taken beside the ``wanted`` ones, which must stay.

    Args:
        wanted: ids of blocks that what is asked for holds on to.
        what: who needs them, for the message.
        asking: ids of sequences that ask. To pre-empt the only sequence there is, for its own sake, is no remedy.
    """
    available = free_beside(allocator, wanted)
    if needed <= available:
        return
    total = allocator.num_blocks[PRIMARY]
    preempt = _whom_to_preempt(allocator, sequences, needed - available, wanted)
    busy = allocator.num_unreferenced_busy[PRIMARY]
    if len(sequences) == 1 and asking.issuperset(preempt) and not busy:
        preempt = []  # once it is admitted again it would only get this far again
    remedy = (f"pre-empt requests {preempt}" if preempt else
              f"try again when {busy} blocks are free that a file is being read into" if busy and needed <= total else
              f"enlarge primary (now {total} blocks of {allocator.tokens_per_block} tokens) or send fewer tokens")
    raise CapacityError(f"{what}: {needed} primary blocks needed, {available} available of {total}; {remedy}", needed, available, preempt)


def free_beside(allocator: BlockAllocator, wanted: set[int]) -> int:
    """Free primary blocks beside the ``wanted`` ones."""
    blocks = allocator.blocks
    held = sum(1 for block_id in wanted if blocks[block_id].queue != NOT_QUEUED and level_of(blocks[block_id].index) == PRIMARY)
    return allocator.queues.num_free(PRIMARY) - held


def _whom_to_preempt(allocator: BlockAllocator, sequences: dict[int, ActiveSequence], missing: int, wanted: set[int]) -> list[int]:
    """Sequences, newest first, whose end frees ``missing`` blocks that are not ``wanted``; none when all of them would not."""
    references: dict[int, int] = {}  # that are left: a shared block is free when the last of its sequences has ended
    preempt: list[int] = []
    for sequence in sorted(sequences.values(), key=_admission_order, reverse=True):
        preempt.append(sequence.id)
        for block in sequence.blocks:
            left = references.get(block.id, block.ref_count) - 1
            references[block.id] = left
            if left == 0 and block.id not in wanted and not allocator.is_busy(block):
                missing -= 1
        if missing <= 0:
            return preempt
    return []


def _admission_order(sequence: ActiveSequence) -> int:
    return sequence.order

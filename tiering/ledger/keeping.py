"""How a request's retention reaches its blocks: those it takes, and those it matches (design: public names, ``RetentionConfig``)."""

from __future__ import annotations

from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.tiering.ledger.allocator import ALREADY_EXPIRED, BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.request import Request


def take_for(allocator: BlockAllocator, request: Request, position: int, priority: int = DEFAULT_PRIORITY, duration: float = 0.0) -> Block:
    """A referenced primary block for the prompt block at ``position``, with the request's retention or else the given one."""
    block = allocator.take(DEFAULT_PRIORITY, 0.0)
    set_retention(allocator, request, position, block, priority, duration)
    block.ref_count = 1
    return block


def take_run_for(allocator: BlockAllocator, request: Request, first: int, end: int) -> list[Block]:
    """Referenced primary blocks for the prompt blocks ``first`` to ``end - 1``, with the request's retention."""
    return [take_for(allocator, request, position) for position in range(first, end)]


def set_retention(allocator: BlockAllocator, request: Request, position: int, block: Block, priority: int, duration: float) -> None:
    """Retention of a block that is in no queue and in no tree; ``priority`` and ``duration`` apply where the request says nothing."""
    asked: int | None = None
    lifetime: float | None = None
    if request.retention is not None:
        asked, lifetime = request.retention.for_position(position * allocator.tokens_per_block)
    block.priority = priority if asked is None else asked
    block.duration = duration if asked is None else duration_of(allocator, lifetime)
    block.expires_at = 0.0


def apply_retention(allocator: BlockAllocator, request: Request, position: int, block: Block) -> None:
    """A match may raise or lower the priority of what it matched. A duration is always replaced; a moment at which the priority ends
    only by a request that says something else about the block."""
    priority: int | None = None
    lifetime: float | None = None
    if request.retention is not None:
        priority, lifetime = request.retention.for_position(position * allocator.tokens_per_block)
    if priority is not None:
        change_priority(allocator, block, priority)
    if priority is not None or block.duration > 0.0:
        block.duration = duration_of(allocator, lifetime)
    block.expires_at = 0.0


def duration_of(allocator: BlockAllocator, lifetime: float | None) -> float:
    """A range's lifetime as queues count it: wall-clock moments (negative) on the clock of releases, where 0.0 means for ever."""
    if lifetime is None:
        return 0.0
    return lifetime if lifetime > 0.0 else -max(-lifetime - allocator.wall_clock_offset, ALREADY_EXPIRED)


def change_priority(allocator: BlockAllocator, block: Block, priority: int) -> None:
    """Set a block's priority and tell subscribers; the caller re-queues it if it is in a queue."""
    if block.priority != priority:
        if allocator.events.enabled and block.node is not None:
            allocator.events.priority_changed(allocator.group, block.node.run, block.position, block.priority, priority)
        block.priority = priority

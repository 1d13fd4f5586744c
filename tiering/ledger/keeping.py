"""How a request's retention reaches its blocks: those it takes, and those it matches (design: public names, ``RetentionConfig``)."""

from __future__ import annotations

from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.request import Request


def take_for(allocator: BlockAllocator, request: Request, position: int, priority: int = DEFAULT_PRIORITY, duration: float = 0.0) -> Block:
    """A referenced primary block for the prompt block at ``position``, with the request's retention or else the given one."""
    block = allocator.take(DEFAULT_PRIORITY, 0.0)
    set_retention(allocator.tokens_per_block, request, position, block, priority, duration)
    block.ref_count = 1
    return block


def take_run_for(allocator: BlockAllocator, request: Request, first: int, end: int) -> list[Block]:
    """Referenced primary blocks for the prompt blocks ``first`` to ``end - 1``, with the request's retention."""
    return [take_for(allocator, request, position) for position in range(first, end)]


def set_retention(tokens_per_block: int, request: Request, position: int, block: Block, priority: int, duration: float) -> None:
    """Retention of a block that is in no queue and in no tree; ``priority`` and ``duration`` apply where the request says nothing."""
    asked: int | None = None
    asked_duration: float | None = None
    if request.retention is not None:
        asked, asked_duration = request.retention.for_position(position * tokens_per_block)
    block.priority = priority if asked is None else asked
    block.duration = duration if asked is None else asked_duration or 0.0
    block.expires_at = 0.0


def apply_retention(allocator: BlockAllocator, request: Request, position: int, block: Block) -> None:
    """A match may raise or lower the priority of what it matched; a duration is always replaced."""
    priority: int | None = None
    duration: float | None = None
    if request.retention is not None:
        priority, duration = request.retention.for_position(position * allocator.tokens_per_block)
    if priority is not None:
        change_priority(allocator, block, priority)
    block.duration = duration or 0.0
    block.expires_at = 0.0


def change_priority(allocator: BlockAllocator, block: Block, priority: int) -> None:
    """Set a block's priority and tell subscribers; the caller re-queues it if it is in a queue."""
    if block.priority != priority:
        allocator.publish_priority(block, block.priority, priority)
        block.priority = priority

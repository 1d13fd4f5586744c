"""How a request's retention reaches its blocks: those it takes, and those it matches (design: public names, ``RetentionConfig``)."""

from __future__ import annotations

from typing import Final, cast

from kvtier.policies.retention import DEFAULT_PRIORITY, RetentionConfig
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.file_level import ALREADY_EXPIRED
from kvtier.tiering.ledger.moves import MoveLog
from kvtier.tiering.ledger.request import Request

FAR_AWAY: Final = 1 << 62  # behind the end of every prompt


def use_path_of(moves: MoveLog, request: Request) -> None:
    """Moves that are decided from now on are on behalf of this request, and travel as it has chosen."""
    retention = request.retention
    if retention is not None:
        moves.use_path(retention.transfer_mode.value, retention.directory or "")


def asked_for(request: Request, position: int, tokens_per_block: int) -> tuple[int | None, float | None]:
    """(priority, lifetime) that a request asks for its block at ``position``: that of a range up to the end of the prompt, and behind it
    that of generated tokens; (None, None) where it says nothing."""
    retention = request.retention
    if retention is None:
        return None, None
    token = position * tokens_per_block
    if token >= request.num_tokens:
        return cast(int, retention.decode_priority), retention.decode_duration_seconds
    return retention.for_position(token)


def take_for(allocator: BlockAllocator, request: Request, position: int, priority: int = DEFAULT_PRIORITY, duration: float = 0.0) -> Block:
    """A referenced primary block for the block at ``position``, with the request's retention or else the given one."""
    block = allocator.take(DEFAULT_PRIORITY, 0.0)
    set_retention(allocator, request, position, block, priority, duration)
    block.ref_count = 1
    return block


def take_run_for(allocator: BlockAllocator, request: Request, first: int, end: int) -> list[Block]:
    """Referenced primary blocks for the blocks ``first`` to ``end - 1``, with the request's retention."""
    if request.retention is None:
        return allocator.take_many(end - first, DEFAULT_PRIORITY, 0.0) if end > first else []
    taken: list[Block] = []
    position = first
    while position < end:
        until = min(_end_of_run(request, request.retention, position, allocator.tokens_per_block), end)
        priority, lifetime = asked_for(request, position, allocator.tokens_per_block)
        duration = duration_of(allocator, lifetime)
        taken.extend(allocator.take_many(until - position, DEFAULT_PRIORITY if priority is None else priority, duration))
        position = until
    return taken


def _end_of_run(request: Request, retention: RetentionConfig, position: int, tokens_per_block: int) -> int:
    """The first block behind ``position`` whose retention may be another one: a range begins or ends before its first token, or the
    prompt ends."""
    start = position * tokens_per_block
    if start >= request.num_tokens:
        return FAR_AWAY
    end = request.num_tokens
    for token_range in retention.ranges:
        if token_range.start > start:
            end = min(end, token_range.start)
        elif token_range.end is not None and token_range.end > start:
            end = min(end, token_range.end)
    return (end + tokens_per_block - 1) // tokens_per_block


def set_retention(allocator: BlockAllocator, request: Request, position: int, block: Block, priority: int, duration: float) -> None:
    """Retention of a block that is in no queue and in no tree; ``priority`` and ``duration`` apply where the request says nothing."""
    asked, lifetime = asked_for(request, position, allocator.tokens_per_block)
    block.priority = priority if asked is None else asked
    block.duration = duration if asked is None else duration_of(allocator, lifetime)
    block.expires_at = 0.0


def apply_retention(allocator: BlockAllocator, request: Request, position: int, block: Block) -> None:
    """A match may raise or lower the priority of what it matched. A duration is always replaced; a moment at which the priority ends
    only by a request that says something else about the block."""
    priority, lifetime = asked_for(request, position, allocator.tokens_per_block)
    if priority is not None:
        change_priority(allocator, block, priority)
    if priority is not None or block.duration > 0.0:
        block.duration = duration_of(allocator, lifetime)
    block.expires_at = 0.0


def apply_retention_to_row(allocator: BlockAllocator, request: Request, row: list[Block]) -> None:
    """:func:`apply_retention` for the handles that a request matched in one group, from its first block on."""
    if request.retention is not None:
        for position, block in enumerate(row):
            if block.id >= 0:
                apply_retention(allocator, request, position, block)
        return
    for block in row:
        if block.extra is not None:  # otherwise it has no duration
            block.duration = min(block.duration, 0.0)
            block.expires_at = 0.0


def duration_of(allocator: BlockAllocator, lifetime: float | None) -> float:
    """A range's lifetime as queues count it: wall-clock moments (negative) on the clock of releases, where 0.0 means for ever."""
    if lifetime is None:
        return 0.0
    return lifetime if lifetime > 0.0 else -max(-lifetime - allocator.wall_clock_offset, ALREADY_EXPIRED)


def change_priority(allocator: BlockAllocator, block: Block, priority: int) -> None:
    """Set a block's priority and tell subscribers; the caller re-queues it if it is in a queue."""
    if block.priority != priority:
        allocator.publish_priority(block, block.priority, priority)
        block.priority = priority

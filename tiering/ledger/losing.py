"""What a failed Move costs: its content, and the way back of everybody who counted on it (design: all or nothing)."""

from __future__ import annotations

from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import CROSS, RECURRENT, WINDOW
from kvtier.tiering.ledger.keeping import take_for
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState


def lose(state: LedgerState, group: int, block: Block) -> None:
    """The block's bytes never arrived: out of the tree, and every sequence that holds it goes back to the tokens before it."""
    allocator = state.allocators[group]
    if block.node is not None:
        allocator.publish_removed(block)
        state.tree.detach(block, group)
    allocator.drop_backings(block)
    for sequence in state.sequences.values():
        row = sequence.rows[group]
        position = _position_of(row, block)
        if position >= 0:
            _fall_back(state, sequence, position, state.geometries[group].kind == RECURRENT and position == len(row.blocks) - 1)
    allocator.end_call()
    if block.ref_count == 0 and not allocator.is_busy(block):
        allocator.queues.claim(block)
        allocator.queues.add_empty_first(block, level_of(block.index))


def _position_of(row: SequenceRow, block: Block) -> int:
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        if block in blocks:
            return blocks.index(block)
    return -1


def _fall_back(state: LedgerState, sequence: ActiveSequence, lost: int, is_running_state: bool) -> None:
    """Back to the longest prefix that every group still has. What was reused behind it is exchanged for private blocks, in every
    group: the engine will compute it again. A running state starts again as a copy of the one kept at the end of that prefix."""
    left = lost
    if is_running_state:
        left = min(left, (sequence.computed - 1) // state.tokens_per_block)  # not where it was: a copy that fails is not tried for ever
    if state.has_recurrent or sequence.computed > lost * state.tokens_per_block:
        left = min(left, sequence.computed // state.tokens_per_block) if state.has_recurrent else left
        while left > 0 and not _has_prefix(state, sequence, left):
            left -= 1
    left = max(left, 0)
    sequence.computed = min(sequence.computed, left * state.tokens_per_block)
    sequence.valid = min(sequence.valid, sequence.computed)
    sequence.must_report = True
    end = max(sequence.num_prefix_blocks, lost + 1)
    for row in sequence.rows:
        if state.geometries[row.group].kind != CROSS and not _make_private(state, sequence, row, left, end):
            sequence.must_preempt = True
            return
    if left > 0:
        for row in sequence.rows:
            if state.geometries[row.group].kind == RECURRENT:
                _start_from_kept(state, row, left - 1)
    sequence.num_prefix_blocks = min(sequence.num_prefix_blocks, left)


def _has_prefix(state: LedgerState, sequence: ActiveSequence, num_blocks: int) -> bool:
    """Whether the sequence holds what the token behind its first blocks reads, in every group."""
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == RECURRENT:
            if num_blocks == len(row.blocks) or row.blocks[num_blocks - 1].id < 0:
                return False
        elif geometry.kind == WINDOW:
            first = geometry.num_sink_blocks + geometry.num_departed(num_blocks * state.tokens_per_block)
            for position in range(min(first, num_blocks), num_blocks):
                if row.blocks[position].id < 0:
                    return False
    return True


def _start_from_kept(state: LedgerState, row: SequenceRow, position: int) -> None:
    """Every beam's running state becomes a copy of the state kept at the end of this block."""
    copied: set[int] = set()
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        if blocks[-1].id not in copied:
            copied.add(blocks[-1].id)
            state.allocators[row.group].copy(blocks[position], blocks[-1], 0)


def _make_private(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, first: int, end: int) -> bool:
    """Private blocks for positions from ``first`` on that hold reused or lost content, or nothing any more. False: too few blocks."""
    allocator = state.allocators[row.group]
    geometry = state.geometries[row.group]
    for ids in row.departed_ids:
        del ids[max(first - geometry.num_sink_blocks, 0):]
    for position in range(first, len(row.blocks)):
        is_state_of_others = geometry.kind == RECURRENT and position < len(row.blocks) - 1 and not (
            state.reuse and geometry.keeps_state(position, sequence.request.num_tokens))
        for beam in range(len(row.other_beams) + 1):
            block = row.beam(beam)[position]
            is_missing = block.id < 0 and not is_state_of_others
            if not is_missing and (position >= end or block.id < 0 or (block.ref_count == 1 and block.node is None)):
                continue  # private already, never reused, or nothing is needed here
            replacement = allocator.placeholder
            if not is_state_of_others:
                if allocator.queues.num_free(PRIMARY) == 0:
                    return False
                replacement = take_for(allocator, sequence.request, position)
                replacement.ref_count = 0
            for other in range(beam, len(row.other_beams) + 1):  # beams that shared the old block share the new one
                blocks = row.beam(other)
                if blocks[position] is block:
                    blocks[position] = replacement
                    if replacement.id >= 0:
                        replacement.ref_count += 1
                    if block.id >= 0:
                        allocator.release(block)
    return True

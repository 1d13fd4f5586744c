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
    exchanges: list[list[Exchange]] = []
    for row in sequence.rows:
        exchanges.append(_exchanges(state, sequence, row, left, end))
        if not _is_room(state, row, exchanges[-1]):
            sequence.must_preempt = True
            return
    for row in sequence.rows:
        _make_private(state, sequence, row, left, exchanges[row.group])
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


class Exchange:
    """A handle to be exchanged at one position by the beams ``holders``: for a private block, or for a placeholder where the group
    needs none there."""

    def __init__(self, position: int, block: Block, holders: list[int], needs_block: bool) -> None:
        self.position = position
        self.block = block
        self.holders = holders
        self.needs_block = needs_block


def _exchanges(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, first: int, end: int) -> list[Exchange]:
    """Positions from ``first`` on that hold reused or lost content, or nothing any more. Beams that share a handle go on sharing."""
    found: list[Exchange] = []
    geometry = state.geometries[row.group]
    if geometry.kind == CROSS:
        return found
    num_beams = len(row.other_beams) + 1
    for position in range(first, len(row.blocks)):
        is_prompt = (position + 1) * state.tokens_per_block <= sequence.request.num_tokens
        needs_block = geometry.kind != RECURRENT or position == len(row.blocks) - 1 or (
            state.reuse and geometry.keeps_state(position, sequence.request.num_tokens) and (is_prompt or num_beams == 1))
        by_handle: list[Exchange] = []
        for beam in range(num_beams):
            block = row.beam(beam)[position]
            known = None
            for exchange in by_handle:
                if exchange.block is block and (block.id >= 0 or is_prompt):  # beams differ in what they generated
                    known = exchange
            if known is None:
                by_handle.append(Exchange(position, block, [beam], needs_block))
            else:
                known.holders.append(beam)
        for exchange in by_handle:
            block = exchange.block
            if block.id < 0:
                if needs_block:
                    found.append(exchange)
            elif position < end and (block.node is not None or block.ref_count > len(exchange.holders)):
                found.append(exchange)
    return found


def _is_room(state: LedgerState, row: SequenceRow, exchanges: list[Exchange]) -> bool:
    """Whether every exchange finds a free block, those given back by the ones before included."""
    allocator = state.allocators[row.group]
    free = allocator.queues.free[PRIMARY]
    for exchange in exchanges:
        block = exchange.block
        if exchange.needs_block:
            if free == 0:
                return False
            free -= 1
        if block.id >= 0 and block.ref_count == len(exchange.holders) and not allocator.is_busy(block):
            free += 1
    return True


def _make_private(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, first: int, exchanges: list[Exchange]) -> None:
    """Carry the exchanges out, and forget that what has a block again had left the window."""
    allocator = state.allocators[row.group]
    for ids in row.departed_ids:
        del ids[max(first - state.geometries[row.group].num_sink_blocks, 0):]
    for exchange in exchanges:
        block = exchange.block
        replacement = allocator.placeholder
        if exchange.needs_block:
            replacement = take_for(allocator, sequence.request, exchange.position)
            replacement.ref_count = len(exchange.holders)
        for beam in exchange.holders:
            row.beam(beam)[exchange.position] = replacement
            if block.id >= 0:
                allocator.release(block)

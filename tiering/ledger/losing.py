"""What a failed Move costs: its content, and the way back of everybody who counted on it (design: all or nothing)."""

from __future__ import annotations

from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.chunks import most_in_prefill
from kvtier.tiering.ledger.group import CROSS, RECURRENT, WINDOW
from kvtier.tiering.ledger.keeping import take_for, use_path_of
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState


class Exchange:
    """A position of a row that gets another block, because the engine will write there again.

    Attributes:
        beams: who holds the old block at this position; they share the new one.
        is_optional: only the tree holds the old block too. It may leave the tree instead, when there are too few blocks.
        keeps_start: the old block's first tokens are still good; they are copied.
    """

    def __init__(self, position: int, old: Block, beams: list[int], is_optional: bool, keeps_start: bool) -> None:
        self.position = position
        self.old = old
        self.beams = beams
        self.is_optional = is_optional
        self.keeps_start = keeps_start


def lose(state: LedgerState, move: Move, lost: Block | None) -> None:
    """A Move has failed. ``lost``: the handle whose bytes never arrived, if it still is that Move's.

    It leaves the tree, with everything stored that was computed from it, and every sequence that holds any of this goes back to the
    tokens before it.
    """
    doomed: list[list[Block]] = [allocator.unconfirmed.failed(move.number) for allocator in state.allocators]
    for blocks in doomed:
        state.counters.dropped += len(blocks)
        state.counters.dropped_unconfirmed += len(blocks)
    if lost is not None and lost not in doomed[move.group]:
        doomed[move.group].append(lost)
    for group, blocks in enumerate(doomed):
        for block in blocks:
            _empty(state, group, block)
    ids: list[set[int]] = [{block.id for block in blocks} for blocks in doomed]
    for lease in state.leases.values():
        lease.note_lost(ids)
    for sequence in state.sequences.values():
        left = _tokens_before(state, sequence, ids, move.number)
        if left >= 0:
            use_path_of(state.moves, sequence.request)
            _fall_back(state, sequence, left, ids)
            state.moves.use_default_path()
    for allocator in state.allocators:
        allocator.end_call()


def _empty(state: LedgerState, group: int, block: Block) -> None:
    """The handle has no content any more."""
    allocator = state.allocators[group]
    if block.node is not None:
        allocator.publish_removed(block)
        state.tree.detach(block, group)
    allocator.drop_backings(block)
    if block.ref_count == 0 and not allocator.is_busy(block):
        allocator.queues.claim(block)
        allocator.give_back(block)


def _tokens_before(state: LedgerState, sequence: ActiveSequence, lost: list[set[int]], number: int) -> int:
    """Leading tokens of a sequence before the first block that is lost, or that it had of what Move ``number`` did not bring; -1 where
    nothing is."""
    left = -1
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        before = -1
        position = _first_of(row, lost[row.group])
        if position >= 0:
            before = geometry.first_token(position)
            if geometry.kind == CROSS:
                before = 0  # positions of the encoder's output: every token has read all of it, and the engine writes it before the first
            elif geometry.kind == RECURRENT and position == len(row.blocks) - 1:
                before = max(sequence.computed - 1, 0)
        for num_tokens, copy in row.state_copies:
            if copy.number == number:  # not back to where it was: a copy that fails is not tried for ever
                before = max(num_tokens - 1, 0) if before < 0 else min(before, max(num_tokens - 1, 0))
        for departed in row.left_behind:
            if number in departed.waits:
                state.allocators[row.group].unconfirmed.give_up(departed)
                token = geometry.first_token(departed.position)
                before = token if before < 0 else min(before, token)
        if before >= 0:
            left = before if left < 0 else min(left, before)
    return left


def _first_of(row: SequenceRow, ids: set[int]) -> int:
    """The first position at which a beam holds one of these blocks, -1 for none."""
    first = -1
    if ids:
        for beam in range(len(row.other_beams) + 1):
            for position, block in enumerate(row.beam(beam)):
                if block.id in ids:
                    first = position if first < 0 else min(first, position)
                    break
    return first


def _fall_back(state: LedgerState, sequence: ActiveSequence, left: int, lost: list[set[int]]) -> None:
    """Back to the longest prefix of at most ``left`` tokens that every group still has. The engine computes what is behind it again, so
    that there everything reused, stored or held by others is exchanged for private blocks. A running state starts again as a copy of the
    one kept at the end of that prefix."""
    sequence.must_report = True
    if left >= sequence.computed or sequence.must_preempt:
        return  # of what was computed, nothing is lost
    while left > 0 and not _has_prefix(state, sequence, left, lost):
        left = (left - 1) // state.tokens_per_block * state.tokens_per_block
    left = max(left, 0)
    sequence.computed = left
    sequence.valid = min(sequence.valid, left)
    sequence.num_prefix_blocks = min(sequence.num_prefix_blocks, left // state.tokens_per_block)
    sequence.must_cut = state.is_chunked  # not now: a step may be writing into its blocks
    for row in sequence.rows:
        for departed in row.left_behind:
            if state.geometries[row.group].first_token(departed.position) >= left:  # it will be computed
                state.allocators[row.group].unconfirmed.give_up(departed)
    exchanges = [_exchanges(state, sequence, row, left) for row in sequence.rows]
    for row in sequence.rows:
        needed = sum(1 for exchange in exchanges[row.group] if not exchange.is_optional)
        if needed > state.allocators[row.group].queues.num_free(PRIMARY):
            sequence.must_preempt = True
            return
        geometry = state.geometries[row.group]
        if sequence.must_cut and geometry.kind == WINDOW and state.allocators[row.group].num_blocks[PRIMARY] < most_in_prefill(
                geometry, state.rules.chunk_size, sequence.num_tokens, 0):
            sequence.must_preempt = True  # what it has generated was computed token by token; a chunk of it does not fit
            return
    for row in sequence.rows:
        _carry_out(state, sequence, row, exchanges[row.group])
        kind = state.geometries[row.group].kind
        if kind == WINDOW and left == 0 and not sequence.must_cut:
            row.departed_ids = []
        elif kind == RECURRENT:
            _forget_states(row, left // state.tokens_per_block, state)
            if left > 0:
                _start_from_kept(state, row, left // state.tokens_per_block - 1)


def _has_prefix(state: LedgerState, sequence: ActiveSequence, num_tokens: int, lost: list[set[int]]) -> bool:
    """Whether the sequence holds what the token behind its first ``num_tokens`` ones reads, in every group."""
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == RECURRENT:
            position = num_tokens // state.tokens_per_block - 1
            if num_tokens % state.tokens_per_block or position >= len(row.blocks) - 1:
                return False
            if row.blocks[position].id < 0 or row.blocks[position].id in lost[row.group]:
                return False
        elif geometry.kind == WINDOW and row.num_departed > geometry.num_departed(num_tokens + 1):
            return False
    return True


def _exchanges(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, num_tokens: int) -> list[Exchange]:
    """Where the row needs another block before the tokens behind its first ``num_tokens`` ones are written again."""
    geometry = state.geometries[row.group]
    found: list[Exchange] = []
    if geometry.kind == CROSS or not row.blocks or (geometry.kind == WINDOW and sequence.must_cut):
        return found
    first = geometry.num_blocks(num_tokens)
    if geometry.kind == RECURRENT:
        first = len(row.blocks) - 1  # only the running state; see _forget_states
    elif geometry.first_token(first) > num_tokens:
        first -= 1  # the first of them goes into the middle of a block
    num_beams = len(row.other_beams) + 1
    prompt_end = geometry.num_full_blocks(sequence.num_prompt_tokens)
    for position in range(first, len(row.blocks)):
        seen: list[Block] = []
        for beam in range(num_beams):
            block = row.beam(beam)[position]
            if block.id < 0 and position >= prompt_end:
                found.append(Exchange(position, block, [beam], False, False))  # beams have parted there
                continue
            if block in seen:
                continue
            seen.append(block)
            beams = [other for other in range(beam, num_beams) if row.beam(other)[position] is block]
            if block.id < 0:
                found.append(Exchange(position, block, beams, False, False))
            elif block.ref_count > len(beams) or block.node is not None:
                keeps_start = geometry.kind != RECURRENT and geometry.first_token(position) < num_tokens
                found.append(Exchange(position, block, beams, block.ref_count == len(beams), keeps_start))
    return found


def _carry_out(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, exchanges: list[Exchange]) -> None:
    allocator = state.allocators[row.group]
    still_needed = sum(1 for exchange in exchanges if not exchange.is_optional)
    for exchange in exchanges:
        old = exchange.old
        if exchange.is_optional:
            if allocator.queues.num_free(PRIMARY) <= still_needed:
                allocator.drop(old)
                continue
        else:
            still_needed -= 1
        new = take_for(allocator, sequence.request, exchange.position)
        new.ref_count = len(exchange.beams)
        if exchange.keeps_start:
            allocator.copy(old, new, 0)
            row.is_settled = False
        for beam in exchange.beams:
            row.beam(beam)[exchange.position] = new
            if old.id >= 0:
                allocator.release(old)


def _forget_states(row: SequenceRow, first: int, state: LedgerState) -> None:
    """States kept at the ends of blocks from ``first`` on that others count on stay theirs; the sequence keeps no second ones."""
    allocator = state.allocators[row.group]
    num_beams = len(row.other_beams) + 1
    for position in range(first, len(row.blocks) - 1):
        block = row.blocks[position]
        holders = sum(1 for beam in range(num_beams) if row.beam(beam)[position] is block)
        if block.id < 0 or (block.node is None and block.ref_count == holders):
            continue
        for beam in range(num_beams):
            kept = row.beam(beam)[position]
            if kept.id >= 0:
                row.beam(beam)[position] = allocator.placeholder
                allocator.release(kept)


def _start_from_kept(state: LedgerState, row: SequenceRow, position: int) -> None:
    """Every beam's running state becomes a copy of the state kept at the end of this block."""
    allocator = state.allocators[row.group]
    copied: set[int] = set()
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        if blocks[-1].id not in copied:
            copied.add(blocks[-1].id)
            blocks[-1].generation += 1  # an earlier Move into it that fails later has nothing to do with what is there then
            allocator.copy(blocks[position], blocks[-1], 0)
            row.note_state_copy((position + 1) * allocator.tokens_per_block, allocator.arriving[blocks[-1].index])

"""Growing and shrinking sequences token by token: append, rewind, and who may write into which block (design: ledger rules)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvtier.errors import RequestError
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.chunks import scratch_held
from kvtier.tiering.ledger.confirming import leave_behind, store
from kvtier.tiering.ledger.group import CROSS, RECURRENT, WINDOW
from kvtier.tiering.ledger.keeping import use_path_of
from kvtier.tiering.ledger.room import NOTHING_WANTED, require_room
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow, check_token, require_no_drafts
from kvtier.tiering.ledger.state import LedgerState


def append_step(state: LedgerState, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
    """Append sampled tokens to several sequences at once; what comes before the newest token counts as computed.

    A sequence with several beams gets one token for each beam; one with one beam any number.

    Raises:
        RequestError: a token outside int32, an id twice, lists of different length, not one token for each beam, pending drafts, a prompt
            that has not got the blocks of its last chunk.
        UnknownRequest: no such sequence.
        CapacityError: too few free primary blocks; nothing was appended to anybody.
    """
    if len(ids) != len(tokens):
        raise RequestError(f"{len(ids)} ids and {len(tokens)} token lists; pass one list for each id")
    if len(set(ids)) != len(ids):
        raise RequestError(f"ids={list(ids)}: an id is given twice")
    needed = [0] * len(state.groups)
    batch: list[ActiveSequence] = []
    for number in range(len(ids)):
        request_id = ids[number]
        appended = tokens[number]
        sequence = state.sequence(request_id)
        require_reported(sequence)
        if sequence.drafts is not None:
            require_no_drafts(sequence, "append")
        for place in range(len(appended)):
            check_token(request_id, appended[place])
        batch.append(sequence)
        if not appended:
            continue
        require_blocks_for_all(state, sequence, "append")
        if state.is_single and not sequence.rows[0].other_beams:
            needed[0] += _needed_by_one(sequence, len(appended), state.tokens_per_block)
            continue
        beams = sequence.beam_width
        if beams > 1 and len(appended) != beams:
            raise RequestError(f"request {request_id}: {len(appended)} tokens for {beams} beams; append one token for each beam")
        count = len(appended) if beams == 1 else 1
        for row in sequence.rows:
            needed[row.group] += _needed(state, sequence, row, count)
    for group, count in enumerate(needed):
        if count > state.allocators[group].queues.num_free(0):
            asking = {sequence.id: _needed_by_each(state, sequence, tokens[number]) for number, sequence in enumerate(batch)}
            require_room(state, needed, NOTHING_WANTED, f"one more step of requests {list(ids)}", asking)
    if state.has_window:
        for sequence, appended in zip(batch, tokens, strict=True):
            if appended:
                leave_windows(state, sequence)  # of the whole batch, before anybody takes a block: the room was counted so
    for number in range(len(batch)):
        sequence = batch[number]
        appended = tokens[number]
        if not appended:
            continue
        if state.is_single and not sequence.rows[0].other_beams:
            _append_to_one(state, sequence, appended)
        else:
            use_path_of(state.moves, sequence.request)
            _append(state, sequence, appended if sequence.beam_width == 1 else appended[:1])
            state.moves.use_default_path()


def _needed_by_each(state: LedgerState, sequence: ActiveSequence, appended: Sequence[int]) -> list[int]:
    """Blocks of each group that appending these tokens to one sequence takes."""
    needed = [0] * len(state.groups)
    if appended:
        for row in sequence.rows:
            needed[row.group] = _needed(state, sequence, row, len(appended) if sequence.beam_width == 1 else 1)
    return needed


def _needed_by_one(sequence: ActiveSequence, count: int, tokens_per_block: int) -> int:
    """:func:`_needed` for the common case: one full-attention group, one beam."""
    blocks = sequence.rows[0].blocks
    num_tokens = sequence.keys.num_tokens
    needed = (num_tokens + count + tokens_per_block - 1) // tokens_per_block - len(blocks)
    if num_tokens % tokens_per_block and blocks[-1].ref_count > 1:
        needed += 1
    return needed


def _append_to_one(state: LedgerState, sequence: ActiveSequence, appended: Sequence[int]) -> None:
    """:func:`_append` for the common case: one full-attention group, one beam."""
    keys = sequence.keys
    row = sequence.rows[0]
    blocks = row.blocks
    tokens_per_block = state.tokens_per_block
    if keys.num_tokens % tokens_per_block:
        last = blocks[-1]
        if last.ref_count > 1 or last.node is not None:
            use_path_of(state.moves, sequence.request)
            make_writable(state, row, 0, len(blocks) - 1)
            state.moves.use_default_path()
    for place in range(len(appended)):
        keys.append(appended[place])
    num_tokens = keys.num_tokens
    if len(blocks) * tokens_per_block < num_tokens:
        priority, duration = decode_retention(sequence)
        use_path_of(state.moves, sequence.request)
        blocks.extend(state.allocators[0].take_many((num_tokens + tokens_per_block - 1) // tokens_per_block - len(blocks), priority,
                                                    duration))
        state.moves.use_default_path()
    sequence.computed = num_tokens - 1


def decode_retention(sequence: ActiveSequence) -> tuple[int, float]:
    """Priority and duration of blocks that generated tokens take."""
    retention = sequence.request.retention
    if retention is None:
        return DEFAULT_PRIORITY, 0.0
    return cast(int, retention.decode_priority), retention.decode_duration_seconds or 0.0


def _needed(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, count: int) -> int:
    """Blocks of one group that appending ``count`` positions takes, less those that leave the window by it."""
    geometry = state.geometries[row.group]
    num_tokens = sequence.num_tokens
    needed = 0
    if geometry.kind == CROSS:
        return 0
    new_positions = geometry.num_blocks(num_tokens + count) - len(row.blocks)
    if geometry.kind == RECURRENT:
        if new_positions and _is_snapshot(state, sequence, row, num_tokens, count):
            return 1
        return _num_tail_copies(row)
    needed = new_positions * (len(row.other_beams) + 1)
    if _has_open_tail(state, row, num_tokens):
        needed += _num_tail_copies(row)
    if geometry.kind == WINDOW:
        first = geometry.num_sink_blocks + row.num_departed
        end = min(geometry.num_sink_blocks + geometry.num_departed(num_tokens + 1), len(row.blocks))
        allocator = state.allocators[row.group]
        for position in range(first, end):
            leaving: list[Block] = []
            for beam in range(len(row.other_beams) + 1):
                block = row.beam(beam)[position]
                if block not in leaving and block.ref_count == _num_holders(row, position, block) and not allocator.is_busy(block):
                    leaving.append(block)
            needed -= len(leaving)
    return needed


def num_tail_copies(state: LedgerState, sequence: ActiveSequence, group: int) -> int:
    """Blocks of a group that the next token takes because what it is written into is shared: by beams, or with a lease."""
    row = sequence.rows[group]
    kind = state.geometries[group].kind
    if kind == CROSS or (kind != RECURRENT and not _has_open_tail(state, row, sequence.num_tokens)):
        return 0
    return _num_tail_copies(row)


def _num_tail_copies(row: SequenceRow) -> int:
    """Copies of last blocks until each beam can write into its own: the last of those who share a block needs none."""
    if not row.other_beams:
        return 1 if row.blocks[-1].ref_count > 1 else 0
    holders: dict[int, int] = {}
    references: dict[int, int] = {}
    for beam in range(len(row.other_beams) + 1):
        last = row.beam(beam)[-1]
        holders[last.id] = holders.get(last.id, 0) + 1
        references[last.id] = last.ref_count
    copies = 0
    for block_id, count in holders.items():
        copies += count if references[block_id] > count else count - 1
    return copies


def _append(state: LedgerState, sequence: ActiveSequence, appended: Sequence[int]) -> None:
    old = sequence.num_tokens
    if sequence.beam_width > 1 and old == sequence.num_prompt_tokens:
        _copy_tail_to_beams(state, sequence)
    for token in appended:
        sequence.keys.append(token)
    priority, duration = decode_retention(sequence)
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        total = geometry.num_blocks(sequence.num_tokens)
        if geometry.kind == RECURRENT:
            _carry_state_on(state, sequence, row, old, total, priority, duration)
            continue
        allocator = state.allocators[row.group]
        has_open_tail = _has_open_tail(state, row, old)  # of all beams: asked before the first one grows
        for beam in range(len(row.other_beams) + 1):
            blocks = row.beam(beam)
            if has_open_tail:
                make_writable(state, row, beam, len(blocks) - 1)
            while len(blocks) < total:
                block = allocator.take(priority, duration)
                block.ref_count = 1
                blocks.append(block)
    sequence.computed = sequence.num_tokens - 1
    sequence.covered = sequence.num_tokens


def leave_windows(state: LedgerState, sequence: ActiveSequence) -> None:
    """Before tokens are appended: let go of what the first of them no longer reads, and store it before, while it is there. All tokens
    up to here are computed: the append says so."""
    is_stored = False
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind != WINDOW:
            continue
        num_departed = geometry.num_departed(sequence.num_tokens + 1)
        if num_departed > row.num_departed and not is_stored:
            computed = sequence.computed  # for a running state it matters later what the engine itself has said
            sequence.computed = sequence.num_tokens
            store(state, sequence, False)
            sequence.computed = computed
            is_stored = True
        depart(state, row, num_departed)


def depart(state: LedgerState, row: SequenceRow, num_departed: int) -> None:
    """Let blocks that have left the window go. What is stored of them stays where it can be found, until somebody takes the block."""
    first = row.num_departed
    if num_departed <= first:
        return
    allocator = state.allocators[row.group]
    geometry = state.geometries[row.group]
    scratch = scratch_held(geometry, row)
    while len(row.departed_ids) < len(row.other_beams) + 1:
        row.departed_ids.append([])
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        for position in range(geometry.num_sink_blocks + first, geometry.num_sink_blocks + num_departed):
            block = blocks[position]
            row.departed_ids[beam].append(block.id)
            if block.id >= 0:
                blocks[position] = allocator.placeholder
                if block.duration > 0.0:  # it would count from now on; a moment stays
                    block.duration = 0.0
                block.expires_at = 0.0
                if allocator.arriving or allocator.unconfirmed.by_move:
                    leave_behind(state, row, position, block)
                allocator.release(block)
                if block.queue != NOT_QUEUED and not block.has_content:  # like everything that leaves a window, to the back
                    allocator.queues.claim(block)
                    allocator.queues.add_empty_last(block, PRIMARY)
    state.scratch_used[row.group] -= scratch - scratch_held(geometry, row)


def _has_open_tail(state: LedgerState, row: SequenceRow, num_tokens: int) -> bool:
    """Whether the next token goes into a block that there is already."""
    return state.geometries[row.group].next_place(num_tokens) < len(row.blocks) * state.tokens_per_block


def _copy_tail_to_beams(state: LedgerState, sequence: ActiveSequence) -> None:
    """The prompt was computed once, into the first beam's unfilled last block: every other beam continues from a copy."""
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS or not row.blocks:
            continue
        num_tokens = 0 if geometry.kind == RECURRENT else geometry.next_place(sequence.num_tokens) % state.tokens_per_block
        allocator = state.allocators[row.group]
        first = row.blocks[-1]
        for blocks in row.other_beams:
            if blocks[-1] is not first:
                allocator.copy(first, blocks[-1], num_tokens)
                row.is_settled = False
                if geometry.kind == RECURRENT:
                    row.note_state_copy(sequence.num_tokens, allocator.arriving[blocks[-1].index])


def _is_snapshot(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, num_tokens: int, count: int) -> bool:
    """Whether the running state is at a point that is kept: the next token starts a block, and this many tokens are a snapshot.

    When several tokens are appended at once, the state has moved on with them already, unless the engine said that it has not.
    """
    if count > 1 and sequence.computed != num_tokens:
        return False
    if not state.reuse or num_tokens % state.tokens_per_block or sequence.request.skip_write or sequence.beam_width > 1:
        return False
    return state.geometries[row.group].keeps_state(num_tokens // state.tokens_per_block - 1, sequence.num_prompt_tokens)


def _carry_state_on(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, old: int, total: int, priority: int,
                    duration: float) -> None:
    """The running state always stands in the last block: the same handle moves on, unless its content has to stay for others."""
    allocator = state.allocators[row.group]
    new_positions = total - len(row.blocks)
    stays = new_positions > 0 and _is_snapshot(state, sequence, row, old, sequence.num_tokens - old)
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        running = blocks[-1]
        following = running
        if running.ref_count > 1 or stays:
            following = allocator.take(priority, duration)
            following.ref_count = 1
            allocator.copy(running, following, 0)
            row.note_state_copy(old, allocator.arriving[following.index])
        if not stays:
            blocks[-1] = allocator.placeholder
            if following is not running:
                allocator.release(running)
        if new_positions == 0:
            blocks[-1] = following
            continue
        while len(blocks) < total - 1:
            blocks.append(allocator.placeholder)
        blocks.append(following)


def rewind(state: LedgerState, request_id: Any, num_tokens: Any) -> None:
    """Take back the last ``num_tokens`` generated tokens (rejected drafts). A block that was cut leaves the tree.

    Raises:
        RequestError: more than was generated, or further back than a window or a running state can go; pending drafts.
        CapacityError: the cut block is shared and no primary block is free for a private copy; nothing has changed.
    """
    sequence = state.sequence(request_id)
    require_no_drafts(sequence, "rewind")
    generated = sequence.num_tokens - sequence.num_prompt_tokens
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= generated:
        raise RequestError(f"request {request_id}: rewind({num_tokens!r}); it has generated {generated} tokens and the prompt stays")
    if num_tokens == 0:
        return
    require_blocks_for_all(state, sequence, "rewind")
    left = sequence.num_tokens - num_tokens
    needed = [0] * len(state.groups)
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        if geometry.kind == RECURRENT:
            raise RequestError(f"request {request_id}: rewind({num_tokens}); group {row.group} keeps one running state, which cannot be "
                               "taken back; remove the sequence and admit it again, it resumes from the last snapshot")
        if geometry.num_departed(left + 1) < row.num_departed:
            most = 0
            while geometry.num_departed(sequence.num_tokens - most) >= row.num_departed:
                most += 1
            raise RequestError(f"request {request_id}: rewind({num_tokens}); the window of group {row.group} has moved on, at most {most} "
                               "tokens can be taken back")
        last = geometry.num_blocks(left) - 1
        for beam in range(len(row.other_beams) + 1):
            if _is_cut(state, row, left) and row.beam(beam)[last].ref_count > _num_holders(row, last, row.beam(beam)[last]):
                needed[row.group] += 1
    if max(needed) > 0:
        require_room(state, needed, NOTHING_WANTED, f"a private copy for request {request_id}")
    sequence.keys.truncate(left)
    sequence.computed = min(sequence.computed, left)
    sequence.covered = left
    sequence.valid = min(sequence.valid, sequence.computed)
    use_path_of(state.moves, sequence.request)
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        last = geometry.num_blocks(left) - 1
        for beam in range(len(row.other_beams) + 1):
            blocks = row.beam(beam)
            while len(blocks) > last + 1:
                state.allocators[row.group].release(blocks.pop())
            if _is_cut(state, row, left):
                holders = _num_holders(row, last, blocks[last])
                if holders == 1 or blocks[last].ref_count > holders:  # beams may go on sharing it until one of them writes
                    make_writable(state, row, beam, last)
    state.moves.use_default_path()


def _is_cut(state: LedgerState, row: SequenceRow, num_tokens: int) -> bool:
    return state.geometries[row.group].next_place(num_tokens) % state.tokens_per_block != 0


def _num_holders(row: SequenceRow, position: int, block: Block) -> int:
    """How many of the sequence's beams hold the block at this position."""
    count = 0
    for beam in range(len(row.other_beams) + 1):
        blocks = row.beam(beam)
        if len(blocks) > position and blocks[position] is block:
            count += 1
    return count


def make_writable(state: LedgerState, row: SequenceRow, beam: int, position: int) -> Block:
    """Whatever writes into a block first drops its key, node and backings; a shared block is copied first."""
    allocator = state.allocators[row.group]
    blocks = row.beam(beam)
    block = blocks[position]
    if block.ref_count > 1:
        private = allocator.take(block.priority, block.duration)
        private.ref_count = 1
        allocator.copy(block, private, 0)
        row.is_settled = False
        allocator.release(block)
        blocks[position] = private
        return private
    if block.node is not None:
        allocator.drop(block)
    return block


def require_blocks_for_all(state: LedgerState, sequence: ActiveSequence, verb: str) -> None:
    """Raise RequestError while chunks of the sequence are left for which its window groups have no blocks yet."""
    if state.is_chunked and sequence.covered < sequence.num_tokens:
        raise RequestError(f"request {sequence.id}: {verb} with blocks for the first {sequence.covered} of {sequence.num_tokens} tokens; "
                           f"compute the others first, in chunks of {state.rules.chunk_size}, and say so with mark_computed")


def require_reported(sequence: ActiveSequence) -> None:
    """An engine that does not know of a failed read computes on tokens that are not there: refuse what it says about them."""
    if sequence.must_preempt:
        raise RequestError(f"request {sequence.id}: a block whose read failed could not be replaced; remove this sequence and admit it "
                           "again")
    if sequence.must_report:
        raise RequestError(f"request {sequence.id}: a read failed and {sequence.valid} of {sequence.prepopulated} reused tokens are left; "
                           "wait until it is ready and compute from there")

"""Chunked prefill over windows: rows that grow chunk by chunk, and sequences that wait for the next one (design: sliding windows).

A sequence whose next chunk finds no scratch or no free blocks is *paused*: nothing fails, and it goes on when others have computed
theirs. Among those that wait for scratch the one that has waited longest is served first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tiering.ledger.chunks import chunk_end, scratch_held, scratch_span
from kvtier.tiering.ledger.confirming import store
from kvtier.tiering.ledger.decoding import depart
from kvtier.tiering.ledger.group import WINDOW, GroupGeometry
from kvtier.tiering.ledger.keeping import take_for, take_run_for, use_path_of
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState


def start(state: LedgerState, sequence: ActiveSequence) -> None:
    """A new sequence, whose window rows hold what it reuses: give it its first chunk, or let it wait."""
    sequence.covered = sequence.computed
    _go_on(state, sequence)


def advance(state: LedgerState, sequence: ActiveSequence) -> None:
    """What was computed may move the windows on, and when that was all there are blocks for, the next chunk is due."""
    _leave_windows(state, sequence)
    if sequence.computed == sequence.covered < sequence.num_tokens and sequence.id not in state.paused:
        _go_on(state, sequence)


def pause(state: LedgerState, sequence: ActiveSequence) -> None:
    """Let a sequence wait for its next chunk, if it needs one."""
    if sequence.computed == sequence.covered < sequence.num_tokens and sequence.id not in state.paused:
        state.paused[sequence.id] = sequence


def resume(state: LedgerState, ids: Sequence[int]) -> None:
    """Give the paused ones of these sequences their next chunks, as far as they fit, longest wait first."""
    closed = [False] * len(state.groups)
    wanted = set(ids)
    for sequence in list(state.paused.values()):
        if sequence.id in wanted and not sequence.must_report and not sequence.must_preempt:
            _leave_windows(state, sequence)
            _extend(state, sequence, closed)


def cut_back(state: LedgerState, sequence: ActiveSequence) -> None:
    """The engine hears of a loss: window rows end with what is still computed, and the sequence goes on from there chunk by chunk."""
    sequence.must_cut = False
    num_tokens = sequence.computed
    forget(state, sequence)
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind != WINDOW:
            continue
        keep = geometry.num_blocks(num_tokens)
        for beam in range(len(row.other_beams), -1, -1):
            blocks = row.beam(beam)
            state.allocators[row.group].release_many(blocks[keep:])
            del blocks[keep:]
        if num_tokens == 0:
            row.departed_ids = []
    sequence.covered = num_tokens
    pause(state, sequence)


def forget(state: LedgerState, sequence: ActiveSequence) -> None:
    """Give back a sequence's scratch, and its place among the waiting."""
    for row in sequence.rows:
        state.scratch_used[row.group] -= scratch_held(state.geometries[row.group], row)
        row.scratch_begin = row.scratch_end = 0
    state.paused.pop(sequence.id, None)


def _go_on(state: LedgerState, sequence: ActiveSequence) -> None:
    # Whoever came before is served first: at the next step, so that one who has just computed a chunk cannot always be quicker.
    if state.paused or not _extend(state, sequence, [False] * len(state.groups)):
        state.paused[sequence.id] = sequence


def _leave_windows(state: LedgerState, sequence: ActiveSequence) -> None:
    """What no token behind the computed ones reads goes, and stays findable if the request may store."""
    computed = sequence.computed
    if computed > sequence.num_prompt_tokens:
        if sequence.covered == sequence.num_tokens:
            return  # generating: the window moves on with the next token, so that rejected drafts can be taken back
        computed = max(min(computed, sequence.num_tokens - sequence.request.num_draft_tokens - 1), sequence.num_prompt_tokens)
    is_stored = False
    for row in sequence.rows:
        num_departed = state.geometries[row.group].num_departed(computed + 1)
        if num_departed <= row.num_departed:
            continue
        if not is_stored:
            store(state, sequence, False)
            is_stored = True
        depart(state, row, num_departed)


def _extend(state: LedgerState, sequence: ActiveSequence, closed: list[bool]) -> bool:
    """Take the next chunk's blocks in every window group, or in none. Notes in ``closed`` where scratch has run out."""
    end = chunk_end(state.rules.chunk_size, sequence.covered, sequence.num_tokens)
    fits = True
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind != WINDOW:
            continue
        begin, scratch_end = scratch_span(geometry, len(row.blocks), end)
        scratch = scratch_end - begin
        if scratch > 0 and (closed[row.group] or state.scratch_used[row.group] + scratch > state.scratch_budgets[row.group]):
            closed[row.group] = True
            fits = False
        if num_chunk_blocks(geometry, sequence, row, end) > state.allocators[row.group].queues.num_free(0):
            fits = False
    if not fits:
        return False
    counters = state.counters
    taken_before = counters.alloc_total
    new_before = counters.alloc_new
    use_path_of(state.moves, sequence.request)
    for row in sequence.rows:
        if state.geometries[row.group].kind == WINDOW:
            _take_chunk(state, sequence, row, end)
    state.moves.use_default_path()
    sequence.total_blocks += counters.alloc_total - taken_before
    sequence.new_blocks += counters.alloc_new - new_before
    sequence.covered = end
    state.paused.pop(sequence.id, None)
    return True


def num_chunk_blocks(geometry: GroupGeometry, sequence: ActiveSequence, row: SequenceRow, end: int) -> int:
    """Blocks that a row takes to reach to the first ``end`` tokens, over all beams."""
    total = geometry.num_blocks(end)
    shared = _shared_end(geometry, sequence, row, total)
    return shared - len(row.blocks) + (total - shared) * sequence.beam_width


def _shared_end(geometry: GroupGeometry, sequence: ActiveSequence, row: SequenceRow, total: int) -> int:
    """Beams share the prompt's full blocks. Behind them each has its own."""
    if sequence.beam_width == 1:
        return total
    return min(total, max(len(row.blocks), geometry.num_full_blocks(sequence.num_prompt_tokens)))


def _take_chunk(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, end: int) -> None:
    geometry = state.geometries[row.group]
    allocator = state.allocators[row.group]
    request = sequence.request
    first = len(row.blocks)
    total = geometry.num_blocks(end)
    shared = _shared_end(geometry, sequence, row, total)
    # What the last chunk has left of its scratch is what the window reads from now on.
    state.scratch_used[row.group] -= scratch_held(geometry, row)
    row.scratch_begin, row.scratch_end = scratch_span(geometry, first, end)
    state.scratch_used[row.group] += scratch_held(geometry, row)
    taken = take_run_for(allocator, request, first, shared)
    row.blocks.extend(taken)
    for block in taken:
        block.ref_count += request.beam_width - 1
    for blocks in row.other_beams:
        blocks.extend(taken)
    for position in range(shared, total):
        for beam in range(request.beam_width):
            row.beam(beam).append(take_for(allocator, request, position))
    state.counters.missed += total - first
    sequence.missed_blocks += total - first

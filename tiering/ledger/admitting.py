"""Carrying out admission plans: claim every match of the whole batch, then promote, copy and take (design: two phases).

Nothing that one request of a batch matched can be evicted by what another one takes.
"""

from __future__ import annotations

from kvtier.pools.pool_index import LEVEL_BITS, PRIMARY, level_of
from kvtier.tiering.ledger import prefill
from kvtier.tiering.ledger.admission import AdmissionPlan, has_private_tail
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW
from kvtier.tiering.ledger.keeping import apply_retention_to_row, set_retention, take_for, take_run_for, use_path_of
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState
from kvtier.tiering.ledger.uses import note_uses

Takers = list[dict[int, int]]
"""By group: how many sequences have yet to copy or take over each partially matched block."""


def carry_out(state: LedgerState, plans: list[AdmissionPlan], first_order: int) -> list[ActiveSequence]:
    """Make the sequences of a batch whose plans fit. Cannot fail."""
    sequences: list[ActiveSequence] = []
    takers: Takers = [{} for _ in state.groups]
    for plan in plans:
        sequence = ActiveSequence(plan.request, plan.keys, plan.namespace, first_order + len(sequences), len(state.groups))
        sequences.append(sequence)
        _claim(state, plan, sequence, takers)
    for number in range(len(plans)):
        sequence = sequences[number]
        use_path_of(state.moves, sequence.request)
        _fill(state, plans[number], sequence, takers)
        state.moves.use_default_path()
        state.sequences[sequence.id] = sequence
        if state.history is not None:
            note_uses(state, state.history, plans[number], sequence)
    for allocator in state.allocators:
        allocator.end_call()
    return sequences


def _claim(state: LedgerState, plan: AdmissionPlan, sequence: ActiveSequence, takers: Takers) -> None:
    """Reference what a request matched, before anything is taken for anybody."""
    levels = [PRIMARY] * plan.num_matched
    for group, row in enumerate(plan.rows):
        allocator = state.allocators[group]
        allocator.hold_many(row)
        apply_retention_to_row(allocator, plan.request, row)
        if plan.is_primary:
            continue
        for position, block in enumerate(row):
            if block.id < 0:
                continue
            level = block.index & LEVEL_BITS
            if level > levels[position]:  # a position counts for the slowest level that it comes from
                levels[position] = level
    if plan.partial:
        level = PRIMARY
        for group, block in enumerate(plan.partial):
            if block.id >= 0:
                level = max(level, level_of(block.index))
                state.allocators[group].queues.claim(block)
                takers[group][block.id] = takers[group].get(block.id, 0) + 1
        levels.append(level)
    sequence.origin_levels = levels


def _fill(state: LedgerState, plan: AdmissionPlan, sequence: ActiveSequence, takers: Takers) -> None:
    """Give one sequence its blocks in every group: promote what matched, take the rest."""
    counters = state.counters
    taken_before = counters.alloc_total
    new_before = counters.alloc_new
    request = plan.request
    for row in sequence.rows:
        group = row.group
        geometry = state.geometries[group]
        allocator = state.allocators[group]
        if geometry.kind == CROSS:
            row.blocks.extend(take_run_for(allocator, request, 0, geometry.num_blocks(request.encoder_length)))
            _share_among_beams(sequence, row)
            continue
        if not plan.is_primary:
            for block in plan.rows[group]:
                if block.index & LEVEL_BITS != PRIMARY and block.id >= 0:
                    allocator.promote(block)
        row.blocks.extend(plan.rows[group])
        if geometry.kind == WINDOW:
            departed = min(geometry.num_departed(plan.num_matched * state.tokens_per_block), plan.num_matched)
            row.departed_ids = [[allocator.placeholder.id] * departed for _ in range(request.beam_width)]
        if plan.partial:
            _fill_partial(state, plan, row, takers[group])
        num_prefix_blocks = len(row.blocks)
        total = geometry.num_blocks(request.num_tokens)
        is_chunked = state.is_chunked and geometry.kind == WINDOW
        if is_chunked:
            total = num_prefix_blocks  # the rest chunk by chunk
        if geometry.kind == RECURRENT:
            _fill_states(state, plan, row, total)
        else:
            taken = take_run_for(allocator, request, num_prefix_blocks, total)
            if num_prefix_blocks:
                row.blocks.extend(taken)
            else:
                row.blocks = taken
        missed = total - num_prefix_blocks
        reused = len(plan.rows[group])
        if geometry.kind != FULL:  # the others have placeholders
            missed = _num_real(row.blocks, num_prefix_blocks, total)
            reused = _num_real(plan.rows[group], 0, reused)
        counters.reused_full += reused
        counters.reused_partial += 1 if plan.partial else 0
        counters.missed += missed
        sequence.reused_blocks += reused + (1 if plan.partial else 0)
        sequence.missed_blocks += missed
        _share_among_beams(sequence, row)
        if not is_chunked and has_private_tail(state, request, group):
            _part_tails(state, sequence, row, total - 1)
    sequence.num_prefix_blocks = plan.num_matched + (1 if plan.partial else 0)
    sequence.prepopulated = plan.prepopulated
    sequence.valid = plan.prepopulated
    sequence.computed = plan.prepopulated
    sequence.external_tokens = plan.external_tokens
    sequence.left_tokens = plan.left_tokens
    sequence.total_blocks = counters.alloc_total - taken_before
    sequence.new_blocks = counters.alloc_new - new_before
    if state.is_chunked:
        prefill.start(state, sequence)


def _num_real(blocks: list[Block], first: int, end: int) -> int:
    """Blocks among ``blocks[first:end]`` that are no placeholders."""
    count = 0
    for position in range(first, end):
        if blocks[position].id >= 0:
            count += 1
    return count


def _fill_partial(state: LedgerState, plan: AdmissionPlan, row: SequenceRow, takers: dict[int, int]) -> None:
    """The block behind the full matches whose first tokens are those of the prompt: taken over, or copied."""
    allocator = state.allocators[row.group]
    partial = plan.partial[row.group]
    position = plan.num_matched
    if plan.in_place:
        allocator.publish_removed(partial)
        state.tree.detach(partial, row.group)
        allocator.drop_backings(partial)  # they hold what is about to be overwritten
        allocator.promote(partial)
        set_retention(allocator, plan.request, position, partial, partial.priority, min(partial.duration, 0.0))
        partial.ref_count += 1
        row.blocks.append(partial)
        return
    target = take_for(allocator, plan.request, position, partial.priority, partial.duration)
    allocator.copy(partial, target, plan.partial_tokens)
    row.blocks.append(target)
    takers[partial.id] -= 1
    # A source that somebody still wants must not be queued: the next block taken could be it.
    if takers[partial.id] == 0 and partial.ref_count == 0:
        allocator.add_content(partial)


def _fill_states(state: LedgerState, plan: AdmissionPlan, row: SequenceRow, total: int) -> None:
    """Recurrent layers: a running state in the last block, and one block for each state that will be kept on the way.

    A state found again is a snapshot that others may want too: the running state starts as its copy.
    """
    geometry = state.geometries[row.group]
    allocator = state.allocators[row.group]
    for position in range(len(row.blocks), total):
        if position == total - 1 or (state.reuse and geometry.keeps_state(position, plan.request.num_tokens)):
            row.blocks.append(take_for(allocator, plan.request, position))
        else:
            row.blocks.append(allocator.placeholder)
    if plan.num_matched:
        running = row.blocks[total - 1]
        allocator.copy(plan.rows[row.group][plan.num_matched - 1], running, 0)
        row.note_state_copy(plan.num_matched * state.tokens_per_block, allocator.arriving[running.index])


def _share_among_beams(sequence: ActiveSequence, row: SequenceRow) -> None:
    """Every beam starts with the same handles, and references each of them."""
    others = sequence.beam_width - 1
    if others == 0:
        return
    for block in row.blocks:
        if block.id >= 0:
            block.ref_count += others
    for _ in range(others):
        row.other_beams.append(list(row.blocks))


def _part_tails(state: LedgerState, sequence: ActiveSequence, row: SequenceRow, position: int) -> None:
    """Beams write into an unfilled last block from their first token on: each gets its own."""
    allocator = state.allocators[row.group]
    row.blocks[position].ref_count = 1
    for beam in row.other_beams:
        beam[position] = take_for(allocator, sequence.request, position)

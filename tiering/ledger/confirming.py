"""Storing what a sequence has computed, and what that waits for (design: all or nothing).

Where nothing is arriving, which is where engines wait for what they read, all of this is one look at each group.
"""

from __future__ import annotations

from kvtier.pools.pool_index import PoolIndex
from kvtier.tiering.ledger.admission import may_store
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import CROSS
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.recomputing import take_places
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.state import LedgerState
from kvtier.tiering.ledger.storing import store_blocks
from kvtier.tiering.ledger.unconfirmed import Unconfirmed, UnconfirmedBlocks

Dependencies = list[tuple[int, Move]]
"""Moves that have not ended, each with the position from which on the sequence's blocks depend on it."""


def store(state: LedgerState, sequence: ActiveSequence, with_partial: bool) -> None:
    """The sequence's computed blocks enter the reuse tree, if its request may store. See :func:`store_blocks`."""
    if not may_store(state, sequence.request) or sequence.must_preempt:
        return
    first = sequence.valid // state.tokens_per_block  # what lies before was not computed by this sequence
    dependencies: Dependencies = []
    if _may_depend(state, sequence) and sequence.storable_tokens() > first * state.tokens_per_block:
        dependencies = _dependencies_of(state, sequence)
    if not dependencies:
        if sequence.left_tokens:
            take_places(state, sequence)
        store_blocks(state.tree, state.allocators, state.groups, state.events, sequence, with_partial)
        return
    outside = [[(first + number, block) for number, block in enumerate(row.blocks[first:]) if block.id >= 0 and block.node is None]
               for row in sequence.rows]
    store_blocks(state.tree, state.allocators, state.groups, state.events, sequence, with_partial)
    dependencies.sort(key=_position_of)
    for row in sequence.rows:
        _note(state.allocators[row.group].unconfirmed, outside[row.group], dependencies)


def awaited_slots(state: LedgerState, sequence: ActiveSequence, group: int) -> list[PoolIndex]:
    """Slots of a group whose Moves decide whether the sequence's blocks are good, beside those that it holds itself."""
    if not _has_unconfirmed(state):
        return []
    return [move.destination for row in sequence.rows for _position, move in _unconfirmed_dependencies(state, row) if move.group == group]


def leave_behind(state: LedgerState, row: SequenceRow, position: int, block: Block) -> None:
    """A block leaves the row's window, perhaps before it has arrived."""
    allocator = state.allocators[row.group]
    waits: dict[int, Move] = {}
    move = _move_into(allocator.arriving, block)
    unconfirmed = allocator.unconfirmed.by_block.get(block.id)
    if unconfirmed is not None:
        if move is None and row.left_behind:
            last = row.left_behind[-1]
            if last.source is unconfirmed and last.waits and last.position <= position:
                return
        waits.update(unconfirmed.waits)
    if move is not None:
        waits[move.number] = move
    if waits:
        row.left_behind = [*row.left_behind, allocator.unconfirmed.note_departed(position, waits, unconfirmed)]


def note_delivery(state: LedgerState, sequence: ActiveSequence) -> None:
    """The sequence is ready: until something else is copied into its blocks, nobody need look whether they have arrived."""
    for row in sequence.rows:
        if row.is_settled:
            continue
        arriving = state.allocators[row.group].arriving
        if arriving:
            for beam in range(len(row.other_beams) + 1):
                for block in row.beam(beam):
                    if block.id >= 0 and _move_into(arriving, block) is not None:
                        return
        row.note_arrival()


def _note(unconfirmed: UnconfirmedBlocks, outside: list[tuple[int, Block]], dependencies: Dependencies) -> None:
    """Of blocks that were in no place before, those that are in one now wait for what comes before them."""
    count = 0  # of the dependencies, in order of their positions, how many concern the block
    batch: list[Block] = []
    for position, block in outside:
        reached = count
        while reached < len(dependencies) and dependencies[reached][0] <= position:
            reached += 1
        if reached > count and batch:
            unconfirmed.note(batch, {move.number: move for _position, move in dependencies[:count]})
            batch = []
        count = reached
        if count and block.node is not None:
            batch.append(block)
    if batch:
        unconfirmed.note(batch, {move.number: move for _position, move in dependencies[:count]})


def _position_of(dependency: tuple[int, Move]) -> int:
    return dependency[0]


def _has_unconfirmed(state: LedgerState) -> bool:
    for allocator in state.allocators:  # noqa: SIM110 (asked for every store; a generator costs more than the loop)
        if allocator.unconfirmed.by_move:
            return True
    return False


def _may_depend(state: LedgerState, sequence: ActiveSequence) -> bool:
    for row in sequence.rows:
        allocator = state.allocators[row.group]
        if allocator.unconfirmed.by_move or ((allocator.arriving or allocator.overtaken) and not row.is_settled):
            return True
    return False


def _dependencies_of(state: LedgerState, sequence: ActiveSequence) -> Dependencies:
    """What the sequence's blocks depend on. Stored is what the first beam has: no other one is looked at."""
    found: Dependencies = []
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        allocator = state.allocators[row.group]
        arriving = allocator.arriving
        if geometry.kind != CROSS:
            if arriving:
                for position, block in enumerate(row.blocks):
                    if block.id >= 0:
                        move = _move_into(arriving, block)
                        if move is not None:
                            found.append((position, move))
            for num_tokens, copy in row.state_copies:  # whatever stands where now, the state was that from there on
                if allocator.is_pending(copy):
                    found.append((num_tokens // state.tokens_per_block, copy))
        found.extend(_unconfirmed_dependencies(state, row))
    return found


def _unconfirmed_dependencies(state: LedgerState, row: SequenceRow) -> Dependencies:
    unconfirmed = state.allocators[row.group].unconfirmed
    if not unconfirmed.by_move:
        return []
    found: Dependencies = []
    if row.left_behind:
        row.left_behind = [left for left in row.left_behind if left.waits]
    for left in row.left_behind:
        found.extend([(left.position, move) for move in left.waits.values()])
    if unconfirmed.by_block:
        seen: set[int] = set()  # what is stored behind many blocks that have not arrived waits for all of them: each counts once
        last: Unconfirmed | None = None
        for position, block in enumerate(row.blocks):
            noted = unconfirmed.by_block.get(block.id)
            if noted is not None and noted is not last:
                last = noted
                for number, move in noted.waits.items():
                    if number not in seen:
                        seen.add(number)
                        found.append((position, move))
    return found


def _move_into(arriving: dict[PoolIndex, Move], block: Block) -> Move | None:
    """The Move that the block's content still waits for, if there is one: not one into what the slot held before."""
    move = arriving.get(block.index)
    return None if move is None or move.destination_generation != block.generation else move

"""Is there room on the primary level, and whom to pre-empt when there is not (design: all or nothing)."""

from __future__ import annotations

from typing import Final

from kvtier.errors import CapacityError
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.admission import BatchPlanner, Demand, has_private_tail
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.chunks import most_in_prefill
from kvtier.tiering.ledger.group import WINDOW
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.state import LedgerState

Asking = dict[int, list[int]]
"""By id: how many primary blocks of each group a sequence that asks takes."""

NOBODY: Final[Asking] = {}
NOTHING: Final[set[int]] = set()
NOTHING_WANTED: Final[list[set[int]]] = []
"""Who asks for room beside nothing in any group. Shared, never changed."""


def require_room_for_batch(planner: BatchPlanner) -> None:
    """Raise CapacityError unless the batch has room as it is planned, or with less reuse: then the plans have given that up."""
    state = planner.state
    if state.is_chunked:
        _refuse_endless_waits(planner)
    is_plenty = True
    for group, allocator in enumerate(state.allocators):
        if planner.most_primary(group) > allocator.queues.num_free(PRIMARY):
            is_plenty = False
    if is_plenty:
        return
    demands = [planner.demand()]
    if _lacks_room(state, demands[-1]):
        planner.give_up_copies()
        demands.append(planner.demand())
    if state.is_chunked and _lacks_room(state, demands[-1]):
        planner.give_up_parts()
        demands.append(planner.demand())
    if _lacks_room(state, demands[-1]):
        raise _least_lack(state, demands, f"requests {sorted(plan.request.id for plan in planner.plans)}")


def _refuse_endless_waits(planner: BatchPlanner) -> None:
    """A prompt whose window and a chunk the pool could not hold even if nobody else were there would be admitted, and wait for ever."""
    state = planner.state
    for group, allocator in enumerate(state.allocators):
        geometry = state.geometries[group]
        total = allocator.num_blocks[PRIMARY]
        for plan in planner.plans:
            request = plan.request
            tails = request.beam_width - 1 if has_private_tail(state, request, group) else 0
            if geometry.kind != WINDOW or geometry.num_blocks(request.num_tokens) + tails <= total:
                continue
            needed = [0] * len(state.groups)
            needed[group] = most_in_prefill(geometry, state.rules.chunk_size, request.num_tokens, tails)
            if needed[group] > total:
                require_room(state, needed, NOTHING_WANTED, f"request {request.id}, computed in chunks of {state.rules.chunk_size} tokens")


def _lacks_room(state: LedgerState, demand: Demand) -> bool:
    """Whether a group has too few blocks for it."""
    needed, protected = demand
    return any(needed[group] > free_beside(allocator, protected[group]) for group, allocator in enumerate(state.allocators))


def _least_lack(state: LedgerState, demands: list[Demand], what: str) -> CapacityError:
    """Of several ways to admit a batch, none of which has room, the error of the one that asks for the fewest pre-emptions. What is
    reused may be others' blocks, which cost nothing; the whole prompt without it may take the place of all of them."""
    least: CapacityError | None = None
    for number, (needed, protected) in enumerate(demands):
        if number and demands[number] == demands[number - 1]:
            continue  # nothing was there to give up; whom to pre-empt takes long to find
        error = lack_of_room(state, needed, protected, what)
        assert error is not None
        if least is None or not least.preempt or 0 < len(error.preempt) < len(least.preempt):
            least = error
    assert least is not None
    return least


def require_room(state: LedgerState, needed: list[int], wanted: list[set[int]], what: str, asking: Asking = NOBODY) -> None:
    """Raise CapacityError unless there is room; see :func:`lack_of_room`."""
    error = lack_of_room(state, needed, wanted, what, asking)
    if error is not None:
        raise error


def lack_of_room(state: LedgerState, needed: list[int], wanted: list[set[int]], what: str,
                 asking: Asking = NOBODY) -> CapacityError | None:
    """The error to raise unless ``needed`` primary blocks of each group can be taken beside the ``wanted`` ones, which must stay.

    Args:
        needed: blocks, by group.
        wanted: by group, ids of blocks that what is asked for holds on to; empty when there are none in any group.
        what: who needs them, for the message.
        asking: sequences that ask, and what each takes of it: who is pre-empted takes nothing. To pre-empt the only sequence there is,
            for its own sake, is no remedy.
    """
    missing = [0] * len(needed)
    worst = -1
    for group, count in enumerate(needed):
        available = free_beside(state.allocators[group], wanted[group] if wanted else NOTHING)
        missing[group] = count - available
        if missing[group] > 0 and (worst < 0 or missing[group] > missing[worst]):
            worst = group
    if worst < 0:
        return None
    allocator = state.allocators[worst]
    total = allocator.num_blocks[PRIMARY]
    preempt = _whom_to_preempt(state, missing, wanted, asking)
    busy = allocator.num_unreferenced_busy[PRIMARY]
    if len(state.sequences) == 1 and all(number in asking for number in preempt) and not busy:
        preempt = []  # once it is admitted again it would only get this far again
    remedy = (f"pre-empt requests {preempt}" if preempt else
              f"try again when {busy} blocks are free that a file is being read into" if busy and needed[worst] <= total else
              f"enlarge primary (now {total} blocks of {allocator.tokens_per_block} tokens) or send fewer tokens")
    where = f" of group {worst}" if len(state.groups) > 1 else ""
    available = needed[worst] - missing[worst]
    return CapacityError(f"{what}: {needed[worst]} primary blocks{where} needed, {available} available of {total}; {remedy}", needed[worst],
                         available, preempt)


def free_beside(allocator: BlockAllocator, wanted: set[int]) -> int:
    """Free primary blocks beside the ``wanted`` ones."""
    blocks = allocator.blocks
    held = sum(1 for block_id in wanted if blocks[block_id].queue != NOT_QUEUED and level_of(blocks[block_id].index) == PRIMARY)
    return allocator.queues.num_free(PRIMARY) - held


def _whom_to_preempt(state: LedgerState, missing: list[int], wanted: list[set[int]], asking: Asking) -> list[int]:
    """Sequences, newest first, without whom there is room for what is left of those who ask, or whose end frees what is missing in every
    group beside what is wanted; none when all would not."""
    left = list(missing)
    spared = [0] * len(missing)  # what those of them who ask do not take
    num_asking = len(asking)
    references: list[dict[int, int]] = [{} for _ in missing]  # a shared block is free when the last of its sequences has ended
    preempt: list[int] = []
    for sequence in sorted(state.sequences.values(), key=_admission_order, reverse=True):
        preempt.append(sequence.id)
        for row in sequence.rows:
            allocator = state.allocators[row.group]
            still = references[row.group]
            for beam in range(len(row.other_beams) + 1):
                for block in row.beam(beam):
                    if block.id < 0:
                        continue
                    count = still.get(block.id, block.ref_count) - 1
                    still[block.id] = count
                    if count == 0 and not (wanted and block.id in wanted[row.group]) and not allocator.is_busy(block):
                        left[row.group] -= 1
        if sequence.id in asking:
            num_asking -= 1
            for group, count in enumerate(asking[sequence.id]):
                spared[group] += count
        if max(left) <= 0 or (num_asking > 0 and all(left[group] <= spared[group] for group in range(len(left)))):
            return preempt
    return []


def _admission_order(sequence: ActiveSequence) -> int:
    return sequence.order

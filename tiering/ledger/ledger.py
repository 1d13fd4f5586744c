"""``Ledger``: who holds which block, what is stored, and which Moves follow from it (design: the ledger decides).

Pure bookkeeping for all groups of layers. Every method plans completely or changes nothing. The caller holds a lock, passes the
time in, and fetches the numbered records with ``moves.take()`` before letting go of the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

from kvtier.errors import CapacityError, RequestError, UnknownBlock
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.policies.retention import check_priority, priority_of
from kvtier.pools.pool_index import LEVEL_NAMES, NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger import beams, decoding, drafts, prefill
from kvtier.tiering.ledger.admission import AdmissionPlan, BatchPlanner, may_reuse, most_reusable
from kvtier.tiering.ledger.admitting import carry_out
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.confirming import note_delivery, store
from kvtier.tiering.ledger.decoding import require_reported
from kvtier.tiering.ledger.draft_tree import DraftTree
from kvtier.tiering.ledger.file_level import adopt_rows
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.keeping import change_priority
from kvtier.tiering.ledger.losing import lose
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.prefix import stored_rows
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.room import require_room, require_room_for_batch
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease
from kvtier.tiering.ledger.state import LedgerState
from kvtier.tiering.ledger.storing import adopt_warm_blocks
from kvtier.tiering.ledger.uses import history_of


class Inbound(Protocol):
    """Somebody else who may have a prompt's next tokens: another instance, a remote store."""

    def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
        """How many tokens behind the first ``num_matched_tokens`` can be loaded from there: whole blocks, 0 for none.

        May be called several times for one request, and must change nothing.
        """


class Loading(Protocol):
    """Who decides whether what was found on a lower level is worth loading."""

    def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
        """How many of the last plan's matched blocks are reused: all, or fewer where computing the rest is faster. Must change nothing."""


class Ledger(LedgerState):
    """Sequences, reuse tree and handles.

    Args:
        groups: the groups of layers, by their numbers.
        tokens_per_block: tokens of a full block.
        rules: thresholds and switches.
    """

    def __init__(self, groups: Sequence[GroupSpec], tokens_per_block: int, rules: LedgerRules) -> None:
        super().__init__(groups, tokens_per_block, rules)
        self.history = history_of(rules, self.groups[self.leading_group].num_blocks, tokens_per_block)
        self.inbound: Inbound | None = None
        self.loading: Loading | None = None
        self._next_lease = 0
        self._next_order = 0
        for number, group in enumerate(self.groups):
            levels = list(group.num_blocks)
            while len(levels) > 1 and levels[-1] == 0:
                levels.pop()
            self.events.created(number, tuple(levels))

    def set_time(self, now: float) -> None:
        """The clock's reading for the calls that follow; releases count their durations from it."""
        for allocator in self.allocators:
            allocator.now = now

    # -- admission -------------------------------------------------------------------------------------------------------

    def add_sequences(self, requests: Sequence[Request]) -> list[ActiveSequence]:
        """Admit a batch: first every match of every request is claimed, then blocks are taken, in request order.

        Raises:
            RequestError: an id that is active already or twice in the batch; an encoder for a model without cross-attention.
            CapacityError: too few free primary blocks; nothing has changed.
        """
        batch_ids: set[int] = set()
        for request in requests:
            if request.id in self.sequences or request.id in batch_ids:
                raise RequestError(f"request {request.id}: this id is active already; remove that sequence first or use another id")
            if (request.encoder_length > 0) != self.has_cross:
                raise RequestError(f"request {request.id}: encoder_length={request.encoder_length}; this layout has "
                                   + ("cross-attention layers, give the length of their input" if self.has_cross else
                                      "no cross-attention layers, leave it out"))
            batch_ids.add(request.id)
        planner = BatchPlanner(self)
        for request in requests:
            if self.has_warm() and may_reuse(self, request):
                followed = self.follow(request, most_reusable(self, request))
                adopt_warm_blocks(self.tree, self.allocators, self.groups, followed.namespace, followed.keys, request.num_tokens - 1)
            planner.plan(request)
            if self.loading is not None and not planner.plans[-1].is_primary:
                planner.keep_front(planner.plans[-1], self.loading.num_blocks_to_load(planner.plans))
            if self.inbound is not None and may_reuse(self, request):
                plan = planner.plans[-1]
                inbound = cast(Any, self.inbound)  # an answer may be of any type, whatever the protocol says
                planner.ask_elsewhere(plan, inbound.num_new_matched_tokens(request, plan.num_matched * self.tokens_per_block))
        require_room_for_batch(planner)
        self.forget_followed()
        sequences = carry_out(self, planner.plans, self._next_order)
        self._next_order += len(sequences)
        return sequences

    # -- growing ---------------------------------------------------------------------------------------------------------

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append sampled tokens to several sequences; see :func:`decoding.append_step`."""
        decoding.append_step(self, ids, tokens)

    def mark_computed(self, request_id: Any, num_tokens: Any, may_let_go: bool = True) -> None:
        """The first ``num_tokens`` tokens have their keys and values in the pool now.

        With chunked prefill what has left a window is stored and let go, and the next chunk gets its blocks or the sequence is paused.
        ``may_let_go``: False while somebody may still be reading the blocks; :meth:`advance_prefill` makes up for it.
        """
        sequence = self.sequence(request_id)
        require_reported(sequence)
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not sequence.computed <= num_tokens <= sequence.num_tokens:
            raise RequestError(f"request {request_id}: mark_computed({num_tokens!r}); {sequence.computed} are computed already and the "
                               f"sequence has {sequence.num_tokens} tokens (rewind() takes tokens back)")
        if self.is_chunked and num_tokens > sequence.covered:
            raise RequestError(f"request {request_id}: mark_computed({num_tokens}); it has blocks for the first {sequence.covered} tokens: "
                               f"compute chunks that end at multiples of chunk_size={self.rules.chunk_size}, the next one only when the "
                               "sequence is not paused")
        sequence.computed = num_tokens
        if self.is_chunked:
            if may_let_go:
                prefill.advance(self, sequence)
            else:
                prefill.pause(self, sequence)

    def advance_prefill(self, request_id: Any) -> None:
        """Nobody reads the sequence's blocks any more: what its windows have moved past goes."""
        sequence = self.sequences.get(request_id)
        if self.is_chunked and sequence is not None:
            prefill.advance(self, sequence)
            if list(self.paused) == [request_id]:  # otherwise others are served first, at the next step
                prefill.resume(self, [request_id])

    def resume_prefills(self, ids: Sequence[int]) -> None:
        """Try to give these sequences, as far as they are paused, the blocks of their next chunks, longest wait first. Each gets them in
        all window groups or in none."""
        if self.paused:
            prefill.resume(self, ids)

    def is_paused(self, request_id: Any) -> bool:
        """Whether a sequence waits for the blocks of its next chunk."""
        return self.sequence(request_id).id in self.paused

    def rewind(self, request_id: Any, num_tokens: Any) -> None:
        """Take back generated tokens; see :func:`decoding.rewind`."""
        decoding.rewind(self, request_id, num_tokens)

    def reorder_beams(self, request_id: Any, parents: Any) -> None:
        """Let each beam continue another one; see :func:`beams.reorder_beams`."""
        beams.reorder_beams(self, request_id, parents)

    # -- drafts ----------------------------------------------------------------------------------------------------------

    def propose_drafts(self, request_id: Any, tokens: Any, parents: Any) -> None:
        """Give speculative tokens that branch their places; see :func:`drafts.propose_drafts`."""
        drafts.propose_drafts(self, request_id, tokens, parents)

    def pending_drafts(self, request_id: Any) -> DraftTree:
        """The drafts of a sequence, with what each of them sees; see :func:`drafts.pending_drafts`."""
        return drafts.pending_drafts(self, request_id)

    def draft_moves(self, request_id: Any, nodes: Any) -> list[tuple[int, int]]:
        """What :meth:`accept_drafts` will return, or raise. Changes nothing."""
        tree = drafts.pending_drafts(self, request_id)
        return tree.moves_of(drafts.accepted_path(request_id, tree, nodes))

    def accept_drafts(self, request_id: Any, nodes: Any) -> list[tuple[int, int]]:
        """The drafts of one path become tokens; see :func:`drafts.accept_drafts`."""
        return drafts.accept_drafts(self, request_id, nodes)

    def drop_drafts(self, request_id: Any) -> None:
        """Forget drafts that were not verified; see :func:`drafts.drop_drafts`."""
        drafts.drop_drafts(self, request_id)

    # -- single places ---------------------------------------------------------------------------------------------------

    def make_writable(self, request_id: Any, position: Any, group: Any = 0) -> Block:
        """The sequence's block at this position, alone in holding it and out of the tree, so that it may be written.

        Raises:
            RequestError: no such position, or one at which the group has no block.
            CapacityError: a shared block, and no free one for a copy.
        """
        self.check_group(group)
        row = self.sequence(request_id).rows[group]
        if not 0 <= position < len(row.blocks) or row.blocks[position].id < 0:
            raise RequestError(f"request {request_id}: group {group} has no block at position {position}; it has {len(row.blocks)} "
                               "positions, some perhaps out of the window or without a kept state")
        if row.blocks[position].ref_count > 1:
            needed = [0] * len(self.groups)
            needed[group] = 1
            require_room(self, needed, [], f"a private copy for request {request_id}")
        return decoding.make_writable(self, row, 0, position)

    # -- storing and ending ----------------------------------------------------------------------------------------------

    def store_context(self, request_id: Any) -> None:
        """Full, computed blocks enter the reuse tree."""
        self._store(self.sequence(request_id), False)

    def remove_sequence(self, request_id: Any, store: bool) -> int | None:
        """End a sequence. ``store`` keeps what was computed, the partial tail included, for reuse.

        Returns the id, in the leading group, of the last of its blocks that a later prompt would find; None when nothing is stored.
        """
        sequence = self.sequence(request_id)
        last: int | None = None
        if store:
            self._store(sequence, True)
            last = last_stored_id(sequence.rows[self.leading_group].blocks)
        del self.sequences[request_id]
        if self.is_chunked:
            prefill.forget(self, sequence)
        for row in sequence.rows:
            allocator = self.allocators[row.group]
            for beam in range(len(row.other_beams), -1, -1):
                allocator.release_many(row.beam(beam))
        return last

    def _store(self, sequence: ActiveSequence, with_partial: bool) -> None:
        store(self, sequence, with_partial and not self.has_recurrent)

    # -- leases ----------------------------------------------------------------------------------------------------------

    def pin(self, request_id: Any) -> Lease:
        """Hold a sequence's blocks beyond its end, until the lease is released."""
        sequence = self.sequence(request_id)
        rows: list[list[Block]] = []
        for row in sequence.rows:
            held = {block.id: block for beam in range(len(row.other_beams) + 1) for block in row.beam(beam) if block.id >= 0}
            rows.append(list(held.values()))
        return self._lease(request_id, rows)

    def store_and_pin(self, request_id: Any) -> Lease:
        """Store what was computed, the partial tail included, and hold what the tree has of it from now on: what a later request of
        the same prompt will find. Blocks that the tree had before are held instead of the sequence's own copies."""
        sequence = self.sequence(request_id)
        self._store(sequence, sequence.drafts is None)  # the unfilled block is being written: it holds the first drafts
        return self._lease(request_id, stored_rows(self, sequence))

    def _lease(self, request_id: int, rows: list[list[Block]]) -> Lease:
        lease = Lease(self._next_lease, request_id, rows)
        self._next_lease += 1
        for group, blocks in enumerate(rows):
            self.allocators[group].hold_many(blocks)
        self.leases[lease.lease_id] = lease
        return lease

    def release_lease(self, lease: Lease) -> None:
        """Raises RequestError when it was released before."""
        if self.leases.pop(lease.lease_id, None) is None:
            raise RequestError(f"lease {lease.lease_id} of request {lease.request_id}: released already")
        for group, blocks in enumerate(lease.rows):
            self.allocators[group].release_many(blocks)

    # -- single blocks ---------------------------------------------------------------------------------------------------

    def block(self, block_id: Any, group: Any = 0) -> Block:
        """Raises UnknownBlock; RequestError for a group that there is not."""
        blocks = self.allocators[self.check_group(group)].blocks
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not 0 <= block_id < len(blocks):
            raise UnknownBlock(f"block {block_id!r}: group {group} has blocks 0..{len(blocks) - 1}")
        number: int = block_id
        return blocks[number]

    def set_priority(self, block_id: Any, priority: Any, group: Any = 0) -> None:
        """Change the retention priority of an unreferenced block that holds content; a number, or a level's name."""
        if not isinstance(priority, str):
            check_priority("priority", priority)
        number = priority_of("priority", priority)
        block = self._idle(block_id, "set_priority", group)
        allocator: BlockAllocator = self.allocators[group]
        change_priority(allocator, block, number)
        allocator.queues.claim(block)
        allocator.add_content(block)

    def offload(self, block_id: Any, group: Any = 0) -> None:
        """Move an unreferenced primary block one level down."""
        block = self._idle(block_id, "offload", group)
        allocator: BlockAllocator = self.allocators[group]
        if level_of(block.index) != PRIMARY:
            raise RequestError(f"block {block_id}: offload needs a primary block, it is on the {LEVEL_NAMES[level_of(block.index)]} level")
        if not allocator.offload(block):
            raise CapacityError(f"block {block_id}: no secondary block holds content of priority {block.priority} or less; "
                                f"enlarge secondary (now {allocator.num_blocks[SECONDARY]} blocks)", 1, 0)

    def onboard(self, block_id: Any, group: Any = 0) -> None:
        """Bring an unreferenced lower block to the primary level."""
        block = self._idle(block_id, "onboard", group)
        allocator: BlockAllocator = self.allocators[group]
        if level_of(block.index) == PRIMARY:
            return
        if block.node is None:
            raise RequestError(f"block {block_id}: found on NVMe at start and not matched yet; its tokens are unknown")
        needed = [0] * len(self.groups)
        needed[group] = 1
        require_room(self, needed, [], f"block {block_id}")
        allocator.queues.claim(block)
        allocator.promote(block)
        allocator.end_call()
        allocator.add_content(block)

    def _idle(self, block_id: Any, verb: str, group: Any) -> Block:
        block = self.block(block_id, group)
        if block.queue == NOT_QUEUED or not block.has_content:
            state = "referenced or being transferred" if block.queue == NOT_QUEUED else "empty"
            raise RequestError(f"block {block_id}: {verb} needs an unreferenced block with content; this one is {state}")
        return block

    # -- time and Moves --------------------------------------------------------------------------------------------------

    def refresh(self, now: float, may_write: bool = True) -> None:
        """Once per engine step: let durations expire and, if NVMe takes writes, write cold blocks ahead."""
        self.set_time(now)
        for allocator in self.allocators:
            allocator.expire()
            if may_write:
                allocator.write_ahead()

    def write_everything_out(self) -> bool:
        """Start NVMe copies of all unreferenced content that may have one. False while some had to be left for later."""
        priority = max(self.rules.nvme_offload_min_priority, self.rules.secondary_offload_min_priority)
        is_complete = True
        for allocator in self.allocators:
            for level in (SECONDARY, PRIMARY):
                coldest = allocator.queues.coldest(level, priority, allocator.num_blocks[level])
                # Where NVMe is too small for all, exchanging one block's copy for another's would never end.
                if not allocator.write_out([cast(Block, record) for record in coldest], True):
                    is_complete = False
                    break
            if allocator.writes_in_flight:
                is_complete = False
        return is_complete

    def finish(self, move: Move, failed: bool, source_is_bad: bool = True) -> None:
        """A Move has ended. When it failed, its content is lost to everybody who holds it.

        ``source_is_bad``: a failed read condemns the NVMe slot. False where the file was good and the way from there failed.
        """
        allocator = self.allocators[move.group]
        if not failed:
            allocator.finished(move)
            for other in self.allocators:
                other.confirm(move.number)
            return
        lost = allocator.failed(move) if source_is_bad else allocator.failed_source_is_good(move)
        if lost is not None:
            self.counters.lost += 1
        if lost is not None or level_of(move.destination) == PRIMARY:
            lose(self, move, lost)

    def condemn(self, group: int, slot: int) -> None:
        """An NVMe slot was found bad. Of those who hold blocks only leases may hold what it held."""
        allocator: BlockAllocator = self.allocators[group]
        handle = allocator.holders[NVME][slot]
        if handle.has_content and handle.ref_count > 0:
            ids: list[set[int]] = [{handle.id} if number == group else set() for number in range(len(self.groups))]
            for lease in self.leases.values():
                lease.note_lost(ids)
        allocator.condemn(slot)

    def report(self, sequence: ActiveSequence) -> None:
        """The engine is told how many tokens of the sequence are there."""
        drafts.drop_lost_drafts(self, sequence)
        if sequence.must_cut:
            prefill.cut_back(self, sequence)
        sequence.must_report = False

    def deliver(self, sequence: ActiveSequence) -> None:
        """The sequence is ready: its hits count now, by the level they came from. What it has lost is told with this."""
        self.report(sequence)
        note_delivery(self, sequence)
        if sequence.delivered:
            return
        sequence.delivered = True
        tokens, blocks = sequence.hits()
        for level in range(NUM_LEVELS):
            self.counters.hit_tokens[level] += tokens[level]
            self.counters.hit_blocks[level] += blocks[level]

    # -- start and reset -------------------------------------------------------------------------------------------------

    def adopt_store(self, rows: Iterable[tuple[int, int, bytes, int, float, int]], quarantined: Sequence[tuple[int, int]]) -> None:
        """At start: what the store directory holds already.

        Args:
            rows: as :class:`WarmRow`. Those with more hits count as used more recently.
            quarantined: (group, slot) of NVMe slots that must not be used.
        """
        adopt_rows(self.allocators, rows, quarantined)

    def reset(self) -> None:
        """Forget all cached content on all levels.

        Raises:
            RequestError: sequences or leases are active.
        """
        if self.sequences or self.leases:
            raise RequestError(f"reset: {len(self.sequences)} sequences and {len(self.leases)} leases are active; end them first")
        for allocator in self.allocators:
            for block in allocator.blocks:
                if block.has_content:
                    allocator.forget(block)


def last_stored_id(blocks: list[Block]) -> int | None:
    """Id of the last block that stands in the tree."""
    for block in reversed(blocks):
        if block.node is not None:
            return block.id
    return None

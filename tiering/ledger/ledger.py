"""``Ledger``: who holds which block, what is stored, and which Moves follow from it (design: the ledger decides).

Pure bookkeeping for one full-attention group. Every method plans completely or changes nothing. The caller holds a lock,
passes the time in, and fetches the numbered records with ``moves.take()`` before letting go of the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from kvtier.errors import CapacityError, RequestError, UnknownBlock, UnknownRequest
from kvtier.policies.eviction import NOT_QUEUED, eviction_queues
from kvtier.policies.retention import DEFAULT_PRIORITY, check_priority
from kvtier.pools.pool_index import LEVEL_NAMES, NUM_LEVELS, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.admission import AdmissionPlan, BatchPlanner
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.keeping import apply_retention, change_priority, set_retention, take_for
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.moves import Move, MoveLog, WarmRow
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.room import free_beside, require_room
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease, check_token
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.storing import adopt_warm_blocks, store_blocks
from kvtier.tiering.ledger.tree import ReuseTree

GROUP: Final = 0  # the one full-attention group


class Ledger:
    """Sequences, reuse tree and handles.

    Args:
        groups: the groups of layers, by their numbers.
        tokens_per_block: tokens of a full block.
    """

    def __init__(self, groups: Sequence[GroupSpec], tokens_per_block: int, rules: LedgerRules) -> None:
        self.groups = list(groups)
        self.tokens_per_block = tokens_per_block
        self.rules = rules
        self.counters = LedgerCounters()
        self.moves = MoveLog()
        self.events = EventLog(rules.max_events, len(self.groups))
        self.tree = ReuseTree(len(self.groups), tokens_per_block)
        self.allocators = [BlockAllocator(number, group.num_blocks, tokens_per_block, eviction_queues(rules.policy, NUM_LEVELS), self.tree,
                                          self.moves, self.events, self.counters, rules)
                           for number, group in enumerate(self.groups)]
        self.sequences: dict[int, ActiveSequence] = {}
        self.leases: dict[int, Lease] = {}
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
            RequestError: an id that is active already or twice in the batch.
            CapacityError: too few free primary blocks; nothing has changed.
        """
        batch_ids: set[int] = set()
        for request in requests:
            if request.id in self.sequences or request.id in batch_ids:
                raise RequestError(f"request {request.id}: this id is active already; remove that sequence first or use another id")
            batch_ids.add(request.id)
        planner = BatchPlanner(self.tree, self.allocators[GROUP], self.rules.enable_partial_reuse, self.rules.copy_on_partial_reuse)
        for request in requests:
            plan = AdmissionPlan(request, TokenKeys(request, self.tokens_per_block), Namespace(self.rules.namespace_seed, request))
            if self.rules.enable_block_reuse and not request.skip_read:
                adopt_warm_blocks(self.tree, self.allocators, self.groups, plan.namespace, plan.keys, plan.keys.num_tokens - 1)
                planner.plan(plan)
            else:
                planner.plans.append(plan)
        if planner.needed_primary() > free_beside(self.allocators[GROUP], planner.protected()):
            planner.give_up_copies()
        require_room(self.allocators[GROUP], self.sequences, planner.needed_primary(), planner.protected(), f"requests {sorted(batch_ids)}")
        return self._carry_out(planner.plans)

    def _carry_out(self, plans: list[AdmissionPlan]) -> list[ActiveSequence]:
        allocator = self.allocators[GROUP]
        sequences: list[ActiveSequence] = []
        takers: dict[int, int] = {}  # how many sequences have yet to copy or take over each partially matched block
        for plan in plans:  # claim everything that anybody matched before anything is taken
            sequence = ActiveSequence(plan.request, plan.keys, plan.namespace, self._next_order, len(self.groups))
            self._next_order += 1
            sequences.append(sequence)
            for position, block in enumerate(plan.matches):
                sequence.origin_levels.append(level_of(block.index))
                allocator.hold(block)
                apply_retention(self.allocators[GROUP], plan.request, position, block)
            if plan.partial is not None:
                sequence.origin_levels.append(level_of(plan.partial.index))
                allocator.queues.claim(plan.partial)
                takers[plan.partial.id] = takers.get(plan.partial.id, 0) + 1
        for plan, sequence in zip(plans, sequences, strict=True):
            self._fill(plan, sequence, takers)
            self.sequences[sequence.id] = sequence
        allocator.end_call()
        return sequences

    def _fill(self, plan: AdmissionPlan, sequence: ActiveSequence, takers: dict[int, int]) -> None:
        """Give one sequence its blocks: promote what matched, take the rest."""
        allocator = self.allocators[GROUP]
        counters = self.counters
        taken_before = counters.alloc_total
        new_before = counters.alloc_new
        for block in plan.matches:
            if level_of(block.index) != PRIMARY:
                allocator.promote(block)
            sequence.blocks.append(block)
        partial = plan.partial
        if partial is not None and plan.in_place:
            allocator.publish_removed(partial)
            self.tree.detach(partial, GROUP)
            allocator.drop_backings(partial)  # they hold what is about to be overwritten
            allocator.promote(partial)
            set_retention(self.tokens_per_block, plan.request, len(plan.matches), partial, partial.priority, 0.0)
            partial.ref_count += 1
            sequence.blocks.append(partial)
        elif partial is not None:
            target = take_for(self.allocators[GROUP], plan.request, len(plan.matches), partial.priority, partial.duration)
            allocator.copy(partial, target, plan.partial_tokens)
            sequence.blocks.append(target)
            takers[partial.id] -= 1
            # A source that somebody still wants must not be queued: the next block taken could be it.
            if takers[partial.id] == 0 and partial.ref_count == 0:
                allocator.add_content(partial)
        sequence.num_prefix_blocks = len(sequence.blocks)
        while len(sequence.blocks) < plan.num_blocks:
            sequence.blocks.append(take_for(self.allocators[GROUP], plan.request, len(sequence.blocks)))
        sequence.prepopulated = plan.prepopulated
        sequence.valid = plan.prepopulated
        sequence.computed = plan.prepopulated
        sequence.total_blocks = counters.alloc_total - taken_before
        sequence.new_blocks = counters.alloc_new - new_before
        sequence.reused_blocks = sequence.num_prefix_blocks
        sequence.missed_blocks = plan.num_blocks - sequence.num_prefix_blocks
        counters.reused_full += len(plan.matches)
        counters.reused_partial += 1 if partial is not None else 0
        counters.missed += sequence.missed_blocks

    # -- growing ---------------------------------------------------------------------------------------------------------

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append sampled tokens to several sequences at once; what comes before the newest token counts as computed.

        Raises:
            RequestError: a token outside int32, an id twice, lists of different length.
            UnknownRequest: no such sequence.
            CapacityError: too few free primary blocks; nothing was appended to anybody.
        """
        if len(ids) != len(tokens):
            raise RequestError(f"{len(ids)} ids and {len(tokens)} token lists; pass one list for each id")
        if len(set(ids)) != len(ids):
            raise RequestError(f"ids={list(ids)}: an id is given twice")
        needed = 0
        for request_id, appended in zip(ids, tokens, strict=True):
            sequence = self.sequence(request_id)
            _require_reported(sequence)
            for token in appended:
                check_token(request_id, token)
            if appended:
                needed += self._blocks_for(sequence.num_tokens + len(appended)) - len(sequence.blocks)
                needed += self._must_copy_tail(sequence)
        require_room(self.allocators[GROUP], self.sequences, needed, set(), f"one more step of requests {list(ids)}", frozenset(ids))
        for request_id, appended in zip(ids, tokens, strict=True):
            if appended:
                self._append(self.sequences[request_id], appended)

    def _append(self, sequence: ActiveSequence, appended: Sequence[int]) -> None:
        if sequence.num_tokens % self.tokens_per_block:
            self._make_writable(sequence, len(sequence.blocks) - 1)
        for token in appended:
            sequence.keys.append(token)
        retention = sequence.request.retention
        priority = DEFAULT_PRIORITY if retention is None else retention.decode_priority
        duration = None if retention is None else retention.decode_duration_seconds
        while len(sequence.blocks) * self.tokens_per_block < sequence.num_tokens:
            block = self.allocators[GROUP].take(priority, duration or 0.0)
            block.ref_count = 1
            sequence.blocks.append(block)
        sequence.computed = sequence.num_tokens - 1

    def mark_computed(self, request_id: int, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens have their keys and values in the pool now."""
        sequence = self.sequence(request_id)
        _require_reported(sequence)
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not sequence.computed <= num_tokens <= sequence.num_tokens:
            raise RequestError(f"request {request_id}: mark_computed({num_tokens!r}); {sequence.computed} are computed already and the "
                               f"sequence has {sequence.num_tokens} tokens (rewind() takes tokens back)")
        sequence.computed = num_tokens

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` generated tokens (rejected drafts). A block that was cut leaves the tree.

        Raises:
            RequestError: more than was generated.
            CapacityError: the cut block is shared and no primary block is free for a private copy; nothing has changed.
        """
        sequence = self.sequence(request_id)
        generated = sequence.num_tokens - sequence.request.num_tokens
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= generated:
            raise RequestError(f"request {request_id}: rewind({num_tokens!r}); it has generated {generated} tokens and the prompt stays")
        if num_tokens == 0:
            return
        left = sequence.num_tokens - num_tokens
        last = self._blocks_for(left) - 1
        is_cut = left % self.tokens_per_block != 0
        if is_cut and sequence.blocks[last].ref_count > 1:
            require_room(self.allocators[GROUP], self.sequences, 1, set(), f"a private copy for request {request_id}")
        sequence.keys.truncate(left)
        sequence.computed = min(sequence.computed, left)
        while len(sequence.blocks) > last + 1:
            self.allocators[GROUP].release(sequence.blocks.pop())
        if is_cut:
            self._make_writable(sequence, last)

    def make_writable(self, request_id: int, position: int) -> Block:
        """The sequence's block at this position, alone in holding it and out of the tree, so that it may be written."""
        sequence = self.sequence(request_id)
        if sequence.blocks[position].ref_count > 1:
            require_room(self.allocators[GROUP], self.sequences, 1, set(), f"a private copy for request {request_id}")
        self._make_writable(sequence, position)
        return sequence.blocks[position]

    def _must_copy_tail(self, sequence: ActiveSequence) -> int:
        return 1 if sequence.num_tokens % self.tokens_per_block and sequence.blocks[-1].ref_count > 1 else 0

    def _make_writable(self, sequence: ActiveSequence, position: int) -> None:
        """Whatever writes into a block first drops its key, node and backings; a shared block is copied first."""
        block = sequence.blocks[position]
        if block.ref_count > 1:
            private = self.allocators[GROUP].take(block.priority, block.duration)
            private.ref_count = 1
            self.allocators[GROUP].copy(block, private, 0)
            self.allocators[GROUP].release(block)
            sequence.blocks[position] = private
        elif block.node is not None:
            self.allocators[GROUP].drop(block)

    # -- storing and ending ----------------------------------------------------------------------------------------------

    def store_context(self, request_id: int) -> None:
        """Full, computed blocks enter the reuse tree."""
        self._store(self.sequence(request_id), False)

    def remove_sequence(self, request_id: int, store: bool) -> None:
        """End a sequence. ``store`` keeps what was computed, the partial tail included, for reuse."""
        sequence = self.sequence(request_id)
        if store:
            self._store(sequence, True)
        del self.sequences[request_id]
        for block in reversed(sequence.blocks):  # so that the tail is given up before the head
            self.allocators[GROUP].release(block)

    def _store(self, sequence: ActiveSequence, with_partial: bool) -> None:
        if not self.rules.enable_block_reuse or sequence.request.skip_write or sequence.must_preempt:
            return
        store_blocks(self.tree, self.allocators, self.groups, self.events, sequence, with_partial)

    # -- leases ----------------------------------------------------------------------------------------------------------

    def pin(self, request_id: int) -> Lease:
        """Hold a sequence's blocks beyond its end, until the lease is released."""
        sequence = self.sequence(request_id)
        lease = Lease(self._next_lease, request_id, list(sequence.blocks))
        self._next_lease += 1
        for block in lease.blocks:
            self.allocators[GROUP].hold(block)
        self.leases[lease.lease_id] = lease
        return lease

    def release_lease(self, lease: Lease) -> None:
        """Raises RequestError when it was released before."""
        if self.leases.pop(lease.lease_id, None) is None:
            raise RequestError(f"lease {lease.lease_id} of request {lease.request_id}: released already")
        for block in reversed(lease.blocks):
            self.allocators[GROUP].release(block)

    # -- single blocks ---------------------------------------------------------------------------------------------------

    def block(self, block_id: int) -> Block:
        """Raises UnknownBlock."""
        blocks = self.allocators[GROUP].blocks
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not 0 <= block_id < len(blocks):
            raise UnknownBlock(f"block {block_id!r}: this group has blocks 0..{len(blocks) - 1}")
        return blocks[block_id]

    def set_priority(self, block_id: int, priority: int) -> None:
        """Change the retention priority of an unreferenced block that holds content."""
        check_priority("priority", priority)
        block = self._idle(block_id, "set_priority")
        change_priority(self.allocators[GROUP], block, priority)
        self.allocators[GROUP].queues.claim(block)
        self.allocators[GROUP].add_content(block)

    def offload(self, block_id: int) -> None:
        """Move an unreferenced primary block one level down."""
        block = self._idle(block_id, "offload")
        if level_of(block.index) != PRIMARY:
            raise RequestError(f"block {block_id}: offload needs a primary block, it is on the {LEVEL_NAMES[level_of(block.index)]} level")
        if not self.allocators[GROUP].offload(block):
            raise CapacityError(f"block {block_id}: no secondary block holds content of priority {block.priority} or less; "
                                f"enlarge secondary (now {self.allocators[GROUP].num_blocks[SECONDARY]} blocks)", 1, 0)

    def onboard(self, block_id: int) -> None:
        """Bring an unreferenced lower block to the primary level."""
        block = self._idle(block_id, "onboard")
        if level_of(block.index) == PRIMARY:
            return
        if block.node is None:
            raise RequestError(f"block {block_id}: found on NVMe at start and not matched yet; its tokens are unknown")
        require_room(self.allocators[GROUP], self.sequences, 1, set(), f"block {block_id}")
        self.allocators[GROUP].queues.claim(block)
        self.allocators[GROUP].promote(block)
        self.allocators[GROUP].end_call()
        self.allocators[GROUP].add_content(block)

    def _idle(self, block_id: int, verb: str) -> Block:
        block = self.block(block_id)
        if block.queue == NOT_QUEUED or not block.has_content:
            state = "referenced or being transferred" if block.queue == NOT_QUEUED else "empty"
            raise RequestError(f"block {block_id}: {verb} needs an unreferenced block with content; this one is {state}")
        return block

    # -- time and Moves --------------------------------------------------------------------------------------------------

    def refresh(self, now: float, may_write: bool = True) -> None:
        """Once per engine step: let durations expire and, if NVMe takes writes, write cold blocks ahead."""
        self.set_time(now)
        self.allocators[GROUP].expire()
        if may_write:
            self.allocators[GROUP].write_ahead()

    def write_everything_out(self) -> bool:
        """Start NVMe copies of all unreferenced content that may have one. False while some had to be left for later."""
        priority = max(self.rules.nvme_offload_min_priority, self.rules.secondary_offload_min_priority)
        for level in (SECONDARY, PRIMARY):
            coldest = self.allocators[GROUP].queues.coldest(level, priority, self.allocators[GROUP].num_blocks[level])
            # Where NVMe is too small for all, exchanging one block's copy for another's would never end.
            if not self.allocators[GROUP].write_out([cast(Block, record) for record in coldest], True):
                return False
        return self.allocators[GROUP].writes_in_flight == 0

    def finish(self, move: Move, failed: bool, source_is_bad: bool = True) -> None:
        """A Move has ended. When it failed, its content is lost to everybody who holds it.

        ``source_is_bad``: a failed read condemns the NVMe slot. False where the file was good and the way from there failed.
        """
        allocator = self.allocators[GROUP]
        if not failed:
            allocator.finished(move)
            return
        lost = allocator.failed(move) if source_is_bad else allocator.failed_source_is_good(move)
        if lost is not None:
            self.counters.lost += 1
            self._lose(lost)

    def _lose(self, block: Block) -> None:
        """The block's bytes never arrived: out of the tree, and every sequence that holds it goes back to the tokens before it."""
        if block.node is not None:
            self.allocators[GROUP].publish_removed(block)
            self.tree.detach(block, GROUP)
        self.allocators[GROUP].drop_backings(block)
        for sequence in self.sequences.values():
            if block in sequence.blocks:
                self._replace_prefix_from(sequence, sequence.blocks.index(block))
        self.allocators[GROUP].end_call()
        if block.ref_count == 0 and not self.allocators[GROUP].is_busy(block):
            self.allocators[GROUP].queues.claim(block)
            self.allocators[GROUP].queues.add_empty_first(block, level_of(block.index))

    def _replace_prefix_from(self, sequence: ActiveSequence, first: int) -> None:
        """Exchange a failed block and the reused blocks behind it for private ones: the engine will compute them again."""
        sequence.computed = min(sequence.computed, first * self.tokens_per_block)
        sequence.valid = min(sequence.valid, sequence.computed)
        sequence.must_report = True
        for position in range(first, max(sequence.num_prefix_blocks, first + 1)):
            block = sequence.blocks[position]
            if block.ref_count == 1 and block.node is None:
                continue  # private already
            if self.allocators[GROUP].queues.num_free(PRIMARY) == 0:
                sequence.must_preempt = True
                return
            private = take_for(self.allocators[GROUP], sequence.request, position)
            sequence.blocks[position] = private
            self.allocators[GROUP].release(block)
        sequence.num_prefix_blocks = min(sequence.num_prefix_blocks, first)

    def deliver(self, sequence: ActiveSequence) -> None:
        """The sequence is ready: its hits count now, by the level they came from."""
        sequence.must_report = False
        if sequence.delivered:
            return
        sequence.delivered = True
        left = sequence.valid
        for level in sequence.origin_levels:
            tokens = min(left, self.tokens_per_block)
            if tokens <= 0:
                break
            self.counters.hit_tokens[level] += tokens
            self.counters.hit_blocks[level] += 1
            left -= tokens

    # -- start and reset -------------------------------------------------------------------------------------------------

    def adopt_store(self, rows: Sequence[WarmRow], quarantined: Sequence[int]) -> None:
        """At start: what the store directory holds already."""
        for slot in quarantined:
            self.allocators[GROUP].quarantine_slot(slot)
        for row in sorted(rows, key=_warm_order):
            self.allocators[GROUP].adopt_warm(row)

    def reset(self) -> None:
        """Forget all cached content on all levels.

        Raises:
            RequestError: sequences or leases are active.
        """
        if self.sequences or self.leases:
            raise RequestError(f"reset: {len(self.sequences)} sequences and {len(self.leases)} leases are active; end them first")
        for block in self.allocators[GROUP].blocks:
            if block.has_content:
                self.allocators[GROUP].forget(block)

    # -- helpers ---------------------------------------------------------------------------------------------------------

    def sequence(self, request_id: int) -> ActiveSequence:
        """Raises UnknownRequest."""
        sequence = self.sequences.get(request_id) if isinstance(request_id, int) else None
        if sequence is None:
            raise UnknownRequest(f"request {request_id!r}: no active sequence has this id (active: {len(self.sequences)})")
        return sequence

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.tokens_per_block - 1) // self.tokens_per_block


def _require_reported(sequence: ActiveSequence) -> None:
    """An engine that does not know of a failed read computes on tokens that are not there: refuse what it says about them."""
    if sequence.must_preempt:
        raise RequestError(f"request {sequence.id}: a block whose read failed could not be replaced; remove this sequence and admit it "
                           "again")
    if sequence.must_report:
        raise RequestError(f"request {sequence.id}: a read failed and {sequence.valid} of {sequence.prepopulated} reused tokens are left; "
                           "wait until it is ready and compute from there")


def _warm_order(row: WarmRow) -> int:
    return row.hits


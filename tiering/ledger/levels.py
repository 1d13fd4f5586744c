"""What happens to content whose slot is wanted: one level down, or out (design: ledger rules).

A move between levels is the exchange of two handles' pool indices; the bytes follow when the transfer manager carries out the
numbered Moves written here.
"""

from __future__ import annotations

from typing import cast

from kvtier.policies.eviction import EvictionQueues
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import LEVEL_BITS, NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.moves import Move, MoveLog
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.slots import SlotTable
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree


class LevelTable(SlotTable):
    """Slots, with the queues that say whose content is given up next, and where it goes.

    Attributes:
        now: the clock of releases; wall_clock_offset: wall clock less that clock, for expiries outlive the process in wall-clock time.
        quarantined: NVMe slots that must not be used.
        warm: by chain key, what NVMe has held since the start and nobody has matched yet.
    """

    def __init__(self, group: int, num_blocks: tuple[int, int, int], tokens_per_block: int, queues: EvictionQueues, tree: ReuseTree,
                 moves: MoveLog, events: EventLog, counters: LedgerCounters, rules: TierRules) -> None:
        super().__init__(num_blocks)
        self.group = group
        self.tokens_per_block = tokens_per_block
        self.queues = queues
        self.tree = tree
        self.moves = moves
        self.events = events
        self.counters = counters
        self.rules = rules
        self.now = 0.0
        self.wall_clock_offset = 0.0
        self.quarantined: set[int] = set()
        self.warm: dict[bytes, Block] = {}
        self._may_write_ahead = True  # something has changed that could let one more block be written ahead
        for level in range(NUM_LEVELS):
            queues.add_never_used(self.holders[level], level)

    # -- forgetting ------------------------------------------------------------------------------------------------------

    def drop(self, block: Block) -> None:
        """Forget the block's content: out of the tree (Removed), lower copies given up. The handle is left in no queue."""
        self.queues.claim(block)
        if block.node is not None:
            self.publish_removed(block)
            self.tree.detach(block, self.group)
        elif block.extra is not None and block.warm_key:
            del self.warm[block.warm_key]
            block.warm_key = b""
        self.drop_backings(block)

    def forget(self, block: Block) -> None:
        """Drop unreferenced content and give its handle back."""
        level = level_of(block.index)
        self.drop(block)
        if level == NVME and not self.is_busy(block):
            self.moves.discard(self.group, slot_of(block.index))
        if block.ref_count == 0 and not self.is_busy(block):
            self.give_back(block)

    def drop_backings(self, block: Block) -> None:
        """Give up the block's lower copies, because its content is about to change or to go."""
        if block.extra is None:
            return
        for spare in (block.secondary_backing, block.nvme_backing):
            if spare is not None:
                self._give_up_copy(spare)
                self.queues.claim(spare)
                if level_of(spare.index) == NVME and not self.is_busy(spare):
                    self.moves.discard(self.group, slot_of(spare.index))
                self._settle(spare)

    def _give_up_copy(self, spare: Block) -> None:
        """The copy that this backing holds is nobody's any more."""
        spare.leave_owner()

    # -- names and events ------------------------------------------------------------------------------------------------

    def chain_key(self, block: Block) -> bytes:
        """The block's name outside the process."""
        if block.node is not None:
            return block.node.chain_key(block.position)
        return block.warm_key

    def publish_removed(self, block: Block) -> None:
        node = block.node
        if node is not None:
            self.events.removed(self.group, node.run, block.position)

    def publish_priority(self, block: Block, old: int, new: int) -> None:
        node = block.node
        if node is not None:
            self.events.priority_changed(self.group, node.run, block.position, old, new)

    def _publish_level(self, block: Block, old: int, new: int) -> None:
        node = block.node
        if node is not None:
            if old == PRIMARY:
                node.lower[self.group] += 1
            elif new == PRIMARY:
                node.lower[self.group] -= 1
            if self.events.enabled:
                self.events.level_changed(self.group, node.run, block.position, old, new)

    def _drop_span(self, node: Node, first: int, end: int) -> list[Block]:
        """Blocks ``[first, end)`` of one run, all there, without lower copies and in no queue, lose their content, the last one first."""
        self.events.removed_span(self.group, node.run, first, end)
        return self.tree.detach_span(node, self.group, first, end)

    # -- down ------------------------------------------------------------------------------------------------------------

    def _may_go_down(self, priority: int) -> bool:
        """Whether primary content of this priority, without a lower copy, has earned a secondary slot and would get one."""
        return priority >= self.rules.secondary_offload_min_priority and self._secondary_victim(priority) is not None

    def displaced_by(self, block: Block | None) -> Block | None:
        """The content that loses its secondary slot when this primary handle is taken, because what it holds goes down."""
        if (block is None or not block.has_content or block.priority < self.rules.secondary_offload_min_priority
                or self._good_copy(block) is not None):
            return None
        victim = self._secondary_victim(block.priority)
        return victim if victim is not None and victim.has_content else None

    def _good_copy(self, block: Block) -> Block | None:
        """The lower copy to whose slot primary content goes without a Move."""
        if block.extra is None:
            return None
        backing = block.secondary_backing
        if backing is None and block.priority >= self.rules.nvme_offload_min_priority:
            backing = block.nvme_backing
            if backing is not None and self.is_busy(backing):
                return None
        return backing

    def _go_down(self, block: Block) -> Block | None:
        """Exchange claimed primary content with a lower handle. Returns the handle that has the primary slot now."""
        backing = self._good_copy(block)
        if backing is not None:
            backing.leave_owner()
            self.queues.claim(backing)
            return self._swap_down(block, backing)
        victim = self._secondary_victim(block.priority)
        if victim is None:
            return None
        target = self._vacate_secondary(victim)
        self._move(block, target, 0, b"")
        return self._swap_down(block, target)

    def _swap_down(self, block: Block, target: Block) -> Block:
        """The order matters: both are claimed and the Move is written before the exchange, the block is queued after it."""
        old = block.index & LEVEL_BITS
        self._exchange(block, target)
        self._publish_level(block, old, block.index & LEVEL_BITS)
        if block.extra is not None:
            self._requeue_nvme_backing(block)
        self.queues.note_use(block)  # not a release: its duration goes on
        self._settle(block)
        return target

    def _secondary_victim(self, priority: int) -> Block | None:
        """The queued secondary handle that content of this priority may displace; None when everything there is worth more."""
        record = self.queues.front(SECONDARY)
        if record is None:
            return None
        victim = cast(Block, record)
        if victim.priority > priority and victim.has_content:
            return None
        return victim

    def _vacate_secondary(self, victim: Block) -> Block:
        """Claim a queued secondary handle and let go of its content. Returns the handle that has its slot now."""
        self.queues.claim(victim)
        if victim.owner is not None:
            self._give_up_copy(victim)
        elif victim.has_content:
            backing = victim.nvme_backing
            if backing is not None and not self.is_busy(backing) and victim.priority >= self.rules.nvme_offload_min_priority:
                backing.leave_owner()
                self.queues.claim(backing)
                return self._swap_down(victim, backing)
            self.drop(victim)
            self.counters.dropped += 1
            self.counters.host_dropped += 1
            if victim.priority < self.rules.nvme_offload_min_priority and self.num_blocks[NVME]:
                self.counters.dropped_priority += 1
        return victim

    def _move(self, source: Block, target: Block, num_tokens: int, key: bytes) -> Move:
        if target.index & LEVEL_BITS != PRIMARY:  # a primary slot got its generation when it was taken
            target.generation += 1
        content = source
        expiry = 0.0
        if source.extra is not None:
            content = source.owner or source
            if content.expires_at > 0.0:
                expiry = content.expires_at + self.wall_clock_offset
        return self.moves.move(self.group, source.id, source.index, source.generation, target.index, target.generation, num_tokens, key,
                        content.priority, expiry)

    # -- queueing --------------------------------------------------------------------------------------------------------

    def _settle(self, handle: Block) -> None:
        """Queue an unreferenced handle that is in no queue as what it is; busy and quarantined ones wait."""
        if handle.ref_count > 0 or handle.queue != NOT_QUEUED or handle.file_uses > 0:
            return
        level = handle.index & LEVEL_BITS
        if level != PRIMARY and not self._takes_part(handle):
            return
        if handle.node is not None:
            self.queues.restore_content(handle, level)
            return
        owner = handle.owner
        if owner is not None:
            self._queue_backing(handle, owner)
        elif handle.warm_key:
            self.queues.restore_content(handle, level)
        else:
            self.queues.add_empty_last(handle, level)

    def give_back(self, handle: Block) -> None:
        """Queue an unreferenced handle that has lost its content and is in no queue: before the other empty ones."""
        level = handle.index & LEVEL_BITS
        if level == PRIMARY or self._takes_part(handle):
            self.queues.add_empty_first(handle, level)

    def _takes_part(self, handle: Block) -> bool:
        """Whether a lower handle may be queued: not with a slot found bad. Then something may be written ahead that could not be before."""
        if self.quarantined and level_of(handle.index) == NVME and slot_of(handle.index) in self.quarantined:
            return False
        self._may_write_ahead = True
        return True

    def _settle_after_busy(self, handle: Block) -> None:
        if handle.ref_count > 0 or handle.file_uses > 0:
            return
        if handle.extra is not None and not handle.has_content and handle.owner is None:
            self.drop_backings(handle)
        self._settle(handle)

    def _queue_backing(self, spare: Block, owner: Block) -> None:
        """The NVMe copy of a secondary block is what makes its slot clean, so nobody else may take it: giving it up for the next
        block to be written ahead would write the two in turns, for ever."""
        level = spare.index & LEVEL_BITS
        if level == NVME and owner.index & LEVEL_BITS != PRIMARY:
            self.queues.add_kept_backing(spare, level)
        else:
            self.queues.note_use(spare)
            self.queues.add_backing(spare, level)

    def _requeue_nvme_backing(self, owner: Block) -> None:
        """The owner has changed its level."""
        spare = owner.nvme_backing
        if spare is not None and spare.queue != NOT_QUEUED:
            self.queues.claim(spare)
            self._queue_backing(spare, owner)

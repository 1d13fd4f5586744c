"""One group's handles on their three levels: taking, holding, releasing, promoting (design: ledger rules).

Everything here is bookkeeping under the manager's lock. Verbs for many handles at once have the effect, and the order of effects,
of the verb for one handle called for each; they exist because most of a handle's cost is in what they do once for a whole run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvtier.errors import CapacityError
from kvtier.policies.eviction import EMPTY, NUM_PRIORITIES, EvictionQueues, ListHead
from kvtier.policies.queue_record import NOT_QUEUED, QueueRecord
from kvtier.pools.pool_index import LEVEL_BITS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.file_level import FileLevel
from kvtier.tiering.ledger.moves import MoveLog
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled, for what is counted per handle


class BlockAllocator(FileLevel):
    """Handles, queues and slots of one group."""

    def __init__(self, group: int, num_blocks: tuple[int, int, int], tokens_per_block: int, queues: EvictionQueues, tree: ReuseTree,
                 moves: MoveLog, events: EventLog, counters: LedgerCounters, rules: TierRules) -> None:
        super().__init__(group, num_blocks, tokens_per_block, queues, tree, moves, events, counters, rules)
        self._spares: list[Block] = []  # of promotions in this call; released when it ends

    # -- taking ----------------------------------------------------------------------------------------------------------

    def take(self, priority: int, duration: float) -> Block:
        """A primary handle without content or references, in no queue. May offload or drop the coldest content.

        Raises:
            CapacityError: every primary handle is referenced. Callers look before, so that nothing is half done.
        """
        block = self._vacate_front()
        if self.unconfirmed.by_block:
            self.unconfirmed.taken(block)
        block.generation += 1
        block.priority = priority
        block.grade_list = 0
        if duration != 0.0 or block.extra is not None:
            block.duration = duration
            block.expires_at = 0.0
        return block

    def take_many(self, count: int, priority: int, duration: float) -> list[Block]:
        """``count`` primary handles in the order of taking, each with one reference: the caller's.

        Raises:
            CapacityError: fewer are free; none has been taken.
        """
        queues = self.queues
        free = queues.num_free(PRIMARY)
        if count > free:
            raise CapacityError(f"{count} primary blocks wanted, {free} are free", count, free)
        taken: list[Block] = []
        while len(taken) < count:
            wanted = count - len(taken)
            head = queues.front_list(PRIMARY)
            assert head is not None
            if head.kind == EMPTY:
                self._take_empties(taken, head, wanted)
                continue
            run: list[Block] = []
            if head.kind < NUM_PRIORITIES and not self._may_go_down(head.kind):
                run = self._drop_run(head, wanted)
            if not run:
                taken.append(self._vacate_front())
            elif len(taken) < len(run):
                run[:0] = taken  # sooner than moving the longer list
                taken = run
            else:
                taken.extend(run)
        if self.unconfirmed.by_block:
            for block in taken:
                self.unconfirmed.taken(block)
        for block in taken:
            block.queue = NOT_QUEUED
            block.generation += 1
            block.priority = priority
            block.grade_list = 0
            block.ref_count = 1
            if duration != 0.0 or block.extra is not None:
                block.duration = duration
                block.expires_at = 0.0
        return taken

    def _vacate_front(self) -> Block:
        """The handle of the primary slot that is given up next, claimed and without content. Raises CapacityError when there is none."""
        head = self.queues.front_list(PRIMARY)
        if head is None:
            raise CapacityError("no free primary block: all are referenced", 1, 0)
        block = cast(Block, head.next)
        self.queues.claim(block)
        counters = self.counters
        counters.alloc_total += 1
        if not block.has_content:
            counters.alloc_new += 1
            return block
        if block.priority >= self.rules.secondary_offload_min_priority:
            spare = self._go_down(block)
            if spare is not None:
                return spare
        elif self.num_blocks[SECONDARY]:
            counters.dropped_priority += 1
        self.drop(block)
        counters.dropped += 1
        return block

    def _take_empties(self, taken: list[Block], head: ListHead, wanted: int) -> None:
        """Up to ``wanted`` empty handles from the front of their list."""
        count = min(wanted, head.length)
        first = head.next
        last = first
        following = first
        for _ in range(count):
            last = following
            last.queue = NOT_QUEUED
            taken.append(cast(Block, last))
            following = last.next
        self.queues.unlink(first, last, head.queue, count)
        self.counters.alloc_total += count
        self.counters.alloc_new += count

    def _drop_run(self, head: ListHead, wanted: int) -> list[Block]:
        """Drop up to ``wanted`` blocks from the front of a list of content and return them, not yet marked as in no queue: those that
        stand in one run of the tree, tail first, and have no lower copies, as long as no other grade's block would go before. That is how
        a sequence was released. None, and nothing done, when the front is not such a block."""
        block = cast(Block, head.next)
        node = block.node
        if node is None or block.extra is not None:
            return []
        end: i64 = block.position + 1
        first: i64 = block.position
        least: i64 = max(end - wanted, 0)
        last = block
        values = node.values[self.group]
        last_turn: i64 = self.queues.last_turn(head)
        while first > least:
            warmer = values[first - 1]
            if warmer is None or last.next is not warmer or warmer.extra is not None or warmer.stamp > last_turn:
                break
            first -= 1
            last = warmer
        count = end - first
        self.queues.unlink(block, last, head.queue, count)
        dropped = self._drop_span(node, first, end)
        dropped.reverse()
        self.counters.alloc_total += count
        self.counters.dropped += count
        if head.kind < self.rules.secondary_offload_min_priority and self.num_blocks[SECONDARY]:
            self.counters.dropped_priority += count
        return dropped

    # -- holding and releasing -------------------------------------------------------------------------------------------

    def hold(self, block: Block) -> None:
        """One more reference. Leaves its queue first: a referenced block is in none."""
        if block.ref_count == 0:
            if block.queue != NOT_QUEUED:
                self.queues.claim(block)
            elif block.file_uses > 0:
                self._count_unreferenced(block, -1)
            if block.node is not None:
                block.node.held[self.group] += 1
        block.ref_count += 1

    def hold_many(self, blocks: list[Block]) -> None:
        """:meth:`hold` for each but placeholders. A prompt's blocks stand tail first in their queue: each is the colder neighbour of
        the one before it, and such runs leave the queue at once."""
        position = 0
        count = len(blocks)
        while position < count:
            block = blocks[position]
            position += 1
            queue = block.queue
            if queue == NOT_QUEUED:
                if block.id >= 0:
                    self.hold(block)
                continue
            first = position
            last = block
            last.queue = NOT_QUEUED
            last.ref_count += 1
            node = block.node
            held = 1  # of the node's handles, since the last time they were counted
            while position < count:
                following = blocks[position]
                if last.previous is not following:
                    break
                last = following
                last.queue = NOT_QUEUED
                last.ref_count += 1
                position += 1
                if last.node is not node:
                    if node is not None:
                        node.held[self.group] += held
                    node = last.node
                    held = 0
                held += 1
            if node is not None:
                node.held[self.group] += held
            self.queues.unlink(last, block, queue, position - first + 1)

    def release(self, block: Block) -> None:
        """One reference fewer; at zero the handle becomes evictable, or empty when it is not in the tree."""
        assert block.ref_count > 0
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.node is not None:
                block.node.held[self.group] -= 1
            self._settle_released(block)

    def release_many(self, blocks: list[Block]) -> None:
        """:meth:`release` for each but placeholders, the last one first: so a prompt's tail is given up before its head."""
        queues = self.queues
        stamp: i64 = queues.next_stamp
        open_queue: i64 = NOT_QUEUED  # the list at whose back a run is being linked
        last: QueueRecord = self.placeholder
        count: i64 = 0
        held_by: Node | None = None
        held: i64 = 0              # of that node's handles, and no more by anybody
        for block in reversed(blocks):
            references = block.ref_count - 1
            if references != 0:
                if references > 0:
                    block.ref_count = references
                else:
                    assert block.id < 0
                continue
            block.ref_count = 0
            index: i64 = block.index
            if block.node is not held_by:
                if held_by is not None:
                    held_by.held[self.group] -= held
                held_by = block.node
                held = 0
            held += 1
            extra = block.extra
            if (held_by is None or index & LEVEL_BITS != PRIMARY or block.file_uses > 0
                    or (extra is not None and (extra.duration != 0.0 or extra.expires_at != 0.0))):
                if count > 0:
                    queues.appended(last, open_queue, count)
                    count = 0
                open_queue = NOT_QUEUED
                queues.next_stamp = stamp
                self._settle_released(block)
                stamp = queues.next_stamp
                continue
            queue = block.priority + block.grade_list  # the lists of the primary level have the lowest numbers
            if queue != open_queue:
                if count > 0:
                    queues.appended(last, open_queue, count)
                    count = 0
                open_queue = queue
                last = queues.heads[queue].previous
            block.stamp = stamp
            stamp += 1
            block.queue = queue
            block.previous = last
            last.next = block
            last = block
            count += 1
        if count > 0:
            queues.appended(last, open_queue, count)
        queues.next_stamp = stamp
        if held_by is not None:
            held_by.held[self.group] -= held

    def add_content(self, block: Block) -> None:
        """Queue unreferenced content as most recently used; when it is busy, in this order once its Moves have ended."""
        self.queues.note_release(block, self.now)
        self._settle(block)

    def _settle_released(self, block: Block) -> None:
        """Nobody references the block any more."""
        if block.file_uses > 0:
            self._count_unreferenced(block, 1)
        if block.file_uses > 0 or block.has_content:
            self.add_content(block)
        else:
            self.drop_backings(block)
            self.give_back(block)

    # -- moving ----------------------------------------------------------------------------------------------------------

    def promote(self, block: Block) -> None:
        """Bring a block that is in no queue to the primary level. The lower copy stays as its backing where there is one to keep."""
        level = block.index & LEVEL_BITS
        if level == PRIMARY:
            return
        key = self.chain_key(block) if level == NVME else b""
        spare = self.take(block.priority, 0.0)
        move = self._move(block, spare, 0, key)
        self._rise(block, spare, level)
        self.expect(move)
        if level == NVME:
            self._set_busy(block)
            self._set_busy(spare)

    def rise_into(self, block: Block, own: Block) -> None:
        """Bring a block to the primary level by giving it the slot of ``own``, a primary handle with the same bytes that nobody but the
        caller references. ``own`` gets the lower slot, and its one reference ends."""
        level = level_of(block.index)
        own.ref_count = 0
        self._rise(block, own, level)
        if level == NVME and own.owner is None:  # no read of that slot will end, and delete its row then
            self.moves.discard(self.group, slot_of(own.index))

    def _rise(self, block: Block, spare: Block, level: int) -> None:
        """Exchange a lower block with a primary handle, whose new slot stays the block's backing or is given back at the call's end."""
        self._exchange(block, spare)
        self._publish_level(block, level, PRIMARY)
        if block.extra is not None:
            self._requeue_nvme_backing(block)
        if self.rules.keep_backing and block.node is not None and block.num_tokens == self.tokens_per_block:
            block.add_backing(spare)
        self._spares.append(spare)

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        """Copy the first tokens of one handle's content into another's slot."""
        self.expect(self._move(source, target, num_tokens, b""))
        if self.unconfirmed.by_block:
            self.unconfirmed.copied(source, target)

    def offload(self, block: Block) -> bool:
        """Move unreferenced primary content down by one level now. False when the secondary level has no place for it."""
        self.queues.claim(block)
        spare = self._go_down(block)
        if spare is None:
            self._settle(block)
            return False
        self.queues.add_empty_last(spare, PRIMARY)
        return True

    def end_call(self) -> None:
        """Release the spares of this call's promotions. Not earlier: within the call their slots are still being read, and a
        block offloaded into one would have to wait for that read."""
        spares = self._spares
        if spares:
            self._spares = []
            for spare in spares:
                self._settle(spare)

    def expire(self) -> None:
        """Let durations that have passed end: the blocks fall to the default priority."""
        for record, priority in self.queues.refresh(self.now):
            block = cast(Block, record)
            self._may_write_ahead = True  # it may have been too low for NVMe before
            self.publish_priority(block, priority, block.priority)

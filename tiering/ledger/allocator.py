"""One group's handles on their three levels: taking, releasing, offloading, onboarding (design: ledger rules).

Everything here is bookkeeping under the manager's lock. A move between levels is the exchange of two handles' pool indices; the
bytes follow when the transfer manager carries out the numbered Moves written here.
"""

from __future__ import annotations

from typing import Final, cast

from kvtier.errors import CapacityError
from kvtier.policies.eviction import NOT_QUEUED, EvictionQueues, QueueRecord
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, PoolIndex, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.moves import Move, MoveLog, WarmRow
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.slots import SlotTable
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree
from kvtier.types import BlockId

MAX_WRITES_IN_FLIGHT: Final = 64
MAX_SCAN: Final = 4096
PLACEHOLDER_ID: Final = -2
ALREADY_EXPIRED: Final = 1e-9  # on the clock of releases, where 0.0 means never


class BlockAllocator(SlotTable):
    """Handles, queues and slots of one group."""

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
        self.wall_clock_offset = 0.0  # wall clock less the clock of releases: expiries outlive the process in wall-clock time
        self.quarantined: set[int] = set()                                    # NVMe slots that must not be used
        self.warm: dict[bytes, Block] = {}
        self.writes_in_flight = 0
        self.placeholder = Block(BlockId(PLACEHOLDER_ID), PoolIndex(-1))      # stands where a sequence has no block; in no queue
        self._spares: list[Block] = []       # of promotions in this call; released when it ends
        self._may_write_ahead = True
        for block in self.blocks:
            queues.add_empty_last(block, level_of(block.index))

    # -- taking and giving back ------------------------------------------------------------------------------------------

    def take(self, priority: int, duration: float) -> Block:
        """A primary handle without content, in no queue. May offload or drop the coldest content.

        Raises:
            CapacityError: every primary handle is referenced. Callers check ``queues.free`` first, so that nothing is half done.
        """
        record = self.queues.front(PRIMARY)
        if record is None:
            raise CapacityError("no free primary block: all are referenced", 1, 0)
        block = cast(Block, record)
        self.queues.claim(block)
        self.counters.alloc_total += 1
        if block.has_content:
            block = self._evict_primary(block)
        else:
            self.counters.alloc_new += 1
        block.priority = priority
        block.duration = duration
        block.expires_at = 0.0
        self.generations[PRIMARY][slot_of(block.index)] += 1
        return block

    def hold(self, block: Block) -> None:
        """One more reference. Leaves its queue first: a referenced block is in none."""
        self.queues.claim(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference fewer; at zero the handle becomes evictable, or empty when it is not in the tree."""
        assert block.ref_count > 0
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.has_content or self.is_busy(block):
            self.add_content(block)
        else:
            self.drop_backings(block)
            self.queues.add_empty_first(block, level_of(block.index))

    def add_content(self, block: Block) -> None:
        """Queue unreferenced content as most recently used; when it is busy, in this order once its Moves have ended."""
        self.queues.note_release(block, self.now)
        self._settle(block)

    def end_call(self) -> None:
        """Release the spares of this call's promotions. Not earlier: within the call their slots are still being read, and a
        block offloaded into one would have to wait for that read."""
        spares = self._spares
        if spares:
            self._spares = []
            for spare in spares:
                self._settle(spare)

    # -- up and down -----------------------------------------------------------------------------------------------------

    def promote(self, block: Block) -> None:
        """Bring a block that is in no queue to the primary level. The lower copy stays as its backing where there is one to keep."""
        level = level_of(block.index)
        if level == PRIMARY:
            return
        key = self.chain_key(block) if level == NVME else b""
        spare = self.take(block.priority, block.duration)
        self._move(block, spare, 0, key)
        self._exchange(block, spare)
        self._level_changed(block, level, PRIMARY)
        if level == NVME:
            self._set_busy(block)
            self._set_busy(spare)
        if self.rules.keep_backing and block.node is not None and block.num_tokens == self.tokens_per_block:
            spare.owner = block
            if level == NVME:
                block.nvme_backing = spare
            else:
                block.secondary_backing = spare
        self._spares.append(spare)

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        """Copy the first tokens of one handle's content into another's slot."""
        self._move(source, target, num_tokens, b"")

    def offload(self, block: Block) -> bool:
        """Move unreferenced primary content down by one level now. False when the secondary level has no place for it."""
        self.queues.claim(block)
        spare = self._go_down(block)
        if spare is None:
            self._settle(block)
            return False
        self.queues.add_empty_last(spare, PRIMARY)
        return True

    def drop(self, block: Block) -> None:
        """Forget the block's content: out of the tree (Removed), lower copies given up. The handle is left in no queue."""
        self.queues.claim(block)
        if block.node is not None:
            self.publish_removed(block)
            self.tree.detach(block, self.group)
        elif block.warm_key:
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
            self.queues.add_empty_first(block, level)

    def drop_backings(self, block: Block) -> None:
        """Give up the block's lower copies, because its content is about to change or to go."""
        for spare in (block.secondary_backing, block.nvme_backing):
            if spare is not None:
                self._unlink_backing(spare)
                self.queues.claim(spare)
                if level_of(spare.index) == NVME and not self.is_busy(spare):
                    self.moves.discard(self.group, slot_of(spare.index))
                self._settle(spare)

    def expire(self) -> None:
        """Let durations that have passed end: the blocks fall to the default priority."""
        for record, priority in self.queues.refresh(self.now):
            block = cast(Block, record)
            self._may_write_ahead = True  # it may have been too low for NVMe before
            if self.events.enabled and block.node is not None:
                self.events.priority_changed(self.group, block.node.run, block.position, priority, block.priority)

    # -- NVMe ------------------------------------------------------------------------------------------------------------

    def write_ahead(self) -> None:
        """Keep the coldest share of the secondary level clean: give its blocks an NVMe backing before anybody needs the slot."""
        if not self.num_blocks[NVME] or not self._may_write_ahead:
            return
        share = int(self.rules.write_ahead_share * self.num_blocks[SECONDARY] + 0.999)
        # Never more than half of NVMe: beyond that, each new copy would cost another block of the same share its own.
        limit = min(share, (self.num_blocks[NVME] + 1) // 2, MAX_SCAN)
        coldest = self.queues.coldest(SECONDARY, self.rules.nvme_offload_min_priority, limit)
        if self.write_out([cast(Block, record) for record in coldest]):
            self._may_write_ahead = False

    def write_out(self, blocks: list[Block], keep_backings: bool = False) -> bool:
        """Start NVMe backings for queued blocks that can have one. False when some had to be left for later.

        A primary block is written from its secondary backing, which it gets now if there is a place for it: so it stays where
        it is, and usable, while the file is written. ``keep_backings``: no other block gives up its NVMe backing for this.
        """
        for block in blocks:
            if (block.nvme_backing is not None or block.node is None or block.num_tokens != self.tokens_per_block
                    or not block.node.namespace.is_persistent or block.queue == NOT_QUEUED):
                continue
            if self.writes_in_flight >= MAX_WRITES_IN_FLIGHT:
                return False
            source = block
            if level_of(block.index) == PRIMARY:
                backing = block.secondary_backing or self._copy_down(block)
                if backing is None or self.is_busy(backing):
                    continue
                source = backing
            target = self._take_nvme(block.priority, keep_backings)
            if target is None:
                continue  # nothing on NVMe is worth less than this block
            self.queues.claim(source)
            block.nvme_backing = target
            target.owner = block
            self._move(source, target, 0, self.chain_key(block))
            self._set_busy(source)
            self._set_busy(target)
            self.writes_in_flight += 1
        return True

    def _copy_down(self, block: Block) -> Block | None:
        """Give primary content a secondary backing, if that costs no other block its only copy."""
        victim = self._replaceable_secondary(block.priority)
        if victim is None:
            return None
        spare = self._vacate_secondary(victim)
        self._move(block, spare, 0, b"")
        spare.owner = block
        block.secondary_backing = spare
        self.queues.add_backing(spare, SECONDARY)
        return spare

    def _replaceable_secondary(self, priority: int) -> Block | None:
        """A secondary handle without content, or else the coldest of this priority or less with a copy on NVMe."""
        front = self.queues.front(SECONDARY)
        if front is None:
            return None
        if not cast(Block, front).has_content:
            return cast(Block, front)
        for record in self.queues.coldest(SECONDARY, self.rules.nvme_offload_min_priority, MAX_SCAN):
            block = cast(Block, record)
            if block.priority > priority:
                break
            if block.nvme_backing is not None and not self.is_busy(block.nvme_backing):
                return block
        return None

    def adopt_warm(self, row: WarmRow) -> None:
        """At start: this NVMe slot already holds the block with this chain key. Its duration goes on counting."""
        block = self.holders[NVME][row.slot]
        if row.key in self.warm:
            self.moves.discard(self.group, row.slot)
            return
        self.queues.claim(block)
        block.warm_key = row.key
        block.priority = row.priority
        self.warm[row.key] = block
        self.queues.note_use(block)
        if row.expiry > 0.0:
            block.expires_at = max(row.expiry - self.wall_clock_offset, ALREADY_EXPIRED)
        self._settle(block)

    def quarantine_slot(self, slot: int) -> None:
        """At start: an NVMe slot that failed its check earlier. It is never used."""
        self.queues.claim(self.holders[NVME][slot])
        self.quarantined.add(slot)

    def condemn(self, slot: int) -> None:
        """An NVMe slot was found bad: what it held is forgotten, and it is never used again."""
        handle = self.holders[NVME][slot]
        self.queues.claim(handle)
        if handle.owner is not None:
            self._unlink_backing(handle)
        elif handle.has_content:
            self.drop(handle)
        if slot not in self.quarantined:
            self.quarantined.add(slot)
            self.counters.quarantined += 1

    def finish(self, move: Move, failed: bool, source_is_bad: bool) -> Block | None:
        """A Move has ended. Returns the handle whose content is lost when it failed and the slot is still that Move's."""
        source_level = level_of(move.source)
        source_slot = slot_of(move.source)
        level = level_of(move.destination)
        slot = slot_of(move.destination)
        source = self.holders[source_level][source_slot]
        target = self.holders[level][slot]
        if source_level == NVME or level == NVME:
            self._end_busy(source_level, source_slot)
            self._end_busy(level, slot)
        if level == NVME:
            self.writes_in_flight -= 1
            self._may_write_ahead = True
            if failed and target.owner is not None:
                self._unlink_backing(target)
            if target.owner is None:
                # Written for a block that is gone by now; or not written, and then the row of what was there before may be left.
                self.moves.discard(self.group, slot)
            self._settle_after_busy(target)
            self._settle_after_busy(source)
            return None
        lost = target if failed and self.generations[level][slot] == move.destination_generation else None
        if lost is not None:
            # Whoever keeps the handle computes its content again: copies of that must not fail because this Move did.
            self.generations[level][slot] += 1
        if lost is not None and lost.owner is not None:
            self._unlink_backing(lost)  # its owner was read from here; that Move fails too and says so
        if source_level == NVME:
            if failed:
                if source.owner is not None:
                    self._unlink_backing(source)
                if source_is_bad:
                    self.quarantined.add(source_slot)
                    self.counters.quarantined += 1
                else:
                    self.moves.discard(self.group, source_slot)
            elif source.owner is None and not source.has_content:
                self.moves.discard(self.group, source_slot)
            self._settle_after_busy(source)
        if lost is None:
            self._settle_after_busy(target)
        return lost

    def begin_access(self, block: Block) -> None:
        """A tool reads the slot: keep its handle out of the queues meanwhile."""
        self.queues.claim(block)
        self._set_busy(block)

    def end_access(self, level: int, slot: int) -> None:
        self._end_busy(level, slot)
        self._settle_after_busy(self.holders[level][slot])

    # -- looking ---------------------------------------------------------------------------------------------------------

    def chain_key(self, block: Block) -> bytes:
        """The block's name outside the process."""
        if block.node is not None:
            return block.node.chain_key(block.position)
        return block.warm_key

    def publish_removed(self, block: Block) -> None:
        node = block.node
        if node is not None:
            self.events.removed(self.group, node.run, block.position)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _evict_primary(self, block: Block) -> Block:
        """Free the primary slot of claimed content: go down where that is earned, else drop. Returns the slot's handle."""
        if block.priority >= self.rules.secondary_offload_min_priority:
            spare = self._go_down(block)
            if spare is not None:
                return spare
        self.drop(block)
        self.counters.dropped += 1
        return block

    def _go_down(self, block: Block) -> Block | None:
        """Exchange claimed primary content with a lower handle. Returns the handle that has the primary slot now."""
        backing = block.secondary_backing
        if backing is None and block.nvme_backing is not None and not self.is_busy(block.nvme_backing) \
                and block.priority >= self.rules.nvme_offload_min_priority:
            backing = block.nvme_backing
        if backing is not None:  # the lower copy is still good: no Move
            self._unlink_backing(backing)
            self.queues.claim(backing)
            return self._swap_down(block, backing)
        target = self._take_secondary(block.priority)
        if target is None:
            return None
        self._move(block, target, 0, b"")
        return self._swap_down(block, target)

    def _swap_down(self, block: Block, target: Block) -> Block:
        """The order matters: both are claimed and the Move is written before the exchange, the block is queued after it."""
        old = level_of(block.index)
        self._exchange(block, target)
        self._level_changed(block, old, level_of(block.index))
        self.queues.note_use(block)  # not a release: its duration goes on
        self._settle(block)
        return target

    def _take_secondary(self, priority: int) -> Block | None:
        """A secondary handle without content for content of this priority, in no queue; None when everything there is worth more."""
        record = self.queues.front(SECONDARY)
        if record is None:
            return None
        victim = cast(Block, record)
        if victim.has_content and victim.priority > priority:
            return None
        return self._vacate_secondary(victim)

    def _vacate_secondary(self, victim: Block) -> Block:
        """Claim a queued secondary handle and let go of its content. Returns the handle that has its slot now."""
        self.queues.claim(victim)
        if victim.owner is not None:
            self._unlink_backing(victim)
        elif victim.has_content:
            backing = victim.nvme_backing
            if backing is not None and not self.is_busy(backing) and victim.priority >= self.rules.nvme_offload_min_priority:
                self._unlink_backing(backing)
                self.queues.claim(backing)
                return self._swap_down(victim, backing)
            self.drop(victim)
            self.counters.dropped += 1
        return victim

    def _take_nvme(self, priority: int, keep_backings: bool) -> Block | None:
        """Like :meth:`_take_secondary`, one level down. The old row is deleted by whoever writes the slot."""
        record = self.queues.front(NVME)
        if record is not None and cast(Block, record).owner is not None:
            record = None if keep_backings else self._spare_backing()
            if record is None:
                coldest = self.queues.coldest(NVME, 0, 1)
                record = coldest[0] if coldest else None
        if record is None:
            return None
        victim = cast(Block, record)
        if victim.has_content and victim.priority > priority:
            return None
        self.queues.claim(victim)
        if victim.owner is not None:
            self._unlink_backing(victim)
        elif victim.has_content:
            self.drop(victim)
            self.counters.dropped += 1
        return victim

    def _spare_backing(self) -> QueueRecord | None:
        """The first NVMe backing of a primary block. That of a secondary block is what makes its slot clean: giving it up for the
        next block to be written ahead would write the two in turns, for ever."""
        for record in self.queues.backings(NVME, MAX_SCAN):
            owner = cast(Block, record).owner
            if owner is not None and level_of(owner.index) == PRIMARY:
                return record
        return None

    def _move(self, source: Block, target: Block, num_tokens: int, key: bytes) -> None:
        level = level_of(target.index)
        slot = slot_of(target.index)
        if level != PRIMARY:  # a primary slot got its generation from take()
            self.generations[level][slot] += 1
        content = source.owner or source
        expiry = content.expires_at + self.wall_clock_offset if content.expires_at > 0.0 else 0.0
        self.moves.move(self.group, source.id, source.index, self.generations[level_of(source.index)][slot_of(source.index)],
                        target.index, self.generations[level][slot], num_tokens, key, content.priority, expiry)

    def _level_changed(self, block: Block, old: int, new: int) -> None:
        if self.events.enabled and block.node is not None:
            self.events.level_changed(self.group, block.node.run, block.position, old, new)

    def _unlink_backing(self, spare: Block) -> None:
        owner = spare.owner
        assert owner is not None
        if owner.secondary_backing is spare:
            owner.secondary_backing = None
        else:
            owner.nvme_backing = None
        spare.owner = None

    def _settle(self, handle: Block) -> None:
        """Queue an unreferenced handle that is in no queue as what it is; busy and quarantined ones wait."""
        level = level_of(handle.index)
        if self.is_busy(handle) or handle.queue != NOT_QUEUED or handle.ref_count > 0:
            return
        if level == NVME and slot_of(handle.index) in self.quarantined:
            return
        if level != PRIMARY:
            self._may_write_ahead = True
        if handle.owner is not None:
            self.queues.add_backing(handle, level)
        elif handle.has_content:
            self.queues.restore_content(handle, level)
        else:
            self.queues.add_empty_last(handle, level)

    def _settle_after_busy(self, handle: Block) -> None:
        if handle.ref_count == 0 and not handle.has_content and handle.owner is None and not self.is_busy(handle):
            self.drop_backings(handle)
        self._settle(handle)

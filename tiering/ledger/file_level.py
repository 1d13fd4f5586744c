"""The NVMe level: copies written ahead, blocks found at start, slots found bad, and Moves that have ended (design: NVMe rules)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, cast

from kvtier.policies.eviction import BACKING, GRADE_LISTS, EvictionQueues
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import LEVEL_BITS, NVME, PRIMARY, SECONDARY, SLOT_SHIFT, PoolIndex, level_of, slot_of
from kvtier.tiering.ledger.block import Block, BlockExtra
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.levels import LevelTable
from kvtier.tiering.ledger.moves import Move, MoveLog
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree
from kvtier.tiering.ledger.unconfirmed import UnconfirmedBlocks

MAX_WRITES_IN_FLIGHT: Final = 64
MAX_PRIMARY_WRITES: Final = 4  # straight from primary slots, which nobody else can be given meanwhile
MAX_SCAN: Final = 4096
ALREADY_EXPIRED: Final = 1e-9  # on the clock of releases, where 0.0 means never


class FileLevel(LevelTable):
    """The three levels, the lowest of which is a file.

    Attributes:
        writes_in_flight: Moves to NVMe that have not ended.
        arriving: by primary slot, the last Move into it, until it has ended.
        overtaken: numbers of earlier Moves into such slots that have not ended, though another one will write there.
        unconfirmed: blocks of this group computed from what had not arrived.
        left_over: of what was to be written last, what is behind the block at which too many writes were in flight.
    """

    def __init__(self, group: int, num_blocks: tuple[int, int, int], tokens_per_block: int, queues: EvictionQueues, tree: ReuseTree,
                 moves: MoveLog, events: EventLog, counters: LedgerCounters, rules: TierRules) -> None:
        super().__init__(group, num_blocks, tokens_per_block, queues, tree, moves, events, counters, rules)
        self.writes_in_flight = 0
        self._stamp_seen = 0  # of the queues, when the primary level was last written ahead to its end
        self.arriving: dict[PoolIndex, Move] = {}
        self.overtaken: set[int] = set()
        self.unconfirmed = UnconfirmedBlocks()
        self.left_over: list[Block] = []

    # -- writing ---------------------------------------------------------------------------------------------------------

    def write_ahead(self) -> None:
        """Keep the coldest share of the level above NVMe clean: give its blocks an NVMe backing before anybody needs the slot.

        That is the secondary level or, where there is none, the primary one, from which only the direct way leads to a file.
        """
        if not self.num_blocks[NVME]:
            return
        level = SECONDARY if self.num_blocks[SECONDARY] else PRIMARY
        if not self._may_write_ahead and (level == SECONDARY or self._stamp_seen == self.queues.next_stamp):
            return
        priority = self.rules.nvme_offload_min_priority
        if level == PRIMARY:
            priority = max(priority, self.rules.secondary_offload_min_priority)
        share = int(self.rules.write_ahead_share * self.num_blocks[level] + 0.999)
        # Never more than half of NVMe: beyond that, each new copy would cost another block of the same share its own.
        limit = min(share, (self.num_blocks[NVME] + 1) // 2, MAX_SCAN)
        if level == PRIMARY:
            limit -= self.writes_in_flight  # they belong to the share, and are in no queue meanwhile
        coldest = self.queues.coldest(level, priority, limit)
        # A primary block's backing is given up first: for the next block of the same share the two would be written in turns, for ever.
        if self.write_out([cast(Block, record) for record in coldest], level == PRIMARY):
            self._may_write_ahead = False
            self._stamp_seen = self.queues.next_stamp

    def write_out(self, blocks: list[Block], keep_backings: bool = False) -> bool:
        """Start NVMe backings for queued blocks that can have one. False when some had to be left for later.

        A primary block is written from its secondary backing, which it gets now if there is a place for it: so it stays where
        it is, and usable, while the file is written. Without a secondary level its own slot is busy meanwhile, and few may be at
        once. ``keep_backings``: no other block gives up its NVMe backing for this.
        """
        most = MAX_WRITES_IN_FLIGHT if self.num_blocks[SECONDARY] else MAX_PRIMARY_WRITES
        unconfirmed = self.unconfirmed.by_block
        self.left_over = []
        is_complete = True
        for position, block in enumerate(blocks):
            if len(unconfirmed) > 0 and block.id in unconfirmed:
                is_complete = False  # a crash would leave it behind as if it were good
                continue
            extra = block.extra
            if ((extra is not None and block.nvme_backing is not None) or block.queue == NOT_QUEUED or not self._may_be_kept(block)
                    or not self._is_worth_a_write(block)):
                continue
            if self.writes_in_flight >= most:
                self.left_over = blocks[position:]
                return False
            source = block
            if level_of(block.index) == PRIMARY and self.num_blocks[SECONDARY]:
                backing = block.secondary_backing or self._copy_down(block)
                if backing is None or self.is_busy(backing):
                    continue
                source = backing
            target = self._take_nvme(block.priority, keep_backings)
            if target is None:
                continue  # nothing on NVMe is worth less than this block
            self.queues.claim(source)
            block.add_backing(target)
            self._move(source, target, 0, self.chain_key(block))
            self._set_busy(source)
            self._set_busy(target)
            self.writes_in_flight += 1
        return is_complete

    def write_on(self) -> bool:
        """Right after the writes in flight have ended, and nothing else has happened: go on with what they kept from being written.
        The next :meth:`write_ahead` would come to the same blocks, past all those before them. False when there is nothing."""
        left_over = self.left_over
        if not left_over:
            return False
        self.write_out(left_over, self.num_blocks[SECONDARY] == 0)
        return True

    def _may_be_kept(self, block: Block) -> bool:
        """Whether this content may lie in a file at all: a full block whose key means the same after a restart."""
        node = block.node
        return node is not None and block.num_tokens == self.tokens_per_block and node.namespace.is_persistent

    def _is_worth_a_write(self, block: Block) -> bool:
        """Whether a block in the tree may be written to NVMe as far as its uses and its place in the prompt go."""
        rules = self.rules
        if rules.nvme_min_uses > 0 and block.grade_list < GRADE_LISTS[rules.nvme_min_uses]:
            return False
        if rules.nvme_max_depth > 0:
            depth = block.position
            node = block.node
            while node is not None and node.parent is not None:
                node = node.parent
                depth += node.length
            return depth < rules.nvme_max_depth
        return True

    def _copy_down(self, block: Block) -> Block | None:
        """Give primary content a secondary backing, if that costs no other block its only copy."""
        victim = self._replaceable_secondary(block.priority)
        if victim is None:
            return None
        spare = self._vacate_secondary(victim)
        self._move(block, spare, 0, b"")
        block.add_backing(spare)
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

    def _take_nvme(self, priority: int, keep_backings: bool) -> Block | None:
        """An NVMe handle without content for content of this priority, in no queue; None when everything there is worth more.

        The row of what it held is deleted by whoever writes the slot.
        """
        head = self.queues.front_list(NVME)
        if head is None:
            return None
        record = head.next
        if head.kind == BACKING:
            # A copy of a block that is higher up now spares a write when that comes down again: it goes when its time has come, like
            # content, not before all of it. But it goes before this block has to, whatever colder content is worth more than both.
            coldest = self.queues.coldest_content(NVME)
            if coldest is not None and (keep_backings or (coldest.stamp < record.stamp and coldest.priority <= priority)):
                record = coldest
            elif keep_backings:
                return None
        victim = cast(Block, record)
        if victim.priority > priority and victim.has_content:
            return None
        self.queues.claim(victim)
        if victim.owner is not None:
            self._give_up_copy(victim)
        elif victim.has_content:
            self.drop(victim)
            self.counters.dropped += 1
        return victim

    # -- reading ahead ---------------------------------------------------------------------------------------------------

    def raise_from_file(self, block: Block) -> None:
        """Begin to read queued NVMe content into the secondary slot that is given up next. It is busy, and in no queue, until it is there;
        whoever matches it meanwhile gets its copy behind that read. The NVMe slot stays its backing."""
        key = self.chain_key(block)
        self.queues.claim(block)
        spare = self._vacate_secondary(cast(Block, self.queues.front(SECONDARY)))
        self._move(block, spare, 0, key)
        self._exchange(block, spare)
        self._publish_level(block, NVME, SECONDARY)
        self._set_busy(block)
        self._set_busy(spare)
        if self.rules.keep_backing:
            block.add_backing(spare)
        self.queues.note_use(block)

    def queue_as_used(self, block: Block) -> None:
        """Queue content as most recently used, without a release: durations go on."""
        self.queues.note_use(block)
        self._settle(block)

    # -- found at start, found bad ---------------------------------------------------------------------------------------

    def adopt_warm(self, slot: int, key: bytes, priority: int, expiry: float) -> None:
        """At start: this empty NVMe slot already holds the block with this chain key. Its duration goes on counting."""
        if key in self.warm:
            self.moves.discard(self.group, slot)
            return
        block = self.holders[NVME][slot]
        queues = self.queues
        queues.claim(block)
        extra = BlockExtra(block)
        extra.warm_key = key
        if expiry > 0.0:
            extra.expires_at = max(expiry - self.wall_clock_offset, ALREADY_EXPIRED)
        block.extra = extra
        block.priority = priority
        self.warm[key] = block
        if slot not in self.quarantined:
            queues.add_newest(block, NVME)

    def quarantine_slot(self, slot: int) -> None:
        """At start: an NVMe slot that failed its check earlier. It is never used."""
        self.queues.claim(self.holders[NVME][slot])
        self.quarantined.add(slot)

    def condemn(self, slot: int) -> None:
        """An NVMe slot was found bad: what it held is forgotten, and it is never used again."""
        handle = self.holders[NVME][slot]
        self.queues.claim(handle)
        if handle.owner is not None:
            self._give_up_copy(handle)
        elif handle.has_content:
            self.drop(handle)
        if slot not in self.quarantined:
            self.quarantined.add(slot)
            self.counters.quarantined += 1

    # -- Moves that have not ended, and that have ------------------------------------------------------------------------

    def expect(self, move: Move) -> None:
        """This Move is the last one into its primary slot."""
        earlier = self.arriving.get(move.destination)
        if earlier is not None:
            self.overtaken.add(earlier.number)
        self.arriving[move.destination] = move

    def is_pending(self, move: Move) -> bool:
        """Whether a Move into a primary slot has not ended."""
        return self.arriving.get(move.destination) is move or move.number in self.overtaken

    def finished(self, move: Move) -> None:
        """A Move has ended well."""
        source, target = self._end_transfer(move)
        if move.destination & LEVEL_BITS == NVME:
            self._end_write(source, target)
            return
        if move.source & LEVEL_BITS == NVME:
            if source.owner is None and not source.has_content:
                self.moves.discard(self.group, slot_of(move.source))
            self._settle_after_busy(source)
        self._settle_after_busy(target)

    def confirm(self, number: int) -> None:
        """A Move has ended well: what was computed from the bytes that it brought is good, as far as that depends on it."""
        if self.unconfirmed.by_move and self.unconfirmed.arrived(number):
            self._may_write_ahead = True

    def failed(self, move: Move) -> Block | None:
        """A Move has failed; if it read from NVMe, that slot is bad and never used again.

        Returns the handle whose content is lost, if the destination still is that Move's.
        """
        if level_of(move.source) == NVME:
            self.quarantined.add(slot_of(move.source))
            self.counters.quarantined += 1
        return self._fail(move)

    def failed_source_is_good(self, move: Move) -> Block | None:
        """Like :meth:`failed`, but an NVMe slot that it read from may be used again: only the way from there failed."""
        if level_of(move.source) == NVME:
            self.moves.discard(self.group, slot_of(move.source))
        return self._fail(move)

    def _fail(self, move: Move) -> Block | None:
        source, target = self._end_transfer(move)
        if level_of(move.destination) == NVME:
            if target.owner is not None:
                self._give_up_copy(target)
            self._end_write(source, target)
            return None
        lost = target if target.generation == move.destination_generation else None
        if lost is not None:
            # Whoever keeps the handle computes its content again: copies of that must not fail because this Move did.
            lost.generation += 1
            if lost.owner is not None:
                lost.leave_owner()  # its owner was read from here; that Move fails too and says so
        if level_of(move.source) == NVME:
            if source.owner is not None:
                self._give_up_copy(source)
            self._settle_after_busy(source)
        if lost is None:
            self._settle_after_busy(target)
        return lost

    def _end_transfer(self, move: Move) -> tuple[Block, Block]:
        """The handles that have the two slots now; slots used by a file operation are so no longer."""
        source_level = move.source & LEVEL_BITS
        source_slot = move.source >> SLOT_SHIFT
        level = move.destination & LEVEL_BITS
        slot = move.destination >> SLOT_SHIFT
        if source_level == NVME or level == NVME:
            self._end_busy(source_level, source_slot)
            self._end_busy(level, slot)
        if level == PRIMARY:
            if self.arriving.get(move.destination) is move:
                del self.arriving[move.destination]
            elif self.overtaken:
                self.overtaken.discard(move.number)
        return self.holders[source_level][source_slot], self.holders[level][slot]

    def _end_write(self, source: Block, target: Block) -> None:
        self.writes_in_flight -= 1
        self._may_write_ahead = True
        if target.owner is None:
            # Written for a block that is gone by now; or not written, and then the row of what was there before may be left.
            self.moves.discard(self.group, slot_of(target.index))
        self._settle_after_busy(target)
        self._settle_after_busy(source)

    # -- tools -----------------------------------------------------------------------------------------------------------

    def begin_access(self, block: Block) -> None:
        """A tool reads or writes the slot: keep its handle out of the queues meanwhile."""
        self.queues.claim(block)
        self._set_busy(block)

    def end_access(self, level: int, slot: int) -> None:
        self._end_busy(level, slot)
        handle = self.holders[level][slot]
        if level == NVME and handle.file_uses == 0 and handle.owner is None and not handle.has_content and slot not in self.quarantined:
            self.moves.discard(self.group, slot)  # forgotten meanwhile: the row stayed for the tool
        self._settle_after_busy(handle)


def adopt_rows(levels: Sequence[FileLevel], rows: Iterable[tuple[int, int, bytes, int, float, int]],
               quarantined: Iterable[tuple[int, int]]) -> None:
    """At start: what a store directory holds, as ``WarmRow``, and (group, slot) that must not be used. ``levels`` by group."""
    for group, slot in quarantined:
        levels[group].quarantine_slot(slot)
    for group, slot, key, priority, expiry, _hits in sorted(rows, key=itemgetter(5)):
        levels[group].adopt_warm(slot, key, priority, expiry)

"""``KeyedLevel``: host and NVMe slots of one group whose content has a key of the engine's, in one map (design: two ways to attach).

The same handles, queues, steps down, backings and files as below a reuse tree. There is no primary level, and ``warm``, the map of what a
store directory held at the start, is the map of everything: content stays there instead of being adopted by a tree.

``num_tokens`` of a handle is 1 when its slot holds the whole, verified bytes of its own key or, of a backing, of its owner's; 0 while they
are on their way.
"""

from __future__ import annotations

from typing import Final

from kvtier.policies.eviction import EvictionQueues
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import NVME, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.file_level import FileLevel
from kvtier.tiering.ledger.key_events import KeyEventLog
from kvtier.tiering.ledger.moves import Move, MoveLog
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree

WHOLE: Final = 1
KEY_BYTES: Final = 32
"""What a row of a store directory holds."""
SHORT_KEY_BYTES: Final = 24
"""Keys of up to so many bytes are filled up, with zeros and their length."""


def file_key(key: bytes) -> bytes:
    """A key of 32, or of 1 to 24 bytes as a store directory has it: 32 bytes, from which it can be told again."""
    if len(key) == KEY_BYTES:
        return key
    return key + bytes(KEY_BYTES - 1 - len(key)) + bytes((len(key),))


def engine_key(name: bytes) -> bytes:
    """The key that ``file_key`` made this of. (A digest of 32 bytes that happens to look filled up becomes a key nobody asks for.)"""
    length = name[KEY_BYTES - 1]
    if 0 < length <= SHORT_KEY_BYTES and name[length:KEY_BYTES - 1] == bytes(KEY_BYTES - 1 - length):
        return name[:length]
    return name


class KeyedLevel(FileLevel):
    """One group.

    Attributes:
        key_events: what came and went, of all groups.
        off_nvme: ids of handles whose content must not reach NVMe.
    """

    def __init__(self, group: int, num_host: int, num_nvme: int, queues: EvictionQueues, moves: MoveLog, key_events: KeyEventLog,
                 counters: LedgerCounters, rules: TierRules) -> None:
        super().__init__(group, (0, num_host, num_nvme), WHOLE, queues, ReuseTree(0, WHOLE), moves, EventLog(0, 0), counters, rules)
        self.key_events = key_events
        self.off_nvme: set[int] = set()

    # -- storing ---------------------------------------------------------------------------------------------------------

    def take_host(self, priority: int, duration: float) -> Block | None:
        """A host handle without content, with one reference: the caller's. What it held goes down or is dropped; None when everything
        there is referenced or worth more."""
        victim = self._secondary_victim(priority)
        if victim is None:
            return None
        counters = self.counters
        counters.alloc_total += 1
        if not victim.has_content:
            counters.alloc_new += 1
        handle = self._vacate_secondary(victim)
        handle.generation += 1
        handle.priority = priority
        handle.ref_count = 1
        if duration != 0.0 or handle.extra is not None:
            handle.duration = duration
            handle.expires_at = 0.0
        return handle

    def name(self, block: Block, key: bytes, off_nvme: bool) -> None:
        """From now on the key is this block's, whose bytes are on their way."""
        block.warm_key = key
        self.warm[key] = block
        if off_nvme:
            self.off_nvme.add(block.id)

    def arrived(self, block: Block) -> None:
        """A store has brought the bytes of a named block."""
        block.num_tokens = WHOLE
        self.key_events.stored(self.group, SECONDARY, block.warm_key)

    def has(self, key: bytes) -> bool:
        """Whether the bytes of a key are there, or are being read from NVMe: not while they are only being stored."""
        block = self.warm.get(key)
        return block is not None and (block.num_tokens == WHOLE or self.is_busy(block))

    # -- holding ---------------------------------------------------------------------------------------------------------

    def hold(self, block: Block) -> None:
        """One more reference. Leaves its queue first: a referenced block is in none."""
        if block.ref_count == 0:
            if block.queue != NOT_QUEUED:
                self.queues.claim(block)
            elif block.file_uses > 0:
                self._count_unreferenced(block, -1)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference fewer; at zero content becomes the most recently used, and a handle without any is empty."""
        assert block.ref_count > 0
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.file_uses > 0:
            self._count_unreferenced(block, 1)
            self.queues.note_release(block, self.now)
        elif block.warm_key:
            self._may_write_ahead = True
            self.queues.add_content(block, level_of(block.index), self.now)
        elif level_of(block.index) == SECONDARY:
            self.queues.add_empty_first(block, SECONDARY)
        else:
            self._settle(block)  # of a slot found bad, in no queue

    def touch(self, block: Block) -> None:
        """Queued content is the most recently used."""
        if block.queue != NOT_QUEUED:
            self.queues.claim(block)
            self.queue_as_used(block)

    def expire(self) -> None:
        """Let durations that have passed end: the blocks fall to the default priority."""
        if self.queues.refresh(self.now):
            self._may_write_ahead = True

    @property
    def has_writes(self) -> bool:
        """Copies to NVMe are under way, or the next ``write_ahead`` may begin some."""
        return self.num_blocks[NVME] > 0 and (self._may_write_ahead or self.writes_in_flight > 0)

    def num_unusable(self, level: int) -> int:
        """Slots of a level that are neither free nor referenced."""
        unusable = self.num_unreferenced_busy[level]
        if level == NVME:
            for slot in self.quarantined:
                handle = self.holders[NVME][slot]
                if handle.ref_count == 0 and not self.is_busy(handle):
                    unusable += 1
        return unusable

    def comes_from_nvme(self, block: Block) -> bool:
        """Of a block in host memory: whether it is on its way from NVMe, or could be read from there again because nobody uses it."""
        if block.num_tokens != WHOLE:
            return self.is_busy(block)
        copy = block.nvme_backing
        return block.queue != NOT_QUEUED and copy is not None and copy.num_tokens == WHOLE and not self.is_busy(copy)

    def leave_to_nvme(self, block: Block) -> None:
        """Give up the host copy of such a block."""
        copy = block.nvme_backing
        assert copy is not None
        self.queues.claim(block)
        copy.leave_owner()
        self.queues.claim(copy)
        self.queues.add_empty_first(self._swap_down(block, copy), SECONDARY)

    # -- losing ----------------------------------------------------------------------------------------------------------

    def drop(self, block: Block) -> None:
        """Forget the block's content: out of the map, lower copies given up. The handle is left in no queue."""
        self.queues.claim(block)
        key = block.warm_key
        if not key:
            return
        if block.num_tokens == WHOLE:
            self.key_events.removed(self.group, level_of(block.index), key)
            block.num_tokens = 0
        if block.nvme_backing is not None:
            self.drop_backings(block)
        del self.warm[key]
        block.warm_key = b""
        if self.off_nvme:
            self.off_nvme.discard(block.id)

    def lose(self, block: Block) -> None:
        """Forget content wherever it is and whoever holds it: they hold a slot without content from now on."""
        self.forget(block)

    def _give_up_copy(self, spare: Block) -> None:
        if spare.num_tokens == WHOLE:
            owner = spare.owner
            assert owner is not None
            self.key_events.removed(self.group, level_of(spare.index), owner.warm_key)
            spare.num_tokens = 0
        spare.leave_owner()

    # -- moving ----------------------------------------------------------------------------------------------------------

    def chain_key(self, block: Block) -> bytes:
        """The block's name in a store directory."""
        return file_key(block.warm_key)

    def _swap_down(self, block: Block, target: Block) -> Block:
        """Into the slot of its NVMe copy: the handle that had it has the host slot now, whose bytes are nobody's."""
        taken = super()._swap_down(block, target)
        target.num_tokens = 0
        self.key_events.removed(self.group, SECONDARY, block.warm_key)
        return taken

    def raise_from_file(self, block: Block) -> None:
        super().raise_from_file(block)
        block.num_tokens = 0
        copy = block.nvme_backing
        if copy is not None:
            copy.num_tokens = WHOLE
        else:
            self.key_events.removed(self.group, NVME, block.warm_key)

    def _may_be_kept(self, block: Block) -> bool:
        return block.num_tokens == WHOLE and block.warm_key != b"" and block.id not in self.off_nvme

    def adopt_warm(self, slot: int, key: bytes, priority: int, expiry: float) -> None:
        is_new = key not in self.warm
        super().adopt_warm(slot, key, priority, expiry)
        if is_new:
            self.warm[key].num_tokens = WHOLE
            self.key_events.stored(self.group, NVME, key)

    def finished(self, move: Move) -> None:
        level = level_of(move.destination)
        target = self.holders[level][slot_of(move.destination)]
        if level == NVME:
            owner = target.owner
            if owner is not None:
                target.num_tokens = WHOLE
                self.key_events.stored(self.group, NVME, owner.warm_key)
        elif target.warm_key:  # it has not been forgotten meanwhile
            target.num_tokens = WHOLE
            self.key_events.stored(self.group, SECONDARY, target.warm_key)
        super().finished(move)

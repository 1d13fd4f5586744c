"""``verify_keys``: the invariants of a keyed ledger, checked after every step of its property tests."""

from __future__ import annotations

from kvtier.errors import LedgerError
from kvtier.policies.eviction import BACKING, EMPTY, KEPT_BACKING, LISTS_PER_LEVEL, NUM_PRIORITIES
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import LEVEL_NAMES, NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import WHOLE, KeyedLevel


def verify_keys(ledger: KeyLedger) -> None:
    """Raise LedgerError naming the first broken invariant."""
    for group, level in enumerate(ledger.allocators):
        held = _references(ledger, group)
        _check_slots(level)
        for block in level.blocks:
            _check_handle(level, block, held.get(block.id, 0))
        for key, block in level.warm.items():
            if block.warm_key != key:
                _fail(f"group {group}: the map leads from {key!r} to a block of {block.warm_key!r}")
        _check_counters(level)
    for number, job in ledger.abandoned.items():
        if number in ledger.jobs or job.number != number:
            _fail(f"job {number} is either awaited or given up")
    if not 0 <= ledger.reads_in_flight <= sum(level.num_busy[NVME] for level in ledger.allocators):
        _fail(f"{ledger.reads_in_flight} reads are under way")


def _fail(message: str) -> None:
    raise LedgerError(f"broken invariant: {message}")


def _references(ledger: KeyLedger, group: int) -> dict[int, int]:
    """How often requests and jobs hold each handle."""
    held: dict[int, int] = {}
    for request in ledger.requests.values():
        for block in request.leases[group].values():
            held[block.id] = held.get(block.id, 0) + 1
    for jobs in (ledger.jobs, ledger.abandoned):
        for job in jobs.values():
            if job.group == group:
                for block in job.blocks:
                    held[block.id] = held.get(block.id, 0) + 1
                    if level_of(block.index) != SECONDARY:
                        _fail(f"job {job.number} uses host slots; block {block.id} is not in one")
    return held


def _check_slots(level: KeyedLevel) -> None:
    seen: set[int] = set()
    for block in level.blocks:
        place, slot = level_of(block.index), slot_of(block.index)
        if place == PRIMARY or block.index in seen or not 0 <= slot < level.num_blocks[place]:
            _fail(f"pool indices are a permutation of the slots; block {block.id} has {LEVEL_NAMES[place]} slot {slot}")
        seen.add(block.index)
        if level.holders[place][slot] is not block:
            _fail(f"the holder of {LEVEL_NAMES[place]} slot {slot} is block {block.id}")


def _check_handle(level: KeyedLevel, block: Block, held: int) -> None:
    place, slot = level_of(block.index), slot_of(block.index)
    is_busy = level.is_busy(block)
    is_quarantined = place == NVME and slot in level.quarantined
    if block.ref_count != held:
        _fail(f"block {block.id}: ref_count {block.ref_count}, held {held} times by requests and jobs")
    if (block.queue != NOT_QUEUED) != (held == 0 and not is_busy and not is_quarantined):
        _fail(f"a handle is queued exactly when nothing references it and it is not busy; block {block.id} (ref_count {held}, busy "
              f"{is_busy}) {'is' if block.queue != NOT_QUEUED else 'is not'} queued")
    if block.queue != NOT_QUEUED:
        if block.queue // LISTS_PER_LEVEL != place:
            _fail(f"block {block.id} is on the {LEVEL_NAMES[place]} level and queued on another")
        expected = block.priority if block.has_content else EMPTY
        if block.owner is not None:
            expected = KEPT_BACKING if level_of(block.owner.index) == SECONDARY else BACKING
        if block.queue % LISTS_PER_LEVEL != expected:
            _fail(f"block {block.id} is in list {block.queue % LISTS_PER_LEVEL}, belongs in {expected}")
    if block.node is not None:
        _fail(f"block {block.id} is in a tree")
    if block.warm_key and level.warm.get(block.warm_key) is not block:
        _fail(f"block {block.id} has a key that leads elsewhere")
    if block.num_tokens == WHOLE and not block.has_content and block.owner is None:
        _fail(f"block {block.id} has bytes of nobody")
    if block.has_content and block.num_tokens != WHOLE and block.queue != NOT_QUEUED:
        _fail(f"what is on its way is in no queue; block {block.id} is")
    if block.has_content and place == NVME and block.num_tokens != WHOLE:
        _fail(f"block {block.id} is on NVMe before its bytes are")
    owner = block.owner
    if owner is not None and (place != NVME or owner.nvme_backing is not block or level_of(owner.index) != SECONDARY
                              or not owner.has_content):
        _fail(f"backing {block.id} is the NVMe copy of host content that points back")
    if block.id in level.off_nvme and (not block.has_content or place == NVME or block.nvme_backing is not None):
        _fail(f"block {block.id} is kept off NVMe")


def _check_counters(level: KeyedLevel) -> None:
    queues = level.queues
    for place in range(NUM_LEVELS):
        members = queues.members(place)
        if len(members) != queues.num_free(place):
            _fail(f"{LEVEL_NAMES[place]}: {len(members)} handles queued, counter says {queues.num_free(place)}")
        evictable = sum(1 for record in members if record.queue % LISTS_PER_LEVEL < NUM_PRIORITIES)
        if evictable != queues.evictable[place]:
            _fail(f"{LEVEL_NAMES[place]}: {evictable} evictable, counter says {queues.evictable[place]}")
        used = sum(1 for holder in level.holders[place] if holder.ref_count > 0)
        busy = sum(1 for index in level.busy if level_of(index) == place)
        if busy != level.num_busy[place]:
            _fail(f"{LEVEL_NAMES[place]}: {busy} busy slots, counter says {level.num_busy[place]}")
        if queues.num_free(place) + used + level.num_unusable(place) != level.num_blocks[place]:
            _fail(f"{LEVEL_NAMES[place]}: free {queues.num_free(place)} + used {used} + busy {level.num_unusable(place)} = total "
                  f"{level.num_blocks[place]}")

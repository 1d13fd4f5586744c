"""``verify``: the ledger's invariants (design: ledger rules), checked after every step of the property tests."""

from __future__ import annotations

from kvtier.errors import LedgerError
from kvtier.policies.eviction import BACKING, EMPTY, KEPT_BACKING, LISTS_PER_LEVEL, NUM_PRIORITIES, kind_of
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import LEVEL_NAMES, NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.chunks import scratch_held
from kvtier.tiering.ledger.group import CROSS, RECURRENT, WINDOW
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.sequence import ActiveSequence


def verify(ledger: Ledger) -> None:
    """Raise LedgerError naming the first broken invariant."""
    for sequence in ledger.sequences.values():
        if not 0 <= sequence.computed <= sequence.num_tokens:
            _fail(f"request {sequence.id}: {sequence.computed} of {sequence.num_tokens} tokens computed")
        if ledger.is_chunked:
            _check_chunks(ledger, sequence)
    _check_scratch(ledger)
    for allocator in ledger.allocators:
        _check_slots(allocator)
        _check_rows(ledger, allocator)
        _check_drafts(ledger, allocator)
        _check_references(ledger, allocator)
        for block in allocator.blocks:
            _check_handle(allocator, block)
        _check_counters(allocator)
    for root in ledger.tree.roots.values():
        _check_node(root, ledger.tokens_per_block)


def _fail(message: str) -> None:
    raise LedgerError(f"broken invariant: {message}")


def _check_chunks(ledger: Ledger, sequence: ActiveSequence) -> None:
    if not sequence.computed <= sequence.covered <= sequence.num_tokens:
        _fail(f"request {sequence.id}: {sequence.computed} tokens computed, blocks for {sequence.covered} of {sequence.num_tokens}")
    if sequence.must_cut:
        return
    is_due = sequence.computed == sequence.covered < sequence.num_tokens
    if (ledger.paused.get(sequence.id) is sequence) != is_due:
        _fail(f"request {sequence.id}: paused exactly when the next token has no blocks; computed {sequence.computed}, blocks for "
              f"{sequence.covered} of {sequence.num_tokens}")


def _check_scratch(ledger: Ledger) -> None:
    """The scratch of a group is what its sequences hold of it, and no more than there is."""
    for group, geometry in enumerate(ledger.geometries):
        held = sum(scratch_held(geometry, sequence.rows[group]) for sequence in ledger.sequences.values())
        if held != ledger.scratch_used[group] or held > ledger.scratch_budgets[group]:
            _fail(f"group {group}: sequences hold {held} scratch blocks, counted {ledger.scratch_used[group]}, there are "
                  f"{ledger.scratch_budgets[group]}")
    if not ledger.paused.keys() <= ledger.sequences.keys():
        _fail("only active sequences are paused")


def _check_slots(allocator: BlockAllocator) -> None:
    seen: set[int] = set()
    for block in allocator.blocks:
        level, slot = level_of(block.index), slot_of(block.index)
        if block.index in seen or not 0 <= slot < allocator.num_blocks[level]:
            _fail(f"pool indices are a permutation of the slots; block {block.id} has {LEVEL_NAMES[level]} slot {slot}")
        seen.add(block.index)
        if allocator.holders[level][slot] is not block:
            _fail(f"the holder of {LEVEL_NAMES[level]} slot {slot} is block {block.id}")


def _check_rows(ledger: Ledger, allocator: BlockAllocator) -> None:
    group = allocator.group
    geometry = ledger.geometries[group]
    for sequence in ledger.sequences.values():
        row = sequence.rows[group]
        name = f"request {sequence.id}, group {group}"
        if row.other_beams and len(row.other_beams) != sequence.beam_width - 1:
            _fail(f"{name}: {len(row.other_beams) + 1} beams of {sequence.beam_width}")
        if row.departed_ids and any(len(ids) != row.num_departed for ids in row.departed_ids):
            _fail(f"{name}: all beams leave the window together")
        num_tokens = sequence.request.encoder_length if geometry.kind == CROSS else sequence.num_tokens
        if ledger.is_chunked and geometry.kind == WINDOW:
            num_tokens = sequence.covered
        for beam in range(len(row.other_beams) + 1):
            blocks = row.beam(beam)
            if len(blocks) < geometry.num_blocks(num_tokens):
                _fail(f"{name}: {num_tokens} tokens in {len(blocks)} blocks")
            for position, block in enumerate(blocks):
                is_out = geometry.num_sink_blocks <= position < geometry.num_sink_blocks + row.num_departed
                if block.id >= 0 and level_of(block.index) != PRIMARY:
                    _fail(f"a sequence's blocks are primary; block {block.id} of {name} is not")
                if block.id < 0 and block is not allocator.placeholder:
                    _fail(f"{name}: another group's placeholder at position {position}")
                if (block.id < 0) != is_out and geometry.kind != RECURRENT:
                    _fail(f"{name}: position {position} {'has no block' if block.id < 0 else 'has left the window'}, "
                          f"{row.num_departed} have left")
            if blocks and blocks[-1].id < 0 and geometry.kind == RECURRENT:
                _fail(f"{name}: the last position has no block for the running state")


def _check_drafts(ledger: Ledger, allocator: BlockAllocator) -> None:
    """Pending drafts have blocks to their last place, and what is stored is in none that they may be written into."""
    geometry = ledger.geometries[allocator.group]
    for sequence in ledger.sequences.values():
        tree = sequence.drafts
        if tree is None or geometry.kind == CROSS:
            continue
        row = sequence.rows[allocator.group]
        name = f"request {sequence.id}, group {allocator.group}"
        if tree.num_tokens != sequence.num_tokens or row.other_beams or geometry.kind == RECURRENT:
            _fail(f"{name}: drafts behind {tree.num_tokens} of {sequence.num_tokens} tokens, {len(row.other_beams) + 1} beams")
        if len(row.blocks) != geometry.num_blocks(tree.num_tokens + tree.num_drafts):
            _fail(f"{name}: {tree.num_tokens} tokens and {tree.num_drafts} drafts in {len(row.blocks)} blocks")
        for position in range(geometry.num_blocks(tree.num_tokens + 1) - 1, len(row.blocks)):
            if row.blocks[position].id < 0 or row.blocks[position].node is not None:
                _fail(f"{name}: the drafts' block at position {position} is stored, or not there")


def _check_references(ledger: Ledger, allocator: BlockAllocator) -> None:
    counts: dict[int, int] = {}
    for sequence in ledger.sequences.values():
        row = sequence.rows[allocator.group]
        for beam in range(len(row.other_beams) + 1):
            for block in row.beam(beam):
                if block.id >= 0:
                    counts[block.id] = counts.get(block.id, 0) + 1
    for lease in ledger.leases.values():
        for block in lease.rows[allocator.group]:
            counts[block.id] = counts.get(block.id, 0) + 1
    for block in allocator.blocks:
        if block.ref_count != counts.get(block.id, 0):
            _fail(f"block {block.id}: ref_count {block.ref_count}, held {counts.get(block.id, 0)} times by sequences and leases")


def _check_handle(allocator: BlockAllocator, block: Block) -> None:
    level, slot = level_of(block.index), slot_of(block.index)
    is_quarantined = level == NVME and slot in allocator.quarantined
    should_be_queued = block.ref_count == 0 and not allocator.is_busy(block) and not is_quarantined
    if (block.queue != NOT_QUEUED) != should_be_queued:
        _fail(f"a handle is queued exactly when nothing references it and it is not busy; block {block.id} "
              f"(ref_count {block.ref_count}, busy {allocator.is_busy(block)}) {'is' if block.queue != NOT_QUEUED else 'is not'} queued")
    if block.queue != NOT_QUEUED:
        if block.queue // LISTS_PER_LEVEL != level:
            _fail(f"block {block.id} is on the {LEVEL_NAMES[level]} level and queued on another")
        kind = kind_of(block.queue % LISTS_PER_LEVEL)
        expected = block.priority if block.has_content else EMPTY
        if block.owner is not None:  # NVMe copies of secondary blocks are not given up
            expected = KEPT_BACKING if level == NVME and level_of(block.owner.index) == SECONDARY else BACKING
        if kind != expected:
            _fail(f"block {block.id} is in list {kind}, belongs in {expected}")
    if block.owner is not None:
        if block.has_content or block.ref_count or block.owner is block:
            _fail(f"backing {block.id} has no key, node or references")
        if (block.owner.secondary_backing if level == SECONDARY else block.owner.nvme_backing) is not block:
            _fail(f"backing {block.id} is linked from its owner {block.owner.id}")
    for spare, spare_level in ((block.secondary_backing, SECONDARY), (block.nvme_backing, NVME)):
        if spare is not None:
            if spare.owner is not block or level_of(spare.index) != spare_level or spare_level <= level:
                _fail(f"block {block.id}: its backing {spare.id} is on a lower level and points back")
            if block.node is None or block.num_tokens != allocator.tokens_per_block:
                _fail(f"only full blocks in the tree have backings; block {block.id} has one")
    if block.warm_key and (allocator.warm.get(block.warm_key) is not block or block.node is not None or level != NVME):
        _fail(f"warm block {block.id} is in the warm map, on NVMe, in no tree")
    node = block.node
    if node is not None:
        if not 0 <= block.position < node.length or node.values[allocator.group][block.position] is not block:
            _fail(f"block {block.id} points at a place in the tree that holds it")
        if level == NVME and block.num_tokens != allocator.tokens_per_block:
            _fail(f"only full blocks reach NVMe; block {block.id} has {block.num_tokens} tokens")
        if not 0 < block.num_tokens <= allocator.tokens_per_block:
            _fail(f"block {block.id} in the tree has {block.num_tokens} tokens")


def _check_counters(allocator: BlockAllocator) -> None:
    queues = allocator.queues
    for level in range(NUM_LEVELS):
        members = queues.members(level)
        if len(members) != queues.num_free(level):
            _fail(f"{LEVEL_NAMES[level]}: {len(members)} handles queued, counter says {queues.num_free(level)}")
        firsts = [queues.heads[level * LISTS_PER_LEVEL + priority] for priority in range(NUM_PRIORITIES)]
        lengths = [sum([head.length for head in first.grades]) for first in firsts]
        if lengths != [first.content for first in firsts]:
            _fail(f"{LEVEL_NAMES[level]}: content by priority is {lengths}, counters say {[first.content for first in firsts]}")
        if sum(lengths) != queues.evictable[level]:
            _fail(f"{LEVEL_NAMES[level]}: {sum(lengths)} evictable, counter says {queues.evictable[level]}")
        if [priority for priority, length in enumerate(lengths) if length] != queues.levels[level].occupied:
            _fail(f"{LEVEL_NAMES[level]}: priorities with content are {queues.levels[level].occupied}")
        busy = sum(1 for index in allocator.busy if level_of(index) == level)
        if busy != allocator.num_busy[level]:
            _fail(f"{LEVEL_NAMES[level]}: {busy} busy slots, counter says {allocator.num_busy[level]}")
        used = quarantined = unreferenced_busy = 0
        for holder in allocator.holders[level]:
            if holder.ref_count > 0:
                used += 1
            elif allocator.is_busy(holder):
                unreferenced_busy += 1
            elif level == NVME and slot_of(holder.index) in allocator.quarantined:
                quarantined += 1
        if unreferenced_busy != allocator.num_unreferenced_busy[level]:
            _fail(f"{LEVEL_NAMES[level]}: {unreferenced_busy} busy slots of unreferenced handles, counter says "
                  f"{allocator.num_unreferenced_busy[level]}")
        if queues.num_free(level) + used + unreferenced_busy + quarantined != allocator.num_blocks[level]:
            _fail(f"{LEVEL_NAMES[level]}: free {queues.num_free(level)} + used {used} + busy {unreferenced_busy + quarantined} = "
                  f"total {allocator.num_blocks[level]}")


def _check_node(root: Node, tokens_per_block: int) -> None:
    stack = [root]
    while stack:
        node = stack.pop()
        for group, (values, present) in enumerate(zip(node.values, node.present, strict=True)):
            counts = (sum(1 for value in values if value is not None and value.ref_count > 0),
                      sum(1 for value in values if value is not None and level_of(value.index) != PRIMARY))
            if counts != (node.held[group], node.lower[group]):
                _fail(f"a node of group {group} counts {(node.held[group], node.lower[group])} referenced and lower handles, not {counts}")
            if len(values) != node.length or sum(1 for value in values if value is not None) != present:
                _fail(f"a node of {node.length} blocks counts {present} handles in {len(values)} places")
            for position, value in enumerate(values):
                if value is not None and (value.node is not node or value.position != position):
                    _fail(f"tree value {value.id} points back at its place")
        if node.parent is not None and not node.children and (node.length == 0 or all(v[node.length - 1] is None for v in node.values)):
            _fail("an empty leaf in the tree")
        for key, child in node.children.items():
            if child.parent is not node or child.key != key:
                _fail("a child is found by its key and points at its parent")
            stack.append(child)

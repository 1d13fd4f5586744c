"""Entering the tree: a sequence's computed blocks, and blocks that a store directory already held (design: warm start)."""

from __future__ import annotations

from kvtier.pools.pool_index import NVME, level_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog, StoredBlock
from kvtier.tiering.ledger.group import CROSS, GroupSpec
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.tree import Node, ReuseTree, Walk


def store_blocks(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], events: EventLog, sequence: ActiveSequence,
                 with_partial: bool) -> None:
    """Attach a sequence's storable blocks where the tree has none yet. An occupied place keeps its handle."""
    for number in range(len(groups) - 1, -1, -1):
        if groups[number].kind != CROSS:
            _store_group(tree, allocators[number], events, sequence, number, with_partial)


def _store_group(tree: ReuseTree, allocator: BlockAllocator, events: EventLog, sequence: ActiveSequence, group: int,
                 with_partial: bool) -> None:
    blocks = sequence.rows[group].blocks
    keys = sequence.keys
    usable = sequence.storable_tokens()
    tokens_per_block = keys.tokens_per_block
    full = usable // tokens_per_block
    while full > 0 and blocks[full - 1].id < 0:  # no places behind the last handle: nobody would ever take them out again
        full -= 1
    if full == 0 and not (with_partial and usable > 0):
        return
    if full < usable // tokens_per_block:
        usable = full * tokens_per_block
    walk = tree.walk(tree.root(sequence.namespace), keys, usable)
    stored: list[tuple[int, Node, int]] = []  # block number, place
    number = 0
    for node, count in zip(walk.nodes, walk.counts, strict=True):
        if node.present[group] < node.length:
            for position in range(count):
                if node.values[group][position] is None:
                    stored.append((number + position, node, position))
        number += count
    for node, position in tree.extend(walk, keys, usable):
        stored.append((number, node, position))
        number += 1
    attached: list[tuple[int, Node, int]] = []
    for number, node, position in stored:
        block = blocks[number]
        if block.id < 0:
            continue
        if block.node is not None:
            allocator.publish_removed(block)  # it moves: attach() takes it from its old place
        tree.attach(node, position, group, block, tokens_per_block)
        attached.append((number, node, position))
    if with_partial and usable % tokens_per_block:
        tail = tree.walk(tree.root(sequence.namespace), keys, usable)
        last = blocks[tail.num_blocks]
        if tail.num_blocks == usable // tokens_per_block and last.node is None and last.id >= 0:
            place = tree.extend_partial(tail, keys, usable)
            if place is None:  # there is one already, perhaps only for another group
                place = (tail.end()[0].children[keys.block_key(tail.num_blocks, usable % tokens_per_block)], 0)
            if place[0].values[group][0] is None:
                tree.attach(place[0], place[1], group, last, usable % tokens_per_block)
                attached.append((tail.num_blocks, place[0], place[1]))
    if events.enabled:
        _publish(events, keys, sequence.namespace, group, attached)


def _publish(events: EventLog, keys: TokenKeys, namespace: Namespace, group: int, attached: list[tuple[int, Node, int]]) -> None:
    """One Stored event for each run of consecutive blocks."""
    run: list[StoredBlock] = []
    parent: bytes | None = None
    previous = -2
    for number, node, position in attached:
        if number != previous + 1:
            events.stored(group, parent, run)
            run = []
            parent = node.parent_chain_key(position)
        block = node.values[group][position]
        assert block is not None
        start = number * keys.tokens_per_block
        run.append(StoredBlock(node.chain_key(position), tuple(keys.token_ids(start, start + block.num_tokens)), namespace.lora_id,
                               namespace.cache_salt, level_of(block.index), block.priority))
        previous = number
    events.stored(group, parent, run)


def warm_prefix(tree: ReuseTree, allocator: BlockAllocator, namespace: Namespace, keys: TokenKeys, num_tokens: int
                ) -> tuple[Walk | None, list[tuple[int, Block]]]:
    """Blocks on NVMe that continue the prompt where the tree ends, by chain key: (block number, handle) of each."""
    found: list[tuple[int, Block]] = []
    root = tree.find_root(namespace)
    walk: Walk | None = None
    parent = namespace.chain_seed
    number = 0
    if root is not None:
        walk = tree.walk(root, keys, num_tokens)
        for node, count in zip(walk.nodes, walk.counts, strict=True):
            if node.present[allocator.group] < node.length:
                for position in range(count):
                    if node.values[allocator.group][position] is None:
                        block = allocator.warm.get(node.chain_key(position))
                        if block is None:
                            return walk, found
                        found.append((number + position, block))
            number += count
        if walk.nodes:
            node, count = walk.end()
            parent = node.chain_key(count - 1)
    for behind in range(number, num_tokens // keys.tokens_per_block):
        parent = next_chain_key(parent, keys.block_key(behind, keys.tokens_per_block))
        block = allocator.warm.get(parent)
        if block is None:
            break
        found.append((behind, block))
    return walk, found


def adopt_warm_blocks(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], namespace: Namespace, keys: TokenKeys,
                      num_tokens: int) -> None:
    """Give warm blocks that continue the prompt their place in the tree, with the request's own tokens."""
    for allocator in allocators:
        _adopt_group(tree, allocator, namespace, keys, num_tokens)


def _adopt_group(tree: ReuseTree, allocator: BlockAllocator, namespace: Namespace, keys: TokenKeys, num_tokens: int) -> None:
    if not allocator.warm or not namespace.is_persistent:
        return
    _walk, found = warm_prefix(tree, allocator, namespace, keys, num_tokens)
    if not found:
        return
    end = (found[-1][0] + 1) * keys.tokens_per_block
    walk = tree.walk(tree.root(namespace), keys, end)
    places: list[tuple[Node, int]] = []
    for node, count in zip(walk.nodes, walk.counts, strict=True):
        places.extend([(node, position) for position in range(count)])
    places.extend(tree.extend(walk, keys, end))
    adopted: list[tuple[int, Node, int]] = []
    for number, block in found:
        node, position = places[number]
        assert level_of(block.index) == NVME
        del allocator.warm[block.warm_key]
        block.warm_key = b""
        tree.attach(node, position, allocator.group, block, keys.tokens_per_block)
        adopted.append((number, node, position))
    if allocator.events.enabled:
        _publish(allocator.events, keys, namespace, allocator.group, adopted)

"""Entering the tree: a sequence's computed blocks, and blocks that a store directory already held (design: warm start).

One walk serves all groups. Each group then fills the places that it has a handle for and the tree has none.
"""

from __future__ import annotations

from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.group import FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.key import KeyRun, Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node, Walk
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow
from kvtier.tiering.ledger.tree import ReuseTree


def storing_order(groups: list[GroupSpec]) -> list[int]:
    """The groups that store, in the order of their events: full attention, windows from the largest down, then the rest."""
    order = [number for number, group in enumerate(groups) if group.kind == FULL]
    windows = [(-group.window, number) for number, group in enumerate(groups) if group.kind == WINDOW]
    windows.sort()
    order.extend([number for _window, number in windows])
    order.extend([number for number, group in enumerate(groups) if group.kind == RECURRENT])
    return order


class StoredRuns:
    """Collects what one group stored in one call: one Stored event for each run of consecutive blocks."""

    def __init__(self, events: EventLog, group: int, level: int) -> None:
        self._events = events
        self._group = group
        self._level = level
        self._end = -1
        self._spans: list[tuple[KeyRun, int, int]] = []
        self._count = 0
        self._priority = 0                 # of all blocks so far, unless they are mixed
        self._is_mixed = False
        self._priorities: list[int] = []   # of each block, once they are

    def add(self, node: Node, position: int, number: int, blocks: list[Block], start: int, count: int, is_even: bool) -> None:
        """``blocks[start:start + count]``, of the prompt from ``number`` on, went into the places of a run from ``position`` on.
        ``is_even``: they are all of one priority."""
        if not self._events.enabled:
            return
        if number != self._end:
            self.publish()
        self._end = number + count
        self._spans.append((node.run, position, count))
        if self._count == 0:
            self._priority = blocks[start].priority
        if not self._is_mixed and not (is_even and blocks[start].priority == self._priority):
            self._is_mixed = True
            self._priorities = [self._priority] * self._count
        if self._is_mixed:
            self._priorities.extend([block.priority for block in blocks[start:start + count]])
        self._count += count

    def publish(self) -> None:
        if self._spans:
            self._events.stored(self._group, self._spans, self._level, self._priorities if self._is_mixed else [self._priority])
            self._spans = []
            self._count = 0
            self._is_mixed = False
            self._priorities = []


def store_blocks(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], events: EventLog, sequence: ActiveSequence,
                 with_partial: bool) -> None:
    """Attach a sequence's storable blocks where the tree has none yet. An occupied place keeps its handle.

    ``with_partial``: the last, not yet full block too; not where a running state is kept, which is of whole blocks only.
    """
    keys = sequence.keys
    usable = sequence.storable_tokens()
    tokens_per_block = keys.tokens_per_block
    if usable < tokens_per_block and not (with_partial and usable > 0):
        return
    order = storing_order(groups)
    if not order:
        return
    walk = tree.walk(tree.root(sequence.namespace), keys, usable)
    end = min(usable // tokens_per_block, max(sequence.num_prefix_blocks, sequence.num_stored))  # blocks behind were never in the tree
    if _leave_other_places(tree, allocators, groups, order, sequence, walk, end):
        walk = tree.walk(tree.root(sequence.namespace), keys, usable)
    sequence.num_stored = max(sequence.num_stored, usable // tokens_per_block + 1)
    num_old = len(walk.nodes)
    old_counts = list(walk.counts)
    spans = tree.extend(walk, keys, usable, len(groups) == 1 and groups[0].kind == FULL)
    tail: Node | None = None
    if with_partial and usable % tokens_per_block and _has_tail(order, groups, sequence, walk.num_blocks):
        place = tree.extend_partial(walk, keys, usable)
        if place is not None:
            tail = place[0]
    for group in order:
        blocks = sequence.rows[group].blocks
        gone = _out_of_window(groups[group], sequence.rows[group], tokens_per_block)
        is_whole = groups[group].kind == FULL  # the others have placeholders in some places
        runs = StoredRuns(events, group, PRIMARY)
        number = 0
        for i in range(num_old):
            node = walk.nodes[i]
            if node.present[group] < node.length:
                for first, end in _spans_beside(gone, number, number + old_counts[i]):
                    _fill_holes(tree, runs, node, group, blocks, number, first, end)
            number += old_counts[i]
        for node, first, count in spans:
            if is_whole:
                is_even = tree.attach_span(node, first, group, blocks, number, count)
                runs.add(node, first, number, blocks, number, count, is_even)
            else:
                _attach_real(tree, runs, node, first, group, blocks, number, count)
            number += count
        if tail is not None and tail.values[group][0] is None:
            last = blocks[number]
            if last.id >= 0 and last.node is None:
                tree.attach(tail, 0, group, last, usable % tokens_per_block)
                runs.add(tail, 0, number, blocks, number, 1, True)
        runs.publish()
    tree.prune(walk.end()[0] if tail is None else tail)  # where no group had a handle for the last places


def _leave_other_places(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], order: list[int],
                        sequence: ActiveSequence, walk: Walk, end: int) -> bool:
    """Handles that will be needed at this prompt's places and sit elsewhere leave, before any place is made: leaving prunes."""
    found: list[tuple[int, Block]] = []
    for group in order:
        blocks = sequence.rows[group].blocks
        gone = _out_of_window(groups[group], sequence.rows[group], sequence.keys.tokens_per_block)
        number = 0
        for step in range(len(walk.nodes)):
            node = walk.nodes[step]
            count = walk.counts[step]
            if node.present[group] < node.length:
                values = node.values[group]
                for first, stop in _spans_beside(gone, number, number + count):
                    for place in range(first, stop):
                        if values[place - number] is None and blocks[place].node is not None:
                            found.append((group, blocks[place]))
            number += count
        for number in range(walk.num_blocks, end):
            if blocks[number].node is not None:
                found.append((group, blocks[number]))
    for group, block in found:
        allocators[group].publish_removed(block)
        tree.detach(block, group)
        allocators[group].drop_backings(block)  # they are known by the old key
    return len(found) > 0


def _has_tail(order: list[int], groups: list[GroupSpec], sequence: ActiveSequence, number: int) -> bool:
    """Whether some group has a handle for the partial last block, and none keeps a running state."""
    has_handle = False
    for group in order:
        if groups[group].kind == RECURRENT:
            return False
        last = sequence.rows[group].blocks[number]
        if last.id >= 0 and last.node is None:
            has_handle = True
    return has_handle


def _fill_holes(tree: ReuseTree, runs: StoredRuns, node: Node, group: int, blocks: list[Block], number: int, first: int,
                end: int) -> None:
    """Of the prompt's blocks ``[first, end)`` those whose places are empty; its block ``number`` belongs into the run's first place."""
    values = node.values[group]
    for place in range(first, end):
        if values[place - number] is None and blocks[place].id >= 0:
            tree.attach(node, place - number, group, blocks[place], tree.tokens_per_block)
            runs.add(node, place - number, place, blocks, place, 1, True)


def _out_of_window(group: GroupSpec, row: SequenceRow, tokens_per_block: int) -> tuple[int, int]:
    """Positions (begin, end) of a row that have left the window: placeholders, which a long sequence need not look at each time."""
    begin = (group.sinks + tokens_per_block - 1) // tokens_per_block
    return begin, begin + row.num_departed


def _spans_beside(gone: tuple[int, int], first: int, end: int) -> list[tuple[int, int]]:
    """The positions ``[first, end)`` less those that are gone."""
    begin, stop = gone
    if begin == stop or stop <= first or end <= begin:
        return [(first, end)]
    return [(first, max(begin, first)), (min(stop, end), end)]


def _attach_real(tree: ReuseTree, runs: StoredRuns, node: Node, first: int, group: int, blocks: list[Block], number: int,
                 count: int) -> None:
    """Fill empty places with the handles among ``blocks[number:number + count]`` that are no placeholders."""
    start = number
    end = number + count
    while start < end:
        if blocks[start].id < 0:
            start += 1
            continue
        stop = start + 1
        while stop < end and blocks[stop].id >= 0:
            stop += 1
        is_even = tree.attach_span(node, first + start - number, group, blocks, start, stop - start)
        runs.add(node, first + start - number, start, blocks, start, stop - start, is_even)
        start = stop


def warm_prefix(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], namespace: Namespace, keys: TokenKeys,
                num_tokens: int) -> tuple[Walk | None, list[list[tuple[int, Block]]]]:
    """Blocks on NVMe since the start that the prompt could use, by chain key: for each group (block number, handle) of each.

    Where a full-attention group has a block neither in the tree nor here, the search ends. Other groups may have gaps.
    """
    found: list[list[tuple[int, Block]]] = [[] for _ in groups]
    order = storing_order(groups)
    root = tree.find_root(namespace)
    walk: Walk | None = None
    key = namespace.chain_seed if root is None else root.run.namespace.chain_seed
    number = 0
    if root is not None:
        walk = tree.walk(root, keys, num_tokens)
        for node, count in zip(walk.nodes, walk.counts, strict=True):
            if not _is_full(node, order):
                for position in range(count):
                    if not _find_warm(allocators, groups, order, node, position, b"", number + position, found):
                        return walk, found
            number += count
        if walk.nodes:
            node, count = walk.end()
            key = node.chain_key(count - 1)
    for behind in range(number, num_tokens // keys.tokens_per_block):
        key = next_chain_key(key, keys.block_key(behind, keys.tokens_per_block))
        if not _find_warm(allocators, groups, order, None, 0, key, behind, found):
            break
    return walk, found


def _is_full(node: Node, order: list[int]) -> bool:
    return all(node.present[group] == node.length for group in order)


def _find_warm(allocators: list[BlockAllocator], groups: list[GroupSpec], order: list[int], node: Node | None, position: int, key: bytes,
               number: int, found: list[list[tuple[int, Block]]]) -> bool:
    """Note the groups' warm handles of one block. False where full attention has none: nothing behind it can be used."""
    noted: list[tuple[int, Block]] = []
    for group in order:
        if node is not None:
            if node.values[group][position] is not None:
                continue
            if not key:
                key = node.chain_key(position)
        block = allocators[group].warm.get(key)
        if block is not None:
            noted.append((group, block))
        elif groups[group].kind == FULL:
            return False
    for group, block in noted:
        found[group].append((number, block))
    return True


def adopt_warm_blocks(tree: ReuseTree, allocators: list[BlockAllocator], groups: list[GroupSpec], namespace: Namespace, keys: TokenKeys,
                      num_tokens: int) -> None:
    """Give warm blocks that continue the prompt their place in the tree, with the request's own tokens."""
    for allocator in allocators:
        if allocator.warm:
            break
    else:
        return
    if not namespace.is_persistent:
        return
    _walk, found = warm_prefix(tree, allocators, groups, namespace, keys, num_tokens)
    last = max([numbered[-1][0] for numbered in found if numbered], default=-1)
    if last < 0:
        return
    end = (last + 1) * keys.tokens_per_block
    walk = tree.walk(tree.root(namespace), keys, end)
    tree.extend(walk, keys, end)
    places: list[tuple[Node, int]] = []
    for node, count in zip(walk.nodes, walk.counts, strict=True):
        places.extend([(node, position) for position in range(count)])
    for group in storing_order(groups):
        allocator = allocators[group]
        runs = StoredRuns(allocator.events, group, NVME)
        for number, block in found[group]:
            node, position = places[number]
            assert level_of(block.index) == NVME
            del allocator.warm[block.warm_key]
            block.warm_key = b""
            tree.attach(node, position, group, block, keys.tokens_per_block)
            runs.add(node, position, number, [block], 0, 1, True)
        runs.publish()

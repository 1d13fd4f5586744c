"""The reuse tree: which prefixes are stored, and in which handles (design: reuse is decided by content).

A compressed prefix tree over blocks. A node holds a *run* of blocks: their keys as one byte string, compared in place with
the prompt, and per group one handle (or a hole) per block. Long prompts are thus matched in a few comparisons, whatever their
number of blocks. Runs are split where prompts part. Stored partial tails and multimodal blocks are nodes of one block whose
label has another length than a full plain block. Handles may be evicted from the middle of a run: they leave a hole, and what
lies behind stays in the tree, reachable again once the hole is refilled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import NO_CHAIN, Identity, KeyRun, Namespace, TokenKeys
from kvtier.tiering.ledger.node import Node, Walk, cut, cut_run, filled_length, grow
from kvtier.tiering.ledger.siblings import PartialPlaces, SiblingOrder, common_tokens

if TYPE_CHECKING:
    from mypy_extensions import i64

MAX_GROWING_RUN: Final = 64  # blocks; longer runs are continued in a child, so that growing stays cheap
COPIED_BYTES: Final = 4096  # so much is copied and compared sooner than ``startswith`` is called or a view made
FEW_CHILDREN: Final = 8  # up to so many are looked through one by one for partial matches


class ReuseTree:
    """All namespaces of one ledger."""

    def __init__(self, num_groups: int, tokens_per_block: int) -> None:
        self.num_groups = num_groups
        self.tokens_per_block = tokens_per_block
        self.roots: dict[Identity, Node] = {}
        self.version = 0  # of the nodes: a walk is good as long as it stays the same

    # -- looking ---------------------------------------------------------------------------------------------------------

    def find_root(self, namespace: Namespace) -> Node | None:
        return self.roots.get(namespace.identity)

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made when there is none. An empty root is dropped again when its last block leaves."""
        node = self.roots.get(namespace.identity)
        if node is None:
            block_bytes = self.tokens_per_block * namespace.token_width
            node = Node(None, KeyRun(namespace, block_bytes, b"", 0, False, None, NO_CHAIN), block_bytes, self.num_groups, 0)
            self.roots[namespace.identity] = node
            self.version += 1
        return node

    def walk(self, root: Node, keys: TokenKeys, num_tokens: int) -> Walk:
        """Follow the full blocks of the first ``num_tokens`` tokens as far as their keys are in the tree, holes included."""
        walk = Walk(root)
        data = keys.data_of(num_tokens)
        block_bytes = keys.block_bytes
        suffixes = keys.suffixes
        has_suffixes = len(suffixes) > 0
        limit = num_tokens // keys.tokens_per_block
        children = root.children
        nodes = walk.nodes
        counts = walk.counts
        block = 0
        while block < limit:
            start = block * block_bytes
            key = data[start:start + block_bytes]
            reach = limit - block
            if has_suffixes:
                suffix = suffixes.get(block)
                if suffix is not None:
                    key += suffix
                else:
                    reach = keys.plain_end(block, limit) - block  # a plain run never covers a block with a suffix
            child = children.get(key)
            if child is None:
                break
            length = child.length
            count = 1 if not child.is_plain or length == 1 else _matching_blocks(child, data, start, reach)
            nodes.append(child)
            counts.append(count)
            block += count
            if count < length:
                break
            children = child.children
        walk.num_blocks = block
        return walk

    def partial_places(self, walk: Walk, keys: TokenKeys, num_tokens: int) -> PartialPlaces:
        """Places behind the walk's end that share leading tokens with the prompt's next block, longest first.

        The same for every group: whether one has a handle there is for the caller to see. A place of which all tokens are shared may
        be a stored tail that is part of the prompt. Blocks with a suffix never take part: part of an item is not that item.
        """
        block = walk.num_blocks
        width = keys.width
        node, count = walk.end()
        found: list[tuple[int, Node, int]] = []
        start = block * keys.block_bytes
        chunk = keys.data_of(num_tokens)[start:min(start + keys.block_bytes, num_tokens * width)]
        places = PartialPlaces(chunk, width, node, found)
        if not chunk or block in keys.suffixes:
            return places
        if count < node.length:
            shared = common_tokens(node.block_key(count), chunk, width)
            if shared > 0:
                found.append((shared, node, count))
        elif node.order is not None:
            places.search(node.order)
        else:
            for child in node.children.values():
                if child.takes_partial():
                    shared = common_tokens(child.block_key(0), chunk, width)
                    if shared > 0:
                        found.append((shared, child, 0))
            if len(found) > 1:
                found.reverse()
                found.sort(key=_shared_tokens)
        return places

    # -- changing --------------------------------------------------------------------------------------------------------

    def extend(self, walk: Walk, keys: TokenKeys, num_tokens: int, filled_whole: bool = False) -> list[tuple[Node, int, int]]:
        """Make places for the full blocks of the first ``num_tokens`` tokens behind the walk, and move the walk to their end.

        ``filled_whole``: the caller calls :meth:`attach_span` for each span as a whole, of every group, before anything else.
        Returns spans (node, first position, count) in prompt order. Whoever leaves the last of them empty calls :meth:`prune`.
        """
        spans: list[tuple[Node, int, int]] = []
        block = walk.num_blocks
        limit = num_tokens // keys.tokens_per_block
        if block >= limit:
            return spans
        node, count = walk.end()
        if count < node.length:
            self._split(node, count)
        data = keys.data_of(num_tokens)
        while block < limit:
            if block in keys.suffixes:
                end = block + 1
                node = self._add_child(node, keys.block_key(block, keys.tokens_per_block), 1, False, keys.block_bytes, filled_whole)
                spans.append((node, 0, 1))
                walk.nodes.append(node)
                walk.counts.append(1)
            else:
                end = keys.plain_end(block, limit)
                if block == 0 and 0 <= len(data) - end * keys.block_bytes <= keys.block_bytes:
                    label = data  # what is behind the run's last block does not count: a long prompt is not copied for it
                else:
                    label = data[block * keys.block_bytes:end * keys.block_bytes]
                count = end - block
                if node.is_plain and not node.children and node.length + count <= MAX_GROWING_RUN:
                    spans.append((node, node.length, count))
                    walk.counts[-1] += count
                    grow(node, label, count)
                    self.version += 1
                else:
                    node = self._add_child(node, label, count, True, keys.block_bytes, filled_whole)
                    spans.append((node, 0, count))
                    walk.nodes.append(node)
                    walk.counts.append(count)
            block = end
        walk.num_blocks = block
        return spans

    def extend_partial(self, walk: Walk, keys: TokenKeys, num_tokens: int) -> tuple[Node, int] | None:
        """The place of the partial last block of the first ``num_tokens`` tokens, made when there is none; None without such a block.

        The walk must have matched every full block before it. Whoever leaves the place empty calls :meth:`prune`.
        """
        tail = num_tokens % keys.tokens_per_block
        if tail == 0:
            return None
        key = keys.block_key(walk.num_blocks, tail)
        node, count = walk.end()
        if count < node.length:
            self._split(node, count)
        child = node.children.get(key)
        if child is None:
            child = self._add_child(node, key, 1, False, tail * keys.width, False)
        return child, 0

    def attach(self, node: Node, position: int, group: int, block: Block, num_tokens: int) -> None:
        """Put a handle into an empty place. One that sits elsewhere leaves that place first."""
        values = node.values[group]
        assert values[position] is None
        if block.node is not None:
            self.detach(block, group)
        values[position] = block
        node.present[group] += 1
        if block.ref_count > 0:
            node.held[group] += 1
        if level_of(block.index) != PRIMARY:
            node.lower[group] += 1
        block.node = node
        block.position = position
        block.num_tokens = num_tokens

    def attach_span(self, node: Node, first: int, group: int, blocks: list[Block], start: int, count: int) -> bool:
        """Put the full blocks ``blocks[start:start + count]`` into the empty places from ``first`` on. They are in no place, somebody
        references each of them, and all are on the primary level: a sequence's own.

        Returns whether they are all of one priority.
        """
        num_tokens: i64 = self.tokens_per_block
        priority: i64 = blocks[start].priority
        is_even = True
        span = cast("list[Block | None]", blocks[start:start + count])
        assert len(span) == count
        if count == node.length:
            node.values[group] = span
        else:
            node.values[group][first:first + count] = span
        position: i64 = first
        for block in span:
            assert block is not None
            assert block.node is None
            block.node = node
            block.position = position
            block.num_tokens = num_tokens
            if block.priority != priority:
                is_even = False
            position += 1
        node.present[group] += count
        node.held[group] += count
        return is_even

    def detach(self, block: Block, group: int) -> None:
        """Take a handle out of its place and prune what is empty because of it."""
        node = block.node
        assert node is not None
        values = node.values[group]
        position = block.position
        assert values[position] is block
        values[position] = None
        node.present[group] -= 1
        if block.ref_count > 0:
            node.held[group] -= 1
        if level_of(block.index) != PRIMARY:
            node.lower[group] -= 1
        block.node = None
        block.position = 0
        block.num_tokens = 0
        if position == node.length - 1 and not node.children:
            self.prune(node)

    def detach_span(self, node: Node, group: int, first: int, end: int) -> list[Block]:
        """Take the handles out of the places [first, end) of a run and return them: each place has one, nobody references them, and all
        are on the primary level, as those are that are given up together."""
        values = node.values[group]
        count = end - first
        if count == node.length:
            span = values
            is_gone = self.num_groups == 1 and not node.children  # nobody will look at its places any more
            node.values[group] = [] if is_gone else [None] * count
        else:
            span = values[first:end]
            values[first:end] = [None] * count
        for block in span:
            assert block is not None
            block.node = None
            block.position = 0
            block.num_tokens = 0
        node.present[group] -= count
        if end == node.length and not node.children:
            self.prune(node)
        return cast("list[Block]", span)

    def prune(self, node: Node) -> None:
        """Drop holes at the end of a childless run, and the run itself when nothing is left, then look at its parent."""
        while node.parent is not None and not node.children:
            length = filled_length(node)
            if length > 0:
                if length < node.length:
                    cut(node, length)
                    self.version += 1
                return
            self.version += 1
            parent = node.parent
            key = node.key
            del parent.children[key]
            if not parent.children:
                parent.order = None
            elif parent.order is not None and node.takes_partial():
                parent.order.remove(key)
            node.length = 0
            node = parent
        if node.parent is None and not node.children:
            self.roots.pop(node.run.namespace.identity, None)
            self.version += 1

    def num_nodes(self) -> int:
        """Block positions in the tree, holes included: the size of the uncompressed tree."""
        total = 0
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            total += node.length
            stack.extend(node.children.values())
        return total

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _add_child(self, parent: Node, label: bytes, length: int, is_plain: bool, block_bytes: int, filled_whole: bool) -> Node:
        self.version += 1
        if parent.length < parent.run.num_blocks:
            cut_run(parent)  # it becomes the parent of another run: that stands for all of its blocks
        before = None if parent.parent is None else parent.run
        child = Node(parent, KeyRun(parent.run.namespace, block_bytes, label, length, is_plain, before, NO_CHAIN), parent.block_bytes,
                     self.num_groups, 0 if filled_whole else length)
        key = child.key
        children = parent.children
        if not children:
            parent.children = {key: child}
            return child
        children[key] = child
        if parent.order is not None:
            if child.takes_partial():
                parent.order.add(key)
        elif len(children) > FEW_CHILDREN:
            parent.order = SiblingOrder([other for other, node in children.items() if node.takes_partial()])
        return child

    def _split(self, node: Node, count: int) -> None:
        """Part a run after its first ``count`` blocks; the rest becomes its only child."""
        self.version += 1
        upper = node.run.upper(count)
        rest = Node(node, node.run.lower(count, node.length, upper), node.block_bytes, 0, 0)
        rest.children = node.children
        rest.order = node.order
        for child in rest.children.values():
            child.parent = rest
            child.run.parent = rest.run  # not the old run, which would be kept alive by them
        for group in range(self.num_groups):
            all_values = node.values[group]
            values = all_values[count:]
            node.values[group] = all_values[:count]
            moved = held = lower = 0
            for position, block in enumerate(values):
                if block is not None:
                    block.node = rest
                    block.position = position
                    moved += 1
                    if block.ref_count > 0:
                        held += 1
                    if level_of(block.index) != PRIMARY:
                        lower += 1
            rest.values.append(values)
            rest.present.append(moved)
            rest.held.append(held)
            rest.lower.append(lower)
            node.present[group] -= moved
            node.held[group] -= held
            node.lower[group] -= lower
        node.run = upper
        node.label = upper.label
        node.length = count
        node.children = {rest.key: rest}
        node.order = None
        # The upper part may end in holes now that it is shorter, but it has a child, so it stays.


def _shared_tokens(place: tuple[int, Node, int]) -> int:
    return place[0]


def _matching_blocks(node: Node, data: bytes, start: int, reach: int) -> int:
    """Leading blocks of a run that equal the prompt's bytes from ``start`` on, at most ``reach``. The first one is known to."""
    block_bytes = node.block_bytes
    label = node.label
    high = node.length
    if high > reach:
        high = reach
    if _equal(data, start, label, 0, high * block_bytes):
        return high
    low = 1
    while high - low > 1:  # the first `low` blocks are equal, the first `high` are not
        middle = (low + high) // 2
        if _equal(data, start, label, low * block_bytes, middle * block_bytes):
            low = middle
        else:
            high = middle
    return low


def _equal(data: bytes, start: int, label: bytes, first: int, end: int) -> bool:
    """Whether bytes [first, end) of a label stand in the data from ``start + first`` on."""
    if end - first == len(label):
        return data[start:start + end] == label if end <= COPIED_BYTES else data.startswith(label, start)
    if end - first <= COPIED_BYTES:
        return data[start + first:start + end] == label[first:end]
    return data.startswith(memoryview(label)[first:end], start + first)

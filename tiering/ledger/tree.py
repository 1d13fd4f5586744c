"""The reuse tree: which prefixes are stored, and in which handles (design: reuse is decided by content).

A compressed prefix tree over blocks. A node holds a *run* of blocks: their keys as one byte string, compared in place with
the prompt, and per group one handle (or a hole) per block. Long prompts are thus matched in a few comparisons, whatever their
number of blocks. Runs are split where prompts part. Stored partial tails and multimodal blocks are nodes of one block whose
label has another length than a full plain block. Handles may be evicted from the middle of a run: they leave a hole, and what
lies behind stays in the tree, reachable again once the hole is refilled.
"""

from __future__ import annotations

from typing import Final

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Identity, Namespace, TokenKeys, next_chain_key

MAX_GROWING_RUN: Final = 64  # blocks; longer runs are continued in a child, so that growing stays cheap


class Node:
    """A run of blocks.

    ``label`` holds the keys of its blocks back to back. After evictions at the end only the first ``length`` blocks count;
    the label is trimmed when more than half of it is stale.
    """

    def __init__(self, parent: Node | None, namespace: Namespace, block_bytes: int, label: bytes, length: int, is_plain: bool,
                 num_groups: int) -> None:
        self.parent = parent
        self.namespace = namespace
        self.block_bytes = block_bytes  # bytes of one full plain block's key
        self.label = label
        self.length = length
        self.is_plain = is_plain        # a run of full blocks without suffix: may grow and split
        self.values: list[list[Block | None]] = [[None] * length for _ in range(num_groups)]
        self.present: list[int] = [0] * num_groups
        self.children: dict[bytes, Node] = {}
        self.by_first_token: dict[bytes, list[Node]] = {}  # plain and partial children, for partial matches
        self.chain: list[bytes] = []    # chain keys of the first blocks, as far as somebody asked

    @property
    def key(self) -> bytes:
        """What the parent finds this node by."""
        return self.label[:self.block_bytes] if self.is_plain else self.label

    def block_key(self, position: int) -> bytes:
        """Key of one block of the run."""
        if not self.is_plain:
            return self.label
        return self.label[position * self.block_bytes:(position + 1) * self.block_bytes]

    def chain_key(self, position: int) -> bytes:
        """SHA-256 chain key of one block of the run, computed when first asked for."""
        if len(self.chain) > position:
            return self.chain[position]
        path: list[Node] = []  # upwards to the first node whose chain is complete; a loop, for paths can be thousands of nodes long
        node = self
        while node.parent is not None and len(node.chain) < node.length:
            path.append(node)
            node = node.parent
        parent = node.namespace.chain_seed if node.parent is None else node.chain[-1]
        for node in reversed(path):
            chain = node.chain
            end = position + 1 if node is self else node.length
            if chain:
                parent = chain[-1]
            while len(chain) < end:
                parent = next_chain_key(parent, node.block_key(len(chain)))
                chain.append(parent)
        return self.chain[position]

    def parent_chain_key(self, position: int) -> bytes | None:
        """Chain key of the block before, None at the start of a prompt."""
        if position > 0:
            return self.chain_key(position - 1)
        if self.parent is None or self.parent.parent is None:
            return None
        return self.parent.chain_key(self.parent.length - 1)

    def is_leaf(self, position: int) -> bool:
        """Nothing is stored behind this block, in any group."""
        return position == self.length - 1 and not self.children


class Walk:
    """How far a prompt is in the tree: ``nodes[i]`` matched its first ``counts[i]`` blocks; ``num_blocks`` in total."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.counts: list[int] = []
        self.num_blocks = 0

    def end(self) -> tuple[Node, int]:
        """The last node reached and how many of its blocks matched; (root, 0) when nothing matched."""
        if self.nodes:
            return self.nodes[-1], self.counts[-1]
        return self.root, 0


class ReuseTree:
    """All namespaces of one ledger."""

    def __init__(self, num_groups: int, tokens_per_block: int) -> None:
        self.num_groups = num_groups
        self.tokens_per_block = tokens_per_block
        self.roots: dict[Identity, Node] = {}

    # -- looking ---------------------------------------------------------------------------------------------------------

    def find_root(self, namespace: Namespace) -> Node | None:
        return self.roots.get(namespace.identity)

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made when there is none. An empty root is dropped again when its last block leaves."""
        node = self.roots.get(namespace.identity)
        if node is None:
            node = Node(None, namespace, self.tokens_per_block * namespace.token_width, b"", 0, False, self.num_groups)
            self.roots[namespace.identity] = node
        return node

    def walk(self, root: Node, keys: TokenKeys, num_tokens: int) -> Walk:
        """Follow the full blocks of the first ``num_tokens`` tokens as far as their keys are in the tree, holes included."""
        walk = Walk(root)
        data = keys.data()
        block_bytes = keys.block_bytes
        suffixes = keys.suffixes
        limit = num_tokens // keys.tokens_per_block
        node = root
        block = 0
        while block < limit:
            start = block * block_bytes
            key = data[start:start + block_bytes]
            reach = limit - block
            if suffixes:
                suffix = suffixes.get(block)
                if suffix is not None:
                    key += suffix
                else:
                    reach = keys.plain_end(block, limit) - block  # a plain run never covers a block with a suffix
            child = node.children.get(key)
            if child is None:
                break
            count = _matching_blocks(child, data, start, reach) if child.is_plain else 1
            walk.nodes.append(child)
            walk.counts.append(count)
            block += count
            node = child
            if count < child.length:
                break
        walk.num_blocks = block
        return walk

    def partial_candidates(self, walk: Walk, keys: TokenKeys, num_tokens: int, group: int) -> list[tuple[int, Block]]:
        """Blocks behind the walk's end that share leading tokens with the next block of the prompt, longest first.

        Each with the number of tokens shared. Blocks with a suffix never take part: part of an item is not that item.
        """
        block = walk.num_blocks
        if block in keys.suffixes:
            return []
        start = block * keys.block_bytes
        chunk = keys.data()[start:min(start + keys.block_bytes, num_tokens * keys.width)]
        if not chunk:
            return []
        node, count = walk.end()
        width = keys.width
        if count < node.length:
            value = node.values[group][count]
            shared = _common_tokens(node.block_key(count), chunk, width)
            return [(shared, value)] if value is not None and shared > 0 else []
        found: list[tuple[int, Block]] = []
        for child in node.by_first_token.get(chunk[:width], []):
            value = child.values[group][0]
            if value is not None:
                found.append((_common_tokens(child.block_key(0), chunk, width), value))
        found.sort(key=_shared_tokens, reverse=True)
        return found

    def partial_places(self, walk: Walk, keys: TokenKeys, num_tokens: int) -> list[tuple[int, Node, int]]:
        found: list[tuple[int, Node, int]] = []
        seen: set[tuple[int, int]] = set()
        for group in range(self.num_groups):
            for shared, block in self.partial_candidates(walk, keys, num_tokens, group):
                node = block.node
                assert node is not None
                if (id(node), block.position) not in seen:
                    seen.add((id(node), block.position))
                    found.append((shared, node, block.position))
        found.sort(key=lambda f: -f[0])
        return found

    # -- changing --------------------------------------------------------------------------------------------------------

    def extend(self, walk: Walk, keys: TokenKeys, num_tokens: int) -> list[tuple[Node, int]]:
        """Make places for the full blocks of the first ``num_tokens`` tokens behind the walk. Returns (node, position) of each."""
        places: list[tuple[Node, int]] = []
        block = walk.num_blocks
        limit = num_tokens // keys.tokens_per_block
        if block >= limit:
            return places
        node, count = walk.end()
        if count < node.length:
            self._split(node, count)
        data = keys.data()
        while block < limit:
            if block in keys.suffixes:
                node = self._add_child(node, keys.block_key(block, keys.tokens_per_block), 1, False)
                places.append((node, 0))
                block += 1
                continue
            end = keys.plain_end(block, limit)
            label = data[block * keys.block_bytes:end * keys.block_bytes]
            count = end - block
            if node.is_plain and not node.children and node.length + count <= MAX_GROWING_RUN:
                first = node.length
                node.label = node.label[:first * node.block_bytes] + label
                node.length += count
                for values in node.values:
                    values.extend([None] * count)
            else:
                first = 0
                node = self._add_child(node, label, count, True)
            places.extend([(node, first + i) for i in range(count)])
            block = end
        return places

    def extend_partial(self, walk: Walk, keys: TokenKeys, num_tokens: int) -> tuple[Node, int] | None:
        """A place for the partial last block of the first ``num_tokens`` tokens; None when an equal one is taken or there is none.

        The walk must have matched every full block before it.
        """
        tail = num_tokens % keys.tokens_per_block
        if tail == 0:
            return None
        key = keys.block_key(walk.num_blocks, tail)
        node, count = walk.end()
        if count < node.length:
            self._split(node, count)
        if key in node.children:
            return None
        return self._add_child(node, key, 1, False), 0

    def attach(self, node: Node, position: int, group: int, block: Block, num_tokens: int) -> None:
        """Put a handle into an empty place. One that sits elsewhere leaves that place first."""
        assert node.values[group][position] is None
        if block.node is not None:
            self.detach(block, group)
        node.values[group][position] = block
        node.present[group] += 1
        block.node = node
        block.position = position
        block.num_tokens = num_tokens

    def detach(self, block: Block, group: int) -> None:
        """Take a handle out of its place and prune what is empty because of it."""
        node = block.node
        assert node is not None
        assert node.values[group][block.position] is block
        node.values[group][block.position] = None
        node.present[group] -= 1
        block.node = None
        block.num_tokens = 0
        self._prune(node)

    def clear(self) -> None:
        """Forget every namespace. The handles must have been detached or are about to be reset."""
        self.roots = {}

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

    def _add_child(self, parent: Node, label: bytes, length: int, is_plain: bool) -> Node:
        child = Node(parent, parent.namespace, parent.block_bytes, label, length, is_plain, self.num_groups)
        parent.children[child.key] = child
        self._index_first_token(parent, child)
        return child

    def _index_first_token(self, parent: Node, child: Node) -> None:
        width = child.namespace.token_width
        if len(child.label) % width == 0:  # no suffix
            parent.by_first_token.setdefault(child.label[:width], []).append(child)

    def _split(self, node: Node, count: int) -> None:
        """Part a run after its first ``count`` blocks; the rest becomes its only child."""
        cut = count * node.block_bytes
        rest = Node(node, node.namespace, node.block_bytes, node.label[cut:node.length * node.block_bytes], node.length - count, True,
                    self.num_groups)
        rest.children = node.children
        rest.by_first_token = node.by_first_token
        rest.chain = node.chain[count:]
        for child in rest.children.values():
            child.parent = rest
        for group in range(self.num_groups):
            values = node.values[group][count:]
            rest.values[group] = values
            node.values[group] = node.values[group][:count]
            moved = 0
            for position, block in enumerate(values):
                if block is not None:
                    block.node = rest
                    block.position = position
                    moved += 1
            rest.present[group] = moved
            node.present[group] -= moved
        node.label = node.label[:cut]
        node.length = count
        node.chain = node.chain[:count]
        node.children = {rest.key: rest}
        node.by_first_token = {}
        self._index_first_token(node, rest)
        # The upper part may end in holes now that it is shorter, but it has a child, so it stays.

    def _prune(self, node: Node) -> None:
        """Drop holes at the end of a childless run, and the run itself when nothing is left, then look at its parent."""
        while node.parent is not None and not node.children:
            length = node.length
            while length > 0 and _is_hole(node, length - 1):
                length -= 1
            if length > 0:
                if length < node.length:
                    node.length = length
                    for values in node.values:
                        del values[length:]
                    del node.chain[length:]
                    if len(node.label) > 2 * length * node.block_bytes:
                        node.label = node.label[:length * node.block_bytes]
                return
            parent = node.parent
            del parent.children[node.key]
            width = node.namespace.token_width
            if len(node.label) % width == 0:
                first = node.label[:width]
                siblings = parent.by_first_token[first]
                siblings.remove(node)
                if not siblings:
                    del parent.by_first_token[first]
            node.length = 0
            node = parent
        if node.parent is None and not node.children:
            self.roots.pop(node.namespace.identity, None)


def _is_hole(node: Node, position: int) -> bool:
    return all(values[position] is None for values in node.values)


def _shared_tokens(candidate: tuple[int, Block]) -> int:
    return candidate[0]


def _matching_blocks(node: Node, data: bytes, start: int, reach: int) -> int:
    """Leading blocks of a run that equal the prompt's bytes from ``start`` on, at most ``reach``. The first one is known to."""
    block_bytes = node.block_bytes
    label = node.label
    length = node.length
    if length <= reach and len(label) == length * block_bytes and data.startswith(label, start):
        return length
    high = min(length, reach)
    if data[start:start + high * block_bytes] == label[:high * block_bytes]:
        return high
    low = 1
    while high - low > 1:  # the first `low` blocks are equal, the first `high` are not
        middle = (low + high) // 2
        if data[start + low * block_bytes:start + middle * block_bytes] == label[low * block_bytes:middle * block_bytes]:
            low = middle
        else:
            high = middle
    return low


def _common_tokens(left: bytes, right: bytes, width: int) -> int:
    """Equal leading tokens of two keys."""
    high = min(len(left), len(right)) // width
    if left[:high * width] == right[:high * width]:
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if left[:middle * width] == right[:middle * width]:
            low = middle
        else:
            high = middle
    return low

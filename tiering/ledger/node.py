"""``Node``: a run of blocks in the reuse tree, and ``Walk``: how far a prompt follows such runs (design: reuse is decided by content)."""

from __future__ import annotations

from typing import Final

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import KeyRun, Namespace
from kvtier.tiering.ledger.siblings import SiblingOrder


class Node:
    """A run of blocks.

    ``label`` (the same object as the run's) holds the keys of its blocks back to back. After evictions at the end only the first
    ``length`` blocks count; label and run are cut when more than half of them is stale, or when the node gets a child.

    Attributes:
        values: handles by group and position, None for holes.
        present, held, lower: by group, how many handles there are, how many of them somebody references, and how many are not on the
            primary level: so that a match of a long prompt need not look at each handle.
    """

    __slots__ = ("block_bytes", "children", "held", "is_plain", "label", "length", "lower", "order", "parent", "present", "run", "values")

    def __init__(self, parent: Node | None, run: KeyRun, block_bytes: int, num_groups: int, num_places: int) -> None:
        """``num_places``: of each group's ``values``, all holes; the run's blocks unless the caller puts in lists of its own at once."""
        self.parent = parent
        self.run = run
        self.label = run.label
        self.length = run.num_blocks
        self.is_plain = run.is_plain    # a run of full blocks without suffix: may grow and split
        self.block_bytes = block_bytes  # bytes of one full plain block's key
        self.values: list[list[Block | None]] = [[None] * num_places for _ in range(num_groups)]
        self.present: list[int] = [0] * num_groups
        self.held: list[int] = [0] * num_groups
        self.lower: list[int] = [0] * num_groups
        self.children: dict[bytes, Node] = NO_CHILDREN
        self.order: SiblingOrder | None = None  # keys of the children without suffix, once there were more than a few

    @property
    def key(self) -> bytes:
        """What the parent finds this node by."""
        return self.label[:self.block_bytes] if self.is_plain else self.label

    @property
    def namespace(self) -> Namespace:
        return self.run.namespace

    def block_key(self, position: int) -> bytes:
        """Key of one block of the run."""
        return self.run.block_key(position)

    def chain_key(self, position: int) -> bytes:
        """SHA-256 chain key of one block of the run, computed when first asked for."""
        return self.run.chain_key(position)

    def parent_chain_key(self, position: int) -> bytes | None:
        """Chain key of the block before, None at the start of a prompt."""
        return self.run.parent_chain_key(position)

    def is_leaf(self, position: int) -> bool:
        """Nothing is stored behind this block, in any group."""
        return position == self.length - 1 and not self.children

    def takes_partial(self) -> bool:
        """Whether part of its first block may be matched: it has no suffix, for part of an item is not that item."""
        return self.is_plain or len(self.label) == self.run.block_bytes


NO_CHILDREN: Final[dict[bytes, Node]] = {}  # shared by all leaves; replaced, never filled


class Walk:
    """How far a prompt is in the tree: ``nodes[i]`` matched its first ``counts[i]`` blocks; ``num_blocks`` in total."""

    __slots__ = ("counts", "nodes", "num_blocks", "root")

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


def grow(node: Node, label: bytes, count: int) -> None:
    """Add blocks to the end of a childless plain run."""
    node.run = node.run.grown(node.length, label, count)
    node.label = node.run.label
    node.length += count
    for values in node.values:
        values.extend([None] * count)


def filled_length(node: Node) -> int:
    """The run's length without the holes at its end."""
    length = node.length
    for present in node.present:
        if present > 0:
            break
    else:
        return 0
    while length > 0:
        for values in node.values:
            if values[length - 1] is not None:
                return length
        length -= 1
    return 0


def cut(node: Node, length: int) -> None:
    """Give up the places behind the first ``length``. The label is copied when half of it is stale, so that each block costs O(1)."""
    single = length == node.length - 1
    for values in node.values:
        if single:
            values.pop()
        else:
            del values[length:]
    node.length = length
    if node.run.num_blocks > 2 * length:
        cut_run(node)


def cut_run(node: Node) -> None:
    node.run = node.run.upper(node.length)
    node.label = node.run.label

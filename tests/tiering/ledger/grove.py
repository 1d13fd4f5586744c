"""A reuse tree at its own door, and handles to put into it."""

from __future__ import annotations

from typing import Any

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node, Walk
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.tree import ReuseTree
from kvtier.types import BlockId


def places_of(walk: Walk) -> list[tuple[Node, int]]:
    return [(node, position) for node, count in zip(walk.nodes, walk.counts, strict=True) for position in range(count)]


def handles_of(walk: Walk, group: int = 0) -> list[Block | None]:
    return [node.values[group][position] for node, position in places_of(walk)]


def candidates_of(tree: ReuseTree, walk: Walk, keys: TokenKeys, num_tokens: int, group: int = 0) -> list[tuple[int, Block]]:
    """What a partial match of one group chooses from."""
    places = tree.partial_places(walk, keys, num_tokens).all_places()
    found = [(shared, node.values[group][position]) for shared, node, position in places]
    return [(shared, block) for shared, block in found if block is not None]


def place_of(block: Block) -> tuple[Node, int]:
    assert block.node is not None
    return block.node, block.position


class Grove:
    """A tree, and handles numbered as they are stored."""

    def __init__(self, tokens_per_block: int = 2, num_groups: int = 1) -> None:
        self.tree = ReuseTree(num_groups, tokens_per_block)
        self.tokens_per_block = tokens_per_block
        self.num_blocks = 0

    def block(self) -> Block:
        self.num_blocks += 1
        return Block(BlockId(self.num_blocks), pool_index(PRIMARY, self.num_blocks))

    def keys(self, tokens: list[int], **keywords: Any) -> tuple[TokenKeys, Namespace]:
        request = Request(0, tokens, **keywords)
        return TokenKeys(request, self.tokens_per_block), Namespace(b"", request)

    def chain_key(self, tokens: list[int], **keywords: Any) -> bytes:
        """Of the prompt's last block, the partial tail too, straight from its tokens."""
        keys, namespace = self.keys(tokens, **keywords)
        found = namespace.chain_seed
        for start in range(0, len(tokens), self.tokens_per_block):
            found = next_chain_key(found, keys.block_key(start // self.tokens_per_block, min(self.tokens_per_block, len(tokens) - start)))
        return found

    def insert(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[Block]:
        """Store a prompt: a handle for each block whose place is empty, the partial tail included. Returns the new ones."""
        keys, namespace = self.keys(tokens, **keywords)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        self.tree.extend(walk, keys, len(tokens))
        places = [(place, self.tokens_per_block) for place in places_of(walk)]
        tail = self.tree.extend_partial(walk, keys, len(tokens))
        if tail is not None:
            places.append((tail, len(tokens) % self.tokens_per_block))
        found = []
        for (node, position), num_tokens in places:
            if node.values[group][position] is None:
                block = self.block()
                self.tree.attach(node, position, group, block, num_tokens)
                found.append(block)
        return found

    def move(self, block: Block, tokens: list[int], group: int = 0) -> None:
        """Attach a handle that is stored elsewhere to the new place of these tokens."""
        keys, namespace = self.keys(tokens)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        ((node, position, _count),) = self.tree.extend(walk, keys, len(tokens))
        self.tree.attach(node, position, group, block, self.tokens_per_block)

    def walk(self, tokens: list[int], num_tokens: int, **keywords: Any) -> tuple[Walk, TokenKeys] | None:
        keys, namespace = self.keys(tokens, **keywords)
        root = self.tree.find_root(namespace)
        return None if root is None else (self.tree.walk(root, keys, num_tokens), keys)

    def find(self, tokens: list[int], group: int = 0, num_tokens: int | None = None, **keywords: Any) -> list[Block | None]:
        """Handles along the exact path of a prompt's full blocks."""
        found = self.walk(tokens, len(tokens) if num_tokens is None else num_tokens, **keywords)
        return [] if found is None else handles_of(found[0], group)

    def candidates(self, tokens: list[int], group: int = 0, num_tokens: int | None = None, **keywords: Any) -> list[tuple[int, Block]]:
        """For a partial match behind that path."""
        num_tokens = len(tokens) if num_tokens is None else num_tokens
        found = self.walk(tokens, num_tokens, **keywords)
        return [] if found is None else candidates_of(self.tree, *found, num_tokens, group)

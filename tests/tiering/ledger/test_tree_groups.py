"""Known answers for the tree with two groups: one place, a handle of each."""

from __future__ import annotations

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.tree import ReuseTree
from kvtier.types import BlockId

TOKENS_PER_BLOCK = 2


def block(number: int) -> Block:
    return Block(BlockId(number), pool_index(PRIMARY, number))


def places(tree: ReuseTree, tokens: list[int]) -> list[tuple[Node, int]]:
    """The places of a prompt's full blocks, made where there are none."""
    request = Request(0, tokens)
    keys, namespace = TokenKeys(request, TOKENS_PER_BLOCK), Namespace(b"", request)
    walk = tree.walk(tree.root(namespace), keys, len(tokens))
    tree.extend(walk, keys, len(tokens))
    return [(node, position) for node, count in zip(walk.nodes, walk.counts, strict=True) for position in range(count)]


def attach(tree: ReuseTree, place: tuple[Node, int], group: int, handle: Block) -> None:
    tree.attach(place[0], place[1], group, handle, TOKENS_PER_BLOCK)


def test_case_C5_attached_elsewhere_a_handle_leaves_its_place_to_the_other_group() -> None:
    tree = ReuseTree(2, TOKENS_PER_BLOCK)
    left, right = block(0), block(1)
    [old] = places(tree, [1, 2])
    attach(tree, old, 0, left)
    attach(tree, old, 1, right)
    [new] = places(tree, [5, 6])
    attach(tree, new, 0, left)
    assert old[0].values[0][old[1]] is None
    assert old[0].values[1][old[1]] is right
    assert tree.num_nodes() == 2
    [third] = places(tree, [7, 8])
    attach(tree, third, 1, right)
    assert tree.num_nodes() == 2, "the old place had nothing left and is gone"


def test_case_C6_the_first_handle_stays_in_each_group() -> None:
    tree = ReuseTree(2, TOKENS_PER_BLOCK)
    [place] = places(tree, [1, 2])
    attach(tree, place, 1, block(0))
    assert places(tree, [1, 2]) == [place]
    assert [values[place[1]] is None for values in place[0].values] == [True, False]


def test_case_C9_a_block_is_a_leaf_until_any_group_stores_something_behind_it() -> None:
    tree = ReuseTree(2, TOKENS_PER_BLOCK)
    [head] = places(tree, [1, 2])
    attach(tree, head, 0, block(0))
    assert head[0].is_leaf(head[1])
    [_head, behind] = places(tree, [1, 2, 3, 4])
    child = block(1)
    attach(tree, behind, 1, child)
    assert not head[0].is_leaf(head[1])
    tree.detach(child, 1)
    assert head[0].is_leaf(head[1])

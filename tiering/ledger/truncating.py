"""Forgetting what is stored of a prompt beyond some point (design: public names, ``truncate``)."""

from __future__ import annotations

from typing import Any

from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.state import LedgerState


def truncate(state: LedgerState, request: Request, keep_tokens: Any) -> int:
    """Forget what is stored of this prompt beyond its first ``keep_tokens`` tokens. Referenced blocks stay with their sequences.

    Returns the number of blocks forgotten, of all groups.
    """
    keys = TokenKeys(request, state.tokens_per_block)
    namespace = Namespace(state.rules.namespace_seed, request)
    first = (keep_tokens + state.tokens_per_block - 1) // state.tokens_per_block
    forgotten = _forget_warm(state, namespace, keys, first)
    root = state.tree.find_root(namespace)
    if root is None:
        return forgotten
    walk = state.tree.walk(root, keys, request.num_tokens)
    number = 0
    for node, count in zip(list(walk.nodes), list(walk.counts), strict=True):
        if number + count > first:
            # Everything behind the kept part goes, side branches of it included: they extend what is to be forgotten.
            for group in range(len(state.groups)):
                forgotten += _forget_behind(state, node, max(first - number, 0), group)
            return forgotten
        number += count
    # All full blocks are kept, or there are none beyond: what is left is a stored tail that is part of this prompt.
    if number >= first:
        for shared, node, position in state.tree.partial_places(walk, keys, request.num_tokens).all_places():
            for group, allocator in enumerate(state.allocators):
                block = node.values[group][position] if position < node.length else None
                if block is not None and shared == block.num_tokens:
                    allocator.forget(block)
                    forgotten += 1
    return forgotten


def _forget_behind(state: LedgerState, node: Node, first: int, group: int) -> int:
    doomed = [value for value in node.values[group][first:] if value is not None]
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        doomed.extend([value for value in child.values[group] if value is not None])
        stack.extend(child.children.values())
    for block in reversed(doomed):
        state.allocators[group].forget(block)
    return len(doomed)


def _forget_warm(state: LedgerState, namespace: Namespace, keys: TokenKeys, first: int) -> int:
    """Forget what NVMe has held since the start of blocks ``first`` and later, whatever is stored or missing between them."""
    forgotten = 0
    parent = namespace.chain_seed
    for number in range(keys.num_tokens // keys.tokens_per_block):
        if not any(allocator.warm for allocator in state.allocators):
            break
        parent = next_chain_key(parent, keys.block_key(number, keys.tokens_per_block))
        for allocator in state.allocators:
            block = allocator.warm.get(parent)
            if block is not None and number >= first:
                allocator.forget(block)
                forgotten += 1
    return forgotten

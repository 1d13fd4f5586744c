"""The longest stored prefix that every group can serve (design: reuse is decided by content; sliding windows).

A full-attention group needs every block of the prefix. A window group needs only the blocks that the tokens to come still read,
and its sinks; what lies before may have been evicted. A recurrent group needs the state at the prefix's very end.
"""

from __future__ import annotations

from typing import cast

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupGeometry
from kvtier.tiering.ledger.node import Walk
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.state import LedgerState


def usable_prefix(state: LedgerState, walk: Walk) -> list[list[Block]]:
    """By group, the handles along a walk that a prompt may reuse, all rows of one length; see :func:`usable_rows`."""
    if state.is_single:
        return [present_prefix(walk, 0)]
    return usable_rows(state, [walked_values(walk, group) for group in range(len(state.groups))])


def usable_rows(state: LedgerState, values: list[list[Block | None]]) -> list[list[Block]]:
    """By group, what of a prompt's stored blocks may be reused: rows of one length, with the group's placeholder where it needs none.

    ``values`` are the handles by group and position, None where a group has none. Rows of cross-attention groups are empty.
    """
    length = min(len(values[group]) for group in state.prefix_groups) if state.prefix_groups else 0
    settled = -1
    while settled != length:
        settled = length
        for group in state.prefix_groups:
            length = _served(state.geometries[group], values[group], length)
    return [_row(state, group, values[group], length) for group in range(len(state.groups))]


def present_prefix(walk: Walk, group: int) -> list[Block]:
    """The handles along a walk up to the first hole."""
    found: list[Block] = []
    for step in range(len(walk.nodes)):
        node = walk.nodes[step]
        count = walk.counts[step]
        values = node.values[group]
        if node.present[group] == node.length and count == node.length:
            found.extend(cast(list[Block], values))
            continue
        for position in range(count):
            value = values[position]
            if value is None:
                return found
            found.append(value)
    return found


def stored_rows(state: LedgerState, sequence: ActiveSequence) -> list[list[Block]]:
    """By group, what the tree holds of a sequence's storable tokens, the partial tail included."""
    usable = sequence.storable_tokens()
    root = state.tree.find_root(sequence.namespace)
    if root is None or usable <= 0:
        return [[] for _ in state.groups]
    walk = state.tree.walk(root, sequence.keys, usable)
    rows = [[value for value in walked_values(walk, group) if value is not None] for group in range(len(state.groups))]
    tail = usable % state.tokens_per_block
    node, count = walk.end()
    if tail and walk.num_blocks == usable // state.tokens_per_block and count == node.length:
        child = node.children.get(sequence.keys.block_key(walk.num_blocks, tail))
        if child is not None:
            for group, row in enumerate(rows):
                value = child.values[group][0]
                if value is not None:
                    row.append(value)
    return rows


def walked_values(walk: Walk, group: int) -> list[Block | None]:
    """The handles along a walk in one group, None for holes."""
    found: list[Block | None] = []
    for node, count in zip(walk.nodes, walk.counts, strict=True):
        found.extend(node.values[group] if count == node.length else node.values[group][:count])
    return found


def _served(geometry: GroupGeometry, values: list[Block | None], length: int) -> int:
    """The longest prefix of at most ``length`` blocks that this group could serve, or a shorter one to look at next."""
    if geometry.kind == RECURRENT:
        while length > 0 and values[length - 1] is None:
            length -= 1
        return length
    first = 0
    if geometry.kind == WINDOW:
        first = min(geometry.num_sink_blocks + geometry.num_departed(length * geometry.tokens_per_block), length)
        for position in range(min(geometry.num_sink_blocks, length)):
            if values[position] is None:
                return position
    # From the end for a window, whose early holes do not count; any hole of a full group ends the prefix, the first one decides.
    if geometry.kind == FULL:
        for position in range(length):
            if values[position] is None:
                return position
        return length
    for position in range(length - 1, first - 1, -1):
        if values[position] is None:
            return position
    return length


def _row(state: LedgerState, group: int, values: list[Block | None], length: int) -> list[Block]:
    geometry = state.geometries[group]
    if geometry.kind == CROSS:
        return []
    if geometry.kind == FULL:
        return cast(list[Block], values[:length])
    row = [state.allocators[group].placeholder] * length
    needed = range(length - 1, length) if geometry.kind == RECURRENT else range(length)
    if geometry.kind == WINDOW:
        departed = geometry.num_departed(length * geometry.tokens_per_block)
        first = geometry.num_sink_blocks + departed
        needed = range(min(first, length), length)
        for position in range(min(geometry.num_sink_blocks, length)):
            row[position] = cast(Block, values[position])
    for position in needed:
        if position >= 0:
            row[position] = cast(Block, values[position])
    return row

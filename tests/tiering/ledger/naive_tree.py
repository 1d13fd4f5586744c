"""The reuse tree in its most obvious form: a node for each block, contents compared as they are, events made at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Removed, Stored, StoredBlock
from kvtier.tiering.ledger.key import Namespace
from kvtier.tiering.ledger.request import MultimodalItem, Request

IMAGES = (b"\x01" * 32, b"\x02" * 32)
NUM_GROUPS = 2
BlockContent = tuple[Any, ...]
"""(token, extra id) of each token, and where an item overlaps the block: (digest, offset in the item, position, tokens)."""
NAMESPACES: tuple[dict[str, Any], ...] = ({}, {}, {}, {"cache_salt": "a"}, {"lora_id": 1})


class NaiveNode:
    """One block."""

    def __init__(self, parent: NaiveNode | None, content: BlockContent) -> None:
        self.parent = parent
        self.content = content
        self.children: dict[BlockContent, NaiveNode] = {}
        self.handles: list[Block | None] = [None] * NUM_GROUPS
        self.chain_key = b""
        self.namespace: Namespace | None = None if parent is None else parent.namespace

    def stored(self) -> StoredBlock:
        """What a Stored event says of this block."""
        elements, item = self.content
        assert self.namespace is not None
        return StoredBlock(self.chain_key, tuple(token for token, _extra in elements), self.namespace.lora_id, self.namespace.cache_salt,
                           PRIMARY, 35, () if item is None else (item[:2],))

    def parent_hash(self) -> bytes | None:
        return None if self.parent is None or self.parent.parent is None else self.parent.chain_key

    def below(self) -> Iterator[NaiveNode]:
        for child in self.children.values():
            yield child
            yield from child.below()

    def path(self) -> list[BlockContent]:
        return [] if self.parent is None else [*self.parent.path(), self.content]

    def prune(self) -> None:
        if self.parent is not None and not self.children and not any(self.handles):
            del self.parent.children[self.content]
            self.parent.prune()


class Prompt:
    """Tokens in a namespace, perhaps with one item, in a form that a naive tree reads."""

    def __init__(self, tokens: list[int], extra_ids: list[int] | None, item: tuple[bytes, int, int] | None, namespace: dict[str, Any],
                 num_tokens: int) -> None:
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.elements = [(token, None if extra_ids is None else extra_ids[position]) for position, token in enumerate(tokens)]
        self.item = item
        items = () if item is None else (MultimodalItem(item[0], [item[1:]]),)
        self.request = Request(1, tokens, extra_ids=extra_ids, multimodal=items, **namespace)
        self.namespace = Namespace(b"model", self.request)

    def content(self, number: int, num_tokens: int, tokens_per_block: int) -> BlockContent:
        start = number * tokens_per_block
        return tuple(self.elements[start:start + num_tokens]), self.overlap(start, start + tokens_per_block)

    def overlap(self, start: int, end: int) -> BlockContent | None:
        if self.item is None:
            return None
        digest, item_start, length = self.item
        first, last = max(start, item_start), min(end, item_start + length)
        return (digest, first - item_start, first - start, last - first) if first < last else None


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Mostly of two token values, so that prompts meet and part often."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)) * draw(st.integers(1, 3))
    kind = draw(st.integers(0, 7))
    repeats = draw(st.integers(1, 4))
    extra_ids = [position // repeats % 2 for position in range(len(tokens))] if kind == 0 else None
    item = None
    if kind in (1, 2):
        start = draw(st.integers(0, len(tokens) - 1))
        item = (draw(st.sampled_from(IMAGES)), start, draw(st.integers(1, len(tokens) - start)))
    return Prompt(tokens, extra_ids, item, draw(st.sampled_from(NAMESPACES)), draw(st.integers(1, len(tokens))))


class EagerLog:
    """Events with their content made at once."""

    def __init__(self) -> None:
        self.removed_hashes: list[list[bytes]] = [[] for _ in range(NUM_GROUPS)]
        self.events: list[tuple[int, Stored | Removed]] = []

    def stored(self, group: int, nodes: list[NaiveNode]) -> None:
        self.publish_removed(group)
        self.events.append((group, Stored(nodes[0].parent_hash(), tuple(node.stored() for node in nodes))))

    def removed(self, group: int, node: NaiveNode) -> None:
        self.removed_hashes[group].append(node.chain_key)

    def publish_removed(self, group: int) -> None:
        if self.removed_hashes[group]:
            self.events.append((group, Removed(tuple(self.removed_hashes[group]))))
            self.removed_hashes[group] = []

    def flush(self) -> list[tuple[int, Stored | Removed]]:
        for group in range(NUM_GROUPS):
            self.publish_removed(group)
        events, self.events = self.events, []
        return events

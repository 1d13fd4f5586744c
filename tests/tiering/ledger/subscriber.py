"""Somebody who hears the ledger's events and nothing else."""

from __future__ import annotations

from kvtier.pools.pool_index import level_of
from kvtier.tiering.ledger.events import Created, Event, Removed, Stored, Updated
from kvtier.tiering.ledger.group import FULL
from kvtier.tiering.ledger.ledger import Ledger


class Subscriber:
    """A router that knows the cache only from its events."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.groups: list[dict[bytes, tuple[int, int]]] = [{} for _ in ledger.groups]  # by group, chain key: level, priority
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.next_id = 0

    @property
    def blocks(self) -> dict[bytes, tuple[int, int]]:
        """What it knows of the first group."""
        return self.groups[0]

    def consume(self) -> list[Event]:
        events = self.ledger.events.flush()
        for event in events:
            assert event.event_id == self.next_id, "event ids ascend by one"
            self.next_id += 1
            data = event.data
            blocks = self.groups[event.group]
            may_have_gaps = self.ledger.groups[event.group].kind != FULL
            if isinstance(data, Created):
                blocks.clear()
            elif isinstance(data, Stored):
                assert may_have_gaps or data.parent_hash is None or data.parent_hash in blocks, "stored behind a block that is not"
                for block in data.blocks:
                    assert block.block_hash not in blocks, "stored twice"
                    blocks[block.block_hash] = (block.level, block.priority)
                    self.tokens[block.block_hash] = block.tokens
            elif isinstance(data, Removed):
                for key in data.block_hashes:
                    del blocks[key]
            elif isinstance(data, Updated):
                level, priority = blocks[data.block_hash]
                if data.level is not None:
                    assert data.level[0] == level != data.level[1]
                    level = data.level[1]
                if data.priority is not None:
                    assert data.priority[0] == priority != data.priority[1]
                    priority = data.priority[1]
                blocks[data.block_hash] = (level, priority)
        return events

    def check(self) -> None:
        """After consuming everything the subscriber knows the tree: keys, levels, priorities."""
        self.consume()
        for allocator, known in zip(self.ledger.allocators, self.groups, strict=True):
            actual = {allocator.chain_key(block): (level_of(block.index), block.priority)
                      for block in allocator.blocks if block.node is not None}
            assert known == actual

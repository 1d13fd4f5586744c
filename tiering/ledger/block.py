"""``Block``: a handle (design: a block is a handle).

``id`` never changes; ``index`` says where the bytes are. Offloading and onboarding exchange the ``index`` of two handles and
touch nothing else, so sequences, tree and counts keep pointing at the same handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.eviction import QueueRecord
from kvtier.pools.pool_index import PoolIndex
from kvtier.types import BlockId

if TYPE_CHECKING:
    from kvtier.tiering.ledger.tree import Node


class Block(QueueRecord):
    """One handle of one group.

    Attributes:
        ref_count: sequences and leases that hold it.
        node, position: its place in the reuse tree, if it has one.
        num_tokens: tokens of content while it is in the tree; 0 otherwise.
        warm_key: chain key of content found on NVMe at start and not yet adopted by the tree; empty otherwise.
        secondary_backing, nvme_backing: spares that hold lower copies of this block's content.
        owner: for a spare that is a backing, the block whose content it holds.
    """

    def __init__(self, block_id: BlockId, index: PoolIndex) -> None:
        super().__init__()
        self.id = block_id
        self.index = index
        self.ref_count = 0
        self.scheduling_ref_count = 0
        self.node: Node | None = None
        self.position = 0
        self.num_tokens = 0
        self.warm_key = b""
        self.secondary_backing: Block | None = None
        self.nvme_backing: Block | None = None
        self.owner: Block | None = None

    @property
    def has_content(self) -> bool:
        """Somebody may still match it: it is in the tree, or waits on NVMe to be adopted."""
        return self.node is not None or self.warm_key != b""

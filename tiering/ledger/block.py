"""``Block``: a handle (design: a block is a handle).

``id`` never changes; ``index`` says where the bytes are. Offloading and onboarding exchange the ``index`` of two handles and
touch nothing else, so sequences, tree and counts keep pointing at the same handle.

There are as many handles as there are slots on all levels, millions with a large NVMe level. What few of them have at a time
therefore lies in an object of its own (``BlockExtra``), and plain Python gets slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvtier.policies.queue_record import QueueRecord, RecordExtra
from kvtier.pools.pool_index import NVME, PoolIndex, level_of
from kvtier.types import BlockId

if TYPE_CHECKING:
    from mypy_extensions import i64

    from kvtier.tiering.ledger.node import Node


class BlockExtra(RecordExtra):
    """The rarely used part of a block. Spares that hold lower copies of the block point at it too.

    Attributes:
        content: the block that this is about.
        secondary, nvme: spares that hold lower copies of its content.
        warm_key: see :class:`Block`.
    """

    __slots__ = ("content", "nvme", "secondary", "warm_key")

    def __init__(self, content: Block) -> None:
        super().__init__()
        self.content = content
        self.secondary: Block | None = None
        self.nvme: Block | None = None
        self.warm_key = b""


class Block(QueueRecord):
    """One handle of one group.

    Attributes:
        generation: how often the slot that it has was given to a writer; it belongs to the slot and is exchanged with ``index``.
        file_uses: how many Moves with one end in a file, and tools, use the slot that it has: not 0, and the slot is *busy*. Exchanged with
            ``index``, too.
        ref_count: sequences and leases that hold it.
        node, position: its place in the reuse tree, if it has one.
        num_tokens: tokens of content while it is in the tree; 0 otherwise.
        warm_key: chain key of content found on NVMe at start and not yet adopted by the tree; empty otherwise.
        secondary_backing, nvme_backing: spares that hold lower copies of this block's content.
        owner: for a spare that is a backing, the block whose content it holds.
    """

    __slots__ = ("file_uses", "generation", "id", "index", "node", "num_tokens", "position", "ref_count")

    def __init__(self, block_id: BlockId, index: PoolIndex) -> None:
        super().__init__()
        self.id = block_id
        self.index = index
        self.generation: i64 = 0
        self.file_uses: i64 = 0
        self.ref_count: i64 = 0
        self.node: Node | None = None
        self.position: i64 = 0
        self.num_tokens: i64 = 0

    @property
    def has_content(self) -> bool:
        """Somebody may still match it: it is in the tree, or waits on NVMe to be adopted."""
        return self.node is not None or self.warm_key != b""

    @property
    def owner(self) -> Block | None:
        extra = self.extra
        if extra is None:
            return None
        content = cast(BlockExtra, extra).content
        return None if content is self else content

    @property
    def secondary_backing(self) -> Block | None:
        extra = self.extra
        if extra is None:
            return None
        own = cast(BlockExtra, extra)
        return own.secondary if own.content is self else None

    @property
    def nvme_backing(self) -> Block | None:
        extra = self.extra
        if extra is None:
            return None
        own = cast(BlockExtra, extra)
        return own.nvme if own.content is self else None

    @property
    def warm_key(self) -> bytes:
        extra = self.extra
        if extra is None:
            return b""
        own = cast(BlockExtra, extra)
        return own.warm_key if own.content is self else b""

    @warm_key.setter
    def warm_key(self, key: bytes) -> None:
        if key or self.extra is not None:
            self.own_extra().warm_key = key
            self.tidy_extra()

    def add_backing(self, spare: Block) -> None:
        """From now on ``spare`` holds a lower copy of this block. It has the lower slot already."""
        extra = self.own_extra()
        if level_of(spare.index) == NVME:
            extra.nvme = spare
        else:
            extra.secondary = spare
        spare.extra = extra

    def leave_owner(self) -> None:
        """The copy that this spare holds is nobody's any more."""
        extra = cast(BlockExtra, self.extra)
        assert extra.content is not self
        if extra.secondary is self:
            extra.secondary = None
        else:
            extra.nvme = None
        self.extra = None
        extra.content.tidy_extra()

    def own_extra(self) -> BlockExtra:
        if self.extra is None:
            self.extra = BlockExtra(self)
        extra = cast(BlockExtra, self.extra)
        assert extra.content is self  # a spare has nothing of its own
        return extra

    def tidy_extra(self) -> None:
        extra = cast("BlockExtra | None", self.extra)
        if extra is not None and extra.secondary is None and extra.nvme is None and extra.warm_key == b"":
            super().tidy_extra()

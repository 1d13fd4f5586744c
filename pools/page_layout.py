"""``PageLayout``: an engine's own pages as blocks of ours: opaque bytes, several pages and ranks to a block (design: two ways to attach).

The engine owns its pool and says only how large its pages are. A block of ours (a *chunk* of the engine's) is ``pages_per_block`` of its
pages, on every rank. In a slot the ranks lie side by side, each with its pages one behind the other, so that a block is one I/O and
leaving out the first pages of a block leaves one stretch of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvtier.errors import ConfigError
from kvtier.pools.block_sections import STATE, BlockSection
from kvtier.pools.layer_spec import require_count

MAX_BLOCK_BYTES: Final = (1 << 31) - 1
"""Of one block over all ranks: what one call of the system moves."""


@dataclass(frozen=True)
class PageGroup:
    """Layers whose pages are stored and found together.

    Args:
        page_bytes: bytes of one page in each of the group's tensors, on one rank; an int for one tensor.
        pages_per_block: the engine's pages in one block of ours.
        is_state: pages are running states, and of a block only the last one is ever read: a block stored without its first pages is
            whole then. Otherwise it is not served.
        name: for messages and events.

    Raises:
        ConfigError: no tensors, or a number that is not positive.
    """

    page_bytes: Sequence[int] | int
    pages_per_block: int = 1
    is_state: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        sizes = (self.page_bytes,) if isinstance(self.page_bytes, int) else tuple(self.page_bytes)
        if not sizes:
            raise ConfigError("page_bytes=[]: a group of pages needs at least one tensor")
        for size in sizes:
            require_count("page_bytes", size, highest=MAX_BLOCK_BYTES)
        require_count("pages_per_block", self.pages_per_block, highest=1 << 20)
        object.__setattr__(self, "page_bytes", sizes)

    @property
    def tensor_page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page in each tensor."""
        assert isinstance(self.page_bytes, tuple)
        return self.page_bytes

    @cached_property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all tensors of the group, on one rank."""
        return sum(self.tensor_page_bytes)

    @property
    def rank_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.bytes_per_page * self.pages_per_block


@dataclass(frozen=True)
class PageLayout:
    """All groups of an engine's pages.

    Args:
        groups: in the engine's order; a key's group is a position here.
        ranks: workers of one engine on this node, each with pages of its own, equally large.
        is_replicated: all ranks hold the same bytes (pure MLA): a slot has them once, rank 0 stores them and every rank loads them.

    Raises:
        ConfigError: no groups, or a block of more than 2 GiB.
    """

    groups: Sequence[PageGroup]
    ranks: int = 1
    is_replicated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        require_count("ranks", self.ranks, highest=1 << 16)
        if not self.groups:
            raise ConfigError("groups=[]: an engine's pages come in at least one group")
        for number, group in enumerate(self.groups):
            if not isinstance(group, PageGroup):
                raise ConfigError(f"groups[{number}]={group!r}: pass PageGroup objects")
            if self.copies * group.rank_bytes > MAX_BLOCK_BYTES:
                raise ConfigError(f"groups[{number}]: a block of {group.pages_per_block} pages of {group.bytes_per_page} bytes on "
                                  f"{self.copies} ranks is {self.copies * group.rank_bytes} bytes, more than {MAX_BLOCK_BYTES}; take fewer "
                                  "pages per block")

    @property
    def copies(self) -> int:
        """Ranks whose pages a slot holds."""
        return 1 if self.is_replicated else self.ranks

    @cached_property
    def blocks(self) -> tuple[PageBlock, ...]:
        """Each group's block as pools, copiers and transfers want it."""
        return tuple(PageBlock(number, self.copies * group.rank_bytes) for number, group in enumerate(self.groups))

    def rank_offset(self, group: int, rank: int) -> int:
        """Where a rank's part begins in a slot of the group, in bytes."""
        return 0 if self.is_replicated else rank * self.groups[group].rank_bytes

    def describe(self) -> str:
        """In one line of JSON: part of the namespace that a store directory carries in clear."""
        groups = [{"page_bytes": list(group.tensor_page_bytes), "pages_per_block": group.pages_per_block, "is_state": group.is_state}
                  for group in self.groups]
        return json.dumps({"groups": groups, "ranks": self.ranks, "is_replicated": self.is_replicated}, sort_keys=True)


@dataclass(frozen=True)
class PageBlock:
    """The block of a group of pages: opaque bytes of all ranks."""

    number: int
    block_bytes: int
    tokens_per_block: int = 1  # it is never copied in part

    @cached_property
    def sections(self) -> tuple[BlockSection, ...]:
        return (BlockSection(STATE, (1, self.block_bytes), "uint8", 0, False),)

    def copied_bytes(self, num_tokens: int) -> int:
        return self.block_bytes

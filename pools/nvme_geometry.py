"""``NvmeGeometry``: where a slot lies inside a group's slab file (design: NVMe rules). Pure arithmetic.

A slot is one 4 KiB header page followed by the block, padded to whole pages, so that both can be read and written with
direct I/O in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier.errors import ConfigError

PAGE_BYTES: Final = 4096
"""Unit of direct I/O: offsets, lengths and addresses are multiples of it. Every NVMe drive and filesystem accepts it."""

HEADER_BYTES: Final = PAGE_BYTES
"""Bytes of a slot's header page."""

_MAX_FILE_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True)
class NvmeGeometry:
    """The slab file of one layer group.

    Attributes:
        block_bytes: bytes of one block of the group (all its layers).
        num_slots: blocks that the file holds; 0 for a group that never reaches NVMe.

    Raises:
        ConfigError: no bytes per block, a negative number of slots, a file beyond 64-bit offsets.
    """

    block_bytes: int
    num_slots: int

    def __post_init__(self) -> None:
        if self.block_bytes <= 0:
            raise ConfigError(f"block_bytes={self.block_bytes}: a block on NVMe needs at least 1 byte")
        if self.num_slots < 0:
            raise ConfigError(f"num_slots={self.num_slots}: the NVMe level cannot hold fewer than 0 blocks")
        if self.file_bytes > _MAX_FILE_BYTES:
            raise ConfigError(f"num_slots={self.num_slots} of {self.stride} bytes make a file of {self.file_bytes} bytes; "
                              f"file offsets end at {_MAX_FILE_BYTES}: configure a smaller NVMe level")

    @property
    def payload_bytes(self) -> int:
        """``block_bytes`` rounded up to whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: header page and padded payload."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole slab file."""
        return self.num_slots * self.stride

    def offset(self, slot: int) -> int:
        """Byte offset of a slot's header page; the payload follows ``HEADER_BYTES`` later."""
        assert 0 <= slot < self.num_slots, f"slot {slot} outside 0..{self.num_slots - 1}"
        return slot * self.stride

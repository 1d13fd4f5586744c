"""``DirectRow``: one block's staging memory that a file is read into, and written from, without passing through ours."""

from __future__ import annotations

from typing import Protocol

from kvtier.io.direct_file import Buffer


class PendingIO(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Until nothing touches the memory any more.

        Raises:
            TransferError: it failed, or moved fewer bytes than it should.
        """


class DirectRow(Protocol):
    """``payload_bytes`` of memory from a page boundary on: the device's, or in tests the host's. One user at a time."""

    @property
    def nbytes(self) -> int:
        """Its length: the block with its padding."""

    def start_read(self, offset: int) -> PendingIO:
        """Begin to fill it with the bytes of its group's slab from ``offset`` on."""

    def start_write(self, offset: int) -> PendingIO:
        """Begin to write it to its group's slab at ``offset``."""

    def checksum(self, key: bytes, group: int, slot: int) -> bytes:
        """What ``block_checksum`` gives for the same bytes, computed where they are."""

    def to_host(self) -> Buffer:
        """A page-aligned copy, uint8 [payload_bytes]."""

    def from_host(self, data: Buffer) -> None:
        """Overwrite it with uint8 [payload_bytes]; over when this returns."""

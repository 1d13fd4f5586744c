"""The rows of a manifest and the digest that each of them carries: SQLite's own check misses most flipped bits."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kvtier.io.checksum import row_digest

Place: TypeAlias = tuple[int, int]
"""(group, slot)"""

ROW_LAYOUT: Final = struct.Struct("<qqqqqd")
"""Numbers of a block row in the order in which its digest covers them: group, slot, length, priority, hits, expiry."""


BLOCK_SEED: Final = 1
"""Of their digests."""


class ManifestRow(NamedTuple):
    """One stored block: place, chain key (32 bytes), bytes without padding, checksum (16 bytes), retention, times served."""

    group: int
    slot: int
    key: bytes
    length: int
    checksum: bytes
    priority: int
    expiry: float
    hits: int

    def digest(self) -> int:
        """Digest over all columns, signed 64 bits. Raises struct.error or TypeError when a column is of the wrong kind."""
        group, slot, key, length, checksum, priority, expiry, hits = self
        return row_digest(ROW_LAYOUT.pack(group, slot, length, priority, hits, expiry) + key + checksum, seed=BLOCK_SEED)


class QuarantineRow(NamedTuple):
    """One slot out of service: place, key of what it held (may be empty), why, since when (wall clock)."""

    group: int
    slot: int
    key: bytes
    reason: str
    since: float

    def digest(self) -> int:
        """As :meth:`ManifestRow.digest`."""
        group, slot, key, reason, since = self
        return row_digest(struct.pack("<qqd", group, slot, since) + key + reason.encode("utf-8", "replace"), seed=2)


class Totals(NamedTuple):
    """How many rows of each kind there are and the XOR of their digests: tells when rows have vanished."""

    namespace: bytes = b""
    blocks: int = 0
    blocks_xor: int = 0
    quarantined: int = 0
    quarantined_xor: int = 0

    def digest(self) -> int:
        """As :meth:`ManifestRow.digest`."""
        namespace, blocks, blocks_xor, quarantined, quarantined_xor = self
        return row_digest(struct.pack("<qqqq", blocks, blocks_xor, quarantined, quarantined_xor) + namespace, seed=3)


@dataclass
class ManifestContents:
    """What a manifest holds after every digest was checked.

    Attributes:
        rows, quarantine: the rows that verify.
        bad_rows: rows that do not; with the place they claim where that can be read.
        damage: everything that is wrong, in words; empty for a sound manifest.
    """

    rows: dict[Place, ManifestRow] = field(default_factory=dict)
    quarantine: dict[Place, QuarantineRow] = field(default_factory=dict)
    bad_rows: list[Place | None] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

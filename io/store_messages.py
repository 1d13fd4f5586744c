"""What goes into and comes out of ``NvmeStore``, as frozen messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.io.direct_file import Buffer
from kvtier.io.direct_row import DirectRow

COUNTERS = ("read_blocks", "read_bytes", "written_blocks", "written_bytes", "read_errors",
            "checksum_failures", "write_errors", "gds_read_blocks", "gds_written_blocks")
"""What a store counts, by the names in ``NvmeStats``."""

BlockTarget = Buffer | DirectRow
"""What a block is read into, and written from."""


def is_direct(target: BlockTarget) -> bool:
    """Whether it is a direct row."""
    return not isinstance(target, np.ndarray)


@dataclass(frozen=True)
class BlockWrite:
    """One block to be stored.

    Attributes:
        group, slot: where to.
        key: chain key of the content, 32 bytes.
        data: uint8 [block_bytes], contiguous; or [payload_bytes], a padded row, which travels in place when it is aligned; or a direct
            row, which travels without the host.
        priority: of the block.
        expiry: wall-clock seconds, 0.0 for none.
    """

    group: int
    slot: int
    key: bytes
    data: BlockTarget
    priority: int
    expiry: float


class StoredBlock(NamedTuple):
    """One block that the store holds. ``hits``: how often it was served, over all runs.

    A tuple because a warm start makes one for every block at once, at a quarter of what a frozen dataclass takes.
    """

    group: int
    slot: int
    key: bytes
    priority: int
    expiry: float
    hits: int


@dataclass(frozen=True)
class NvmeStats:
    """Counters since the store was opened; ``stored_blocks`` and ``quarantined_slots`` are the state now."""

    stored_blocks: int
    quarantined_slots: int
    read_blocks: int
    read_bytes: int
    written_blocks: int
    written_bytes: int
    read_errors: int        #: reads that failed without reaching the check
    checksum_failures: int  #: blocks that did not verify
    write_errors: int       #: items that could not be stored, those shed during a pause included
    write_pauses: int
    dropped_rows: int       #: given up when the store was opened
    recovered_rows: int     #: found by their slot headers when the store was opened
    rebuilt: bool           #: the manifest was damaged when the store was opened: blocks given up before may be there again
    direct: bool            #: every slab is read and written past the page cache
    gds_read_blocks: int    #: of those read, the ones for a direct row
    gds_written_blocks: int
    gds_detours: int        #: of both, how many the direct way refused: they went through the host

"""``BlockStore``: what the transfer manager needs of the NVMe store (design: transfer rules)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.io.direct_row import DirectRow
from kvtier.io.store_messages import BlockWrite


class BlockStore(Protocol):
    """What the transfer manager needs of the NVMe store. All calls may block on the disk; no lock is held around them."""

    @property
    def accepts_writes(self) -> bool:
        """False for a while after the disk was full or failing: stores are shed, loads are not."""

    def most_ahead(self, group: int) -> int:
        """How many neighbouring slots ``read_ahead`` may take at once, at least 1."""

    def read_ahead(self, group: int, first_slot: int, outs: Sequence[npt.NDArray[np.uint8]]) -> Sequence[npt.NDArray[np.uint8]]:
        """Read neighbouring slots with one call and without a check; for each what ``read_block`` wants as ``arrived``.

        Raises:
            TransferError: nothing is known of any of the blocks.
        """

    def read_block(self, group: int, slot: int, key: bytes, out: npt.NDArray[np.uint8] | DirectRow,
                   arrived: npt.NDArray[np.uint8] | None = None) -> None:
        """Fill ``out`` (uint8, a padded row of a ``HostArena``, or a direct row) with the verified block. Thread-safe.

        Raises:
            CorruptBlock, TransferError: ``out`` is garbage.
        """

    def write_blocks(self, items: Sequence[BlockWrite]) -> Sequence[Exception | None]:
        """Write blocks and commit their rows; an error or None for each."""

    def discard(self, group: int, slots: Sequence[int]) -> None:
        """Commit the deletion of these slots' rows."""

    def quarantine(self, group: int, slot: int, reason: str) -> None:
        """Never use this slot again, and remember why."""

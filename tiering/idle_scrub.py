"""``IdleScrub``: verifies the NVMe level while the tier runs and moves nothing (design: scrubbing runs at idle within a bandwidth budget).

A thread reads one block at a time past the ledger, which neither sees it nor changes its order of eviction. Only a block that
fails is taken to the ledger: its handle is held, the block is read again, and if it fails again its slot is condemned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from kvtier.errors import CorruptBlock, KVTierError
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.scrub import Scrubber
from kvtier.io.threads import start_thread
from kvtier.pools.pool_index import NVME
from kvtier.tiering.ledger.file_level import FileLevel
from kvtier.tiering.transfer import TransferManager

logger = logging.getLogger(__name__)

REST_SECONDS: Final = 3600.0
"""From the end of one pass over the store to the beginning of the next."""


class ScrubbedLedger(Protocol):
    """What is used of a ledger."""

    @property
    def allocators(self) -> Sequence[FileLevel]: ...


class ScrubbedTier(Protocol):
    """What is used of a tier."""

    @property
    def transfers(self) -> TransferManager | None: ...

    def locked(self) -> AbstractContextManager[ScrubbedLedger]: ...

    def condemn(self, group: int, slot: int, error: Exception) -> None: ...


class IdleScrub:
    """The scrubbing of one manager.

    Args:
        core: of the manager; its ledger is asked for bad blocks only, and its transfers for whether anything moves.
        store: of the manager.
        bytes_per_second: budget.
    """

    def __init__(self, core: ScrubbedTier, store: NvmeStore, bytes_per_second: float) -> None:
        self._core = core
        self._store = store
        self._stop = threading.Event()
        transfers = core.transfers
        assert transfers is not None
        self._scrubber = Scrubber(store, bytes_per_second, is_idle=lambda: transfers.idle(0.0), condemn=self._condemn,
                                  sleep=self._stop.wait)
        self.verified = 0
        self._thread = start_thread(self._run, "kvtier-scrub")

    def close(self, timeout: float) -> None:
        """Stop after the block that is being read. A read that hangs is left behind: the store waits for it when it is closed."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.verified += self._scrubber.run(self._stop.is_set).verified
            except OSError as error:
                logger.warning("%s: scrubbing could not write down where it is: %s", self._store.directory, error)
            except KVTierError as error:  # the store or the manager has been closed
                logger.debug("scrubbing ends: %s", error)
                return
            self._stop.wait(REST_SECONDS)

    def _condemn(self, place: Place, key: bytes, reason: str) -> None:
        group, slot = place
        with self._core.locked() as ledger:
            allocator = ledger.allocators[group]
            handle = allocator.holders[NVME][slot]
            if allocator.chain_key(handle.owner or handle) != key:
                return  # it holds something else by now
            allocator.begin_access(handle)  # so that nobody writes into the slot, or moves the handle elsewhere
        try:
            again = self._store.why_bad(group, slot, key, aligned_buffer(self._store.geometries[group].payload_bytes))
            if again is not None:
                self._core.condemn(group, slot, CorruptBlock(again))
        finally:
            with self._core.locked() as ledger:
                ledger.allocators[group].end_access(NVME, slot)

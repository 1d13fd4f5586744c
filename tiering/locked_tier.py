"""``LockedTier``: a ledger with its store and its transfers under one lock (design: ledger rules, "Lock"); the way in and the end.

Numbered records leave the ledger in order through an outbox and are issued under a submit lock. Nothing is copied, read from a
file or waited for while either lock is held. I/O threads never touch the ledger: they fill the transfer manager's completion
queue, which is drained on every entry. A call that is cut short in the middle of a change leaves the tier *broken* (``turn.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

from kvtier.errors import ConfigError, CorruptBlock, KVTierError
from kvtier.io.drive_queue import DriveQueue
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_writes import WRITE_THREADS
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import NVME, level_of, slot_of
from kvtier.tiering import arguments
from kvtier.tiering.bounded_call import call_within
from kvtier.tiering.config import TierConfig
from kvtier.tiering.idle_scrub import IdleScrub
from kvtier.tiering.ledger.file_level import FileLevel
from kvtier.tiering.ledger.moves import Discard, Move, MoveLog
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult
from kvtier.tiering.turn import Turn

_log = logging.getLogger(__name__)

LEAST_CLEARING: Final = 1.0
"""Seconds for writing a reset down, even when the transfers took all of its time."""


class TierLedger(Protocol):
    """What both ledgers have for this: the token tree's and the key map's."""

    moves: MoveLog

    @property
    def allocators(self) -> Sequence[FileLevel]: ...

    def set_time(self, now: float) -> None: ...

    def finish(self, move: Move, failed: bool, source_is_bad: bool) -> None: ...

    def write_everything_out(self) -> bool: ...

    def condemn(self, group: int, slot: int) -> None: ...


class FailureTotals(Protocol):
    """What is counted of failures, whatever else is."""

    failures: int
    checksum_failures: int


LedgerT = TypeVar("LedgerT", bound=TierLedger)


class LockedTier(Generic[LedgerT]):
    """What ``TierCore`` and ``TierIndexCore`` have in common. They open ``store`` and ``transfers`` and count in ``_totals``."""

    store: NvmeStore | None
    transfers: TransferManager | None
    _totals: FailureTotals
    _broken_means = "Close it and make a new one"

    def __init__(self, config: TierConfig, ledger: LedgerT) -> None:
        self.config = config
        self.turn: Turn[LedgerT] = Turn(self)
        self.store = None
        self.scrub: IdleScrub | None = None
        self._ledger = ledger
        self._clock = config.clock
        self._broken = ""
        self._submit_lock = threading.Lock()
        self._close_lock = threading.RLock()
        self._outbox: deque[Move | Discard] = deque()
        self._num_queued = 0  # records put into the outbox so far, and records issued
        self._num_issued = 0
        self._clearing: set[object] = set()  # resets that are deleting what is on NVMe
        self.shown_name = type(self).__name__  # in messages; another one where a user has something else, which is made of this
        self._closed = False
        self._everything_let_go = False
        for allocator in ledger.allocators:
            allocator.wall_clock_offset = time.time() - self._clock()

    # -- for everybody ---------------------------------------------------------------------------------------------------

    def locked(self) -> Turn[LedgerT]:
        """The ledger, for a ``with`` statement. KVTierError when this is closed."""
        return self.turn

    @property
    def broken(self) -> str:
        """What has cut a call short in the middle of a change, so that the ledger is not used any more; "" of a sound one."""
        return self._broken

    def flush(self, timeout: float = 60.0) -> bool:
        """Finish all transfers and write all unreferenced content that may go to NVMe, as far as there is room for it.

        False when time ran out first, or when the store takes no writes (full or failing disk; a tier that is broken).
        """
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        while True:
            with self.turn as ledger:
                takes_writes = self._takes_writes
                is_complete = not takes_writes or ledger.write_everything_out()
            if self._broken:
                return False
            if self.transfers is not None and not self.transfers.idle(seconds_until(deadline)):
                return False
            if is_complete:
                return takes_writes or self.store is None
            if time.monotonic() > deadline:
                return False

    def condemn(self, group: int, slot: int, error: Exception) -> None:
        """An NVMe slot failed its check: it is quarantined, and nobody is promised what it held."""
        assert self.store is not None
        self.store.quarantine(group, slot, str(error))
        if not self.store.is_quarantined(group, slot):
            return  # nothing was stored there
        with self.turn as ledger:
            self._totals.failures += 1
            self._totals.checksum_failures += isinstance(error, CorruptBlock)
            ledger.condemn(group, slot)

    def close(self, timeout: float = 10) -> None:
        """End all transfers and let go of memory, files and the directory's lock. Bounded by ``timeout``.

        May be called again: what something hanging did not let go of the first time is then tried again.
        """
        timeout = arguments.seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        if not self._close_lock.acquire(timeout=timeout):
            return  # another thread is at it: it must not find its transfers closed in the middle
        try:
            self._close(timeout, deadline)
        finally:
            self._close_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- what differs -----------------------------------------------------------------------------------------------------

    def _count(self, result: MoveResult) -> None:
        """A Move has ended; the ledger is told next. That it failed need not be counted."""

    def _queued(self, records: Sequence[Move | Discard]) -> None:
        """A turn ends, and these will be issued, if any. Lock held."""

    def _closing(self) -> None:
        """From now on every call is refused; transfers still run."""

    def _transfers_closed(self, deadline: float) -> None:
        """No transfer begins any more; the store is still open."""

    def _let_go(self) -> None:
        """Let go of memory: nothing uses it any more. May be called again."""

    # -- opening ----------------------------------------------------------------------------------------------------------

    def _open_nvme(self, directory: Path, namespace: str, geometries: Sequence[NvmeGeometry]) -> NvmeStore:
        """The store, which is the tier's from here on; the ledger's clock is set for adopting what it holds."""
        config = self.config
        self.store = NvmeStore.open(directory, namespace, geometries, faults=config.faults, sync=config.nvme_sync,
                                    free_space_reserve=config.nvme_free_space_reserve_bytes,
                                    drive=DriveQueue(config.read_threads, WRITE_THREADS, config.nvme_write_bytes_per_second))
        self._ledger.set_time(self._clock())
        return self.store

    def _give_store_up(self) -> None:
        """What was to be opened behind it could not be."""
        if self.store is not None:
            self.store.close(1.0)

    def _opened(self) -> None:
        """Everything is there: begin what runs beside it."""
        rate = self.config.nvme_scrub_bytes_per_second
        if self.store is not None and rate is not None:
            self.scrub = IdleScrub(self, self.store, rate)
        if self.config.faults is not None:
            _log.warning("faults are injected into this cache (%s): %s. For trials only: blocks are really lost and files really "
                         "deleted", self.config.sources["faults"], self.config.faults)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise KVTierError(f"this {self.shown_name} is closed; make a new one")

    def _begin(self) -> LedgerT:
        self._require_open()
        self._ledger.set_time(self._clock())
        self._drain()
        return self._ledger

    def _end(self) -> None:
        self._queue_records(self._ledger.moves.take())

    def _tears(self, error: BaseException) -> bool:
        return not isinstance(error, KVTierError)

    def _break(self, what: str) -> None:
        if not self._broken:
            self._broken = what
            _log.error("this %s is broken: %s. %s", self.shown_name, what, self._broken_means)

    def _instead(self) -> LedgerT:
        self._require_open()
        raise KVTierError(f"this {self.shown_name} is broken: {self._broken}. {self._broken_means}")

    def _queue_records(self, records: Sequence[Move | Discard]) -> None:
        """Put what the ledger has decided on into the outbox. Lock held."""
        self._queued(records)
        self._num_queued += len(records)
        self._outbox.extend(records)

    def _submit(self) -> None:
        """Issue what is in the outbox. Whoever holds the submit lock issues everybody's records, in order; so when this returns, what
        the caller has put there is issued."""
        if self.transfers is None:
            return
        with self._submit_lock:
            records: list[Move | Discard] = []
            try:
                try:
                    while self._outbox:
                        records.append(self._outbox.popleft())
                    if records:
                        self.transfers.issue(records)
                finally:
                    self._num_issued += len(records)
            except BaseException as error:
                if not isinstance(error, KVTierError):  # records may be lost: copies that are never made, of content that is served
                    self._break(f"{type(error).__name__} while transfers were issued")
                raise
        if records:
            self.transfers.let_begin()

    @property
    def _all_issued(self) -> bool:
        """Whether the transfers know of every record. While another thread is about to issue some, they know of fewer."""
        return self._num_issued == self._num_queued

    @property
    def _takes_writes(self) -> bool:
        return (self.store is not None and not self._clearing and self.store.accepts_writes
                and not (self.transfers is not None and self.transfers.writes_hang))

    def _drain(self) -> None:
        """Tell the ledger which transfers have ended. Lock held."""
        if self.transfers is None:
            return
        totals = self._totals
        for result in self.transfers.drain():
            move = result.move
            self._count(result)
            if result.error is None:
                self._ledger.finish(move, False, False)
                continue
            totals.failures += 1
            totals.checksum_failures += isinstance(result.error, CorruptBlock)
            # Not after a failed copy out of the staging buffer, or a read cancelled at the end: those say nothing about the slot.
            is_bad = (level_of(move.source) == NVME and self.store is not None
                      and self.store.is_quarantined(move.group, slot_of(move.source)))
            self._ledger.finish(move, True, is_bad)

    def _clear_store(self, deadline: float, clearing: object) -> bool:
        """Delete what is on NVMe, after a reset of the ledger that has entered itself as ``clearing``: what is stored from then on must not
        be deleted with the rest. False when it was not over in time."""
        if self.store is None:
            self._clearing.discard(clearing)
            return True
        return call_within(seconds_until(deadline, LEAST_CLEARING), self.store.clear, "kvtier-reset",
                           partial(self._clearing.discard, clearing))

    def _close(self, timeout: float, deadline: float) -> None:
        """One thread at a time."""
        if self._everything_let_go:
            return
        is_first = not self._closed
        if is_first:
            with suppress(KVTierError), self.turn:  # whoever is inside ends, and nobody enters behind; of a broken tier nobody need
                self._closed = True
            self._closed = True
        self._closing()
        if self.store is not None:
            self.store.hurry()
        if self.scrub is not None:
            self.scrub.close(min(seconds_until(deadline, 0.1), 1.0))
        is_quiet = True
        if self.transfers is not None:
            if is_first and not self._broken:
                self._settle(self.transfers, deadline)
            is_quiet = self.transfers.close(seconds_until(deadline, 0.1))
            if is_first:
                self._transfers_closed(deadline)
        store_is_closed = self.store is None or self.store.close(seconds_until(deadline, 0.5))
        if is_quiet:
            self._let_go()
            self._everything_let_go = store_is_closed
        else:
            _log.warning("close: a transfer still ran after %s s; the memory of the blocks stays allocated, for it may be in use", timeout)
        if self.config.faults is not None and not self._everything_let_go:
            self.config.faults.end_hangs()

    def _settle(self, transfers: TransferManager, deadline: float) -> None:
        """Let everything issued end, and what the ledger then wants deleted from NVMe, as far as there is time. Nobody is inside."""
        self._submit()
        if transfers.idle(seconds_until(deadline)):
            self._drain()
            self._queue_records([record for record in self._ledger.moves.take() if isinstance(record, Discard)])
            self._submit()
            transfers.idle(seconds_until(deadline))


def require_model(model: str | None, num_nvme_slots: Sequence[int]) -> None:
    """Raise ConfigError when there is an NVMe level and no name for whose blocks it holds."""
    if any(num_nvme_slots) and not model:
        raise ConfigError(f"model={model!r}: an NVMe level needs model=\"name@revision:weights-digest\", so that another model's "
                          "blocks are never served")


def seconds_until(deadline: float, least: float = 0.0) -> float:
    """Seconds until a moment of ``time.monotonic``, and never fewer than ``least``."""
    return max(deadline - time.monotonic(), least)

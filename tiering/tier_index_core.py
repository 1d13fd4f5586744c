"""``TierIndexCore``: the key map's ledger with arena, store and transfers of a ``TierIndex``, under the lock of ``LockedTier``."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.io.block_writer import RUN_BYTES
from kvtier.io.collector import collector_paused
from kvtier.io.device import open_device
from kvtier.io.job_board import MAX_JOBS
from kvtier.io.shared_arena import SharedArena
from kvtier.pools.group_pools import HostPools
from kvtier.pools.nvme_geometry import HEADER_BYTES, NvmeGeometry
from kvtier.pools.page_layout import PageLayout
from kvtier.pools.pool_index import NVME, level_of
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.key_invariants import verify_keys
from kvtier.tiering.ledger.key_jobs import EngineJob
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import engine_key
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.locked_tier import LEAST_CLEARING, LockedTier, require_model, seconds_until
from kvtier.tiering.namespace import FORMAT_VERSION
from kvtier.tiering.tier_plan import TierPlan, level_slots
from kvtier.tiering.tier_statistics import FileTotals, TierStats, collect
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult

_log = logging.getLogger(__name__)

GONE_SECONDS: Final = 1.0
"""How long a rank's process must have been gone before its copies count as over: the driver may still be ending them."""


class _EmptyLedger(threading.local):
    """A ledger without any slot, of which all job numbers have been given; one for each thread."""

    def __init__(self, num_groups: int) -> None:
        self.ledger = KeyLedger([(0, 0)] * num_groups, TierRules(), max_events=0)
        self.ledger.next_job = 1 << 62


class TierIndexCore(LockedTier[KeyLedger]):
    """What a ``TierIndex`` is made of; arguments and errors are described there."""

    _totals: FileTotals
    _broken_means = ("From now on nothing is found and nothing is stored. Start it again to use the tier; what lies on NVMe is found then, "
                     "unless a reset was to delete it: that must be repeated before")

    def __init__(self, layout: PageLayout, config: TierConfig, *, model: str | None = None, engine_id: str = "default",
                 fingerprint: str = "", lookup_timeout: float = 5.0, job_timeout: float = 120.0) -> None:
        self.layout = layout
        self.plan = TierPlan.of(layout, config, engine_id)
        for name, text in (("model", model or ""), ("fingerprint", fingerprint)):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={text!r}: pass a text")
        nvme_slots = level_slots(layout, config, "nvme", HEADER_BYTES)
        require_model(model, nvme_slots)
        rules = TierRules(config.secondary_offload_min_priority, config.nvme_offload_min_priority, config.keep_backing,
                          config.write_ahead_share)
        super().__init__(config, KeyLedger(
            list(zip(self.plan.host_slots, nvme_slots, strict=True)), rules, config.policy, config.event_buffer_max_size,
            4 * config.read_threads, arguments.seconds("lookup_timeout", lookup_timeout), arguments.seconds("job_timeout", job_timeout)))
        self._totals = FileTotals()
        self._empty = _EmptyLedger(len(layout.groups))
        self._orphans: dict[int, EngineJob] = {}  # once it is broken: jobs that workers may be at
        self._num_resets = 0
        self._owes_reset = False  # one was begun and has not reached NVMe
        self._version_seen = 0
        self._gone_since: dict[int, float] = {}
        self._is_linked = True
        self._namespace = json.dumps({"format": FORMAT_VERSION, "model": model or "", "layout": json.loads(layout.describe()),
                                      "ranks": layout.ranks, "fingerprint": fingerprint}, sort_keys=True)
        undo = ExitStack()
        try:  # what fails here must leave neither the directory locked nor the arena behind
            undo.callback(self._give_store_up)
            self._open_store([NvmeGeometry(block.block_bytes, count) for block, count in zip(layout.blocks, nvme_slots, strict=True)])
            self.arena = SharedArena(self.plan.arena)
            undo.callback(self.arena.close)
            undo.callback(self.arena.unlink)
            self.transfers: TransferManager | None = None
            if self.store is not None:
                self.transfers = TransferManager(open_device("cpu"), [HostPools(block, slots) for block, slots
                                                                       in zip(layout.blocks, self.arena.groups, strict=True)],
                                                  self.store, faults=config.faults, read_threads=config.read_threads,
                                                  staging_blocks=config.read_threads + 2,
                                                  staging_bytes=config.read_threads * RUN_BYTES,
                                                  write_bytes_per_second=config.nvme_write_bytes_per_second)
                undo.callback(self.transfers.close, 1.0)
            self._opened()
            self._unlink_when_all_are_there()
        except BaseException:
            undo.close()
            raise

    @property
    def arena_path(self) -> Path:
        """The file in shared memory."""
        return self.arena.path

    @property
    def num_resets(self) -> int:
        """Counts resets, at the moment in which the ledger forgets: what was planned before it has another number."""
        return self._num_resets

    # -- once per step ---------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Once per engine step: finished reads and writes, deadlines, write-ahead to NVMe. Returns whether ``version`` changed since the
        last call."""
        with self.turn as ledger:
            ledger.refresh(self._takes_writes)
            if ledger.abandoned:
                self._release_ended(ledger)
            self._unlink_when_all_are_there()
            is_changed = ledger.version != self._version_seen
            self._version_seen = ledger.version
            return is_changed

    @property
    def has_work(self) -> bool:
        """Reads or writes of NVMe are under way, their ends not yet seen, or there is something to be written ahead: an idle engine
        should go on calling :meth:`poll`."""
        ledger = self._ledger
        return ledger.reads_in_flight > 0 or any(level.writes_in_flight or (level.has_writes and self._takes_writes)
                                                 for level in ledger.allocators)

    def next_deadline(self) -> float | None:
        """Seconds until a deadline may change an answer or give up a job; None without any."""
        with self.turn as ledger:
            moments = [request.deadline for request in ledger.requests.values() if request.deadline and not request.is_late]
            if ledger.jobs:
                moments.append(next(iter(ledger.jobs.values())).deadline)
            return max(min(moments) - ledger.now, 0.0) if moments else None

    def stats(self) -> TierStats:
        """Counters since the start, and what the levels hold now."""
        with self.turn as ledger:
            return collect(ledger, self._totals, self._takes_writes)

    def verify(self) -> None:
        """Raise LedgerError naming the first broken invariant."""
        with self.turn as ledger:
            verify_keys(ledger)

    def release_abandoned(self) -> int:
        """No worker uses slots of given-up jobs any more (the workers are gone, or have been flushed): put them back into use. Returns
        how many jobs there were."""
        with self.turn as ledger:
            numbers = list(ledger.abandoned)
            for number in numbers:
                ledger.release_abandoned(number)
            return len(numbers)

    # -- the whole -------------------------------------------------------------------------------------------------------

    def reset(self, timeout: float = 60.0) -> None:
        """Forget everything on all levels, stores in flight included, before it returns (new weights, for example). Leases end, jobs in
        flight are given up; slots that workers may still use stay out of use until every rank has ended its job, or is gone.

        Raises:
            TransferError: reads or writes of NVMe did not end in time, or the deletion could not be written down. All has been
                forgotten all the same, and nothing old is served by this process, but a restart might find it: repeat the reset before.
                :meth:`close` tries, too, and says so where it did not succeed; also after a reset that was cut short.
        """
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        clearing = object()
        try:
            with self.turn as ledger:
                self._owes_reset = True
                ledger.reset()
                self._num_resets += 1
                self._clearing.add(clearing)  # what is stored from now on must not be deleted with the rest
            is_over = self.transfers is None or self.transfers.idle(seconds_until(deadline))
            if is_over and self.transfers is not None:
                with self.turn:
                    pass  # what ended for nobody is to be deleted, too
                is_over = self.transfers.idle(seconds_until(deadline, LEAST_CLEARING))
            if not is_over:
                raise TransferError(f"reset: reads and writes of NVMe did not end within {timeout} s; what lies there may be found again "
                                    "after a restart, repeat the reset before")
            is_over = self._clear_store(deadline, clearing)
        except BaseException:
            self._clearing.discard(clearing)  # or nothing would be written to NVMe any more
            raise
        if not is_over:
            raise TransferError(f"reset: the deletion on NVMe was not written down within {timeout} s; what lies there may be found again "
                                "after a restart, repeat the reset before")
        self._owes_reset = False

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _break(self, what: str) -> None:
        if not self._broken:
            self._orphans = {**self._ledger.jobs, **self._ledger.abandoned}
            super()._break(what)
            self._empty.ledger.count_on(self._ledger)
            self._ledger = self._empty.ledger
            self._ledger.version += 1  # other answers than before

    def _instead(self) -> KeyLedger:
        """An empty ledger, each time and for each thread: it finds nothing and has room for nothing, and no lock is needed for it."""
        self._require_open()
        ledger = self._empty.ledger
        ledger.set_time(self._clock())
        ledger.requests.clear()
        ledger.count_on(self._ledger)
        return ledger

    def _closing(self) -> None:
        self.arena.unlink()

    def _transfers_closed(self, deadline: float) -> None:
        if self._owes_reset and self.store is not None:
            try:
                self._owes_reset = not self._clear_store(deadline, object())
            except KVTierError as error:
                _log.warning("the reset that NVMe still owes has failed again: %s", error)
            if self._owes_reset:
                _log.error("%s: the next start finds what a reset was to forget; before it, delete it: kvtier store clear %s --yes",
                           self.store.directory, self.store.directory)

    def _let_go(self) -> None:
        self.arena.close()

    def _count(self, result: MoveResult) -> None:
        totals = self._totals
        if result.error is not None:
            return
        if level_of(result.move.source) == NVME:
            totals.promoted_bytes += result.num_bytes
            totals.read_seconds += result.seconds
        else:
            totals.written_blocks += 1
            totals.written_bytes += result.num_bytes
            totals.write_seconds += result.seconds

    def _has_ended(self, job: EngineJob) -> bool:
        """Whether no rank can be copying for this job any more: it has said so, or its process is gone."""
        board = self.arena.board
        ranks = self.layout.copies if job.is_store else self.layout.ranks
        if all(board.has_ended(rank, job.number) for rank in range(ranks)):
            return True
        now = time.monotonic()
        for rank in range(ranks):
            if board.has_ended(rank, job.number):
                continue
            if not board.has_opened(rank) or self.arena.is_alive(rank):
                self._gone_since.pop(rank, None)
                return False
            if now - self._gone_since.setdefault(rank, now) < GONE_SECONDS:
                return False
        return True

    def _unlink_when_all_are_there(self) -> None:
        """From then on the arena's memory ends with the processes, however they end."""
        if self._is_linked and self.arena.board.all_opened():
            self.arena.unlink()
            self._is_linked = False

    def _release_ended(self, ledger: KeyLedger) -> None:
        for job in list(ledger.abandoned.values()):
            if self._has_ended(job):
                ledger.release_abandoned(job.number)

    def _find_number(self, ledger: KeyLedger, *, is_store: bool) -> bool:
        """The board has a place for MAX_JOBS jobs: let the next number's be free, of jobs under way and of given-up ones. False when there
        is none: then there is no room for a job, as if all slots were in use. Stores stop at half of it: the rest is for loads, which
        have been promised."""
        if len(ledger.jobs) + len(ledger.abandoned) >= (MAX_JOBS // 2 if is_store else MAX_JOBS):
            return False
        if ledger.abandoned or (ledger.jobs and ledger.next_job - next(iter(ledger.jobs)) >= MAX_JOBS):
            taken = {number % MAX_JOBS for jobs in (ledger.jobs, ledger.abandoned) for number in jobs}
            while ledger.next_job % MAX_JOBS in taken:
                ledger.next_job += 1
        return True

    @collector_paused()
    def _open_store(self, geometries: list[NvmeGeometry]) -> None:
        config = self.config
        if not any(geometry.num_slots for geometry in geometries):
            return
        assert config.nvme_directory is not None
        store = self._open_nvme(config.nvme_directory, self._namespace, geometries)
        rows = [row._replace(key=engine_key(row.key)) for row in store.stored_blocks()]
        self._ledger.adopt_store(rows, list(store.quarantined()))

"""``TierCore``: the token tree's ledger with pools, transfers and store, under the lock of ``LockedTier``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Final

import torch

from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io.block_writer import RUN_BYTES
from kvtier.io.collector import collector_paused
from kvtier.io.device import Device, open_device
from kvtier.io.rank_directories import occupied_by_ranks, prepare_rank_directory, rank_directory
from kvtier.io.store_directory import occupied_bytes, unusable, why_not_written
from kvtier.pools.group_pools import open_group_pools
from kvtier.pools.host_memory import free_disk_bytes, host_memory
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, level_of
from kvtier.pools.rank_sizes import minimum_over_ranks
from kvtier.pools.sizing import FreeSpace, PoolSizes, nvme_geometries, parse_sizes, resolve_sizes, warn_of_unread_levels
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.debug_path import DebugPath
from kvtier.tiering.direct_path import open_direct_path, require_possible
from kvtier.tiering.event_queue import EventQueue
from kvtier.tiering.event_stream import EventStream
from kvtier.tiering.ledger.events import Event
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec, checked_group
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.load_speed import LoadMeter
from kvtier.tiering.loading import LoadDecider
from kvtier.tiering.locked_tier import LockedTier, require_model, seconds_until
from kvtier.tiering.namespace import chain_seed, store_namespace
from kvtier.tiering.poison import Poison
from kvtier.tiering.statistics import GdsStats, IterationStats, PrefetchStats, RequestStats, Stats, TransferTotals, collect_request
from kvtier.tiering.statistics_recorder import StatisticsRecorder
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult
from kvtier.types import TransferMode

logger = logging.getLogger(__name__)

GDS_MODE: Final = TransferMode.GDS.value
RESET_PAUSE: Final = 0.001  # seconds between two looks


class TierCore(LockedTier[Ledger]):
    """What every way to attach has in common. Arguments and errors: see ``KVCacheManager``."""

    transfers: TransferManager
    _totals: TransferTotals

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        self.layout = layout
        self.model = model
        self._device: Device = open_device(device)
        device = self._device.name  # "cuda" is one particular device from here on, also where torch's current one is another
        sizes = _sizes(layout, config, device)
        require_possible(config, device, any(sizes.nvme))
        warn_of_unread_levels(sizes, config.enable_block_reuse)
        require_model(model, sizes.nvme)
        super().__init__(config, _ledger(layout, config, sizes, chain_seed(layout, model, config.num_ranks)))
        self._has_said_no_gds = False
        self._events = EventQueue(config.event_buffer_max_size)
        self._prefill_rate: float | None = None
        self._prefetched = PrefetchStats()
        self._load_meter = LoadMeter([group.block_bytes for group in layout.groups])
        undo = ExitStack()
        try:  # what fails here must not leave the directory locked
            undo.callback(self._give_store_up)
            self._open_store(sizes)
            self.pools = open_group_pools(layout, sizes, device)
            undo.callback(self._close_pools)
            self.nvme_path, self._gds = open_direct_path(config, device, self.store, config.read_threads + 2)
            if self._gds is not None:
                undo.callback(self._gds.close)
            self._debug: DebugPath | None = None
            if config.request_directory_root is not None:
                self._debug = DebugPath(config.request_directory_root, self.pools, self.store, pin=device != "cpu",
                                        file_prefix=f"rank-{config.rank}-" if config.num_ranks > 1 else "")
                undo.callback(self._debug.let_go)
            self.transfers = TransferManager(self._device, self.pools, self.store, faults=config.faults,
                                             read_threads=config.read_threads, staging_blocks=config.read_threads + 2,
                                             staging_bytes=config.read_threads * RUN_BYTES, gds=self._gds, debug=self._debug,
                                             check_order=config.debug_checks,
                                             write_bytes_per_second=config.nvme_write_bytes_per_second,
                                             layer_pieces=config.layer_pieces)
            undo.callback(self.transfers.close, 1.0)
            self._statistics = StatisticsRecorder(self._ledger)
            self._totals = self._statistics.totals
            can_split = all(geometry.kind in (FULL, CROSS) for geometry in self._ledger.geometries)
            self._loading = LoadDecider(self._load_meter, config.load_decision == "auto", can_split)
            self._ledger.loading = self._loading
            self._poison = Poison(self.pools, self._ledger.geometries) if config.debug_checks else None
            self._filling: AbstractContextManager[object] = nullcontext() if self._poison is None else self._poison.lock
            self._opened()
        except BaseException:
            undo.close()
            raise

    # -- once per step, events, statistics -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Once per engine step: expiry, finished transfers, write-ahead to NVMe, events."""
        with self.locked() as ledger:
            # Room on NVMe is made by forgetting blocks: not for writes that a full or failing disk refuses anyway.
            ledger.refresh(self._clock(), self._takes_writes)
            self._events.put(ledger.events.flush())
            self._statistics.end_iteration()

    def flush_events(self) -> None:
        """Hand over the events so far to :meth:`poll_events`."""
        with self.locked() as ledger:
            self._events.put(ledger.events.flush())

    def poll_events(self, timeout: float = 0.0) -> list[Event]:
        """Flushed events, oldest first; waits up to ``timeout`` seconds for the first. All callers together are one reader."""
        self._require_open()
        return self._events.take(arguments.seconds("timeout", timeout))

    def events(self) -> EventStream[Event]:
        """A reader of its own: ``async for event in cache.events()``, which ends when the cache is closed. See ``EventStream``."""
        self._require_open()
        return self._events.stream()

    def report_prefill(self, tokens: int | range, seconds: float) -> None:
        """The engine computed ``tokens`` prompt tokens in ``seconds``, so that the tier can tell what loading must be faster than.

        ``tokens``: how many, from the prompt's beginning; or ``range(start, end)`` of a chunk behind ``start`` tokens that were there
        already, which costs more. RequestError for what is neither, or takes no time.
        """
        positions = tokens if isinstance(tokens, range) else None
        if positions is not None and (positions.step != 1 or positions.start < 0):
            raise RequestError(f"tokens={tokens!r}: a chunk is range(start, end) of prompt positions")
        count = arguments.positive_number("tokens", tokens if positions is None else len(positions))
        rate = count / arguments.positive_number("seconds", seconds)
        start = 0 if positions is None else positions.start
        with self.locked():
            self._prefill_rate = rate if self._prefill_rate is None else 0.9 * self._prefill_rate + 0.1 * rate
            self._loading.report_prefill(start, start + int(count), float(seconds))

    def stats(self) -> Stats:
        """Everything counted since the start, and what the levels hold now."""
        store = self.store.stats() if self.store is not None else None  # not under the lock: the store has locks of its own
        gds = GdsStats(self.nvme_path.name, self.nvme_path.reason)
        if store is not None:
            gds = replace(gds, read_blocks=store.gds_read_blocks, written_blocks=store.gds_written_blocks, detours=store.gds_detours)
        with self.locked():
            faults = self.config.faults.counts() if self.config.faults is not None else {}
            return self._statistics.stats(dropped_events=self._events.dropped, prefill_tokens_per_second=self._prefill_rate, faults=faults,
                                          gds=gds, loading=self._loading.stats(), prefetch=self._prefetched, store=store,
                                          copy_paths=self.transfers.copy_paths)

    def iteration_stats(self) -> IterationStats:
        """What was counted between the last two calls of :meth:`refresh`, and the levels at the second one."""
        with self.locked():
            return self._statistics.iteration_stats()

    def request_stats(self, request_id: int) -> RequestStats:
        """What an active sequence got from the cache."""
        with self.locked() as ledger:
            return collect_request(ledger, ledger.sequence(request_id))

    def verify(self) -> None:
        """Raise LedgerError naming the first broken invariant; with ``debug_checks`` also uses of a slot that nothing ordered."""
        with self.locked() as ledger:
            verify(ledger)
        self.transfers.verify()

    # -- the end ---------------------------------------------------------------------------------------------------------

    def reset(self, timeout: float = 60.0) -> None:
        """Forget all cached content on all levels, stores in flight included, before it returns (new weights, for example).

        Bounded by ``timeout`` seconds, of which writing it down has at least one.

        Raises:
            RequestError: sequences or leases are active.
            TransferError: transfers did not end in time, and nothing has been forgotten; or the store's files could not be
                written, and what they hold may be found again after a restart.
        """
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        clearing = object()
        try:
            while True:
                with self.locked() as ledger:
                    if not any(any(allocator.num_busy) for allocator in ledger.allocators) or ledger.sequences or ledger.leases:
                        ledger.reset()
                        self._clearing.add(clearing)  # what others store from now on must not be deleted with the rest
                        break
                if not self.transfers.idle(seconds_until(deadline)) or time.monotonic() > deadline:
                    raise TransferError(f"reset: transfers did not end within {timeout} s; nothing was forgotten, try again")
                time.sleep(RESET_PAUSE)  # a tool may be reading a block: that is no transfer to wait for
            # The deletions just issued may still be on their way; what clear() forgets does not depend on them.
            is_over = self.store is None or self.transfers.idle(seconds_until(deadline))
            if is_over:
                is_over = self._clear_store(deadline, clearing)
            else:
                self._clearing.discard(clearing)
        except BaseException:
            self._clearing.discard(clearing)  # or nothing would be written to NVMe any more
            raise
        if not is_over:
            raise TransferError(f"reset: the deletions on NVMe did not end within {timeout} s; what is there may be found again "
                                "after a restart, repeat the reset before")

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _check_group(self, group: int) -> None:
        """Raise RequestError unless the layout has a group of this number."""
        checked_group(group, len(self.layout.groups))

    def _close_pools(self) -> None:
        for pools in self.pools:
            pools.close()

    def _tears(self, error: BaseException) -> bool:
        """Hooks of others are asked within turns, before anything changes, and may raise whatever they like. A signal handler may raise the
        same from anywhere, where SIGALRM ends a call for example. So the ledger itself is asked, which takes a while and is seldom."""
        if not super()._tears(error):
            return False
        return isinstance(error, MemoryError) or not isinstance(error, Exception) or not _is_sound(self._ledger)

    def _break(self, what: str) -> None:
        super()._break(what)
        self.transfers.tell_listeners()  # whoever waits for a sequence is told, too

    def _closing(self) -> None:
        self._events.close()

    def _let_go(self) -> None:
        if self._gds is not None:
            self._gds.close()
        with self._filling:
            self._close_pools()

    def _queued(self, records: Sequence[Move | Discard]) -> None:
        self._statistics.note_usage()
        now = time.perf_counter()
        for record in records:
            if isinstance(record, Move):
                self._load_meter.issued(record, now)
                self._statistics.times.issued(record, now)
                if self._debug is not None and not record.key and self._debug.takes(record):
                    allocator = self._ledger.allocators[record.group]
                    self._debug.name(record, allocator.chain_key(allocator.blocks[record.block_id]))

    def _drain(self) -> None:
        if self._debug is not None:
            self._totals.fallbacks += self._debug.take_fallbacks()
        super()._drain()

    def _count(self, result: MoveResult) -> None:
        move, is_whole = result.move, result.error is None
        source, destination = level_of(move.source), level_of(move.destination)
        self._load_meter.ended(move, result.ended, is_whole)
        self._statistics.times.ended(result)
        if is_whole:
            self._totals.add(source, destination, result.num_bytes, result.seconds)
            if move.mode == GDS_MODE and self._gds is None and source == NVME:
                self._note_unfulfilled()
        elif source == NVME or destination != NVME:
            self._totals.fallbacks += 1  # somebody computes again what this Move would have brought

    def _note_unfulfilled(self) -> None:
        """A request wanted its blocks read directly, and the tier has no such way."""
        self._totals.fallbacks += 1
        if not self._has_said_no_gds:
            self._has_said_no_gds = True
            logger.warning("a request asks for TransferMode.GDS, but NVMe goes through the host: %s. Said once; stats().fallbacks counts",
                           self.nvme_path.reason)

    @collector_paused()
    def _open_store(self, sizes: PoolSizes) -> None:
        if not any(sizes.nvme):
            return
        config = self.config
        assert config.nvme_directory is not None
        directory = prepare_rank_directory(config.nvme_directory, config.rank, config.num_ranks)
        namespace = store_namespace(self.layout, self.model, config.rank, config.num_ranks)
        store = self._open_nvme(directory, namespace, nvme_geometries(self.layout, sizes))
        self._ledger.adopt_store(store.stored_blocks(), store.quarantined())


def _is_sound(ledger: Ledger) -> bool:
    try:
        verify(ledger)
    except Exception:  # LedgerError, or whatever one that contradicts itself leads to
        return False
    return True


_KINDS: Final = {"attention": FULL, "mla": FULL, "recurrent": RECURRENT, "cross": CROSS}


@collector_paused()
def _ledger(layout: KVLayout, config: TierConfig, sizes: PoolSizes, seed: bytes) -> Ledger:
    rules = LedgerRules(config.enable_block_reuse, config.enable_partial_reuse, config.copy_on_partial_reuse,
                        config.secondary_offload_min_priority, config.nvme_offload_min_priority, config.keep_backing,
                        config.write_ahead_share, config.policy, config.event_buffer_max_size, seed, config.chunk_size or 0,
                        config.window_scratch_blocks, nvme_min_uses=config.nvme_min_uses, nvme_max_depth=config.nvme_max_depth or 0)
    groups: list[GroupSpec] = []
    for group, num_blocks in zip(layout.groups, zip(sizes.primary, sizes.secondary, sizes.nvme, strict=True), strict=True):
        # No sequence is longer than a window of max_seq_len: full attention then. With a bubble its tokens have other places, and engines
        # take those from the layout, which knows of no max_seq_len.
        if group.window is not None and (group.window < config.max_seq_len or group.sink_bubble):
            groups.append(GroupSpec(num_blocks, WINDOW, group.window, group.sinks))
            if group.sink_bubble and config.enable_block_reuse:
                logger.warning("group %d: %d sinks do not fill blocks of %d tokens: nothing is reused; use a multiple", group.number,
                               group.sinks, layout.tokens_per_block)
        else:
            groups.append(GroupSpec(num_blocks, _KINDS[group.kind], snapshot_interval=group.snapshot_interval))
    return Ledger(groups, layout.tokens_per_block, rules)


def _sizes(layout: KVLayout, config: TierConfig, device: str) -> PoolSizes:
    """Block counts per level, checked against what is free before anything is allocated; with several ranks, the least of all."""
    host = host_memory()
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: this torch ({torch.__version__}) cannot use CUDA; install a torch built for CUDA, or use "
                          "device='cpu'")
    device_bytes = None if device == "cpu" else int(torch.cuda.mem_get_info(torch.device(device))[0])
    disk_bytes = disk_part = None
    if config.nvme_directory is not None:
        free_bytes = free_disk_bytes(config.nvme_directory) - config.nvme_free_space_reserve_bytes
        own = rank_directory(config.nvme_directory, config.rank, config.num_ranks)
        disk_bytes = max(free_bytes + occupied_bytes(own), 0)
        disk_part = max(free_bytes + occupied_by_ranks(config.nvme_directory), 0) // config.num_ranks
        if disk_bytes == 0 and any(size.amount for size in parse_sizes(config.nvme, "nvme")):
            refusal = why_not_written(config.nvme_directory)  # where no file can be, a smaller level would not help
            if refusal is not None:
                raise unusable(config.nvme_directory, refusal)
    free = FreeSpace(host.available_bytes, host.limited_by, device_bytes, disk_bytes, host.available_bytes // config.num_ranks, disk_part)
    sizes = resolve_sizes(layout, config.primary, config.secondary, config.nvme, free, config.group_shares, config.max_tokens,
                          has_direct_nvme=config.gds == "required",
                          byte_divisor=config.num_ranks if config.size_scope == "total" else 1)
    return sizes if config.allreduce_min is None else minimum_over_ranks(sizes, config.allreduce_min, layout)

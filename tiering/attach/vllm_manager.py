"""``TieredManager``: vLLM's view of a ``TierIndex``, in the scheduler's process (design: two ways to attach).

It translates and remembers as little as it can: which job of the tier belongs to which keys, because vLLM reports keys. Everything that
can fail has failed before ``lookup`` says HIT; a store counts only when every rank says in shared memory that it has copied it, so it does
not matter that vLLM reports success whatever happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import KVTierError
from kvtier.tiering.attach.vllm_metrics import MetricsSinceLast
from kvtier.tiering.attach.vllm_pages import Part
from kvtier.tiering.attach.vllm_wishes import read_wishes
from kvtier.tiering.tier_index import TierIndex
from kvtier.tiering.tier_messages import KeyState
from kvtier.types import Level

_log = logging.getLogger(__name__)

RESULTS: Final = {KeyState.HIT: LookupResult.HIT, KeyState.MISS: LookupResult.MISS, KeyState.PENDING: LookupResult.HIT_PENDING,
                  KeyState.RETRY: LookupResult.HIT_PENDING}
"""RETRY is said as "there, not yet readable": over a window, vLLM would otherwise ask on for all that lies before it, and have it read."""

FAST_STEP: Final = 0.002
PAUSE: Final = 0.001
"""A step that took less than FAST_STEP seconds computed nothing. While reads of NVMe are awaited, the scheduler's thread then pauses before
the next one: turning over without computing, it would keep the threads that read from running."""

MEDIUMS: Final = {Level.SECONDARY: (Medium.CPU, None), Level.NVME: (Medium.STORAGE, "kvtier-nvme")}
"""Of events: the medium, and which tier below vLLM's "primary" one (its host memory) speaks; as in the labels of metrics."""


@dataclass
class TierTransfer(LoadStoreSpec):
    """What vLLM carries from the scheduler to its workers: the parts of one transfer, by group."""

    parts: tuple[Part, ...]


@dataclass
class _Loading:
    """The load of one request: its jobs, and what came from NVMe. vLLM has one at a time for a request."""

    reset_count: int
    jobs: list[int] = field(default_factory=list)
    from_nvme: set[OffloadKey] = field(default_factory=set)


@dataclass(frozen=True)
class _Begun:
    """When a request last had nothing computed: after how many resets."""

    reset_count: int


class TieredManager(OffloadingManager):
    """An engine's tier, as vLLM's scheduler asks it. All calls but :meth:`shutdown` come from the scheduler's thread.

    Args:
        index: the tier; closed by :meth:`shutdown`.
        group_ids: vLLM's number of each group, in the tier's order.
        takes_events: vLLM publishes KV events.
    """

    def __init__(self, index: TierIndex, group_ids: Sequence[int], *, takes_events: bool = False) -> None:
        self.index = index
        self._group_ids = tuple(group_ids)
        self._groups = {group_id: place for place, group_id in enumerate(group_ids)}
        self._takes_events = takes_events
        self._storing: dict[OffloadKey, int] = {}
        self._metrics = MetricsSinceLast()
        self._resets = 0
        self._has_stored = False
        self._step_began = 0.0

    # -- requests --------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wishes = read_wishes(req_context.kv_transfer_params)
        allows = req_context.load_tier_filter.allows
        reads_host, reads_nvme = allows(Medium.CPU, Locality.LOCAL), allows(Medium.STORAGE, Locality.LOCAL)
        req_context.set_state(_Begun(self._resets))
        self.index.end_request(req_context.req_id)  # vLLM may use a name again without having ended it
        self.index.begin_request(req_context.req_id, priority=wishes.priority, use_nvme=not wishes.keep_off_nvme, read_nvme=reads_nvme,
                                 read_host=reads_host, skip_read=wishes.skip_read, skip_write=wishes.skip_write)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.index.end_request(req_context.req_id)

    # -- finding and loading ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._resets:  # vLLM looks up what it has nothing of: also a request that the reset made it compute again
            req_context.set_state(_Begun(self._resets))
        return RESULTS[self.index.key_state(req_context.req_id, get_offload_block_hash(key), self._groups[get_offload_group_idx(key)])]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        loading = _Loading(self._resets)
        req_context.set_state(loading)
        parts = []
        for group, group_keys in self._by_group(keys).items():
            plan = self.index.plan_load(req_context.req_id, [get_offload_block_hash(key) for key in group_keys], group)
            assert len(plan.keys) == len(group_keys), "a key that was HIT in this step has to be there"
            loading.jobs.append(plan.job_id)
            loading.from_nvme.update(key for key, level in zip(group_keys, plan.levels, strict=True) if level == Level.NVME)
            parts.append(Part(plan.job_id, group, plan.slots))
        self.index.end_leases(req_context.req_id)  # of groups of which vLLM has all it needs, too
        return TierTransfer(tuple(parts))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        loading = req_context.get_state(_Loading)
        if loading is None or loading.reset_count != self._resets:
            return
        for job_id in loading.jobs:
            self.index.complete(job_id)
        loading.jobs.clear()

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        loading = req_context.get_state(_Loading)
        return CacheHitSource.DISK if loading is not None and key in loading.from_nvme else CacheHitSource.HOST

    # -- storing ---------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Never None: vLLM would ask again in every step of the request. What has no room now is left out, and counted.

        A request that ran through a reset stores nothing until it is computed again: vLLM resets the tier under running requests, too,
        and part of what they hold may be of the weights that the reset was for.
        """
        chosen: list[OffloadKey] = []
        parts = []
        begun = req_context.get_state(_Begun)
        if begun is None or begun.reset_count != self._resets:
            self._metrics.asked(len(keys))
            return PrepareStoreOutput(chosen, TierTransfer(()), evicted_keys=[])
        for group, group_keys in self._by_group(keys).items():
            plan = self.index.plan_store(req_context.req_id, [get_offload_block_hash(key) for key in group_keys], group)
            if not plan.keys:
                continue
            parts.append(Part(plan.job_id, group, plan.slots))
            stored = [group_keys[position] for position in plan.positions]
            self._storing.update(dict.fromkeys(stored, plan.job_id))
            chosen += stored
        self._metrics.asked(len(keys))
        return PrepareStoreOutput(chosen, TierTransfer(tuple(parts)), evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._has_stored = True
        jobs = {self._storing.pop(key) for key in keys if key in self._storing}
        for job_id in jobs:
            self.index.complete(job_id, () if success else [get_offload_block_hash(key) for key in keys])

    # -- the whole -------------------------------------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._has_stored = False
        for request_id in context.new_req_ids:  # it computes from here on: what was found and not loaded is of no use to it
            self.index.end_leases(request_id)
        self.index.poll()
        now = time.monotonic()
        if now - self._step_began < FAST_STEP and self.index.has_work:
            time.sleep(PAUSE)
        self._step_began = now

    def has_pending_work(self) -> bool:
        """Whether vLLM must go on stepping without requests: NVMe is at work, or a store has ended since the last step, which begins to
        write it there."""
        return self._has_stored or self.index.has_work

    def reset_cache(self) -> None:
        """Forget all levels. vLLM reports none of the transfers that are under way any more.

        Raises:
            TransferError: rows on NVMe could not be deleted; whoever asked for the reset is told.
        """
        self._resets += 1
        self._storing.clear()
        self.index.reset()

    def on_reset_flushed(self) -> None:
        """Called by newer releases once the workers have ended all transfers. The tier knows that from shared memory."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._takes_events:
            return
        for event in self.index.poll_events():
            keys = [make_offload_key(key, self._group_ids[event.group]) for key in event.keys]
            medium, owner = MEDIUMS[Level(event.level)]
            yield OffloadingEvent(keys, medium, removed=event.is_removed, locality=Locality.LOCAL, ownership=owner,
                                  removal_expected=True)

    def get_stats(self) -> OffloadingConnectorStats:
        return self._metrics.take(self.index.stats())

    def shutdown(self) -> None:
        try:
            self.index.close()
        except KVTierError as error:  # vLLM is going down and has nobody to tell
            _log.warning("the tier could not be closed in order: %s", error)

    def _by_group(self, keys: Iterable[OffloadKey]) -> dict[int, list[OffloadKey]]:
        """Keys by group, in the order given; groups in the order of their first key, which is ascending."""
        found: dict[int, list[OffloadKey]] = {}
        for key in keys:
            found.setdefault(self._groups[get_offload_group_idx(key)], []).append(key)
        return found

"""``KeyedState``: what a ledger of content keys consists of: groups, requests and their leases (design: two ways to attach)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.policies.eviction import eviction_queues
from kvtier.pools.pool_index import NUM_LEVELS
from kvtier.tiering.ledger.key_events import KeyEventLog
from kvtier.tiering.ledger.key_jobs import EngineJob, KeyRequest, RequestId, WantedRead
from kvtier.tiering.ledger.keyed_level import KeyedLevel
from kvtier.tiering.ledger.moves import MoveLog
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters


class KeyedState:
    """What the parts of a ``KeyLedger`` share.

    Args:
        num_blocks: by group, (host slots, NVMe slots).
        rules: thresholds, backings, write-ahead.
        max_events: kept for ``events.flush``.
        reads_at_once: file reads under way; the others wait here, where an abort can take them back.
        lookup_timeout, job_timeout: seconds.

    Attributes:
        allocators: by group, its host and NVMe slots.
        version: counts what may change a lookup's answer.
        requests: active ones.
        jobs: not reported yet; abandoned: given up, but their slots may still be in use.
    """

    def __init__(self, num_blocks: Sequence[tuple[int, int]], rules: TierRules, policy: str = "default", max_events: int = 1024,
                 reads_at_once: int = 16, lookup_timeout: float = 5.0, job_timeout: float = 120.0) -> None:
        self.rules = rules
        self.counters = LedgerCounters()
        self.moves = MoveLog()
        self.events = KeyEventLog(max_events)
        self.allocators = [KeyedLevel(group, host, nvme, eviction_queues(policy, NUM_LEVELS), self.moves, self.events, self.counters, rules)
                       for group, (host, nvme) in enumerate(num_blocks)]
        self.version = 0
        self.now = 0.0
        self.requests: dict[RequestId, KeyRequest] = {}
        self.jobs: dict[int, EngineJob] = {}
        self.abandoned: dict[int, EngineJob] = {}
        self.next_job = 0
        self.reads_in_flight = 0
        self.lookup_timeout = lookup_timeout
        self.job_timeout = job_timeout
        self.stored_blocks = self.loaded_blocks = self.known_blocks = self.refused_blocks = self.promoted_blocks = 0
        self.expired_jobs = self.expired_lookups = 0
        self._reads_at_once = reads_at_once
        self._wanted: list[deque[WantedRead]] = [deque() for _ in self.allocators]
        self._sweep_at = [0] * len(self.allocators)  # how long these queues may become before they are swept
        self._num_abandoned = [0] * len(self.allocators)  # references of abandoned jobs, by group

    # -- requests --------------------------------------------------------------------------------------------------------

    def set_time(self, now: float) -> None:
        """The clock's reading for the calls that follow."""
        self.now = now
        for level in self.allocators:
            level.now = now

    def request(self, request_id: RequestId) -> KeyRequest:
        """The active request of this id, begun with defaults if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            request = KeyRequest(request_id, len(self.allocators))
            self.requests[request_id] = request
        return request

    def end_request(self, request_id: RequestId) -> None:
        """Its leases end, and what it has used is now in the order in which prompts are given up: the tail before the head."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        for group in range(len(self.allocators)):
            self._end_leases(request, group)
        if request.num_batches < 2:
            return  # what was used at once has been released in this order
        for group, key in reversed(request.used):
            block = self.allocators[group].warm.get(key)
            if block is not None:
                self.allocators[group].touch(block)

    def _end_leases(self, request: KeyRequest, group: int) -> None:
        leases = request.leases[group]
        request.answers[group] = None
        if leases:
            level = self.allocators[group]
            for block in reversed(list(leases.values())):
                level.release(block)
            leases.clear()
            request.from_nvme[group].clear()
            self.version += 1

    def num_leases(self) -> int:
        """Blocks that requests hold."""
        count = 0
        for request in self.requests.values():
            for leases in request.leases:
                count += len(leases)
        return count

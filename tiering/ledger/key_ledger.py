"""``KeyLedger``: the ledger of a tier whose engine owns its pool: keys instead of tokens, no primary level (design: two ways to attach).

Pure bookkeeping, like ``Ledger``. It differs in what it knows: blocks come and go by content keys, and a request is what leases them. NVMe
and host exchange blocks by the ordinary numbered Moves; between host and engine ``EngineJob`` records travel, whose ends workers carry out
and report. Whatever a job uses is referenced, so no slot is given up under a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from kvtier.policies.eviction import NOT_QUEUED, eviction_queues
from kvtier.pools.pool_index import NUM_LEVELS, NVME, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key_events import KeyEventLog
from kvtier.tiering.ledger.key_jobs import Answer, EngineJob, KeyRequest, RequestId, WantedRead
from kvtier.tiering.ledger.keyed_level import WHOLE, KeyedLevel
from kvtier.tiering.ledger.moves import Move, MoveLog, WarmRow
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters

HIT: Final = 0
PENDING: Final = 1
RETRY: Final = 2
MISS: Final = 3


class KeyLedger:
    """All groups.

    Args:
        num_blocks: by group, (host slots, NVMe slots).
        rules: thresholds, backings, write-ahead.
        max_events: kept for ``events.flush``.
        reads_at_once: file reads under way; the others wait here, where an abort can take them back.
        lookup_timeout, job_timeout: seconds.

    Attributes:
        levels: by group.
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
        self.levels = [KeyedLevel(group, host, nvme, eviction_queues(policy, NUM_LEVELS), self.moves, self.events, self.counters, rules)
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
        self._wanted: list[deque[WantedRead]] = [deque() for _ in self.levels]
        self._num_abandoned = [0] * len(self.levels)  # references of abandoned jobs, by group

    # -- requests --------------------------------------------------------------------------------------------------------

    def set_time(self, now: float) -> None:
        """The clock's reading for the calls that follow."""
        self.now = now
        for level in self.levels:
            level.now = now

    def request(self, request_id: RequestId) -> KeyRequest:
        """The active request of this id, begun with defaults if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            request = KeyRequest(request_id, len(self.levels))
            self.requests[request_id] = request
        return request

    def end_request(self, request_id: RequestId) -> None:
        """Its leases end, and what it has stored is now in the order in which prompts are given up: the tail before the head."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        for group in range(len(self.levels)):
            self._end_leases(request, group)
        for group, key in reversed(request.used):
            block = self.levels[group].warm.get(key)
            if block is not None:
                self.levels[group].touch(block)

    def _end_leases(self, request: KeyRequest, group: int) -> None:
        leases = request.leases[group]
        request.answers[group] = None
        if leases:
            level = self.levels[group]
            for block in reversed(list(leases.values())):
                level.release(block)
            leases.clear()
            request.from_nvme[group].clear()
            self.version += 1

    # -- finding ---------------------------------------------------------------------------------------------------------

    def lookup(self, request: KeyRequest, group: int, keys: list[bytes]) -> Answer:
        """The longest prefix of ``keys``: what is there is leased, what is on NVMe leased and queued to be read."""
        self._is_over(request)  # where it has just become so, the version tells
        answer = request.answers[group]
        if answer is not None and answer.version == self.version and answer.keys == keys:
            return answer
        num_hits = 0
        state = MISS
        for key in keys:
            found = self.state(request, group, key)
            if found == MISS:
                break
            if found == HIT and state == MISS:
                num_hits += 1
            elif state == MISS:
                state = found  # of the first key that is not there yet; on to the others, so that they are read at the same time
        if state == MISS:
            request.deadline = 0.0  # it waits for nothing
        self.start_reads()
        answer = Answer(keys, num_hits, state, self.version)
        request.answers[group] = answer
        return answer

    def state(self, request: KeyRequest, group: int, key: bytes) -> int:
        """HIT, PENDING, RETRY or MISS of one key. All but MISS are leases from now on."""
        level = self.levels[group]
        block = level.warm.get(key)
        leases = request.leases[group]
        if block is None or not request.reads:
            if key in leases:
                level.release(leases.pop(key))
            return MISS
        is_below = level_of(block.index) == NVME
        if leases.get(key) is not block:
            if is_below and not request.use_nvme:
                return MISS
            # What it leases has to be in host memory all at once: beyond that, a longer prefix would evict its own head.
            if len(leases) >= level.num_blocks[SECONDARY] - self._num_abandoned[group]:
                return MISS
            if key in leases:  # lost, and stored again since
                level.release(leases.pop(key))
            if block.num_tokens != WHOLE and self._is_over(request):
                return MISS
            if is_below:
                if self._is_over(request):
                    return MISS
                self._wanted[group].append(WantedRead(key, request, 0))
            level.hold(block)
            leases[key] = block
            if is_below or (block.num_tokens != WHOLE and level.is_busy(block)):
                request.from_nvme[group].add(key)
        if not is_below and block.num_tokens == WHOLE:
            return HIT
        if request.deadline == 0.0:
            request.deadline = self.now + self.lookup_timeout
        elif self._is_over(request):
            return MISS
        return RETRY if is_below or level.is_busy(block) else PENDING

    def _is_over(self, request: KeyRequest) -> bool:
        """Whether the request has waited for long enough: what is not there is a miss for it, and not read for it any more."""
        if request.is_late:
            return True
        if request.deadline == 0.0 or self.now < request.deadline:
            return False
        request.is_late = True
        self.expired_lookups += 1
        for group, level in enumerate(self.levels):
            leases = request.leases[group]
            for key in [key for key, block in leases.items() if block.num_tokens != WHOLE or level_of(block.index) == NVME]:
                level.release(leases.pop(key))
                request.from_nvme[group].discard(key)
        self.version += 1
        return True

    def prefetch(self, group: int, keys: list[bytes]) -> int:
        """Queue reads of keys that lie on NVMe and that nobody holds. Returns how many."""
        level = self.levels[group]
        count = 0
        for key in keys:
            block = level.warm.get(key)
            if block is None:
                break
            if level_of(block.index) == NVME and block.queue != NOT_QUEUED:
                self._wanted[group].append(WantedRead(key, None, level.queues.next_stamp))
                count += 1
        self.start_reads()
        return count

    def start_reads(self) -> None:
        """Begin the reads that wait, of each group oldest first, as far as there are host slots and turns."""
        for level in self.levels:
            queue = self._wanted[level.group]
            while queue and self.reads_in_flight < self._reads_at_once:
                victim = cast("Block | None", level.queues.front(SECONDARY))
                wanted = queue[0]
                block = level.warm.get(wanted.key)
                if block is not None and level_of(block.index) == NVME and self._is_wanted(wanted, level, block, victim):
                    if victim is None:
                        break  # it waits for a slot, and those behind it do
                    level.raise_from_file(block)
                    self.reads_in_flight += 1
                queue.popleft()

    def _is_wanted(self, wanted: WantedRead, level: KeyedLevel, block: Block, victim: Block | None) -> bool:
        """Whether its request still holds the block; whether a prefetch of it costs nothing that is worth more, or was used since."""
        request = wanted.request
        if request is not None:
            return request.leases[level.group].get(wanted.key) is block
        if victim is None or block.queue == NOT_QUEUED:
            return False
        return not victim.has_content or (victim.priority <= block.priority and victim.stamp < wanted.stamp)

    @property
    def num_wanted(self) -> int:
        """Reads that wait for their turn or a slot."""
        count = 0
        for queue in self._wanted:
            count += len(queue)
        return count

    # -- between engine and host -----------------------------------------------------------------------------------------

    def plan_load(self, request: KeyRequest, group: int, keys: list[bytes]) -> EngineJob | None:
        """Hold the longest prefix of ``keys`` whose bytes are there, for a copy into the engine's pages. The request's other leases of
        the group end. None when there is nothing."""
        level = self.levels[group]
        leases = request.leases[group]
        found_below = request.from_nvme[group]
        loaded: list[bytes] = []
        blocks: list[Block] = []
        levels: list[int] = []
        for key in keys:
            block = level.warm.get(key)
            if block is None or block.num_tokens != WHOLE or level_of(block.index) != SECONDARY:
                break
            if leases.get(key) is block:
                del leases[key]  # its reference is the job's now
            else:
                level.hold(block)
            loaded.append(key)
            request.used.append((group, key))
            blocks.append(block)
            levels.append(NVME if key in found_below else SECONDARY)
        self._move_on(request, group)
        if not blocks:
            return None
        return self._new_job(request, group, loaded, blocks, False, levels)

    def plan_store(self, request: KeyRequest, group: int, keys: list[bytes], priority: int) -> tuple[EngineJob | None, int]:
        """Host slots for those of ``keys`` that are nowhere, front first, up to the first for which there is none. Returns the job, if
        any, and how many of the keys the tier has already or is about to have."""
        level = self.levels[group]
        self._move_on(request, group)
        named: list[bytes] = []
        blocks: list[Block] = []
        num_known = 0
        takes = request.writes and priority >= self.rules.secondary_offload_min_priority
        off_nvme = not request.use_nvme
        for key in keys:
            block = level.warm.get(key)
            if block is not None:
                num_known += 1
                if priority > block.priority:
                    self._raise_priority(level, block, priority)
                request.used.append((group, key))
                continue
            if not takes:
                continue
            block = level.take_host(priority, request.duration)
            if block is None:
                break
            level.name(block, key, off_nvme)
            named.append(key)
            blocks.append(block)
        self.known_blocks += num_known
        self.refused_blocks += len(keys) - num_known - len(named)
        if not blocks:
            return None, num_known
        self.version += 1
        return self._new_job(request, group, named, blocks, True, []), num_known

    def complete(self, job: EngineJob, is_whole: Sequence[bool] | None, failed_keys: set[bytes]) -> int:
        """All ranks have ended the job. ``is_whole``: of a store, which of its blocks every rank has copied; None for all. Returns how many
        keys were lost."""
        if self.jobs.pop(job.number, None) is None:
            self.release_abandoned(job.number)
            return 0
        level = self.levels[job.group]
        num_lost = 0
        if job.is_store:
            stored = self.requests.get(job.request_id)
            for position in range(len(job.blocks)):
                block = job.blocks[position]
                key = job.keys[position]
                if level.warm.get(key) is not block:
                    continue  # forgotten meanwhile
                if (is_whole is not None and not is_whole[position]) or (failed_keys and key in failed_keys):
                    level.lose(block)
                    num_lost += 1
                    continue
                level.arrived(block)
                self.stored_blocks += 1
                if stored is not None:
                    stored.used.append((job.group, key))
            self.version += 1
        else:
            for position in range(len(job.blocks)):
                key = job.keys[position]
                if failed_keys and key in failed_keys:
                    num_lost += 1
                    if level.warm.get(key) is job.blocks[position]:
                        level.lose(job.blocks[position])
                        self.version += 1
                else:
                    self.loaded_blocks += 1
                    self.counters.hit_blocks[job.levels[position]] += 1
        self.counters.lost += num_lost
        self._release_blocks(job)
        return num_lost

    def give_up(self, job: EngineJob) -> None:
        """Nobody has reported the job in time, or all is to be forgotten. What it was to store is forgotten; its slots stay out of use,
        because a worker may still be copying."""
        del self.jobs[job.number]
        level = self.levels[job.group]
        if job.is_store:
            for position in range(len(job.blocks)):
                block = job.blocks[position]
                if level.warm.get(job.keys[position]) is block:
                    level.lose(block)
                    self.counters.lost += 1
        self.abandoned[job.number] = job
        self._num_abandoned[job.group] += len(job.blocks)
        self.version += 1

    def release_abandoned(self, number: int) -> bool:
        """No worker uses the slots of this job that was given up: they are in use again. False when there is no such job."""
        job = self.abandoned.pop(number, None)
        if job is None:
            return False
        self._num_abandoned[job.group] -= len(job.blocks)
        self._release_blocks(job)
        return True

    def _release_blocks(self, job: EngineJob) -> None:
        level = self.levels[job.group]
        for block in reversed(job.blocks):
            level.release(block)
        self.start_reads()

    def _new_job(self, request: KeyRequest, group: int, keys: list[bytes], blocks: list[Block], is_store: bool,
                 levels: list[int]) -> EngineJob:
        job = EngineJob(self.next_job, request.id, group, keys, blocks, is_store, self.now + self.job_timeout, levels)
        self.next_job += 1
        self.jobs[job.number] = job
        return job

    def _move_on(self, request: KeyRequest, group: int) -> None:
        """The request has what it looked up, or does without."""
        self._end_leases(request, group)
        request.deadline = 0.0
        request.is_late = False

    def _raise_priority(self, level: KeyedLevel, block: Block, priority: int) -> None:
        """Somebody to whom it is worth more would have stored it."""
        if block.queue == NOT_QUEUED:
            block.priority = priority
            return
        level.queues.claim(block)
        block.priority = priority
        level.queue_as_used(block)

    # -- time, files -----------------------------------------------------------------------------------------------------

    def refresh(self, may_write: bool) -> None:
        """Once per engine step: durations and jobs whose time is over, reads that wait, copies written ahead."""
        while self.jobs:
            job = next(iter(self.jobs.values()))  # all have the same time, so the oldest is the first to be late
            if job.deadline > self.now:
                break
            self.expired_jobs += 1
            self.give_up(job)
        self.start_reads()
        for level in self.levels:
            level.expire()
            if may_write:
                level.write_ahead()

    def write_everything_out(self) -> bool:
        """Start NVMe copies of all unreferenced content that may have one. False while some had to be left for later."""
        priority = self.rules.nvme_offload_min_priority
        is_complete = True
        for level in self.levels:
            if not level.num_blocks[NVME]:
                continue
            coldest = level.queues.coldest(SECONDARY, priority, level.num_blocks[SECONDARY])
            if not level.write_out([cast(Block, record) for record in coldest], True) or level.writes_in_flight:
                is_complete = False
        return is_complete

    def finish(self, move: Move, failed: bool, source_is_bad: bool) -> None:
        """A Move between host and NVMe has ended. ``source_is_bad``: a failed read condemns its slot."""
        level = self.levels[move.group]
        is_read = level_of(move.source) == NVME
        if is_read:
            self.reads_in_flight -= 1
            self.version += 1
        if not failed:
            if is_read:
                self.promoted_blocks += 1
            level.finished(move)
        else:
            lost = level.failed(move) if source_is_bad else level.failed_source_is_good(move)
            if lost is not None:
                self.counters.lost += 1
                level.lose(lost)
        self.start_reads()

    def condemn(self, group: int, slot: int) -> None:
        """An NVMe slot was found bad."""
        self.levels[group].condemn(slot)
        self.version += 1

    def adopt_store(self, rows: Sequence[WarmRow], quarantined: Sequence[tuple[int, int]]) -> None:
        """At start: what the store directory holds; ``quarantined`` are (group, slot) that must not be used."""
        for group, slot in quarantined:
            self.levels[group].quarantine_slot(slot)
        for row in sorted(rows, key=_warm_order):
            self.levels[row.group].adopt_warm(row)

    def reset(self) -> None:
        """Forget all content and all leases, and give up all jobs. Moves under way end without anybody wanting what they bring."""
        for request in self.requests.values():
            for group in range(len(self.levels)):
                self._end_leases(request, group)
            request.deadline = 0.0
            request.is_late = False
            request.used = []
        for job in list(self.jobs.values()):
            self.give_up(job)
        for queue in self._wanted:
            queue.clear()
        for level in self.levels:
            for block in list(level.warm.values()):
                level.forget(block)
        self.version += 1

    def num_leases(self) -> int:
        """Blocks that requests hold."""
        count = 0
        for request in self.requests.values():
            for leases in request.leases:
                count += len(leases)
        return count


def _warm_order(row: WarmRow) -> int:
    return row.hits

"""``KeyLedger``: the ledger of a tier whose engine owns its pool: keys instead of tokens, no primary level (design: two ways to attach).

Pure bookkeeping, like ``Ledger``. It differs in what it knows: blocks come and go by content keys, and a request is what leases them. NVMe
and host exchange blocks by the ordinary numbered Moves; between host and engine ``EngineJob`` records travel, whose ends workers carry out
and report. Whatever a job uses is referenced, so no slot is given up under a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import NVME, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.file_level import adopt_rows
from kvtier.tiering.ledger.key_finding import KeyFinder
from kvtier.tiering.ledger.key_jobs import EngineJob, KeyRequest
from kvtier.tiering.ledger.keyed_level import WHOLE, KeyedLevel
from kvtier.tiering.ledger.moves import Move


class KeyLedger(KeyFinder):
    """Loads, stores, files and time. Arguments: see ``KeyedState``."""

    # -- between engine and host -----------------------------------------------------------------------------------------

    def plan_load(self, request: KeyRequest, group: int, keys: list[bytes]) -> EngineJob | None:
        """Hold the longest prefix of ``keys`` whose bytes are there, for a copy into the engine's pages. The request's other leases of
        the group end. None when there is nothing."""
        level = self.allocators[group]
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
        request.num_batches += 1
        self._move_on(request, group)
        if not blocks:
            return None
        return self._new_job(request, group, loaded, blocks, False, levels)

    def plan_store(self, request: KeyRequest, group: int, keys: list[bytes], priority: int) -> tuple[EngineJob | None, int]:
        """Host slots for those of ``keys`` that are nowhere, front first, up to the first for which there is none. Returns the job, if
        any, and how many of the keys the tier has already or is about to have."""
        level = self.allocators[group]
        request.num_batches += 1
        self._move_on(request, group)
        named: list[bytes] = []
        blocks: list[Block] = []
        num_known = 0
        takes = request.writes and priority >= self.rules.secondary_offload_min_priority
        off_nvme = not request.use_nvme
        spared: list[Block] = []  # in no queue meanwhile: a prompt's tail must not push out its own head
        for key in keys:
            block = level.warm.get(key)
            if block is not None:
                num_known += 1
                if priority > block.priority:
                    self._raise_priority(level, block, priority)
                if block.queue != NOT_QUEUED and level_of(block.index) == SECONDARY:
                    level.queues.claim(block)
                    spared.append(block)
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
        for block in reversed(spared):
            level.queue_as_used(block)
        self.known_blocks += num_known
        self.refused_blocks += len(keys) - num_known - len(named)
        if not blocks:
            return None, num_known
        self.version += 1
        return self._new_job(request, group, named, blocks, True, []), num_known

    def complete(self, job: EngineJob, is_whole: Sequence[bool] | None, failed_keys: set[bytes], is_over: bool = True) -> int:
        """The engine says that all ranks have ended the job.

        Args:
            job: awaited.
            is_whole: of a store, which of its blocks every rank has copied; None for all.
            failed_keys: to be forgotten whatever was copied.
            is_over: no rank can be copying any more; otherwise the slots stay out of use until ``release_abandoned``.

        Returns:
            how many keys were lost.
        """
        del self.jobs[job.number]
        level = self.allocators[job.group]
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
        if is_over:
            self._release_blocks(job)
        else:
            self._abandon(job)
        return num_lost

    def cancel(self, job: EngineJob) -> None:
        """Nobody was told of the job, and nobody will be."""
        level = self.allocators[job.group]
        del self.jobs[job.number]
        if job.is_store:
            for position in range(len(job.blocks)):
                if level.warm.get(job.keys[position]) is job.blocks[position]:
                    level.lose(job.blocks[position])
            self.version += 1
        self._release_blocks(job)

    def give_up(self, job: EngineJob) -> None:
        """Nobody has reported the job in time, or all is to be forgotten. What it was to store is forgotten; its slots stay out of use,
        because a worker may still be copying."""
        del self.jobs[job.number]
        level = self.allocators[job.group]
        if job.is_store:
            for position in range(len(job.blocks)):
                block = job.blocks[position]
                if level.warm.get(job.keys[position]) is block:
                    level.lose(block)
                    self.counters.lost += 1
        self._abandon(job)
        self.version += 1

    def _abandon(self, job: EngineJob) -> None:
        self.abandoned[job.number] = job
        self._num_abandoned[job.group] += len(job.blocks)

    def release_abandoned(self, number: int) -> bool:
        """No worker uses the slots of this job that was given up: they are in use again. False when there is no such job."""
        job = self.abandoned.pop(number, None)
        if job is None:
            return False
        self._num_abandoned[job.group] -= len(job.blocks)
        self._release_blocks(job)
        return True

    def _release_blocks(self, job: EngineJob) -> None:
        level = self.allocators[job.group]
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

    def move_on(self, request: KeyRequest) -> None:
        """The request has what it looked up, or does without."""
        for group in range(len(self.allocators)):
            self._move_on(request, group)
        self.start_reads()

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
        for level in self.allocators:
            level.expire()
            if may_write:
                level.write_ahead()

    def write_everything_out(self) -> bool:
        """Start NVMe copies of all unreferenced content that may have one. False while some had to be left for later."""
        priority = self.rules.nvme_offload_min_priority
        is_complete = True
        for level in self.allocators:
            if not level.num_blocks[NVME]:
                continue
            coldest = level.queues.coldest(SECONDARY, priority, level.num_blocks[SECONDARY])
            if not level.write_out([cast(Block, record) for record in coldest], True) or level.writes_in_flight:
                is_complete = False
        return is_complete

    def finish(self, move: Move, failed: bool, source_is_bad: bool) -> None:
        """A Move between host and NVMe has ended. ``source_is_bad``: a failed read condemns its slot."""
        level = self.allocators[move.group]
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
        self.allocators[group].condemn(slot)
        self.version += 1

    def adopt_store(self, rows: Iterable[tuple[int, int, bytes, int, float, int]], quarantined: Sequence[tuple[int, int]]) -> None:
        """At start: what the store directory holds, as ``WarmRow``; ``quarantined`` are (group, slot) that must not be used."""
        adopt_rows(self.allocators, rows, quarantined)

    def count_on(self, before: KeyLedger) -> None:
        """What has been counted, in place of another ledger: nobody's counters go back."""
        self.counters = before.counters
        self.version = before.version
        self.stored_blocks, self.loaded_blocks, self.promoted_blocks = before.stored_blocks, before.loaded_blocks, before.promoted_blocks
        self.known_blocks, self.refused_blocks = before.known_blocks, before.refused_blocks
        self.expired_jobs, self.expired_lookups = before.expired_jobs, before.expired_lookups

    def reset(self) -> None:
        """Forget all content and all leases, and give up all jobs. Moves under way end without anybody wanting what they bring."""
        for request in self.requests.values():
            for group in range(len(self.allocators)):
                self._end_leases(request, group)
            request.deadline = 0.0
            request.is_late = False
            request.used = []
        for job in list(self.jobs.values()):
            self.give_up(job)
        for queue in self._wanted:
            queue.clear()
        for level in self.allocators:
            for block in list(level.warm.values()):
                level.forget(block)
        self.version += 1

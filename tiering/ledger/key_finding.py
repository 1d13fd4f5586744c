"""``KeyFinder``: what a keyed ledger has of a prefix, and what it reads from NVMe for it (design: leases or livelock).

Whatever a lookup finds is leased to its request, so that a promotion for the prefix's tail cannot evict its head. What its own leases leave
no room for is a miss: a shorter hit. For what others hold it waits, until its deadline.
"""

from __future__ import annotations

from typing import Final, cast

from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import NVME, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key_jobs import Answer, KeyRequest, WantedRead
from kvtier.tiering.ledger.keyed_level import WHOLE, KeyedLevel
from kvtier.tiering.ledger.keyed_state import KeyedState

HIT: Final = 0
PENDING: Final = 1
RETRY: Final = 2
MISS: Final = 3
MIN_WANTED: Final = 256  # reads that may wait before anybody looks which of them are still wanted


class KeyFinder(KeyedState):
    """Lookups, prefetches and the reads they want."""

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
            if not _waits_elsewhere(request, group):
                request.deadline = 0.0  # it waits for nothing
            if answer is None or answer.state != MISS or answer.keys != keys:
                self.counters.missed += len(keys) - num_hits
            if len(request.leases[group]) > num_hits:
                self._release_beyond(request, group, keys, num_hits)
        self.start_reads()
        answer = Answer(keys, num_hits, state, self.version)
        request.answers[group] = answer
        return answer

    def _release_beyond(self, request: KeyRequest, group: int, keys: list[bytes], num_hits: int) -> None:
        """What the request holds behind a gap that will not close is of no use to it."""
        leases = request.leases[group]
        for position in range(len(keys) - 1, num_hits - 1, -1):
            block = leases.pop(keys[position], None)
            if block is not None:
                self.allocators[group].release(block)
                request.from_nvme[group].discard(keys[position])

    def state(self, request: KeyRequest, group: int, key: bytes) -> int:
        """HIT, PENDING, RETRY or MISS of one key. All but MISS are leases from now on."""
        level = self.allocators[group]
        block = level.warm.get(key)
        leases = request.leases[group]
        held = leases.get(key)
        if held is not None and (held is not block or not request.reads):  # lost, perhaps stored again since
            level.release(leases.pop(key))
            request.from_nvme[group].discard(key)
        if block is None or not request.reads:
            return MISS
        is_below = level_of(block.index) == NVME
        if leases.get(key) is not block:
            if not is_below and not request.reads_host:
                if not level.comes_from_nvme(block):
                    return MISS
                is_below = block.num_tokens == WHOLE  # it is to be read again
            if is_below and not request.reads_nvme:
                return MISS
            # What it leases has to be in host memory all at once: beyond that, a longer prefix would evict its own head.
            if len(leases) >= level.num_blocks[SECONDARY] - self._num_abandoned[group]:
                return MISS
            if (is_below or block.num_tokens != WHOLE) and self._is_over(request):
                return MISS
            if is_below and level_of(block.index) != NVME:
                level.leave_to_nvme(block)
            level.hold(block)
            leases[key] = block
            if is_below:
                self._want(group, WantedRead(key, request, 0))
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
        for group, level in enumerate(self.allocators):
            leases = request.leases[group]
            for key in [key for key, block in leases.items() if block.num_tokens != WHOLE or level_of(block.index) == NVME]:
                level.release(leases.pop(key))
                request.from_nvme[group].discard(key)
        self.version += 1
        return True

    def prefetch(self, group: int, keys: list[bytes]) -> int:
        """Queue reads of keys that lie on NVMe and that nobody holds. Returns how many."""
        level = self.allocators[group]
        count = 0
        for key in keys:
            block = level.warm.get(key)
            if block is None:
                break
            if level_of(block.index) == NVME and block.queue != NOT_QUEUED:
                if len(self._wanted[group]) >= MIN_WANTED + level.num_blocks[SECONDARY]:
                    break  # reads begin too slowly to be ahead of anybody
                self._want(group, WantedRead(key, None, level.queues.next_stamp))
                count += 1
        self.start_reads()
        return count

    def start_reads(self) -> None:
        """Begin the reads that wait, of each group oldest first, as far as there are host slots and turns."""
        for level in self.allocators:
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

    def _want(self, group: int, wanted: WantedRead) -> None:
        """Behind those that wait already. While reads do not begin (a drive that hangs), those of requests that have gone would pile up."""
        queue = self._wanted[group]
        queue.append(wanted)
        if len(queue) >= self._sweep_at[group]:
            waiting = [other for other in queue if other.request is None or other.key in other.request.leases[group]]
            queue.clear()
            queue.extend(waiting)
            self._sweep_at[group] = 2 * len(waiting) + MIN_WANTED

    @property
    def num_wanted(self) -> int:
        """Reads that wait for their turn or a slot."""
        count = 0
        for queue in self._wanted:
            count += len(queue)
        return count


def _waits_elsewhere(request: KeyRequest, group: int) -> bool:
    """Whether the last lookup of another group left something to be waited for."""
    for other, answer in enumerate(request.answers):  # noqa: SIM110 (as in confirming.py)
        if other != group and answer is not None and answer.state != MISS:
            return True
    return False

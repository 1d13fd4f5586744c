"""Cache curves: how much is reused with how many blocks, for all sizes in one pass (kvtier tune).

Prompts are lists of block ids whose equal ids have equal prefixes. A request uses a whole prompt, its end before its beginning, so that
LRU and the optimum hold prefixes only and every block found counts. What a request used last, and what one will use next, then comes in
a few runs along a prompt: both curves cost a few steps for each run and not for each block.

Stack distances are from Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal 1970); the optimum is Belady's
(same journal, 1966). Samples of blocks by a hash of their id, with distances scaled up, are SHARDS (Waldspurger et al., FAST'15).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from typing import Final

PARTS: Final = 8  # of a sample, whose spread tells its error
_HASH: Final = 2654435761
_NEVER: Final = 1 << 62

Prompts = list[list[int]]


class HitCurve:
    """Blocks found by LRU, by capacity.

    Attributes:
        hits: cumulative; ``hits[d]`` blocks are found by a cache that holds d blocks (of the sample, if it is one).
        rate: share of the blocks that was looked at.
        missing: uses that a sample of this rate should have and does not, for chance has drawn too few, or too many, of the blocks that
            everybody uses. They count as found by the smallest cache (the correction of SHARDS).
    """

    def __init__(self, hits: list[int], rate: float, missing: float = 0.0) -> None:
        self.hits = hits
        self.rate = rate
        self.missing = missing

    def at(self, capacity: int) -> float:
        """Blocks found with a cache of this many blocks, all prompts together."""
        place = min(max(int(capacity * self.rate), 0), len(self.hits) - 1)
        return max((self.hits[place] + (self.missing if capacity > 0 else 0.0)) / self.rate, 0.0)


def lru_curve(prompts: Prompts, num_ids: int, rate: float = 1.0, part: int = -1) -> HitCurve:
    """Exact with ``rate`` 1; otherwise of that share of the ids, drawn by their hash.

    Args:
        prompts: ids from 0 on.
        num_ids: one more than the largest.
        rate: more than 0, at most 1.
        part: of ``PARTS`` disjoint parts of the sample only this one; its rate is that much less.
    """
    missing = 0.0
    if rate < 1.0 or part >= 0:
        uses = sum([len(prompt) for prompt in prompts])
        prompts = sample(prompts, num_ids, rate, part)
        if part >= 0:
            rate /= PARTS
        missing = uses * rate - sum([len(prompt) for prompt in prompts])
    last_use = [-1] * num_ids
    tree = [0] * (len(prompts) + 1)  # Fenwick (1994): by request, blocks that it was the last to use
    steps: dict[int, int] = {}       # of the number of hits, by distance
    total = 0
    for number, prompt in enumerate(prompts):
        place = 0
        end = len(prompt)
        while place < end:
            request = last_use[prompt[place]]
            if request < 0:
                break
            stop = _end_of_run(last_use, prompt, place, request)
            younger = place + total - _sum_until(tree, request + 1)  # the places before have left the tree already
            steps[younger + 1] = steps.get(younger + 1, 0) + 1
            steps[younger + stop - place + 1] = steps.get(younger + stop - place + 1, 0) - 1
            _add(tree, request + 1, place - stop)
            total -= stop - place
            place = stop
        for block in prompt:
            last_use[block] = number
        _add(tree, number + 1, end)
        total += end
    hits = [0] * (total + 2)
    found = slope = 0
    for distance in range(1, total + 2):
        slope += steps.get(distance, 0)
        found += slope
        hits[distance] = found
    return HitCurve(hits, rate, missing)


def sample(prompts: Prompts, num_ids: int, rate: float, part: int = -1) -> Prompts:
    """The ids of each prompt that are in the sample."""
    limit = int(rate * (1 << 32))
    chosen = bytearray(num_ids)
    for number in range(num_ids):
        hashed = (number * _HASH + 12345) & 0xFFFFFFFF
        hashed = ((hashed >> 16) ^ hashed) * _HASH & 0xFFFFFFFF
        if hashed < limit and (part < 0 or (hashed >> 3) % PARTS == part):
            chosen[number] = 1
    return [[block for block in prompt if chosen[block]] for prompt in prompts]


def sampling_error(prompts: Prompts, num_ids: int, rate: float, capacities: list[int]) -> float:
    """Two standard errors of the blocks that a sample of this rate finds, at the capacity where they are largest; as a share of all
    block uses. From the spread between disjoint parts of the sample."""
    uses = sum([len(prompt) for prompt in prompts])
    curves = [lru_curve(prompts, num_ids, rate, part) for part in range(PARTS)]
    worst = 0.0
    for capacity in capacities:
        found = [curve.at(capacity) for curve in curves]
        mean = sum(found) / PARTS
        variance = sum([(value - mean) ** 2 for value in found]) / (PARTS - 1)
        worst = max(worst, 2 * (variance / PARTS) ** 0.5 / max(uses, 1))
    return worst


class NextUses:
    """For each request, the requests that use its blocks next, and how many of them: what the optimum needs to know of a trace."""

    def __init__(self, prompts: Prompts, num_ids: int) -> None:
        self.runs: list[list[tuple[int, int]]] = [[] for _ in prompts]
        next_use = [_NEVER] * num_ids
        for number in range(len(prompts) - 1, -1, -1):
            prompt = prompts[number]
            place = 0
            while place < len(prompt):
                request = next_use[prompt[place]]
                if request == _NEVER:
                    break
                stop = _end_of_run(next_use, prompt, place, request)
                self.runs[number].append((request, stop - place))
                place = stop
            for block in prompt:
                next_use[block] = number

    def optimum(self, capacity: int) -> int:
        """Blocks found with a cache of this many blocks by who knows the future: the block used next the latest is given up."""
        kept = [0] * len(self.runs)  # by the request that uses them next
        latest: list[int] = []       # a heap of those requests, negated
        found = size = 0
        for number, runs in enumerate(self.runs):
            found += kept[number]
            size -= kept[number]
            for request, count in runs:
                if kept[request] == 0:
                    heapq.heappush(latest, -request)
                kept[request] += count
                size += count
            while size > capacity:
                request = -latest[0]
                gone = min(kept[request], size - capacity)
                kept[request] -= gone
                size -= gone
                if kept[request] == 0:
                    heapq.heappop(latest)
        return found


def _end_of_run(uses: list[int], prompt: list[int], start: int, request: int) -> int:
    """The first place behind ``start`` whose block was, or will be, used by another request. Along a prompt that changes one way only."""
    step = 1
    low = start
    while low + step < len(prompt) and uses[prompt[low + step]] == request:
        low += step
        step *= 2
    high = min(low + step, len(prompt))
    low += 1
    while low < high:
        middle = (low + high) // 2
        if uses[prompt[middle]] == request:
            low = middle + 1
        else:
            high = middle
    return low


def _sum_until(tree: list[int], place: int) -> int:
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


def _add(tree: list[int], place: int, count: int) -> None:
    while place < len(tree):
        tree[place] += count
        place += place & -place


def knee(sizes: list[int], found: list[float], least_gain: float) -> int:
    """The index of the smallest size from which on no doubling finds ``least_gain`` more."""
    for index, size in enumerate(sizes):
        later = min(bisect_left(sizes, 2 * size), len(sizes) - 1)
        if max(found[later:], default=found[-1]) - found[index] < least_gain or (found[-1] - found[index]) < least_gain:
            return index
    return len(sizes) - 1

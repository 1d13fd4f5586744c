"""Who was asked for before, and what knowing it is worth (design: taking a slot of a level).

LRU gives up a prompt that comes back every few minutes for one that never does, where a cache holds less than the traffic of those minutes.
What tells them apart is whether the prompt was asked for before, also when it has been given up since. ``UseHistory`` remembers keys of
prompts for about four times as long as the cache holds content, and counts their uses: *grade* 0 is new, 1 seen once before, 2 more often.
Of each grade's least recently used block, the one of the largest age x weight is given up; a prefix has at least the grade of what is
behind it, so that the end of a prompt still goes before its beginning.

Which weights pay depends on the traffic: equal ones are LRU. A few sets of weights are tried all the time, each in a shadow: a small cache
of sampled keys and no content, in which what happens to every key is what would happen to its blocks. The real queues use what had the
most hits there, and LRU where nothing is better by half a percent. Sources: grades by history are those of LRU-K (O'Neil et al.,
SIGMOD'93) and 2Q (Johnson and Shasha, VLDB'94); choosing among policies by simulating samples of them is from Waldspurger et al., "Cache
Modeling and Optimization using Miniature Simulations" (USENIX ATC'17). Putting them together for prompts is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from mypy_extensions import i64

NUM_GRADES: Final = 3
HISTORY: Final = 4           # times the capacity: how many keys are remembered, in two generations
MAX_KEYS: Final = 1 << 17    # of one generation, whatever the capacity: some 20 MB
SHADOW_KEYS: Final = 1024    # that a shadow holds
MEMORY: Final = 32           # times what a shadow holds: after so many uses, older ones count half
DECIDE_EVERY: Final = 32     # requests
LEAST_GAIN: Final = 1.005

Weights = tuple[int, int, int]
"""By grade, what an age counts for: 1 as it is, 4 as four times as old."""


class Shadow:
    """A cache of keys under one set of weights."""

    def __init__(self, weights: Weights, capacity: int) -> None:
        self.weights = weights
        self.capacity = capacity
        self.hits = 0.0
        self._grades: dict[int, int] = {}
        self._ages: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(NUM_GRADES)]  # stamps by key, oldest first

    def use(self, key: int, grade: int, stamp: int) -> None:
        """A request uses a key, which becomes the youngest of its grade."""
        before = self._grades.get(key, -1)
        if before >= 0:
            self.hits += 1.0
            if before >= grade:
                grade = before
            del self._ages[before][key]
        self._grades[key] = grade
        self._ages[grade][key] = stamp

    def trim(self, stamp: int) -> None:
        """Give keys up until the rest fits."""
        while len(self._grades) > self.capacity:
            worst = 0
            most = -1
            for grade in range(NUM_GRADES):
                ages = self._ages[grade]
                if ages:
                    age = (stamp + 1 - ages[next(iter(ages))]) * self.weights[grade]
                    if age > most:
                        most = age
                        worst = grade
            key, _ = self._ages[worst].popitem(last=False)
            del self._grades[key]


class UseHistory:
    """The memory of one ledger.

    Args:
        capacity: blocks of all levels.
        stride: every so many blocks of a prompt have one key.
        candidates: the sets of weights to choose from, LRU first; a single one is used as it is.

    Attributes:
        weights: those to use now.
    """

    def __init__(self, capacity: int, stride: int, candidates: tuple[Weights, ...]) -> None:
        keys = max(capacity // stride, 1)
        self.stride = stride
        self.weights: Weights = candidates[0]
        self._most_keys = min(HISTORY * keys, MAX_KEYS)
        self._sampled = min((1 << 32) * SHADOW_KEYS // keys, 1 << 32)  # of all 32-bit keys
        self._shadows = [Shadow(weights, min(keys, SHADOW_KEYS)) for weights in candidates] if len(candidates) > 1 else []
        self._young: dict[int, int] = {}  # uses by key
        self._old: dict[int, int] = {}
        self._stamp: i64 = 0
        self._uses = 0
        self._requests: i64 = 0

    def observe(self, parts: list[bytes]) -> list[int]:
        """A request uses a prompt.

        Args:
            parts: the content of every ``stride``-th block, in prompt order.

        Returns:
            The grade of the blocks up to each of these.
        """
        grades: list[int] = []
        sampled: list[int] = []
        young = self._young
        key = 0
        for part in parts:
            key = crc32(part, key)
            uses = young.get(key, -1)
            if uses < 0:
                uses = self._old.get(key, 0)
            young[key] = uses + 1
            grades.append(min(uses, NUM_GRADES - 1))
            if (key * 2654435761) & 0xFFFFFFFF < self._sampled:
                sampled.append(len(grades) - 1)
                sampled.append(key)
        if len(young) > self._most_keys:
            self._old = young
            self._young = {}
        if self._shadows:
            self._try(sampled, grades)
        return grades

    def _try(self, sampled: list[int], grades: list[int]) -> None:
        """Let the shadows see the sampled keys, (place, key) one after another; the end of a prompt is used before its beginning."""
        stamp = self._stamp
        for shadow in self._shadows:
            stamp = self._stamp
            for place in range(len(sampled) - 2, -1, -2):
                stamp += 1
                shadow.use(sampled[place + 1], grades[sampled[place]], stamp)
            shadow.trim(stamp)
        self._stamp = stamp
        self._uses += len(sampled) // 2
        if self._uses > MEMORY * self._shadows[0].capacity:
            self._uses //= 2
            for shadow in self._shadows:
                shadow.hits /= 2
        self._requests += 1
        if self._requests % DECIDE_EVERY == 0:
            self._decide()

    def _decide(self) -> None:
        best = self._shadows[0]
        least = best.hits * LEAST_GAIN
        for shadow in self._shadows[1:]:
            if shadow.hits > least and shadow.hits > best.hits:
                best = shadow
        self.weights = best.weights

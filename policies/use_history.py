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

from typing import TYPE_CHECKING, Any, Final, cast
from zlib import crc32

from kvtier.policies.shadows import NUM_GRADES, Shadows, Weights

if TYPE_CHECKING:
    from mypy_extensions import i64

HISTORY: Final = 4           # times the capacity: how many keys are remembered, in two generations
MAX_KEYS: Final = 1 << 17    # of one generation, whatever the capacity: some 20 MB
SHADOW_KEYS: Final = 512     # that a shadow holds
LEAST_SAMPLED: Final = 4     # of so many keys, at most one is sampled, however small the cache is
MEMORY: Final = 32           # times what a shadow holds: after so many uses, older ones count half
DECIDE_EVERY: Final = 32     # requests
LEAST_GAIN: Final = 1.005
ALL_KEYS: Final = 1 << 32    # how many there are


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
        self._shadow_keys = min(max(keys // LEAST_SAMPLED, 1), SHADOW_KEYS)
        self._sampled_below: i64 = min(ALL_KEYS * self._shadow_keys // keys, ALL_KEYS)
        self._shadows: Shadows | None = Shadows(candidates, self._shadow_keys) if len(candidates) > 1 else None
        self._young: dict[object, int] = {}  # uses by key
        self._old: dict[object, int] = {}
        self._uses = 0
        self._requests: i64 = 0

    def observe(self, parts: list[bytes], start: int = 0) -> list[int]:
        """A request uses a prompt.

        Args:
            parts: the content of every ``stride``-th block, in prompt order.
            start: 32 bits that tell apart prompts of equal parts that are not the same.

        Returns:
            The grade of the blocks up to each of these.
        """
        grades: list[int] = []
        sampled: list[object] = []
        sampled_grades: list[int] = []
        young = self._young
        below = self._sampled_below
        checksum: Any = crc32  # looked up once; what it returns stays an object, as the dictionaries want it
        key: object = start
        uses = 1  # of what comes before: behind a new part there is nothing known
        for part in parts:
            key = checksum(part, key)
            if uses > 0:
                known = young.get(key)
                uses = self._old.get(key, 0) if known is None else known
            young[key] = uses + 1
            grade = uses if uses < NUM_GRADES else NUM_GRADES - 1
            grades.append(grade)
            number: i64 = cast(int, key)
            if number < below:
                sampled.append(key)
                sampled_grades.append(grade)
        if len(young) > self._most_keys:
            self._old = young
            self._young = {}
        if self._shadows is not None:
            self._try(self._shadows, sampled, sampled_grades)
        return grades

    def _try(self, shadows: Shadows, keys: list[object], grades: list[int]) -> None:
        """Let the shadows see the sampled keys; now and then, take the weights that have done best there."""
        if keys:
            shadows.use(keys, grades)
            self._uses += len(keys)
            if self._uses > MEMORY * self._shadow_keys:
                self._uses //= 2
                shadows.forget_half()
        self._requests += 1
        if self._requests % DECIDE_EVERY == 0:
            self.weights = shadows.best(LEAST_GAIN)

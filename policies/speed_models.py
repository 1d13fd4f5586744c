"""How fast blocks are loaded and prompts computed: small models fitted to what really happened (design: deciding to load).

Both keep the latest observations only and are made anew from them when somebody asks after a change, so that each figure can be
explained by a handful of observations, and old ones are forgotten.
"""

from __future__ import annotations

from typing import Final

MAX_LOADS: Final = 24
MAX_PREFILLS: Final = 64
LEAST_PREFILLS: Final = 3
"""Reports without which nothing is said about recomputing."""

MOST_TOKENS: Final = 1 << 40
LEAST_SECONDS: Final = 1e-9
MOST_SECONDS: Final = 1e9
"""Reports are taken to lie within; what does not is a mistake somewhere, and must not cost the fit its precision."""

DISTINCT_SIZES: Final = 1.5
"""Two loads say something about latency only if one is larger than the other by this factor."""

NUM_TERMS: Final = 3
PARSIMONY: Final = 1e-3
"""How much better a fit must be, relative to the squared error of 1 that no model would have, for one more term."""


class LoadSpeed:
    """Seconds to load from one level to another: a latency, paid once, and seconds for each byte."""

    __slots__ = ("latency", "seconds_per_byte")

    def __init__(self, latency: float, seconds_per_byte: float) -> None:
        self.latency = latency
        self.seconds_per_byte = seconds_per_byte

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.seconds_per_byte


class LoadModel:
    """A line through (bytes, seconds) of the latest loads: the median of the slopes between loads of distinct sizes and the median of
    what is left (Theil 1950, Sen 1968). Up to 29 % of wild observations, a drive that paused for a second say, move neither.

    Loads of one size only say how long that size takes; a latency is then not told apart.
    """

    def __init__(self, default: LoadSpeed) -> None:
        self._default = default
        self._loads: list[tuple[float, float]] = []
        self._speed: LoadSpeed | None = default

    @property
    def num_observed(self) -> int:
        return len(self._loads)

    @property
    def tells_latency(self) -> bool:
        """Whether there were loads of distinct sizes."""
        sizes = [size for size, _seconds in self._loads]
        return len(sizes) > 1 and max(sizes) >= DISTINCT_SIZES * min(sizes)

    @property
    def smallest(self) -> float:
        """Bytes of the smallest load remembered; 0.0 without any."""
        return min([size for size, _seconds in self._loads]) if self._loads else 0.0

    def observe(self, num_bytes: float, seconds: float) -> None:
        """A load of this many bytes took so long, from the moment nothing else stood in its way."""
        if num_bytes > 0.0 and seconds > 0.0:
            self._loads.append((num_bytes, seconds))
            if len(self._loads) > MAX_LOADS:
                del self._loads[0]
            self._speed = None

    def speed(self) -> LoadSpeed:
        """The default before the first load."""
        speed = self._speed
        if speed is None:
            speed = self._fit()
            self._speed = speed
        return speed

    def _fit(self) -> LoadSpeed:
        loads = self._loads
        slopes: list[float] = []
        for number in range(len(loads)):
            for other in range(number):
                size, seconds = loads[number]
                other_size, other_seconds = loads[other]
                if max(size, other_size) >= DISTINCT_SIZES * min(size, other_size):
                    slopes.append((seconds - other_seconds) / (size - other_size))
        slope = median(slopes) if slopes else 0.0
        if slope <= 0.0:  # one size only, or noise above all else
            return LoadSpeed(0.0, median([seconds / size for size, seconds in loads]))
        latency = median([seconds - size * slope for size, seconds in loads])
        if latency < 0.0:
            return LoadSpeed(0.0, median([seconds / size for size, seconds in loads]))
        return LoadSpeed(latency, slope)


class PrefillCost:
    """Seconds to compute prompt tokens: a fixed part, a part for each token, and a part for each pair of a token and one that it
    attends to."""

    __slots__ = ("overhead", "per_pair", "per_token")

    def __init__(self, overhead: float, per_token: float, per_pair: float) -> None:
        self.overhead = overhead
        self.per_token = per_token
        self.per_pair = per_pair

    def seconds(self, start: int, end: int) -> float:
        """Seconds for tokens ``[start, end)`` behind ``start`` tokens that are there; 0.0 for none."""
        if end <= start:
            return 0.0
        return self.overhead + (end - start) * self.per_token + num_pairs(start, end) * self.per_pair


class PrefillModel:
    """The three parts of :class:`PrefillCost` from the engine's latest reports: least squares of relative errors, none negative, of the
    fewest terms that explain the reports; reports far off count less (two rounds of Huber's weights)."""

    def __init__(self) -> None:
        self._reports: list[tuple[int, int, float]] = []
        self._cost: PrefillCost | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were enough reports to say anything."""
        return len(self._reports) >= LEAST_PREFILLS

    def observe(self, start: int, end: int, seconds: float) -> None:
        """The engine computed tokens ``[start, end)`` of a prompt in so many seconds."""
        if 0 <= start < end <= MOST_TOKENS and seconds > 0.0:
            self._reports.append((start, end, min(max(seconds, LEAST_SECONDS), MOST_SECONDS)))
            if len(self._reports) > MAX_PREFILLS:
                del self._reports[0]
            self._cost = None

    def cost(self) -> PrefillCost:
        """Only when :attr:`is_known`."""
        cost = self._cost
        if cost is None:
            cost = self._fit()
            self._cost = cost
        return cost

    def _fit(self) -> PrefillCost:
        rows: list[list[float]] = []
        for start, end, seconds in self._reports:
            rows.append([1.0 / seconds, (end - start) / seconds, num_pairs(start, end) / seconds])
        weights = [1.0] * len(rows)
        terms = _fewest_terms(rows, weights)
        for _ in range(2):
            errors = [abs(_value(row, terms) - 1.0) for row in rows]
            limit = max(1.5 * median(errors), 1e-6)
            weights = [1.0 if error <= limit else limit / error for error in errors]
            terms = _fewest_terms(rows, weights)
        return PrefillCost(terms[0], terms[1], terms[2])


def num_pairs(start: int, end: int) -> float:
    """Pairs of a token in ``[start, end)`` and one that it attends to."""
    return (end - start) * (start + end + 1) / 2.0


def median(values: list[float]) -> float:
    """The middle one, or halfway between the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


_SUBSETS: Final = [[1], [0, 1], [1, 2], [0, 1, 2], [2], [0, 2], [0]]
"""Terms of a model, in the order in which they are believed: cost that is proportional to the tokens is the rule."""


def _fewest_terms(rows: list[list[float]], weights: list[float]) -> list[float]:
    """The non-negative least squares solution of ``row . terms = 1``. Of models that explain about as much, the first."""
    best = [0.0] * NUM_TERMS
    least = sum(weights)  # what a model that says 0 is off by
    total = least
    for subset in _SUBSETS:
        terms = _solve(rows, weights, subset)
        if not terms:
            continue
        error = 0.0
        for row, weight in zip(rows, weights, strict=True):
            error += weight * (_value(row, terms) - 1.0) ** 2
        if error < least - PARSIMONY * total:
            least = error
            best = terms
    return best


def _value(row: list[float], terms: list[float]) -> float:
    return row[0] * terms[0] + row[1] * terms[1] + row[2] * terms[2]


def _solve(rows: list[list[float]], weights: list[float], subset: list[int]) -> list[float]:
    """Least squares with these terms only; empty where there is no solution or one with a negative term. The columns are scaled first:
    a fixed part and a part for each pair are six and more orders of magnitude apart."""
    count = len(subset)
    scales: list[float] = []
    for term in subset:
        scales.append(max(sum([row[term] for row in rows]) / len(rows), 1e-300))
    matrix: list[list[float]] = []
    for first in range(count):
        line = [0.0] * (count + 1)
        for row, weight in zip(rows, weights, strict=True):
            scaled = weight * row[subset[first]] / scales[first]
            for second in range(count):
                line[second] += scaled * row[subset[second]] / scales[second]
            line[count] += scaled
        matrix.append(line)
    for column in range(count):
        pivot = column
        for below in range(column + 1, count):
            if abs(matrix[below][column]) > abs(matrix[pivot][column]):
                pivot = below
        if abs(matrix[pivot][column]) <= 1e-9 * len(rows):
            return []
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for other in range(count):
            if other != column:
                factor = matrix[other][column] / matrix[column][column]
                for place in range(column, count + 1):
                    matrix[other][place] -= factor * matrix[column][place]
    terms = [0.0] * NUM_TERMS
    for number in range(count):
        value = matrix[number][count] / matrix[number][number] / scales[number]
        if value < 0.0:
            return []
        terms[subset[number]] = value
    return terms

"""What ``kvtier bench serve`` has served: conversations of returning users, prompts that nobody repeats, or a trace's arrivals.

Prompts are real text (``serve_text``), settled in advance, answers of earlier turns included, so that every engine gets the same tokens. A
salt keeps what one turn of the measurement stores from being found by the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.bench.serve_text import TextSource
from kvtier.bench.trace import Trace, read_trace
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """One request: prompt, tokens to generate, whose blocks it may find, and the second at which it arrives (0: when its turn comes)."""

    tokens: tuple[int, ...]
    num_answer: int
    salt: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Served:
    """Seconds to its first token and to its end, and the tokens of its answer."""

    first_token: float
    seconds: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Played:
    """A workload that was served: seconds in all, and each request in the order asked."""

    seconds: float
    answers: tuple[Served, ...]

    def first_token(self, percent: int) -> float:
        """Percentile of the seconds to first token, the nearest rank."""
        found = sorted(answer.first_token for answer in self.answers)
        return found[max(-(-percent * len(found) // 100), 1) - 1]


@dataclass(frozen=True)
class Workload:
    """``before`` is served first and not timed; the conversations go on, or the trace begins, in ``timed``."""

    before: tuple[Asked, ...]
    timed: tuple[Asked, ...]

    def salted(self, salt: str) -> Workload:
        """The same under a salt of its own."""
        return Workload(*(tuple(replace(asked, salt=salt) for asked in part) for part in (self.before, self.timed)))

    def recomputed(self, salt: str) -> Workload:
        """The timed part alone, each request under a salt of its own, so that nothing can be reused, wherever it is."""
        return Workload((), tuple(replace(asked, salt=f"{salt} {number}") for number, asked in enumerate(self.timed)))

    @property
    def longest(self) -> int:
        """Most tokens of one request, answer included."""
        return max(len(asked.tokens) + asked.num_answer for asked in (*self.before, *self.timed))


@dataclass(frozen=True)
class Shape:
    """Of synthetic conversations, in tokens: a beginning that all share, what a user and an answer add in each turn, how many turns."""

    shared: int
    per_turn: int
    answer: int
    turns: int

    @property
    def longest(self) -> int:
        return self.shared + self.turns * self.per_turn + (self.turns - 1) * self.answer + self.answer


def returning_users(text: TextSource, seed: str, shape: Shape, users: int) -> Workload:
    """Everybody speaks once (not timed), then everybody again in another order, and so on."""
    shared = text.passage(f"0. What all users of {seed} begin with", shape.shared)
    histories = [shared + text.passage(f"{user}. A user of {seed}", shape.per_turn) for user in range(1, users + 1)]
    turns: list[list[Asked]] = [[Asked(history, shape.answer) for history in histories]]
    order = random.Random(seed)
    for turn in range(1, shape.turns):
        histories = [history + text.passage(f"{user}. Turn {turn} of {seed}", shape.answer + shape.per_turn)
                     for user, history in enumerate(histories, start=1)]
        turns.append([Asked(history, shape.answer) for history in histories])
        order.shuffle(turns[-1])
    return Workload(tuple(turns[0]), tuple(asked for turn in turns[1:] for asked in turn))


def strangers(text: TextSource, seed: str, shape: Shape, users: int) -> Workload:
    """As many prompts, as long, and no two begin alike."""
    lengths = [len(asked.tokens) for asked in returning_users(text, seed, shape, users).timed]
    return Workload((), tuple(Asked(text.passage(f"{number}. A stranger of {seed}", length), shape.answer)
                              for number, length in enumerate(lengths)))


def trace_arrivals(file: Path, block: int, text: TextSource, max_tokens: int, most_requests: int, speed: float) -> Workload:
    """A trace's first requests at its own times, with a passage of text for each of its blocks: equal where the trace says that they are.

    Requests that are longer than the model takes are left out, answers are cut.

    Raises:
        ConfigError: no trace, or none of its requests fits.
    """
    trace: Trace = read_trace(file, block)
    found: list[Asked] = []
    start = int(trace.milliseconds[0])
    for number, ids in enumerate(trace.prompts()):
        length, answer = int(trace.input_lengths[number]), max(int(trace.output_lengths[number]), 1)
        if length + 1 <= max_tokens:
            tokens = [token for each in ids.tolist() for token in text.passage(f"{each}.", block)][:length]
            found.append(Asked(tuple(tokens), min(answer, max_tokens - length),
                               at=(int(trace.milliseconds[number]) - start) / 1000 / speed))
        if len(found) == most_requests:
            break
    if not found:
        raise ConfigError(f"--trace {file}: no request of it fits into {max_tokens} tokens; name a model that takes more")
    return Workload((), tuple(found))


def distinct_tokens(requests: Sequence[Asked], block: int) -> int:
    """Tokens of the different blocks in these prompts: what a cache that holds everything would hold."""
    return block * len({asked.tokens[:end] for asked in requests for end in range(block, len(asked.tokens) + 1, block)})


"""Made-up traces of known shapes, for tests and first tries: nothing in them comes from anybody's traffic.

``chats``: conversations that grow turn by turn, each with its own think time, behind one of a few shared system prompts. ``agents``: long
sessions whose prompt grows a little with each call. ``documents``: questions about a few popular documents among many that are read once.
``loop``: the same prompts in turn, again and again, the worst case of LRU. ``scan``: nothing ever comes back.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvtier.bench.trace import DEFAULT_BLOCK, Trace, TraceBuilder

Arrival = tuple[int, list[int], int]
"""(milliseconds, ids, session)."""


class _Ids:
    """New ids, one after another."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        first = self._next
        self._next += count
        return list(range(first, self._next))


def _sessions(rng: random.Random, ids: _Ids, count: int, turns: tuple[int, int], first: tuple[int, int], added: tuple[int, int],
              pause: float, shared: list[list[int]], spread: float) -> Iterator[Arrival]:
    """Sessions whose prompt is the one before and some more; ``pause``: mean seconds between the turns of one."""
    queue: list[tuple[float, int, int, list[int]]] = []
    for session in range(count):
        prompt = [*rng.choice(shared), *ids.new(rng.randint(*first))] if shared else ids.new(rng.randint(*first))
        heapq.heappush(queue, (rng.random() * spread, session, rng.randint(*turns), prompt))
    while queue:
        moment, session, left, prompt = heapq.heappop(queue)
        yield int(1000 * moment), [*prompt, *ids.new(1)], session  # the last block is not full
        if left > 1:
            longer = [*prompt, *ids.new(rng.randint(*added))]
            heapq.heappush(queue, (moment + rng.expovariate(1 / pause), session, left - 1, longer))


def _chats(rng: random.Random, ids: _Ids, requests: int) -> Iterator[Arrival]:
    shared = [ids.new(rng.randint(1, 4)) for _ in range(3)]
    return _sessions(rng, ids, requests // 3, (1, 5), (2, 20), (1, 6), 90.0, shared, requests / 4)


def _agents(rng: random.Random, ids: _Ids, requests: int) -> Iterator[Arrival]:
    shared = [ids.new(20) for _ in range(2)]
    return _sessions(rng, ids, max(1, requests // 40), (10, 70), (5, 40), (0, 3), 10.0, shared, requests / 4)


def _documents(rng: random.Random, ids: _Ids, requests: int) -> Iterator[Arrival]:
    popular = [ids.new(rng.randint(10, 40)) for _ in range(40)]
    for number in range(requests):
        document = popular[min(int(rng.paretovariate(0.7)) - 1, 39)] if rng.random() < 0.5 else ids.new(rng.randint(10, 40))
        yield 250 * number, [*document, *ids.new(2)], number


def _loop(rng: random.Random, ids: _Ids, requests: int) -> Iterator[Arrival]:
    prompts = [ids.new(rng.randint(10, 30)) for _ in range(max(2, requests // 8))]
    for number in range(requests):
        yield 250 * number, [*prompts[number % len(prompts)], *ids.new(1)], number


def _scan(rng: random.Random, ids: _Ids, requests: int) -> Iterator[Arrival]:
    for number in range(requests):
        yield 250 * number, ids.new(rng.randint(5, 30)), number


_SHAPES: Final[dict[str, Callable[[random.Random, _Ids, int], Iterator[Arrival]]]] = {
    "chats": _chats, "agents": _agents, "documents": _documents, "loop": _loop, "scan": _scan}
SHAPES: Final = tuple(_SHAPES)


def synthetic_lines(shape: str, requests: int, seed: int = 0) -> list[dict[str, object]]:
    """A made-up trace of about so many requests, as the fields of its lines. The same arguments give the same trace."""
    lengths = random.Random(seed + 1)
    lines: list[dict[str, object]] = []
    for milliseconds, prompt, session in _SHAPES[shape](random.Random(seed), _Ids(), requests):
        length = DEFAULT_BLOCK * len(prompt) - lengths.randrange(DEFAULT_BLOCK)
        lines.append({"timestamp": milliseconds, "input_length": length, "output_length": lengths.randint(10, 600), "hash_ids": prompt,
                      "session_id": session})
    return lines


def synthetic_trace(shape: str, requests: int, seed: int = 0) -> Trace:
    """The same as :func:`synthetic_lines`, read."""
    builder = TraceBuilder(f"{shape} (made up)", DEFAULT_BLOCK)
    for number, (milliseconds, prompt, _) in enumerate(_SHAPES[shape](random.Random(seed), _Ids(), requests), 1):
        builder.add(number, milliseconds, DEFAULT_BLOCK * len(prompt), 0, prompt)
    return builder.finish()


def write_synthetic(path: Path, shape: str, requests: int, seed: int = 0) -> None:
    """Write a made-up trace as a file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in synthetic_lines(shape, requests, seed)))

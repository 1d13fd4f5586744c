"""The two runs of the demo: the same conversations through the same loop, with the tier and with reuse off."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.bench.demo_conversation import ChatFormat
from kvtier.bench.demo_model import DemoModel
from kvtier.bench.demo_plan import ANSWER_TOKENS, CHUNK_SIZE, TOKENS_PER_BLOCK, DemoPlan
from kvtier.bench.demo_text import USERS
from kvtier.errors import KVTierError
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.serving_sequence import Answer
from kvtier.tiering.attach.transformers import AttachedModel, layout_of
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager
from kvtier.tiering.statistics import Stats, TierCounters, since

FLUSH_SECONDS = 60.0
NOTHING: Callable[[], None] = lambda: None  # noqa: E731 - a default for "nobody listens"


@dataclass
class Turn:
    """One round in which every user speaks once.

    ``prompts`` and ``answers`` by user; ``counters`` is what the cache counted during the round.
    """

    number: int
    order: Sequence[int]
    prompts: dict[int, list[int]]
    answers: dict[int, Answer] = field(default_factory=dict)
    counters: TierCounters | None = None
    seconds: float = 0.0


@dataclass
class Run:
    """All turns of one run, and the cache's statistics at its end."""

    turns: list[Turn]
    stats: Stats
    seconds: float

    @property
    def answers(self) -> list[Answer]:
        return [answer for turn in self.turns for answer in turn.answers.values()]


def converse(model: DemoModel, chat: ChatFormat, stops: frozenset[int], plan: DemoPlan, config: TierConfig, device: str,
             on_answer: Callable[[], None] = NOTHING) -> Run:
    """Hold the conversations: each next prompt holds the answer that was really given. Ends with a flush to NVMe.

    Raises:
        KVTierError: a request could not be answered.
    """
    with _Served(model, stops, config, device) as served:
        turns: list[Turn] = []
        prompts = {user: list(opening) for user, opening in enumerate(plan.openings)}
        for number in range(plan.turns):
            if turns:
                prompts = {user: chat.next_turn(prompt, turns[-1].answers[user].tokens, USERS[user].turns[number])
                           for user, prompt in turns[-1].prompts.items()}
            # Somebody who spoke early in one round may speak late in the next: gaps of all lengths, as among people.
            order = list(prompts)
            random.Random(number).shuffle(order)
            turns.append(served.serve(Turn(number, order, prompts), on_answer))
        return served.finish(turns)


def repeat(model: DemoModel, stops: frozenset[int], turns: Sequence[Turn], config: TierConfig, device: str,
           on_answer: Callable[[], None] = NOTHING) -> Run:
    """The prompts of an earlier run once more, in the same order: every answer can be compared by itself.

    Raises:
        KVTierError: a request could not be answered.
    """
    with _Served(model, stops, config, device) as served:
        return served.finish([served.serve(Turn(turn.number, turn.order, turn.prompts), on_answer) for turn in turns])


class _Served:
    """A cache, the model attached to it and a loop, opened and closed together."""

    def __init__(self, model: DemoModel, stops: frozenset[int], config: TierConfig, device: str) -> None:
        layout = layout_of(model.model.config, dtype=model.model.dtype, tokens_per_block=TOKENS_PER_BLOCK)
        self._cache = KVCacheManager(layout, config, device=device, model=model.identity)
        try:
            self._attached = AttachedModel(model.model, self._cache.pool(group=0).primary)
        except KVTierError:
            self._cache.close()
            raise
        self._loop = ServingLoop(self._cache, self._attached, chunk_size=config.chunk_size or CHUNK_SIZE,
                                 max_batch_size=config.max_batch_size, stop_tokens=stops)
        self._began = self._loop.clock()

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *_details: object) -> None:
        self._loop.close()
        self._attached.detach()
        self._cache.close()

    def serve(self, turn: Turn, on_answer: Callable[[], None]) -> Turn:
        """One round. A new request arrives when another has been answered, so time to first token is no queueing time."""
        loop = self._loop
        before, began = self._cache.stats(), loop.clock()
        waiting = deque(Request(user, turn.prompts[user], max_new_tokens=ANSWER_TOKENS) for user in turn.order)
        while waiting or loop.num_requests:
            while waiting and loop.num_requests < loop.max_batch_size:
                loop.submit(waiting.popleft())
            for answer in loop.step():
                if answer.error is not None:
                    raise answer.error
                turn.answers[answer.request_id] = answer
                on_answer()
        turn.seconds = loop.clock() - began
        turn.counters = since(self._cache.stats(), before)
        return turn

    def finish(self, turns: list[Turn]) -> Run:
        """Bring what is left to NVMe, and check the books."""
        seconds = self._loop.clock() - self._began
        self._cache.flush(timeout=FLUSH_SECONDS)
        self._cache.verify()
        return Run(turns, self._cache.stats(), seconds)

"""kvtier's own serving loop over a transformers model, for ``kvtier bench serve``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.bench import openmp_waiting  # noqa: F401 # isort: skip - before torch is loaded

from kvtier.bench.demo_model import DemoModel, check_device, load_demo_model
from kvtier.bench.demo_plan import CHUNK_SIZE
from kvtier.bench.serve_engine import BLOCK, HitTokens, ServeError, Sizes
from kvtier.bench.serve_workload import Asked, Played, Served
from kvtier.errors import KVTierError
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.serving_sequence import Answer
from kvtier.tiering.attach.transformers import AttachedModel, layout_of
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager

FLUSH_SECONDS = 120.0


class TransformersMaker:
    """See ``EngineMaker``.

    Raises:
        ConfigError: no such model or device, or no transformers here.
    """

    def __init__(self, model: str | None, device: str) -> None:
        check_device(device)
        self._folder = model
        self._device = device
        self._first = load_demo_model(model, device=device)
        self._unused = [self._first]  # each engine has a model of its own: one is attached to one pool at a time
        self.max_tokens = int(self._first.model.config.max_position_embeddings)

    def encode(self, text: str) -> Sequence[int]:
        return [int(token) for token in self._first.tokenizer.encode(text, add_special_tokens=False)]

    def as_json(self) -> dict[str, object]:
        return {"name": "transformers", "model": self._first.identity, "device": self._device}

    def start(self, sizes: Sizes, folder: Path | None) -> TransformersEngine:
        model = self._unused.pop() if self._unused else load_demo_model(self._folder, device=self._device)
        return TransformersEngine(model, self._device, sizes, folder, lambda: self._unused.append(model))


class TransformersEngine:
    """See ``ServedEngine``."""

    def __init__(self, model: DemoModel, device: str, sizes: Sizes, folder: Path | None, give_back: Callable[[], None]) -> None:
        def blocks(tokens: int) -> str:
            return f"{-(-tokens // BLOCK)} blocks"
        self._give_back = give_back
        layout = layout_of(model.model.config, dtype=model.model.dtype, tokens_per_block=BLOCK)
        config = TierConfig(primary=blocks(sizes.pool + BLOCK), secondary=blocks(sizes.host if folder is not None else 0),
                            nvme=blocks(sizes.nvme if folder is not None else 0), nvme_directory=folder if sizes.nvme else None,
                            max_batch_size=sizes.at_once, max_seq_len=-(-sizes.longest // BLOCK) * BLOCK, chunk_size=CHUNK_SIZE,
                            event_buffer_max_size=0, load_decision="always")  # as for vLLM; otherwise a small model recomputes
        self._cache = KVCacheManager(layout, config, device=device, model=model.identity)
        try:
            self._attached = AttachedModel(model.model, self._cache.pool(group=0).primary)
        except KVTierError:
            self._cache.close()
            raise
        self._loop = ServingLoop(self._cache, self._attached, chunk_size=CHUNK_SIZE, max_batch_size=sizes.at_once)
        self._ids = itertools.count(1)

    def play(self, requests: Sequence[Asked], at_once: int) -> Played:
        loop, began = self._loop, self._loop.clock()
        waiting = list(reversed(requests))
        order: dict[int, int] = {}
        answers: dict[int, Answer] = {}
        while waiting or loop.num_requests:
            while waiting and (waiting[-1].at or loop.num_requests < at_once) and waiting[-1].at <= loop.clock() - began:
                asked, number = waiting.pop(), next(self._ids)
                order[number] = len(order)
                loop.submit(Request(number, asked.tokens, cache_salt=asked.salt or None, max_new_tokens=asked.num_answer))
            for answer in loop.step():
                if answer.error is not None:
                    raise ServeError(f"a request was not answered: {answer.error}") from answer.error
                answers[order[answer.request_id]] = answer
        seconds = loop.clock() - began
        return Played(seconds, tuple(Served(answer.first_token_seconds, answer.seconds, tuple(answer.tokens))
                                     for _, answer in sorted(answers.items())))

    def hit_tokens(self) -> HitTokens:
        return HitTokens(*self._cache.stats().hit_tokens)

    def settle(self) -> None:
        if not self._cache.flush(FLUSH_SECONDS):
            raise ServeError(f"what is stored was not written to NVMe within {FLUSH_SECONDS:.0f} s; name another drive with --directory")

    def close(self) -> None:
        self._loop.close()
        self._attached.detach()
        self._cache.close()
        self._give_back()

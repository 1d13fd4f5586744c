"""Time to first token of a long prompt whose prefix is on NVMe, beside computing that prefix again.

The prefix is stored once. For every measurement the manager is opened anew, so that the blocks are on NVMe and nowhere else,
and the request stores nothing. Reads, checksums, copies and the computation of what follows the prefix all count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.bench import openmp_waiting  # isort: skip - before torch is loaded

import torch

from kvtier.bench.demo_conversation import stop_tokens
from kvtier.bench.demo_model import DemoModel, load_demo_model
from kvtier.bench.demo_plan import CHUNK_SIZE, TOKENS_PER_BLOCK
from kvtier.bench.demo_text import SYSTEM_PROMPT, USERS
from kvtier.bench.measure import Alternative, Interleaved
from kvtier.bench.report import Limit, ResultRow
from kvtier.errors import TransferError
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.serving_sequence import Answer
from kvtier.tiering.attach.transformers import AttachedModel, layout_of
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager

ROW_NAME: Final = "nvme/first-token"
PREFIX_TOKENS: Final = 2000
QUICK_PREFIX_TOKENS: Final = 500
OURS: Final = "kvtier"
RECOMPUTE: Final = "recompute"

_FLUSH_SECONDS: Final = 120.0
_NEAR_TIE: Final = 1e-3


def first_token_row(directory: Path, *, quick: bool = False, say: Callable[[str], None] = lambda text: None,
                    model: DemoModel | None = None, prefix_tokens: int | None = None) -> ResultRow:
    """The row for ``kvtier bench nvme``: seconds to the first token; the limit is recomputing, the ratio how much faster.

    Args:
        directory: of the NVMe level; made if it is missing, and left to the caller to remove.
        quick: five rounds instead of seven, and a quarter of the prefix.
        say: gets one line about each slow step before it begins.
        model: a loaded model; None for the demo's own.
        prefix_tokens: rounded up to whole blocks; the usual ones when None.

    Raises:
        ConfigError: the model is not installed, or the directory cannot be used.
        TransferError: the prefix did not come from NVMe, or the first token was not the same.
    """
    loaded = model if model is not None else load_demo_model(say=say)
    if prefix_tokens is None:
        prefix_tokens = QUICK_PREFIX_TOKENS if quick else PREFIX_TOKENS
    prefix, question = _prompt(loaded, -(-prefix_tokens // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK)
    measured = measure_first_token(loaded, directory, prefix, question, rounds=5 if quick else 7, say=say)
    ours, recompute = measured.seconds(OURS), measured.seconds(RECOMPUTE)
    return ResultRow(ROW_NAME, "s", ours.median, ours.low, ours.high,
                     Limit(f"recomputing {len(prefix)} tokens, {torch.get_num_threads()} torch threads, "
                           f"{openmp_waiting.openmp_waiting()}", recompute.median),
                     measured.speed_ratio(OURS, RECOMPUTE))


def measure_first_token(model: DemoModel, directory: Path, prefix: list[int], question: list[int], rounds: int,
                        say: Callable[[str], None] = lambda text: None) -> Interleaved:
    """Seconds to the first token of ``prefix + question``, with the prefix on NVMe and without reuse, in turns.

    Raises:
        TransferError: as for :func:`first_token_row`.
    """
    with _FirstToken(model, directory, prefix, question) as bench:
        say(f"storing {len(prefix)} tokens; {len(question)} more come after them")
        bench.store()
        turns = [Alternative(RECOMPUTE, lambda: bench.time(skip_read=True), bench.open, bench.close),
                 Alternative(OURS, lambda: bench.time(skip_read=False), bench.open, bench.close)]
        measured = Interleaved()
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "a round to warm up")
            measured.round(turns, warm_up=number == 0)
        return measured


def _prompt(model: DemoModel, prefix_tokens: int) -> tuple[list[int], list[int]]:
    """So many tokens of the demo's text, and a question after them."""
    text = "\n\n".join([SYSTEM_PROMPT, *(turn for user in USERS for turn in user.turns)])
    tokens = [int(token) for token in model.tokenizer.encode(text, add_special_tokens=False)]
    question = [int(token) for token in model.tokenizer.encode(USERS[-1].turns[-1], add_special_tokens=False)]
    return (tokens * (-(-prefix_tokens // len(tokens))))[:prefix_tokens], question


class _FirstToken:
    """One stored prefix, and a manager that is opened for one measurement at a time."""

    def __init__(self, model: DemoModel, directory: Path, prefix: list[int], question: list[int]) -> None:
        self._model = model
        self._prefix = prefix
        self._prompt = prefix + question
        self._layout = layout_of(model.model.config, dtype=model.model.dtype, tokens_per_block=TOKENS_PER_BLOCK)
        blocks = -(-len(self._prompt) // TOKENS_PER_BLOCK) + 1
        self._config = TierConfig(primary=f"{blocks} blocks", secondary=f"{blocks} blocks", nvme=f"{2 * blocks} blocks",
                                  nvme_directory=directory, max_batch_size=1, max_seq_len=blocks * TOKENS_PER_BLOCK,
                                  chunk_size=CHUNK_SIZE, event_buffer_max_size=0)
        self._stops = stop_tokens(model.model, model.tokenizer)
        self._device = str(model.model.device)
        self._cache: KVCacheManager | None = None
        self._attached: AttachedModel | None = None
        self._reference: Answer | None = None

    def __enter__(self) -> _FirstToken:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def open(self) -> None:
        """A fresh manager: whatever is stored is on NVMe."""
        self._cache = KVCacheManager(self._layout, self._config, device=self._device, model=self._model.identity)
        self._attached = AttachedModel(self._model.model, self._cache.pool(group=0).primary)

    def close(self) -> None:
        """The end of a measurement, also one that failed."""
        if self._attached is not None:
            self._attached.detach()
        if self._cache is not None:
            self._cache.close()
        self._cache = self._attached = None

    def store(self) -> None:
        """Compute the prefix once and bring it to NVMe."""
        self.open()
        assert self._cache is not None
        # One token more than the prefix: the newest token is never stored.
        self._serve(Request(0, self._prompt[:len(self._prefix) + 1], max_new_tokens=1))
        if not self._cache.flush(_FLUSH_SECONDS):
            raise TransferError(f"the prefix was not written within {_FLUSH_SECONDS:.0f} s; the drive is too slow or refuses")
        self.close()

    def time(self, *, skip_read: bool) -> float:
        """Seconds to the first token."""
        assert self._cache is not None
        answer = self._serve(Request(0, self._prompt, max_new_tokens=1, skip_read=skip_read, skip_write=True))
        read = self._cache.stats().hit_tokens.nvme
        if read != (0 if skip_read else len(self._prefix)):
            raise TransferError(f"{read} tokens came from NVMe instead of {len(self._prefix)}; a read failed, or not all was stored")
        reference = self._reference = self._reference or answer
        if answer.tokens != reference.tokens and reference.top_gaps[0] >= _NEAR_TIE:
            raise TransferError(f"first token {answer.tokens[0]} with reuse={not skip_read}, {reference.tokens[0]} before: "
                                "blocks read back differ from blocks computed")
        return answer.first_token_seconds

    def _serve(self, request: Request) -> Answer:
        assert self._cache is not None
        assert self._attached is not None
        with ServingLoop(self._cache, self._attached, chunk_size=CHUNK_SIZE, max_batch_size=1, stop_tokens=self._stops) as loop:
            answer = loop.run([request])[request.id]
        if answer.error is not None:
            raise answer.error
        return answer

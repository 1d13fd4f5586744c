"""What ``kvtier check`` asks of an engine, whether it is reached over HTTP (``check_http``) or is in this process (``check_llm``)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvtier.bench.check_metrics import Metrics
from kvtier.errors import KVTierError

Prompt = str | list[int]
"""Text over HTTP, where nobody says how many tokens there are; token ids in process, where there may be no tokenizer."""


class EngineTrouble(KVTierError):
    """The engine did not answer in time, refused a request, answered something that is no answer, or has no tier."""


@dataclass(frozen=True)
class Order:
    """One request, decoded greedily.

    Attributes:
        prompt: see ``Prompt``.
        salt: blocks are found again under the same salt only.
        num_tokens: to generate, whatever the model would like to end.
        reads, writes: whether the tier may be asked and may keep what is computed.
    """

    prompt: Prompt
    salt: str
    num_tokens: int = 1
    reads: bool = True
    writes: bool = True

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """vLLM's ``kv_transfer_params`` that say so."""
        wishes = {key: True for key, is_wanted in (("skip_read", not self.reads), ("skip_write", not self.writes)) if is_wanted}
        return {"kvtier": wishes} if wishes else None


@dataclass(frozen=True)
class Answer:
    """Generated tokens.

    Attributes:
        tokens: their ids.
        logprobs: natural logarithm of each one's probability.
        gaps: how much likelier each was than the next best, as a difference of logarithms; endless where that is not known.
        prompt_tokens: of the prompt.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    prompt_tokens: int

    def as_json(self) -> dict[str, object]:
        return {"tokens": list(self.tokens), "logprobs": list(self.logprobs),
                "gaps": [min(gap, _WIDE) for gap in self.gaps], "prompt_tokens": self.prompt_tokens}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Answer:
        """KeyError, TypeError or ValueError for what :meth:`as_json` did not make."""
        return cls(tuple(map(int, given["tokens"])), tuple(map(float, given["logprobs"])), tuple(map(float, given["gaps"])),
                   int(given["prompt_tokens"]))


class CheckedEngine(Protocol):
    """All calls end within ``seconds`` and raise :class:`EngineTrouble` when the engine does not do what it should."""

    name: str
    """Where it is."""

    model: str
    max_tokens: int
    """Most tokens of a prompt and its answer."""

    is_shared: bool
    """Others may use it at the same time."""

    def make_prompt(self, rng: random.Random, num_tokens: int) -> Prompt:
        """A prompt that nobody has sent before, of about so many tokens and hardly more."""
        ...

    def ask(self, order: Order, seconds: float) -> Answer: ...

    def metrics(self, seconds: float) -> Metrics: ...

    def reset(self, seconds: float) -> bool | None:
        """Empty the device's prefix cache, and nothing else. False: not now, blocks are in use. None: that is not offered."""
        ...


_WIDE: Final = 1e9  # JSON has no infinity

"""How the next token is chosen from a model's logits: the best one, or one drawn by temperature, top-k and top-p.

Draws come from one generator for each request, which only that request uses: what it draws does not depend on the other
requests of a batch, nor on pre-emptions.

Sources: nucleus sampling, Holtzman et al. 2019 (arXiv 1904.09751); top-k, Fan et al. 2018 (arXiv 1805.04833). The filters are applied
in the order that transformers applies them: temperature, top-k, top-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.errors import RequestError

SEED_LIMIT: Final = 1 << 63


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. The default takes the best token each time.

    Args:
        temperature: divides the logits; 0 takes the best token, and needs no other argument.
        top_k: only the k best tokens can be drawn; None: all.
        top_p: only the fewest best tokens whose probabilities reach this sum can be drawn; 1: all.
        seed: the same seed draws the same tokens from the same logits; None: another one each time. 0 to 2^63 - 1.

    Raises:
        RequestError: a value outside its range, or one that would have no effect because the best token is taken anyway.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise RequestError(f"temperature={self.temperature!r}: pass a number of at least 0; 0 takes the best token")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise RequestError(f"top_k={self.top_k!r}: pass a whole number of at least 1, or None for all tokens")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p!r}: pass a number above 0 and at most 1")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEED_LIMIT):
            raise RequestError(f"seed={self.seed!r}: pass a whole number from 0 to 2^63 - 1, or None")
        if self.is_greedy and (self.top_k is not None or self.top_p != 1.0 or self.seed is not None):
            raise RequestError("temperature=0 takes the best token, so top_k, top_p and seed have no effect: leave them out, or pass a "
                               "temperature above 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def generator(self) -> torch.Generator | None:
        """The request's own source of random numbers; None where nothing is drawn."""
        if self.is_greedy:
            return None
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Best token of each row of ``[rows, vocabulary]``, and how far its logit is above the second best."""
    best = torch.topk(logits.float(), 2, dim=-1)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What each token can be drawn with, float32 ``[vocabulary]``, from logits ``[vocabulary]``. Of a sampling that draws."""
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < torch.topk(scores, sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(scores, descending=True)
        share = torch.softmax(ordered, dim=-1)
        # A token stays while those before it do not reach top_p: the best one always does.
        scores = scores.index_fill(0, order[share.cumsum(0) - share >= sampling.top_p], -math.inf)
    return torch.softmax(scores, dim=-1)


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits ``[vocabulary]``."""
    return int(torch.multinomial(probabilities(logits, sampling).cpu(), 1, generator=generator))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


GREEDY: Final = Sampling()

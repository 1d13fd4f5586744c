"""Beam search over one request: which beams go on, which are finished, and when no better answer can come.

The rules are those of transformers' ``generate(num_beams=...)`` with ``early_stopping=False``, so that answers can be compared: of each
step's continuations the best that do not end go on; those among the best ``width`` that end are finished, scored by the sum of their
log probabilities over ``length ** length_penalty``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Beam:
    """One of the answers that beam search found: its tokens and its score, the higher the better."""

    tokens: list[int]
    score: float


@dataclass
class BeamSearch:
    """The state of one request's beams.

    Attributes:
        width: beams that go on side by side.
        max_new_tokens: longest answer.
        stop_tokens: tokens that end an answer.
        length_penalty: exponent of the length in the score.
        tokens: generated tokens of each beam that goes on; empty lists at first.
        finished: the best finished answers so far, best first, at most ``width``.
        is_done: nothing better can come.
    """

    width: int
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    tokens: list[list[int]] = field(default_factory=list)
    finished: list[Beam] = field(default_factory=list)
    is_done: bool = False
    _scores: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that each beam has generated."""
        return len(self.tokens[0]) if self.tokens else 0

    @property
    def newest(self) -> list[int]:
        return [tokens[-1] for tokens in self.tokens]

    def restart(self) -> None:
        """Forget everything: the request begins again at its prompt."""
        self.tokens, self.finished, self._scores, self.is_done = [], [], [], False

    def advance(self, logits: torch.Tensor) -> list[int]:
        """Go on by one token, from logits ``[beams, vocabulary]``, or ``[1, vocabulary]`` behind the prompt.

        Returns:
            For each beam that goes on, the beam it continues. Of no use when ``is_done``.
        """
        scores = torch.log_softmax(logits.float(), dim=-1)
        if self._scores:
            scores = scores + torch.tensor(self._scores, device=scores.device)[:, None]
        vocabulary = scores.shape[1]
        # So many that even if every stop token follows every beam, enough are left to go on.
        wanted = min(max(2, 1 + len(self.stop_tokens)) * self.width, scores.numel())
        best = torch.topk(scores.flatten(), wanted)
        length = self.length + 1
        old = self.tokens or [[]]
        going_on: list[tuple[int, list[int], float]] = []
        for rank, (place, score) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
            parent, token = divmod(place, vocabulary)
            tokens = [*old[parent], token]
            if length < self.max_new_tokens and token not in self.stop_tokens:
                going_on.append((parent, tokens, score))
            elif rank < self.width:
                self._finish(Beam(tokens, score / length**self.length_penalty))
        del going_on[self.width:]
        if len(going_on) < self.width:  # at the longest answer, or with hardly any tokens that do not end one
            self.is_done = True
            return []
        parents = [parent for parent, _, _ in going_on]
        self.tokens = [tokens for _, tokens, _ in going_on]
        self._scores = [score for _, _, score in going_on]
        self.is_done = len(self.finished) == self.width and self._scores[0] / length**self.length_penalty <= self.finished[-1].score
        return parents

    def answers(self) -> Sequence[Beam]:
        """All answers, best first: finished ones, or those that were under way when the search had to end early."""
        return self.finished or [Beam(tokens, score / max(len(tokens), 1)**self.length_penalty if tokens else -math.inf)
                                 for tokens, score in zip(self.tokens, self._scores, strict=True)]

    def _finish(self, beam: Beam) -> None:
        self.finished = sorted([*self.finished, beam], key=lambda found: -found.score)[:self.width]

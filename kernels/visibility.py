"""``Visibility``: which tokens a query sees, and where in its sequence's pages they lie (spec: read path, windowed position map).

Two maps of places. In kvtier's own pools a row of blocks is a line: token t lies at place t, behind sinks that do not fill their
last block at t + bubble. In an engine's ring the newest tokens overwrite the oldest; there writer and reader use one map,
:class:`~kvtier.kernels.ring_map.RingMap`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import check_whole
from kvtier.kernels.ring_map import RingMap
from kvtier.pools.layer_spec import LayerSpec
from kvtier.pools.sequence_blocks import sink_bubble

Span = tuple[int, int]
"""A run of places or tokens: the first, and the one behind the last."""


@dataclass(frozen=True)
class Visibility:
    """Which tokens a query sees.

    Attributes:
        window: tokens that a query sees, itself and the sinks included; None: all before it.
        sinks: leading tokens that stay visible for ever, and count towards the window.
        ring: the pages are a ring of this map, written through it; None: they are a line, as kvtier's own pools are.
        is_causal: False: every query sees all of the keys (cross-attention over an encoder's output).

    Raises:
        RequestError: a window of no token, sinks that are no part of a window, a window without causality, a ring of another window.
    """

    window: int | None = None
    sinks: int = 0
    ring: RingMap | None = None
    is_causal: bool = True

    def __post_init__(self) -> None:
        window, sinks = check_whole("Visibility", window=1 if self.window is None else self.window, sinks=self.sinks)
        object.__setattr__(self, "window", None if self.window is None else window)
        object.__setattr__(self, "sinks", sinks)
        if self.window is not None and self.window < 1:
            raise RequestError(f"Visibility: window={self.window}: a query sees itself at least; pass 1 or more, or None for all tokens")
        if self.sinks and (self.window is None or not 0 <= self.sinks < self.window):
            raise RequestError(f"Visibility: sinks={self.sinks} with window={self.window}: sinks are the part of a window that never "
                               "leaves it: fewer than it has")
        if self.window is not None and not self.is_causal:
            raise RequestError(f"Visibility: window={self.window} without causality: cross-attention sees all keys; pass one of them")
        if self.ring is not None and (self.ring.window, self.ring.sinks) != (self.window, self.sinks):
            raise RequestError(f"Visibility: the ring was made for window={self.ring.window} and sinks={self.ring.sinks}, this is "
                               f"window={self.window} and sinks={self.sinks}: a reader with another map would read other tokens")

    @classmethod
    def of(cls, spec: LayerSpec) -> Visibility:
        """What a layer's queries see."""
        return cls(spec.window, spec.sinks, is_causal=spec.kind != "cross")

    @property
    def reach(self) -> int | None:
        """Tokens behind the sinks that a query sees, itself included; None: all."""
        return None if self.window is None else self.window - self.sinks

    def bubble(self, tokens_per_block: int) -> int:
        """Places between the sinks and the tokens behind them that nobody writes."""
        return self.ring.bubble if self.ring is not None else sink_bubble(self.sinks, self.window, tokens_per_block)

    def num_places(self, length: int, tokens_per_block: int) -> int:
        """Places that the first ``length`` tokens reach to."""
        if self.window is None:
            return length
        bubble = self.bubble(tokens_per_block) if length > self.sinks else 0
        if self.ring is not None:
            return min(length, self.sinks + self.ring.ring) + bubble
        return length + bubble

    def places(self, tokens: torch.Tensor, tokens_per_block: int) -> torch.Tensor:
        """The place of each token, int64 in the shape of ``tokens``."""
        if self.ring is not None:
            return self.ring.places(tokens).long()
        return torch.where(tokens < self.sinks, tokens, tokens + self.bubble(tokens_per_block)).long()

    def token_spans(self, first: int, length: int) -> list[Span]:
        """Tokens that queries at positions ``first`` to ``length`` - 1 see between them: the sinks, and what their windows reach."""
        begin = 0 if self.reach is None or not self.is_causal else max(self.sinks, first - self.reach + 1)
        spans = [(0, min(self.sinks, length)), (max(begin, self.sinks), length)]
        return [span for span in spans if span[0] < span[1]]

    def place_spans(self, first: int, length: int, tokens_per_block: int) -> list[Span]:
        """The places of those tokens, ascending, neighbours joined."""
        if self.window is None:
            return [(0, length)] if length > 0 else []
        bubble = self.bubble(tokens_per_block)
        found: list[Span] = []
        for begin, end in self.token_spans(first, length):
            if end <= self.sinks:
                found.append((begin, end))
            elif self.ring is None:
                found.append((begin + bubble, end + bubble))
            else:
                found += self._ring_spans(self.ring, begin, end)
        joined: list[Span] = []
        for begin, end in sorted(found):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        return joined

    def token_of_place(self, length: int, num_places: int, tokens_per_block: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Which of the first ``length`` tokens lies at each place, int64 ``[num_places]``; -1: none that is still there."""
        found = torch.full((num_places,), -1, dtype=torch.int64, device=device)
        oldest = self.sinks if self.ring is None else max(self.sinks, length - self.ring.ring)
        for begin, end in ((0, min(self.sinks, length)), (oldest, length)):
            tokens = torch.arange(begin, max(begin, end), device=device)
            found[self.places(tokens, tokens_per_block)] = tokens
        return found

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions see keys at these positions, bool, broadcast; a key at -1 is none."""
        seen = keys >= 0
        if self.is_causal:
            seen = seen & (keys <= queries)
        if self.reach is not None:
            seen = seen & ((keys < self.sinks) | (keys > queries - self.reach))
        return seen

    def _ring_spans(self, ring: RingMap, begin: int, end: int) -> list[Span]:
        """Tokens ``begin`` to ``end`` in a ring: a run, or two where they pass its end."""
        first, last = ring.place(begin), ring.place(end - 1)
        if last - first == end - 1 - begin:
            return [(first, last + 1)]
        base = ring.sinks + ring.bubble
        return [(base, last + 1), (first, base + ring.ring)]


EVERYTHING = Visibility()
"""Causal, without a window."""

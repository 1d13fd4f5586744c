"""Where a token lies in a pool that is a ring (spec: windowed position map). One function, for writer and reader alike.

TensorRT-LLM's cyclic KV cache: sink tokens keep their places, all others take turns on a ring behind them. For engines whose own
pool is one; kvtier's own pools are linear, and their blocks leave a window as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import ConfigError
from kvtier.kernels.checks import check_whole
from kvtier.pools.sequence_blocks import sink_bubble


@dataclass(frozen=True)
class RingMap:
    """Map from a token's number to its position in the pool: ``t`` for a sink, else ``sinks + bubble + (t - sinks) mod ring``.

    The bubble pads the sinks to a block boundary.

    Args:
        window: tokens that a token sees, itself and the sinks included.
        sinks: leading tokens that stay; fewer than ``window``.
        tokens_per_block: a power of two.
        spare_block: one block more on the ring, where the pool has it. Without it every token overwrites the one that has just left
            the window, so that a chunk of several tokens may overwrite what its first tokens still see.

    Raises:
        ConfigError: a number outside these limits.
    """

    window: int
    sinks: int
    tokens_per_block: int
    spare_block: bool = False

    def __post_init__(self) -> None:
        sizes = {"window": self.window, "sinks": self.sinks, "tokens_per_block": self.tokens_per_block}
        for name, size in zip(sizes, check_whole("RingMap", ConfigError, **sizes), strict=True):
            object.__setattr__(self, name, size)
        if self.tokens_per_block < 1 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ConfigError(f"RingMap: tokens_per_block={self.tokens_per_block}: must be a power of two")
        if not 0 <= self.sinks < self.window:
            raise ConfigError(f"RingMap: sinks={self.sinks} with window={self.window}: sinks are a part of the window, so allowed are 0 "
                              f"to {self.window - 1}")

    @property
    def bubble(self) -> int:
        """Positions left empty behind the sinks."""
        return sink_bubble(self.sinks, self.window, self.tokens_per_block)

    @property
    def ring(self) -> int:
        """Positions that tokens behind the sinks share."""
        return self.window - self.sinks + (self.tokens_per_block if self.spare_block else 0)

    @property
    def capacity(self) -> int:
        """Positions that a sequence of any length needs."""
        return self.sinks + self.bubble + self.ring

    def place(self, token: int) -> int:
        """Position of one token, counted from 0."""
        return token if token < self.sinks else self.sinks + self.bubble + (token - self.sinks) % self.ring

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Position of each token: integers of any shape, to the same shape and dtype."""
        return torch.where(tokens < self.sinks, tokens, self.sinks + self.bubble + (tokens - self.sinks) % self.ring)

    def is_kept(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Whether a token is still in the pool when its sequence has ``lengths`` tokens: bool, shapes are broadcast.

        Of tokens that are written in one call only these may be: two with one place would race.
        """
        return (tokens < self.sinks) | (tokens >= lengths - self.ring)

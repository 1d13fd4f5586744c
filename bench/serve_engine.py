"""What ``kvtier bench serve`` needs of an engine; ``serve_vllm`` and ``serve_transformers`` are the two there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvtier.bench.serve_workload import Asked, Played
from kvtier.errors import KVTierError

BLOCK: Final = 32
"""Tokens of a block, in every engine."""


class ServeError(KVTierError):
    """An engine did not start, ended, or did not answer in time. The message ends with its last lines."""


@dataclass(frozen=True)
class HitTokens:
    """Prompt tokens that did not have to be computed, since the engine's start, by where they came from."""

    device: int
    host: int
    nvme: int

    def __sub__(self, other: HitTokens) -> HitTokens:
        return HitTokens(self.device - other.device, self.host - other.host, self.nvme - other.nvme)

    def __add__(self, other: HitTokens) -> HitTokens:
        return HitTokens(self.device + other.device, self.host + other.host, self.nvme + other.nvme)

    def as_json(self) -> dict[str, int]:
        return {"device": self.device, "host": self.host, "nvme": self.nvme}


@dataclass(frozen=True)
class Sizes:
    """Of one engine, in tokens: its own pool, the tier's levels, and the longest request; ``at_once``: requests in flight; ``engines``:
    how many run at the same time and share the machine."""

    pool: int
    host: int
    nvme: int
    longest: int
    at_once: int
    engines: int = 2


class ServedEngine(Protocol):
    """A started engine. Every call has a deadline and raises ServeError."""

    def play(self, requests: Sequence[Asked], at_once: int) -> Played:
        """Serve them, so many at once at most, each no sooner than it arrives."""
        ...

    def hit_tokens(self) -> HitTokens: ...

    def settle(self) -> None:
        """Wait until what is stored is on NVMe."""
        ...

    def close(self) -> None: ...


class EngineMaker(Protocol):
    """A kind of engine with a model."""

    max_tokens: int

    def encode(self, text: str) -> Sequence[int]:
        """The model's tokens of a text, without special ones."""
        ...

    def start(self, sizes: Sizes, folder: Path | None) -> ServedEngine:
        """With a tier whose NVMe level is in this folder (without that level, where ``sizes.nvme`` is 0), or without a tier. Raises
        ServeError."""
        ...

    def as_json(self) -> dict[str, object]: ...

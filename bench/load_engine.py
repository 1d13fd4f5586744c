"""An engine that only takes time: prefill as a busy wait of known length, and the bytes that its blocks would hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.policies.speed_models import PrefillCost

PAIRS_AT: Final = 16_384
"""Context at which attention costs as much again as everything else, as in models of a few billion parameters."""


class TimedEngine:
    """Computes a prompt by waiting as long as its cost says, without giving the processor up.

    Args:
        tokens_per_second: of a short prompt.
    """

    def __init__(self, tokens_per_second: float) -> None:
        self.cost = PrefillCost(1e-3, 1.0 / tokens_per_second, 2.0 / tokens_per_second / PAIRS_AT)

    def prefill(self, start: int, end: int) -> float:
        """Compute tokens ``[start, end)``. Returns the seconds that it took."""
        begun = time.perf_counter()
        until = begun + self.cost.seconds(start, end)
        while (now := time.perf_counter()) < until:
            pass
        return now - begun


def block_content(tokens: Sequence[int], block_bytes: int) -> npt.NDArray[np.uint8]:
    """What the block of these tokens holds: uint8 ``[block_bytes]``, another pattern for other tokens."""
    seed = np.asarray(tokens, dtype=np.int64).tobytes()
    return np.frombuffer(np.random.default_rng(list(seed)).bytes(block_bytes), dtype=np.uint8)

"""Eviction policies by name: which sets of weights each of them chooses from (design: taking a slot of a level)."""

from __future__ import annotations

from typing import Final

from kvtier.errors import ConfigError
from kvtier.policies.use_history import Weights

LRU: Final[Weights] = (1, 1, 1)
HALVING: Final[Weights] = (4, 2, 1)           # seen before: twice as long; more often: four times
QUARTERING: Final[Weights] = (16, 4, 1)
SEEN_FIRST: Final[Weights] = (1 << 20, 1, 1)  # new prompts go before all others

POLICIES: Final[dict[str, tuple[Weights, ...]]] = {
    "default": (LRU,),
    "lru": (LRU,),
    "adaptive": (LRU, HALVING, QUARTERING, SEEN_FIRST),  # whichever has the most hits in its shadow
    "halving": (HALVING,),
    "seen-first": (SEEN_FIRST,),
}


def candidates_of(policy: str) -> tuple[Weights, ...]:
    """Raises ConfigError for a name that there is not."""
    found = POLICIES.get(policy)
    if found is None:
        raise ConfigError(f"policy={policy!r}: unknown; use one of {', '.join(POLICIES)}")
    return found

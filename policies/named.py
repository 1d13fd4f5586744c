"""Eviction policies by name: which sets of weights each of them chooses from (design: taking a slot of a level)."""

from __future__ import annotations

from typing import Final

from kvtier.errors import ConfigError
from kvtier.policies.shadows import Weights

LRU: Final[Weights] = (1, 1, 1)
HALVING: Final[Weights] = (4, 2, 1)           # seen before: twice as long; more often: four times
SEEN_FIRST: Final[Weights] = (1 << 20, 1, 1)  # new prompts go before all others

POLICIES: Final[dict[str, tuple[Weights, ...]]] = {
    "default": (LRU, HALVING, SEEN_FIRST),  # whichever has the most hits in its shadow
    "lru": (LRU,),
    "halving": (HALVING,),
    "seen-first": (SEEN_FIRST,),
}


def candidates_of(policy: str) -> tuple[Weights, ...]:
    """Raises ConfigError for a name that there is not."""
    found = POLICIES.get(policy)
    if found is None:
        raise ConfigError(f"policy={policy!r}: unknown; use one of {', '.join(POLICIES)}")
    return found

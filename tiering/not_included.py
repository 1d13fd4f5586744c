"""Public methods that later versions fill in. They exist so that code written against the contract says what is missing."""

from __future__ import annotations

from kvtier.errors import KVTierError
from kvtier.tiering.ledger.request import Request


def _missing(name: str, instead: str) -> KVTierError:
    return KVTierError(f"{name} is not included yet; {instead}")


class NotIncludedYet:
    """Every method here raises KVTierError."""

    def prefetch(self, tokens: Request | object, lora_id: int | None = None, cache_salt: str | None = None, **namespace: object) -> None:
        """Raise a prompt's blocks towards the primary level ahead of its request."""
        raise _missing("prefetch", "admit the request early: its reads overlap with other requests' steps")

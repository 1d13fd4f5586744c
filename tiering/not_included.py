"""Public methods that later versions fill in. They exist so that code written against the contract says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import KVTierError
from kvtier.tiering.ledger.request import Request


def _missing(name: str, instead: str) -> KVTierError:
    return KVTierError(f"{name} is not included yet; {instead}")


class NotIncludedYet:
    """Every method here raises KVTierError."""

    def reorder_beams(self, request_id: int, parents: Sequence[int]) -> None:
        """Let each beam continue its parent's blocks."""
        raise _missing("reorder_beams", "use beam_width=1")

    def prefetch(self, tokens: Request | object, lora_id: int | None = None, cache_salt: str | None = None, **namespace: object) -> None:
        """Raise a prompt's blocks towards the primary level ahead of its request."""
        raise _missing("prefetch", "admit the request early: its reads overlap with other requests' steps")

    def request_block_budget(self, request_id: int) -> int:
        """Blocks that a request may still take."""
        raise _missing("request_block_budget", "use remaining_blocks_to_completion and num_free_blocks")

    def probe_prefix_tokens(self, request: Request) -> int:
        """Reusable prefix tokens, for routers."""
        raise _missing("probe_prefix_tokens", "use match(request).tokens_by_level, which has no side effect either")

    def beneficial_to_skip(self, request: Request, contributed_keys: Sequence[object]) -> bool:
        """Whether waiting lets the request reuse what an active one is computing."""
        raise _missing("beneficial_to_skip", "compare match(request).first_new_key with those of the active requests")

    def fit_token_budget(self, request: Request, num_tokens: int) -> int:
        """Trim a chunk when less was reusable than estimated."""
        raise _missing("fit_token_budget", "use the prepopulated_tokens of the admission")

"""``TierStore``: the tier for engines that own their GPU pool (design: two ways to attach). Not included yet.

``TierIndex`` (beside the scheduler) and ``TierWorker`` (beside the pages) get their signatures with the vLLM adapter. The names
are here so that code which imports them says what is missing instead of failing on the import.
"""

from __future__ import annotations

from kvtier.errors import KVTierError


class TierIndex:
    """Ledger, manifest and NVMe I/O in the scheduler's process. Raises KVTierError: not included yet."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise KVTierError("TierIndex is not included yet; an engine whose KV pool can be ours attaches through KVCacheManager")


class TierWorker:
    """Copies between an engine's pages and the shared host arena. Raises KVTierError: not included yet."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise KVTierError("TierWorker is not included yet; an engine whose KV pool can be ours attaches through KVCacheManager")

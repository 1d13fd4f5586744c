"""``AttachedLoops``: managers with an attached model and a serving loop, each checked at its end, for the tests of the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier import KVCacheManager, TierConfig
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import layout_of

TOKENS_PER_BLOCK = 4


class AttachedLoops:
    """Opens loops over three levels. At the end of each nothing is held, and every invariant stands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[tuple[KVCacheManager, Any]] = []

    def start(self, model: Any, attach: Callable[[KVCacheManager], Any], name: str, *, dtype: Any = None,
              watch: Callable[[Any], Any] = lambda attached: attached, loop_options: Mapping[str, Any] | None = None,
              **settings: Any) -> ServingLoop:
        """``attach`` makes the attached model, ``watch`` what the loop gets of it. ``settings`` are the manager's, with a folder."""
        layout = layout_of(model.config, dtype=dtype or model.dtype, tokens_per_block=TOKENS_PER_BLOCK)
        config = TierConfig(**{"nvme_directory": self._folder / "nvme", "nvme_free_space_reserve": "0B", **settings})
        cache = KVCacheManager(layout, config, model=name)
        attached = attach(cache)
        self._opened.append((cache, attached))
        return ServingLoop(cache, watch(attached), **{"chunk_size": 16, **(loop_options or {})})

    def end(self, loop: ServingLoop) -> None:
        """Close a loop and its manager before the test is over, for the next one in the same folder."""
        loop.close()
        self._close(next(cache for cache, _ in self._opened if cache is loop.cache))

    def close(self) -> None:
        """All that are still open."""
        while self._opened:
            self._close(self._opened[0][0])

    def _close(self, cache: KVCacheManager) -> None:
        attached = next(attached for other, attached in self._opened if other is cache)
        self._opened = [pair for pair in self._opened if pair[0] is not cache]
        attached.detach()
        cache.verify()
        stats = cache.stats()
        assert stats.leases == stats.sequences == 0
        cache.close(timeout=10)

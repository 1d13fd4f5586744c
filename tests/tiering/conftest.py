"""Caches of a few small blocks with real bytes, for the toy engine that drives them.

Nothing here is imported before it is used: the rooms below the manager have their tests in folders beside.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier

if TYPE_CHECKING:
    from kvtier import KVCacheManager, KVLayout

MODEL = "toy@1:0123abcd"


sys.path.append(str(Path(__file__).parent))  # so that test modules can import toy_engine: importlib mode puts no folder there


@pytest.fixture
def layout() -> KVLayout:
    return kvtier.KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)


@pytest.fixture
def store_directory(tmp_path: Path) -> Path:
    """Where ``make_cache`` has its NVMe level."""
    return tmp_path / "store"


@pytest.fixture
def make_cache(layout: KVLayout, store_directory: Path) -> Iterator[Callable[..., KVCacheManager]]:
    """``make_cache(primary=8, secondary=4, nvme=0, **settings)``: sizes in blocks, or as written; closed when the test ends."""
    made: list[KVCacheManager] = []

    def in_blocks(size: Any) -> Any:
        return f"{size} blocks" if isinstance(size, int) else size

    def make(primary: Any = 8, secondary: Any = 4, nvme: Any = 0, *, model: str | None = MODEL, layout: KVLayout = layout,
             **settings: Any) -> KVCacheManager:
        settings = {"nvme_directory": store_directory if nvme else None, "nvme_free_space_reserve": "1MiB", "max_seq_len": 512,
                    "debug_checks": True, **settings}
        config = kvtier.TierConfig(primary=in_blocks(primary), secondary=in_blocks(secondary), nvme=in_blocks(nvme), **settings)
        cache = kvtier.KVCacheManager(layout, config, device="cpu", model=model)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def warm_cache(make_cache: Callable[..., KVCacheManager]) -> Callable[..., KVCacheManager]:
    """``warm_cache(*rules, primary=8, secondary=4, nvme=16)``: starts with PROMPT and OTHER on NVMe, and with these faults, or with a
    ``gate``, which has rules of its own."""
    from toy_engine import OTHER, PROMPT, ToyEngine

    from kvtier.io.faults import FaultRule, Faults

    def make(*rules: FaultRule, primary: int = 8, secondary: int = 4, nvme: int = 16, gate: Faults | None = None) -> KVCacheManager:
        cache = make_cache(8, 4, nvme)
        engine = ToyEngine(cache)
        engine.serve(kvtier.Request(1, PROMPT))
        engine.serve(kvtier.Request(2, OTHER))
        assert cache.flush()
        cache.close()
        return make_cache(primary, secondary, nvme, faults=gate or Faults(rules))

    return make


@pytest.fixture
def no_failed_callbacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Worker threads report bugs of ours as logged exceptions; a test that saw one fails."""
    yield
    errors = [record for record in caplog.get_records("call") if record.exc_info and record.levelno >= logging.ERROR]
    assert not errors, [record.getMessage() for record in errors]

"""An opening that Ctrl-C or want of memory cuts short gives everything back: directory, shared memory and threads. The same process can try
again at once."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupting import TIERING, cut_short
from tier_rig import keys, on_nvme, until

import kvtier
from kvtier.errors import ConfigError
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import tier_store
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_store import TierStore

PAGE_BYTES = 96


def threads_beside(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize(("module", "step"), [("core.py", 7), ("locked_tier.py", 1), ("ledger/file_level.py", 1), ("transfer.py", 5),
                                              ("file_workers.py", 1), ("manager.py", 3)])
def test_a_cache_whose_opening_is_cut_short_can_be_opened_again(make_cache: Callable[..., kvtier.KVCacheManager], module: str, step: int,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    def opened() -> None:
        made.append(make_cache(8, 4, 16))

    made: list[kvtier.KVCacheManager] = []
    make_cache(8, 4, 16).close()
    before = set(threading.enumerate())
    place = 0
    while cut_short(opened, place, room=TIERING / module):
        assert not made
        place += step
    made.pop().close()
    assert place > step
    until(lambda: not threads_beside(before))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def open_store(directory: Path, engine_id: str) -> TierStore:
    return TierStore(PageLayout([PageGroup(PAGE_BYTES)]), TierConfig(secondary="6 blocks", **on_nvme(directory)), model="m@1:0",
                     engine_id=engine_id)


@pytest.mark.parametrize("module", ["tier_store.py", "tier_index_core.py", "tier_pulse.py"])
def test_a_store_whose_opening_is_cut_short_can_be_opened_again(tmp_path: Path, module: str) -> None:
    def opened() -> None:
        made.append(open_store(tmp_path, engine_id))

    made: list[TierStore] = []
    engine_id = f"cut-{uuid.uuid4().hex[:12]}"
    open_store(tmp_path, engine_id).close()
    before = set(threading.enumerate())
    place = 0
    while cut_short(opened, place, room=TIERING / module):
        assert not made
        assert not [name for name in os.listdir("/dev/shm") if engine_id in name]
        place += 1
    made.pop().close()
    assert place
    until(lambda: not threads_beside(before))


def test_a_store_whose_memory_is_not_its_index_s_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the index reads from NVMe would lie elsewhere, and zeros be served."""
    shared_arena = tier_store.SharedArena

    def removed(shape: Any, rank: int) -> Any:
        for path in Path("/dev/shm").glob(f"*{shape.engine_id}*"):
            path.unlink()
        return shared_arena(shape, rank=rank)

    engine_id = f"cut-{uuid.uuid4().hex[:12]}"
    with monkeypatch.context() as patch:
        patch.setattr(tier_store, "SharedArena", removed)
        with pytest.raises(ConfigError, match="somebody has removed the file"):
            open_store(tmp_path, engine_id)
    assert not [name for name in os.listdir("/dev/shm") if engine_id in name]
    with open_store(tmp_path, engine_id) as store:
        assert store.count(keys(2)) == 0

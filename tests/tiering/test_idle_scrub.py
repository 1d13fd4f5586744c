"""While the tier runs and moves nothing, bad blocks are found before anybody asks for them, and good ones are left in peace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_engine import OTHER, PROMPT, ToyEngine, flip_stored_bit, wait_until

from kvtier import KVCacheManager, KVLayout, Request, TierConfig
from kvtier.errors import ConfigError
from kvtier.io.scrub import saved_place
from kvtier.pools.pool_index import NVME
from kvtier.tiering import idle_scrub
from kvtier.tiering.idle_scrub import IdleScrub

MakeCache = Callable[..., KVCacheManager]


@pytest.fixture
def scrubbed(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], KVCacheManager]:
    """A cache with PROMPT and OTHER on NVMe only, scrubbed at this rate; ``before`` is called while no process has the store."""
    monkeypatch.setattr(idle_scrub, "REST_SECONDS", 0.01)

    def make(rate: str | None, before: Callable[[], None] = lambda: None) -> KVCacheManager:
        cache = make_cache(8, 4, 16)
        engine = ToyEngine(cache)
        engine.serve(Request(1, PROMPT))
        engine.serve(Request(2, OTHER))
        assert cache.flush()
        cache.close()
        before()
        return make_cache(8, 4, 16, nvme_scrub_bandwidth=rate)

    return make


def passes(cache: KVCacheManager) -> int:
    assert cache.scrub is not None
    return cache.scrub.verified


def test_a_bad_block_is_found_before_anybody_asks_for_it(scrubbed, layout: KVLayout, store_directory: Path) -> None:
    cache = scrubbed("1GiB/s", lambda: flip_stored_bit(store_directory, layout, 0))
    wait_until(lambda: cache.stats().quarantined == 1)
    assert cache.store is not None
    assert cache.store.quarantined() == [(0, 0)]
    assert cache.stats().checksum_failures == 1
    wait_until(lambda: passes(cache) > 12)
    assert cache.stats().quarantined == 1  # the good ones are good
    cache.verify()
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    engine.serve(Request(2, OTHER))
    stats = cache.stats()
    assert (stats.checksum_failures, stats.leases) == (1, 0)  # and no load met it
    cache.verify()


def test_scrubbing_counts_no_hit_and_leaves_the_order_of_eviction_alone(scrubbed, make_cache: MakeCache) -> None:
    cache = scrubbed(None)
    ToyEngine(cache).serve(Request(1, PROMPT))  # read from NVMe: hits, which put these blocks behind the others at the next start
    cache.close()
    cache = make_cache(8, 4, 16, nvme_scrub_bandwidth="1GiB/s")
    with cache.locked() as ledger:
        before = [block.index for block in ledger.allocators[0].queues.coldest(NVME, 0, 100)]
    assert before != sorted(before)
    assert cache.store is not None
    hits = sum(block.hits for block in cache.store.stored_blocks())
    wait_until(lambda: passes(cache) > 3 * len(before))
    with cache.locked() as ledger:
        assert [block.index for block in ledger.allocators[0].queues.coldest(NVME, 0, 100)] == before
    assert sum(block.hits for block in cache.store.stored_blocks()) == hits > 0
    cache.verify()


def test_a_slot_that_holds_something_else_by_now_is_not_condemned(scrubbed) -> None:
    cache = scrubbed(None)
    assert cache.store is not None
    [first, *_] = sorted(cache.store.stored_blocks())
    scrub = IdleScrub(cache, cache.store, 1.0)
    try:
        scrub._condemn((first.group, first.slot), b"another key".ljust(32), "was bad a moment ago")
        scrub._condemn((first.group, first.slot), first.key, "was bad a moment ago")  # and is not when it is read again
    finally:
        scrub.close(5.0)
    assert cache.stats().quarantined == 0
    cache.verify()


def test_nothing_is_verified_while_something_is_moved(scrubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = scrubbed(None)
    assert cache.store is not None
    monkeypatch.setattr(cache.transfers, "idle", lambda timeout: False)
    scrub = IdleScrub(cache, cache.store, 1e9)
    time.sleep(0.1)
    scrub.close(5.0)
    assert scrub.verified == 0
    monkeypatch.undo()


def test_closing_stops_it_at_once_and_the_next_start_goes_on_there(scrubbed, store_directory: Path) -> None:
    cache = scrubbed("8B/s")  # a block and its header in a quarter of an hour
    assert cache.store is not None
    assert cache.scrub is not None
    first = sorted((block.group, block.slot) for block in cache.store.stored_blocks())
    wait_until(lambda: cache.scrub._scrubber._next_start > 0.0)
    cache.close()
    assert saved_place(store_directory) in first
    wait_until(lambda: not cache.scrub._thread.is_alive())


@pytest.mark.parametrize("rate", ["fast", "50MiB", "0B/s", 7])
def test_a_rate_that_is_none_is_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match="nvme_scrub_bandwidth="):
        TierConfig(nvme_scrub_bandwidth=rate)

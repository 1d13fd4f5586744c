"""Deciding to load, in a cache with real bytes and a real store: what is left to recompute, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from toy_engine import OTHER, PROMPT, MakeCache, ToyEngine, WarmCache, delays, fails

from kvtier import KVLayout, LayerSpec, Level, Request, RequestError
from kvtier.io.faults import FaultOperation
from kvtier.pools.pool_index import NVME, PRIMARY
from kvtier.tiering.core import TierCore
from kvtier.tiering.ledger.admission import AdmissionPlan

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

SLOW_READS = delays(FaultOperation.READ, 0.02)


def be_fast(cache: TierCore) -> None:
    """An engine that no drive keeps up with."""
    for _ in range(3):
        cache.report_prefill(1_000_000, 1e-3)


def be_slow(cache: TierCore) -> None:
    """An engine that takes a second for each token."""
    for _ in range(3):
        cache.report_prefill(100, 100.0)


def know(cache: TierCore, level: int, latency: float = 0.0, seconds_per_byte: float = 1e-6) -> None:
    """As if loads from this level had taken so long."""
    route = cache._load_meter.routes[level, PRIMARY]
    for size in (1000, 2000, 4000):
        route.model.observe(size, latency + size * seconds_per_byte)


def test_without_reports_a_prefix_is_loaded_as_ever(warm_cache: WarmCache) -> None:
    cache = warm_cache(SLOW_READS)
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12
    loading = cache.stats().loading
    assert (loading.undecided, loading.tokens_left) == (1, 0)
    assert loading.speeds[Level.NVME, Level.PRIMARY].bursts == 1
    assert loading.load_seconds >= 0.02


def test_where_computing_is_faster_the_prefix_is_left(warm_cache: WarmCache) -> None:
    cache = warm_cache(SLOW_READS)
    be_fast(cache)
    know(cache, NVME)
    engine = ToyEngine(cache)
    admission, = engine.admit(Request(1, PROMPT))
    assert (admission.prepopulated_tokens, admission.tokens_left_to_recompute) == (0, 12)
    assert cache.wait_ready(1) == 0
    engine.forward([1])
    engine.remove(1)
    stats = cache.stats()
    assert (stats.loading.recomputed, stats.loading.tokens_left) == (1, 12)
    assert stats.loading.last is not None
    assert stats.loading.last.estimated_seconds_none is not None
    assert stats.loading.last.estimated_seconds_all is not None
    assert stats.loading.last.estimated_seconds_none < stats.loading.last.estimated_seconds_all
    assert stats.onboard_blocks == {}
    cache.verify()


def test_where_loading_is_faster_it_is_loaded(warm_cache: WarmCache) -> None:
    cache = warm_cache(SLOW_READS)
    be_slow(cache)
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12
    assert cache.stats().loading.loaded == 1


def test_what_was_computed_again_is_found_on_the_primary_level(warm_cache: WarmCache) -> None:
    """Otherwise a popular prefix would be computed for every request."""
    cache = warm_cache()
    be_fast(cache)
    know(cache, NVME)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)
    assert cache.stats().nvme.backing_blocks == 3  # what was on NVMe is not written again
    cache.verify()
    assert engine.serve(Request(2, PROMPT)) == 12
    assert cache.stats().onboard_blocks == {}
    cache.verify()


def test_a_running_sequence_gives_its_blocks_to_the_tree_and_goes_on(warm_cache: WarmCache) -> None:
    cache = warm_cache(primary=16)
    be_fast(cache)
    know(cache, NVME)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT), Request(2, OTHER))
    engine.learn(1)
    engine.learn(2)
    engine.forward([1, 2])
    slots = [cache.block(block_id).slot for block_id in cache.block_ids(1)]
    cache.store_context(1)
    assert [cache.block(block_id).slot for block_id in cache.block_ids(1)] == slots
    cache.verify()
    for _ in range(6):
        engine.sample(1)
        engine.forward([1])  # checks every byte
    cache.verify()
    assert cache.add_sequence(Request(3, PROMPT)).prepopulated_tokens == 12
    for request_id in (1, 2, 3):
        cache.remove_sequence(request_id)
    cache.verify()
    assert cache.stats().leases == 0


def test_two_sequences_that_compute_the_same_again_end_well(warm_cache: WarmCache) -> None:
    cache = warm_cache()
    be_fast(cache)
    know(cache, NVME)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT), Request(2, PROMPT))
    for request_id in (1, 2):
        assert engine.learn(request_id) == 0
    engine.forward([1, 2])
    for request_id in (1, 2):
        cache.store_context(request_id)
        cache.verify()
    engine.forward([1, 2])
    for request_id in (2, 1):
        engine.remove(request_id)
        cache.verify()
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)


def test_blocks_that_a_lease_holds_keep_their_place(warm_cache: WarmCache) -> None:
    cache = warm_cache()
    be_fast(cache)
    know(cache, NVME)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    lease = cache.pin(1)
    cache.store_context(1)
    cache.verify()
    assert [cache.block(block_id).ref_count for block_id in lease.block_ids] == [2, 2, 2, 2]
    engine.forward([1])
    engine.remove(1)
    lease.release()
    cache.verify()
    assert cache.stats().leases == 0


def test_without_backings_the_slow_slot_is_given_back(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16, keep_backing=False)
    be_fast(cache)
    know(cache, NVME)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)
    assert (cache.stats().nvme.backing_blocks, cache.stats().nvme.evictable_blocks) == (0, 0)
    cache.verify()
    cache.truncate(PROMPT, 0)
    cache.close()
    assert make_cache(8, 4, 16).match(PROMPT).tokens_by_level == (0, 0, 0), "what was forgotten is not found by the next process"


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_any_front_of_a_prefix_may_be_loaded(warm_cache: WarmCache, kept: int) -> None:
    class Front:
        def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
            return min(kept, plans[-1].num_matched)

    cache = warm_cache()
    with cache.locked() as ledger:
        ledger.loading = Front()
    engine = ToyEngine(cache)
    admission, = engine.admit(Request(1, PROMPT))
    assert (admission.prepopulated_tokens, admission.tokens_left_to_recompute) == (4 * kept, 12 - 4 * kept)
    assert engine.learn(1) == 4 * kept
    cache.verify()
    engine.forward([1])  # checks every byte that was loaded
    engine.remove(1)
    cache.verify()
    assert cache.match(PROMPT).tokens_by_level == (12, 0, 0)
    assert engine.serve(Request(2, PROMPT)) == 12


def test_always_means_always(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16, load_decision="always")
    be_fast(cache)
    know(cache, NVME)
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12
    assert cache.stats().loading.last is None


def test_a_failed_read_does_not_count_as_fast(warm_cache: WarmCache) -> None:
    cache = warm_cache(fails(FaultOperation.READ, count=100))
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 0
    assert cache.stats().loading.speeds[Level.NVME, Level.PRIMARY].bursts == 0


def test_a_chunk_is_reported_by_its_positions(make_cache: MakeCache) -> None:
    cache = make_cache()
    for start in range(0, 4096, 512):
        cache.report_prefill(range(start, start + 512), 512 * 1e-4 + 1e-7 * 512 * (2 * start + 513) / 2)
    loading = cache.stats().loading
    assert loading.prefill_seconds_per_token == pytest.approx(1e-4, rel=0.01)
    assert loading.prefill_seconds_per_pair == pytest.approx(1e-7, rel=0.01)
    assert loading.prefill_seconds == pytest.approx(loading.estimated_prefill_seconds, rel=0.5)
    for positions in (range(0, 10, 2), range(-5, 5), range(5, 5)):
        with pytest.raises(RequestError):
            cache.report_prefill(positions, 1.0)


def test_layers_with_a_window_are_loaded_as_a_whole_or_not_at_all(make_cache: MakeCache) -> None:
    layout = KVLayout(layers=[LayerSpec.attention(num_kv_heads=1, head_dim=8), LayerSpec.attention(num_kv_heads=1, head_dim=8, window=8)],
                      dtype="float32", tokens_per_block=4)
    prompt = list(range(1, 34))
    cache = make_cache(16, 8, 32, layout=layout)
    cache.add_sequence(Request(1, prompt))
    cache.mark_computed(1, len(prompt))
    cache.remove_sequence(1)
    assert cache.flush()
    cache.close()
    cache = make_cache(16, 8, 32, layout=layout)
    found = cache.match(prompt).reusable_tokens
    assert found > 0
    be_fast(cache)
    know(cache, NVME)
    admission = cache.add_sequence(Request(2, prompt))
    assert (admission.prepopulated_tokens, admission.tokens_left_to_recompute) == (0, found)
    cache.mark_computed(2, len(prompt))
    cache.remove_sequence(2)
    cache.verify()
    assert cache.match(prompt).tokens_by_level[NVME] == 0

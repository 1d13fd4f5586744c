"""Manager and worker of the vLLM adapter over a real ``TierIndex`` and ``TierWorker``, called as vLLM calls them.

Where vLLM is not installed, the few names that the classes are built on come from ``vllm_double``.
"""

from __future__ import annotations

import logging
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import until

from kvtier.errors import TransferError
from kvtier.io.fault_text import parse_faults
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.tier_index import TierIndex
from kvtier.tiering.tier_worker import TierWorker

sys.path.append(str(Path(__file__).parent))
from vllm_double import in_place_of_vllm, is_installed

PAGES = 24
PER_CHUNK = 2
SECONDS = 20.0


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> Iterator[None]:
    if is_installed():
        yield
    else:
        with in_place_of_vllm():
            yield


class Rig:
    """One engine's tier with two groups of pages, and both of the adapter's classes."""

    def __init__(self, group_ids: tuple[int, ...] = (0, 3), faults: str | None = None, clock: Callable[[], float] | None = None,
                 **settings: Any) -> None:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, ScheduleEndContext

        from kvtier.tiering.attach.vllm_manager import TieredManager
        from kvtier.tiering.attach.vllm_worker import TieredWorker
        self.context, self.spec, self.state = ReqContext, GPULoadStoreSpec, LookupResult
        self.end_of_step = ScheduleEndContext
        layout = PageLayout([PageGroup([64, 32], PER_CHUNK), PageGroup(48, PER_CHUNK)])
        config = TierConfig(secondary="6 blocks", write_ahead_share=1.0, **settings)
        self.index = TierIndex(layout, config, engine_id=f"adapter-{uuid.uuid4().hex}", model="m@1:2", lookup_timeout=5.0)
        generator = torch.Generator().manual_seed(0)
        self.tensors = [[torch.randint(-128, 127, (PAGES, width), dtype=torch.int8, generator=generator) for width in widths]
                        for widths in ((64, 32), (48,))]
        self.tier_worker = TierWorker(self.index.plan, "cpu", 0, self.tensors, faults=parse_faults(faults) if faults else None)
        self.worker = TieredWorker(self.tier_worker, PER_CHUNK, 30.0, **({"clock": clock} if clock else {}))
        self.manager = TieredManager(self.index, group_ids, takes_events=True)
        self.group_ids = group_ids
        self.next_job = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def key(self, number: int, group: int = 0) -> bytes:
        return random.Random(number).randbytes(32) + self.group_ids[group].to_bytes(4, "big")

    def request(self, name: str, **parameters: Any) -> Any:
        context = self.context(name, parameters or None)
        self.manager.on_new_request(context)
        return context

    def end(self, context: Any) -> None:
        self.manager.on_request_finished(context)

    def store(self, context: Any, keys: list[bytes], pages: list[int], sizes: list[int], firsts: list[int]) -> list[bytes]:
        """Store as vLLM does; the keys that were taken."""
        output = self.manager.prepare_store(keys, context)
        self.next_job += 1
        self.worker.submit_store(self.next_job, self.spec(pages, sizes, firsts), output.store_spec)
        self.finish(self.next_job)
        self.manager.complete_store(set(output.keys_to_store), context)
        return list(output.keys_to_store)

    def load(self, context: Any, keys: list[bytes], pages: list[int], sizes: list[int], firsts: list[int]) -> None:
        transfer = self.manager.prepare_load(keys, context)
        self.next_job += 1
        self.worker.submit_load(self.next_job, transfer, self.spec(pages, sizes, firsts))
        self.finish(self.next_job)
        self.manager.complete_load(set(keys), context)

    def finish(self, job: int) -> None:
        self.worker.wait({job})
        results = self.worker.get_finished()
        assert (job, True) in [(result.job_id, result.success) for result in results]

    def look(self, context: Any, key: bytes) -> Any:
        return self.manager.lookup(key, context)

    def held(self) -> tuple[int, int, int]:
        self.index.verify()
        stats = self.index.stats()
        return stats.leases, stats.jobs, stats.requests


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_chunks_of_two_groups_come_back_byte_by_byte_also_from_the_middle_of_a_chunk(rig: Rig) -> None:
    first = rig.request("first")
    keys = [rig.key(0), rig.key(1), rig.key(2, group=1)]
    assert rig.store(first, keys, [4, 5, 6, 7, 8, 9], [4, 2], [0, 4]) == keys
    before = [[tensor.clone() for tensor in group] for group in rig.tensors]
    second = rig.request("second")
    assert {rig.look(second, key) for key in keys} == {rig.state.HIT}
    rig.load(second, keys, [11, 12, 13, 14], [3, 1], [1, 4])  # starts in the middle; of the last chunk only one page
    for to, source in ((11, 5), (12, 6), (13, 7)):
        for now, then in zip(rig.tensors[0], before[0], strict=True):
            assert torch.equal(now[to], then[source])
    assert torch.equal(rig.tensors[1][0][14], before[1][0][8])
    rig.end(first)
    rig.end(second)
    assert rig.held() == (0, 0, 0)


def test_a_key_is_missed_pending_and_hit(rig: Rig) -> None:
    context = rig.request("one")
    assert rig.look(context, rig.key(0)) is rig.state.MISS
    output = rig.manager.prepare_store([rig.key(0)], context)
    assert rig.look(rig.request("two"), rig.key(0)) is rig.state.HIT_PENDING
    rig.worker.submit_store(1, rig.spec([0, 1], [2, 0], [0, 0]), output.store_spec)
    rig.finish(1)
    rig.manager.complete_store({rig.key(0)}, context)
    assert rig.manager.has_pending_work(), "the store is to be written to NVMe, which a step begins"
    rig.manager.on_schedule_end(rig.end_of_step((), ()))
    assert not rig.manager.has_pending_work()
    assert rig.look(rig.request("three"), rig.key(0)) is rig.state.HIT
    assert rig.manager.get_load_source(rig.key(0), context).value == "host"


def test_nothing_is_ever_refused_with_none_and_what_fits_is_stored_front_first(rig: Rig) -> None:
    context = rig.request("one")
    keys = [rig.key(number) for number in range(9)]
    output = rig.manager.prepare_store(keys, context)
    assert output.keys_to_store == keys[:6]
    again = rig.manager.prepare_store(keys, rig.request("two"))
    assert again.keys_to_store == []


def test_pages_that_do_not_add_up_are_a_store_left_out_not_an_end_of_the_engine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    context = rig.request("one")
    output = rig.manager.prepare_store([rig.key(0), rig.key(1), rig.key(2, group=1)], context)
    with caplog.at_level(logging.WARNING):
        assert rig.worker.submit_store(5, rig.spec([1, 2, 3, 4, 5], [3, 2], [0, 0]), output.store_spec)
    assert "left out" in caplog.text
    rig.finish(5)
    rig.manager.complete_store(set(output.keys_to_store), context)
    assert {rig.look(rig.request("two"), key) for key in output.keys_to_store} == {rig.state.MISS}
    rig.end(context)
    rig.manager.on_request_finished(rig.context("two"))
    assert rig.held() == (0, 0, 0)
    assert rig.index.stats().secondary.free_blocks == rig.index.stats().secondary.max_blocks, "all slots are back in use"


def test_a_failed_store_is_a_miss_and_a_failed_load_is_made_again() -> None:
    rig = Rig(faults="secondary.copy.eio*1, primary.copy.eio*2")
    context = rig.request("one")
    rig.store(context, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    assert rig.look(rig.request("two"), rig.key(0)) is rig.state.MISS
    rig.store(context, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    reader = rig.request("three")
    assert rig.look(reader, rig.key(0)) is rig.state.HIT
    transfer = rig.manager.prepare_load([rig.key(0)], reader)
    rig.worker.submit_load(9, transfer, rig.spec([7, 8], [2, 0], [0, 0]))
    found: list[Any] = []
    while not found:
        rig.tier_worker.wait([transfer.parts[0].job_id], SECONDS)
        found = rig.worker.get_finished()
    assert torch.equal(rig.tensors[0][0][7:9], rig.tensors[0][0][0:2])
    rig.close()


def test_a_load_that_keeps_failing_ends_the_engine_with_a_reason() -> None:
    rig = Rig(faults="primary.copy.eio")
    context = rig.request("one")
    rig.store(context, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    assert rig.look(context, rig.key(0)) is rig.state.HIT
    transfer = rig.manager.prepare_load([rig.key(0)], context)
    rig.worker.submit_load(9, transfer, rig.spec([7, 8], [2, 0], [0, 0]))
    rig.tier_worker.wait([transfer.parts[0].job_id], SECONDS)
    with pytest.raises(TransferError, match="failed 3 times"):
        rig.worker.get_finished()
    rig.close()


@pytest.mark.parametrize("failures", [2, 3])
def test_a_load_that_fails_in_a_reset_is_made_again_or_ends_the_engine_for_its_request_goes_on(failures: int) -> None:
    rig = Rig(faults=f"primary.copy.eio*{failures}")
    context = rig.request("one")
    rig.store(context, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    assert rig.look(context, rig.key(0)) is rig.state.HIT
    transfer = rig.manager.prepare_load([rig.key(0)], context)
    rig.worker.submit_load(9, transfer, rig.spec([7, 8], [2, 0], [0, 0]))
    rig.manager.reset_cache()
    rig.worker.wait({9})
    if failures == 2:
        assert [result.job_id for result in rig.worker.get_finished()] == [9]
        assert torch.equal(rig.tensors[0][0][7:9], rig.tensors[0][0][0:2])
    else:
        with pytest.raises(TransferError, match="failed 3 times"):
            rig.worker.get_finished()
    rig.close()


def test_a_store_that_does_not_end_is_given_up_and_reported() -> None:
    time = [0.0]
    rig = Rig(faults="secondary.copy.hang*1", clock=lambda: time[0])
    faults = rig.tier_worker._faults
    context = rig.request("one")
    output = rig.manager.prepare_store([rig.key(0)], context)
    rig.worker.submit_store(1, rig.spec([0, 1], [2, 0], [0, 0]), output.store_spec)
    assert rig.worker.get_finished() == []
    time[0] = 31.0
    assert [result.job_id for result in rig.worker.get_finished()] == [1]
    rig.manager.complete_store({rig.key(0)}, context)
    assert rig.look(rig.request("two"), rig.key(0)) is rig.state.MISS
    until(lambda: faults.counts()["secondary.copy.hang"] == 1)
    faults.end_hangs()
    assert rig.tier_worker.wait([output.store_spec.parts[0].job_id], SECONDS)
    assert rig.worker.get_finished() == [], "it is not reported twice"
    assert rig.look(rig.request("three"), rig.key(0)) is rig.state.MISS
    rig.close()


def test_after_a_reset_nothing_is_found_and_late_reports_change_nothing(rig: Rig) -> None:
    first = rig.request("first")
    rig.store(first, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    reader = rig.request("reader")
    assert rig.look(reader, rig.key(0)) is rig.state.HIT
    rig.manager.prepare_load([rig.key(0)], reader)
    output = rig.manager.prepare_store([rig.key(1)], first)
    rig.worker.submit_store(7, rig.spec([2, 3], [2, 0], [0, 0]), output.store_spec)
    rig.manager.reset_cache()
    rig.worker.wait({7})
    rig.manager.complete_store({rig.key(1)}, first)
    rig.manager.complete_load({rig.key(0)}, reader)
    assert {rig.look(rig.request("after"), rig.key(number)) for number in range(2)} == {rig.state.MISS}
    assert rig.store(rig.request("later"), [rig.key(0)], [0, 1], [2, 0], [0, 0]) == [rig.key(0)]


def test_a_request_that_ran_through_a_reset_stores_nothing_until_it_is_computed_again(rig: Rig) -> None:
    """Its keys and values may be of the weights that the reset was for."""
    running = rig.request("running")
    rig.manager.reset_cache()
    assert rig.manager.prepare_store([rig.key(0)], running).keys_to_store == []
    assert rig.look(rig.request("after"), rig.key(0)) is rig.state.MISS
    assert rig.look(running, rig.key(0)) is rig.state.MISS  # pre-empted: it starts again with what is found now
    assert rig.store(running, [rig.key(0)], [0, 1], [2, 0], [0, 0]) == [rig.key(0)]


@pytest.mark.parametrize("end", ["load of the other group", "computes without"])
def test_what_a_request_found_and_does_not_load_is_not_held_while_it_runs(rig: Rig, end: str) -> None:
    """vLLM looks up all groups, and loads of each what it lacks: of some nothing, or nothing at all where one group misses."""
    keys = [rig.key(0), rig.key(1, group=1)]
    writer = rig.request("writer")
    rig.store(writer, keys, [0, 1, 2, 3], [2, 2], [0, 0])
    rig.end(writer)
    reader = rig.request("reader")
    assert [rig.look(reader, key) for key in keys] == [rig.state.HIT] * 2
    if end == "computes without":
        rig.manager.on_schedule_end(rig.end_of_step(new_req_ids=["somebody else"], preempted_req_ids=()))
        assert rig.held() == (2, 0, 1), "it still waits"
        rig.manager.on_schedule_end(rig.end_of_step(new_req_ids=["reader"], preempted_req_ids=()))
    else:
        rig.load(reader, keys[:1], [5, 6], [2, 0], [0, 0])
    assert rig.held() == (0, 0, 1)
    rig.end(reader)


def test_counters_do_not_go_back_when_the_index_breaks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus refuses a counter that is to be decreased, and that would end vLLM."""
    context = rig.request("one")
    rig.store(context, [rig.key(0)], [0, 1], [2, 0], [0, 0])
    assert rig.look(context, rig.key(0)) is rig.state.HIT
    rig.load(context, [rig.key(0)], [5, 6], [2, 0], [0, 0])
    before = rig.index.stats()
    with monkeypatch.context() as patch:
        patch.setattr(KeyLedger, "prefetch", lambda *_given: next(iter(())))
        with pytest.raises(StopIteration):
            rig.index.prefetch([rig.key(0)[:32]])
    assert rig.index.broken
    assert rig.look(rig.request("two"), rig.key(0)) is rig.state.MISS
    assert rig.manager.prepare_store([rig.key(0)], context).keys_to_store == []
    after = rig.index.stats()
    assert (after.stored_blocks, after.loaded_blocks, after.hit_blocks) == (before.stored_blocks, before.loaded_blocks, before.hit_blocks)
    assert after.refused_blocks >= before.refused_blocks
    rig.manager.on_schedule_end(rig.end_of_step(new_req_ids=(), preempted_req_ids=()))


def test_a_requests_wishes_reach_the_tier(rig: Rig) -> None:
    rig.store(rig.request("quiet", kvtier={"skip_write": True}), [rig.key(0)], [], [0, 0], [0, 0])
    rig.store(rig.request("low", kvtier={"priority": 1}), [rig.key(0)], [], [0, 0], [0, 0])
    rig.store(rig.request("usual"), [rig.key(0)], [0, 1], [2, 0], [0, 0])
    assert rig.look(rig.request("blind", kvtier={"skip_read": True}), rig.key(0)) is rig.state.MISS
    assert rig.look(rig.request("seeing"), rig.key(0)) is rig.state.HIT
    again = rig.request("seeing")  # the same name, without an end between: vLLM may do that
    assert rig.look(again, rig.key(0)) is rig.state.HIT


@pytest.mark.parametrize(("mediums", "found"), [((), "MISS"), (("CPU",), "HIT"), (("STORAGE",), "MISS"), (("CPU", "STORAGE"), "HIT")])
def test_a_request_is_served_by_the_tiers_it_names(rig: Rig, mediums: tuple[str, ...], found: str) -> None:
    from vllm.v1.kv_offload import base
    rig.store(rig.request("usual"), [rig.key(0)], [0, 1], [2, 0], [0, 0])  # there is no NVMe level
    chosen = tuple(base.Medium(medium) for medium in mediums)
    tiers = base.TierFilter(tuple(map(base.TierMatcher, chosen)) if hasattr(base, "TierMatcher") else chosen)  # the double is simpler
    context = rig.context("choosy", None, load_tier_filter=tiers)
    rig.manager.on_new_request(context)
    assert rig.look(context, rig.key(0)).name == found


def test_events_and_metrics_speak_vllms_language(rig: Rig) -> None:
    context = rig.request("one")
    rig.store(context, [rig.key(0), rig.key(1, group=1)], [0, 1, 2, 3], [2, 2], [0, 0])
    events = list(rig.manager.take_events())
    assert {(key, event.medium.value, event.removed) for event in events for key in event.keys} == {
        (rig.key(0), "CPU", False), (rig.key(1, group=1), "CPU", False)}
    assert rig.look(context, rig.key(0)) is rig.state.HIT
    rig.load(context, [rig.key(0)], [5, 6], [2, 0], [0, 0])
    stats = rig.manager.get_stats()
    values = getattr(stats, "values", None)
    if values is not None:  # of the double
        assert values["vllm:kv_offload_tiering_chunk_hits", ("0:primary",)] == 1
        assert values["vllm:kv_offload_cpu_allocation_size", ()] == [2]
        again = rig.manager.get_stats().values
        assert ("vllm:kv_offload_tiering_chunk_hits", ("0:primary",)) not in again, "counters are since the last time"

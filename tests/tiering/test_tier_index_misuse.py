"""Rules of ``TierIndex`` and ``TierWorker`` where callers race, repeat themselves or leave at a bad moment: a clear error or a miss, never
a leak, a wait without end or wrong bytes."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import PATIENCE, PLAIN, TierRig, key, keys, on_nvme, until

from kvtier import TierConfig, TierIndex, TierWorker
from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io import job_board
from kvtier.io.shared_arena import SharedArena
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import tier_index_core
from kvtier.tiering.ledger.key_finding import HIT, MISS, RETRY
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.tier_messages import KeyState
from kvtier.tiering.tier_plan import TierPlan

TWO_GROUPS = PageLayout([PageGroup(96), PageGroup(64)])


def test_a_request_that_ends_while_its_lookup_waits_leaves_no_lease() -> None:
    with TierRig() as rig:
        rig.store(keys(2))
        plan = rig.index.plan_store("writer", [key(2)])
        rig.index.begin_request("reader")
        found: list[int] = []
        waiter = threading.Thread(target=lambda: found.append(rig.look_up(keys(3))))
        waiter.start()
        until(lambda: rig.index.stats().leases == 3)
        rig.index.end_request("reader")
        waiter.join(PATIENCE)
        assert found == [0]
        rig.index.cancel_job(plan.job_id)
        assert rig.index.stats().leases == 0


def test_a_group_that_needs_nothing_does_not_put_off_the_deadline_of_another() -> None:
    ledger = KeyLedger([(2, 0), (2, 0)], TierRules(), lookup_timeout=5.0)
    ledger.plan_store(ledger.request("writer"), 1, [b"late"], 35)
    reader = ledger.request("reader")
    for step in range(10):
        ledger.set_time(1.0 + step)
        ledger.version += 1  # a busy engine: something ends in every step
        ledger.lookup(reader, 0, [b"nowhere"])
        state = ledger.lookup(reader, 1, [b"late"]).state
        assert (state == MISS) == (step >= 5), f"{step} seconds after the first answer"


def test_numbers_of_jobs_do_not_meet_on_the_board_however_old_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job_board, tier_index_core):
        monkeypatch.setattr(module, "MAX_JOBS", 4)
    with TierRig() as rig:
        old = rig.index.plan_store("old", [key(0)])
        used = {rig.store([key(1 + number % 2)], request=number).job_id for number in range(3)}
        for number in range(12):
            plan = rig.index.plan_store("new", [key(3 + number)])
            used.add(plan.job_id)
            rig.index.cancel_job(plan.job_id)
        assert all((number - old.job_id) % 4 for number in used - {-1})
        rig.index.cancel_job(old.job_id)


def test_a_full_board_is_no_room_and_no_wait_without_end_and_stores_leave_half_of_it_to_promised_loads(
        monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job_board, tier_index_core):
        monkeypatch.setattr(module, "MAX_JOBS", 4)
    with TierRig() as rig:
        rig.store([key(9)])
        plans = [rig.index.plan_store("writer", [key(number)]) for number in range(2)]
        refused = rig.index.plan_store("writer", [key(4), key(9)])
        assert (refused.job_id, refused.keys, refused.num_known, refused.num_refused) == (-1, (), 0, 2)
        loads = [rig.index.plan_load("reader", [key(9)]) for _ in range(2)]
        assert len({plan.job_id % 4 for plan in (*plans, *loads)}) == 4
        assert rig.index.plan_load("reader", [key(9)]).job_id == -1
        for plan in (*loads, plans[1]):
            rig.index.cancel_job(plan.job_id)
        again = rig.index.plan_store("writer", [key(4)])
        assert again.job_id % 4 != plans[0].job_id % 4
        for plan in (plans[0], again):
            rig.index.cancel_job(plan.job_id)


def test_an_error_of_the_clock_does_not_keep_the_lock() -> None:
    readings = [0.0]

    def clock() -> float:
        return readings[0] if readings else 1 / 0

    with TierRig(clock=clock) as rig:
        readings.clear()
        with pytest.raises(ZeroDivisionError):
            rig.index.poll()
        readings.append(1.0)
        done = threading.Thread(target=rig.index.poll, daemon=True)
        done.start()
        done.join(PATIENCE)
        assert not done.is_alive()


@pytest.mark.parametrize("number", [True, 0.0, None, [], "0", -1, 99])
def test_what_is_no_job_is_refused_and_changes_nothing(number: Any) -> None:
    with TierRig() as rig:
        plans = [rig.index.plan_store("writer", [name]) for name in keys(2)]
        with pytest.raises(RequestError, match="job_id="):
            rig.index.complete(number)
        with pytest.raises(RequestError, match="job_id="):
            rig.index.cancel_job(number)
        with pytest.raises(RequestError, match="job_id="):
            rig.index.wait([number], 0.0)
        with pytest.raises(RequestError, match="job_ids=5"):
            rig.index.wait(5, 0.0)  # type: ignore[arg-type]
        assert rig.states(keys(2)) == [KeyState.PENDING] * 2
        for plan in plans:
            rig.index.cancel_job(plan.job_id)


@pytest.mark.parametrize("failed", [b"key", "all", 5, [[]], [5], None])
def test_failed_keys_are_keys(failed: Any) -> None:
    with TierRig() as rig:
        plan = rig.index.plan_store("writer", keys(1))
        with pytest.raises(RequestError, match="failed_keys="):
            rig.index.complete(plan.job_id, failed_keys=failed)
        assert rig.states(keys(1)) == [KeyState.PENDING]
        rig.index.cancel_job(plan.job_id)


@pytest.mark.parametrize("wrong", [{"engine_id": 5}, {"engine_id": None}, {"fingerprint": b"x"}, {"model": 5}])
def test_names_are_texts(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TierIndex(PLAIN, TierConfig(secondary="2 blocks", **on_nvme(tmp_path)), **{"model": "m@1:0", "engine_id": "test"} | wrong)


def test_settings_of_the_other_kind_of_tier_are_refused_wherever_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH_BANDWIDTH", "1GiB/s")
    config = TierConfig(secondary="2 blocks")
    with pytest.raises(ConfigError, match=r"prefetch_bandwidth.*KVTIER_PREFETCH_BANDWIDTH"):
        TierPlan.of(PLAIN, config, "test")


def test_a_key_twice_in_a_prompt_is_loaded_twice_and_stored_once() -> None:
    layout = PageLayout([PageGroup(96, 2)])
    with TierRig(layout) as rig:
        a, b = keys(2)
        plan = rig.index.plan_store("writer", [a, b, a])
        assert (plan.keys, plan.positions) == ((a, b), (0, 1))
        rig.submit_store(plan, [a, b])
        rig.finish(plan.job_id)
        rig.load([a, a, b, b, a])


def test_copies_of_one_slot_into_neighbouring_pages_are_of_that_slot() -> None:
    with TierRig(PageLayout([PageGroup(1)]), num_pages=64) as rig:
        rig.store(keys(2))
        rig.load([key(0)] * 3 + [key(1)] * 2)


def test_a_closed_worker_says_so() -> None:
    with TierRig() as rig:
        plan = rig.index.plan_store("writer", keys(1))
        rig.workers[0].close()
        with pytest.raises(TransferError, match="closed"):
            rig.workers[0].submit_store(plan.job_id, 0, [0], plan.slots)
        rig.index.cancel_job(plan.job_id)


def test_rows_that_overlap_are_no_pages() -> None:
    rows = torch.zeros(100, dtype=torch.uint8).as_strided((10, 96), (0, 1))
    plan = TierPlan.of(PageLayout([PageGroup(96)]), TierConfig(secondary="2 blocks"), f"test-{uuid.uuid4().hex[:12]}")
    with pytest.raises(ConfigError, match="overlap"):
        TierWorker(plan, "cpu", 0, [[rows]])


def test_a_worker_of_a_killed_index_does_not_serve_the_next_one() -> None:
    """Its arena has a board that speaks of other jobs with the same numbers, and it may still be copying."""
    plan = TierPlan.of(PageLayout([PageGroup(96)], ranks=2), TierConfig(secondary="2 blocks"), f"test-{uuid.uuid4().hex[:12]}")
    rows = [[torch.zeros(4, 96, dtype=torch.uint8)]]
    killed = SharedArena(plan.arena)
    with TierWorker(plan, "cpu", 0, rows) as worker:
        worker.submit_store(0, 0, [0], [0])
        assert worker.wait([0], PATIENCE)
        killed.close()  # as the kernel does: without unlinking
        with pytest.raises(ConfigError, match="earlier index"):
            TierIndex(plan.layout, TierConfig(secondary="2 blocks"), engine_id=plan.engine_id)
    TierIndex(plan.layout, TierConfig(secondary="2 blocks"), engine_id=plan.engine_id).close()


@pytest.mark.parametrize("restarted", ["worker", "index"])
def test_a_worker_whose_arena_is_not_the_indexs_loads_nothing(restarted: str) -> None:
    """Once all have opened an arena it has no name any more. Who starts again makes another one, whose slots hold nothing of what was
    planned."""
    config = TierConfig(secondary="4 blocks")
    rows = [[torch.zeros(8, size, dtype=torch.uint8) for size in PLAIN.groups[0].tensor_page_bytes]]
    plan = TierPlan.of(PLAIN, config, f"test-{uuid.uuid4().hex[:12]}")
    worker, index = TierWorker(plan, "cpu", 0, rows), TierIndex(PLAIN, config, engine_id=plan.engine_id)
    store = index.plan_store("writer", keys(2))
    worker.submit_store(store.job_id, 0, [0, 1], store.slots)
    assert worker.wait([store.job_id], PATIENCE)
    assert index.complete(store.job_id) == 0
    if restarted == "worker":
        worker.close()
        worker = TierWorker(plan, "cpu", 0, rows)
    else:
        index.close()
        index = TierIndex(PLAIN, config, engine_id=plan.engine_id)
    assert index.lookup("reader", keys(2)).num_hits == (2 if restarted == "worker" else 0)
    load = index.plan_load("reader", keys(2))
    number, slots = (load.job_id, load.slots) if load.slots else (0, (0, 1))
    with pytest.raises(TransferError, match="no index uses"):
        worker.submit_load(number, 0, [2, 3], slots)
    assert not rows[0][0][2:].any()
    worker.close()
    index.close()


def test_reads_that_cannot_begin_are_not_remembered_for_requests_that_are_gone() -> None:
    ledger = KeyLedger([(8, 4000)], TierRules(), reads_at_once=0, lookup_timeout=5.0)
    ledger.adopt_store([(0, slot, b"%d" % slot, 35, 0.0, 0) for slot in range(4000)], [])
    for number in range(4000):
        assert ledger.lookup(ledger.request(number), 0, [b"%d" % number]).state == RETRY
        ledger.end_request(number)
        ledger.prefetch(0, [b"%d" % (number % 8)])
    assert ledger.num_wanted < 500


def test_a_lease_of_lost_content_leaves_room_for_its_successor() -> None:
    ledger = KeyLedger([(2, 1)], TierRules(), reads_at_once=0)
    ledger.adopt_store([(0, 0, b"below", 35, 0.0, 0)], [])
    writer, reader = ledger.request("writer"), ledger.request("reader")
    job, _known = ledger.plan_store(writer, 0, [b"a"], 35)
    assert job is not None
    assert ledger.lookup(reader, 0, [b"below", b"a"]).num_hits == 0, "it has two leases now, as many as there are slots"
    ledger.complete(job, [False], set())
    again, _known = ledger.plan_store(writer, 0, [b"a"], 35)
    assert again is not None
    ledger.complete(again, None, set())
    assert ledger.state(reader, 0, b"a") == HIT


def test_a_prompt_longer_than_the_host_level_does_not_push_out_its_own_head() -> None:
    with TierRig(secondary="2 blocks") as rig:
        rig.store(keys(2))
        plan = rig.index.plan_store("longer", keys(4))
        assert (plan.keys, plan.num_known, plan.num_refused) == ((), 2, 2)
        rig.load(keys(2))

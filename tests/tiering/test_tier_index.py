"""Rules of ``TierIndex`` with workers in the same process: what is stored is found and loaded byte for byte, and what is not is a miss."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from gate import Gate
from tier_rig import PLAIN, TierRig, key, keys, on_nvme, until

from kvtier import TierConfig, TierIndex, TierWorker
from kvtier.errors import KVTierError
from kvtier.io import job_board
from kvtier.io.faults import FaultOperation
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import tier_index_core
from kvtier.tiering.tier_messages import KeyState
from kvtier.types import Level

LAYOUTS = {
    "one group": PLAIN,
    "two groups, several pages to a block": PageLayout([PageGroup([512, 700], 4), PageGroup(96, 1)]),
    "three ranks": PageLayout([PageGroup([1000], 2)], ranks=3),
    "replicated": PageLayout([PageGroup([1000], 2)], ranks=2, is_replicated=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_stored_is_found_and_loaded_byte_for_byte(name: str) -> None:
    with TierRig(LAYOUTS[name]) as rig:
        for group in range(len(rig.layout.groups)):
            names = keys(4, prompt=group)
            assert rig.store(names, group).keys == tuple(names)
            plan = rig.load([*names, key(99)], group)
            assert plan.keys == tuple(names)
            assert set(plan.levels) == {Level.SECONDARY}
        rig.index.end_request("reader")
        assert rig.index.stats().leases == 0


def test_a_block_is_pending_until_it_is_reported_and_then_a_hit() -> None:
    with TierRig() as rig:
        plan = rig.index.plan_store("writer", keys(2))
        assert rig.states(keys(3)) == [KeyState.PENDING, KeyState.PENDING, KeyState.MISS]
        rig.submit_store(plan, keys(2))
        rig.workers[0].wait([plan.job_id], 10)
        assert rig.states(keys(1)) == [KeyState.PENDING], "the engine has not said so"
        rig.index.complete(plan.job_id)
        assert rig.states(keys(2)) == [KeyState.HIT, KeyState.HIT]


def test_what_is_there_is_not_stored_again() -> None:
    with TierRig() as rig:
        rig.store(keys(2))
        plan = rig.index.plan_store("other", keys(4))
        assert (plan.keys, plan.positions, plan.num_known, plan.num_refused) == (tuple(keys(4)[2:]), (2, 3), 2, 0)
        again = rig.index.plan_store("third", keys(4))
        assert (again.job_id, again.num_known) == (-1, 4), "also while it is on its way"
        rig.index.cancel_job(plan.job_id)
        assert rig.states([key(2)]) == [KeyState.MISS]


def test_a_block_that_a_rank_has_not_copied_is_a_miss_whatever_the_engine_says() -> None:
    with TierRig(LAYOUTS["three ranks"]) as rig:
        plan = rig.index.plan_store("writer", keys(2))
        pages = rig.fill(0, keys(2))
        for worker in rig.workers[:2]:
            worker.submit_store(plan.job_id, 0, pages, plan.slots)
            worker.wait([plan.job_id], 10)
        assert rig.index.complete(plan.job_id) == 2
        assert rig.states(keys(1)) == [KeyState.MISS]
        stats = rig.index.stats()
        assert (stats.abandoned_jobs, stats.secondary.used_blocks) == (1, 2), "the third rank may still be copying"
        rig.workers[2].submit_store(plan.job_id, 0, pages, plan.slots)
        rig.workers[2].wait([plan.job_id], 10)
        rig.index.poll()
        assert rig.index.stats().secondary.used_blocks == 0


def test_failed_keys_are_forgotten() -> None:
    with TierRig() as rig:
        rig.store(keys(3))
        assert rig.look_up(keys(3)) == 3
        plan = rig.index.plan_load("reader", keys(3))
        rig.workers[0].submit_load(plan.job_id, 0, [0, 1, 2], plan.slots)
        rig.workers[0].wait([plan.job_id], 10)
        assert rig.index.complete(plan.job_id, failed_keys=[key(1)]) == 1
        assert rig.look_up(keys(3)) == 1
        assert rig.states([key(2)]) == [KeyState.HIT]


def test_a_store_that_lacks_pages_is_not_served_unless_they_are_states() -> None:
    layout = PageLayout([PageGroup([512], 4), PageGroup([512], 4, is_state=True)])
    with TierRig(layout) as rig:
        for group in (0, 1):
            plan = rig.index.plan_store("writer", keys(2), group)
            rig.submit_store(plan, keys(2), skip_pages=3)
            rig.finish(plan.job_id)
        assert rig.states(keys(2), 0) == [KeyState.MISS, KeyState.HIT]
        assert rig.states(keys(2), 1) == [KeyState.HIT, KeyState.HIT]


def test_a_store_whose_last_block_is_short_serves_the_others() -> None:
    with TierRig(PageLayout([PageGroup([512], 4)])) as rig:
        plan = rig.index.plan_store("writer", keys(2))
        rig.workers[0].submit_store(plan.job_id, 0, rig.fill(0, keys(2))[:-1], plan.slots)
        assert rig.finish(plan.job_id) == 1
        assert rig.states(keys(2)) == [KeyState.HIT, KeyState.MISS]


def test_a_load_may_leave_out_the_first_pages() -> None:
    with TierRig(PageLayout([PageGroup([512, 300], 4)])) as rig:
        rig.store(keys(2))
        assert rig.look_up(keys(2)) == 2
        plan = rig.index.plan_load("reader", keys(2))
        pages = [40, 41, 42, 43, 44, 45]
        rig.workers[0].submit_load(plan.job_id, 0, pages, plan.slots, skip_pages=2)
        rig.finish(plan.job_id)
        rig.check(0, keys(2), pages, skip_pages=2)


# -- priorities and wishes ---------------------------------------------------------------------------------------------------


def test_content_of_less_worth_makes_room_and_more_worth_does_not() -> None:
    with TierRig(secondary="4 blocks") as rig:
        rig.store(keys(4), priority=60)
        assert rig.store(keys(2, prompt=1), priority=50).num_refused == 2
        assert rig.store(keys(2, prompt=2), priority="HIGH").num_refused == 0
        assert rig.look_up(keys(4)) == 2, "the tail went first"


def test_what_has_not_earned_the_host_level_is_not_stored() -> None:
    with TierRig() as rig:
        assert rig.store(keys(2), priority=34).num_refused == 2
        rig.index.begin_request("low", priority="LOW")
        assert rig.store(keys(2), request="low").job_id == -1


def test_a_request_may_read_nothing_or_write_nothing() -> None:
    with TierRig() as rig:
        rig.store(keys(2))
        rig.index.begin_request("blind", skip_read=True)
        rig.index.begin_request("mute", skip_write=True)
        assert rig.look_up(keys(2), request="blind") == 0
        assert rig.look_up(keys(2), request="mute") == 2
        assert rig.store(keys(2, prompt=1), request="mute").num_refused == 2
        assert rig.index.stats().leases == 0, "whoever stores has what it looked up"


# -- NVMe --------------------------------------------------------------------------------------------------------------------


def test_what_has_left_the_host_level_comes_back_from_nvme(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
        rig.store(keys(4))
        assert rig.index.flush(10)
        rig.store(keys(4, prompt=1))
        plan = rig.load(keys(4))
        assert set(plan.levels) == {Level.NVME}
        assert rig.index.stats().hit_blocks == (0, 0, 4)


def test_a_prefix_longer_than_the_host_level_still_hits(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
        for start in range(0, 12, 4):
            rig.store(keys(12)[start:start + 4])
            assert rig.index.flush(10)
        rig.index.end_request("writer")
        assert len(rig.load(keys(12)).keys) == 4
        assert rig.index.stats().expired_lookups == 0, "no deadline had to end it"


def test_a_request_that_others_leave_no_room_is_told_to_ask_again_and_then_that_it_is_a_miss(tmp_path: Path) -> None:
    with TierRig(index={"lookup_timeout": 0.2}, **on_nvme(tmp_path, secondary="4 blocks")) as rig:
        rig.store(keys(4))
        assert rig.index.flush(10)
        rig.store(keys(4, prompt=1))
        assert rig.look_up(keys(4, prompt=1), request="holder") == 4
        assert rig.index.lookup("waiting", keys(4)).state is KeyState.RETRY
        assert rig.look_up(keys(4), request="waiting") == 0
        assert rig.index.stats().expired_lookups == 1
        rig.index.end_request("holder")
        rig.index.end_request("waiting")
        assert len(rig.load(keys(4)).keys) == 4


def test_the_version_says_when_an_answer_may_be_another() -> None:
    with TierRig() as rig:
        rig.store(keys(2))
        first = rig.index.lookup("reader", keys(3))
        version = rig.index.version
        assert rig.index.lookup("reader", keys(3)) == first
        assert rig.index.version == version
        rig.store(keys(3), request="other")
        assert rig.index.version > version
        assert rig.index.lookup("reader", keys(3)).num_hits == 3


def test_a_bad_block_is_found_while_nothing_else_is_done(tmp_path: Path) -> None:
    settings = on_nvme(tmp_path)
    with TierRig(**settings | {"faults": "nvme.write.bit_flip=1.0"}) as rig:
        rig.store(keys(2))
        assert rig.index.flush(10)
    with TierRig(**settings | {"nvme_scrub_bandwidth": "1GiB/s"}) as rig:
        until(lambda: rig.index.stats().quarantined == 2)
        assert rig.states(keys(2)) == [KeyState.MISS] * 2


def test_an_idle_engine_that_steps_while_there_is_work_leaves_a_warm_nvme_level(tmp_path: Path) -> None:
    settings = on_nvme(tmp_path, write_ahead_share=1.0)
    with TierRig(**settings) as rig:
        rig.store(keys(5))
        assert rig.index.has_work, "there is something to write ahead"
        rig.settle()
        assert rig.index.stats().nvme_written_blocks == 5
    with TierRig(**settings) as rig:
        assert rig.look_up(keys(5)) == 5


def test_a_restart_finds_what_was_flushed(tmp_path: Path) -> None:
    settings = on_nvme(tmp_path)
    names = [*keys(3), b"a short key"]
    with TierRig(**settings) as rig:
        rig.store(names)
        assert rig.index.flush(10)
    with TierRig(**settings) as rig:
        plan = rig.load(names)
        assert plan.keys == tuple(names)
        assert set(plan.levels) == {Level.NVME}
        [event, *_] = rig.index.poll_events()
        assert (event.level, event.is_removed, set(event.keys)) == (Level.NVME, False, set(names))


def test_content_kept_off_nvme_never_reaches_it_and_a_request_kept_off_it_finds_nothing_there(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
        rig.index.begin_request("private", use_nvme=False)
        rig.store(keys(2), request="private")
        rig.store(keys(2, prompt=1))
        assert rig.index.flush(10)
        assert rig.index.stats().nvme_written_blocks == 2
        rig.store(keys(4, prompt=2))
        assert rig.states([key(0)]) == [KeyState.MISS]
        assert rig.look_up(keys(2, prompt=1), request="private") == 0
        assert rig.look_up(keys(2, prompt=1)) == 2


def test_a_request_is_served_by_the_levels_it_asks_for_and_no_other(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path)) as rig:
        rig.store(keys(2))
        assert rig.index.flush(10)
        rig.index.begin_request("private", use_nvme=False)
        rig.store(keys(2, prompt=1), request="private")
        rig.index.begin_request("not from host", read_host=False)
        assert rig.look_up(keys(2, prompt=1), request="not from host") == 0, "it is in host memory only"
        assert set(rig.load(keys(2), request="not from host").levels) == {Level.NVME}, "it is read again"
        assert rig.index.stats().hit_blocks.secondary == 0
        assert set(rig.load(keys(2), request="usual").levels) == {Level.SECONDARY}, "and is in host memory again"
        rig.index.begin_request("neither", read_host=False, read_nvme=False)
        assert rig.look_up(keys(2), request="neither") == 0
        for request in ("writer", "private", "not from host", "usual", "neither"):
            rig.index.end_request(request)
        rig.index.verify()
        assert rig.index.stats().leases == 0


def test_what_others_use_in_host_memory_is_not_taken_from_them_and_who_wants_it_from_nvme_only_misses_it(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path)) as rig:
        rig.store(keys(2))
        assert rig.index.flush(10)
        assert rig.look_up(keys(1), request="user") == 1
        rig.index.begin_request("not from host", read_host=False)
        assert rig.states(keys(2), request="not from host") == [KeyState.MISS, KeyState.RETRY]
        assert rig.load(keys(1), request="user").levels == (Level.SECONDARY,)


def test_two_requests_that_want_a_block_from_nvme_only_share_one_read(tmp_path: Path) -> None:
    gate = Gate(FaultOperation.READ)
    with TierRig(**on_nvme(tmp_path, faults=gate)) as rig:
        rig.store(keys(1))
        assert rig.index.flush(10)
        for name in ("one", "two"):
            rig.index.begin_request(name, read_host=False)
            assert rig.states(keys(1), request=name) == [KeyState.RETRY]
        gate.open()
        assert [rig.load(keys(1), request=name).levels for name in ("one", "two")] == [(Level.NVME,)] * 2
        assert rig.index.stats().promoted_blocks == 1


def test_prefetch_raises_blocks_without_a_lease(tmp_path: Path) -> None:
    with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
        rig.store(keys(4))
        assert rig.index.flush(10)
        rig.store(keys(4, prompt=1))
        assert rig.index.prefetch(keys(4)) == 4
        rig.settle()
        assert rig.index.stats().leases == 0
        assert rig.states(keys(4)) == [KeyState.HIT] * 4


def test_an_abort_takes_back_reads_that_have_not_begun(tmp_path: Path) -> None:
    gate = Gate(FaultOperation.READ)
    with TierRig(**on_nvme(tmp_path, read_threads=1, faults=gate, secondary="12 blocks")) as rig:
        rig.store(keys(12))
        assert rig.index.flush(10)
        rig.store(keys(12, prompt=1))
        rig.index.lookup("reader", keys(12))
        rig.index.abort("reader")
        gate.open()
        rig.settle()
        assert rig.index.stats().promoted_blocks <= 4, "four are read at a time with one thread"
        assert rig.index.stats().leases == 0


# -- the whole ---------------------------------------------------------------------------------------------------------------


def test_reset_forgets_all_levels_and_stores_in_flight(tmp_path: Path) -> None:
    settings = on_nvme(tmp_path)
    with TierRig(**settings) as rig:
        rig.store(keys(3))
        assert rig.index.flush(10)
        pending = rig.index.plan_store("writer", keys(2, prompt=1))
        assert rig.look_up(keys(3)) == 3
        loading = rig.index.plan_load("reader", keys(3))
        rig.index.reset()
        assert rig.states([*keys(3), *keys(2, prompt=1)]) == [KeyState.MISS] * 5
        stats = rig.index.stats()
        assert (stats.abandoned_jobs, stats.secondary.used_blocks, stats.leases) == (2, 5, 0)
        rig.submit_store(pending, keys(2, prompt=1))  # the worker had not heard of it
        rig.workers[0].submit_load(loading.job_id, 0, [0, 1, 2], loading.slots)
        assert rig.index.wait([pending.job_id, loading.job_id], 10)
        rig.index.poll()
        assert rig.index.stats().secondary.used_blocks == 0
        assert rig.index.complete(pending.job_id) == 0
        assert rig.states(keys(2, prompt=1)) == [KeyState.MISS] * 2
        rig.load(keys(3))
        rig.store(keys(1, prompt=5))
        assert rig.index.flush(10)
    with TierRig(**settings) as rig:
        assert rig.look_up(keys(3)) == 0
        assert rig.look_up(keys(1, prompt=5), request="other") == 1


def test_a_store_that_never_ends_is_given_up_and_its_slots_stay_out_of_use() -> None:
    now = [100.0]
    with TierRig(secondary="4 blocks", clock=lambda: now[0], index={"job_timeout": 30.0}) as rig:
        plan = rig.index.plan_store("writer", keys(3))
        assert rig.index.next_deadline() == 30.0
        now[0] += 31
        rig.index.poll()
        assert rig.states(keys(1)) == [KeyState.MISS]
        assert len(rig.store(keys(4, prompt=1)).keys) == 1, "one slot is left"
        assert rig.index.stats().expired_jobs == 1
        rig.submit_store(plan, keys(3))  # it was only slow
        assert rig.index.wait([plan.job_id], 10)
        rig.index.poll()
        assert len(rig.store(keys(4, prompt=2)).keys) == 4
        assert rig.index.complete(plan.job_id) == 0


def test_events_tell_what_each_level_holds(tmp_path: Path) -> None:
    held: dict[int, set[bytes]] = {Level.SECONDARY: set(), Level.NVME: set()}
    with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
        rig.store(keys(4))
        assert rig.index.flush(10)
        rig.store(keys(2, prompt=1))
        for event in rig.index.poll_events():
            for name in event.keys:
                (held[event.level].remove if event.is_removed else held[event.level].add)(name)
        assert held == {Level.SECONDARY: {*keys(2), *keys(2, prompt=1)}, Level.NVME: set(keys(4))}


def test_close_is_bounded_and_may_be_repeated(tmp_path: Path) -> None:
    rig = TierRig(**on_nvme(tmp_path, faults="nvme.write.hang=1.0"))
    rig.store(keys(2))
    rig.index.poll()
    rig.index.close(timeout=0.3)  # returns, although the writes have no end
    for worker in rig.workers:
        worker.close()
    until(lambda: rig.index.close(timeout=0.3) or rig.index._everything_let_go)
    with pytest.raises(KVTierError, match="closed"):
        rig.index.lookup("reader", keys(1))


def test_close_lets_go_of_the_arena_at_once_also_where_the_index_lives_on(tmp_path: Path) -> None:
    gc.disable()  # the memory of a host level must not depend on when it comes by
    try:
        with TierRig(**on_nvme(tmp_path, secondary="4 blocks")) as rig:
            rig.store(keys(4))
            assert rig.index.flush(10)
            rig.store(keys(4, prompt=1))
            assert set(rig.load(keys(4)).levels) == {Level.NVME}
            assert str(rig.index.arena_path) in Path("/proc/self/maps").read_text()
        assert str(rig.index.arena_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_an_arena_that_was_there_before_its_workers_is_unlinked_by_a_step() -> None:
    config = TierConfig(secondary="2 blocks")
    with TierIndex(PLAIN, config, engine_id="test-index-first") as index:
        assert index.arena_path.exists()
        pages = [torch.zeros(2, size, dtype=torch.uint8) for size in PLAIN.groups[0].tensor_page_bytes]
        with TierWorker(index.plan, "cpu", 0, [pages]):
            index.poll()
            assert not index.arena_path.exists()


def test_a_job_that_is_still_under_way_keeps_its_place_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job_board, tier_index_core):
        monkeypatch.setattr(module, "MAX_JOBS", 4)
    with TierRig() as rig:
        slow = rig.index.plan_store("writer", keys(1))
        rig.index.reset()
        numbers = [rig.store(keys(1, prompt=number), request=f"{number}").job_id for number in range(1, 10)]
        assert all((number - slow.job_id) % 4 for number in numbers)
        rig.submit_store(slow, keys(1))
        assert rig.index.wait([slow.job_id], 10)
        rig.index.poll()
        assert rig.index.stats().abandoned_jobs == 0

"""Bad days of a ``TierIndex``: bad files, a full disk, hanging calls, and a random life through it all. A failure is a miss, and over."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from gate import Gate
from tier_rig import PLAIN, TierRig, keys, on_nvme

from kvtier.errors import TransferError
from kvtier.io.faults import FaultOperation
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import hang_watch
from kvtier.tiering.tier_messages import KeyState

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def store_before(directory: Path) -> None:
    """Leave four blocks on NVMe."""
    with TierRig(**on_nvme(directory)) as rig:
        rig.store(keys(4))
        assert rig.index.flush(10)


def warm_rig(directory: Path, faults: str, **more: Any) -> TierRig:
    """A tier that starts with four blocks on NVMe, and with faults."""
    store_before(directory)
    return TierRig(**on_nvme(directory, faults=faults, **more))


@pytest.mark.parametrize(("fault", "counter"), [
    ("nvme.read.bit_flip", "checksum_failures"), ("nvme.read.eio", "transfer_failures"), ("nvme.read.short_read", ""),
    ("nvme.read.lost_file", ""), ("secondary.copy.eio", "transfer_failures")])
def test_what_cannot_be_read_is_a_miss_before_it_was_a_hit(tmp_path: Path, fault: str, counter: str) -> None:
    with warm_rig(tmp_path, f"{fault}=1.0*1", read_threads=1) as rig:
        hits = rig.look_up(keys(4))
        if counter:
            assert hits < 4, "the block that failed is gone, and what lies behind it is of no use"
            assert getattr(rig.index.stats(), counter) >= 1
        plan = rig.load(keys(4))
        assert len(plan.keys) == hits, "and it is not asked for again and again"
        rig.index.end_request("reader")
        assert rig.store(keys(4), request="again").num_known == len(set(keys(4))) - rig.index.stats().lost


@pytest.mark.parametrize("fault", ["nvme.write.torn_write", "nvme.write.bit_flip", "nvme.write.misdirected_write"])
def test_what_was_written_wrongly_is_never_served(tmp_path: Path, fault: str) -> None:
    with TierRig(**on_nvme(tmp_path, faults=f"{fault}=0.5, seed=3")) as rig:
        rig.store(keys(6))
        rig.index.flush(10)
    with TierRig(**on_nvme(tmp_path)) as rig:
        for name in keys(6):
            rig.load([name])
        stats = rig.index.stats()
        assert stats.quarantined > 0
        assert stats.nvme.busy_blocks == stats.quarantined, "its slots are not used again"


def test_a_full_disk_stops_stores_to_nvme_for_a_while_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TierRig(**on_nvme(tmp_path, faults="nvme.write.enospc=1.0")) as rig:
        rig.store(keys(3))
        assert not rig.index.flush(5)
        assert rig.look_up(keys(3)) == 3
        rig.index.end_request("reader")
        rig.store(keys(8, prompt=1))
        assert not rig.index.stats().takes_writes
        assert rig.index.stats().host_dropped == 3
        assert len(rig.load(keys(8, prompt=1), request="other").keys) == 8
    assert sum("no new blocks are stored for" in record.getMessage() for record in caplog.records) == 1, "said once"


def test_a_read_that_hangs_is_a_miss_and_does_not_keep_the_index_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_before(tmp_path)
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.2)
    rig = TierRig(**on_nvme(tmp_path, faults="nvme.read.hang=1.0", read_threads=1, secondary="8 blocks"))
    assert rig.look_up(keys(4)) == 0
    rig.index.close(0.3)  # returns, although the reads have no end
    rig.close()


def test_a_reset_that_cannot_wait_for_a_write_says_so_and_nothing_old_is_served(tmp_path: Path) -> None:
    gate = Gate(FaultOperation.WRITE)
    with TierRig(**on_nvme(tmp_path, faults=gate)) as rig:
        rig.store(keys(3))
        rig.index.poll()
        assert rig.index.has_work
        with pytest.raises(TransferError, match="repeat the reset"):
            rig.index.reset(timeout=0.05)
        assert rig.states(keys(3)) == [KeyState.MISS] * 3
        gate.open()
        rig.store(keys(1, prompt=1))
        rig.index.reset(timeout=20)
        assert rig.states(keys(1, prompt=1)) == [KeyState.MISS]
    with TierRig(**on_nvme(tmp_path)) as rig:
        assert rig.look_up(keys(3)) == 0


def test_a_reset_lasts_over_a_restart_also_where_no_row_could_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise TransferError("the rows cannot be deleted")

    with TierRig(**on_nvme(tmp_path)) as rig:
        rig.store(keys(3))
        assert rig.index.flush(10)
        monkeypatch.setattr(rig.index.store, "discard", refuse)
        rig.index.reset()
    with TierRig(**on_nvme(tmp_path)) as rig:
        assert rig.look_up(keys(3)) == 0


def test_calls_from_several_threads_leave_a_whole_ledger(tmp_path: Path) -> None:
    with TierRig(PageLayout([PageGroup(200)]), num_pages=256, **on_nvme(tmp_path, secondary="12 blocks")) as rig:
        failures: list[BaseException] = []

        def serve(number: int) -> None:
            chance = random.Random(number)
            try:
                for turn in range(40):
                    name = f"{number}-{turn}"
                    names = keys(chance.randrange(1, 6), prompt=chance.randrange(5))
                    hits = rig.index.lookup(name, names).num_hits
                    load = rig.index.plan_load(name, names[:hits])
                    if load.job_id >= 0:
                        rig.workers[0].submit_load(load.job_id, 0, list(range(64 + 32 * number, 64 + 32 * number + hits)), load.slots)
                        rig.workers[0].wait([load.job_id], 10)
                        rig.index.complete(load.job_id)
                    store = rig.index.plan_store(name, names)
                    if store.job_id >= 0:
                        rig.index.cancel_job(store.job_id)
                    rig.index.poll()
                    rig.index.end_request(name)
            except BaseException as error:
                failures.append(error)

        rig.store(keys(5, prompt=1))
        threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        rig.index.verify()
        assert rig.index.stats().leases == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_on_bad_days_serves_right_bytes_and_holds_nothing_at_its_end(tmp_path: Path, seed: int, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(seed)
    layout = PageLayout([PageGroup([300, 40], 2), PageGroup(64)], ranks=2)
    settings = on_nvme(tmp_path, secondary=["5 blocks", "4 blocks"], nvme=["8 blocks", "6 blocks"], write_ahead_share=0.5)
    for life in range(2):
        faults = f"nvme.read.bit_flip=0.1, nvme.read.eio=0.05, nvme.write.eio=0.02, nvme.write.torn_write=0.1, seed={seed + life}"
        with TierRig(layout, num_pages=64, index={"lookup_timeout": 0.5}, **settings | {"faults": faults}) as rig:
            for turn in range(60):
                group, request = chance.randrange(2), f"request {turn}"
                names = keys(chance.randrange(1, 7), prompt=chance.randrange(4))
                rig.index.begin_request(request, priority=chance.choice([10, 35, 60]), use_nvme=chance.random() < 0.9)
                rig.load(names, group, request)
                plan = rig.index.plan_store(request, names, group)
                if plan.job_id >= 0:
                    rig.submit_store(plan, list(plan.keys))
                    rig.finish(plan.job_id)
                if chance.random() < 0.1:
                    rig.index.reset()
                rig.index.poll()
                rig.index.end_request(request)
            rig.settle()
            rig.index.verify()
            stats = rig.index.stats()
            assert (stats.leases, stats.jobs, stats.abandoned_jobs, stats.secondary.used_blocks) == (0, 0, 0, 0)
            assert stats.loaded_blocks > 10


def test_the_names_of_a_rig_are_what_they_seem() -> None:
    assert len({*keys(3), *keys(3, prompt=1)}) == 6
    assert PLAIN.groups[0].bytes_per_page == 8192

"""Threads that look up, load, store, abort and reset at the same time, against slow and failing ranks: every byte loaded is its key's, and
nothing is held at the end."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import PATIENCE, TierRig, keys, on_nvme, page_bytes, until

from kvtier.errors import KVTierError, TransferError
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.types import Level

NUM_ENGINES = 3
PAGES = 32  # of each
LAYOUTS = [PageLayout([PageGroup(1)]), PageLayout([PageGroup([300, 41], 3), PageGroup([1, 7])], ranks=2),
           PageLayout([PageGroup(100, 2)], ranks=2, is_replicated=True)]


class Moody:
    """Injected into copies: some are slow, and some stores fail."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def before(self, _operation: Any, level: Level) -> None:
        mood = self.chance.random()
        if mood < 0.1 and level == Level.SECONDARY:
            raise TransferError("injected")
        if mood < 0.3:
            time.sleep(0.01 * mood)


class Engine:
    """One thread's turns, in pages of its own."""

    def __init__(self, rig: TierRig, number: int, seed: int) -> None:
        self.rig = rig
        self.first = number * PAGES
        self.chance = random.Random(100 * seed + number)
        self.name = f"engine {number}"
        self.num_loaded = 0

    def turn(self, number: int) -> None:
        index, chance = self.rig.index, self.chance
        request, group = f"{self.name}, turn {number}", chance.randrange(len(self.rig.layout.groups))
        names = keys(chance.randrange(1, 7), prompt=chance.randrange(4))
        if chance.random() < 0.1:
            names += names[:2]
        found = index.wait_lookup(request, names, group, timeout=chance.choice([0.0, 0.3]))
        self.load(request, group, names[:found.num_hits])
        if chance.random() < 0.2:
            index.end_request(request)
        self.store(request, group, names)
        if chance.random() < 0.04:
            index.reset()
        index.poll()
        index.end_request(request)

    def load(self, request: str, group: int, names: list[bytes]) -> None:
        rig, chance = self.rig, self.chance
        plan = rig.index.plan_load(request, names, group)
        if plan.job_id < 0:
            return
        per_block = rig.layout.groups[group].pages_per_block
        skip = chance.randrange(per_block)
        pages = list(range(self.first, self.first + len(plan.keys) * per_block - skip))
        for worker in rig.workers:
            worker.submit_load(plan.job_id, group, pages, plan.slots, skip_pages=skip)
        if chance.random() < 0.1:
            rig.index.complete(plan.job_id)  # too early
        assert all(worker.wait([plan.job_id], PATIENCE) for worker in rig.workers)
        for rank in range(rig.layout.ranks):
            self.check(rank, group, plan.keys, pages, skip)
        rig.index.complete(plan.job_id, failed_keys=plan.keys[:1] if chance.random() < 0.1 else ())

    def check(self, rank: int, group: int, names: tuple[bytes, ...], pages: list[int], skip: int) -> None:
        per_block = self.rig.layout.groups[group].pages_per_block
        source = 0 if self.rig.layout.is_replicated else rank
        for tensor, rows in enumerate(self.rig.pages[rank][group]):
            for place, page in enumerate(pages, skip):
                wanted = page_bytes(names[place // per_block], source, place % per_block, tensor, rows.shape[1])
                assert torch.equal(rows[page], wanted), f"rank {rank}, group {group}, page {page}: other bytes"
        self.num_loaded += 1

    def store(self, request: str, group: int, names: list[bytes]) -> None:
        rig, chance = self.rig, self.chance
        plan = rig.index.plan_store(request, names, group, priority=chance.choice([None, 60]))
        if plan.job_id < 0:
            return
        outcome = chance.random()
        if outcome < 0.1:
            rig.index.cancel_job(plan.job_id)
            return
        pages = rig.fill(group, list(plan.keys), self.first)
        for worker in rig.workers[:rig.layout.copies]:
            worker.submit_store(plan.job_id, group, pages, plan.slots)
            if chance.random() < 0.05:
                worker.abort([plan.job_id], PATIENCE)
        if outcome < 0.3:
            rig.index.complete(plan.job_id)  # too early
        for worker in rig.workers:
            assert worker.before_overwrite(pages, PATIENCE)
        for tensors in rig.pages:
            for rows in tensors[group]:
                rows[pages] = 255  # somebody else's by now
        if outcome >= 0.4:  # otherwise nobody ever reports it
            rig.index.complete(plan.job_id)


@pytest.mark.parametrize("seed", range(3))
def test_a_rush_loads_right_bytes_and_holds_nothing_at_its_end(tmp_path: Path, seed: int, caplog: Any) -> None:
    caplog.set_level("CRITICAL")
    settings = on_nvme(tmp_path, secondary="5 blocks", nvme="8 blocks", write_ahead_share=0.5)
    with TierRig(LAYOUTS[seed], num_pages=NUM_ENGINES * PAGES, worker_faults=Moody(seed),
                 index={"lookup_timeout": 0.1, "job_timeout": 0.1}, **settings) as rig:
        engines = [Engine(rig, number, seed) for number in range(NUM_ENGINES)]
        failures: list[BaseException] = []

        def live(engine: Engine) -> None:
            try:
                for number in range(1000):
                    if number >= 30 and sum(engine.num_loaded for engine in engines) > 5:
                        break
                    engine.turn(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=live, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
            assert not thread.is_alive()
        assert not failures, failures[0]

        rig.until_over()
        stats = rig.index.stats()
        assert (stats.leases, stats.secondary.used_blocks, stats.secondary.busy_blocks) == (0, 0, 0)
        assert sum(engine.num_loaded for engine in engines) > 5


@pytest.mark.parametrize("seed", range(3))
def test_an_index_that_is_closed_in_a_rush_ends_it_and_the_next_one_serves_right_bytes(tmp_path: Path, seed: int, caplog: Any) -> None:
    caplog.set_level("CRITICAL")
    settings = on_nvme(tmp_path, secondary="5 blocks", nvme="8 blocks", write_ahead_share=1.0)
    index = {"lookup_timeout": 0.1, "job_timeout": 0.1}
    for _life in range(2):
        rig = TierRig(LAYOUTS[seed], num_pages=NUM_ENGINES * PAGES, worker_faults=Moody(seed), index=index, **settings)
        engines = [Engine(rig, number, seed) for number in range(NUM_ENGINES)]
        failures: list[BaseException] = []

        def live(engine: Engine, failures: list[BaseException] = failures) -> None:
            try:
                for number in range(1000):
                    engine.turn(number)
            except KVTierError as error:
                if not str(error).endswith((" is closed", " is closed; make a new one")):  # the first one: of a reset
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=live, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        until(lambda engines=engines, failures=failures: failures or sum(engine.num_loaded for engine in engines) > 2)

        def close(index: Any = rig.index, failures: list[BaseException] = failures) -> None:
            try:
                index.close()
            except BaseException as error:
                failures.append(error)

        closing = [threading.Thread(target=close, daemon=True) for _ in range(2)]  # two at once
        for thread in closing:
            thread.start()
        for thread in threads + closing:
            thread.join(3 * PATIENCE)
            assert not thread.is_alive()
        assert not failures, failures[0]
        assert rig.index._everything_let_go
        assert all(worker.close() for worker in rig.workers), "their copies end, whatever became of the index"

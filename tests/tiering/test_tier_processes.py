"""``TierIndex`` here and a ``TierWorker`` in a process of its own, which may be killed at any moment: what it had on hand is a miss."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import key, keys, on_nvme, page_bytes, until

from kvtier import TierConfig, TierIndex, TierWorker
from kvtier.errors import TransferError
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import tier_index_core
from kvtier.tiering.tier_messages import KeyState
from kvtier.tiering.tier_plan import TierPlan

LAYOUT = PageLayout([PageGroup([4096, 500])])
CONFIG: dict[str, Any] = {"secondary": "6 blocks"}


class Slow:
    """Copies of jobs above 99 never end."""

    def __init__(self) -> None:
        self.hangs = False

    def before(self, operation: object, level: object = None) -> None:
        if self.hangs:
            time.sleep(1000)


class Gate:
    """Holds copies up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def before(self, *_given: object) -> None:
        assert self.opened.wait(60)


def work(engine_id: str, connection: Connection) -> None:
    """The worker's process: an engine's pages, and what the other side tells it to do with them."""
    pages = [torch.zeros(16, size, dtype=torch.uint8) for size in LAYOUT.groups[0].tensor_page_bytes]
    slow = Slow()
    with TierWorker(TierPlan.of(LAYOUT, TierConfig(**CONFIG), engine_id), "cpu", 0, [pages], faults=slow) as worker:
        connection.send("ready")
        while True:
            what, job_id, names, slots = connection.recv()
            if what == "end":
                return
            numbers = list(range(len(names)))
            if what in ("store", "hang"):
                slow.hangs = what == "hang"
                for number, name in enumerate(names):
                    for tensor, rows in enumerate(pages):
                        rows[number] = page_bytes(name, 0, 0, tensor, rows.shape[1])
                worker.submit_store(job_id, 0, numbers, slots)
                connection.send("submitted" if slow.hangs else worker.wait([job_id], 20))
                continue
            slow.hangs = what == "hanging load"
            if slow.hangs:
                worker.submit_load(job_id, 0, numbers, slots)
                connection.send("submitted")
                continue
            for rows in pages:
                rows.zero_()
            worker.submit_load(job_id, 0, numbers, slots)
            is_right = worker.wait([job_id], 20) and all(
                torch.equal(rows[number], page_bytes(name, 0, 0, tensor, rows.shape[1]))
                for number, name in enumerate(names) for tensor, rows in enumerate(pages))
            connection.send(is_right)


class Remote:
    """The other process."""

    def __init__(self, engine_id: str) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=(engine_id, theirs))
        self.process.start()
        assert self._ours.poll(60)
        assert self._ours.recv() == "ready"

    def tell(self, what: str, plan: Any) -> Any:
        self._ours.send((what, plan.job_id, list(plan.keys), plan.slots))
        assert self._ours.poll(30)
        return self._ours.recv()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)

    def end(self) -> None:
        if self.process.is_alive():
            self._ours.send(("end", 0, [], ()))
            self.process.join(20)
        if self.process.is_alive():
            self.kill()


def used_after_poll(index: TierIndex) -> int:
    index.poll()
    return index.stats().secondary.used_blocks


@pytest.fixture
def engine_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def remote(engine_id: str) -> Iterator[Remote]:
    made = Remote(engine_id)
    yield made
    made.end()


def test_bytes_travel_between_processes_and_a_worker_that_is_killed_costs_only_what_it_had_on_hand(
        engine_id: str, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index_core, "GONE_SECONDS", 0.05)
    with TierIndex(LAYOUT, TierConfig(**CONFIG), engine_id=engine_id) as index:
        assert not index.arena_path.exists(), "all ranks have opened it"
        plan = index.plan_store("writer", keys(3))
        assert remote.tell("store", plan)
        assert index.wait([plan.job_id], 10), "shared memory says so before the engine does"
        assert index.complete(plan.job_id) == 0
        assert index.lookup("reader", keys(4)).num_hits == 3
        loading = index.plan_load("reader", keys(3))
        assert remote.tell("load", loading), "byte for byte"
        index.complete(loading.job_id)

        reported = index.plan_store("writer", [key(10)])
        silent = index.plan_store("writer", [key(11), key(12)])
        for job in (reported, silent):
            assert remote.tell("hang", job) == "submitted"
        assert index.complete(reported.job_id) == 1, "the engine believes that it was stored; the worker has not said so"
        assert index.stats().secondary.used_blocks == 3
        assert not index.wait([silent.job_id], 0.05)
        remote.kill()
        assert index.wait([silent.job_id], 10), "nobody copies any more"
        until(lambda: used_after_poll(index) == 2)
        assert index.complete(silent.job_id) == 2
        assert [index.key_state("reader", key(number)) for number in (0, 10, 11, 12)] == [KeyState.HIT, *[KeyState.MISS] * 3]
        index.end_request("reader")
        stats = index.stats()
        assert (stats.leases, stats.jobs, stats.abandoned_jobs, stats.secondary.free_blocks) == (0, 0, 0, 6)
        index.verify()


def test_a_worker_that_is_killed_in_the_middle_of_a_load_costs_no_block_and_leaves_no_lease(
        engine_id: str, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index_core, "GONE_SECONDS", 0.05)
    with TierIndex(LAYOUT, TierConfig(**CONFIG), engine_id=engine_id) as index:
        plan = index.plan_store("writer", keys(3))
        assert remote.tell("store", plan)
        index.complete(plan.job_id)
        assert index.lookup("reader", keys(3)).num_hits == 3
        loading = index.plan_load("reader", keys(3))
        assert remote.tell("hanging load", loading) == "submitted"
        assert not index.wait([loading.job_id], 0.0)
        remote.kill()
        assert index.wait([loading.job_id], 20)
        assert index.complete(loading.job_id, keys(3)[2:]) == 1, "and what the engine says it did not get is forgotten"
        index.end_request("reader")
        stats = index.stats()
        assert (stats.leases, stats.jobs, stats.abandoned_jobs, stats.secondary.free_blocks) == (0, 0, 0, 6)
        assert index.lookup("reader", keys(3)).num_hits == 2
        index.end_request("reader")
        index.verify()


def decide(engine_id: str, directory: str, connection: Connection) -> None:
    """The index's process: what is stored first reaches NVMe, what is stored then does not end."""
    with TierIndex(LAYOUT, TierConfig(**CONFIG, **on_nvme(Path(directory))), model="m@1:0", engine_id=engine_id) as index:
        connection.send(str(index.arena_path))
        for names in (keys(3), keys(2, prompt=1)):
            connection.recv()  # the worker is there, or has copied
            plan = index.plan_store("writer", names)
            connection.send((plan.job_id, plan.slots))
            if names == keys(3):
                connection.recv()
                connection.send((index.complete(plan.job_id), index.flush(30)))
                index.poll()  # sees that all ranks have opened the arena
        signal.pause()


def test_an_index_that_is_killed_in_the_middle_of_a_store_costs_only_that_and_nothing_old_is_loaded(
        engine_id: str, tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=decide, args=(engine_id, str(tmp_path), theirs))
    process.start()
    pages = [torch.zeros(16, size, dtype=torch.uint8) for size in LAYOUT.groups[0].tensor_page_bytes]

    def ask(what: object) -> Any:
        ours.send(what)
        assert ours.poll(60)
        return ours.recv()

    def fill(names: list[bytes]) -> list[int]:
        for number, name in enumerate(names):
            for tensor, rows in enumerate(pages):
                rows[number] = page_bytes(name, 0, 0, tensor, rows.shape[1])
        return list(range(len(names)))

    try:
        assert ours.poll(60)
        arena = Path(ours.recv())
        assert arena.exists(), "its worker is not there yet"
        other = TierIndex(LAYOUT, TierConfig(**CONFIG), engine_id=f"{engine_id}-other")
        assert arena.exists(), "nobody removes what a live process has"
        other.close()
        gate = Gate()
        plan = TierPlan.of(LAYOUT, TierConfig(**CONFIG), engine_id)
        worker = TierWorker(plan, "cpu", 0, [pages], faults=gate)
        first_job, slots = ask("opened")
        worker.submit_store(first_job, 0, fill(keys(3)), slots)
        assert worker.wait([first_job], 20)
        assert ask("copied") == (0, True)
        job, slots = ask("more")
        gate.opened.clear()
        worker.submit_store(job, 0, fill(keys(2, prompt=1)), slots)
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(10)
    assert not arena.exists()
    with pytest.raises(TransferError, match="no index uses"):
        worker.submit_load(job + 1, 0, [0, 1], slots)
    with TierIndex(LAYOUT, TierConfig(**CONFIG, **on_nvme(tmp_path)), model="m@1:0", engine_id=engine_id) as index:
        gate.opened.set()
        assert worker.wait([job], 20)
        assert worker.close()
        with TierWorker(plan, "cpu", 0, [pages]) as again:
            assert index.wait_lookup("reader", keys(3), timeout=20).num_hits == 3
            assert index.wait_lookup("reader", keys(2, prompt=1), timeout=20).num_hits == 0
            loading = index.plan_load("reader", keys(3))
            for rows in pages:
                rows.zero_()
            again.submit_load(loading.job_id, 0, [0, 1, 2], loading.slots)
            assert again.wait([loading.job_id], 20)
            index.complete(loading.job_id)
            for number, name in enumerate(keys(3)):
                assert all(torch.equal(rows[number], page_bytes(name, 0, 0, tensor, rows.shape[1])) for tensor, rows in enumerate(pages))


def start_and_wait(engine_id: str, connection: Connection) -> None:
    index = TierIndex(LAYOUT, TierConfig(**CONFIG), engine_id=engine_id)
    connection.send(str(index.arena_path))
    signal.pause()


def test_the_memory_of_an_index_that_was_killed_before_its_workers_came_is_freed_by_whoever_starts_next(engine_id: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=start_and_wait, args=(engine_id, theirs))
    process.start()
    try:
        assert ours.poll(60)
        arena = Path(ours.recv())
        assert arena.exists()
    finally:  # from here on another test's index may have been the next one
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(10)
    TierIndex(LAYOUT, TierConfig(**CONFIG), engine_id=f"{engine_id}-other").close()
    assert not arena.exists()

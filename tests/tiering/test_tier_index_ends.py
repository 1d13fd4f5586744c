"""A request is aborted, or the tier reset or closed, in each state of a request: nothing stays held, and what is served is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tier_rig import PATIENCE, TierRig, keys, on_nvme

from kvtier.tiering.tier_messages import KeyState

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

COUNT = 6
NAMES, NEW = keys(COUNT), keys(3, prompt=1)


class Gate:
    """Holds the copies of workers up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def before(self, *_given: Any) -> None:
        assert self.opened.wait(PATIENCE)


class Life:
    """A request on its way, as far as a test wants it."""

    def __init__(self, rig: TierRig, gate: Gate) -> None:
        self.rig = rig
        self.gate = gate
        self.jobs: list[int] = []

    def asked(self) -> None:
        assert self.rig.index.lookup("reader", NAMES).state is KeyState.RETRY

    def found(self) -> None:
        assert self.rig.look_up(NAMES) == COUNT

    def load_planned(self) -> None:
        self.found()
        self.plan = self.rig.index.plan_load("reader", NAMES)
        self.jobs.append(self.plan.job_id)

    def loading(self) -> None:
        self.load_planned()
        self.gate.opened.clear()
        self.rig.workers[0].submit_load(self.plan.job_id, 0, list(range(COUNT)), self.plan.slots)

    def loaded(self) -> None:
        self.loading()
        self.gate.opened.set()
        assert self.rig.workers[0].wait(self.jobs, PATIENCE)

    def store_planned(self) -> None:
        self.store = self.rig.index.plan_store("reader", NEW)
        self.jobs.append(self.store.job_id)

    def storing(self) -> None:
        self.store_planned()
        self.gate.opened.clear()
        self.rig.submit_store(self.store, NEW)

    def stored(self) -> None:
        self.storing()
        self.gate.opened.set()
        assert self.rig.workers[0].wait(self.jobs, PATIENCE)

    def loading_and_storing(self) -> None:
        self.loading()
        self.store_planned()
        self.rig.workers[0].submit_store(self.store.job_id, 0, self.rig.fill(0, NEW, 32), self.store.slots)


STATES: list[Callable[[Life], None]] = [Life.asked, Life.found, Life.load_planned, Life.loading, Life.loaded, Life.store_planned,
                                        Life.storing, Life.stored, Life.loading_and_storing]


def started(folder: Path, gate: Gate) -> TierRig:
    """All of NAMES lie on NVMe, whose reads are slow."""
    with TierRig(**on_nvme(folder, secondary="10 blocks")) as rig:
        rig.store(NAMES)
        assert rig.index.flush(PATIENCE)
    return TierRig(worker_faults=gate, **on_nvme(folder, secondary="10 blocks", read_threads=1, faults="nvme.read.delay=1.0:10ms"))


@pytest.mark.parametrize(("end", "is_reported"), [("abort", True), ("reset", True), ("reset", False), ("reset and abort", True)],
                         ids=["abort", "reset", "reset, never reported", "reset and abort"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_nothing_stays_held_whatever_ends_in_whichever_state(tmp_path: Path, state: Callable[[Life], None], end: str,
                                                             is_reported: bool) -> None:
    gate = Gate()
    with started(tmp_path, gate) as rig:
        life = Life(rig, gate)
        state(life)
        for verb in end.split(" and "):
            if verb == "abort":
                rig.index.abort("reader")
            else:
                rig.index.reset(PATIENCE)
        submitted = [number for number in life.jobs if state not in (Life.load_planned, Life.store_planned)]
        rig.index.verify()
        gate.opened.set()
        assert rig.workers[0].wait(life.jobs, PATIENCE)
        for number in life.jobs:
            if number not in submitted:
                rig.index.cancel_job(number)
            elif is_reported:
                rig.index.complete(number)
        rig.index.abort("reader")

        rig.until_over()
        stats = rig.index.stats()
        assert (stats.leases, stats.requests, stats.secondary.used_blocks, stats.secondary.busy_blocks) == (0, 0, 0, 0)
        expected = 0 if "reset" in end else COUNT
        assert len(rig.load(NAMES, request="next").keys) == expected
        has_stored = state in (Life.storing, Life.stored, Life.loading_and_storing) and "reset" not in end
        assert len(rig.load(NEW, request="next").keys) == (len(NEW) if has_stored else 0)
        rig.index.end_request("next")


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_closing_in_whichever_state_ends_all_and_the_folder_is_whole(tmp_path: Path, state: Callable[[Life], None]) -> None:
    gate = Gate()
    rig = started(tmp_path, gate)
    state(Life(rig, gate))
    rig.index.close()
    assert rig.index._everything_let_go
    gate.opened.set()
    assert all(worker.close() for worker in rig.workers)
    with TierRig(**on_nvme(tmp_path, secondary="10 blocks")) as again:
        assert len(again.load(NAMES).keys) == COUNT
        assert not again.load(NEW).keys

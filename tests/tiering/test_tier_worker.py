"""Rules of ``TierWorker``: it copies what it is told, says in shared memory what it has copied, and lets nobody overwrite what it uses."""

from __future__ import annotations

import importlib.util
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import TierRig, keys, until

from kvtier import TierConfig, TierWorker
from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io import cpu_stream
from kvtier.io.faults import FaultOperation
from kvtier.io.shared_arena import SharedArena
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import tier_worker
from kvtier.tiering.tier_plan import TierPlan
from kvtier.types import Level

LAYOUT = PageLayout([PageGroup([256, 128], 2), PageGroup(64)])


class Gate:
    """A fault point that holds copies up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waiting = 0

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        self.waiting += 1
        assert self.opened.wait(20)


class Broken:
    """A fault point at which every copy fails."""

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        raise OSError(5, "a copy that fails")


def plan(layout: PageLayout = LAYOUT, slots: str = "4 blocks") -> TierPlan:
    return TierPlan.of(layout, TierConfig(secondary=slots), f"test-{uuid.uuid4().hex[:12]}")


def tensors(layout: PageLayout = LAYOUT, num_pages: int = 8) -> list[list[torch.Tensor]]:
    return [[torch.randint(0, 255, (num_pages, size), dtype=torch.uint8) for size in group.tensor_page_bytes] for group in layout.groups]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def worker(gate: Gate) -> Iterator[TierWorker]:
    """One with a gate in front of its copies, and the arena in front of an index that is not there."""
    made = TierWorker(plan(), "cpu", 0, tensors(), faults=gate)
    arena = SharedArena(made.plan.arena)
    yield made
    gate.opened.set()
    made.close()
    arena.unlink()
    arena.close()


def test_each_job_is_reported_once_with_what_it_copied(worker: TierWorker, gate: Gate) -> None:
    gate.opened.set()
    worker.submit_store(5, 0, [0, 1, 2], [3, 1])
    worker.submit_load(6, 1, [4], [0])
    assert worker.wait([5, 6, 1234], 10), "unknown jobs have ended"
    results = {result.job_id: result for result in worker.poll()}
    assert {number: (result.is_store, result.success, result.num_bytes) for number, result in results.items()} == {
        5: (True, True, 3 * 384), 6: (False, True, 64)}
    assert worker.poll() == []


def test_pages_lie_one_behind_the_other_in_their_slot_also_in_strided_tensors(gate: Gate) -> None:
    gate.opened.set()
    wide = torch.randint(-100, 100, (8, 300), dtype=torch.int8)
    layout = PageLayout([PageGroup([256, 128], 2)])
    members = [wide[:, :256], torch.randint(0, 255, (8, 128), dtype=torch.uint8)]
    with TierWorker(plan(layout), "cpu", 0, [members]) as made:
        made.submit_store(0, 0, [6, 2, 3, 4], [2, 1])
        assert made.wait([0], 10)
        arena = SharedArena(made.plan.arena)
        slots = arena.groups[0]
        assert slots is not None
        for slot, pages in ((2, (6, 2)), (1, (3, 4))):
            expected = b"".join(bytes(member[page].view(torch.uint8).numpy()) for page in pages for member in members)
            assert bytes(slots.rows[slot]) == expected
        arena.unlink()
        del slots
        arena.close()


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_submitting_lets_the_copying_thread_begin(worker: TierWorker, gate: Gate, is_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the engine's thread keeps the GIL, and a copy that could begin waits for it."""
    gate.opened.set()
    stream = worker._stores if is_store else worker._loads
    assert isinstance(stream, cpu_stream.CpuStream)
    monkeypatch.setattr(cpu_stream, "_LONGEST_TURN", 10.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody takes the GIL from a thread that does not give it up
    try:
        assert stream.synchronize(10)
        (worker.submit_store if is_store else worker.submit_load)(0, 0, [0, 1], [0])
        assert stream._queue.empty()
    finally:
        sys.setswitchinterval(interval)
    assert worker.wait([0], 10)


def test_pages_in_use_are_waited_for_before_they_are_overwritten(worker: TierWorker, gate: Gate) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    assert not worker.before_overwrite([1, 7], 0.05)
    assert worker.before_overwrite([2, 3], 0.0)
    assert worker.before_overwrite([1], 0.0, group=1), "that is another group's page"
    gate.opened.set()
    assert worker.before_overwrite([1, 7], 10)


def test_a_load_into_pages_that_an_old_store_reads_comes_after_it(worker: TierWorker, gate: Gate) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    worker.submit_load(1, 0, [0, 1], [1])
    worker.submit_load(2, 0, [4, 5], [2])
    until(lambda: gate.waiting == 1)
    assert not worker.wait([1], 0.05), "the load would change what the store is to copy"
    gate.opened.set()
    assert worker.wait([0, 1, 2], 10)


def test_an_aborted_job_ends_with_an_error_also_when_its_copy_went_on(worker: TierWorker, gate: Gate) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    worker.submit_store(1, 0, [2, 3], [1])
    until(lambda: gate.waiting == 1)
    assert not worker.abort([0, 1], 0.05), "the first one runs"
    gate.opened.set()
    assert worker.abort([0, 1], 10)
    results = {result.job_id: result.success for result in worker.poll()}
    assert results == {0: False, 1: False}


def test_what_an_aborted_store_copied_is_not_served(gate: Gate) -> None:
    with TierRig(worker_faults=gate) as rig:
        made = rig.index.plan_store("writer", keys(2))
        rig.submit_store(made, keys(2))
        until(lambda: gate.waiting == 1)
        assert not rig.workers[0].abort([made.job_id], 0.0)
        rig.fill(0, keys(2, prompt=9))  # the engine has given the pages away
        gate.opened.set()
        assert rig.workers[0].wait([made.job_id], 10)
        assert rig.index.complete(made.job_id) == 2
        assert rig.index.stats().secondary.used_blocks == 0


def test_a_rank_can_say_that_it_copies_nothing_for_a_job() -> None:
    with TierRig() as rig:
        made = rig.index.plan_store("writer", keys(2))
        rig.workers[0].fail_store(made.job_id, made.group, made.slots)
        assert rig.index.complete(made.job_id) == 2
        assert rig.index.stats().secondary.used_blocks == 0


class Unlucky:
    """Injected into copies: the first ones fail."""

    def __init__(self, times: int) -> None:
        self.left = times

    def before(self, *_place: Any) -> None:
        self.left -= 1
        if self.left >= 0:
            raise TransferError("injected")


def test_a_load_that_fails_is_made_again_within_its_job() -> None:
    for times in (tier_worker.LOAD_ATTEMPTS - 1, tier_worker.LOAD_ATTEMPTS):
        with TierRig() as rig:
            rig.store(keys(1))
            rig.look_up(keys(1))
            made = rig.index.plan_load("reader", keys(1))
            rig.workers[0]._faults = Unlucky(times)
            rig.workers[0].submit_load(made.job_id, 0, [5], made.slots)
            rig.workers[0].wait([made.job_id], 10)
            [result] = rig.workers[0].poll()
            rig.index.complete(made.job_id)
            assert result.success == (times < tier_worker.LOAD_ATTEMPTS)
            if result.success:
                rig.check(0, keys(1), [5])


def test_a_job_that_has_ended_is_not_made_again_because_its_slots_may_be_somebody_elses() -> None:
    with TierRig(secondary="1 blocks") as rig:
        rig.store(keys(1))
        rig.look_up(keys(1))
        made = rig.index.plan_load("reader", keys(1))
        rig.workers[0]._faults = Unlucky(tier_worker.LOAD_ATTEMPTS)
        rig.workers[0].submit_load(made.job_id, 0, [5], made.slots)
        rig.workers[0].wait([made.job_id], 10)
        rig.index.reset()
        rig.index.poll()  # the rank has ended it
        assert rig.store(keys(1, prompt=1)).slots == made.slots
        with pytest.raises(RequestError, match="has ended already"):
            rig.workers[0].submit_load(made.job_id, 0, [5], made.slots)


def test_the_engine_goes_on_only_behind_the_jobs_it_names(worker: TierWorker, gate: Gate) -> None:
    worker.submit_load(0, 0, [0, 1], [0])
    assert not worker.order_before_engine([0], None, 0.05)
    gate.opened.set()
    assert worker.order_before_engine([0, 99], None, 10)


def test_closing_is_bounded_and_what_runs_keeps_its_memory(worker: TierWorker, gate: Gate) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    until(lambda: gate.waiting == 1)
    assert not worker.close(0.2)
    with pytest.raises(TransferError, match="closed"):
        worker.submit_store(1, 0, [2, 3], [1])
    gate.opened.set()
    assert worker.close(10)
    assert worker.close(10)


def test_a_copy_that_fails_is_reported_and_its_blocks_are_misses() -> None:
    with TierRig(worker_faults=Broken()) as rig:
        made = rig.index.plan_store("writer", keys(2))
        rig.submit_store(made, keys(2))
        assert rig.workers[0].wait([made.job_id], 10)
        [result] = rig.workers[0].poll()
        assert not result.success
        assert "a copy that fails" in str(result.error)
        assert rig.index.complete(made.job_id) == 2
        assert rig.look_up(keys(2)) == 0
        assert rig.index.stats().secondary.used_blocks == 0, "it has ended all the same"


@pytest.mark.parametrize(("job", "message"), [
    ((0, 2, [0], [0]), "groups 0..1"), ((0, 0, [0, 1], [4]), "0..3"), ((0, 0, [0, 1, 2, 3], [1, 1]), "different ones"),
    ((0, 0, [0, 8], [0]), "pages 0..7"), ((0, 0, [], [0]), "pages 0..7"), ((0, 0, [0, 1, 2], [0]), "do not make 1 blocks"),
    ((0, 0, [0, 1], [0, 1]), "do not make 2 blocks"), ((-1, 0, [0, 1], [0]), "job_id"), ((True, 0, [0, 1], [0]), "job_id")])
def test_a_job_that_does_not_add_up_is_refused(worker: TierWorker, job: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        worker.submit_store(*job)
    assert worker.wait([0], 0.0)


def test_a_job_is_submitted_once(worker: TierWorker) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    with pytest.raises(RequestError, match="under way"):
        worker.submit_store(0, 0, [0, 1], [0])


def test_replicated_pages_are_stored_by_rank_0_only() -> None:
    layout = PageLayout([PageGroup(64)], ranks=2, is_replicated=True)
    with TierRig(layout) as rig, pytest.raises(RequestError, match="rank 0"):
        rig.workers[1].submit_store(0, 0, [0], [0])


@pytest.mark.parametrize(("change", "message"), [
    (lambda made: made.pop(), "of 1 groups"), (lambda made: made[0].pop(), "1 tensors"),
    (lambda made: made[0].__setitem__(0, torch.zeros(8, 255, dtype=torch.uint8)), "num_pages, 256"),
    (lambda made: made[0].__setitem__(0, torch.zeros(8, 256, dtype=torch.float16)), "num_pages, 256"),
    (lambda made: made[0].__setitem__(0, torch.zeros(256, 8, dtype=torch.uint8).t()), "follow one another")])
def test_tensors_that_do_not_fit_the_plan_are_refused(change: Any, message: str) -> None:
    made = tensors()
    change(made)
    with pytest.raises(ConfigError, match=message):
        TierWorker(plan(), "cpu", 0, made)


def test_a_rank_is_there_once_and_within_the_plan() -> None:
    shared = plan()
    with pytest.raises(ConfigError, match="rank=1"):
        TierWorker(shared, "cpu", 1, tensors())
    with TierWorker(shared, "cpu", 0, tensors()) as made:
        with pytest.raises(ConfigError, match="worker of rank 0"):
            TierWorker(shared, "cpu", 0, tensors())
        made._arena.unlink()


# -- the same code before a stand-in for CUDA --------------------------------------------------------------------------------


@pytest.fixture(params=range(3))
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Streams that make progress in any order that events leave them."""
    path = Path(__file__).parent.parent / "io" / "cuda_stand_in.py"
    spec = importlib.util.spec_from_file_location("cuda_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.StandInCuda(request.param)
    made.cuda = made
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made)
    monkeypatch.setattr(tier_worker, "_checked", lambda plan, device, tensors: [members[0].shape[0] for members in tensors])
    return made


def test_on_cuda_copies_come_behind_the_engine_and_are_right(cuda: Any) -> None:
    layout = PageLayout([PageGroup([256, 128], 2)])
    engine = cuda.Stream(non_blocking=True)
    pages = tensors(layout, 16)
    original = [member.clone() for member in pages[0]]
    made = TierWorker(plan(layout, "4 blocks"), "cuda", 0, pages)
    index = SharedArena(made.plan.arena)
    try:
        assert sum(cuda.runtime.registered.values()) == 4 * 4096, "the arena is pinned"
        late = torch.full((1, 256), 77, dtype=torch.uint8)
        for _ in range(60):  # the engine is busy
            cuda.runtime.memcpyAsync(late.data_ptr(), late.data_ptr(), 256, 4, engine.ptr)
        cuda.runtime.memcpyAsync(pages[0][0][3].data_ptr(), late.data_ptr(), 256, 4, engine.ptr)  # what it is still computing
        original[0][3] = 77
        made.submit_store(0, 0, [0, 1, 3, 4], [2, 1], after_stream=engine)
        made.submit_store(1, 0, [9], [0], skip_pages=1, after_stream=engine)
        assert made.wait([0, 1], 20)
        made.submit_load(2, 0, [10, 11, 13, 14], [2, 1], after_stream=engine)
        made.submit_load(3, 0, [15], [0], skip_pages=1, after_stream=engine)
        assert made.wait([2, 3], 20)
        assert all(result.success for result in made.poll())
        for source, target in ((0, 10), (1, 11), (3, 13), (4, 14), (9, 15)):
            for member, first in zip(pages[0], original, strict=True):
                assert torch.equal(member[target], first[source])
        assert "memcpy2DAsync" in cuda.runtime.calls, "neighbouring pages are one copy"
    finally:
        index.unlink()
        index.close()
        assert made.close(10)
    assert not cuda.runtime.registered


def test_on_cuda_a_device_in_error_is_a_failed_job(cuda: Any) -> None:
    made = TierWorker(plan(), "cuda", 0, tensors())
    try:
        made.submit_store(0, 0, [0, 1], [0], after_stream=cuda.Stream(non_blocking=True))
        assert made.wait([0], 20)
        cuda.runtime.refuse_copies = "cudaErrorInvalidValue"
        made.submit_store(1, 0, [0, 1], [1], after_stream=cuda.Stream(non_blocking=True))
        assert made.wait([1], 20)
        assert {result.job_id: result.success for result in made.poll()} == {0: True, 1: False}
    finally:
        made._arena.unlink()
        made.close(10)


def test_a_job_number_that_no_plan_can_have_is_refused(worker: TierWorker) -> None:
    for call in (lambda: worker.submit_store(1 << 70, 0, [0, 1], [0]), lambda: worker.fail_store(1 << 70, 0, [0])):
        with pytest.raises(RequestError, match="job_id="):
            call()
    assert worker.wait([1 << 70], 0.0)


@pytest.mark.parametrize("wrong", [None, 5, "0", [None], [[0]], [0.5]])
def test_numbers_are_numbers(worker: TierWorker, wrong: Any) -> None:
    for call in (lambda: worker.submit_load(0, 0, wrong, [0]), lambda: worker.submit_load(0, 0, [0, 1], wrong),
                 lambda: worker.submit_load(0, 0, [0, 1], [0], skip_pages=wrong if wrong != 5 else 0.5), lambda: worker.wait(wrong, 0.0),
                 lambda: worker.fail_store(0, 0, wrong), lambda: worker.abort(wrong, 0.0), lambda: worker.before_overwrite(wrong, 0.0)):
        with pytest.raises(RequestError):
            call()

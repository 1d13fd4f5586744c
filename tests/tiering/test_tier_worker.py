"""Rules of ``TierWorker``: it copies what it is told, says in shared memory what it has copied, and lets nobody overwrite what it uses."""

from __future__ import annotations

import importlib.util
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
from kvtier.io.faults import FaultOperation
from kvtier.io.shared_arena import SharedArena
from kvtier.pools.page_layout import PageGroup, PageLayout
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


def test_an_aborted_job_that_has_not_begun_is_not_begun_and_says_so(worker: TierWorker, gate: Gate) -> None:
    worker.submit_store(0, 0, [0, 1], [0])
    worker.submit_store(1, 0, [2, 3], [1])
    until(lambda: gate.waiting == 1)
    assert not worker.abort([0, 1], 0.05), "the first one runs"
    gate.opened.set()
    assert worker.abort([0, 1], 10)
    results = {result.job_id: result.success for result in worker.poll()}
    assert results == {0: True, 1: False}


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


def stand_in() -> Any:
    path = Path(__file__).parent.parent / "io" / "cuda_stand_in.py"
    spec = importlib.util.spec_from_file_location("cuda_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(3))
def test_on_cuda_copies_are_ordered_by_events_and_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    from kvtier.io.cuda_stream import CudaStream
    from kvtier.io.page_copier import CudaPageCopier, HostPageCopier, PagePlaces, page_runs
    from kvtier.pools.host_arena import HostArena

    cuda = stand_in().StandInCuda(seed)
    pages = tensors(num_pages=8)[0]
    twin = [member.clone() for member in pages]
    arena, other = HostArena(4, 768, pin=False), HostArena(4, 768, pin=False)
    places = PagePlaces(arena.stride, 0, 384, 2, arena.slots_per_piece)
    stream = CudaStream(cuda, 0, "test")
    copier, plain = CudaPageCopier(cuda, pages, arena), HostPageCopier(twin, other)
    for numbers, slots, skip in (([0, 1, 2, 3], [0, 1], 0), ([7, 4, 5], [3, 2], 1)):
        runs = page_runs(places, numbers, slots, skip)
        event = stream.submit(lambda runs=runs: copier.store(runs))
        assert event.wait(10)
        assert event.error is None
        plain.store(runs)
    assert bytes(arena.padded_rows) == bytes(other.padded_rows)
    runs = page_runs(places, [6, 5, 0, 1], [1, 3], 0)
    assert stream.submit(lambda: copier.load(runs)).wait(10)
    plain.load(runs)
    assert all(torch.equal(left, right) for left, right in zip(pages, twin, strict=True))
    stream.close(5)

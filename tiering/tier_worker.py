"""``TierWorker``: the tier's half beside an engine's pages (design: two ways to attach). It only copies device <-> arena.

It knows no keys and no levels. Which slots it may use, ``TierIndex`` has decided; how its jobs ended it says to the engine, and to the
index in shared memory, so that the death of a worker is a miss and no wrong byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import torch

from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io.copy_tools import copy_tools
from kvtier.io.cuda_stream import load_cuda
from kvtier.io.device import EngineStream, open_device
from kvtier.io.faults import FaultOperation
from kvtier.io.page_copier import CudaPageCopier, HostPageCopier, PageCopier, PagePlaces, PageRun, page_runs
from kvtier.io.shared_arena import SharedArena
from kvtier.io.streams import Event
from kvtier.tiering import arguments
from kvtier.tiering.copy_batch import FaultPoint
from kvtier.tiering.ledger.group import checked_group
from kvtier.tiering.tier_messages import WorkerResult
from kvtier.tiering.tier_plan import TierPlan
from kvtier.types import Level

_log = logging.getLogger(__name__)

LOAD_ATTEMPTS: Final = 3
"""So often a load is tried. All within one job: once the index hears that a rank has ended one, its slots may be somebody else's."""


class _Job:
    """A job that has not ended."""

    def __init__(self, number: int, group: int, pages: Sequence[int], is_store: bool, whole: list[int], num_bytes: int) -> None:
        self.number = number
        self.group = group
        self.pages = frozenset(pages)
        self.is_store = is_store
        self.whole = whole
        self.num_bytes = num_bytes
        self.started = time.perf_counter()
        self.is_aborted = False
        self.event: Event | None = None


class TierWorker:
    """Copies of one rank. Thread-safe.

    Args:
        plan: the index's.
        device: "cpu", "cuda" or "cuda:N": where the tensors are.
        rank: 0 to ``plan.layout.ranks - 1``.
        tensors: by group, the group's tensors, each uint8 or int8 ``[num_pages, page_bytes]``, rows contiguous (the distance between rows
            may be larger). A tensor may belong to several groups.
        faults: injected into copies, for trials.

    Raises:
        ConfigError: tensors that do not fit the plan, too little shared memory (named per rank and in total), an arena of
            another plan under this engine's name, memory that CUDA will not pin.
    """

    def __init__(self, plan: TierPlan, device: str, rank: int, tensors: Sequence[Sequence[torch.Tensor]], *,
                 faults: FaultPoint | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < plan.layout.ranks:
            raise ConfigError(f"rank={rank!r}: the plan has ranks 0 to {plan.layout.ranks - 1}")
        self._num_pages = _checked(plan, device, tensors)
        self._device = open_device(device)
        self.plan = plan
        self.rank = rank
        self._faults = faults
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[int, _Job] = {}
        self._results: deque[WorkerResult] = deque()
        self._closing = False
        self._is_closed = False
        self._arena = SharedArena(plan.arena, rank, pin=self._device.name != "cpu")
        try:
            self._copiers: list[PageCopier] = []
            self._places: list[PagePlaces] = []
            for number, group in enumerate(plan.layout.groups):
                slots = self._arena.groups[number]
                assert slots is not None
                self._places.append(PagePlaces(slots.stride, plan.layout.rank_offset(number, rank), group.bytes_per_page,
                                               group.pages_per_block, slots.slots_per_piece))
                self._copiers.append(HostPageCopier(tensors[number], slots) if self._device.name == "cpu"
                                     else CudaPageCopier(copy_tools(load_cuda(), self._device.name), tensors[number], slots))
            self._stores = self._device.stream("tier-store")
            try:
                self._loads = self._device.stream("tier-load")
            except BaseException:
                self._stores.close(1.0)
                raise
        except BaseException:
            self._copiers = []
            self._arena.close()
            raise

    # -- jobs ------------------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, group: int, pages: Sequence[int], slots: Sequence[int], *, skip_pages: int = 0,
                     after_stream: EngineStream | None = None) -> None:
        """Copy pages into slots, behind what the engine has enqueued so far on its stream. Returns at once.

        Args:
            job_id: of a ``StorePlan``.
            group: its group.
            pages: page numbers, block by block: ``pages_per_block`` for each slot, but for the pages left out at the front of the first
                slot and at the end of the last one.
            slots: the plan's, in the same order.
            skip_pages: pages left out at the front of the first slot.
            after_stream: the engine's stream; None on the CPU, and for torch's current stream on CUDA.

        A slot that does not get all its pages is not served afterwards (but see ``PageGroup.is_state``).

        Raises:
            RequestError: numbers outside the pool or the arena, or that do not add up; a rank other than 0 of replicated pages; a job that
                is under way, or has ended. Nothing has been queued.
            TransferError: the worker is closed.
        """
        if self.plan.layout.is_replicated and self.rank != 0:
            raise RequestError(f"job {job_id}: rank {self.rank} of replicated pages stores nothing; rank 0 does")
        self._submit(job_id, group, pages, slots, skip_pages, after_stream, True)

    def submit_load(self, job_id: int, group: int, pages: Sequence[int], slots: Sequence[int], *, skip_pages: int = 0,
                    after_stream: EngineStream | None = None) -> None:
        """Copy slots into pages; arguments and errors as of :meth:`submit_store`. It waits for the engine's stream too: the pages may
        have readers. A load is tried LOAD_ATTEMPTS times; one that fails has left garbage in its pages.

        Raises:
            TransferError: also when no index uses the worker's arena (any more): what is planned elsewhere lies elsewhere.
        """
        self._submit(job_id, group, pages, slots, skip_pages, after_stream, False)

    def fail_store(self, job_id: int, group: int, slots: Sequence[int]) -> None:
        """This rank will not copy anything for a job: the index need not wait for it, and its blocks are misses. Arguments as of
        :meth:`submit_store`; RequestError for a job that is under way."""
        self._check_numbers(job_id, group, arguments.whole_numbers("slots", slots))
        with self._lock:
            if job_id in self._jobs:
                raise RequestError(f"job {job_id}: is under way already; abort it")
            if not self._is_closed:
                self._arena.board.note_ended(self.rank, job_id)

    def poll(self) -> list[WorkerResult]:
        """What has ended since the last call; each job once."""
        with self._lock:
            found = list(self._results)
            self._results.clear()
        return found

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Wait until these jobs have ended (unknown ones have); False when ``timeout`` seconds were not enough. :meth:`poll` still
        reports them."""
        wanted = set(arguments.whole_numbers("job_ids", job_ids))
        return self._wait_while(lambda: not wanted.isdisjoint(self._jobs), timeout)

    def before_overwrite(self, page_ids: Iterable[int], timeout: float, group: int | None = None) -> bool:
        """The engine is about to give these pages to somebody else: wait for the copies that use them. False when time ran out: they
        must not be overwritten then. ``group``: whose page numbers; None: of any group."""
        pages = frozenset(arguments.whole_numbers("page_ids", page_ids))
        return self._wait_while(lambda: any((group is None or job.group == group) and not job.pages.isdisjoint(pages)
                                            for job in self._jobs.values()), timeout)

    def abort(self, job_ids: Iterable[int], timeout: float) -> bool:
        """These jobs end with an error: those that have not begun are not begun, and what others have copied is not served. Wait for
        their end; False when time ran out."""
        wanted = set(arguments.whole_numbers("job_ids", job_ids))
        with self._lock:
            for number in wanted & self._jobs.keys():
                self._jobs[number].is_aborted = True
        return self.wait(wanted, timeout)

    def order_before_engine(self, job_ids: Iterable[int], engine_stream: EngineStream | None, timeout: float) -> bool:
        """Let the engine's stream go on only after these jobs (on the CPU: wait for them). False when time ran out."""
        with self._lock:
            events = [job.event for job in (self._jobs.get(number) for number in job_ids) if job is not None and job.event is not None]
        return self._device.engine_waits(engine_stream, events, arguments.seconds("timeout", timeout))

    def close(self, timeout: float = 10.0) -> bool:
        """Finish what runs, end the rest, and let go of the arena; False when something still runs: the tensors must not be freed then.
        May be called again."""
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        with self._lock:
            if self._is_closed:
                return True
            self._closing = True
            for job in self._jobs.values():
                job.is_aborted = True
        ended = [stream.close(max(deadline - time.monotonic(), 0.1)) for stream in (self._stores, self._loads)]
        if not all(ended):
            _log.warning("tier worker %d: a copy still ran after %s s; its memory stays mapped, for it may be in use", self.rank, timeout)
            return False
        with self._lock:  # whoever says meanwhile that it copies nothing must not find the arena half closed
            self._is_closed = True
            self._copiers = []
            self._arena.close()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _submit(self, job_id: int, group: int, pages: Sequence[int], slots: Sequence[int], skip_pages: int,
                after_stream: EngineStream | None, is_store: bool) -> None:
        pages, slots = arguments.whole_numbers("pages", pages), arguments.whole_numbers("slots", slots)
        self._check_job(job_id, group, pages, slots, skip_pages, is_store)
        shape = self.plan.layout.groups[group]
        with self._lock:
            if self._closing:
                raise TransferError(f"job {job_id}: this TierWorker is closed")
            copier = self._copiers[group]
        runs = page_runs(self._places[group], pages, slots, skip_pages)
        whole: list[int] = []
        if is_store:
            end = skip_pages + len(pages)
            whole = [slot for number, slot in enumerate(slots) if end >= (number + 1) * shape.pages_per_block
                     and (number > 0 or skip_pages == 0 or shape.is_state)]
        job = _Job(job_id, group, pages, is_store, whole, len(pages) * shape.bytes_per_page)
        engine = self._device.engine_event(after_stream)
        after = [] if engine.is_done() else [engine]
        stream = self._stores if is_store else self._loads
        with self._lock:
            if self._closing:
                raise TransferError(f"job {job_id}: this TierWorker is closed")
            if not is_store and not self._arena.has_index:
                raise TransferError(f"job {job_id}: no index uses the arena of this worker: one of the two was started again; start index "
                                    "and workers again together")
            if job_id in self._jobs:
                raise RequestError(f"job {job_id}: is under way already; every plan's job is submitted once")
            if self._arena.board.has_ended(self.rank, job_id):
                raise RequestError(f"job {job_id}: has ended already, and others may use its slots by now; make a new plan")
            # An engine may take pages back while an old store still reads them, if it asked before_overwrite; this costs little more.
            after += [other.event for other in self._jobs.values() if other.is_store != is_store and other.event is not None
                      and not job.pages.isdisjoint(other.pages)]
            self._jobs[job_id] = job
            self._arena.board.note_begun(self.rank, job_id)
            try:
                job.event = stream.submit(self._work(job, copier, runs), after, lambda event: self._over(job, event))
            except BaseException:
                self._arena.board.note_ended(self.rank, job_id)
                del self._jobs[job_id]
                raise
        stream.let_begin()

    def _work(self, job: _Job, copier: PageCopier, runs: Sequence[PageRun]) -> Callable[[], None]:
        copy = copier.store if job.is_store else copier.load

        def attempt() -> None:
            if job.is_aborted:
                raise TransferError(f"job {job.number}: aborted before it began")
            if self._faults is not None:
                self._faults.before(FaultOperation.COPY, Level.SECONDARY if job.is_store else Level.PRIMARY)
            copy(runs)

        def work() -> None:
            for _ in range(0 if job.is_store else LOAD_ATTEMPTS - 1):
                try:
                    attempt()
                    return
                except Exception as error:
                    if job.is_aborted:
                        raise
                    _log.warning("tier worker %d: load %d has failed and is made again: %s", self.rank, job.number, error)
            attempt()
        return work

    def _over(self, job: _Job, event: Event) -> None:
        """The job has ended. In shared memory first: whoever hears of it from the engine may look there at once."""
        error = event.error
        if error is None and job.is_aborted:  # its pages may have been given to others while they were copied
            error = TransferError(f"job {job.number}: aborted")
        if job.is_store and error is None:
            self._arena.board.note_whole(job.group, job.whole, 0 if self.plan.layout.is_replicated else self.rank, job.number)
        self._arena.board.note_ended(self.rank, job.number)
        if error is not None:
            _log.warning("tier worker %d: job %d failed, what it was to bring is computed again: %s", self.rank, job.number, error)
        result = WorkerResult(job.number, job.is_store, None if error is None else f"{type(error).__name__}: {error}",
                              job.num_bytes if error is None else 0, time.perf_counter() - job.started)
        with self._lock:
            self._results.append(result)
            del self._jobs[job.number]
            self._changed.notify_all()

    def _wait_while(self, is_busy: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        with self._lock:
            while is_busy():
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return False
                self._changed.wait(left)
        return True

    def _check_numbers(self, job_id: int, group: int, slots: Sequence[int], is_store: bool = True) -> None:
        layout = self.plan.layout
        if isinstance(job_id, bool) or not isinstance(job_id, int) or not 0 <= job_id < 1 << 62:
            raise RequestError(f"job_id={job_id!r}: pass the job_id of a plan")
        checked_group(group, len(layout.groups))
        num_slots = self.plan.host_slots[group]
        if not len(slots) or min(slots) < 0 or max(slots) >= num_slots or (is_store and len(set(slots)) != len(slots)):
            raise RequestError(f"job {job_id}: slots={list(slots)[:8]}: pass the plan's, for a store different ones of 0..{num_slots - 1}")

    def _check_job(self, job_id: int, group: int, pages: Sequence[int], slots: Sequence[int], skip_pages: int, is_store: bool) -> None:
        self._check_numbers(job_id, group, slots, is_store)
        per_block = self.plan.layout.groups[group].pages_per_block
        if not len(pages) or min(pages) < 0 or max(pages) >= self._num_pages[group]:
            raise RequestError(f"job {job_id}: pages={list(pages)[:8]}: group {group} has pages 0..{self._num_pages[group] - 1}")
        if isinstance(skip_pages, bool) or not isinstance(skip_pages, int):
            raise RequestError(f"job {job_id}: skip_pages={skip_pages!r}: pass a whole number")
        filled = skip_pages + len(pages)
        if not 0 <= skip_pages < per_block or not (len(slots) - 1) * per_block < filled <= len(slots) * per_block:
            raise RequestError(f"job {job_id}: {len(pages)} pages behind {skip_pages} skipped ones do not make {len(slots)} blocks of "
                               f"{per_block}; only the first block may lack pages at its front, and the last one at its end")


def _checked(plan: TierPlan, device: str, tensors: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Pages of each group. ConfigError where tensors do not fit the plan."""
    groups = plan.layout.groups
    if len(tensors) != len(groups):
        raise ConfigError(f"tensors: of {len(tensors)} groups; the plan has {len(groups)}")
    num_pages: list[int] = []
    for number, (members, group) in enumerate(zip(tensors, groups, strict=True)):
        if len(members) != len(group.tensor_page_bytes):
            raise ConfigError(f"tensors[{number}]: {len(members)} tensors; the plan has {len(group.tensor_page_bytes)} in group {number}")
        for position, (tensor, width) in enumerate(zip(members, group.tensor_page_bytes, strict=True)):
            name = f"tensors[{number}][{position}]"
            if tensor.dtype not in (torch.uint8, torch.int8) or tensor.dim() != 2 or tensor.shape[1] != width:
                raise ConfigError(f"{name}: {tensor.dtype} {list(tensor.shape)}; pass it as uint8 or int8 [num_pages, {width}] (a view)")
            if tensor.stride(1) != 1 and width > 1:
                raise ConfigError(f"{name}: strides {tensor.stride()}; the bytes of a page must follow one another")
            if tensor.stride(0) < width and tensor.shape[0] > 1:
                raise ConfigError(f"{name}: strides {tensor.stride()}; pages of {width} bytes overlap")
            if tensor.device.type != device.partition(":")[0]:
                raise ConfigError(f"{name}: is on {tensor.device}, and device={device!r}")
        num_pages.append(min(tensor.shape[0] for tensor in members))
    return num_pages

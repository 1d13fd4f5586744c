"""``TierStore``: a tier in one process, for engines that put and fetch whole pages in calls that may wait (design: two ways to attach).

Such an engine (SGLang's storage interface) has threads for these calls alone, which want their pages when a call returns. So there is no
job that outlives a call, and no stream: the calling thread copies between the host arena and the tensors that come with the call. Keys,
levels, leases and NVMe are ``TierIndex``'s.

Calls may come from several threads. What fails is a miss: a page that is not there, could not be read, or did not fit.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Final, NamedTuple, Self

import torch

from kvtier.errors import ConfigError, KVTierError, RequestError
from kvtier.io.faults import FaultOperation
from kvtier.io.page_copier import HostPageCopier, PagePlaces, page_runs
from kvtier.io.shared_arena import SharedArena
from kvtier.pools.host_arena import HostArena
from kvtier.pools.page_layout import PageLayout
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_index import TierIndex
from kvtier.tiering.tier_messages import LoadPlan, StorePlan
from kvtier.tiering.tier_pulse import TierPulse
from kvtier.tiering.tier_worker import LOAD_ATTEMPTS
from kvtier.types import Level

_log = logging.getLogger(__name__)

JOB_PAGES: Final = 32
"""Pages that are copied at a time: while some are copied, the next ones are read from NVMe."""
_LOOK_AGAIN: Final = 0.05  # seconds


class _Call(NamedTuple):
    """A call of a thread: its request, and where it runs."""

    request_id: str
    frame: FrameType


class TierStore:
    """Pages of one process, by content key.

    Args:
        layout: the pages: of one rank, each page a block. A page's bytes may lie in several pieces; which ones, each call says.
        config: sizes, thresholds and the NVMe directory, as of ``TierIndex``.
        model: "name@revision:weights-digest"; needed with an NVMe level.
        engine_id: names the arena in shared memory; another one for each store on the machine.
        fingerprint: whatever else the bytes depend on and the keys do not contain.
        read_timeout: seconds after which :meth:`read` no longer waits for NVMe, or for somebody else's store.

    Attributes:
        index: ledger, manifest and NVMe I/O.

    Raises:
        ConfigError: what ``TierIndex`` refuses.
        RequestError: a layout of more than one rank, or of several pages per block.
    """

    def __init__(self, layout: PageLayout, config: TierConfig, *, model: str | None = None, engine_id: str, fingerprint: str = "",
                 read_timeout: float = 5.0) -> None:
        if layout.ranks != 1 or any(group.pages_per_block != 1 for group in layout.groups):
            raise RequestError(f"layout={layout.describe()}: a TierStore has the pages of one rank, one in a block")
        self._timeout = arguments.seconds("read_timeout", read_timeout)
        self._layout = layout
        self._faults = config.faults
        self._numbers = itertools.count()
        self._is_closed = False
        self._closing = threading.RLock()
        self._calls: dict[int, _Call] = {}  # by thread, its call in flight
        self._places: list[PagePlaces] = []
        undo = ExitStack()
        self.index = TierIndex(layout, config, model=model, engine_id=engine_id, fingerprint=fingerprint, lookup_timeout=read_timeout)
        try:
            undo.callback(self.index.close)
            self.index.shown_name = type(self).__name__
            self._arena = SharedArena(self.index.plan.arena, rank=0)
            undo.callback(self._arena.close)
            if not self._arena.has_index:
                raise ConfigError(f"{self._arena.path}: somebody has removed the file of this TierStore's memory while it was opened; make "
                                  "a new one")
            for number, group in enumerate(layout.groups):
                slots = self._arena.groups[number]
                assert slots is not None
                self._places.append(PagePlaces(slots.stride, 0, group.bytes_per_page, 1, slots.slots_per_piece))
            self._pulse = TierPulse(self._beat, f"kvtier-pulse-{engine_id}")
            undo.callback(self._pulse.close, 1.0)
            undo.callback(atexit.unregister, self.close)
            atexit.register(self.close)
        except BaseException:
            undo.close()
            raise

    # -- pages -----------------------------------------------------------------------------------------------------------

    @property
    def num_resets(self) -> int:
        """Counts resets: for :meth:`write`, where pages of one content come in several calls."""
        return self.index.num_resets

    def count(self, keys: Sequence[bytes], group: int = 0) -> int:
        """How many keys from the first on the store has, on whichever level, or is about to have. What of them lies on NVMe begins to be
        read. Nothing is leased: a later :meth:`read` may find fewer.

        Raises:
            RequestError: as of ``TierIndex.lookup``.
        """
        self.index.prefetch((), group)  # checks the group
        keys = arguments.content_keys(keys)  # nothing that the ledger is asked in a turn may be of another kind
        with self.index.locked() as ledger:
            known = ledger.allocators[group].warm
            found = next((place for place, key in enumerate(keys) if key not in known), len(keys))
        if found:
            self.index.prefetch(keys[:found], group)
        return found

    def read(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor], pages: Sequence[int], group: int = 0) -> int:
        """Copy pages out of the store, up to the first that is not to be had; verified bytes only.

        Args:
            keys: of successive pages.
            tensors: the pieces of a page, each a uint8 tensor ``[num_pages, bytes]`` in host memory, rows contiguous; together the bytes
                of a page.
            pages: for each key, the row that it goes to.
            group: of the layout.

        Returns:
            how many pages, from the first on, have been filled. Rows behind them may have been written to, with anything.

        Raises:
            RequestError: keys or tensors that do not fit the layout; nothing has been copied then.
        """
        pages = self._checked_pages(keys, tensors, pages, group)
        done, num_resets = 0, self.num_resets
        with self._request("read") as request_id:
            copier = HostPageCopier(tensors, self._slots(group))
            self.index.prefetch(keys, group)
            for start in range(0, len(keys), self._step(group)):
                if self._is_closed:  # nothing more is waited for
                    break
                part = list(keys[start:start + self._step(group)])
                found = self.index.wait_lookup(request_id, part, group, timeout=self._timeout)
                plan = self.index.plan_load(request_id, part[:found.num_hits], group)
                count = len(plan.keys)
                if not count:
                    break
                runs = page_runs(self._places[group], pages[start:start + count], plan.slots, 0)
                is_good = self._carry_out(plan, (), partial(copier.load, runs), LOAD_ATTEMPTS, Level.PRIMARY)
                done += count if is_good else 0
                if not is_good or count < len(part):
                    break
        return done if self.num_resets == num_resets else 0

    def write(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor], pages: Sequence[int], group: int = 0,
              num_resets: int | None = None) -> list[bool]:
        """Copy pages into the store, as far as there is room; front first. Arguments and errors as of :meth:`read`.

        A reset meanwhile ends the call: these pages may be of weights that it was to forget, so none of them is stored behind it.

        Args:
            num_resets: the store's when the pages were there to be stored; None: as of now.

        Returns:
            for each key, whether the store has it. What another call is only just storing does not count: that may fail yet.
        """
        pages = self._checked_pages(keys, tensors, pages, group)
        num_resets = self.num_resets if num_resets is None else num_resets
        stored = [False] * len(keys)
        # More than the host level holds would only push out its own head, and what lies behind a gap is of no use.
        most = min(len(keys), self.index.plan.host_slots[group])
        with self._request("write") as request_id:
            copier = HostPageCopier(tensors, self._slots(group))
            for start in range(0, most, self._step(group)):
                part = list(keys[start:min(start + self._step(group), most)])
                plan = self.index.plan_store(request_id, part, group)
                if self.num_resets != num_resets:  # jobs planned before it were given up by it, and this one is not to be begun
                    if plan.keys:
                        self.index.cancel_job(plan.job_id)
                    break
                is_good = True
                if plan.keys:
                    rows = [pages[start + position] for position in plan.positions]
                    runs = page_runs(self._places[group], rows, plan.slots, 0)
                    is_good = self._carry_out(plan, plan.slots, partial(copier.store, runs), 1, Level.SECONDARY)
                # Asked of the ledger: a job may have been given up meanwhile, and then completing it lost nothing.
                stored[start:start + len(part)] = self._has(part, group)
                if plan.num_refused or not is_good:
                    break
        self._pulse.hurry()
        return stored if self.num_resets == num_resets else [False] * len(keys)

    # -- the whole -------------------------------------------------------------------------------------------------------

    def reset(self, timeout: float = 60.0) -> None:
        """Forget everything on all levels, and what calls in flight would bring; errors as of ``TierIndex.reset``."""
        self.index.reset(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write to NVMe what is only in host memory, as far as half of ``timeout`` seconds suffices, and let go of everything. Calls in
        flight end early. May be called again: what a hanging call did not let go of the first time is then tried again."""
        timeout = arguments.seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        if not self._closing.acquire(timeout=timeout):
            return  # another thread is at it
        try:
            is_first, self._is_closed = not self._is_closed, True
            self._end_left_over()
            is_quiet = self._end_calls(time.monotonic() + timeout / 4)
            if is_first:
                atexit.unregister(self.close)
                self._pulse.close(timeout / 4)
                self.index.flush(timeout / 2)
            if not is_quiet:
                _log.warning("tier store: a call still ran after %s s; its memory stays mapped, for it may be in use", timeout / 4)
                return
            self.index.close(max(deadline - time.monotonic(), 1.0))
            self._arena.close()
        finally:
            self._closing.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _beat(self) -> bool:
        self.index.poll()
        return self.index.has_work

    def _has(self, keys: Sequence[bytes], group: int) -> list[bool]:
        with self.index.locked() as ledger:
            level = ledger.allocators[group]
            return [level.has(key) for key in keys]

    def _end_calls(self, deadline: float) -> bool:
        """End the requests of calls in flight, so that those which wait for NVMe find a miss, until there are no calls. False when there
        still are some at the deadline. Again and again: a call may begin to wait a moment after its request was ended."""
        while self._calls:
            if time.monotonic() >= deadline:
                return False
            for call in list(self._calls.values()):
                self.index.end_request(call.request_id)
            time.sleep(_LOOK_AGAIN)
        return True

    @contextmanager
    def _request(self, kind: str) -> Iterator[str]:
        """A request of the index that ends with the call, and its leases and jobs with it. The arena stays as long as there is one."""
        caller, request_id = threading.get_ident(), f"{kind}-{next(self._numbers)}"
        earlier = self._calls.get(caller)
        if earlier is not None and _runs_here(earlier.frame):  # this comes out of a signal handler, and that call will copy yet
            raise KVTierError(f"{kind}: called in the middle of another one of the same thread; nothing was done")
        self._end_left_over()
        try:
            self._calls[caller] = _Call(request_id, sys._getframe(2))  # behind contextlib's
            if self._is_closed:  # asked behind the entry, and said before close() looks for entries: one of the two sees the other
                raise KVTierError("this TierStore is closed; make a new one")
            yield request_id
        finally:
            call = self._calls.get(caller)
            if call is not None and call.request_id == request_id:
                self._end_left_over()

    def _end_left_over(self) -> None:
        """End this thread's call, which copies nothing any more; where an exception keeps it from that, the thread's next one does it."""
        caller = threading.get_ident()
        call = self._calls.get(caller)
        if call is None:
            return
        request_id = call.request_id
        with suppress(KVTierError), self.index.locked() as ledger:  # a closed index has ended everything
            for job in [job for job in ledger.jobs.values() if job.request_id == request_id]:
                ledger.cancel(job)
            for number in [job.number for job in ledger.abandoned.values() if job.request_id == request_id]:
                ledger.release_abandoned(number)
            ledger.end_request(request_id)
            ledger.start_reads()
        self._calls.pop(caller, None)

    def _carry_out(self, plan: LoadPlan | StorePlan, written: Sequence[int], copy: Callable[[], None], attempts: int, level: Level) -> bool:
        """Copy here and now, say so where the index looks, and complete the job, also where the call is interrupted. Whether it went
        well; what did not is forgotten."""
        board, job_id = self._arena.board, plan.job_id
        board.note_begun(0, job_id)
        failed: Sequence[bytes] = ()
        is_good = False
        num_lost = 0
        try:
            for attempt in range(attempts):
                try:
                    if self._faults is not None:
                        self._faults.before(FaultOperation.COPY, level)
                    copy()
                    is_good = True
                    break
                except Exception as error:
                    _log.warning("tier store: copy %d of job %d failed: %s", attempt + 1, job_id, error)
            else:
                failed = plan.keys  # otherwise they would be found again for ever
            if is_good and len(written):
                board.note_whole(plan.group, written, 0, job_id)
        finally:
            board.note_ended(0, job_id)
            num_lost = self.index.complete(job_id, failed)
        return is_good and not num_lost

    def _step(self, group: int) -> int:
        return max(1, min(JOB_PAGES, self.index.plan.host_slots[group] // 2))

    def _slots(self, group: int) -> HostArena:
        slots = self._arena.groups[group]
        assert slots is not None
        return slots

    def _checked_pages(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor], pages: Sequence[int], group: int) -> list[int]:
        """The rows in a list of their own: what is copied is what was checked. RequestError as of :meth:`read`."""
        self.index.prefetch((), group)  # checks the group
        arguments.sequence_of("keys", keys)
        pages = arguments.whole_numbers("pages", pages)
        if len(pages) != len(keys):
            raise RequestError(f"pages: {len(pages)} rows for {len(keys)} keys; pass one for each")
        width, size = sum(tensor.shape[-1] for tensor in tensors), self._layout.groups[group].bytes_per_page
        for tensor in tensors:
            if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.device.type != "cpu" or (
                    tensor.stride(1) != 1 and tensor.shape[1] > 1):
                raise RequestError(f"tensors: {tensor.dtype} {list(tensor.shape)} on {tensor.device}; pass uint8 [num_pages, bytes] in "
                                   "host memory, rows contiguous")
            if not tensor.shape[1] or (tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]):
                raise RequestError(f"tensors: {list(tensor.shape)} with strides {tensor.stride()}; pass rows of a byte at least, each in "
                                   "memory of its own")
        if width != size:
            raise RequestError(f"tensors: a page of {width} bytes; pages of group {group} have {size}")
        rows = min((tensor.shape[0] for tensor in tensors), default=0)
        if pages and not 0 <= min(pages) <= max(pages) < rows:
            raise RequestError(f"pages={pages[:8]}: the tensors have rows 0..{rows - 1}")
        return pages


def _runs_here(frame: FrameType) -> bool:
    """Whether this thread is within it."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is not None

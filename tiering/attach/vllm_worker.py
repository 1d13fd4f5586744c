"""``TieredWorker``: vLLM's view of a ``TierWorker``, beside the pages of one rank (design: two ways to attach).

vLLM has no failed transfer: a worker that reports one ends the engine. A store that fails, or does not end, is therefore reported as done;
that it was not is read by the index in shared memory. A load is a copy out of host memory, which the worker tries again; if it fails for
good, ending the engine is right, because its pages hold garbage. That holds also for a load that is flushed: vLLM flushes loads in a reset
only, and the request that waits for its pages goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.errors import KVTierError, TransferError
from kvtier.tiering.attach.vllm_manager import TierTransfer
from kvtier.tiering.attach.vllm_pages import PartPages, pages_of
from kvtier.tiering.tier_worker import LOAD_ATTEMPTS, TierWorker

_log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 30.0
"""Longest wait for copies before vLLM overwrites their pages. They are copies between memories: longer means that something is stuck."""


@dataclass
class _Transfer:
    """One job of vLLM: the tier's jobs that it is made of and that have not ended."""

    is_store: bool
    deadline: float
    left: dict[int, PartPages] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0


class TieredWorker(OffloadingWorker):
    """One rank's transfers.

    Args:
        worker: the rank's copies; closed by :meth:`shutdown`.
        pages_per_chunk: vLLM's blocks in one chunk.
        job_timeout: seconds after which a store is given up.
        clock: seconds that only go forward.
    """

    def __init__(self, worker: TierWorker, pages_per_chunk: int, job_timeout: float = 120.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.worker = worker
        self._job_timeout = job_timeout
        self._clock = clock
        self._pages_per_chunk = pages_per_chunk
        self._transfers: dict[int, _Transfer] = {}
        self._owners: dict[int, int] = {}
        self._refusal_said = False

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, TierTransfer)
        transfer = self._transfers[job_id] = _Transfer(True, self._clock() + self._job_timeout)
        try:
            for pages in self._pages(dst_spec, src_spec, is_store=True):
                self.worker.submit_store(pages.part.job_id, pages.part.group, pages.pages, pages.part.slots, skip_pages=pages.skip)
                self._own(transfer, job_id, pages)
        except KVTierError as error:
            if not self._refusal_said:
                self._refusal_said = True
                _log.warning("a store is left out, its blocks will be computed again: %s", error)
            for part in dst_spec.parts:
                if part.job_id not in transfer.left:
                    self.worker.fail_store(part.job_id, part.group, part.slots)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        assert isinstance(src_spec, TierTransfer)
        transfer = self._transfers[job_id] = _Transfer(False, float("inf"))
        for pages in self._pages(src_spec, dst_spec, is_store=False):
            self._own(transfer, job_id, pages)
            self.worker.submit_load(pages.part.job_id, pages.part.group, pages.pages, pages.part.slots, skip_pages=pages.skip)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers whose parts have all ended, in the order they were submitted.

        Raises:
            TransferError: a load has failed several times.
        """
        for result in self.worker.poll():
            owner = self._owners.get(result.job_id)
            if owner is None:
                continue
            transfer = self._transfers[owner]
            if not result.is_store and result.error is not None:
                raise TransferError(f"a copy from host memory to vLLM's pages has failed {LOAD_ATTEMPTS} times ({result.error}); the pages "
                                    "hold garbage and vLLM has no way to be told, so the engine has to stop")
            del self._owners[result.job_id]
            del transfer.left[result.job_id]
            transfer.num_bytes += result.num_bytes
            transfer.seconds = max(transfer.seconds, result.seconds)
        now = self._clock()
        for transfer in self._transfers.values():
            if transfer.left and now >= transfer.deadline:
                self._give_up(transfer)
        ended = [job_id for job_id, transfer in self._transfers.items() if not transfer.left]
        return [TransferResult(job_id, True, transfer.num_bytes, transfer.seconds)
                for job_id in ended for transfer in [self._transfers.pop(job_id)]]

    def wait(self, job_ids: set[int]) -> None:
        """Return when these transfers need no page any more; vLLM gives their pages to others next. A store that does not end is given up:
        what it still reads is never served.

        Raises:
            TransferError: a load did not end in time. It would write into pages of another request.
        """
        waited = [self._transfers[job_id] for job_id in job_ids if job_id in self._transfers]
        stuck = not self.worker.wait([part for transfer in waited for part in transfer.left], min(WAIT_SECONDS, self._job_timeout))
        for transfer in waited:
            if not stuck or self.worker.wait(transfer.left, 0.0):
                continue
            if not transfer.is_store:
                raise TransferError("a copy into vLLM's pages does not end, and vLLM needs them for another request; the device or the "
                                    "host is stuck")
            self._give_up(transfer)

    def shutdown(self) -> None:
        self._transfers.clear()
        self._owners.clear()
        if not self.worker.close():
            _log.warning("copies were still running when the tier's worker was closed")

    def _give_up(self, transfer: _Transfer) -> None:
        _log.warning("a store of %d parts does not end and is given up; its blocks will be computed again", len(transfer.left))
        self.worker.abort(transfer.left, 0.0)
        for part_id in transfer.left:
            del self._owners[part_id]
        transfer.left.clear()

    def _pages(self, transfer: TierTransfer, spec: GPULoadStoreSpec, *, is_store: bool) -> list[PartPages]:
        return pages_of(transfer.parts, spec.block_ids.tolist(), spec.group_sizes, spec.block_indices, self._pages_per_chunk,
                        is_store=is_store)

    def _own(self, transfer: _Transfer, job_id: int, pages: PartPages) -> None:
        transfer.left[pages.part.job_id] = pages
        self._owners[pages.part.job_id] = job_id

"""``TierIndex``: the tier's half in the scheduler's process, for engines that own their GPU pool (design: two ways to attach).

It has the ledger, the manifest and all NVMe I/O, and decides. The bytes of the host level lie in an arena in shared memory, which
``TierWorker`` objects beside the engine's pages copy to and from. Whatever can fail has failed before a hit is promised: HIT means verified
bytes in host memory.

Calls may come from any thread; none of them waits for a copy or a file but those with a ``timeout``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from kvtier.pools.page_layout import PageLayout
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_messages import KeyState, LoadPlan, Lookup, StorePlan
from kvtier.tiering.tier_plan import TierPlan

RequestId = str | int


class TierIndex:
    """Ledger, manifest and NVMe I/O of one engine.

    Args:
        layout: the engine's pages.
        config: sizes (``secondary`` and ``nvme`` are of all ranks together), thresholds, the NVMe directory. ``primary`` is the engine's own
            and must not be given.
        model: "name@revision:weights-digest"; needed with an NVMe level.
        engine_id: as the workers have it.
        fingerprint: whatever else the keys presuppose and do not contain (dtype, parallel sizes, hash algorithm, ...): another one
            means another namespace.
        lookup_timeout: seconds from a request's first RETRY or PENDING after which what is not there is a MISS for it.
        job_timeout: seconds after which a job that nobody has reported is given up: its keys are dropped (of a store), its slots stay out of
            use until all ranks report it, or :meth:`release_abandoned`.

    Attributes:
        plan: give it to the workers, or let them compute the same (``TierPlan.of``).
        arena_path: the file in /dev/shm; it is gone as soon as all ranks have opened it.

    Raises:
        ConfigError: what ``TierPlan.of`` refuses; no ``model`` with NVMe; too little shared memory, named per rank and in total; a
            directory in use, or made by another model, layout or fingerprint; another index with this ``engine_id``.
    """

    def __init__(self, layout: PageLayout, config: TierConfig, *, model: str | None = None, engine_id: str = "default",
                 fingerprint: str = "", lookup_timeout: float = 5.0, job_timeout: float = 120.0) -> None:
        self.plan = TierPlan.of(layout, config, engine_id)
        raise NotImplementedError

    # -- requests --------------------------------------------------------------------------------------------------------

    def begin_request(self, request_id: RequestId, *, priority: int | str = 35, duration_seconds: float | None = None,
                      use_nvme: bool = True, skip_read: bool = False, skip_write: bool = False) -> None:
        """What holds for this request. Optional: a request that any other call names first begins with these defaults.

        Args:
            request_id: until :meth:`end_request` or :meth:`abort`.
            priority: 0..100 or "HIGH", "MEDIUM", "LOW", of what it stores; below ``secondary_offload_min_priority`` it stores nothing, below
                ``nvme_offload_min_priority`` nothing of it reaches NVMe.
            duration_seconds: after which the priority falls back to 35; None: never.
            use_nvme: False: it finds nothing on NVMe, and what it stores stays off NVMe.
            skip_read: all its lookups miss.
            skip_write: it stores nothing.

        Raises:
            RequestError: a bad value, or the request is active already.
        """
        raise NotImplementedError

    def end_request(self, request_id: RequestId) -> None:
        """The request is over: its leases end, its reads from NVMe that have not begun are not begun. Jobs in flight go on until they
        are reported. Unknown requests are ignored."""
        raise NotImplementedError

    def abort(self, request_id: RequestId) -> None:
        """Like :meth:`end_request`. What it has stored, and is storing, stays."""
        raise NotImplementedError

    # -- finding ---------------------------------------------------------------------------------------------------------

    def lookup(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0) -> Lookup:
        """The longest prefix of ``keys`` that the tier has, leased to the request; starts reading what lies on NVMe.

        Never waits. All keys of the prefix are looked at and all reads are queued at the first call; while nothing has changed since,
        further calls with the same keys cost one comparison. When only the request's own leases keep it from a host slot, what does not fit
        is a MISS (a shorter hit); when others do, RETRY until ``lookup_timeout``.

        Args:
            request_id: who asks; begun if it is new.
            keys: content keys of successive blocks, at most 64 bytes each.
            group: their group.

        Raises:
            RequestError: no such group, a key that is no bytes, empty or longer than 64 bytes.
        """
        raise NotImplementedError

    def key_state(self, request_id: RequestId, key: bytes, group: int = 0) -> KeyState:
        """One key, for engines that ask key by key and in their own order: leases and reads as in :meth:`lookup`."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Counts what may change the answer of a lookup. While it is the same, so are all answers but for deadlines (see
        :meth:`next_deadline`): a caller that rescans each step need not ask again."""
        raise NotImplementedError

    def prefetch(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Begin to read keys from NVMe into host memory ahead of a request, front first, without leases and as far as no content of more
        worth has to go. Returns how many reads were queued."""
        raise NotImplementedError

    # -- moving ----------------------------------------------------------------------------------------------------------

    def plan_load(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0) -> LoadPlan:
        """Pin keys that a lookup called HIT, for a copy into the engine's pages. The request's other leases of this group end.

        Every plan with a job must be reported by :meth:`complete` once all ranks have ended it, or given up by :meth:`cancel_job`.
        """
        raise NotImplementedError

    def plan_store(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0, priority: int | str | None = None) -> StorePlan:
        """Take host slots for those of ``keys`` that the tier does not have. Others can find them once :meth:`complete` is called.

        Front first; it ends at the first key for which there is no room, because what lies behind a gap is of no use. The request's
        leases of this group end. ``priority``: instead of the request's.
        """
        raise NotImplementedError

    def complete(self, job_id: int, failed_keys: Iterable[bytes] = ()) -> int:
        """All ranks have ended the job. The bytes of a store are served from now on, of those keys that every rank says it has copied
        wholly (in shared memory, so a rank that died or failed counts as a failure whatever the caller believes).

        Args:
            job_id: of a plan. One that was given up meanwhile, by its deadline or a reset, is fine.
            failed_keys: keys of it to be forgotten all the same: of a store, and also of a load (so that what cannot be loaded is not found
                again for ever).

        Returns:
            the number of keys that were lost.
        """
        raise NotImplementedError

    def cancel_job(self, job_id: int) -> None:
        """No rank was told of this job, and none will be: its slots are free at once."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Once per engine step: finished reads and writes, deadlines, write-ahead to NVMe, events. Returns whether :attr:`version` changed
        since the last call."""
        raise NotImplementedError

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Wait until all ranks have ended these jobs, as shared memory says; False when ``timeout`` seconds were not enough. They still
        have to be reported. Unknown, reported and given-up jobs count as ended when their slots are free again."""
        raise NotImplementedError

    def wait_lookup(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0, *, timeout: float) -> Lookup:
        """:meth:`lookup` again and again until its answer is final, at most ``timeout`` seconds. For engines that may block."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Reads or writes are under way or queued: an idle engine should go on calling :meth:`poll`."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """Seconds until a deadline may change an answer or give up a job; None without any."""
        raise NotImplementedError

    # -- the whole -------------------------------------------------------------------------------------------------------

    def reset(self, timeout: float = 60.0) -> None:
        """Forget everything on all levels, stores in flight included, before it returns (new weights, for example). Leases end, jobs in
        flight are given up; slots that workers may still use stay out of use until every rank has ended its job.

        Raises:
            TransferError: reads or writes of NVMe did not end in time, or the deletion could not be written down; host memory has been
                forgotten all the same, and nothing old is served by this process. Repeat it.
        """
        raise NotImplementedError

    def release_abandoned(self) -> int:
        """No worker uses slots of given-up jobs any more (the workers are gone, or have been flushed): put them back into use. Returns
        how many there were."""
        raise NotImplementedError

    def flush(self, timeout: float = 60.0) -> bool:
        """Write to NVMe all that may go there; False when time ran out first or the store takes no writes for the moment."""
        raise NotImplementedError

    def stats(self) -> TierStats:
        """Counters since the start, and what the levels hold now."""
        raise NotImplementedError

    def poll_events(self) -> list[KeyEvent]:
        """What came to a level and what left it since the last call, oldest first."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise LedgerError naming the first broken invariant."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> None:
        """End all I/O and let go of files, arena and the directory's lock. Bounded by ``timeout``; may be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TierStats:
    """See ``tier_statistics``: levels (secondary, nvme: max, free, used, busy, evictable, backing blocks), by group and in total;
    ``hit_blocks``, ``missed_blocks``, ``stored_blocks``, ``loaded_blocks``, ``refused_blocks``, ``dropped``, ``lost``, ``quarantined``,
    ``checksum_failures``, ``promoted_blocks``, ``nvme_written_blocks`` and bytes, ``leases``, ``jobs``, ``abandoned_jobs``,
    ``expired_jobs``, ``expired_lookups``, ``requests``."""


class KeyEvent:
    """``event_id`` (ascending by one), ``group``, ``level`` (Level.SECONDARY or Level.NVME), ``keys``, ``is_removed``."""

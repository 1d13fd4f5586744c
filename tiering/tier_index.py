"""``TierIndex``: the tier's half in the scheduler's process, for engines that own their GPU pool (design: two ways to attach).

It has the ledger, the manifest and all NVMe I/O, and decides. The bytes of the host level lie in an arena in shared memory, which
``TierWorker`` objects beside the engine's pages copy to and from. Whatever can fail has failed before a hit is promised: HIT means verified
bytes in host memory.

Calls may come from any thread; none of them waits for a copy or a file but those with a ``timeout``. An exception that cuts a call short in
the middle of a change (KeyboardInterrupt, MemoryError) leaves the index :attr:`~TierIndex.broken`: it finds nothing and stores nothing from
then on, and a new one remedies that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvtier.errors import RequestError
from kvtier.policies.retention import DEFAULT_PRIORITY, check_duration, check_priority, priority_of
from kvtier.pools.pool_index import slot_of
from kvtier.tiering import arguments
from kvtier.tiering.ledger.group import checked_group
from kvtier.tiering.ledger.key_events import KeyEvent
from kvtier.tiering.ledger.key_finding import HIT, MISS, PENDING, RETRY
from kvtier.tiering.ledger.key_jobs import KeyRequest, RequestId
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.tier_index_core import TierIndexCore
from kvtier.tiering.tier_messages import KeyState, LoadPlan, Lookup, StorePlan

_STATES: Final = {HIT: KeyState.HIT, PENDING: KeyState.PENDING, RETRY: KeyState.RETRY, MISS: KeyState.MISS}
_LOOK_AGAIN: Final = 0.001  # seconds


class TierIndex(TierIndexCore):
    """Ledger, manifest and NVMe I/O of one engine.

    Args:
        layout: the engine's pages.
        config: sizes (``secondary`` and ``nvme`` are of all ranks together), thresholds, the NVMe directory. ``primary`` is the engine's
            own and must not be given.
        model: "name@revision:weights-digest"; needed with an NVMe level.
        engine_id: as the workers have it.
        fingerprint: whatever else the keys presuppose and do not contain (dtype, parallel sizes, hash algorithm, ...): another one
            means another namespace.
        lookup_timeout: seconds from a request's first RETRY or PENDING after which what is not there is a MISS for it.
        job_timeout: seconds after which a job that nobody has reported is given up: its keys are dropped (of a store), its slots stay
            out of use until all ranks have ended it, or are gone, or :meth:`release_abandoned`.

    Attributes:
        plan: give it to the workers, or let them compute the same (``TierPlan.of``).
        arena_path: the file in /dev/shm; it is gone as soon as all ranks have opened it.

    Raises:
        ConfigError: what ``TierPlan.of`` refuses; no ``model`` with NVMe; too little shared memory, named per rank and in total; a
            directory in use, or made by another model, layout or fingerprint; another index with this ``engine_id``.
    """

    # -- requests --------------------------------------------------------------------------------------------------------

    def begin_request(self, request_id: RequestId, *, priority: int | str = DEFAULT_PRIORITY, duration_seconds: float | None = None,
                      use_nvme: bool = True, read_nvme: bool = True, read_host: bool = True, skip_read: bool = False,
                      skip_write: bool = False) -> None:
        """What holds for this request. Optional: a request that any other call names first begins with these defaults.

        Args:
            request_id: until :meth:`end_request` or :meth:`abort`.
            priority: 0..100 or "HIGH", "MEDIUM", "LOW", of what it stores; below ``secondary_offload_min_priority`` it stores nothing,
                below ``nvme_offload_min_priority`` nothing of it reaches NVMe.
            duration_seconds: after which the priority falls back to 35; None: never.
            use_nvme: False: it finds nothing on NVMe, and what it stores stays off NVMe.
            read_nvme: False: it finds nothing on NVMe.
            read_host: False: it finds nothing in host memory. What is on NVMe, too, is read again from there; its host copy is given up
                for that, and while others use it, the block is a miss.
            skip_read: all its lookups miss.
            skip_write: it stores nothing.

        Raises:
            RequestError: a bad value, or the request is active already.
        """
        priority = _checked_priority(priority)
        check_duration("duration_seconds", duration_seconds)
        for name, value in (("use_nvme", use_nvme), ("read_nvme", read_nvme), ("read_host", read_host), ("skip_read", skip_read),
                            ("skip_write", skip_write)):
            arguments.truth(name, value)
        _check_request(request_id)
        with self.turn as ledger:
            if request_id in ledger.requests:
                raise RequestError(f"request {request_id!r}: is active already; end_request or abort it first")
            ledger.requests[request_id] = KeyRequest(request_id, len(ledger.allocators), priority, duration_seconds or 0.0, use_nvme,
                                                     not skip_read, not skip_write, read_nvme, read_host)

    def end_request(self, request_id: RequestId) -> None:
        """The request is over: its leases end, its reads from NVMe that have not begun are not begun. Jobs in flight go on until they
        are reported. Unknown requests are ignored."""
        _check_request(request_id)
        with self.turn as ledger:
            ledger.end_request(request_id)
            ledger.start_reads()

    def end_leases(self, request_id: RequestId) -> None:
        """The request goes on and needs no more of what it has looked up: it has planned its loads, or computes instead. Its leases end in
        all groups, and reads for it that have not begun are not begun. Unknown requests are ignored."""
        _check_request(request_id)
        with self.turn as ledger:
            request = ledger.requests.get(request_id)
            if request is not None:
                ledger.move_on(request)

    def abort(self, request_id: RequestId) -> None:
        """Like :meth:`end_request`. What it has stored, and is storing, stays."""
        self.end_request(request_id)

    # -- finding ---------------------------------------------------------------------------------------------------------

    def lookup(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0) -> Lookup:
        """The longest prefix of ``keys`` that the tier has, leased to the request; starts reading what lies on NVMe.

        Never waits. All keys of the prefix are looked at and all reads are queued at the first call; while nothing has changed since,
        further calls with the same keys cost one comparison. When only the request's own leases keep it from a host slot, what does not
        fit is a MISS (a shorter hit); when others do, RETRY until ``lookup_timeout``.

        Args:
            request_id: who asks; begun if it is new.
            keys: content keys of successive blocks, each of 32 bytes, or of 1 to 24.
            group: their group.

        Raises:
            RequestError: no such group, a key of another kind or length.
        """
        wanted = self._checked_keys(keys, group)
        _check_request(request_id)
        found = self._lookup(request_id, wanted, group, None)
        assert found is not None
        return found

    def key_state(self, request_id: RequestId, key: bytes, group: int = 0) -> KeyState:
        """One key, for engines that ask key by key and in their own order: leases and reads as in :meth:`lookup`."""
        self._checked_keys((key,), group)
        _check_request(request_id)
        with self.turn as ledger:
            state = ledger.state(ledger.request(request_id), group, key)
            if state == RETRY:
                ledger.start_reads()
        return _STATES[state]

    def wait_lookup(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0, *, timeout: float) -> Lookup:
        """:meth:`lookup` again and again until its answer is final, at most ``timeout`` seconds; a miss when the request is ended
        meanwhile. For engines that may block."""
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        found = self.lookup(request_id, keys, group)
        with self.turn as ledger:
            asking = ledger.requests.get(request_id)
        while not found.is_final and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN)
            answer = self._lookup(request_id, self._checked_keys(keys, group), group, asking)
            if answer is None:  # it was ended meanwhile; another look would begin it again, with leases that nobody ends
                return Lookup(0, KeyState.MISS, 0)
            found = answer
        return found

    @property
    def version(self) -> int:
        """Counts what may change the answer of a lookup. While it is the same, so are all answers but for deadlines (see
        :meth:`next_deadline`): a caller that rescans each step need not ask again before :meth:`poll` says so."""
        return self._ledger.version

    def prefetch(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Begin to read keys from NVMe into host memory ahead of a request, front first, without leases and as far as no content of
        more worth, or used since, has to go. Returns how many reads were queued."""
        wanted = self._checked_keys(keys, group)
        with self.turn as ledger:
            return ledger.prefetch(group, wanted)

    # -- moving ----------------------------------------------------------------------------------------------------------

    def plan_load(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0) -> LoadPlan:
        """Pin keys that a lookup called HIT, for a copy into the engine's pages. The request's other leases of this group end.

        Every plan with a job must be reported by :meth:`complete` once all ranks have ended it, or given up by :meth:`cancel_job`.
        Arguments and errors as of :meth:`lookup`.
        """
        wanted = self._checked_keys(keys, group)
        _check_request(request_id)
        with self.turn as ledger:
            job = ledger.plan_load(ledger.request(request_id), group, wanted if self._find_number(ledger, is_store=False) else [])
            if job is None:
                return LoadPlan(-1, group, (), (), ())
            return LoadPlan(job.number, group, tuple(job.keys), tuple([slot_of(block.index) for block in job.blocks]), tuple(job.levels))

    def plan_store(self, request_id: RequestId, keys: Sequence[bytes], group: int = 0, priority: int | str | None = None) -> StorePlan:
        """Take host slots for those of ``keys`` that the tier does not have. Others can find them once :meth:`complete` is called.

        Front first; it ends at the first key for which there is no room, because what lies behind a gap is of no use. The request's
        leases of this group end. ``priority``: instead of the request's. Other arguments and errors as of :meth:`lookup`.
        """
        wanted = self._checked_keys(keys, group)
        _check_request(request_id)
        chosen = None if priority is None else _checked_priority(priority)
        with self.turn as ledger:
            request = ledger.request(request_id)
            job, num_known = ledger.plan_store(request, group, wanted if self._find_number(ledger, is_store=True) else [],
                                               request.priority if chosen is None else chosen)
            if job is None:
                return StorePlan(-1, group, (), (), (), num_known, len(wanted) - num_known)
            slots = tuple([slot_of(block.index) for block in job.blocks])
        places = {key: position for position, key in reversed(list(enumerate(wanted)))}  # where a key is there twice, the first
        return StorePlan(job.number, group, tuple(job.keys), tuple([places[key] for key in job.keys]), slots, num_known,
                         len(wanted) - num_known - len(job.keys))

    def complete(self, job_id: int, failed_keys: Iterable[bytes] = ()) -> int:
        """All ranks have ended the job. The bytes of a store are served from now on, of those keys that every rank says it has copied
        wholly (in shared memory, so a rank that died or failed counts as a failure whatever the caller believes). Slots of a rank that
        has not said that it has ended the job stay out of use until it does, or is gone.

        Args:
            job_id: of a plan. One that was given up meanwhile, by its deadline or a reset, is fine.
            failed_keys: keys of it to be forgotten all the same: of a store, and also of a load (so that what cannot be loaded is not
                found again for ever).

        Returns:
            the number of keys that were lost by this call: none of a job that was given up, because these were lost before.

        Raises:
            RequestError: no plan ever had this job.
        """
        failed = _checked_failures(failed_keys)
        with self.turn as ledger:
            _check_job(job_id, ledger)
            job = ledger.jobs.get(job_id)
            if job is None:
                self._release_ended(ledger)
                return 0
            whole = self.arena.board.whole(job.group, [slot_of(block.index) for block in job.blocks], job.number) if job.is_store else None
            num_lost = ledger.complete(job, whole, failed, self._has_ended(job))
            ledger.start_reads()
            return num_lost

    def cancel_job(self, job_id: int) -> None:
        """No rank was told of this job, and none will be: its slots are free at once. Reported jobs are ignored; RequestError when no
        plan ever had it."""
        with self.turn as ledger:
            _check_job(job_id, ledger)
            job = ledger.jobs.get(job_id)
            if job is not None:
                ledger.cancel(job)
            else:
                ledger.release_abandoned(job_id)

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Wait until all ranks have ended these jobs, as shared memory says; False when ``timeout`` seconds were not enough. They still
        have to be reported. Reported jobs have ended; of those that were given up it waits for the ranks, too. RequestError as of
        :meth:`complete`."""
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        if not isinstance(job_ids, Iterable):
            raise RequestError(f"job_ids={job_ids!r}: pass the job_id of plans, in a list")
        waiting = list(job_ids)
        while True:
            with self.turn as ledger:
                for number in waiting:
                    _check_job(number, ledger)
                jobs = [ledger.jobs.get(number) or ledger.abandoned.get(number) or self._orphans.get(number) for number in waiting]
                waiting = [job.number for job in jobs if job is not None and not self._has_ended(job)]
            if not waiting:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_AGAIN)

    def poll_events(self) -> list[KeyEvent]:
        """What came to a level and what left it since the last call, oldest first."""
        with self.turn as ledger:
            return ledger.events.flush()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _lookup(self, request_id: RequestId, wanted: list[bytes], group: int, asking: KeyRequest | None) -> Lookup | None:
        """The answer; None when it is another request than ``asking``, if given, that has this id now."""
        with self.turn as ledger:
            if asking is not None and ledger.requests.get(request_id) is not asking:
                return None
            request = ledger.request(request_id)
            answer = ledger.lookup(request, group, wanted)
            found_below = request.from_nvme[group]
            num_nvme = sum(key in found_below for key in wanted[:answer.num_hits]) if found_below else 0
        return Lookup(answer.num_hits, _STATES[answer.state], num_nvme)

    def _checked_keys(self, keys: Sequence[bytes], group: int) -> list[bytes]:
        checked_group(group, len(self.layout.groups))
        return arguments.content_keys(keys)


def _checked_priority(priority: int | str) -> int:
    number = priority_of("priority", priority)
    check_priority("priority", number)
    return number


def _check_request(request_id: object) -> None:
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        raise RequestError(f"request_id={request_id!r}: a request is named by a text or a whole number")


def _check_job(job_id: object, ledger: KeyLedger) -> None:
    if isinstance(job_id, bool) or not isinstance(job_id, int) or not 0 <= job_id < ledger.next_job:
        raise RequestError(f"job_id={job_id!r}: no plan had this job")


def _checked_failures(keys: object) -> set[bytes]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise RequestError(f"failed_keys={keys!r}: pass the keys of a plan, in a list or a set")
    found = list(keys)
    for key in found:
        if type(key) is not bytes:
            raise RequestError(f"failed_keys={key!r}: a content key is bytes")
    return set(found)

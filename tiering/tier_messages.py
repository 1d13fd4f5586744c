"""What ``TierIndex`` and ``TierWorker`` say to an engine: plain frozen records, picklable, without tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KeyState(enum.Enum):
    """What a lookup says of one key."""

    HIT = "hit"          #: verified bytes in host memory, leased to the request: a load is a memory copy
    PENDING = "pending"  #: a store of it is in flight: ask again
    RETRY = "retry"      #: it is read from NVMe, or host memory is full for the moment: ask again; a deadline turns it into MISS
    MISS = "miss"        #: nothing to be had for this request


@dataclass(frozen=True)
class Lookup:
    """The longest prefix of the keys that was asked for.

    Attributes:
        num_hits: keys from the first on that are HIT, leased to the request until it loads them, stores, ends or is aborted.
        state: of the first key behind them; MISS also when there is none. PENDING and RETRY: asking again later may give more.
        num_nvme: how many of the hits were read from NVMe for this request.
    """

    num_hits: int
    state: KeyState
    num_nvme: int = 0

    @property
    def is_final(self) -> bool:
        """Whether asking again gives nothing more."""
        return self.state is KeyState.MISS


@dataclass(frozen=True)
class StorePlan:
    """Host slots for some of the keys that were to be stored.

    Attributes:
        job_id: what ``TierWorker.submit_store`` and ``TierIndex.complete`` are told. -1 when there is nothing to store.
        group: of all keys.
        keys: what to store, in the order given: those that the tier did not have.
        positions: of each, its place in the keys given.
        slots: of each, the host slot.
        num_known: keys that the tier has already, or is about to have.
        num_refused: keys that it does not take: priority, no room, or the request's own wish.
    """

    job_id: int
    group: int
    keys: tuple[bytes, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    num_known: int = 0
    num_refused: int = 0


@dataclass(frozen=True)
class LoadPlan:
    """Where the blocks are that a request loads; pinned until ``TierIndex.complete(job_id)``.

    Attributes:
        job_id: what ``TierWorker.submit_load`` and ``TierIndex.complete`` are told. -1 when there is nothing to load.
        group: of all keys.
        keys: the keys given, as far as each of them and all before it are there. Of keys that a lookup called HIT: all.
        slots: of each, the host slot.
        levels: of each, where this request found it: ``Level.SECONDARY`` or ``Level.NVME``.
    """

    job_id: int
    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    levels: tuple[int, ...]


@dataclass(frozen=True)
class WorkerResult:
    """How a job ended on one rank.

    Attributes:
        job_id: the job.
        is_store: or a load.
        error: None when all bytes were copied. After a failed load the engine's pages hold garbage.
        num_bytes: copied.
        seconds: from its beginning to its end.
    """

    job_id: int
    is_store: bool
    error: str | None
    num_bytes: int
    seconds: float

    @property
    def success(self) -> bool:
        return self.error is None

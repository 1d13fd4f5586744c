"""What a keyed tier knows of its engine: requests with their leases, and jobs that copy between the engine's pages and host slots."""

from __future__ import annotations

from typing import Final

from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.tiering.ledger.block import Block

RequestId = str | int


class EngineJob:
    """Copies between an engine's pages and host slots that one plan has given out. Workers carry them out and they end together; which
    pages they are only the workers are told.

    Attributes:
        number: ascending from 0.
        request_id: whose job it is.
        group, keys, blocks: what travels; each block has one reference of the job's.
        is_store: engine to host; otherwise host to engine.
        deadline: when it is given up, on the ledger's clock.
        levels: of a load, where each block was found.
    """

    __slots__ = ("blocks", "deadline", "group", "is_store", "keys", "levels", "number", "request_id")

    def __init__(self, number: int, request_id: RequestId, group: int, keys: list[bytes], blocks: list[Block], is_store: bool,
                 deadline: float, levels: list[int]) -> None:
        self.number: Final = number
        self.request_id: Final = request_id
        self.group: Final = group
        self.keys: Final = keys
        self.blocks: Final = blocks
        self.is_store: Final = is_store
        self.deadline: Final = deadline
        self.levels: Final = levels


class Answer:
    """The last answer to a lookup, good while the ledger's version is the same."""

    __slots__ = ("keys", "num_hits", "state", "version")

    def __init__(self, keys: list[bytes], num_hits: int, state: int, version: int) -> None:
        self.keys = keys
        self.num_hits = num_hits
        self.state = state
        self.version = version


class KeyRequest:
    """One request of the engine.

    Attributes:
        priority, duration, use_nvme, reads, writes: what holds for it. reads_nvme: it may find blocks on NVMe; reads_host: in host memory;
            use_nvme: what it stores may reach NVMe.
        leases: by group, the blocks it holds by key, in the order in which it found them.
        from_nvme: by group, those of these keys that it found on NVMe.
        answers: by group, the last answer.
        deadline: when what is not there becomes a miss, on the ledger's clock; 0.0 while nothing is awaited.
        is_late: that moment has passed.
        used: (group, key) of what it has loaded and stored, in order, in ``num_batches`` calls.
    """

    __slots__ = ("answers", "deadline", "duration", "from_nvme", "id", "is_late", "leases", "num_batches", "priority", "reads",
                 "reads_host", "reads_nvme", "use_nvme", "used", "writes")

    def __init__(self, request_id: RequestId, num_groups: int, priority: int = DEFAULT_PRIORITY, duration: float = 0.0,
                 use_nvme: bool = True, reads: bool = True, writes: bool = True, reads_nvme: bool = True,
                 reads_host: bool = True) -> None:
        self.id: Final = request_id
        self.priority = priority
        self.duration = duration
        self.use_nvme = use_nvme
        self.reads = reads
        self.reads_nvme = reads_nvme and use_nvme
        self.reads_host = reads_host
        self.writes = writes
        self.leases: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self.from_nvme: list[set[bytes]] = [set() for _ in range(num_groups)]
        self.answers: list[Answer | None] = [None] * num_groups
        self.deadline = 0.0
        self.is_late = False
        self.used: list[tuple[int, bytes]] = []
        self.num_batches = 0


class WantedRead:
    """A block on NVMe that is to be read into a host slot when there is one. Without a request it is a prefetch, which takes no slot that
    was used since ``stamp``."""

    __slots__ = ("key", "request", "stamp")

    def __init__(self, key: bytes, request: KeyRequest | None, stamp: int) -> None:
        self.key: Final = key
        self.request: Final = request
        self.stamp: Final = stamp

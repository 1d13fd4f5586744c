"""``TierWorker``: the tier's half beside an engine's pages (design: two ways to attach). It only copies device <-> arena.

It knows no keys and no levels. Which slots it may use, ``TierIndex`` has decided; how its jobs ended it says to the engine, and to the index
in shared memory, so that the death of a worker is a miss and no wrong byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import torch

from kvtier.io.device import EngineStream
from kvtier.tiering.tier_messages import WorkerResult
from kvtier.tiering.tier_plan import TierPlan


class TierWorker:
    """Copies of one rank.

    Args:
        plan: the index's.
        device: "cpu", "cuda" or "cuda:N": where the tensors are.
        rank: 0 to ``plan.layout.ranks - 1``.
        tensors: by group, the group's tensors, each uint8 or int8 ``[num_pages, page_bytes]``, rows contiguous (the distance between rows
            may be larger). A tensor may belong to several groups.

    Raises:
        ConfigError: tensors that do not fit the plan, too little shared memory (named per rank and in total), an arena of
            another plan under this engine's name, memory that CUDA will not pin.
    """

    def __init__(self, plan: TierPlan, device: str, rank: int, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        raise NotImplementedError

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
            RequestError: numbers outside the pool or the arena, or that do not add up; a rank other than 0 of replicated pages. Nothing
                has been queued.
            TransferError: the worker is closed.
        """
        raise NotImplementedError

    def submit_load(self, job_id: int, group: int, pages: Sequence[int], slots: Sequence[int], *, skip_pages: int = 0,
                    after_stream: EngineStream | None = None) -> None:
        """Copy slots into pages; arguments and errors as of :meth:`submit_store`. It waits for the engine's stream too: the pages may
        have readers."""
        raise NotImplementedError

    def poll(self) -> list[WorkerResult]:
        """What has ended since the last call; each job once."""
        raise NotImplementedError

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Wait until these jobs have ended (unknown ones have); False when ``timeout`` seconds were not enough. :meth:`poll` still
        reports them."""
        raise NotImplementedError

    def before_overwrite(self, page_ids: Iterable[int], timeout: float, group: int | None = None) -> bool:
        """The engine is about to give these pages to somebody else: wait for the copies that use them. False when time ran out: they
        must not be overwritten then. ``group``: whose page numbers; None: of any group."""
        raise NotImplementedError

    def abort(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Jobs of these that have not begun are not begun (they end with an error); wait for the others. False when time ran out."""
        raise NotImplementedError

    def order_before_engine(self, job_ids: Iterable[int], engine_stream: EngineStream | None, timeout: float) -> bool:
        """Let the engine's stream go on only after these jobs (on the CPU: wait for them). False when time ran out."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> bool:
        """Finish what runs, end the rest, and let go of the arena; False when something still runs: the tensors must not be freed then.
        May be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

"""An engine that owns its pages, with a ``TierIndex`` and workers in this process: pages are filled by key, and checked by it."""

from __future__ import annotations

import hashlib
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvtier import TierConfig, TierIndex, TierWorker
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering.tier_messages import KeyState, LoadPlan, StorePlan
from kvtier.tiering.tier_plan import TierPlan

PLAIN = PageLayout([PageGroup([3000, 5192], name="full")])
PATIENCE = 20.0


def key(number: int, prompt: int = 0) -> bytes:
    return hashlib.sha256(b"%d/%d" % (prompt, number)).digest()


def keys(count: int, prompt: int = 0) -> list[bytes]:
    return [key(number, prompt) for number in range(count)]


def page_bytes(name: bytes, rank: int, page: int, tensor: int, size: int) -> torch.Tensor:
    """What an engine would have computed: other bytes for each key, rank, page of the block and tensor."""
    seed = hashlib.sha256(b"%s/%d/%d/%d" % (name, rank, page, tensor)).digest()
    return torch.frombuffer(bytearray(seed * (size // 32 + 1))[:size], dtype=torch.uint8)


class TierRig:
    """An index and its ranks.

    Args:
        config: of the tier; sizes default to 8 host blocks and no NVMe.
        layout: pages.
        num_pages: of each tensor.
    """

    def __init__(self, layout: PageLayout = PLAIN, *, num_pages: int = 64, faults: Any = None, worker_faults: Any = None,
                 index: dict[str, Any] | None = None, **config: Any) -> None:
        self.layout = layout
        self.config = TierConfig(**{"secondary": "8 blocks", "faults": faults} | config)
        engine_id = f"test-{uuid.uuid4().hex[:12]}"
        plan = TierPlan.of(layout, self.config, engine_id)
        self.pages = [[[torch.zeros(num_pages, size, dtype=torch.uint8) for size in group.tensor_page_bytes] for group in layout.groups]
                      for _ in range(layout.ranks)]
        self.workers = [TierWorker(plan, "cpu", rank, self.pages[rank], faults=worker_faults) for rank in range(layout.ranks)]
        self.index = TierIndex(layout, self.config, engine_id=engine_id, **{"model": "m@1:0"} | (index or {}))
        self._next_request = 0

    # -- what an engine does ---------------------------------------------------------------------------------------------

    def fill(self, group: int, names: list[bytes], first_page: int = 0) -> list[int]:
        """Compute blocks: their pages hold what their keys stand for. Returns the page numbers."""
        per_block = self.layout.groups[group].pages_per_block
        pages = list(range(first_page, first_page + len(names) * per_block))
        for rank, tensors in enumerate(self.pages):
            rank = 0 if self.layout.is_replicated else rank
            for tensor, rows in enumerate(tensors[group]):
                for position, page in enumerate(pages):
                    name, within = names[position // per_block], position % per_block
                    rows[page] = page_bytes(name, rank, within, tensor, rows.shape[1])
        return pages

    def submit_store(self, plan: StorePlan, names: list[bytes], skip_pages: int = 0) -> None:
        """All ranks copy a plan's blocks, of which ``names`` are computed now."""
        pages = self.fill(plan.group, list(plan.keys))
        for worker in self.workers[:self.layout.copies]:
            worker.submit_store(plan.job_id, plan.group, pages[skip_pages:], plan.slots, skip_pages=skip_pages)

    def store(self, names: list[bytes], group: int = 0, request: str | int = "writer", **wishes: Any) -> StorePlan:
        """Plan, copy, report."""
        plan = self.index.plan_store(request, names, group, **wishes)
        if plan.job_id >= 0:
            self.submit_store(plan, names)
            self.finish(plan.job_id)
        return plan

    def finish(self, job_id: int) -> int:
        for worker in self.workers:
            assert worker.wait([job_id], PATIENCE)
            worker.poll()
        return self.index.complete(job_id)

    def look_up(self, names: list[bytes], group: int = 0, request: str | int = "reader") -> int:
        """Hits, once the answer is final."""
        return self.index.wait_lookup(request, names, group, timeout=PATIENCE).num_hits

    def load(self, names: list[bytes], group: int = 0, request: str | int = "reader", first_page: int = 32) -> LoadPlan:
        """Look up, load what hits, check every byte on every rank."""
        hits = self.look_up(names, group, request)
        plan = self.index.plan_load(request, names[:hits], group)
        assert len(plan.keys) == hits
        if hits:
            per_block = self.layout.groups[group].pages_per_block
            pages = list(range(first_page, first_page + hits * per_block))
            for worker in self.workers:
                worker.submit_load(plan.job_id, group, pages, plan.slots)
            self.finish(plan.job_id)
            self.check(group, names[:hits], pages)
        return plan

    def check(self, group: int, names: list[bytes], pages: list[int], skip_pages: int = 0) -> None:
        per_block = self.layout.groups[group].pages_per_block
        for rank, tensors in enumerate(self.pages):
            source = 0 if self.layout.is_replicated else rank
            for tensor, rows in enumerate(tensors[group]):
                for position, page in enumerate(pages, skip_pages):
                    wanted = page_bytes(names[position // per_block], source, position % per_block, tensor, rows.shape[1])
                    assert torch.equal(rows[page], wanted), f"rank {rank}, tensor {tensor}, page {page}: other bytes"

    def states(self, names: list[bytes], group: int = 0, request: str | int = "reader") -> list[KeyState]:
        return [self.index.key_state(request, name, group) for name in names]

    def settle(self) -> None:
        """Step on until nothing is under way."""
        def is_quiet() -> bool:
            self.index.poll()
            return not self.index.has_work

        until(is_quiet)

    def until_over(self) -> None:
        """Step on until no job is left either, given up or not."""
        def is_over() -> bool:
            self.index.poll()
            stats = self.index.stats()
            return not (stats.jobs or stats.abandoned_jobs or self.index.has_work)

        until(is_over)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.index.verify()
                stats = self.index.stats()
                for level in (stats.secondary, stats.nvme):
                    assert level.max_blocks == level.free_blocks + level.used_blocks + level.busy_blocks
        finally:
            self.close()


def until(is_so: Any, seconds: float = PATIENCE) -> None:
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def on_nvme(directory: Path, **more: Any) -> dict[str, Any]:
    """Settings of a tier with 16 blocks on NVMe."""
    return {"nvme": "16 blocks", "nvme_directory": str(directory), "nvme_free_space_reserve": "1MiB"} | more

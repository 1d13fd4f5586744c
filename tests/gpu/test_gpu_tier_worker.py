"""``TierWorker`` on a real device: pages go into pinned slots and come back, behind what the engine has enqueued."""

from __future__ import annotations

import uuid

import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("pydantic_settings", reason="the tier's settings need pydantic-settings")

import torch
from gpu_rig import PATIENCE

from kvtier import TierConfig, TierIndex, TierWorker
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering.tier_plan import TierPlan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pages_per_block", [1, 4])
def test_pages_come_back_byte_for_byte_behind_the_engines_stream(engine: torch.cuda.Stream, pages_per_block: int) -> None:
    layout = PageLayout([PageGroup([65536, 3000], pages_per_block)])
    config = TierConfig(secondary="8 blocks")
    engine_id = f"test-{uuid.uuid4().hex[:12]}"
    count = 8 * pages_per_block
    with torch.cuda.stream(engine):
        pages = [torch.randint(0, 256, (2 * count, size), dtype=torch.uint8, device="cuda") for size in (65536, 3000)]
    torch.cuda.synchronize()
    with TierWorker(TierPlan.of(layout, config, engine_id), "cuda", 0, [pages]) as worker, \
            TierIndex(layout, config, engine_id=engine_id) as index:
        names = [b"block %d" % number for number in range(8)]
        store = index.plan_store("writer", names)
        with torch.cuda.stream(engine):
            torch.cuda._sleep(50_000_000)  # the store must not overtake what the engine computes after this
            for member in pages:
                member[:count].add_(1)
            wanted = [member[:count].clone() for member in pages]
        worker.submit_store(store.job_id, 0, list(range(count)), store.slots, after_stream=engine)
        assert worker.wait([store.job_id], PATIENCE)
        assert index.complete(store.job_id) == 0
        assert index.lookup("reader", names).num_hits == 8
        load = index.plan_load("reader", names)
        order = list(reversed(range(count, 2 * count)))
        worker.submit_load(load.job_id, 0, order, load.slots, after_stream=engine)
        assert worker.order_before_engine([load.job_id], engine, PATIENCE)
        with torch.cuda.stream(engine):
            found = [member[torch.tensor(order, device="cuda")] for member in pages]
        engine.synchronize()
        torch.cuda.synchronize()
        assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))
        assert worker.wait([load.job_id], PATIENCE)
        assert all(result.success for result in worker.poll())
        index.complete(load.job_id)
        index.verify()

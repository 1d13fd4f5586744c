"""The end: closing is bounded whatever is in flight, everybody who waits is told, and a closed cache says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from gate import Gate
from toy_engine import PATIENCE, PROMPT, MakeCache, ToyEngine, WarmCache, delays, tokens_of, wait_until

from kvtier import KVCacheManager, KVTierError, Level, Request
from kvtier.io.faults import FaultOperation, Faults

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

READ, WRITE = FaultOperation.READ, FaultOperation.WRITE


def test_closing_is_bounded_while_reads_are_in_flight(warm_cache: WarmCache, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    cache.add_sequence(Request(1, PROMPT))
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(cache.wait_ready(1))
        except KVTierError as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    cache.close(timeout=0.2)  # returns, although the reads have no end
    waiting.join(PATIENCE)
    assert isinstance(outcome[0], KVTierError), "who waits is told"
    assert "still ran after 0.2 s" in caplog.text
    cache.close(timeout=0.2)  # tries again, bounded too
    assert not cache._everything_let_go
    gate.open()
    wait_until(lambda: cache.close() or cache._everything_let_go)


def test_a_second_close_waits_for_what_the_first_gave_up(warm_cache: WarmCache, caplog: pytest.LogCaptureFixture,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    cache.add_sequence(Request(1, PROMPT))
    wait_until(lambda: gate.arrived > 0)
    cache.close(timeout=0.1)
    assert not cache._everything_let_go
    assert cache.pools[0].primary.rows.sum() >= 0, "a copy may still be using this memory"
    caplog.clear()

    def end_then_close(timeout: float) -> bool:
        assert cache.transfers._outstanding > 0, "it is not over when the second close begins to wait"
        gate.open()
        return close_files(timeout)

    close_files = cache.transfers._files.close
    monkeypatch.setattr(cache.transfers._files, "close", end_then_close)
    cache.close(PATIENCE)
    assert cache._everything_let_go
    assert "still ran" not in caplog.text
    monkeypatch.undo()


def test_closing_waits_for_stores_that_are_under_way(make_cache: MakeCache) -> None:
    cache = make_cache(8, 8, 16, write_ahead_share=1.0, faults=Faults([delays(WRITE, 0.05)]))
    engine = ToyEngine(cache)
    for user in range(3):
        engine.serve(Request(user, tokens_of(user, 13)))
    cache.close()
    cache = make_cache(8, 8, 16)
    assert cache.stats().nvme.evictable_blocks > 0


@pytest.mark.parametrize("timeout", [float("inf"), 1e12, 10 ** 30], ids=str)
def test_closing_may_be_given_any_amount_of_time(make_cache: MakeCache, timeout: float) -> None:
    cache = make_cache(8, 8, 16)
    cache.close(timeout)
    make_cache(8, 8, 16)  # the folder is free


async def test_ready_says_when_the_cache_is_closed_meanwhile(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    cache.add_sequence(Request(1, PROMPT[:5]))
    waiting = asyncio.create_task(cache.ready(1))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(cache.close, 0.1)
    with pytest.raises(KVTierError, match="closed"):
        await asyncio.wait_for(waiting, PATIENCE)  # not only when the read has ended
    gate.open()


CALLS: dict[str, Callable[[KVCacheManager], object]] = {
    "add_sequence": lambda cache: cache.add_sequence(Request(1, [1])),
    "add_sequences": lambda cache: cache.add_sequences([]),
    "wait_ready": lambda cache: cache.wait_ready(1),
    "ready": lambda cache: asyncio.run(cache.ready(1)),
    "is_ready": lambda cache: cache.is_ready(1),
    "step": lambda cache: cache.step(None, ids=[]).__enter__(),
    "block_table": lambda cache: cache.block_table([]),
    "layer_buffer": lambda cache: cache.layer_buffer(0),
    "pool": lambda cache: cache.pool(),
    "mark_computed": lambda cache: cache.mark_computed(1, 1),
    "append_tokens": lambda cache: cache.append_tokens(1, [1]),
    "append_step": lambda cache: cache.append_step([], []),
    "store_context": lambda cache: cache.store_context(1),
    "remove_sequence": lambda cache: cache.remove_sequence(1),
    "rewind": lambda cache: cache.rewind(1, 1),
    "pin": lambda cache: cache.pin(1),
    "block_ids": lambda cache: cache.block_ids(1),
    "block": lambda cache: cache.block(1),
    "block_hashes": lambda cache: cache.block_hashes(1),
    "match": lambda cache: cache.match([1, 2]),
    "needed_blocks_one_step": lambda cache: cache.needed_blocks_one_step(1),
    "remaining_blocks_to_completion": lambda cache: cache.remaining_blocks_to_completion(1),
    "start_scheduling": lambda cache: cache.start_scheduling(),
    "scheduling_remove_sequence": lambda cache: cache.scheduling_remove_sequence(1),
    "num_free_blocks": lambda cache: cache.num_free_blocks(Level.PRIMARY),
    "truncate": lambda cache: cache.truncate([1, 2], 0),
    "set_priority": lambda cache: cache.set_priority(1, 1),
    "offload": lambda cache: cache.offload(1),
    "onboard": lambda cache: cache.onboard(1),
    "read_block": lambda cache: cache.read_block(1),
    "write_block": lambda cache: cache.write_block(1, bytes(cache.layout.groups[0].block_bytes)),
    "report_prefill": lambda cache: cache.report_prefill(1, 1.0),
    "refresh": lambda cache: cache.refresh(),
    "flush": lambda cache: cache.flush(),
    "flush_events": lambda cache: cache.flush_events(),
    "poll_events": lambda cache: cache.poll_events(timeout=5.0),
    "events": lambda cache: cache.events(),
    "stats": lambda cache: cache.stats(),
    "request_stats": lambda cache: cache.request_stats(1),
    "iteration_stats": lambda cache: cache.iteration_stats(),
    "reset": lambda cache: cache.reset(),
    "verify": lambda cache: cache.verify(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_cache_says_so(make_cache: MakeCache, name: str) -> None:
    cache = make_cache()
    cache.close()
    with pytest.raises(KVTierError, match="closed; make a new one"):
        CALLS[name](cache)

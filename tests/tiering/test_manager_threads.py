"""Several threads at one cache while reads and copies fail: no deadlock, no wrong byte, no error but those that are promised."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from crew import Crew
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, KVCacheManager, Request, RequestError, TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

READ, COPY = FaultOperation.READ, FaultOperation.COPY
SECONDS = 4.0


def serve_at_random(cache: KVCacheManager, number: int, guard: threading.Lock, engines: list[ToyEngine]) -> Callable[[], None]:
    """One engine's work: a request of its own, alone or pre-empted, to its end or aborted."""
    engine = ToyEngine(cache, guard)
    engines.append(engine)
    generator = random.Random(number)
    request_id = number * 1000

    def work() -> None:
        prompt = [*tokens_of(generator.randrange(5), generator.randrange(4, 16)), generator.randrange(3)]
        try:
            engine.admit(Request(request_id, prompt))
        except CapacityError:
            time.sleep(0.001)
            return
        try:
            for _ in range(generator.randrange(4)):
                if generator.random() < 0.1:
                    break  # an abort, perhaps while its reads are in flight
                engine.learn(request_id)
                if engine.forward([request_id], generator.choice([None, 3])) and engine.sequences[request_id].computed == len(
                        engine.sequences[request_id].tokens):
                    engine.sample(request_id)
        except CapacityError:
            pass  # pre-empted: somebody else has the room
        engine.remove(request_id, store=generator.random() < 0.9)

    return work


def test_many_threads_share_a_cache(make_cache: MakeCache) -> None:
    cache = make_cache(16, 6, 40, faults=Faults([
        FaultRule(FaultKind.FAILURE, READ, rate=0.01), FaultRule(FaultKind.BIT_FLIP, READ, rate=0.01),
        FaultRule(FaultKind.DELAY, READ, rate=0.1, seconds=0.003), FaultRule(FaultKind.FAILURE, COPY, rate=0.02),
        FaultRule(FaultKind.DELAY, COPY, rate=0.05, seconds=0.002)]))
    crew, guard, engines = Crew(SECONDS), threading.Lock(), []
    for number in range(1, 4):
        crew.add(f"engine {number}", serve_at_random(cache, number, guard, engines))
    generator = random.Random(99)

    def housekeeping() -> None:
        cache.refresh()
        cache.verify()
        cache.stats()
        time.sleep(0.001)

    def look() -> None:
        cache.match(tokens_of(generator.randrange(5), 12))
        block_id = generator.randrange(62)
        view = cache.block(block_id)
        if view.tokens and view.is_full:
            with contextlib.suppress(TransferError):  # lost, or gone from NVMe meanwhile
                cache.read_block(block_id)
        with contextlib.suppress(RequestError, CapacityError):
            generator.choice([cache.offload, cache.onboard])(block_id)
        if generator.random() < 0.02:
            cache.truncate(tokens_of(generator.randrange(5), 12), 4)
        time.sleep(0.001)

    def flush() -> None:
        time.sleep(0.2)
        cache.flush(1.0)

    crew.add("housekeeping", housekeeping)
    crew.add("tools", look)
    crew.add("subscriber", lambda: cache.poll_events(timeout=0.01))
    crew.add("flusher", flush)
    crew.run()
    cache.flush()
    cache.verify()
    stats = cache.stats()
    assert (stats.sequences, stats.leases) == (0, 0)
    assert (stats.primary.free_blocks, stats.primary.busy_blocks) == (16, 0)
    assert sum(engine.checked_tokens for engine in engines) > 500
    assert sum(stats.hit_tokens) > 0
    assert all(rounds > 3 for rounds in crew.rounds.values()), crew.rounds


def test_one_thread_waits_for_what_another_admits(make_cache: MakeCache) -> None:
    """Ready is never said too early, also while the other thread is about to issue its Moves."""
    cache = make_cache(16, 12, 0, faults=Faults([FaultRule(FaultKind.DELAY, COPY, seconds=0.001)]))
    prompts = [tokens_of(user, 13) for user in range(6)]
    engine = ToyEngine(cache)
    for prompt in prompts:
        engine.serve(Request(1, prompt))
    admitted: list[int] = []
    crew = Crew(1.5)
    generator = random.Random(3)

    def admit() -> None:
        if len(engine.sequences) < 2:
            request_id = 100 + crew.rounds.get("admission", 0)
            with contextlib.suppress(CapacityError):
                cache_request = Request(request_id, generator.choice(prompts))
                engine.admit(cache_request)
                admitted.append(request_id)

    def serve() -> None:
        if admitted:
            request_id = admitted.pop(0)
            engine.learn(request_id)
            assert engine.forward([request_id]) == [request_id]
            engine.remove(request_id)

    crew.add("admission", admit)
    crew.add("serving", serve)
    crew.run()
    assert cache.stats().hit_tokens.secondary > 0


def test_moves_that_are_about_to_be_issued_count_as_pending(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between leaving the outbox and reaching the transfers, a Move is known to nobody else."""
    cache = make_cache(8, 8, 0)
    engine = ToyEngine(cache)
    for user in range(3):
        engine.serve(Request(1, tokens_of(user, 13)))
    issue = cache.transfers.issue
    arrived: list[bool] = []

    def look_and_issue(records: Sequence[Any]) -> None:
        indices = [block.index for block in cache._ledger.sequences[2].blocks]
        arrived.append(cache._has_arrived(indices))
        issue(records)

    monkeypatch.setattr(cache.transfers, "issue", look_and_issue)
    engine.admit(Request(2, tokens_of(0, 13)))
    assert arrived == [False]
    assert engine.learn(2) == 12


async def test_many_tasks_wait_at_once(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8, 32)
    engine = ToyEngine(cache)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 13)))
    assert cache.flush()
    cache.close()
    cache = make_cache(16, 8, 32, faults=Faults([FaultRule(FaultKind.DELAY, READ, rate=0.5, seconds=0.02)]))
    cache.add_sequences([Request(user, tokens_of(user, 13)) for user in range(4)])
    assert await asyncio.wait_for(asyncio.gather(*(cache.ready(user % 4) for user in range(12))), 20) == [12] * 12
    cache.verify()


def test_a_cache_closed_under_its_users_tells_them_so(make_cache: MakeCache) -> None:
    cache = make_cache(16, 6, 40)
    crew, guard = Crew(10.0), threading.Lock()
    told: list[str] = []
    for number in range(1, 3):
        work = serve_at_random(cache, number, guard, [])

        def until_closed(work: Callable[[], None] = work) -> None:
            try:
                work()
            except Exception as error:
                if "closed" not in str(error):
                    raise
                told.append(str(error))
                crew.end = 0.0
        crew.add(f"engine {number}", until_closed)

    def close() -> None:
        time.sleep(0.5)
        cache.close()

    crew.add("closing", close)
    crew.run()
    assert told

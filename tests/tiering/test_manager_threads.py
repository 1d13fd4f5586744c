"""Several threads at one cache while reads and copies fail: no deadlock, no wrong byte, no error but those that are promised."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from crew import Crew
from group_engine import LAYOUTS, GroupEngine, attention
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, KVCacheManager, KVLayout, Level, Request, RequestError, TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.copy_batch import WHOLE

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

READ, COPY = FaultOperation.READ, FaultOperation.COPY
SECONDS = 1.0  # at least; more where that was not enough to see anything
SHARED = LAYOUTS | {"one group": KVLayout([attention(1, 8)] * 2, "float32", 4)}


def serve_at_random(cache: KVCacheManager, number: int, guard: threading.Lock, engines: list[GroupEngine]) -> Callable[[], None]:
    """One engine's work: a request of its own, alone or pre-empted, with beams or without, to its end or aborted."""
    engine = GroupEngine(cache, guard)
    engines.append(engine)
    generator = random.Random(number)
    request_id = number * 1000

    def work() -> None:
        prompt = [*tokens_of(generator.randrange(5), generator.randrange(4, 16)), generator.randrange(3)]
        beams = generator.choice([1, 1, 2])
        try:
            engine.admit(engine.request(request_id, prompt, beam_width=beams))
        except CapacityError:
            time.sleep(0.001)
            return
        lease = cache.pin(request_id) if generator.random() < 0.2 else None
        try:
            for _ in range(generator.randrange(5)):
                if generator.random() < 0.1:
                    break  # an abort, perhaps while its reads are in flight
                engine.learn(request_id)
                sequence = engine.sequences[request_id]
                if engine.forward([request_id], generator.choice([None, 3])) and sequence.computed == sequence.num_tokens:
                    if beams > 1 and generator.random() < 0.3:
                        engine.reorder(request_id, [1, 1])
                    with suppress(RequestError):  # a copy failed meanwhile: the engine has to ask first
                        engine.sample(request_id)
        except CapacityError:
            pass  # pre-empted: somebody else has the room
        engine.remove(request_id, store=generator.random() < 0.9)
        if lease is not None:
            lease.release()

    return work


@pytest.mark.parametrize("name", ["one group", "states and a window", "encoder", "side data"])
def test_many_threads_share_a_cache(make_cache: MakeCache, name: str) -> None:
    layout = SHARED[name]
    cache = make_cache(20, 6, 40, layout=layout, max_beam_width=2, faults=Faults([
        FaultRule(FaultKind.FAILURE, READ, rate=0.01), FaultRule(FaultKind.BIT_FLIP, READ, rate=0.01),
        FaultRule(FaultKind.DELAY, READ, rate=0.1, seconds=0.003), FaultRule(FaultKind.FAILURE, COPY, rate=0.01),
        FaultRule(FaultKind.DELAY, COPY, rate=0.05, seconds=0.002)]))
    guard, engines = threading.Lock(), []
    crew = Crew(SECONDS, lambda: sum(engine.checked for engine in engines) > 500 and sum(cache.stats().hit_tokens) > 0)
    for number in range(1, 4):
        crew.add(f"engine {number}", serve_at_random(cache, number, guard, engines))
    generator = random.Random(99)

    def housekeeping() -> None:
        cache.refresh()
        cache.verify()
        stats = cache.stats()
        assert stats.primary.free_blocks == sum(group.primary.free_blocks for group in stats.groups)
        cache.iteration_stats()
        time.sleep(0.001)

    def look() -> None:
        group = generator.randrange(len(layout.groups))
        cache.match(engines[0].request(1, tokens_of(generator.randrange(5), 12)))
        block_id = generator.randrange(20 if layout.groups[group].kind == "cross" else 66)  # an encoder has no lower levels
        view = cache.block(block_id, group=group)
        if view.tokens and view.is_full:
            with suppress(TransferError):  # lost, or gone from NVMe meanwhile
                cache.read_block(block_id, group=group)
        with suppress(RequestError, CapacityError):
            generator.choice([cache.offload, cache.onboard])(block_id, group=group)
        if generator.random() < 0.02:
            cache.truncate(tokens_of(generator.randrange(5), 12), 4)
        cache.num_free_blocks(Level.PRIMARY, group=group)
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
    assert [(group.primary.free_blocks, group.primary.busy_blocks) for group in stats.groups] == [(20, 0)] * len(layout.groups)
    assert sum(engine.checked for engine in engines) > 500
    assert sum(stats.hit_tokens) > 0
    assert len(crew.rounds) == 7
    assert all(rounds > 3 for rounds in crew.rounds.values()), crew.rounds


def test_one_thread_waits_for_what_another_admits(make_cache: MakeCache) -> None:
    """Ready is never said too early, also while the other thread is about to issue its Moves."""
    cache = make_cache(16, 12, 0, faults=Faults([FaultRule(FaultKind.DELAY, COPY, seconds=0.001)]))
    prompts = [tokens_of(user, 13) for user in range(6)]
    engine = ToyEngine(cache)
    for prompt in prompts:
        engine.serve(Request(1, prompt))
    admitted: list[int] = []
    crew = Crew(0.5, lambda: cache.stats().hit_tokens.secondary > 0)
    generator = random.Random(3)

    def admit() -> None:
        if len(engine.sequences) < 2:
            request_id = 100 + crew.rounds.get("admission", 0)
            with suppress(CapacityError):
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
        arrived.append(cache._has_arrived([indices], [WHOLE]))
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
    cache = make_cache(16, 6, 40, max_beam_width=2)
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
                crew.stop()
        crew.add(f"engine {number}", until_closed)

    def close() -> None:
        time.sleep(0.5)
        cache.close()

    crew.add("closing", close)
    crew.run()
    assert told

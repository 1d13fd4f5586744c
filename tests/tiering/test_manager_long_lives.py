"""What kills a cache slowly, or only on a bad day: pins that outlive their request, requests that end half way and come again."""

from __future__ import annotations

import pytest
from gate import Gate
from toy_engine import PROMPT, MakeCache, ToyEngine, WarmCache, tokens_of, wait_until

from kvtier import Level, Request
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

USERS = 4


def round_of_hits(engine: ToyEngine) -> int:
    """Each user's prompt once more. Returns the tokens that were reused."""
    return sum(engine.serve(Request(user, tokens_of(user, 13))) for user in range(USERS))


def test_hits_do_not_decay_however_requests_end(make_cache: MakeCache) -> None:
    """A look-up that is never used, an abort at every point of a life, a pin beyond it, copies that fail: none of them keeps a block."""
    cache = make_cache(10, 8, 0, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.5, count=6)]))
    engine = ToyEngine(cache)
    round_of_hits(engine)
    for number in range(60):
        user = number % USERS
        cache.match(tokens_of(user, 13))
        engine.admit(Request(100, tokens_of(user, 13)))
        way = number % 5
        if way > 0:
            engine.learn(100)
        if way > 1:
            engine.forward([100], chunk=3)
        lease = cache.store_and_pin(100) if way in (2, 3) else None
        engine.remove(100, store=way != 3)
        if lease is not None:
            engine.serve(Request(101, tokens_of(50 + number, 5)))
            lease.release()
        cache.refresh()
    assert cache.transfers.idle(10.0)
    cache.verify()
    stats = cache.stats()
    assert (stats.leases, stats.sequences) == (0, 0)
    assert (stats.primary.free_blocks, stats.secondary.free_blocks) == (10, 8)
    assert stats.transfer_failures >= 6
    round_of_hits(engine)  # what failed copies lost is computed again
    assert round_of_hits(engine) == 12 * USERS, "as in the beginning"


def test_a_request_pre_empted_while_its_reads_are_in_flight_comes_again_under_the_same_id(warm_cache: WarmCache) -> None:
    gate = Gate(FaultOperation.READ)
    cache = warm_cache(gate=gate, primary=12)
    engine = ToyEngine(cache)
    for _ in range(3):
        engine.admit(Request(1, PROMPT))
        assert not cache.is_ready(1)
        engine.remove(1)
    engine.admit(Request(1, PROMPT))
    gate.open()
    assert engine.learn(1) == 12
    assert engine.forward([1]) == [1]
    engine.remove(1)
    wait_until(lambda: cache.num_free_blocks(Level.PRIMARY) == 12)
    cache.verify()
    assert cache.stats().transfer_failures == 0


def test_a_host_level_held_by_leases_costs_content_and_nothing_else(make_cache: MakeCache) -> None:
    cache = make_cache(6, 1, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 5)))
    stored = next(view.id for view in (cache.block(block_id) for block_id in range(7)) if view.tokens)
    cache.offload(stored)
    engine.admit(Request(2, [*tokens_of(1, 4), 9], skip_read=True))
    assert engine.forward([2]) == [2]
    lease = cache.store_and_pin(2)
    assert lease.block_ids[0] == stored
    assert cache.block(stored).level == Level.SECONDARY
    assert cache.num_free_blocks(Level.SECONDARY) == 0
    engine.remove(2, store=False)
    for user in range(2, 8):
        engine.serve(Request(3, tokens_of(user, 13)))
    assert cache.stats().dropped > 0
    assert cache.block(stored).tokens == tuple(tokens_of(1, 4)), "what is pinned stays"
    lease.release()
    assert engine.serve(Request(4, [*tokens_of(1, 4), 9])) == 4
    cache.verify()
    assert cache.num_free_blocks(Level.SECONDARY) == 1

"""Never a wrong byte: long random runs over three levels while reads and copies fail, hang and flip bits."""

from __future__ import annotations

import contextlib
import errno
import random

import pytest
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, Level, Request, RequestError, RetentionConfig, TokenRange
from kvtier.io import write_pause
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

READ, WRITE, COPY = FaultOperation.READ, FaultOperation.WRITE, FaultOperation.COPY


def bad_days(seed: int) -> Faults:
    return Faults([
        FaultRule(FaultKind.FAILURE, READ, rate=0.03), FaultRule(FaultKind.BIT_FLIP, READ, rate=0.03),
        FaultRule(FaultKind.DELAY, READ, rate=0.1, seconds=0.004), FaultRule(FaultKind.FAILURE, COPY, rate=0.03),
        FaultRule(FaultKind.DELAY, COPY, rate=0.05, seconds=0.002), FaultRule(FaultKind.DELAY, WRITE, rate=0.05, seconds=0.002),
        FaultRule(FaultKind.FAILURE, WRITE, rate=0.02, errno=errno.ENOSPC),
    ], seed)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_random_runs_with_faults_never_serve_a_wrong_byte(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(write_pause, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(write_pause, "LONGEST_SECONDS", 0.02)
    generator = random.Random(seed)
    cache = make_cache(generator.randrange(10, 17), generator.randrange(3, 10), generator.randrange(8, 65), keep_backing=seed % 3 != 0,
                       write_ahead_share=generator.choice([0.25, 1.0]), copy_on_partial_reuse=seed % 4 != 1, faults=bad_days(seed))
    engine = ToyEngine(cache)
    prefixes = [tokens_of(family, generator.randrange(6, 22)) for family in range(6)]

    def request(number: int) -> Request:
        priority = generator.choice([35, 35, 35, 20, 60])
        return Request(number, generator.choice(prefixes) + [generator.randrange(3) for _ in range(generator.randrange(10))],
                       lora_id=generator.choice([None, None, 1]), retention=RetentionConfig([TokenRange(0, None, priority)]))

    for round_number in range(40):
        stats = cache.stats()
        if round_number >= 6 and engine.checked_tokens > 1000 and stats.lost > 0 and sum(stats.hit_tokens) > 0:
            break
        engine.run([request(number) for number in range(12)], answer=generator.randrange(6), chunk=generator.choice([None, 1, 3, 8]))
        tools_at_work(engine, generator, prefixes)
    cache.flush()
    cache.verify()
    stats = cache.stats()
    assert (stats.leases, stats.sequences) == (0, 0)
    for level in (stats.primary, stats.secondary):
        assert (level.free_blocks, level.busy_blocks) == (level.max_blocks, 0)
    assert stats.nvme.busy_blocks == stats.quarantined == len(cache.store.quarantined())
    assert engine.checked_tokens > 1000
    assert stats.lost > 0
    assert sum(stats.hit_tokens) > 0
    cache.close()
    # What is left on NVMe is right, or is found out.
    cache = make_cache(16, 8, stats.nvme.max_blocks)
    engine = ToyEngine(cache)
    for number in range(12):
        engine.serve(request(number))
    assert cache.stats().checksum_failures == 0, "bits were flipped on the way, not in the file"


def tools_at_work(engine: ToyEngine, generator: random.Random, prefixes: list[list[int]]) -> None:
    """What else a user may do at any time."""
    cache = engine.cache
    total = sum(level.max_blocks for level in (cache.stats().primary, cache.stats().secondary, cache.stats().nvme))
    for _ in range(6):
        block_id = generator.randrange(total)
        with contextlib.suppress(RequestError, CapacityError):  # empty, busy, no room
            generator.choice([cache.offload, cache.onboard, lambda block: cache.set_priority(block, generator.randrange(101))])(block_id)
        cache.verify()
    if generator.random() < 0.5:
        cache.truncate(generator.choice(prefixes), generator.randrange(12))
    if generator.random() < 0.3:
        cache.flush()
    if generator.random() < 0.1:
        cache.reset()
        assert all(cache.match(prefix).reusable_blocks == 0 for prefix in prefixes)
    cache.verify()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))])
def test_random_steps_of_overlapping_sequences(make_cache: MakeCache, seed: int) -> None:
    """No scheduler: requests come, step, grow, shrink, are pinned and go in any order, often before their reads are done."""
    generator = random.Random(seed)
    cache = make_cache(14, 6, 40, faults=bad_days(seed))
    engine = ToyEngine(cache)
    leases = []
    next_id = 0
    prefixes = [tokens_of(family, 16) for family in range(5)]
    for number in range(4000):
        if number >= 400 and engine.checked_tokens > 300 and sum(cache.stats().hit_tokens) > 0:
            break
        action = generator.random()
        active = list(engine.sequences)
        if action < 0.25 or not active:
            batch = [Request(next_id + number, [*generator.choice(prefixes)[:generator.randrange(4, 17)], generator.randrange(3)])
                     for number in range(generator.randrange(1, 3))]
            next_id += len(batch)
            with contextlib.suppress(CapacityError):
                engine.admit(*batch)
        elif action < 0.4:
            engine.remove(generator.choice(active), store=generator.random() < 0.8)
        elif action < 0.45 and len(leases) < 2:
            leases.append(cache.pin(generator.choice(active)))
        elif action < 0.53 and leases:
            leases.pop(generator.randrange(len(leases))).release()
        elif action < 0.58:
            with contextlib.suppress(CapacityError):
                cache.add_sequence(Request(10_000, generator.choice(prefixes)))
                cache.remove_sequence(10_000)  # gone while its reads are in flight
        else:
            step_some(engine, generator, active)
        cache.refresh()
        cache.verify()
    for request_id in list(engine.sequences):
        engine.remove(request_id)
    for lease in leases:
        lease.release()
    cache.flush()
    stats = cache.stats()
    assert stats.leases == 0
    assert stats.primary.free_blocks == stats.primary.max_blocks
    assert engine.checked_tokens > 300
    assert sum(stats.hit_tokens) > 0
    assert cache.num_free_blocks(Level.PRIMARY) == 14


def step_some(engine: ToyEngine, generator: random.Random, active: list[int]) -> None:
    chosen = generator.sample(active, generator.randrange(1, len(active) + 1))
    for request_id in chosen:
        if not engine.sequences[request_id].is_told and generator.random() < 0.8:
            try:
                engine.learn(request_id)
            except CapacityError:
                engine.remove(request_id)
    told = [request_id for request_id in chosen if request_id in engine.sequences and engine.sequences[request_id].is_told]
    ready = engine.forward(told, chunk=generator.choice([None, 2, 5]))
    for request_id in set(told) - set(ready):
        engine.sequences[request_id].is_told = False
    for request_id in ready:
        sequence = engine.sequences[request_id]
        if sequence.computed == len(sequence.tokens) and generator.random() < 0.7:
            with contextlib.suppress(CapacityError):
                engine.sample(request_id)
        if generator.random() < 0.3:
            engine.cache.store_context(request_id)

"""Layer by layer: a forward pass begins when its first layer has arrived, waits for the others one by one, and is told what it lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
from crew import Crew
from gate import Gate
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, KVCacheManager, KVLayout, LayerSpec, Request
from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io import layer_pieces
from kvtier.io.copiers import HostCopier
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import PRIMARY, SECONDARY
from kvtier.tiering import readiness

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

LAYERS = 4
LAYOUT = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)
PROMPT = tokens_of(1, 13)
OTHER = tokens_of(2, 33)


@pytest.fixture(autouse=True)
def every_load_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pieces, "LEAST_CALL_BYTES", 1)


class LayerGate:
    """Stands before a group's copier from the secondary to the primary level: so many layers pass, from one on they fail."""

    def __init__(self, cache: KVCacheManager, group: int = 0, passes: int = 0) -> None:
        copiers = cache.transfers._routes._copiers[group]
        self._copier = copiers[PRIMARY, SECONDARY]
        copiers[PRIMARY, SECONDARY] = self  # type: ignore[assignment]
        self._passes = passes
        self._changed = threading.Condition()
        self.fails_from = 1 << 30

    def layer_ends(self, pairs: Sequence[tuple[int, int]], most: int) -> tuple[int, ...]:
        return self._copier.layer_ends(pairs, most)

    def copy(self, pairs: Sequence[tuple[int, int]], num_tokens: int = 0, layers: tuple[int, int] | None = None) -> None:
        end = layers[1] if layers is not None else LAYERS
        with self._changed:
            assert self._changed.wait_for(lambda: self._passes >= end, 20.0), "the test left layers held back"
        if end > self.fails_from:
            raise OSError(5, "on purpose")
        self._copier.copy(pairs, num_tokens, layers)

    def let_pass(self, layers: int) -> None:
        with self._changed:
            self._passes = layers
            self._changed.notify_all()


@pytest.fixture
def opened() -> Iterator[list[LayerGate]]:
    """Gates that are opened when the test ends."""
    gates: list[LayerGate] = []
    yield gates
    for gate in gates:
        gate.let_pass(1 << 20)


@pytest.fixture
def offloaded(make_cache: MakeCache, opened: list[LayerGate]) -> Callable[..., tuple[KVCacheManager, ToyEngine, LayerGate]]:
    """A cache whose PROMPT is on the secondary level, an engine that works layer by layer, and a gate before the way up."""
    def make(*, passes: int = 0, **settings: Any) -> tuple[KVCacheManager, ToyEngine, LayerGate]:
        cache = make_cache(10, 8, layout=LAYOUT, **settings)
        engine = ToyEngine(cache, layered=True)
        engine.serve(Request(1, PROMPT))
        engine.serve(Request(2, OTHER))
        assert cache.transfers.idle(10.0)
        assert cache.match(PROMPT).tokens_by_level[1] > 0, "the example is about blocks below"
        gate = LayerGate(cache, passes=passes)
        opened.append(gate)
        return cache, engine, gate
    return make


Offloaded = Callable[..., tuple[KVCacheManager, ToyEngine, LayerGate]]


def test_a_sequence_is_ready_for_each_layer_that_has_arrived(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    promised = engine.admit(Request(3, PROMPT))[0].prepopulated_tokens
    assert promised == 12
    assert cache.wait_ready(3, layer=0, timeout=10.0) == promised
    assert [cache.is_ready(3, layer) for layer in (0, 1, 3, None)] == [True, False, False, False]
    with pytest.raises(TimeoutError):
        cache.wait_ready(3, layer=1, timeout=0.02)
    assert sum(cache.stats().hit_tokens) == 0, "hits count when all of it was delivered"
    gate.let_pass(3)
    assert cache.wait_ready(3, layer=2, timeout=10.0) == promised
    assert not cache.is_ready(3)
    gate.let_pass(LAYERS)
    assert cache.wait_ready(3, timeout=10.0) == promised
    assert sum(cache.stats().hit_tokens) == promised


def test_a_step_begins_with_the_first_layer_and_waits_for_the_others(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    engine.admit(Request(3, PROMPT))
    assert engine.learn(3) == 12
    waited: list[int] = []

    with cache.step(None, [3], layer=0) as step:
        assert step == [3]
        assert step.wait_layer(0) == []
        for layer in range(1, LAYERS):
            timer = threading.Timer(0.02, lambda layer=layer: (waited.append(layer), gate.let_pass(layer + 1)))  # type: ignore[misc]
            timer.start()
            assert step.wait_layer(layer) == []
            assert waited == list(range(1, layer + 1)), "it was not there yet"
            timer.join()
        assert cache.request_stats(3).is_delivered
        assert step.wait_layer(LAYERS - 1) == []
    cache.verify()
    assert engine.forward([3]) == [3]
    engine.remove(3)


def test_without_a_layer_a_step_waits_for_everything(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=LAYERS - 1)
    engine.admit(Request(3, PROMPT))
    passed: list[bool] = []
    timer = threading.Timer(0.05, lambda: (passed.append(True), gate.let_pass(LAYERS)))  # type: ignore[misc]
    timer.start()
    with cache.step(None, [3]) as step:
        assert passed
        assert cache.is_ready(3)
        assert step == [3]
        assert step.wait_layer(LAYERS - 1) == []
    timer.join()


def test_what_fails_after_the_step_has_begun_is_told_and_counts_for_nothing(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    gate.fails_from = 2
    lost = cache.match(PROMPT).tokens_by_level[1] // 4
    engine.admit(Request(3, PROMPT))
    assert engine.learn(3) == 12
    with cache.step(None, [3], layer=0) as step:
        assert step.wait_layer(0) == []
        gate.let_pass(2)
        assert step.wait_layer(1) == []
        gate.let_pass(LAYERS)
        assert step.wait_layer(2) == [3]
        assert step.wait_layer(3) == [3]
        with pytest.raises(RequestError, match="a read failed"):
            cache.mark_computed(3, 13)
    with cache.step(None, [3], layer=0) as step:
        assert step == []
    assert cache.is_ready(3, 0)
    assert engine.learn(3) == 12 - 4 * lost
    gate.fails_from = 1 << 30
    assert engine.forward([3]) == [3]
    engine.remove(3)
    cache.verify()
    assert engine.serve(Request(4, PROMPT)) == 12
    stats = cache.stats()
    assert (stats.leases, stats.fallbacks) == (0, lost)


def test_a_step_over_several_sequences_loses_only_those_that_are_hit(offloaded: Offloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, engine, gate = offloaded(passes=1)
    gate.fails_from = 2
    engine.admit(Request(3, PROMPT), Request(4, [9, 9, 9]))
    engine.learn(3)
    engine.learn(4)
    block_table = cache.block_table

    def step_has_begun(*arguments: Any) -> Any:
        gate.let_pass(LAYERS)
        return block_table(*arguments)

    monkeypatch.setattr(cache, "block_table", step_has_begun)
    assert engine.forward([3, 4]) == [4]
    monkeypatch.undo()
    assert engine.lost_in_step == 1
    engine.sample(4)
    engine.remove(4)
    engine.learn(3)
    assert engine.forward([3]) == [3]
    engine.remove(3)


def test_a_layer_that_does_not_come_ends_the_wait(offloaded: Offloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "STEP_TIMEOUT", 0.05)
    cache, engine, _gate = offloaded(passes=1)
    engine.admit(Request(3, PROMPT))
    engine.learn(3)
    with cache.step(None, [3], layer=0) as step, pytest.raises(TransferError, match=r"wait_layer\(1\)"):
        step.wait_layer(1)
    with pytest.raises(TransferError, match="step: copies"), cache.step(None, [3], layer=1):
        raise AssertionError("it is not there")


def test_a_sequence_may_be_removed_while_its_layers_arrive(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    engine.admit(Request(3, PROMPT))
    engine.learn(3)
    with cache.step(None, [3], layer=0) as step:
        cache.remove_sequence(3)
        gate.let_pass(LAYERS)
        assert step.wait_layer(LAYERS - 1) == []
    assert cache.stats().sequences == 0
    cache.verify()


def test_the_engine_may_leave_a_step_before_all_layers_are_there(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    engine.admit(Request(3, PROMPT))
    engine.learn(3)
    with cache.step(None, [3], layer=0) as step:
        step.wait_layer(0)
    gate.let_pass(LAYERS)
    assert engine.forward([3]) == [3]
    engine.remove(3)
    cache.verify()


def test_closing_while_layers_arrive_ends_what_waits(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(passes=1)
    engine.admit(Request(3, PROMPT))
    engine.learn(3)
    timer = threading.Timer(0.2, gate.let_pass, [LAYERS])
    timer.start()
    cache.close(timeout=5.0)
    timer.join()


async def test_the_event_loop_is_told_of_the_first_layer(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded()
    engine.admit(Request(3, PROMPT))
    first, whole = asyncio.create_task(cache.ready(3, layer=0)), asyncio.create_task(cache.ready(3))
    await asyncio.sleep(0)
    gate.let_pass(1)
    async with asyncio.timeout(10.0):
        assert await first == 12
        assert not whole.done()
        gate.let_pass(LAYERS)
        assert await whole == 12


def test_nothing_of_a_file_counts_as_there_before_it_is_verified(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16, layout=LAYOUT)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    gate = Gate(FaultOperation.READ, rules=[FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, count=1)])
    cache = make_cache(8, 4, 16, layout=LAYOUT, faults=gate)
    engine = ToyEngine(cache, layered=True)
    engine.admit(Request(2, PROMPT))
    assert not cache.is_ready(2, layer=0)
    with cache.step(None, [2], layer=0) as step:
        assert step == []
    gate.open()
    assert engine.learn(2) < 12
    assert engine.forward([2]) == [2]
    engine.remove(2)


def test_only_the_groups_of_the_layers_asked_for_are_waited_for(make_cache: MakeCache, opened: list[LayerGate]) -> None:
    layout = KVLayout([LayerSpec.attention(1, 8)] * 2 + [LayerSpec.attention(2, 8)] * 2, "float32", 4)
    cache = make_cache(6, 8, layout=layout)
    cache.add_sequence(Request(1, PROMPT))
    cache.mark_computed(1, 13)
    cache.remove_sequence(1)
    cache.add_sequence(Request(2, tokens_of(5, 24)))
    cache.remove_sequence(2)
    assert cache.transfers.idle(10.0)
    gates = [LayerGate(cache, group) for group in range(2)]
    opened.extend(gates)
    gates[0].let_pass(1)
    assert cache.add_sequence(Request(3, PROMPT)).prepopulated_tokens == 12
    assert cache.wait_ready(3, layer=0, timeout=10.0) == 12
    assert [cache.is_ready(3, layer) for layer in range(4)] == [True, False, False, False]
    gates[0].let_pass(2)
    assert cache.wait_ready(3, layer=1, timeout=10.0) == 12
    with cache.step(None, [3], layer=1) as step:
        assert step == [3]
        gates[1].let_pass(1)
        assert step.wait_layer(2) == []
        assert not cache.is_ready(3, 3)
        gates[1].let_pass(2)
        assert step.wait_layer(3) == []
        assert cache.is_ready(3)
    cache.verify()


def test_with_recurrent_layers_a_step_begins_when_everything_is_there(make_cache: MakeCache, opened: list[LayerGate]) -> None:
    """After a failure the running state is restored at once: a step that had begun would write what it made of nothing over it."""
    layout = KVLayout([LayerSpec.recurrent(64, 4), LayerSpec.attention(1, 8), LayerSpec.attention(1, 8)], "float32", 4)
    cache = make_cache(6, 8, layout=layout)
    for request_id, prompt in ((1, PROMPT), (2, tokens_of(5, 24))):
        cache.add_sequence(Request(request_id, prompt))
        cache.mark_computed(request_id, len(prompt))
        cache.remove_sequence(request_id)
    assert cache.transfers.idle(10.0)
    gate = LayerGate(cache, group=0)  # attention comes first
    opened.append(gate)
    gate.let_pass(1)
    assert cache.add_sequence(Request(3, PROMPT)).prepopulated_tokens == 12
    timer = threading.Timer(0.05, gate.let_pass, [2])
    timer.start()
    with cache.step(None, [3], layer=0) as step:
        assert step == [3]
        assert cache.is_ready(3)
        assert not any(step.late)
    timer.join()


@pytest.mark.parametrize("layer", [-1, LAYERS, True, "first"])
def test_a_layer_that_there_is_not_is_refused(make_cache: MakeCache, layer: Any) -> None:
    cache = make_cache(8, 4, layout=LAYOUT)
    cache.add_sequence(Request(1, PROMPT))
    calls: list[Callable[[], object]] = [lambda: cache.wait_ready(1, layer=layer), lambda: cache.is_ready(1, layer),
                                         lambda: asyncio.run(cache.ready(1, layer)), lambda: cache.step(None, [1], layer).__enter__()]
    for call in calls:
        with pytest.raises(ConfigError, match=r"the layout has layers 0\.\.3"):
            call()
    with cache.step(None, [1], 0) as step, pytest.raises(ConfigError, match=r"the layout has layers 0\.\.3"):
        step.wait_layer(layer)


def test_one_piece_is_the_whole_block(offloaded: Offloaded) -> None:
    cache, engine, gate = offloaded(layer_pieces=1)
    engine.admit(Request(3, PROMPT))
    assert not cache.is_ready(3, 0)
    gate.let_pass(LAYERS)
    assert engine.learn(3) == 12
    assert cache.is_ready(3)


@pytest.mark.parametrize("seed", range(3))
def test_random_runs_layer_by_layer_with_failures_in_the_middle_never_serve_a_wrong_byte(
        make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    generator = random.Random(seed)
    copy = HostCopier.copy
    goes_on = threading.Event()  # set when a step has begun, or the engine waits for something else

    def copy_or_fail(copier: HostCopier, pairs: Any, num_tokens: int = 0, layers: Any = None) -> None:
        if layers is not None and layers[0] > 0:
            goes_on.wait(1.0)  # a step begins before it has come
            if generator.random() < 0.05:
                raise OSError(5, "on purpose")
        copy(copier, pairs, num_tokens, layers)

    monkeypatch.setattr(HostCopier, "copy", copy_or_fail)
    faults = Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.1, seconds=0.002),
                     FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.02),
                     FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, rate=0.03)], seed)
    cache = make_cache(14, 12, 40, layout=LAYOUT, faults=faults)
    step, refresh, engine_waits, steps_since = cache.step, cache.refresh, cache._device.engine_waits, [0]

    @contextmanager
    def watched_step(*arguments: Any) -> Iterator[Any]:
        with step(*arguments) as begun:
            steps_since[0] += 1
            try:
                yield begun
            finally:
                goes_on.clear()

    def watched_wait(*arguments: Any) -> bool:  # a step knows by then which layers it has to wait for later
        goes_on.set()
        return engine_waits(*arguments)

    def watched_refresh() -> None:  # once in each round of the engine
        if not steps_since[0]:
            goes_on.set()
        steps_since[0] = 0
        refresh()

    monkeypatch.setattr(cache, "step", watched_step)
    monkeypatch.setattr(cache, "refresh", watched_refresh)
    monkeypatch.setattr(cache._device, "engine_waits", watched_wait)
    engine = ToyEngine(cache, layered=True)
    prefixes = [tokens_of(family, generator.randrange(9, 24)) for family in range(5)]
    number = 0
    for _round in range(60):
        requests = [Request(number + offset, [*generator.choice(prefixes), generator.randrange(3)]) for offset in range(8)]
        number += len(requests)
        engine.run(requests, answer=generator.randrange(4), chunk=generator.choice([None, 3]))
        if engine.lost_in_step and sum(cache.stats().hit_tokens) > 200:
            break
    goes_on.set()
    cache.flush()
    cache.verify()
    stats = cache.stats()
    assert (stats.leases, stats.sequences) == (0, 0)
    assert engine.lost_in_step > 0, "no failure met a running step: the example is too tame"
    assert sum(stats.hit_tokens) > 200


def test_engines_that_share_a_cache_read_layer_by_layer_while_loads_fail(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    copy = HostCopier.copy

    def copy_or_fail(copier: HostCopier, pairs: Any, num_tokens: int = 0, layers: Any = None) -> None:
        if layers is not None and layers[0] > 0:
            time.sleep(0.001)
            if generator.random() < 0.1:
                raise OSError(5, "on purpose")
        copy(copier, pairs, num_tokens, layers)

    monkeypatch.setattr(HostCopier, "copy", copy_or_fail)
    cache = make_cache(20, 20, layout=LAYOUT, faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.1, seconds=0.001)]))
    guard = threading.Lock()
    engines = [ToyEngine(cache, guard, layered=True) for _ in range(3)]
    crew = Crew(0.5, lambda: sum(engine.lost_in_step for engine in engines) > 5)
    numbers = count()
    for number, engine in enumerate(engines):
        crew.add(f"engine {number}", partial(serve_one, engine, numbers, random.Random(number)))
    crew.run()
    assert sum(engine.checked_tokens for engine in engines) > 100
    cache.verify()
    assert cache.stats().sequences == 0


def serve_one(engine: ToyEngine, numbers: Iterator[int], generator: random.Random) -> None:
    """One request to its end, or given up where there is no room."""
    number = next(numbers)
    try:
        engine.admit(Request(number, [*tokens_of(generator.randrange(5), 21), generator.randrange(3)]))
    except CapacityError:
        time.sleep(0.001)
        return
    with suppress(CapacityError):
        for _ in range(2):
            if not engine.sequences[number].is_told:
                engine.learn(number)
            if engine.forward([number]) != [number]:
                engine.sequences[number].is_told = False
    engine.remove(number)

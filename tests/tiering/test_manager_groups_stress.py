"""Whatever an engine may do, at random, while files and copies fail and stored blocks rot: no wrong byte in any group."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from group_engine import LAYOUTS, GroupEngine, attention, cross, mla, recurrent
from toy_engine import MakeCache, flip_stored_bit, tokens_of

from kvtier import (
    CapacityError,
    CorruptBlock,
    KVCacheManager,
    KVLayout,
    Request,
    RequestError,
    RetentionConfig,
    TokenRange,
    TransferError,
    UnknownBlock,
)
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.handles import Lease

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(120)]

READ, WRITE, COPY = FaultOperation.READ, FaultOperation.WRITE, FaultOperation.COPY
EVERY_KIND = KVLayout([attention(1, 8, window=6), attention(2, 8, value_dim=4), mla(8, 8), recurrent(16, 8), cross(1, 8)], "float32", 4)
LAYOUTS_HERE = {name: LAYOUTS[name] for name in ("windows of other heads and types", "states and a window")} | {
    "every kind": EVERY_KIND, "windows only": KVLayout([attention(1, 8, window=1), attention(2, 8, window=9)], "float32", 4)}


class Wanderer:
    """Does one thing after the other. What is refused is refused for a reason that the engine can be blamed for."""

    def __init__(self, cache: KVCacheManager, directory: Path, generator: random.Random) -> None:
        self.cache = cache
        self.engine = GroupEngine(cache)
        self.leases: list[Lease] = []
        self._directory = directory
        self._generator = generator
        self._next_id = 0
        steps: dict[Callable[[], None], int] = {self.admit: 25, self.go_on: 45, self.remove: 10, self.rewind: 4, self.pin: 4, self.unpin: 3,
                                                self.move_a_block: 3, self.forget: 1, self.damage: 1, self.write_out: 1, self.refresh: 3}
        self._steps, self._weights = list(steps), list(steps.values())

    def step(self) -> None:
        try:
            self._generator.choices(self._steps, self._weights)[0]()
        except CapacityError as error:
            for request_id in [found for found in error.preempt if found in self.engine.sequences]:
                self.engine.remove(request_id)
            while self.leases and self._generator.random() < 0.7:
                self.leases.pop().release()
        self.cache.verify()

    def end(self) -> None:
        for lease in self.leases:
            lease.release()
        for request_id in list(self.engine.sequences):
            self.engine.remove(request_id, store=self._generator.random() < 0.8)
        assert self.cache.transfers.idle(20)
        self.cache.verify()
        stats = self.cache.stats()
        assert (stats.sequences, stats.leases) == (0, 0)
        assert [group.primary.free_blocks for group in stats.groups] == [group.primary.max_blocks for group in stats.groups]

    # -- steps

    def admit(self) -> None:
        self.engine.admit(*[self._request() for _ in range(self._generator.choice([1, 1, 2, 3]))])

    def _request(self) -> Request:
        generator = self._generator
        self._next_id += 1
        first = TokenRange(0, generator.randrange(1, 9), generator.choice([10, 35, 80]), generator.choice([None, 0.01]))
        keywords = {"encoder_digest": generator.choice([b"\x01" * 32, b"\x02" * 32, None])} if self.engine.has_cross else {}
        return self.engine.request(self._next_id, [*tokens_of(generator.randrange(4), generator.randrange(1, 20)), generator.randrange(3)],
                                   beam_width=generator.choice([1, 1, 1, 2, 3]), skip_read=generator.random() < 0.05,
                                   skip_write=generator.random() < 0.05, cache_salt=generator.choice([None, None, None, "tenant"]),
                                   retention=generator.choice([None, RetentionConfig([first], decode_priority=20)]), **keywords)

    def go_on(self) -> None:
        engine, generator = self.engine, self._generator
        some = [request_id for request_id in engine.sequences if generator.random() < 0.8]
        for request_id in some:
            if generator.random() < 0.9:  # otherwise it takes part when it is ready, with what it was promised
                engine.learn(request_id)
        with suppress(RequestError):  # a copy failed during the step: the engine has to ask first
            for request_id in engine.forward(some, generator.choice([None, None, 3])):
                sequence = engine.sequences[request_id]
                if sequence.computed == sequence.num_tokens < 60 and generator.random() < 0.8:
                    if not sequence.is_prompt and len(sequence.beams) > 1 and generator.random() < 0.4:
                        engine.reorder(request_id, [generator.randrange(len(sequence.beams)) for _ in sequence.beams])
                    engine.sample(request_id)

    def remove(self) -> None:
        if self.engine.sequences:
            self.engine.remove(self._any_id(), store=self._generator.random() < 0.85)

    def rewind(self) -> None:
        if not self.engine.sequences:
            return
        request_id = self._any_id()
        sequence = self.engine.sequences[request_id]
        generated = sequence.num_tokens - sequence.request.num_tokens
        if generated:
            with suppress(RequestError):  # a window or a state that has moved on
                self.engine.rewind(request_id, self._generator.randrange(1, generated + 1))

    def pin(self) -> None:
        if self.engine.sequences:
            self.leases.append(self._generator.choice([self.cache.pin, self.cache.store_and_pin])(self._any_id()))

    def unpin(self) -> None:
        if self.leases:
            self.leases.pop(self._generator.randrange(len(self.leases))).release()

    def move_a_block(self) -> None:
        tool = self._generator.choice([self.cache.offload, self.cache.onboard, self.cache.read_block])
        with suppress(RequestError, UnknownBlock, TransferError, CorruptBlock):  # held, empty, of a larger group, or lost
            tool(self._generator.randrange(20), group=self._generator.randrange(len(self.cache.layout.groups)))

    def forget(self) -> None:
        self.cache.truncate(self.engine.request(0, tokens_of(self._generator.randrange(4), 16)), self._generator.randrange(12))

    def damage(self) -> None:
        rows = self.cache.store.stored_blocks()
        if rows:
            row = self._generator.choice(rows)
            flip_stored_bit(self._directory, self.cache.layout, row.slot, group=row.group)

    def write_out(self) -> None:
        self.cache.flush(10)

    def refresh(self) -> None:
        self.cache.refresh()

    def _any_id(self) -> int:
        return self._generator.choice(list(self.engine.sequences))


@pytest.mark.parametrize("steps", [80, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(LAYOUTS_HERE))
def test_no_wrong_byte_whatever_the_engine_does(make_cache: MakeCache, store_directory: Path, name: str, steps: int) -> None:
    layout = LAYOUTS_HERE[name]
    generator = random.Random(name)
    hits = lost = checked = 0  # over all lives: how far each gets depends on what the threads of the tier get done meanwhile
    for restart in range(12):
        if restart >= 3 and checked > 1000 and min(hits, lost) > 0:
            break
        faults = Faults([FaultRule(FaultKind.FAILURE, READ, rate=0.03), FaultRule(FaultKind.BIT_FLIP, READ, rate=0.03),
                         FaultRule(FaultKind.FAILURE, COPY, rate=0.02), FaultRule(FaultKind.FAILURE, WRITE, rate=0.02),
                         FaultRule(FaultKind.DELAY, READ, rate=0.1, seconds=0.002)], seed=generator.randrange(1000))
        cache = make_cache([f"{generator.randrange(9, 26)} blocks" for _ in layout.groups],
                           [f"{generator.choice([2, 4, 6])} blocks" for _ in layout.groups], 24, layout=layout, faults=faults,
                           max_seq_len=64, max_beam_width=3, write_ahead_share=1.0, chunk_size=generator.choice([None, 8]))
        wanderer = Wanderer(cache, store_directory, generator)
        for _ in range(steps):
            wanderer.step()
        wanderer.end()
        stats = cache.stats()
        hits, lost = hits + sum(stats.hit_tokens), lost + stats.lost
        checked += wanderer.engine.checked
        cache.close()
    assert checked > 1000
    assert min(hits, lost) > 0

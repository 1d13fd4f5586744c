"""Two small caches that hand prompts over to each other at random, under pressure and with damage: every byte that is read is checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from group_engine import LAYOUTS
from handover_rig import Clock, Decode, Prefill, files, flip

from kvtier import CapacityError, HandoverFolder, HandoverTicket, Request

Make = Callable[..., Any]


class Pair:
    """Both sides, and what is on its way."""

    def __init__(self, there: Prefill, here: Decode, folder: HandoverFolder, clock: Clock, choose: random.Random) -> None:
        self.there, self.here, self.folder, self.clock, self.choose = there, here, folder, clock, choose
        self.histories = [[root] for root in (1, 2, 3)]
        self.tickets: list[tuple[list[int], HandoverTicket]] = []
        self.number = 0
        self.taken = 0

    def prompt(self) -> list[int]:
        """The beginning of something known, and something new."""
        history = self.choose.choice(self.histories)
        return [*history[:self.choose.randint(1, len(history))], *(self.choose.randrange(4) for _ in range(self.choose.randint(1, 14)))]

    def export(self) -> None:
        self.number += 1
        prompt = self.prompt()[:60]
        skip = self.choose.choice([0, 0, self.here.cache.probe_prefix_tokens(Request(1, prompt))])
        self.tickets.append(self.there.hand_over(prompt, self.number, skip_tokens=min(skip, len(prompt) - 1)))
        if self.choose.random() < 0.6:
            self.here.importer.offer(self.tickets[-1][1])

    def offer(self) -> None:
        for _known, ticket in self.choose.sample(self.tickets, min(len(self.tickets), 2)):
            self.here.importer.offer(ticket)

    def answer(self) -> None:
        self.number += 1
        tokens = self.choose.choice(self.tickets[-3:])[0] if self.tickets and self.choose.random() < 0.7 else self.prompt()[:60]
        try:
            if self.choose.random() < 0.3:
                self.taken += self.here.importer.take_in(Request(self.number, tokens))
            else:
                self.taken += self.here.fill(tokens, self.number)
                self.histories.append(list(self.here.finish(self.number, answer=self.choose.randint(0, 9))))
        except CapacityError:
            self.here.engine.sequences.pop(self.number, None)

    def damage(self) -> None:
        names = files(self.folder)
        if names:
            flip(self.folder, self.choose.choice([4100, 8200, -1, -777]), self.choose.randrange(8), self.choose.choice(names))

    def wait(self) -> None:
        self.clock.now += self.choose.choice([1, 1, 10, 70])
        self.there.exporter.poll()
        self.here.importer.poll()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sinks", "windows of other heads and types", "side data", "mla"])
def test_no_wrong_byte_is_read_and_nothing_is_left(kind: str, seed: int, prefill: Make, decode: Make, folder: HandoverFolder,
                                                   clock: Clock) -> None:
    layout = LAYOUTS[kind]
    pair = Pair(prefill(layout, primary=40, secondary=10), decode(layout, primary=22, secondary=8), folder, clock, random.Random(seed))
    for _ in range(40):
        pair.choose.choice([pair.export, pair.export, pair.offer, pair.offer, pair.answer, pair.answer, pair.answer, pair.damage,
                            pair.wait])()
        for side in (pair.there, pair.here):
            side.cache.verify()
            assert (side.cache.stats().leases, side.cache.stats().sequences) == (0, 0)
    clock.now += 100
    pair.wait()
    assert pair.there.exporter.outstanding == 0
    assert pair.here.importer.poll() == 0
    assert files(folder) == []
    assert pair.here.importer.stats().taken > 0

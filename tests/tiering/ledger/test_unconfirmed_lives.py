"""Random lives of engines that do not wait for what they read: nothing that was computed from a lost block stays in the tree."""

from __future__ import annotations

import random

import pytest
from doubtful_tier import RushingDriver

from kvtier.errors import CapacityError
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import PRIMARY, level_of
from kvtier.tiering.ledger.group import FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.truncating import truncate

TOKENS_PER_BLOCK = 2
LEVELS = (22, 14, 6)
LAYOUTS = {
    "full": [GroupSpec(LEVELS, FULL)],
    "window": [GroupSpec(LEVELS, WINDOW, 5)],
    "window full": [GroupSpec(LEVELS, WINDOW, 3), GroupSpec(LEVELS, FULL)],
    "full recurrent": [GroupSpec(LEVELS, FULL), GroupSpec(LEVELS, RECURRENT, snapshot_interval=4)],
}


class Lives:
    """Random lives, most of them in a hurry."""

    def __init__(self, layout: str, seed: int) -> None:
        self.random = random.Random(seed)
        rules = LedgerRules(policy="lru", keep_backing=self.random.random() < 0.5, write_ahead_share=1.0)
        self.ledger = Ledger(LAYOUTS[layout], TOKENS_PER_BLOCK, rules)
        self.driver = RushingDriver(self.ledger)
        self.prompts: list[list[int]] = []
        self.next_id = 0
        self.now = 0.0
        self.losses = 0

    def run(self, steps: int) -> None:
        verbs = [(8, self.add), (9, self.rush), (3, self.rush_on), (1, self.compute), (6, self.store), (4, self.remove), (6, self.offload),
                 (2, self.carry_out), (3, self.report), (1, self.settle), (1, self.refresh), (1, self.truncate), (1, self.rewind)]
        for _ in range(steps):
            [(_weight, verb)] = self.random.choices(verbs, [weight for weight, _verb in verbs])
            try:
                verb()
            except CapacityError:
                self.remove()
            self.driver.tiers.fetch()
            if verb in (self.report, self.settle) or self.random.random() < 0.25:
                self.driver.check()
        for request_id in list(self.ledger.sequences):
            self.driver.remove(request_id, self.random.random() < 0.5)
            self.driver.check()
        self.driver.tiers.settle(self.decide)
        self.driver.check_idle()
        for allocator in self.ledger.allocators:
            assert not allocator.arriving
            assert not allocator.unconfirmed.by_block
            assert not allocator.unconfirmed.by_move

    def decide(self, _move: Move) -> bool:
        return self.random.random() < 0.3

    def pick(self) -> int | None:
        return self.random.choice(list(self.ledger.sequences)) if self.ledger.sequences else None

    def add(self) -> None:
        if len(self.ledger.sequences) > 3:
            return self.remove()
        prompt = [self.random.randint(0, 2) for _ in range(self.random.randint(3, 8))]
        if self.prompts and self.random.random() < 0.9:
            old = self.random.choice(self.prompts[-4:])
            prompt = old[:self.random.randint(max(len(old) - 3, 1), len(old))] + prompt[:self.random.randint(0, 4)]
        self.prompts.append(prompt[:14])
        self.next_id += 1
        self.driver.add(Request(self.next_id, prompt[:14], skip_read=self.random.random() < 0.1))
        return None

    def rush(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            sequence = self.ledger.sequence(request_id)
            if not self.driver.rush(request_id, self.random.choice([None, None, self.random.randint(0, sequence.num_tokens)]), self.decide):
                self.hear(request_id)

    def rush_on(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            tokens = [self.random.randint(0, 2) for _ in range(self.random.choice([1, 1, 2]))]
            if not self.driver.rush_on(request_id, tokens, self.decide):
                self.hear(request_id)

    def hear(self, request_id: int) -> None:
        """The engine is told of a loss."""
        self.losses += 1
        if self.ledger.sequence(request_id).must_preempt or not self.driver.make_ready(request_id, self.decide):
            self.driver.remove(request_id, True)

    def compute(self) -> None:
        request_id = self.pick()
        if request_id is not None and not self.driver.compute(request_id, None, self.decide):
            self.driver.remove(request_id, True)

    def store(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            self.driver.store_context(request_id)

    def remove(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            self.driver.remove(request_id, self.random.random() < 0.8)

    def offload(self) -> None:
        for group, allocator in enumerate(self.ledger.allocators):
            for block in allocator.blocks:
                if block.node is not None and block.queue != NOT_QUEUED and level_of(block.index) == PRIMARY and self.random.random() < 0.6:
                    self.ledger.offload(block.id, group)
                    self.driver.tiers.fetch()

    def carry_out(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            runnable = [(tier, record) for tier in self.driver.tiers.groups for record in tier.runnable()]
            if runnable:
                tier, record = self.random.choice(runnable)
                tier.carry_out(record, isinstance(record, Move) and self.decide(record))

    def report(self) -> None:
        ended = [(tier, position) for tier in self.driver.tiers.groups for position in range(len(tier.ended))]
        if ended:
            tier, position = self.random.choice(ended)
            tier.report(position)

    def settle(self) -> None:
        self.driver.tiers.settle(self.decide)

    def refresh(self) -> None:
        self.now += 1.0
        self.driver.refresh(self.now)

    def truncate(self) -> None:
        if self.prompts:
            prompt = self.random.choice(self.prompts[-6:])
            truncate(self.ledger, Request(0, prompt), self.random.randint(0, len(prompt)))
            self.driver.tiers.fetch()

    def rewind(self) -> None:
        request_id = self.pick()
        if request_id is not None and not self.ledger.has_recurrent and not self.ledger.has_window:
            sequence = self.ledger.sequence(request_id)
            self.driver.rewind(request_id, self.random.randint(0, sequence.num_tokens - sequence.num_prompt_tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_that_was_computed_from_a_lost_block_stays_in_the_tree(layout: str) -> None:
    losses = taken_along = 0
    for seed in range(30):
        lives = Lives(layout, seed)
        lives.run(60)
        losses += lives.losses
        taken_along += lives.driver.tiers.taken_along
    assert losses > 3
    assert taken_along > 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_that_was_computed_from_a_lost_block_stays_in_the_tree_in_many_lives(layout: str) -> None:
    for seed in range(1000, 2500):
        Lives(layout, seed).run(80)

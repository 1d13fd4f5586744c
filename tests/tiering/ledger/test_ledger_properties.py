"""The ledger against a naive model, over random lives of requests, random transfers and random failures.

After every step: ``verify()`` holds, every stored handle and backing has the bytes it stands for, every ready sequence reads
exactly what its own tokens say, and a subscriber to the events knows the tree.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_model import Driver, Subscriber, snapshot
from pretend_tier import PretendTier, always, never

from kvtier.errors import CapacityError, RequestError
from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move, WarmRow
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.truncating import truncate

IMAGES = (b"\x01" * 32, b"\x02" * 32)
NAMESPACES: tuple[dict[str, Any], ...] = (
    *[{}] * 9, {"cache_salt": "tenant"}, {"lora_id": 1}, {"lora_id": 2, "lora_digest": b"\x07" * 32},
)
SIZES = ((3, 1, 6), (4, 2, 4), (2, 1, 4), (3, 2, 6), (5, 3, 3), (4, 1, 2), (3, 2, 1), (2, 2, 5), (4, 4, 4), (6, 2, 6), (2, 1, 1), (8, 6, 6),
         (4, 2, 0), (5, 1, 0), (3, 3, 0), (2, 0, 0), (6, 0, 0))
PRIORITIES = (5, 29, 30, 31, 35, 80)


def _retention(first: int, priority: int, rest: int, duration: float | None, decode: int) -> RetentionConfig:
    return RetentionConfig([TokenRange(0, first, priority, duration), TokenRange(first, None, rest)], decode_priority=decode)


retentions = st.none() | st.none() | st.builds(
    _retention, st.integers(1, 9), st.sampled_from(PRIORITIES), st.sampled_from(PRIORITIES), st.none() | st.sampled_from((1.0, 3.0)),
    st.sampled_from(PRIORITIES))


suffixes = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    """A prompt of few token values; mostly in the plain namespace."""
    tokens = draw(suffixes) * draw(st.integers(1, 3))
    keywords: dict[str, Any] = {"tokens": tokens, **draw(st.sampled_from(NAMESPACES))}
    kind = draw(st.integers(0, 14))
    if kind == 13:
        keywords["extra_ids"] = [position // draw(st.integers(2, 5)) for position in range(len(tokens))]
    elif kind == 14 and len(tokens) > 2:
        start = draw(st.integers(0, len(tokens) - 2))
        keywords["multimodal"] = [MultimodalItem(draw(st.sampled_from(IMAGES)), [(start, draw(st.integers(1, len(tokens) - start)))])]
    return keywords


failures = st.sampled_from((False, False, True))


def _has_sequences(machine: Any) -> bool:
    return bool(machine.ledger.sequences)


class LedgerMachine(RuleBasedStateMachine):
    """One ledger, its pretend tier, and an engine that keeps the contract."""

    @initialize(num_blocks=st.sampled_from(SIZES), tokens_per_block=st.sampled_from((2, 4)), keep_backing=st.booleans(),
                partial=st.sampled_from((True, True, False)), copy_on_partial=st.sampled_from((True, True, False)),
                thresholds=st.sampled_from(((30, 30), (30, 31), (35, 35), (0, 0))), share=st.sampled_from((1.0, 0.5, 0.25)))
    def start(self, num_blocks: tuple[int, int, int], tokens_per_block: int, keep_backing: bool, partial: bool, copy_on_partial: bool,
              thresholds: tuple[int, int], share: float) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.rules_ = LedgerRules(enable_partial_reuse=partial, copy_on_partial_reuse=copy_on_partial,
                                  secondary_offload_min_priority=thresholds[0], nvme_offload_min_priority=thresholds[1],
                                  keep_backing=keep_backing, write_ahead_share=share, policy="lru")
        self.ledger = Ledger([GroupSpec(self.num_blocks)], tokens_per_block, self.rules_)
        self.driver = Driver(self.ledger)
        self.now = 0.0
        self.next_id = 0
        self.leases: list[Any] = []
        self.prompts: list[dict[str, Any]] = []

    # -- requests

    def prompt(self, data: st.DataObject) -> dict[str, Any]:
        """A new prompt, or an earlier one cut somewhere and continued."""
        earlier = data.draw(st.integers(0, len(self.prompts)))
        if earlier == 0:
            keywords = data.draw(prompts())
        else:
            keywords = dict(self.prompts[-earlier])
            if "extra_ids" not in keywords and "multimodal" not in keywords:
                keep = len(keywords["tokens"]) - data.draw(st.integers(0, len(keywords["tokens"])))
                keywords["tokens"] = keywords["tokens"][:keep] + data.draw(suffixes)
        if "extra_ids" not in keywords and "multimodal" not in keywords and data.draw(st.integers(0, 9)) < 9:
            keywords["tokens"] = keywords["tokens"][:self.tokens_per_block * self.num_blocks[PRIMARY]]  # mostly, it fits
        self.prompts.append(keywords)
        return keywords

    def request(self, data: st.DataObject) -> Request:
        kind = data.draw(st.integers(0, 19))
        self.next_id += 1
        return Request(self.next_id, retention=data.draw(retentions), skip_read=kind == 18, skip_write=kind == 19, **self.prompt(data))

    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        self.make_room(data, 2)
        requests = [self.request(data) for _ in range(count)]
        warm = bool(self.ledger.allocators[0].warm)
        forecast = capacity.match(self.ledger, requests[0])
        before = snapshot(self.ledger)
        idle = not self.ledger.sequences and not self.ledger.leases and self.ledger.allocators[0].num_busy[PRIMARY] == 0
        try:
            sequences = self.driver.add(*requests)
        except CapacityError as error:
            assert warm or snapshot(self.ledger) == before, "a refused call changes nothing"
            blocks = sum(-(-request.num_tokens // self.tokens_per_block) for request in requests)
            assert not idle or blocks > self.num_blocks[PRIMARY], "an idle pool takes what fits into it"
            self.check_preemption(error, requests)
            return
        for sequence in sequences:
            assert len(sequence.blocks) == -(-sequence.num_tokens // self.tokens_per_block)
            assert all(level_of(block.index) == PRIMARY for block in sequence.blocks)
            assert sequence.reused_blocks + sequence.missed_blocks == len(sequence.blocks)
        if len(requests) == 1 and not requests[0].skip_read:
            assert sequences[0].prepopulated // self.tokens_per_block >= forecast.reusable_blocks
            assert sum(forecast.tokens_by_level) == forecast.reusable_blocks * self.tokens_per_block

    def make_room(self, data: st.DataObject, keep: int) -> None:
        """Mostly, not too many sequences are in the way of new ones."""
        if data.draw(st.integers(0, 9)) < 9:
            for request_id in sorted(self.ledger.sequences)[:-keep]:
                self.driver.remove(request_id, True)

    def check_preemption(self, error: CapacityError, requests: list[Request]) -> None:
        """Removing the named requests makes room; none are named only when that would not help."""
        assert error.needed > error.available
        if any(self.ledger.allocators[0].num_busy[PRIMARY:NVME]):
            return  # what is being transferred is free only later
        if error.preempt:
            for request_id in error.preempt:
                self.driver.remove(request_id, False)
            self.driver.add(*requests)
        elif not self.ledger.leases:
            assert sum(-(-request.num_tokens // self.tokens_per_block) for request in requests) > self.num_blocks[PRIMARY]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ledger.sequences)))

    @rule(source_is_bad=st.booleans())
    def change_the_kind_of_failing_reads(self, source_is_bad: bool) -> None:
        self.driver.tier.condemns = always if source_is_bad else never

    @precondition(_has_sequences)
    @rule(data=st.data(), share=st.integers(1, 4), store=st.booleans())
    def compute(self, data: st.DataObject, share: int, store: bool) -> None:
        request_id = self.pick(data)
        target = self.ledger.sequence(request_id).num_tokens * share // 4
        if not self.driver.compute(request_id, target, self.decide(data)):
            self.driver.remove(request_id, True)
        elif store:
            self.driver.store_context(request_id)

    @precondition(_has_sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=0, max_size=3))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.ledger.sequences)), min_size=1, max_size=3, unique=True))
        for request_id in ids:
            if not self.driver.compute(request_id, None, self.decide(data)):
                self.driver.remove(request_id, True)
                return
        self.driver.tier.fetch()
        before = snapshot(self.ledger)
        try:
            self.driver.append(ids, [tokens[i:] for i in range(len(ids))], self.decide(data))
        except CapacityError:
            assert snapshot(self.ledger) == before

    @precondition(_has_sequences)
    @rule(data=st.data(), num_tokens=st.integers(0, 4))
    def rewind(self, data: st.DataObject, num_tokens: int) -> None:
        request_id = self.pick(data)
        sequence = self.ledger.sequence(request_id)
        generated = sequence.num_tokens - sequence.request.num_tokens
        if num_tokens > generated:
            with pytest.raises(RequestError):
                self.driver.rewind(request_id, num_tokens)
            return
        before = snapshot(self.ledger)
        try:
            self.driver.rewind(request_id, num_tokens)
        except CapacityError:
            assert snapshot(self.ledger) == before
        self.driver.tier.fetch()

    @precondition(_has_sequences)
    @rule(data=st.data())
    def store_context(self, data: st.DataObject) -> None:
        self.driver.store_context(self.pick(data))

    @precondition(_has_sequences)
    @rule(data=st.data(), store=st.integers(0, 3))
    def remove(self, data: st.DataObject, store: int) -> None:
        self.driver.remove(self.pick(data), store > 0)

    @precondition(_has_sequences)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.driver.compute(request_id, None, self.decide(data))
        self.driver.remove(request_id, True)

    @rule(data=st.data(), count=st.integers(1, 6), write_ahead=st.booleans(), bad_day=st.booleans())
    def serve(self, data: st.DataObject, count: int, write_ahead: bool, bad_day: bool) -> None:
        """Whole lives one after the other, so that much is stored, sent down, and read back."""
        decide = self.decide(data) if bad_day else never
        self.make_room(data, 1)
        for _ in range(count):
            request = self.request(data)
            try:
                self.driver.add(request)
                for token in data.draw(st.lists(st.integers(0, 2), max_size=3)):
                    if not self.driver.append([request.id], [[token]], decide):
                        break
            except CapacityError:
                if request.id not in self.driver.running:
                    continue
            self.driver.compute(request.id, None, decide)
            self.driver.remove(request.id, True)
            self.driver.check()
            if write_ahead:
                self.driver.refresh(self.now)
                self.driver.tier.settle(decide)

    # -- leases and single blocks

    @precondition(lambda self: self.ledger.sequences and len(self.leases) < 2)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.leases.append(self.ledger.pin(self.pick(data)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.ledger.release_lease(lease)
        with pytest.raises(RequestError):
            self.ledger.release_lease(lease)

    @precondition(lambda self: any(block.has_content for block in self.ledger.allocators[0].blocks))
    @rule(data=st.data(), verb=st.sampled_from(("set_priority", "offload", "onboard")), priority=st.sampled_from(PRIORITIES))
    def single_block(self, data: st.DataObject, verb: str, priority: int) -> None:
        block_id = data.draw(st.sampled_from([block.id for block in self.ledger.allocators[0].blocks if block.has_content]))
        before = snapshot(self.ledger)
        try:
            if verb == "set_priority":
                self.ledger.set_priority(block_id, priority)
            elif verb == "offload":
                self.ledger.offload(block_id)
            else:
                self.ledger.onboard(block_id)
        except (CapacityError, RequestError):
            assert snapshot(self.ledger) == before
        self.driver.tier.fetch()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), keep=st.integers(0, 8))
    def truncate(self, data: st.DataObject, keep: int) -> None:
        request = Request(-1, **data.draw(st.sampled_from(self.prompts)))
        truncate(self.ledger, request, keep)
        kept = -(-keep // self.tokens_per_block)
        assert capacity.match(self.ledger, request).reusable_blocks <= kept
        self.driver.tier.fetch()

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        before = snapshot(self.ledger)
        capacity.match(self.ledger, Request(-1, **self.prompt(data)))
        assert snapshot(self.ledger) == before

    # -- time and transfers

    @rule(seconds=st.sampled_from((0.0, 0.5, 2.0)))
    def refresh(self, seconds: float) -> None:
        self.now += seconds
        self.driver.refresh(self.now)

    def decide(self, data: st.DataObject) -> Any:
        return lambda _move: data.draw(failures)

    @precondition(lambda self: self.driver.tier.waiting)
    @rule(data=st.data(), fails=failures)
    def carry_out_one(self, data: st.DataObject, fails: bool) -> None:
        runnable = self.driver.tier.runnable()
        record = data.draw(st.sampled_from(runnable))
        self.driver.tier.carry_out(record, fails and isinstance(record, Move))

    @precondition(lambda self: self.driver.tier.ended)
    @rule(data=st.data())
    def report_one(self, data: st.DataObject) -> None:
        self.driver.tier.report(data.draw(st.integers(0, len(self.driver.tier.ended) - 1)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.driver.tier.settle(self.decide(data))
        self.driver.tier.check_rows()

    @rule()
    def read_events(self) -> None:
        self.driver.events.check()

    @precondition(lambda self: self.driver.ever_stored)
    @rule()
    def reset(self) -> None:
        if self.ledger.sequences or self.ledger.leases:
            with pytest.raises(RequestError):
                self.ledger.reset()
            return
        self.ledger.reset()
        self.driver.tier.settle()
        assert not self.driver.tier.rows, "what was stored before a reset is on no level afterwards"
        assert not self.ledger.tree.roots
        assert not self.ledger.allocators[0].warm
        self.driver.ever_stored.clear()

    @precondition(lambda self: self.num_blocks[NVME])
    @rule()
    def restart(self) -> None:
        """The process ends at any point; a new one finds what the manifest names."""
        old = self.driver.tier
        self.ledger = Ledger([GroupSpec(self.num_blocks)], self.tokens_per_block, self.rules_)
        tier = PretendTier(self.ledger)
        tier.rows = dict(old.rows)
        tier.row_retention = dict(old.row_retention)
        tier.quarantined = set(old.quarantined)
        for slot in range(self.num_blocks[NVME]):
            tier.cells[NVME, slot] = old.cells[NVME, slot]
        self.ledger.set_time(self.now)
        rows = [WarmRow(0, slot, key, *tier.row_retention[slot]) for slot, key in sorted(tier.rows.items())]
        self.ledger.adopt_store(rows, [(0, slot) for slot in sorted(tier.quarantined)])
        self.driver.ledger = self.ledger
        self.driver.tier = tier
        self.driver.running = {}
        self.driver.events = Subscriber(self.ledger)
        self.leases = []
        tier.fetch()

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request_id in sorted(self.ledger.sequences):
            self.driver.remove(request_id, True)
        for lease in self.leases:
            self.ledger.release_lease(lease)
        self.driver.check_idle()
        self.driver.check_writing_ends(self.now)
        self.driver.check_idle()
        self.driver.events.check()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=60)

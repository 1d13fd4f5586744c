"""The ledger of several groups against a naive model: every kind of layer, beams, chunks, drafts, random transfers and failures.

After every step: ``verify()`` holds, what is stored in any group has the bytes it stands for, every ready sequence reads exactly what
its own tokens say in every group and beam, and a subscriber to the events knows the tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from group_layouts import LAYOUTS, PRIORITIES, layouts, prompts, requests, suffixes
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_groups import GroupsDriver
from naive_model import Subscriber, snapshot
from pretend_tier import always, never

from kvtier.errors import CapacityError, RequestError
from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.admission import AdmissionPlan, num_new_blocks
from kvtier.tiering.ledger.group import CROSS, FULL, KIND_NAMES, RECURRENT, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move, WarmRow
from kvtier.tiering.ledger.raising import is_unused, raise_to_primary, raise_to_secondary, stored_prefix
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.truncating import truncate

failures = st.sampled_from((False, False, False, True))


def _has_sequences(machine: Any) -> bool:
    return bool(machine.ledger.sequences)


class Elsewhere:
    """Somebody who has the next ``num_blocks`` blocks of every prompt."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = 0

    def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
        behind = (request.num_tokens - 1 - num_matched_tokens) // self.tokens_per_block
        return max(min(self.num_blocks, behind), 0) * self.tokens_per_block


class WorthLoading:
    """Somebody who thinks that only the first ``num_blocks`` blocks of a prefix are worth loading; None: all."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self.can_split = all(group.kind in (FULL, CROSS) for group in groups)
        self.num_blocks: int | None = None

    def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
        matched = plans[-1].num_matched
        if self.num_blocks is None or self.num_blocks >= matched:
            return matched
        return self.num_blocks if self.can_split else 0


class GroupsMachine(RuleBasedStateMachine):
    """One ledger, its pretend tiers, and an engine that keeps the contract."""

    layout = "full"

    @initialize(data=st.data(), tokens_per_block=st.sampled_from((2, 4)), keep_backing=st.booleans(), reuse=st.integers(0, 9),
                partial=st.booleans(), copy_on_partial=st.booleans(), thresholds=st.sampled_from(((35, 35), (0, 0), (30, 80))),
                share=st.sampled_from((0.25, 1.0)), chunk=st.sampled_from((0, 0, 3)), events=st.sampled_from((1000000, 0)))
    def start(self, data: st.DataObject, tokens_per_block: int, keep_backing: bool, reuse: int, partial: bool, copy_on_partial: bool,
              thresholds: tuple[int, int], share: float, chunk: int, events: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.groups: list[GroupSpec] = data.draw(layouts(self.layout, tokens_per_block))
        note(str([(group.num_blocks, KIND_NAMES[group.kind], group.window, group.sinks, group.snapshot_interval) for group in self.groups]))
        self.has_cross = any(group.kind == CROSS for group in self.groups)
        self.rules_ = LedgerRules(enable_block_reuse=reuse > 0, enable_partial_reuse=partial, copy_on_partial_reuse=copy_on_partial,
                                  secondary_offload_min_priority=thresholds[0], nvme_offload_min_priority=thresholds[1],
                                  keep_backing=keep_backing, write_ahead_share=share, policy="lru", chunk_size=chunk, max_events=events)
        self.elsewhere = Elsewhere(tokens_per_block)
        self.ledger = Ledger(self.groups, tokens_per_block, self.rules_)
        self.ledger.inbound = self.elsewhere
        self.worth = WorthLoading(self.groups)
        self.ledger.loading = self.worth
        self.driver = GroupsDriver(self.ledger)
        self.now = 0.0
        self.next_id = 0
        self.leases: list[Any] = []
        self.prompts: list[dict[str, Any]] = []

    # -- requests

    def prompt(self, data: st.DataObject) -> dict[str, Any]:
        """A new prompt, or an earlier one cut somewhere and continued."""
        earlier = data.draw(st.integers(0, min(len(self.prompts), 6)))
        if earlier == 0:
            keywords = data.draw(prompts(self.has_cross))
        else:
            keywords = dict(self.prompts[-earlier])
            keep = len(keywords["tokens"]) - data.draw(st.integers(0, len(keywords["tokens"])))
            keywords["tokens"] = (keywords["tokens"][:keep] + data.draw(suffixes))[:6 * self.tokens_per_block]
        self.prompts.append(keywords)
        return keywords

    def request(self, data: st.DataObject) -> Request:
        self.next_id += 1
        request = data.draw(requests(self.next_id, self.prompt(data)))
        note(f"request {request.id}: {request.beam_width} beams, {request.max_new_tokens} new tokens, {request.num_draft_tokens} drafts")
        return request

    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        self.make_room(data, 2)
        self.admit([self.request(data) for _ in range(count)])

    def admit(self, batch: list[Request]) -> None:
        first = batch[0]
        self.driver.tiers.fetch()
        forecast = capacity.match(self.ledger, first)
        estimates = [capacity.needed_blocks_one_step(self.ledger, first, False, group) for group in range(len(self.groups))]
        before = snapshot(self.ledger)
        warm = any(allocator.warm for allocator in self.ledger.allocators)
        idle = not self.ledger.sequences and not self.ledger.leases and not self.is_busy()
        try:
            sequences = self.driver.add(*batch)
        except CapacityError as error:
            assert warm or snapshot(self.ledger) == before, "a refused call changes nothing"
            assert not (idle and self.fits(batch)), "an idle pool takes what fits into it"
            self.check_preemption(error, batch)
            return
        if len(batch) == 1 and not sequences[0].left_tokens:
            self.check_forecast(sequences[0], forecast, estimates)

    def check_forecast(self, sequence: ActiveSequence, forecast: capacity.PrefixReuse, estimates: list[int]) -> None:
        assert sequence.prepopulated // self.tokens_per_block == forecast.reusable_blocks
        assert sum(forecast.tokens_by_level) == forecast.reusable_blocks * self.tokens_per_block
        assert forecast.referenced_blocks <= forecast.reusable_blocks
        for group, (estimate, cost) in enumerate(zip(estimates, self.driver.cost, strict=True)):
            assert estimate >= cost, f"group {group}: {cost} blocks for a prompt estimated at {estimate}"
            if self.groups[group].kind == FULL and sequence.request.num_draft_tokens == 0:
                assert estimate == cost, f"group {group}: {cost} blocks for a prompt estimated at {estimate}"

    def is_busy(self) -> bool:
        return any(any(allocator.num_busy) for allocator in self.ledger.allocators)

    def fits(self, batch: list[Request]) -> bool:
        """Whether an empty ledger would take these requests, all of their prompts at once."""
        return all(sum(num_new_blocks(self.ledger, request, number, 0, request.num_tokens) for request in batch)
                   <= group.num_blocks[PRIMARY] for number, group in enumerate(self.groups))

    def check_preemption(self, error: CapacityError, batch: list[Request]) -> None:
        """Removing the named requests makes room; none are named only when that would not help."""
        assert error.needed > error.available
        if self.is_busy():
            return  # what is being transferred is free only later
        if error.preempt:
            for request_id in error.preempt:
                self.driver.remove(request_id, False)
            self.driver.add(*batch)
        elif not self.ledger.leases:
            assert not self.fits(batch)

    def make_room(self, data: st.DataObject, keep: int) -> None:
        """Mostly, not too many sequences are in the way of new ones."""
        if data.draw(st.integers(0, 9)) < 9:
            for request_id in sorted(self.ledger.sequences)[:-keep]:
                self.driver.remove(request_id, True)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ledger.sequences)))

    @rule(num_blocks=st.integers(0, 2))
    def change_what_is_elsewhere(self, num_blocks: int) -> None:
        self.elsewhere.num_blocks = num_blocks

    @rule(num_blocks=st.sampled_from((None, None, 0, 1, 2)))
    def change_what_is_worth_loading(self, num_blocks: int | None) -> None:
        self.worth.num_blocks = num_blocks

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def raise_ahead(self, data: st.DataObject, steps: int) -> None:
        """Blocks go up one level at a time, whatever else is going on."""
        request = Request(-1, **data.draw(st.sampled_from(self.prompts)))
        for stored in stored_prefix(self.ledger, request)[:steps]:
            block = stored.block
            kept = {data.draw(st.integers(0, 8))}
            if not is_unused(self.ledger, stored) or level_of(block.index) == PRIMARY:
                continue
            before = snapshot(self.ledger)
            level = level_of(block.index)
            if not (raise_to_secondary if level == NVME else raise_to_primary)(self.ledger, stored, kept):
                assert snapshot(self.ledger) == before
            else:
                assert level_of(block.index) == level - 1
        self.driver.tiers.fetch()

    @rule(source_is_bad=st.booleans())
    def change_the_kind_of_failing_reads(self, source_is_bad: bool) -> None:
        for tier in self.driver.tiers.groups:
            tier.condemns = always if source_is_bad else never

    @precondition(_has_sequences)
    @rule(data=st.data(), share=st.integers(1, 4), store=st.booleans())
    def compute(self, data: st.DataObject, share: int, store: bool) -> None:
        request_id = self.pick(data)
        target = self.ledger.sequence(request_id).num_tokens * share // 4
        if not self.driver.compute(request_id, target, self.decide(data)):
            self.driver.remove(request_id, True)
        elif store:
            self.driver.store_context(request_id)

    def tokens_for(self, data: st.DataObject, request_id: int) -> list[int]:
        """What one step appends: a token for each beam, or one and some drafts."""
        asked = self.ledger.sequence(request_id).request
        if asked.beam_width > 1:
            return data.draw(st.lists(st.integers(0, 2), min_size=asked.beam_width, max_size=asked.beam_width))
        return data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=asked.num_draft_tokens + 1))

    @precondition(_has_sequences)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.step(data, data.draw(st.lists(st.sampled_from(sorted(self.ledger.sequences)), min_size=1, max_size=3, unique=True)))

    @precondition(_has_sequences)
    @rule(data=st.data())
    def append_to_all(self, data: st.DataObject) -> None:
        self.step(data, sorted(self.ledger.sequences))

    def step(self, data: st.DataObject, ids: list[int]) -> None:
        for request_id in ids:
            if not self.driver.compute(request_id, None, self.decide(data)):
                self.driver.remove(request_id, True)
                return
        self.driver.tiers.fetch()
        tokens = [self.tokens_for(data, request_id) for request_id in ids]
        sequence = self.ledger.sequence(ids[0])
        asked = sequence.request
        appended = len(tokens[0]) if asked.beam_width == 1 else 1
        estimates = [capacity.needed_blocks_one_step(self.ledger, sequence, False, group) for group in range(len(self.groups))]
        before = snapshot(self.ledger)
        old = sequence.num_tokens
        try:
            if not self.driver.append(ids, tokens, self.decide(data)):
                return
        except CapacityError as error:
            assert snapshot(self.ledger) == before, "a refused call changes nothing"
            for request_id in error.preempt:
                self.driver.remove(request_id, False)
            return
        if len(ids) == 1 and old + appended <= asked.num_tokens + asked.max_new_tokens:
            for group, (estimate, taken) in enumerate(zip(estimates, self.driver.taken, strict=True)):
                assert estimate >= taken, f"group {group}: {taken} blocks for a step estimated at {estimate}"

    @precondition(_has_sequences)
    @rule(data=st.data(), num_tokens=st.integers(0, 4))
    def rewind(self, data: st.DataObject, num_tokens: int) -> None:
        request_id = self.pick(data)
        sequence = self.ledger.sequence(request_id)
        before = snapshot(self.ledger)
        try:
            self.driver.rewind(request_id, num_tokens)
        except CapacityError:
            assert snapshot(self.ledger) == before
        except RequestError as error:
            assert snapshot(self.ledger) == before
            generated = sequence.num_tokens - sequence.request.num_tokens
            most = re.search("at most ([0-9]+)", str(error))
            is_partly_covered = sequence.covered < sequence.num_tokens
            assert most or num_tokens > generated or is_partly_covered or any(group.kind == RECURRENT for group in self.groups)
            if most:
                assert int(most[1]) < num_tokens

    @precondition(lambda self: any(sequence.request.beam_width > 1 for sequence in self.ledger.sequences.values()))
    @rule(data=st.data(), more=st.booleans())
    def reorder_beams(self, data: st.DataObject, more: bool) -> None:
        beams = [number for number, sequence in self.ledger.sequences.items() if sequence.request.beam_width > 1]
        request_id = data.draw(st.sampled_from(sorted(beams)))
        width = self.ledger.sequence(request_id).request.beam_width
        if not self.driver.compute(request_id, None, self.decide(data)):
            self.driver.remove(request_id, True)
            return
        self.driver.reorder(request_id, data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width)))
        if more:
            self.step(data, [request_id])

    @precondition(_has_sequences)
    @rule(data=st.data())
    def store_context(self, data: st.DataObject) -> None:
        self.driver.store_context(self.pick(data))

    @precondition(_has_sequences)
    @rule(data=st.data(), store=st.integers(0, 3))
    def remove(self, data: st.DataObject, store: int) -> None:
        request_id = self.pick(data)
        sequence = self.ledger.sequence(request_id)
        what_if = scheduling.WhatIf(len(self.groups))
        for group in range(len(self.groups)):
            freed = what_if.remove(sequence, group) if group == 0 else what_if.freed[group]
            assert freed == what_if.freed[group]
        expected = [scheduling.num_schedulable_blocks(self.ledger, what_if, group) for group in range(len(self.groups))]
        self.driver.remove(request_id, store > 0)
        if not self.is_busy():
            assert self.driver.free_primary() == expected, "removing in thought and in earnest free the same"

    @precondition(_has_sequences)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.driver.compute(request_id, None, self.decide(data))
        self.driver.remove(request_id, True)

    @rule(data=st.data(), count=st.integers(1, 4), write_ahead=st.booleans(), bad_day=st.booleans())
    def serve(self, data: st.DataObject, count: int, write_ahead: bool, bad_day: bool) -> None:
        """Whole lives one after the other, so that much is stored, sent down, and read back."""
        decide = self.decide(data) if bad_day else never
        self.make_room(data, 1)
        for _ in range(count):
            request = self.request(data)
            try:
                self.driver.add(request)
                for _step in range(data.draw(st.integers(0, 4))):
                    if not self.driver.append([request.id], [self.tokens_for(data, request.id)], decide):
                        break
            except CapacityError:
                if request.id not in self.driver.lives:
                    continue
            self.driver.compute(request.id, None, decide)
            self.driver.remove(request.id, True)
            self.driver.check()
            if write_ahead:
                self.driver.refresh(self.now)
                self.driver.tiers.settle(decide)

    # -- leases and single blocks

    @precondition(lambda self: self.ledger.sequences and len(self.leases) < 2)
    @rule(data=st.data(), store=st.booleans())
    def pin(self, data: st.DataObject, store: bool) -> None:
        request_id = self.pick(data)
        if store:
            self.driver.note_stored(request_id)
        self.leases.append(self.ledger.store_and_pin(request_id) if store else self.ledger.pin(request_id))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.ledger.release_lease(lease)
        with pytest.raises(RequestError):
            self.ledger.release_lease(lease)

    @precondition(lambda self: any(block.has_content for allocator in self.ledger.allocators for block in allocator.blocks))
    @rule(data=st.data(), verb=st.sampled_from(("set_priority", "offload", "onboard")), priority=st.sampled_from(PRIORITIES))
    def single_block(self, data: st.DataObject, verb: str, priority: int) -> None:
        group, block_id = data.draw(st.sampled_from([(allocator.group, block.id) for allocator in self.ledger.allocators
                                                     for block in allocator.blocks if block.has_content]))
        before = snapshot(self.ledger)
        try:
            if verb == "set_priority":
                self.ledger.set_priority(block_id, priority, group)
            elif verb == "offload":
                self.ledger.offload(block_id, group)
            else:
                self.ledger.onboard(block_id, group)
        except (CapacityError, RequestError):
            assert snapshot(self.ledger) == before
        self.driver.tiers.fetch()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), keep=st.integers(0, 8))
    def truncate(self, data: st.DataObject, keep: int) -> None:
        request = Request(-1, **data.draw(st.sampled_from(self.prompts)))
        truncate(self.ledger, request, keep)
        assert capacity.match(self.ledger, request).reusable_blocks <= -(-keep // self.tokens_per_block)
        self.driver.tiers.fetch()

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

    @precondition(lambda self: any(tier.waiting for tier in self.driver.tiers.groups))
    @rule(data=st.data(), fails=failures)
    def carry_out_one(self, data: st.DataObject, fails: bool) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.waiting]))
        record = data.draw(st.sampled_from(tier.runnable()))
        tier.carry_out(record, fails and isinstance(record, Move))

    @precondition(lambda self: any(tier.ended for tier in self.driver.tiers.groups))
    @rule(data=st.data())
    def report_one(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.ended]))
        tier.report(data.draw(st.integers(0, len(tier.ended) - 1)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.driver.tiers.settle(self.decide(data))
        for tier in self.driver.tiers.groups:
            tier.check_rows()

    @rule()
    def read_events(self) -> None:
        if self.rules_.max_events:
            self.driver.events.check()

    @precondition(lambda self: self.driver.ever_stored)
    @rule()
    def reset(self) -> None:
        if self.ledger.sequences or self.ledger.leases:
            with pytest.raises(RequestError):
                self.ledger.reset()
            return
        self.ledger.reset()
        self.driver.tiers.settle()
        assert not any(tier.rows for tier in self.driver.tiers.groups), "what was stored before a reset is on no level afterwards"
        assert not self.ledger.tree.roots
        assert not any(allocator.warm for allocator in self.ledger.allocators)
        self.driver.ever_stored.clear()

    @precondition(lambda self: any(group.num_blocks[NVME] for group in self.groups))
    @rule()
    def restart(self) -> None:
        """The process ends at any point; a new one finds what the manifest names."""
        old = self.driver
        self.ledger = Ledger(self.groups, self.tokens_per_block, self.rules_)
        self.ledger.inbound = self.elsewhere
        self.ledger.loading = self.worth
        self.ledger.set_time(self.now)
        self.driver = GroupsDriver(self.ledger)
        self.driver.ever_stored = old.ever_stored
        self.leases = []
        rows: list[WarmRow] = []
        quarantined: list[tuple[int, int]] = []
        for before, tier in zip(old.tiers.groups, self.driver.tiers.groups, strict=True):
            tier.rows = dict(before.rows)
            tier.row_retention = dict(before.row_retention)
            tier.quarantined = set(before.quarantined)
            for slot in range(self.groups[tier.group].num_blocks[NVME]):
                tier.cells[NVME, slot] = before.cells[NVME, slot]
            rows.extend(WarmRow(tier.group, slot, key, *tier.row_retention[slot]) for slot, key in sorted(tier.rows.items()))
            quarantined.extend((tier.group, slot) for slot in sorted(tier.quarantined))
        self.ledger.adopt_store(rows, quarantined)
        self.driver.events = Subscriber(self.ledger)
        self.driver.tiers.fetch()

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()
            self.driver.check_estimates()

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
        if self.rules_.max_events:
            self.driver.events.check()
        self.ledger.reset()
        self.driver.tiers.settle()
        assert not self.ledger.tree.roots


STEPS_PER_EXAMPLE = 40


def _machine(name: str) -> type[Any]:
    class OfLayout(GroupsMachine):
        layout = name

    OfLayout.__qualname__ = OfLayout.__name__ = "".join(part.capitalize() for part in name.split()) + "Machine"
    case = OfLayout.TestCase
    steps = int(os.environ.get("LEDGER_FUZZ_STEPS", "0"))  # in all; `make fuzz-ledger`
    case.settings = settings(max_examples=steps // (len(LAYOUTS) * STEPS_PER_EXAMPLE) or settings().max_examples,
                             stateful_step_count=STEPS_PER_EXAMPLE)
    return case


TestFull = _machine("full")
TestWindow = _machine("window")
TestWindowFull = _machine("window full")
TestWindowWindow = _machine("window window")
TestSinksThatFillABlock = _machine("filling")
TestSinksWithABubble = _machine("bubble")
TestFullRecurrent = _machine("full recurrent")
TestRecurrent = _machine("recurrent")
TestWindowFullRecurrent = _machine("window full recurrent")
TestFullCross = _machine("full cross")
TestWindowFullCross = _machine("window full cross")

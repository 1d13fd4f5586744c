"""The random machine's requests: admitted, computed chunk by chunk, appended to, rewound, their beams reordered, stored, dropped."""

from __future__ import annotations

import re

from group_layouts import requests
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_machine import LedgerMachine, has_sequences
from naive_model import snapshot
from pretend_tier import never

from kvtier.errors import CapacityError, RequestError
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.admission import num_new_blocks
from kvtier.tiering.ledger.group import FULL, RECURRENT
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence


class ServingMachine(LedgerMachine):
    """What an engine does with its requests, in any order."""

    # -- requests

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
        has_room = all(estimate <= free for estimate, free in zip(estimates, self.driver.free_primary(), strict=True))
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
        if len(self.groups) == 1 and self.groups[0].kind == FULL:
            assert all(sequence.reused_blocks + sequence.missed_blocks == len(sequence.blocks) for sequence in sequences)
        if len(batch) == 1 and not sequences[0].left_tokens:
            self.check_forecast(sequences[0], forecast, estimates, has_room)

    def check_forecast(self, sequence: ActiveSequence, forecast: capacity.PrefixReuse, estimates: list[int], has_room: bool) -> None:
        """What is foretold comes while the estimate is free. With less, a recurrent layout may give it up: it then costs a whole prompt."""
        if self.ledger.has_recurrent and not has_room and sequence.prepopulated == 0:
            estimates = [num_new_blocks(self.ledger, sequence.request, group, 0, 0) for group in range(len(self.groups))]
        else:
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

    @precondition(has_sequences)
    @rule(data=st.data(), share=st.integers(1, 4), store=st.booleans())
    def compute(self, data: st.DataObject, share: int, store: bool) -> None:
        request_id = self.pick(data)
        target = self.ledger.sequence(request_id).num_tokens * share // 4
        if not self.driver.compute(request_id, target, self.decide(data)):
            self.driver.remove(request_id, True)
        elif store:
            self.driver.store_context(request_id)

    def tokens_for(self, data: st.DataObject, request_id: int) -> list[int]:
        """What one step appends: a token for each beam, or as many as the only beam likes, with and beyond its drafts."""
        asked = self.ledger.sequence(request_id).request
        if asked.beam_width > 1:
            return data.draw(st.lists(st.integers(0, 2), min_size=asked.beam_width, max_size=asked.beam_width))
        return data.draw(st.lists(st.integers(0, 2), max_size=3))

    @precondition(has_sequences)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.step(data, data.draw(st.lists(st.sampled_from(sorted(self.ledger.sequences)), min_size=1, max_size=3, unique=True)))

    @precondition(has_sequences)
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
        is_as_asked = asked.beam_width > 1 or appended <= asked.num_draft_tokens + 1
        if len(ids) == 1 and is_as_asked and old + appended <= asked.num_tokens + asked.max_new_tokens:
            for group, (estimate, taken) in enumerate(zip(estimates, self.driver.taken, strict=True)):
                assert estimate >= taken, f"group {group}: {taken} blocks for a step estimated at {estimate}"

    @precondition(has_sequences)
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

    @precondition(has_sequences)
    @rule(data=st.data())
    def store_context(self, data: st.DataObject) -> None:
        self.driver.store_context(self.pick(data))

    @precondition(has_sequences)
    @rule(data=st.data(), store=st.integers(0, 3))
    def remove(self, data: st.DataObject, store: int) -> None:
        request_id = self.pick(data)
        sequence = self.ledger.sequence(request_id)
        what_if = scheduling.WhatIf(len(self.groups))
        for group in range(len(self.groups)):
            freed = what_if.remove(self.ledger, sequence, group) if group == 0 else what_if.freed[group]
            assert freed == what_if.freed[group]
        expected = [scheduling.num_schedulable_blocks(self.ledger, what_if, group) for group in range(len(self.groups))]
        self.driver.remove(request_id, store > 0)
        assert self.driver.free_primary() == expected, "removing in thought and in earnest free the same"

    @precondition(has_sequences)
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

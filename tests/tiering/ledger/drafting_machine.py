"""The random machine with trees of drafts, pending over any number of other calls, and with requests that leave a lease behind."""

from __future__ import annotations

from group_layouts import requests
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_machine import has_sequences
from naive_drafts import DraftingDriver
from naive_model import snapshot
from pretend_tier import Decide, never
from serving_machine import ServingMachine

from kvtier.errors import CapacityError, RequestError
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.sequence import ActiveSequence


@st.composite
def trees(draw: st.DrawFn, most: int = 6) -> tuple[list[int], list[int]]:
    """Tokens and parents of a few drafts: chains, bushes, several roots."""
    count = draw(st.integers(1, most))
    return (draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
            [draw(st.integers(-1, number - 1)) for number in range(count)])


def _may_draft(machine: DraftingMachine) -> bool:
    return any(machine.takes_drafts(sequence) for sequence in machine.ledger.sequences.values())


def _has_drafts(machine: DraftingMachine) -> bool:
    return bool(machine.drafting())


class DraftingMachine(ServingMachine):
    """What an engine with speculative decoding does beside. A step verifies what is pending; a rewind drops it."""

    driver_type = DraftingDriver
    driver: DraftingDriver

    def drafting(self) -> list[int]:
        return [number for number, sequence in sorted(self.ledger.sequences.items()) if sequence.drafts is not None]

    def takes_drafts(self, sequence: ActiveSequence) -> bool:
        has_blocks = not self.ledger.is_chunked or sequence.covered >= sequence.num_tokens
        return (sequence.drafts is None and sequence.beam_width == 1 and not self.ledger.has_recurrent and not sequence.must_report
                and has_blocks)

    @precondition(_may_draft)
    @rule(data=st.data(), tree=trees())
    def propose_drafts(self, data: st.DataObject, tree: tuple[list[int], list[int]]) -> None:
        self.propose(data.draw(st.sampled_from([number for number, sequence in sorted(self.ledger.sequences.items())
                                                if self.takes_drafts(sequence)])), *tree)

    def propose(self, request_id: int, tokens: list[int], parents: list[int]) -> bool:
        sequence = self.ledger.sequence(request_id)
        asked = sequence.request
        estimates = [capacity.needed_blocks_one_step(self.ledger, sequence, False, group) for group in range(len(self.groups))]
        before = snapshot(self.ledger)
        try:
            self.driver.propose(request_id, tokens, parents)
        except CapacityError as error:
            refusal: CapacityError | None = error
        else:
            refusal = None
        if refusal is not None:
            assert snapshot(self.ledger) == before, "a refused call changes nothing"
            assert refusal.needed > refusal.available
            if refusal.preempt and not self.is_busy():
                for number in refusal.preempt:  # perhaps the one that asks: it is the newest
                    self.driver.remove(number, False)
                if request_id in self.ledger.sequences:
                    self.driver.propose(request_id, tokens, parents)
            return request_id in self.ledger.sequences and sequence.drafts is not None
        left = asked.max_new_tokens - (sequence.num_tokens - asked.num_tokens)
        if len(tokens) <= min(asked.num_draft_tokens + 1, left):
            for group, (estimate, taken) in enumerate(zip(estimates, self.driver.taken, strict=True)):
                assert estimate >= taken, f"group {group}: {taken} blocks for drafts estimated at {estimate}"
        return True

    @precondition(lambda self: not self.ledger.has_recurrent)
    @rule(data=st.data(), rounds=st.integers(1, 4), bad_day=st.booleans(), goes_on=st.booleans())
    def speculate(self, data: st.DataObject, rounds: int, bad_day: bool, goes_on: bool) -> None:
        """A request with drafts in each of its steps. In the end its last drafts are pending, or it is stored."""
        decide = self.decide(data) if bad_day else never
        self.make_room(data, 2)
        self.next_id += 1
        request = data.draw(requests(self.next_id, self.prompt(data), beams=1))
        try:
            self.driver.add(request)
        except CapacityError:
            return
        if not self.driver.compute(request.id, None, decide):
            self.driver.remove(request.id, True)
            return
        for _round in range(rounds):
            sequence = self.ledger.sequence(request.id)
            if sequence.drafts is None and (not self.takes_drafts(sequence) or not self.propose(request.id, *data.draw(trees(4)))):
                break  # it may have been pre-empted
            self.driver.check()
            if not self.verify(data, request.id, decide):
                return
        if request.id not in self.ledger.sequences:
            return
        if not goes_on:
            self.driver.remove(request.id, True)
        elif self.takes_drafts(self.ledger.sequence(request.id)):
            self.propose(request.id, *data.draw(trees(4)))

    @precondition(_has_drafts)
    @rule(data=st.data())
    def verify_drafts(self, data: st.DataObject) -> None:
        self.verify(data, data.draw(st.sampled_from(self.drafting())), self.decide(data))

    def verify(self, data: st.DataObject, request_id: int, decide: Decide) -> bool:
        """Accept any path, or none. False when the sequence had to be pre-empted."""
        drafts = self.ledger.sequence(request_id).drafts
        assert drafts is not None
        if self.driver.verify_drafts(request_id, data.draw(st.integers(-1, drafts.num_drafts - 1)), decide):
            return True
        self.driver.remove(request_id, True)
        return False

    @precondition(_has_drafts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def pending_drafts_keep_everything_else_waiting(self, data: st.DataObject, tokens: list[int]) -> None:
        request_id = data.draw(st.sampled_from(self.drafting()))
        before = snapshot(self.ledger)
        for call in (lambda: self.ledger.append_step([request_id], [tokens]), lambda: self.ledger.rewind(request_id, 1),
                     lambda: self.ledger.propose_drafts(request_id, [1], [-1])):
            try:
                call()
            except RequestError:
                assert snapshot(self.ledger) == before
            else:
                raise AssertionError("drafts are pending")

    @precondition(_has_drafts)
    @rule(data=st.data())
    def drop_drafts(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.drafting()))
        self.driver.drop_drafts(request_id)

    def step(self, data: st.DataObject, ids: list[int]) -> None:
        for request_id in ids:
            if self.ledger.sequence(request_id).drafts is not None:
                self.verify(data, request_id, self.decide(data))
        super().step(data, [request_id for request_id in ids if request_id in self.ledger.sequences])

    @precondition(has_sequences)
    @rule(data=st.data(), num_tokens=st.integers(0, 4))
    def rewind(self, data: st.DataObject, num_tokens: int) -> None:
        for request_id in self.drafting():
            self.driver.drop_drafts(request_id)
        super().rewind(data=data, num_tokens=num_tokens)

    @precondition(lambda self: self.ledger.sequences and len(self.leases) < 2)
    @rule(data=st.data(), store=st.booleans())
    def finish_with_a_lease(self, data: st.DataObject, store: bool) -> None:
        """A request ends and what was stored of it stays pinned: everything that a later one would find is in the lease."""
        request_id = self.pick(data)
        sequence = self.ledger.sequence(request_id)
        self.driver.note_stored(request_id)
        lease = self.ledger.store_and_pin(request_id)
        self.leases.append(lease)
        self.driver.check()
        self.driver.remove(request_id, store)
        assert all(block.ref_count > 0 for row in lease.rows for block in row)
        assert sequence.id not in self.ledger.sequences

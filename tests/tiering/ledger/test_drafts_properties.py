"""Random trees of drafts between everything else that happens to sequences: each reads exactly its own tokens, whatever was accepted.

Every call is followed by ``verify()`` and by a look at every byte (``GroupRun``): of all sequences what was computed, of the tree what
its places stand for.
"""

from __future__ import annotations

from typing import Any

from draft_run import DraftRun
from group_run import cross, full, window
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import CapacityError, RequestError
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import CROSS, GroupSpec
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease

LAYOUTS = {
    "full": lambda: [full(12, 6)],
    "window": lambda: [window(3, 12, 6)],
    "window with sinks and a bubble": lambda: [window(5, 12, sinks=1)],
    "windows beside full attention": lambda: [window(2, 12), window(6, 12, 4, sinks=4), full(12, 6)],
    "cross": lambda: [full(12, 6), cross(8)],
}
tokens = st.integers(0, 1)  # few values, so that much is found again


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> tuple[list[int], list[int]]:
    count = draw(st.integers(1, most))
    return draw(st.lists(tokens, min_size=count, max_size=count)), [draw(st.integers(-1, number - 1)) for number in range(count)]


class Engine:
    """What an engine with drafts does, one draw at a time."""

    def __init__(self, data: st.DataObject, groups: list[GroupSpec], **rules: Any) -> None:
        self.draw = data.draw
        self.run = DraftRun(*groups, **rules)
        self.leases: list[Lease] = []

    def sequences(self) -> list[ActiveSequence]:
        return list(self.run.ledger.sequences.values())

    def act(self) -> None:
        run, active = self.run, self.sequences()
        if not active or (len(active) < 3 and self.draw(st.integers(0, 3)) == 0):
            self.add()
            return
        sequence = self.draw(st.sampled_from(active))
        if sequence.must_preempt:
            run.drop(sequence)
            return
        if sequence.must_report and not run.compute(sequence):
            return
        if sequence.drafts is None:
            verbs = ["propose", "propose", "append", "rewind", "store", "pin", "unpin", "release", "drop"]
        else:
            verbs = ["verify", "verify", "verify", "verify", "forget", "store", "pin", "unpin", "drop"]
        getattr(self, self.draw(st.sampled_from(verbs)))(sequence)

    def add(self) -> None:
        keywords = {"encoder_length": 3, "encoder_digest": bytes(32)} if self.run.ledger.has_cross else {}
        prompt = self.draw(st.lists(tokens, min_size=1, max_size=9))
        try:
            self.run.add(prompt, num_draft_tokens=7, max_new_tokens=30, **keywords)
        except CapacityError:
            self.run.settle()

    def propose(self, sequence: ActiveSequence) -> None:
        run = self.run
        drafted, parents = self.draw(trees())
        groups = [group for group, spec in enumerate(run.ledger.groups) if spec.kind != CROSS]
        estimated = [capacity.needed_blocks_one_step(run.ledger, sequence, False, group) for group in groups]
        free = [run.free(group, PRIMARY) for group in groups]
        left = sequence.request.max_new_tokens - (sequence.num_tokens - sequence.request.num_tokens)
        lost = run.ledger.counters.lost
        try:
            run.propose(sequence, drafted, parents)
        except CapacityError:
            run.settle()
            assert sequence.drafts is None
            assert left < len(drafted) or any(need > have for need, have in zip(estimated, free, strict=True)), "it fits"
            return
        if left >= len(drafted) and run.ledger.counters.lost == lost:  # what was lost meanwhile has been exchanged
            taken = [have - run.free(group, PRIMARY) for group, have in zip(groups, free, strict=True)]
            assert all(took <= need for took, need in zip(taken, estimated, strict=True)), (taken, estimated)

    def verify(self, sequence: ActiveSequence) -> None:
        run = self.run
        tree = run.ledger.pending_drafts(sequence.id)
        run.verify_drafts(sequence)
        node = self.draw(st.integers(-1, tree.num_drafts - 1))
        expected = [*sequence.keys.token_ids(0, sequence.num_tokens), *(tree.tokens[accepted] for accepted in tree.path_to(node))]
        run.accept(sequence, tree.path_to(node))
        assert sequence.keys.token_ids(0, sequence.num_tokens) == expected
        assert sequence.computed == len(expected)
        if self.draw(st.booleans()):
            self.append(sequence)

    def forget(self, sequence: ActiveSequence) -> None:
        self.run.ledger.drop_drafts(sequence.id)
        self.run.settle()

    def append(self, sequence: ActiveSequence) -> None:
        if sequence.computed < sequence.num_tokens and not self.run.compute(sequence):
            return
        try:
            self.run.append(sequence, self.draw(tokens))
        except CapacityError:
            self.run.settle()

    def rewind(self, sequence: ActiveSequence) -> None:
        generated = sequence.num_tokens - sequence.request.num_tokens
        try:
            self.run.rewind(sequence, self.draw(st.integers(0, min(generated, 4))))
        except (CapacityError, RequestError):
            self.run.settle()

    def store(self, sequence: ActiveSequence) -> None:
        self.run.driver.store_context(sequence.id)
        self.run.check()

    def pin(self, sequence: ActiveSequence) -> None:
        if sequence.drafts is None and sequence.computed < sequence.num_tokens and not self.run.compute(sequence):
            return  # the newest token goes into the unfilled block: before that is stored
        pin = self.run.ledger.pin if self.draw(st.booleans()) else self.run.driver.store_and_pin
        self.leases.append(pin(sequence.id))
        self.run.check()

    def unpin(self, _sequence: ActiveSequence) -> None:
        if self.leases:
            self.run.ledger.release_lease(self.leases.pop(self.draw(st.integers(0, len(self.leases) - 1))))
            self.run.check()

    def release(self, sequence: ActiveSequence) -> None:
        self.run.release(sequence)

    def drop(self, sequence: ActiveSequence) -> None:
        self.run.driver.remove(sequence.id, self.draw(st.booleans()))
        self.run.settle()

    def finish(self) -> None:
        for lease in self.leases:
            self.run.ledger.release_lease(lease)
        self.run.finish()


def serve(data: st.DataObject, layout: str, **rules: Any) -> Engine:
    return Engine(data, LAYOUTS[layout](), tokens_per_block=data.draw(st.sampled_from((2, 4))), **rules)


@examples(60)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)), steps=st.integers(1, 40))
def test_a_sequence_reads_its_own_tokens_whatever_was_drafted_and_accepted(data: st.DataObject, layout: str, steps: int) -> None:
    engine = serve(data, layout)
    for _ in range(steps):
        engine.act()
    engine.finish()


@examples(60)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)), steps=st.integers(1, 30), keep_backing=st.booleans())
def test_failed_copies_cost_drafts_and_never_a_wrong_byte(data: st.DataObject, layout: str, steps: int, keep_backing: bool) -> None:
    engine = serve(data, layout, keep_backing=keep_backing)
    engine.run.fails = lambda _move: data.draw(st.integers(0, 3)) == 3
    for _ in range(steps):
        engine.act()
    engine.finish()

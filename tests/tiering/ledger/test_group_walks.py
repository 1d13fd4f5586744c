"""Random lives of several sequences on several groups: every byte right, every refusal without a trace, every estimate kept."""

from __future__ import annotations

from random import Random

from group_run import GroupRun, cross, full, recurrent, window
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CapacityError, RequestError
from kvtier.pools.pool_index import PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease
from kvtier.tiering.ledger.truncating import truncate

MODELS = ("f", "w", "wf", "wwf", "wfr", "r", "fc", "wrc", "sf", "bf", "of")


def groups_of(random: Random) -> list[GroupSpec]:
    """Full attention, windows (with sinks, with sinks that leave a bubble, of one token), recurrent and cross-attention layers."""
    primary, secondary = random.choice((6, 10, 16, 30)), random.choice((0, 0, 4, 10))
    found: list[GroupSpec] = []
    for letter in random.choice(MODELS):
        size = primary + random.randint(0, 4)
        found.append({
            "f": full(size, secondary), "w": window(random.choice((2, 4, 6, 8, 13)), size, secondary), "o": window(1, size, secondary),
            "s": window(12, size, secondary, sinks=4), "b": window(12, size, secondary, sinks=5),
            "r": recurrent(random.choice((4, 8)), size, secondary), "c": cross(size),
        }[letter])
    return found


class GroupWalk:
    """A run, what holds on to its blocks, and chance."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.run = GroupRun(*groups_of(random), enable_partial_reuse=random.random() < 0.8, copy_on_partial_reuse=random.random() < 0.8,
                            keep_backing=random.random() < 0.5)
        self.groups = range(len(self.run.ledger.groups))
        self.leases: list[Lease] = []
        self.failing = random.random() < 0.4
        self.actions = {"add": 2, "batch": 1, "append": 3, "rewind": 1, "reorder": 1, "store": 1, "release": 1, "drop": 1, "pin": 1,
                        "store_and_pin": 1, "unpin": 1, "offload": 1, "truncate": 1, "compute": 1}

    def fails(self, _move: Move) -> bool:
        return self.failing and self.random.random() < 0.15

    def step(self) -> None:
        self.run.fails = self.fails
        self.run.drop(*[sequence for sequence in self.run.ledger.sequences.values() if sequence.must_preempt])
        action = self.random.choices(list(self.actions), list(self.actions.values()))[0]
        if action in ("add", "batch", "unpin", "offload", "truncate"):
            getattr(self, action)()
            return
        sequences = list(self.run.ledger.sequences.values())
        if sequences:
            getattr(self, action)(self.random.choice(sequences))

    def end(self) -> None:
        self.run.fails = lambda _move: False
        while self.leases:
            self.run.ledger.release_lease(self.leases.pop())
        self.run.finish()

    def tokens(self) -> list[int]:
        base, count = self.random.choice((0, 0, 0, 50)), self.random.randint(1, 22)
        shared = self.random.randint(0, count)
        return [base + position for position in range(shared)] + [self.random.choice((900, 901)) for _ in range(count - shared)]

    def request(self) -> Request:
        random = self.random
        encoder: dict[str, object] = {}
        if self.run.ledger.has_cross:
            encoder["encoder_length"] = random.randint(1, 8)
            if random.random() < 0.8:
                encoder["encoder_digest"] = bytes([random.choice((1, 2))]) * 32
        return self.run.request(self.tokens(), beam_width=random.choice((1, 1, 1, 2, 3)), skip_read=random.random() < 0.1,
                                skip_write=random.random() < 0.1, **encoder)

    def is_computed(self, sequence: ActiveSequence) -> bool:
        return sequence.computed == sequence.num_tokens or self.run.compute(sequence)

    # -- actions

    def add(self) -> None:
        run, request = self.run, self.request()
        before, free = run.snapshot(), [run.free(group) for group in self.groups]
        needed = [capacity.needed_blocks_one_step(run.ledger, request, False, group) for group in self.groups]
        run.fails = lambda _move: False
        try:
            run.add_all(request)
            assert all(free[group] - run.free(group) <= needed[group] for group in self.groups)
        except CapacityError as error:
            assert run.snapshot() == before
            assert any(free[group] <= needed[group] for group in self.groups)
            if error.preempt:
                run.drop(*[run.ledger.sequence(request_id) for request_id in error.preempt])
                run.add_all(request)

    def batch(self) -> None:
        before = self.run.snapshot()
        try:
            self.run.add_all(*[self.request() for _ in range(self.random.randint(2, 3))])
        except CapacityError:
            assert self.run.snapshot() == before

    def compute(self, sequence: ActiveSequence) -> None:
        if sequence.computed < sequence.num_tokens == sequence.request.num_tokens and not sequence.must_report:
            self.run.compute(sequence, self.random.randint(sequence.computed, sequence.num_tokens))

    def append(self, _sequence: ActiveSequence) -> None:
        ready = [sequence for sequence in list(self.run.ledger.sequences.values()) if self.is_computed(sequence)]
        chosen = [sequence for sequence in ready if not sequence.must_report and not sequence.must_preempt]
        chosen = self.random.sample(chosen, self.random.randint(0, min(3, len(chosen))))
        counts = [sequence.request.beam_width if sequence.request.beam_width > 1 else self.random.choice((1, 1, 1, 2, 5))
                  for sequence in chosen]
        before = self.run.snapshot()
        try:
            self.run.append_all(chosen, [[self.random.choice((900, 901, 5)) for _ in range(count)] for count in counts])
        except CapacityError:
            assert self.run.snapshot() == before

    def rewind(self, sequence: ActiveSequence) -> None:
        generated = sequence.num_tokens - sequence.request.num_tokens
        before = self.run.snapshot()
        try:
            self.run.rewind(sequence, self.random.randint(0, generated))
        except (CapacityError, RequestError):
            assert self.run.snapshot() == before

    def reorder(self, sequence: ActiveSequence) -> None:
        width = sequence.request.beam_width
        if width > 1 and self.is_computed(sequence) and not sequence.must_report:
            self.run.reorder(sequence, [self.random.randrange(width) for _ in range(width)])

    def store(self, sequence: ActiveSequence) -> None:
        if self.is_computed(sequence):
            self.run.store(sequence)

    def release(self, sequence: ActiveSequence) -> None:
        if self.is_computed(sequence):
            self.run.release(sequence)

    def drop(self, sequence: ActiveSequence) -> None:
        self.run.drop(sequence)

    def pin(self, sequence: ActiveSequence) -> None:
        self.leases.append(self.run.ledger.pin(sequence.id))

    def store_and_pin(self, sequence: ActiveSequence) -> None:
        self.leases.append(self.run.driver.store_and_pin(sequence.id))

    def unpin(self) -> None:
        if self.leases:
            self.run.ledger.release_lease(self.leases.pop(self.random.randrange(len(self.leases))))

    def offload(self) -> None:
        group = self.random.choice(self.groups)
        idle = [block for block in self.run.ledger.allocators[group].blocks
                if block.node is not None and block.ref_count == 0 and level_of(block.index) == PRIMARY]
        if idle and self.run.ledger.groups[group].num_blocks[SECONDARY]:
            try:
                self.run.ledger.offload(self.random.choice(idle).id, group)
            except CapacityError:
                pass
            self.run.settle()

    def truncate(self) -> None:
        if not self.run.ledger.has_cross:
            truncate(self.run.ledger, self.run.request(self.tokens()), self.random.choice((0, 4, 8)))


@given(st.randoms(use_true_random=False))
def test_no_life_of_several_sequences_shows_anybody_a_wrong_byte(random: Random) -> None:
    walk = GroupWalk(random)
    for _ in range(30):
        walk.step()
        walk.run.settle()
    walk.end()

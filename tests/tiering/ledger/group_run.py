"""Several groups run by hand on the naive model: an engine with beams, windows, running states and encoders.

Every Move is carried out at once, in order, and fails where :attr:`GroupRun.fails` says so. Every call is followed by all checks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from naive_model import Driver, no_room, refused, snapshot
from pretend_tier import Decide, blocks_of, never

from kvtier.errors import CapacityError, KVTierError
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger import ledger as ledger_module
from kvtier.tiering.ledger.events import Created, Removed, Stored, Updated
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence

interpreted = pytest.mark.skipif(not str(ledger_module.__file__).endswith(".py"), reason="compiled, types are checked by mypyc")


def full(primary: int, secondary: int = 0, nvme: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), FULL)


def window(size: int, primary: int, secondary: int = 0, nvme: int = 0, *, sinks: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), WINDOW, window=size, sinks=sinks)


def recurrent(interval: int, primary: int, secondary: int = 0, nvme: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), RECURRENT, snapshot_interval=interval)


def cross(primary: int) -> GroupSpec:
    return GroupSpec((primary, 0, 0), CROSS)


class GroupRun:
    """One ledger with its engine and its bytes."""

    make_driver: type[Driver] = Driver

    def __init__(self, *groups: GroupSpec, tokens_per_block: int = 4, **rules: Any) -> None:
        settings: dict[str, Any] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30} | rules
        self.ledger = Ledger(groups, tokens_per_block, LedgerRules(**settings))
        self.driver = self.make_driver(self.ledger)
        self.fails: Decide = never
        self._next_id = 1000
        self.settle()

    # -- calls, each followed by every check

    def request(self, tokens: Iterable[int], *, id: int | None = None, **keywords: Any) -> Request:
        self._next_id += 1
        return Request(self._next_id if id is None else id, list(tokens), **keywords)

    def add(self, tokens: Iterable[int], **keywords: Any) -> ActiveSequence:
        return self.add_all(self.request(tokens, **keywords))[0]

    def add_all(self, *requests: Request) -> list[ActiveSequence]:
        sequences = self.driver.add(*requests)
        self.settle()
        return sequences

    def compute(self, sequence: ActiveSequence, num_tokens: int | None = None) -> bool:
        """Compute up to ``num_tokens`` (all by default). False when the sequence has to be pre-empted, or stays paused."""
        self.settle()
        is_computed = self.driver.compute(sequence.id, num_tokens, self.fails)
        self.settle()  # the next chunk's blocks may have pushed others down
        return is_computed

    def compute_all_of(self, sequence: ActiveSequence) -> None:
        if sequence.computed < sequence.num_tokens:
            assert self.compute(sequence)

    def append(self, sequence: ActiveSequence, *steps: int | Sequence[int]) -> None:
        """One step each: a token, or one for each beam, or several tokens of the only beam."""
        for step in steps:
            self.append_all([sequence], [[step] if isinstance(step, int) else list(step)])

    def append_all(self, sequences: Sequence[ActiveSequence], tokens: Sequence[Sequence[int]]) -> None:
        for sequence in sequences:
            self.compute_all_of(sequence)
        self.driver.append_step([sequence.id for sequence in sequences], tokens)
        self.driver.tiers.settle(self.fails)
        for sequence, appended in zip(sequences, tokens, strict=True):
            if len(appended) > 1 and sequence.request.beam_width == 1 and not sequence.must_report:
                self.driver._write(sequence, sequence.num_tokens - len(appended), sequence.computed)  # drafts are written now
        self.settle()

    def rewind(self, sequence: ActiveSequence, num_tokens: int) -> None:
        self.driver.rewind(sequence.id, num_tokens)
        self.settle()

    def reorder(self, sequence: ActiveSequence, parents: Sequence[int]) -> None:
        self.compute_all_of(sequence)  # the step that chose the parents
        self.driver.reorder(sequence.id, parents)
        self.settle()

    def store(self, sequence: ActiveSequence) -> None:
        """Prefill complete, then the full blocks enter the tree."""
        self.compute_all_of(sequence)
        self.driver.store_context(sequence.id)
        self.settle()

    def release(self, *sequences: ActiveSequence) -> None:
        """Compute what is missing, then end with storing."""
        for sequence in sequences:
            self.compute_all_of(sequence)
            self.driver.remove(sequence.id, True)
            self.settle()

    def drop(self, *sequences: ActiveSequence) -> None:
        for sequence in sequences:
            self.driver.remove(sequence.id, False)
            self.settle()

    def serve(self, tokens: Iterable[int], *steps: int | Sequence[int], **keywords: Any) -> int:
        """A whole life. Returns the tokens that were reused."""
        sequence = self.add(tokens, **keywords)
        assert self.compute(sequence)
        self.append(sequence, *steps)
        self.release(sequence)
        return sequence.prepopulated

    def reuse(self, tokens: Iterable[int], **keywords: Any) -> int:
        """Tokens that a request would reuse: it is admitted, computed and dropped again."""
        sequence = self.add(tokens, **keywords)
        assert self.compute(sequence)
        self.drop(sequence)
        return sequence.prepopulated

    def evict(self, group: int, *tokens: int) -> None:
        """Forget what the group has stored of the block that starts with each of these tokens."""
        allocator = self.ledger.allocators[group]
        for block in allocator.blocks:
            if block.node is not None and struct.unpack_from("<i", block.node.block_key(block.position))[0] in tokens:
                allocator.forget(block)
        self.settle()

    def settle(self) -> None:
        """Carry out and report all Moves, then check everything."""
        self.driver.tiers.settle(self.fails)
        self.check()

    def check(self) -> None:
        self.driver.check()

    def refused(self, error: type[KVTierError], call: Callable[[], object]) -> KVTierError:
        found = refused(self.ledger, error, call)
        self.settle()
        return found

    def no_room(self, call: Callable[[], object]) -> CapacityError:
        found = no_room(self.ledger, call)
        self.settle()
        return found

    def finish(self) -> None:
        """End what is active; nothing may be left over."""
        self.drop(*list(self.ledger.sequences.values()))
        self.driver.check_idle()
        self.driver.events.check()
        assert all(allocator.placeholder.ref_count == 0 for allocator in self.ledger.allocators)

    # -- looking

    @property
    def moves(self) -> list[Move]:
        """Every Move ever decided on."""
        return [record for record in self.driver.tiers.records if isinstance(record, Move)]

    def free(self, group: int = 0, level: int = PRIMARY) -> int:
        return self.ledger.allocators[group].queues.num_free(level)

    def ids(self, sequence: ActiveSequence, group: int = 0, beam: int = 0) -> list[int]:
        """Block ids by position, negative where the group has no block."""
        row = sequence.rows[group]
        return [block.id for block in (row.beam(beam) if beam <= len(row.other_beams) else row.blocks)]

    def real_ids(self, sequence: ActiveSequence, group: int = 0) -> set[int]:
        """Ids of all blocks that a sequence holds in a group, over its beams."""
        return {block.id for block in blocks_of(sequence.rows[group])}

    def events(self) -> list[tuple[int, Created | Stored | Removed | Updated]]:
        """(group, data) of each event since the last call."""
        return [(event.group, event.data) for event in self.driver.events.consume()]

    def snapshot(self) -> object:
        return snapshot(self.ledger)

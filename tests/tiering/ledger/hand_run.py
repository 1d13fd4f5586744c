"""A ledger run by hand: whole lives of small prompts, each call followed by all checks, and every Move carried out on request.

Tokens per block is 4. A prompt is named by letters, one full block each: ``words("ab")`` are the 8 tokens of blocks a and b. Since
the newest token is never stored, ``serve("ab")`` sends one token more, so that a and b are stored and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from naive_model import Driver, no_room, refused
from pretend_tier import never

from kvtier.errors import CapacityError, KVTierError
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Removed, Stored, Updated
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move, WarmRow
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence

TOKENS_PER_BLOCK = 4
LAST = 7  # the token that ends a prompt and is not stored


def words(letters: str) -> list[int]:
    """Four tokens for each letter."""
    return [100 * (ord(letter) - ord("a") + 1) + position for letter in letters for position in range(TOKENS_PER_BLOCK)]


def at_priority(priority: int) -> RetentionConfig:
    return RetentionConfig([TokenRange(0, None, priority)], decode_priority=priority)


class HandRun:
    """One ledger with its engine and its pretend tier."""

    def __init__(self, primary: int, secondary: int = 0, nvme: int = 0, *, warm: Sequence[WarmRow] = (), quarantined: Sequence[int] = (),
                 **rules: Any) -> None:
        rules.setdefault("policy", "lru")
        rules.setdefault("write_ahead_share", 1.0)
        self.ledger = Ledger([GroupSpec((primary, secondary, nvme))], TOKENS_PER_BLOCK, LedgerRules(**rules))
        self.driver = Driver(self.ledger)
        self.tier = self.driver.tier
        self._noted = 0
        self._next_id = 1000
        self.ledger.adopt_store(warm, [(0, slot) for slot in quarantined])
        for row in warm:
            self.tier.rows[row.slot] = row.key
        self.note()

    # -- calls, each followed by every check

    def note(self) -> list[Move | Discard]:
        """What was decided since the last call of this, after checking everything."""
        self.tier.fetch()
        new = self.tier.records[self._noted:]
        self._noted = len(self.tier.records)
        self.driver.check()
        return new

    def request(self, tokens: str | Sequence[int], *, id: int | None = None, priority: int | None = None, **keywords: Any) -> Request:
        self._next_id += 1
        if priority is not None:
            keywords["retention"] = at_priority(priority)
        return Request(self._next_id if id is None else id, [*words(tokens), LAST] if isinstance(tokens, str) else list(tokens), **keywords)

    def add(self, tokens: str | Sequence[int], **keywords: Any) -> ActiveSequence:
        return self.add_all(self.request(tokens, **keywords))[0]

    def add_all(self, *requests: Request) -> list[ActiveSequence]:
        sequences = self.driver.add(*requests)
        self.note()
        return sequences

    def compute(self, sequence: ActiveSequence, num_tokens: int | None = None, decide: Callable[[Move], bool] = never) -> bool:
        ready = self.driver.compute(sequence.id, num_tokens, decide)
        self.note()
        return ready

    def append(self, sequence: ActiveSequence, *tokens: int) -> None:
        for token in tokens:
            assert self.driver.append([sequence.id], [[token]])
            self.note()

    def remove(self, sequence: ActiveSequence, store: bool = True) -> None:
        self.driver.remove(sequence.id, store)
        self.note()

    def serve(self, tokens: str | Sequence[int], **keywords: Any) -> list[Block]:
        """A whole life; what it stored, full blocks first. Its transfers are carried out."""
        sequence = self.add(tokens, **keywords)
        assert self.compute(sequence)
        blocks = list(sequence.blocks)
        self.remove(sequence)
        self.settle()
        return [block for block in blocks if block.node is not None]

    def offload(self, block: Block) -> list[Move | Discard]:
        self.ledger.offload(block.id)
        return self.note()

    def onboard(self, block: Block) -> list[Move | Discard]:
        self.ledger.onboard(block.id)
        return self.note()

    def set_priority(self, block: Block, priority: int) -> None:
        self.ledger.set_priority(block.id, priority)
        self.note()

    def refresh(self, now: float = 0.0) -> list[Move | Discard]:
        self.ledger.refresh(now)
        return self.note()

    # -- transfers

    def settle(self, decide: Callable[[Move], bool] = never) -> None:
        """Carry out and report everything that waits, and what follows from it, one record at a time."""
        self.note()
        while self.tier.waiting or self.tier.ended:
            while self.tier.waiting:
                record = self.tier.waiting[0]
                self.tier.carry_out(record, isinstance(record, Move) and decide(record))
            while self.tier.ended:
                self.tier.report()
                self.note()

    def carry_out(self, record: Move | Discard, fails: bool = False) -> None:
        """The bytes move, or not; nobody is told yet."""
        self.tier.carry_out(record, fails)

    def report(self, move: Move, source_is_bad: bool = True) -> None:
        """Tell the ledger how a Move that was carried out ended."""
        position = [ended for ended, _failed in self.tier.ended].index(move)
        if source_is_bad:
            self.tier.report(position)
        else:
            _move, failed = self.tier.ended.pop(position)
            self.ledger.finish(move, failed, False)
        self.note()

    def end(self, move: Move, fails: bool = False, source_is_bad: bool = True) -> None:
        self.carry_out(move, fails)
        self.report(move, source_is_bad)

    def moves(self) -> list[Move]:
        """Every Move ever decided on."""
        return [record for record in self.tier.records if isinstance(record, Move)]

    # -- looking

    def dropped(self) -> int:
        return self.ledger.counters.dropped

    def free(self, level: int = PRIMARY) -> int:
        return self.ledger.allocators[0].queues.num_free(level)

    def queued(self, level: int) -> list[Block]:
        """Handles in the order in which they would be taken."""
        return [record for record in self.ledger.allocators[0].queues.members(level) if isinstance(record, Block)]

    def content(self, level: int) -> list[Block]:
        return [block for block in self.queued(level) if block.has_content]

    def removed_hashes(self) -> list[bytes]:
        """What the events since the last look say has left the tree."""
        return [key for event in self.events() if isinstance(event, Removed) for key in event.block_hashes]

    def events(self) -> list[Removed | Stored | Updated]:
        return [event.data for event in self.driver.events.consume() if isinstance(event.data, Removed | Stored | Updated)]

    def key(self, block: Block) -> bytes:
        return self.ledger.allocators[0].chain_key(block)

    def refused(self, error: type[KVTierError], call: Callable[[], object]) -> KVTierError:
        found = refused(self.ledger, error, call)
        self.note()
        return found

    def no_room(self, call: Callable[[], object]) -> CapacityError:
        found = no_room(self.ledger, call)
        self.note()
        return found

    def finish(self) -> None:
        """End what is active; nothing may be left over."""
        for request_id in sorted(self.ledger.sequences, reverse=True):
            self.driver.remove(request_id, False)
            self.note()
        self.settle()
        self.driver.check_idle()
        self.driver.events.check()


def level(block: Block) -> int:
    return level_of(block.index)


def place(block: Block) -> tuple[int, int]:
    return level_of(block.index), slot_of(block.index)


def is_queued(block: Block) -> bool:
    return block.queue != NOT_QUEUED


def ends(move: Move | Discard) -> tuple[int, int]:
    """Levels that a Move leaves from and goes to."""
    assert isinstance(move, Move)
    return level_of(move.source), level_of(move.destination)


def pending(run: HandRun, source: int, target: int) -> Move:
    """The one Move between these levels that waits."""
    [move] = [record for record in run.tier.waiting if isinstance(record, Move) and ends(record) == (source, target)]
    return move


def expect_lost(sequence: ActiveSequence, valid: int) -> None:
    """The tokens behind the first ``valid`` ones are gone, and the engine has yet to be told."""
    assert sequence.valid == valid
    assert sequence.computed == valid
    assert sequence.must_report
    assert not sequence.must_preempt


def on_secondary(run: HandRun, letters: str, **keywords: Any) -> list[Block]:
    """Stored blocks, all of them offloaded."""
    blocks = run.serve(letters, **keywords)
    for block in blocks:
        if level(block) == PRIMARY:
            run.offload(block)
    run.settle()
    assert [level(block) for block in blocks] == [SECONDARY] * len(blocks)
    return blocks


def on_nvme(run: HandRun, letters: str, **keywords: Any) -> list[Block]:
    """Stored blocks, all of them on NVMe only. Leaves the secondary level empty."""
    blocks = on_secondary(run, letters, **keywords)
    run.ledger.write_everything_out()
    run.settle()
    for block in blocks:
        assert block.nvme_backing is not None
    while any(level(block) == SECONDARY for block in blocks):  # other content takes their slots
        filler = run.serve([9000 + run._next_id] * (TOKENS_PER_BLOCK + 1), priority=100)
        run.offload(filler[0])
        run.settle()
    for block in list(run.content(SECONDARY)) + list(run.content(PRIMARY)):
        if block not in blocks:
            run.ledger.allocators[0].forget(block)
            run.note()
    run.settle()
    assert [level(block) for block in blocks] == [NVME] * len(blocks)
    return blocks

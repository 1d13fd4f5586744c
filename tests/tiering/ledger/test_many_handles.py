"""Verbs for many handles at once do what the verb for one handle does when called for each, in the same order: two allocators, one
driven either way, stay equal in everything that can be seen of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import CapacityError
from kvtier.policies.eviction import BACKING, KEPT_BACKING, LISTS_PER_LEVEL, eviction_queues
from kvtier.policies.queue_record import NOT_QUEUED
from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.moves import Discard, Move, MoveLog
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import TierRules
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree

TOKENS_PER_BLOCK = 2


class Rig:
    """One allocator, and what a ledger would do around it."""

    def __init__(self, num_blocks: tuple[int, int, int] = (12, 0, 0), keep_backing: bool = True, at_once: bool = True) -> None:
        self.events = EventLog(100_000, 1)
        self.allocator = BlockAllocator(0, num_blocks, TOKENS_PER_BLOCK, eviction_queues("default", NUM_LEVELS),
                                        ReuseTree(1, TOKENS_PER_BLOCK), MoveLog(), self.events, LedgerCounters(),
                                        TierRules(35, 35, keep_backing, 1.0))
        self.at_once = at_once
        self.held: list[list[Block]] = []
        self.transfers: list[Move] = []
        self.accesses: list[tuple[int, int]] = []

    def take(self, count: int, priority: int = 35, duration: float = 0.0) -> list[Block]:
        if self.at_once:
            blocks = self.allocator.take_many(count, priority, duration)
        else:
            blocks = [self.allocator.take(priority, duration) for _ in range(count)]
            for block in blocks:
                block.ref_count = 1
        self.held.append(blocks)
        return blocks

    def hold(self, blocks: list[Block]) -> None:
        if self.at_once:
            self.allocator.hold_many(blocks)
        else:
            for block in blocks:
                if block.id >= 0:
                    self.allocator.hold(block)
        for block in blocks:
            self.allocator.promote(block) if block.id >= 0 else None
        self.allocator.end_call()
        self.held.append(blocks)

    def release(self, number: int) -> None:
        blocks = self.held.pop(number)
        if self.at_once:
            self.allocator.release_many(blocks)
        else:
            for block in reversed(blocks):
                if block.id >= 0:
                    self.allocator.release(block)

    def store(self, blocks: list[Block], name: int) -> None:
        """Put them into the tree as the prompt ``name``; prompts of one parity share their first block."""
        tokens = [name % 2] * TOKENS_PER_BLOCK + [name] * (TOKENS_PER_BLOCK * len(blocks))
        request = Request(1, tokens)
        keys = TokenKeys(request, TOKENS_PER_BLOCK)
        tree = self.allocator.tree
        end = TOKENS_PER_BLOCK * len(blocks)
        walk = tree.walk(tree.root(Namespace(bytes(32), request)), keys, end)
        places = [(node, position) for node, count in zip(walk.nodes, walk.counts, strict=True) for position in range(count)]
        for node, first, count in tree.extend(walk, keys, end):
            places.extend((node, position) for position in range(first, first + count))
        for block, (node, position) in zip(blocks, places, strict=True):
            if node.values[0][position] is None and block.id >= 0 and block.node is None:
                tree.attach(node, position, 0, block, TOKENS_PER_BLOCK)
        if walk.nodes:
            tree.prune(walk.end()[0])

    def fetch(self) -> list[tuple[object, ...]]:
        """New records, in a form that can be compared."""
        records = self.allocator.moves.take()
        self.transfers.extend(record for record in records if isinstance(record, Move))
        return [(record.number, record.slot) if isinstance(record, Discard) else
                (record.number, record.block_id, record.source, record.source_generation, record.destination, record.destination_generation,
                 record.num_tokens, record.key, record.priority, record.expiry) for record in records]

    def end_transfer(self, number: int, outcome: int) -> None:
        if not self.transfers:
            return
        move = self.transfers.pop(number % len(self.transfers))
        allocator = self.allocator
        if outcome == 0:
            allocator.finished(move)
            return
        lost = allocator.failed(move) if outcome == 1 else allocator.failed_source_is_good(move)
        if lost is not None:
            if lost.node is not None:
                allocator.publish_removed(lost)
                allocator.tree.detach(lost, 0)
            allocator.drop_backings(lost)
            if lost.ref_count == 0 and not allocator.is_busy(lost):
                allocator.queues.claim(lost)
                allocator.queues.add_empty_first(lost, level_of(lost.index))

    def picture(self) -> tuple[object, ...]:
        """Everything that can be seen of the allocator, but what ``fetch`` returns."""
        allocator = self.allocator
        queues = allocator.queues
        blocks = [(block.id, block.index, block.generation, block.ref_count, block.queue, block.stamp, block.priority, block.duration,
                   block.expires_at, block.num_tokens, block.node is not None and block.node.chain_key(block.position),
                   *(other is not None and other.id for other in (block.owner, block.secondary_backing, block.nvme_backing)))
                  for block in allocator.blocks]
        lists = [[record.id for record in queues.members(level) if isinstance(record, Block)] for level in range(NUM_LEVELS)]
        counts = [(queues.num_free(level), queues.evictable[level], queues.backing_count(level), list(queues.levels[level].occupied),
                   [head.length for head in queues.heads]) for level in range(NUM_LEVELS)]
        events = [(event.event_id, event.data) for event in self.events.flush()]
        return (blocks, lists, counts, events, allocator.counters.values(), allocator.num_busy, allocator.num_unreferenced_busy,
                dict(allocator.busy), allocator.quarantined, queues.next_stamp, [held_ids(blocks) for blocks in self.held])

    def check(self) -> None:
        """Lists are linked both ways, and counters agree with what is there."""
        allocator = self.allocator
        for head in allocator.queues.heads:
            record = head
            length = 0
            while record.next is not head:
                assert record.next.previous is record
                record = record.next
                assert record.queue == head.queue
                length += 1
            assert head.previous is record
            assert head.length == length
        for level, holders in enumerate(allocator.holders):
            free = sum(1 for block in holders if block.queue != NOT_QUEUED)
            assert free == allocator.queues.num_free(level)
            unreferenced = [block for block in holders if block.ref_count == 0]
            assert sum(map(allocator.is_busy, unreferenced)) == allocator.num_unreferenced_busy[level]
        referenced = sum(1 for block in allocator.holders[PRIMARY] if block.ref_count > 0)
        assert referenced == allocator.num_blocks[PRIMARY] - allocator.queues.num_free(PRIMARY) - allocator.num_unreferenced_busy[PRIMARY]
        for spare in allocator.holders[NVME]:
            if spare.owner is not None and spare.queue != NOT_QUEUED:
                is_kept = level_of(spare.owner.index) == SECONDARY
                assert spare.queue % LISTS_PER_LEVEL == (KEPT_BACKING if is_kept else BACKING)
        assert allocator.placeholder.ref_count == 0
        assert allocator.placeholder.queue == NOT_QUEUED


def held_ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


small = st.integers(0, 7)
steps = st.lists(st.one_of(
    st.tuples(st.just("take"), st.integers(1, 9), st.sampled_from((20, 35, 35, 80)), st.sampled_from((0.0, 0.0, 2.0))),
    st.tuples(st.just("serve"), st.integers(2, 5), small, st.sampled_from((20, 35, 35, 80))),
    st.tuples(st.just("serve"), st.integers(2, 5), small, st.sampled_from((20, 35, 35, 80))),
    st.tuples(st.just("store"), small, small, st.just(0)),
    st.tuples(st.just("release"), small, small, st.just(0)),
    st.tuples(st.just("hold"), small, st.sampled_from(("forward", "backward", "twice", "gaps", "mixed")), small),
    st.tuples(st.just("time"), st.integers(1, 3), st.just(0), st.just(0)),
    st.tuples(st.just("write"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("end"), small, st.sampled_from((0, 0, 0, 1, 2)), st.just(0)),
    st.tuples(st.just("access"), st.integers(0, 15), st.just(0), st.just(0)),
    st.tuples(st.just("end access"), small, st.just(0), st.just(0)),
), min_size=8, max_size=40)


def perform(rig: Rig, step: tuple[object, ...]) -> str:
    """Carry one step out. Returns why it was refused, if it was."""
    verb, first, second, third = step
    allocator = rig.allocator
    if verb == "take":
        if allocator.queues.num_free(PRIMARY) < first:
            return "full"
        rig.take(first, second, third)
    elif verb == "serve":
        if allocator.queues.num_free(PRIMARY) < first:
            return "full"
        stored(rig, first, second, third)
    elif verb == "store" and rig.held:
        rig.store(rig.held[first % len(rig.held)], second)
    elif verb == "release" and rig.held:
        rig.release(first % len(rig.held))
    elif verb == "hold":
        cached = [block for level in range(NUM_LEVELS) for block in allocator.holders[level]
                  if block.node is not None and not (level == NVME and slot_of(block.index) in allocator.quarantined)]
        cached.sort(key=lambda block: (block.stamp, block.id), reverse=True)
        chosen = cached[first:first + third + 1]
        if second == "backward":
            chosen.reverse()
        elif second == "twice":
            chosen += chosen
        elif second == "gaps":
            chosen = [part for block in chosen for part in (allocator.placeholder, block)]
        elif second == "mixed":
            chosen = chosen[1::2] + chosen[::2]
        lower = len({block.id for block in chosen if block.id >= 0 and level_of(block.index) != PRIMARY})
        idle = sum(1 for block in set(chosen) if block.queue != NOT_QUEUED and level_of(block.index) == PRIMARY)
        if allocator.queues.num_free(PRIMARY) - idle < lower:
            return "full"
        rig.hold(chosen)
    elif verb == "time":
        allocator.now += first
        allocator.expire()
    elif verb == "write":
        allocator.write_ahead()
    elif verb == "end":
        rig.end_transfer(first, second)
    elif verb == "access":
        block = allocator.blocks[first % len(allocator.blocks)]
        allocator.begin_access(block)
        rig.accesses.append((level_of(block.index), slot_of(block.index)))
    elif verb == "end access" and rig.accesses:
        allocator.end_access(*rig.accesses.pop(first % len(rig.accesses)))
    return ""


@pytest.mark.parametrize("num_blocks", [(12, 0, 0), (8, 5, 0), (6, 4, 6)])
@given(steps=steps, keep_backing=st.booleans())
@examples(100)
def test_many_at_once_equal_one_by_one(num_blocks: tuple[int, int, int], steps: list[tuple[object, ...]], keep_backing: bool) -> None:
    many, single = Rig(num_blocks, keep_backing, True), Rig(num_blocks, keep_backing, False)
    for step in steps:
        assert perform(many, step) == perform(single, step)
        assert many.fetch() == single.fetch()
        assert many.picture() == single.picture()
        many.check()


def stored(rig: Rig, count: int, name: int, priority: int = 35) -> list[Block]:
    """A sequence's whole life."""
    blocks = rig.take(count, priority)
    rig.store(blocks, name)
    rig.release(-1)
    return blocks


def test_too_few_free_blocks_take_nothing() -> None:
    rig = Rig((4, 0, 0))
    rig.take(1)
    before = rig.picture()
    with pytest.raises(CapacityError, match="4 primary blocks wanted, 3 are free"):
        rig.take(4)
    assert rig.picture() == before


def test_a_released_prompt_is_given_up_from_its_tail() -> None:
    rig = Rig((6, 0, 0))
    blocks = stored(rig, 4, 1)
    rig.take(2)
    assert rig.take(2) == [blocks[3], blocks[2]]


def test_a_run_of_victims_ends_where_another_prompt_begins_and_all_of_them_are_removed_in_the_order_of_eviction() -> None:
    rig = Rig((6, 0, 0))
    first, second = stored(rig, 3, 1), stored(rig, 3, 2)
    keys = [rig.allocator.chain_key(block) for block in (*reversed(first), *reversed(second))]
    rig.events.flush()
    assert rig.take(5) == [*reversed(first), *reversed(second)][:5]
    [removed] = rig.events.flush()
    assert list(removed.data.block_hashes) == keys[:5]
    assert second[0].node is not None
    assert rig.allocator.counters.dropped == 5
    assert rig.allocator.counters.dropped_priority == 0, "there is no level below that a priority could have earned"


def test_a_run_of_victims_ends_before_a_block_that_need_not_be_dropped() -> None:
    rig = Rig((3, 0, 1))
    head, backed, tail = stored(rig, 3, 1)
    [spare] = rig.allocator.holders[NVME]
    rig.allocator.queues.claim(spare)
    backed.add_backing(spare)
    rig.allocator.queues.add_backing(spare, NVME)
    assert rig.take(2) == [tail, spare]
    assert (backed.node is not None, level_of(backed.index)) == (True, NVME)
    assert head.node is not None
    assert rig.allocator.counters.dropped == 1


def test_the_placeholder_is_passed_over_and_has_no_place() -> None:
    rig = Rig((4, 0, 0))
    placeholder = rig.allocator.placeholder
    [block] = rig.take(1)
    rig.allocator.hold_many([placeholder, block, placeholder])
    assert (block.ref_count, placeholder.ref_count) == (2, 0)
    rig.allocator.release_many([placeholder, block, placeholder])
    assert (block.ref_count, placeholder.ref_count) == (1, 0)
    assert placeholder.id == -2
    assert placeholder not in rig.allocator.blocks
    assert level_of(placeholder.index) >= NUM_LEVELS


def test_a_block_held_twice_is_released_by_the_last_of_them() -> None:
    rig = Rig((4, 0, 0))
    [block] = stored(rig, 1, 1)
    rig.allocator.hold_many([block, block])
    rig.allocator.release_many([block])
    assert block.queue == NOT_QUEUED
    rig.allocator.release_many([block])
    assert block.queue != NOT_QUEUED


def test_a_busy_block_that_nobody_holds_any_more_is_queued_when_it_is_busy_no_longer() -> None:
    rig = Rig((4, 0, 0))
    head, busy, tail = stored(rig, 3, 1)
    rig.allocator.hold_many([head, busy, tail])
    rig.allocator.begin_access(busy)
    rig.allocator.release_many([head, busy, tail])
    assert busy.queue == NOT_QUEUED
    assert rig.allocator.num_unreferenced_busy[PRIMARY] == 1
    rig.allocator.end_access(PRIMARY, slot_of(busy.index))
    rig.check()
    assert rig.allocator.queues.members(PRIMARY)[1:] == [tail, busy, head], "in the order of the release"


def test_releasing_what_nobody_holds_is_a_bug_that_is_noticed() -> None:
    rig = Rig((4, 0, 0))
    [block] = stored(rig, 1, 1)
    with pytest.raises(AssertionError):
        rig.allocator.release_many([block])


def test_moves_carry_the_path_that_their_call_has_chosen() -> None:
    rig = Rig((2, 2, 0))
    stored(rig, 2, 1)
    log = rig.allocator.moves
    log.mode, log.directory = "posix", "/somewhere"
    rig.take(1)
    log.mode, log.directory = "dram", ""
    rig.take(1)
    moves = [record for record in log.take() if isinstance(record, Move)]
    assert [(move.mode, move.directory) for move in moves] == [("posix", "/somewhere"), ("dram", "")]

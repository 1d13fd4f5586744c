"""What the ledger must never get wrong, in the most obvious form, and a tier that carries out Moves on pretend bytes.

A cell stands for the keys and values of one token. Its content is the whole history that led to it: ``(cell of the token before,
(token, extra id, multimodal content))``, and at the very start the namespace. Two cells are equal exactly when a model would have
computed the same keys and values. A slot holds one cell for each token of a block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Created, Event, Removed, Stored, Updated
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.sequence import ActiveSequence

GARBAGE: Final = ("garbage",)
UNWRITTEN: Final = ("unwritten",)
RUN_RECORD: Final = struct.Struct("<32sQII")  # of a multimodal suffix: digest, offset in the item, start in the block, length
LEGAL_MOVES: Final = {(PRIMARY, PRIMARY), (PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (SECONDARY, NVME), (NVME, PRIMARY)}

Cell = tuple[Any, ...]
Place = tuple[int, int]
Decide = Callable[[Move], bool]
"""Whether a Move fails."""


def never(_move: Move) -> bool:
    return False


def always(_move: Move) -> bool:
    return True


# -- content -----------------------------------------------------------------------------------------------------------


def elements_of(tokens: Sequence[int], extra_ids: Sequence[int] | None, multimodal: Iterable[MultimodalItem]) -> list[Cell]:
    """What each prompt position contributes."""
    found: list[Cell] = []
    for position, token in enumerate(tokens):
        content = None
        for item in multimodal:
            before = 0
            for start, length in item.runs:
                if start <= position < start + length:
                    content = (item.digest, before + position - start)
                before += length
        found.append((token, None if extra_ids is None else extra_ids[position], content))
    return found


def tag_of(request: Request) -> Cell:
    return ("namespace", request.lora_id, request.cache_salt, request.extra_ids is not None, request.lora_digest, request.extra_ids_digest)


def history(start: Cell, elements: Iterable[Cell]) -> list[Cell]:
    """One cell for each element."""
    cells: list[Cell] = []
    before = start
    for element in elements:
        before = (before, element)
        cells.append(before)
    return cells


def tree_contents(ledger: Ledger) -> dict[int, list[Cell]]:
    """By block id: the cells that the tree says the block holds, read from the keys along its path."""
    found: dict[int, list[Cell]] = {}
    for identity, root in ledger.tree.roots.items():
        stack: list[tuple[Any, Cell]] = [(root, ("namespace", *identity))]
        while stack:
            node, cell = stack.pop()
            for position in range(node.length):
                cells = history(cell, _elements_of_key(node.block_key(position), node.namespace.token_width))
                cell = cells[-1]
                block = node.values[0][position]
                if block is not None:
                    assert len(cells) == block.num_tokens
                    found[block.id] = cells
            stack.extend((child, cell) for child in node.children.values())
    return found


def _elements_of_key(key: bytes, width: int) -> list[Cell]:
    runs: list[tuple[bytes, int, int, int]] = []
    if len(key) % 2:  # only a suffix makes the length odd: the letter M and one record for each run
        records = 1
        while (len(key) - 1 - records * RUN_RECORD.size) % width or key[-1 - records * RUN_RECORD.size] != ord("M"):
            records += 1
        runs = [RUN_RECORD.unpack_from(key, len(key) - (i + 1) * RUN_RECORD.size) for i in range(records)]
        key = key[:-1 - records * RUN_RECORD.size]
    found: list[Cell] = []
    for position in range(len(key) // width):
        content = None
        for digest, offset, start, length in runs:
            if start <= position < start + length:
                content = (digest, offset + position - start)
        if width == 4:
            found.append((struct.unpack_from("<i", key, position * 4)[0], None, content))
        else:
            token, extra = struct.unpack_from("<iQ", key, position * 12)
            found.append((token, extra, content))
    return found


# -- the tier ----------------------------------------------------------------------------------------------------------


class PretendTier:
    """Slots with cells, and the transfer manager's order: a read waits for the slot's last write, a write for its last write
    and its reads; what reads a slot whose last write failed fails too. Reports may come later, in any order.

    Attributes:
        cells: by (level, slot).
        rows: the manifest, NVMe slot to chain key; row_retention: and to priority and expiry.
        waiting: records not carried out yet, by number. ended: (Move, failed) not reported to the ledger yet.
        condemns: whether a failing read from NVMe shows that the slot is bad; otherwise only the way from there failed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.cells: dict[Place, list[Cell]] = {}
        self.rows: dict[int, bytes] = {}
        self.row_retention: dict[int, tuple[int, float]] = {}
        self.quarantined: set[int] = set()
        self.waiting: list[Move | Discard] = []
        self.ended: list[tuple[Move, bool]] = []
        self.carried_out: list[Move] = []
        self.condemns: Decide = always
        self._good_sources: set[int] = set()
        self._failed_writes: dict[Place, Move] = {}
        self._next_number = 0
        for level in range(NUM_LEVELS):
            for slot in range(ledger.allocator.num_blocks[level]):
                self.cells[level, slot] = [UNWRITTEN] * ledger.tokens_per_block

    def fetch(self) -> list[Move | Discard]:
        """Take the ledger's new records over and check their form."""
        records = self.ledger.moves.take()
        for record in records:
            assert record.number == self._next_number, "records are numbered without a gap"
            self._next_number += 1
            if isinstance(record, Move):
                ends = (level_of(record.source), level_of(record.destination))
                assert ends in LEGAL_MOVES, record
                assert record.source != record.destination, record
                assert (len(record.key) == 32) == record.is_host_ordered, record
                assert record.num_tokens == 0 or ends[0] != NVME != ends[1], record
        self.waiting.extend(records)
        return records

    def runnable(self) -> list[Move | Discard]:
        """Records that nothing waiting before them holds back."""
        found: list[Move | Discard] = []
        for position, record in enumerate(self.waiting):
            if not any(_conflict(earlier, record) for earlier in self.waiting[:position]):
                found.append(record)
        return found

    def carry_out(self, record: Move | Discard, fails: bool) -> None:
        """Move the bytes of one record. A failing Move leaves garbage; what depends on a failed one fails as well."""
        self.waiting.remove(record)
        if isinstance(record, Discard):
            self.rows.pop(record.slot, None)
            return
        source, target = _place(record.source), _place(record.destination)
        earlier = self._failed_writes.get(source)
        depends_on_failure = earlier is not None and earlier.destination_generation == record.source_generation
        if depends_on_failure:
            assert self.cells[source][0] == GARBAGE, f"{record} fails because of {earlier}, which its bytes have nothing to do with"
        if source[0] == NVME:
            assert self.rows.get(source[1]) == record.key, f"{record} reads a slot whose row is gone or another's"
        failed = fails or depends_on_failure
        count = record.num_tokens or self.ledger.tokens_per_block
        if target[0] == NVME and not depends_on_failure:
            self.rows.pop(target[1], None)  # the store deletes the old row before it touches the slot
        if failed:
            if target[0] != NVME or not depends_on_failure:
                self.cells[target][:count] = [GARBAGE] * count
            self._failed_writes[target] = record
            if source[0] == NVME and self.condemns(record):
                del self.rows[source[1]]
                self.quarantined.add(source[1])
            elif source[0] == NVME:
                self._good_sources.add(record.number)
        else:
            self._failed_writes.pop(target, None)
            self.cells[target][:count] = self.cells[source][:count]
            if target[0] == NVME:
                self.rows[target[1]] = record.key
                self.row_retention[target[1]] = (record.priority, record.expiry)
            self.carried_out.append(record)
        self.ended.append((record, failed))

    def report(self, position: int = 0) -> None:
        """Tell the ledger of one ended Move."""
        move, failed = self.ended.pop(position)
        self.ledger.finish(move, failed, move.number not in self._good_sources)
        self.fetch()

    def settle(self, decide: Decide = never) -> None:
        """Carry out and report everything, in number order, and what follows from it."""
        self.fetch()
        while self.waiting or self.ended:
            while self.waiting:
                record = self.waiting[0]
                self.carry_out(record, isinstance(record, Move) and decide(record))
            while self.ended:
                self.report()

    def settle_slots(self, places: Callable[[], set[Place]], decide: Decide = never) -> None:
        """Carry out and report what touches these slots, and what that has to wait for; leave the rest waiting."""
        while True:
            self.fetch()
            slots = places()
            touching = [record for record in self.waiting if _touches(record, slots)]
            if not touching and not any(_place(move.destination) in slots for move, _failed in self.ended):
                return
            if touching:
                needed = [touching[-1]]
                for earlier in reversed(self.waiting[:self.waiting.index(touching[-1])]):
                    if any(_conflict(earlier, record) for record in needed):
                        needed.append(earlier)
                for record in sorted(needed, key=lambda r: r.number):
                    self.carry_out(record, isinstance(record, Move) and decide(record))
            while self.ended:
                self.report()

    def being_written(self) -> set[Place]:
        """Slots whose bytes are not yet what the ledger expects of them, or whose loss (of a bad source too) it has not heard of."""
        found = {_place(record.destination) for record in self.waiting if isinstance(record, Move)}
        return found | {place for move, failed in self.ended if failed for place in (_place(move.source), _place(move.destination))}

    def check_contents(self) -> None:
        """Every handle in the tree, and every backing, has the bytes that the tree says it has."""
        unsettled = self.being_written()
        for block_id, expected in tree_contents(self.ledger).items():
            block = self.ledger.allocator.blocks[block_id]
            for holder in (block, block.secondary_backing, block.nvme_backing):
                if holder is None or _place(holder.index) in unsettled:
                    continue
                actual = self.cells[_place(holder.index)][:len(expected)]
                assert actual == expected, f"block {holder.id} at {_place(holder.index)} has other bytes than block {block_id} stands for"
                if holder.index & 3 == NVME and not any(isinstance(r, Discard) and r.slot == slot_of(holder.index) for r in self.waiting):
                    assert self.rows.get(slot_of(holder.index)) == self.ledger.allocator.chain_key(block)

    def check_rows(self) -> None:
        """When nothing waits: the manifest names exactly what the ledger keeps on NVMe."""
        assert not self.waiting
        assert not self.ended
        expected: dict[int, bytes] = {}
        for holder in self.ledger.allocator.holders[NVME]:
            content = holder if holder.has_content else holder.owner
            if content is not None:
                expected[slot_of(holder.index)] = self.ledger.allocator.chain_key(content)
        assert self.rows == expected


def _place(index: int) -> Place:
    return index & 3, index >> 2


def _writes(record: Move | Discard) -> Place:
    return (NVME, record.slot) if isinstance(record, Discard) else _place(record.destination)


def _conflict(earlier: Move | Discard, later: Move | Discard) -> bool:
    written = _writes(earlier)
    if written == _writes(later) or (isinstance(later, Move) and written == _place(later.source)):
        return True
    return isinstance(earlier, Move) and _place(earlier.source) == _writes(later)


def _touches(record: Move | Discard, slots: set[Place]) -> bool:
    return _writes(record) in slots or (isinstance(record, Move) and _place(record.source) in slots)


# -- the engine --------------------------------------------------------------------------------------------------------


class Running:
    """The engine's own idea of a sequence."""

    def __init__(self, request: Request, elements: list[Cell]) -> None:
        self.tag = tag_of(request)
        self.elements = elements
        self.num_prompt_tokens = len(elements)

    def cells(self) -> list[Cell]:
        return history(self.tag, self.elements)


class Driver:
    """An engine on top of a ledger and a pretend tier: it computes cells, and looks at what it is given.

    ``ever_stored`` holds every cell that entered the tree; since a cell contains all cells before it, a prefix match over
    everything ever stored is one look-up for each token.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.tier = PretendTier(ledger)
        self.running: dict[int, Running] = {}
        self.ever_stored: set[Cell] = set()
        self.events = Subscriber(ledger)
        self.promised = 0

    # -- calls

    def add(self, *requests: Request) -> list[ActiveSequence]:
        sequences = self.ledger.add_sequences(list(requests))
        for request, sequence in zip(requests, sequences, strict=True):
            tokens = list(memoryview(request.token_bytes).cast("i"))
            running = Running(request, elements_of(tokens, request.extra_ids, request.multimodal))
            self.running[request.id] = running
            possible = 0
            for cell in running.cells()[:-1]:
                if cell not in self.ever_stored:
                    break
                possible += 1
            assert 0 <= sequence.prepopulated <= possible, f"{sequence.prepopulated} tokens promised, {possible} were ever stored"
            assert len({block.id for block in sequence.blocks}) == len(sequence.blocks)
            self.promised += sequence.prepopulated
        self.tier.fetch()
        return sequences

    def make_ready(self, request_id: int, decide: Decide = never) -> bool:
        """Wait for a sequence's transfers and read its valid tokens. False when it has to be pre-empted."""
        sequence = self.ledger.sequence(request_id)
        self.tier.settle_slots(lambda: {_place(block.index) for block in sequence.blocks}, decide)
        if sequence.must_preempt:
            return False
        self.ledger.deliver(sequence)
        self.check_sequence(request_id)
        return True

    def check_sequence(self, request_id: int) -> None:
        """Never a wrong byte."""
        sequence = self.ledger.sequence(request_id)
        cells = self.running[request_id].cells()
        assert sequence.valid <= sequence.computed
        for position in range(sequence.computed):
            assert self._read(sequence, position) == cells[position], f"request {request_id}: wrong bytes at position {position}"

    def compute(self, request_id: int, num_tokens: int | None = None, decide: Decide = never) -> bool:
        """Prefill up to ``num_tokens`` (all of them by default). False when the sequence has to be pre-empted."""
        if not self.make_ready(request_id, decide):
            return False
        sequence = self.ledger.sequence(request_id)
        end = sequence.num_tokens if num_tokens is None else max(num_tokens, sequence.computed)
        self._write(sequence, sequence.computed, end)
        self.ledger.mark_computed(request_id, end)
        return True

    def append(self, ids: Sequence[int], tokens: Sequence[Sequence[int]], decide: Decide = never) -> bool:
        """A step of several sequences. False when one of them has to be pre-empted first."""
        for request_id in ids:
            if not self.compute(request_id, None, decide):
                return False
        if any(self.ledger.sequence(request_id).must_report for request_id in ids):
            return False
        self.ledger.append_step(ids, tokens)
        self.tier.fetch()
        for request_id, appended in zip(ids, tokens, strict=True):
            running = self.running[request_id]
            extra = 0 if running.elements[0][1] is not None else None
            old = len(running.elements)
            running.elements.extend((token, extra, None) for token in appended)
            if appended and self.make_ready_after_append(request_id, old, decide):
                sequence = self.ledger.sequence(request_id)
                if sequence.computed == sequence.num_tokens - 1:
                    self._write(sequence, old, sequence.computed)
        return True

    def make_ready_after_append(self, request_id: int, old: int, decide: Decide) -> bool:
        """The drafts of this step are written only now: look at what was there before."""
        sequence = self.ledger.sequence(request_id)
        self.tier.settle_slots(lambda: {_place(block.index) for block in sequence.blocks}, decide)
        if sequence.must_preempt:
            return False
        self.ledger.deliver(sequence)
        cells = self.running[request_id].cells()
        for position in range(min(old, sequence.computed)):
            assert self._read(sequence, position) == cells[position], f"request {request_id}: wrong bytes at position {position}"
        return True

    def rewind(self, request_id: int, num_tokens: int) -> None:
        self.ledger.rewind(request_id, num_tokens)
        if num_tokens:
            del self.running[request_id].elements[-num_tokens:]

    def store_context(self, request_id: int) -> None:
        sequence = self.ledger.sequence(request_id)
        self._note_stored(sequence, sequence.storable_tokens() // self.ledger.tokens_per_block * self.ledger.tokens_per_block)
        self.ledger.store_context(request_id)

    def remove(self, request_id: int, store: bool) -> None:
        sequence = self.ledger.sequence(request_id)
        if store:
            self._note_stored(sequence, sequence.storable_tokens())
        self.ledger.remove_sequence(request_id, store)
        del self.running[request_id]
        self.tier.fetch()

    def release(self, request_id: int, *appended: int) -> None:
        """Prefill, append, and remove with storing: what the known-answer cases call "release"."""
        assert self.compute(request_id)
        for token in appended:
            assert self.append([request_id], [[token]])
        assert self.compute(request_id)
        self.remove(request_id, True)

    def refresh(self, now: float) -> None:
        self.ledger.refresh(now)
        self.tier.fetch()

    # -- checks

    def check(self) -> None:
        """Everything that holds between any two calls."""
        verify(self.ledger)
        self.tier.check_contents()
        unsettled = self.tier.being_written()
        for request_id, sequence in self.ledger.sequences.items():
            if sequence.must_preempt or any(_place(block.index) in unsettled for block in sequence.blocks):
                continue
            self.check_sequence(request_id)

    def check_writing_ends(self, now: float) -> None:
        """Left alone, the tier stops moving blocks: there is nothing that two of them could want in turns."""
        for _ in range(2 + sum(self.ledger.allocator.num_blocks)):
            self.tier.settle()
            before = len(self.tier.carried_out)
            self.refresh(now)
            self.tier.settle()
            if len(self.tier.carried_out) == before:
                return
        raise AssertionError("write-ahead goes on for ever")

    def check_idle(self) -> None:
        """Everything that holds once all requests have ended and all Moves have been reported."""
        self.tier.settle()
        self.check()
        self.tier.check_rows()
        assert not self.ledger.sequences
        assert not self.ledger.leases
        assert all(block.ref_count == 0 for block in self.ledger.allocator.blocks)
        free = self.ledger.allocator.queues.free
        assert free[PRIMARY] == self.ledger.allocator.num_blocks[PRIMARY]
        assert free[SECONDARY] == self.ledger.allocator.num_blocks[SECONDARY]
        assert free[NVME] == self.ledger.allocator.num_blocks[NVME] - len(self.ledger.allocator.quarantined)

    # -- inside

    def _read(self, sequence: ActiveSequence, position: int) -> Cell:
        block = sequence.blocks[position // self.ledger.tokens_per_block]
        assert level_of(block.index) == PRIMARY
        return self.tier.cells[_place(block.index)][position % self.ledger.tokens_per_block]

    def _write(self, sequence: ActiveSequence, start: int, end: int) -> None:
        cells = self.running[sequence.id].cells()
        for position in range(start, end):
            block = sequence.blocks[position // self.ledger.tokens_per_block]
            holders = sum(block in other.blocks for other in self.ledger.sequences.values())
            assert holders == 1, f"request {sequence.id} writes into block {block.id}, which another sequence holds too"
            assert block.node is None, f"request {sequence.id} writes into block {block.id}, which is stored"
            self.tier.cells[_place(block.index)][position % self.ledger.tokens_per_block] = cells[position]

    def _note_stored(self, sequence: ActiveSequence, num_tokens: int) -> None:
        running = self.running[sequence.id]
        assert num_tokens <= len(running.elements) - 1 or num_tokens == 0, "the newest token is never stored"
        self.ever_stored.update(running.cells()[:num_tokens])


# -- events ------------------------------------------------------------------------------------------------------------


class Subscriber:
    """A router that knows the cache only from its events."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.blocks: dict[bytes, tuple[int, int]] = {}  # chain key: level, priority
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.next_id = 0

    def consume(self) -> list[Event]:
        events = self.ledger.events.flush()
        for event in events:
            assert event.event_id == self.next_id, "event ids ascend by one"
            self.next_id += 1
            data = event.data
            if isinstance(data, Created):
                self.blocks.clear()
            elif isinstance(data, Stored):
                assert data.parent_hash is None or data.parent_hash in self.blocks, "stored behind a block that is not"
                for block in data.blocks:
                    assert block.block_hash not in self.blocks, "stored twice"
                    self.blocks[block.block_hash] = (block.level, block.priority)
                    self.tokens[block.block_hash] = block.tokens
            elif isinstance(data, Removed):
                for key in data.block_hashes:
                    del self.blocks[key]
            elif isinstance(data, Updated):
                level, priority = self.blocks[data.block_hash]
                if data.level is not None:
                    assert data.level[0] == level != data.level[1]
                    level = data.level[1]
                if data.priority is not None:
                    assert data.priority[0] == priority != data.priority[1]
                    priority = data.priority[1]
                self.blocks[data.block_hash] = (level, priority)
        return events

    def check(self) -> None:
        """After consuming everything the subscriber knows the tree: keys, levels, priorities."""
        self.consume()
        actual: dict[bytes, tuple[int, int]] = {}
        for block in self.ledger.allocator.blocks:
            if block.node is not None:
                actual[self.ledger.allocator.chain_key(block)] = (level_of(block.index), block.priority)
        assert self.blocks == actual


# -- nothing has changed -----------------------------------------------------------------------------------------------


def snapshot(ledger: Ledger) -> object:
    """All that a refused call must leave as it was."""
    allocator = ledger.allocator

    def name(block: Block | None) -> int:
        return -1 if block is None else block.id

    blocks = [(block.id, block.index, block.ref_count, block.queue, block.priority, block.duration, block.num_tokens, block.warm_key,
               name(block.secondary_backing), name(block.nvme_backing), name(block.owner),
               b"" if block.node is None else block.node.chain_key(block.position)) for block in allocator.blocks]
    queues = [[record.id for record in allocator.queues.members(level) if isinstance(record, Block)] for level in range(NUM_LEVELS)]
    sequences = [(sequence.id, [block.id for block in sequence.blocks], sequence.num_tokens, sequence.computed, sequence.valid)
                 for sequence in ledger.sequences.values()]
    counters = (ledger.counters.values(), list(ledger.counters.hit_tokens), list(ledger.counters.hit_blocks))
    return blocks, queues, sequences, sorted(ledger.leases), counters, ledger.moves.next_number, ledger.tree.num_nodes()

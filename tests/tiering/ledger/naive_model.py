"""What the ledger must never get wrong, in the most obvious form: an engine, a router and a picture of everything."""

from __future__ import annotations

from collections.abc import Sequence

from pretend_cells import Cell, elements_of, history, tag_of
from pretend_tier import Decide, PretendTier, never, place

from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Created, Event, Removed, Stored, Updated
from kvtier.tiering.ledger.group import FULL
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence


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
        self.tier.settle_slots(lambda: {place(block.index) for block in sequence.blocks}, decide)
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
        self.tier.settle_slots(lambda: {place(block.index) for block in sequence.blocks}, decide)
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
            if sequence.must_preempt or any(place(block.index) in unsettled for block in sequence.blocks):
                continue
            self.check_sequence(request_id)

    def check_writing_ends(self, now: float) -> None:
        """Left alone, the tier stops moving blocks: there is nothing that two of them could want in turns."""
        for _ in range(2 + sum(self.ledger.allocators[0].num_blocks)):
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
        assert all(block.ref_count == 0 for block in self.ledger.allocators[0].blocks)
        free = self.ledger.allocators[0].queues.free
        assert free[PRIMARY] == self.ledger.allocators[0].num_blocks[PRIMARY]
        assert free[SECONDARY] == self.ledger.allocators[0].num_blocks[SECONDARY]
        assert free[NVME] == self.ledger.allocators[0].num_blocks[NVME] - len(self.ledger.allocators[0].quarantined)

    # -- inside

    def _read(self, sequence: ActiveSequence, position: int) -> Cell:
        block = sequence.blocks[position // self.ledger.tokens_per_block]
        assert level_of(block.index) == PRIMARY
        return self.tier.cells[place(block.index)][position % self.ledger.tokens_per_block]

    def _write(self, sequence: ActiveSequence, start: int, end: int) -> None:
        cells = self.running[sequence.id].cells()
        for position in range(start, end):
            block = sequence.blocks[position // self.ledger.tokens_per_block]
            holders = sum(block in other.blocks for other in self.ledger.sequences.values())
            assert holders == 1, f"request {sequence.id} writes into block {block.id}, which another sequence holds too"
            assert block.node is None, f"request {sequence.id} writes into block {block.id}, which is stored"
            self.tier.cells[place(block.index)][position % self.ledger.tokens_per_block] = cells[position]

    def _note_stored(self, sequence: ActiveSequence, num_tokens: int) -> None:
        running = self.running[sequence.id]
        assert num_tokens <= len(running.elements) - 1 or num_tokens == 0, "the newest token is never stored"
        self.ever_stored.update(running.cells()[:num_tokens])


class Subscriber:
    """A router that knows the cache only from its events."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.groups: list[dict[bytes, tuple[int, int]]] = [{} for _ in ledger.groups]  # by group, chain key: level, priority
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.next_id = 0

    @property
    def blocks(self) -> dict[bytes, tuple[int, int]]:
        """What it knows of the first group."""
        return self.groups[0]

    def consume(self) -> list[Event]:
        events = self.ledger.events.flush()
        for event in events:
            assert event.event_id == self.next_id, "event ids ascend by one"
            self.next_id += 1
            data = event.data
            blocks = self.groups[event.group]
            may_have_gaps = self.ledger.groups[event.group].kind != FULL
            if isinstance(data, Created):
                blocks.clear()
            elif isinstance(data, Stored):
                assert may_have_gaps or data.parent_hash is None or data.parent_hash in blocks, "stored behind a block that is not"
                for block in data.blocks:
                    assert block.block_hash not in blocks, "stored twice"
                    blocks[block.block_hash] = (block.level, block.priority)
                    self.tokens[block.block_hash] = block.tokens
            elif isinstance(data, Removed):
                for key in data.block_hashes:
                    del blocks[key]
            elif isinstance(data, Updated):
                level, priority = blocks[data.block_hash]
                if data.level is not None:
                    assert data.level[0] == level != data.level[1]
                    level = data.level[1]
                if data.priority is not None:
                    assert data.priority[0] == priority != data.priority[1]
                    priority = data.priority[1]
                blocks[data.block_hash] = (level, priority)
        return events

    def check(self) -> None:
        """After consuming everything the subscriber knows the tree: keys, levels, priorities."""
        self.consume()
        for allocator, known in zip(self.ledger.allocators, self.groups, strict=True):
            actual = {allocator.chain_key(block): (level_of(block.index), block.priority)
                      for block in allocator.blocks if block.node is not None}
            assert known == actual


def snapshot(ledger: Ledger) -> object:
    """All that a refused call must leave as it was."""

    def name(block: Block | None) -> int:
        return -1 if block is None else block.id

    blocks = [[(block.id, block.index, block.ref_count, block.queue, block.priority, block.duration, block.num_tokens, block.warm_key,
                name(block.secondary_backing), name(block.nvme_backing), name(block.owner),
                b"" if block.node is None else block.node.chain_key(block.position)) for block in allocator.blocks]
              for allocator in ledger.allocators]
    queues = [[record.id for record in allocator.queues.members(level) if isinstance(record, Block)]
              for allocator in ledger.allocators for level in range(NUM_LEVELS)]
    sequences = [(sequence.id, [[[block.id for block in row.beam(beam)] for beam in range(len(row.other_beams) + 1)]
                                for row in sequence.rows], sequence.num_tokens, sequence.computed, sequence.valid)
                 for sequence in ledger.sequences.values()]
    counters = (ledger.counters.values(), list(ledger.counters.hit_tokens), list(ledger.counters.hit_blocks))
    return blocks, queues, sequences, sorted(ledger.leases), counters, ledger.moves.next_number, ledger.tree.num_nodes()

"""What the ledger must never get wrong, in the most obvious form: an engine, and a picture of everything.

What a model reads, by kind of group, for the token at position p: *full* everything before it, of its own beam; *window* its sinks and
the last ``window - sinks - 1`` tokens before it; *recurrent* the state after exactly p tokens, in the block of the last position, which
it overwrites at every token, leaving a snapshot wherever the row has a block at the block end that it passes; *cross* the encoder's
output, written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eviction_watch import pictures
from pretend_cells import Cell, elements_of, history, tag_of
from pretend_tier import Decide, PretendTier, Tiers, blocks_of, never, place
from subscriber import Subscriber

from kvtier.errors import CapacityError, KVTierError
from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.capacity import held_blocks, most_blocks
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease, SequenceRow


class Life:
    """The engine's own idea of a sequence: by beam, the cell of each token."""

    def __init__(self, request: Request) -> None:
        tokens = list(memoryview(request.token_bytes).cast("i"))
        prompt = history(tag_of(request), elements_of(tokens, request.extra_ids, request.multimodal))
        self.extra_id = None if request.extra_ids is None else 0  # of what is generated
        self.beams = [list(prompt) for _ in range(request.beam_width)]
        source = request.id if request.encoder_digest is None else request.encoder_digest
        self.encoder: list[Cell] = [("encoder", source, position) for position in range(request.encoder_length)]
        self.is_encoded = False

    @property
    def num_tokens(self) -> int:
        return len(self.beams[0])

    def append(self, tokens: Sequence[int]) -> None:
        """One token for each of several beams, or any number for a single one."""
        if len(self.beams) > 1:
            for cells, token in zip(self.beams, tokens, strict=True):
                cells.append((cells[-1], (token, self.extra_id, None)))
        else:
            for token in tokens:
                self.beams[0].append((self.beams[0][-1], (token, self.extra_id, None)))

    def rewind(self, num_tokens: int) -> None:
        for cells in self.beams:
            del cells[len(cells) - num_tokens:]


class Driver:
    """An engine on top of a ledger and its pretend tiers.

    Attributes:
        ever_stored: every cell that entered the tree; a cell contains all cells before it.
        taken: by group, primary blocks that the ledger took in the last call of ``append``; cost: by how many fewer were free after
            the last ``add``.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.tiers = Tiers(ledger)
        self.lives: dict[int, Life] = {}
        self.ever_stored: set[Cell] = set()
        self.events = Subscriber(ledger)
        self.taken: list[int] = []
        self.cost: list[int] = []
        self._stores_early = ledger.is_chunked or any(group.kind != FULL for group in ledger.groups)

    @property
    def tier(self) -> PretendTier:
        """The tier of the only group, or of the first one."""
        return self.tiers.groups[0]

    # -- calls

    def add(self, *requests: Request) -> list[ActiveSequence]:
        free = self.free_primary()
        before = pictures(self.ledger)
        sequences = self.ledger.add_sequences(list(requests))
        self.cost = [before - after for before, after in zip(free, self.free_primary(), strict=True)]
        for request, sequence in zip(requests, sequences, strict=True):
            life = self.lives[request.id] = Life(request)
            possible = 0
            for cell in life.beams[0][:-1]:
                if cell not in self.ever_stored:
                    break
                possible += 1
            assert 0 <= sequence.prepopulated <= possible, f"{sequence.prepopulated} tokens promised, {possible} were ever stored"
            for row in sequence.rows:
                blocks = [block for block in row.blocks if block.id >= 0]
                assert all(level_of(block.index) == PRIMARY for block in blocks)
                assert len({block.id for block in blocks}) == len(blocks), "a block is in two places of a sequence"
                if self.ledger.groups[row.group].kind == FULL and not self.ledger.is_chunked:
                    assert len(blocks) == -(-sequence.num_tokens // self.ledger.tokens_per_block)
        reused_in_place = {(row.group, row.blocks[sequence.prepopulated // self.ledger.tokens_per_block].id)
                           for sequence in sequences if sequence.prepopulated % self.ledger.tokens_per_block
                           for row in sequence.rows if self.ledger.groups[row.group].kind != CROSS}
        for picture in before:
            picture.check(reused_in_place)
        self.tiers.fetch()
        return sequences

    def make_ready(self, request_id: int, decide: Decide = never, num_tokens: int | None = None) -> bool:
        """Wait for a sequence's transfers, and look at what it has of its first ``num_tokens`` tokens (all that are computed by
        default). False when it has to be pre-empted."""
        sequence = self.ledger.sequence(request_id)
        self.tiers.settle_sequence(sequence, decide)
        if sequence.must_preempt:
            return False
        self.ledger.deliver(sequence)
        self.check_sequence(request_id, num_tokens)
        return True

    def compute(self, request_id: int, num_tokens: int | None = None, decide: Decide = never) -> bool:
        """Compute up to ``num_tokens`` (all of them by default). False when the sequence has to be pre-empted."""
        if not self.make_ready(request_id, decide):
            return False
        sequence = self.ledger.sequence(request_id)
        end = sequence.num_tokens if num_tokens is None else max(num_tokens, sequence.computed)
        while self.ledger.is_chunked and sequence.covered < end:  # one chunk after the other, as far as there are blocks
            self.ledger.resume_prefills([request_id])
            if self.ledger.is_paused(request_id) or not self.make_ready(request_id, decide):
                return False
            step = min(sequence.covered, end)
            self._write(sequence, sequence.computed, step)
            self.note_stored(request_id, step)
            self.ledger.mark_computed(request_id, step)
            self.tiers.fetch()
            if not self.make_ready(request_id, decide):
                return False
        end = max(end, sequence.computed)
        self._write(sequence, sequence.computed, end)
        if self._stores_early:
            self.note_stored(request_id, end)
        self.ledger.mark_computed(request_id, end)
        self.tiers.fetch()
        if not self.make_ready(request_id, decide):
            return False
        self.check_sequence(request_id)
        return True

    def append(self, ids: Sequence[int], tokens: Sequence[Sequence[int]], decide: Decide = never) -> bool:
        """A step of several sequences. False when one of them has to be pre-empted first."""
        for request_id in ids:
            if not self.compute(request_id, None, decide):
                return False
        if any(self.ledger.sequence(request_id).must_report for request_id in ids):
            return False
        old = [self.lives[request_id].num_tokens for request_id in ids]
        self.append_step(ids, tokens)
        for request_id, appended, before in zip(ids, tokens, old, strict=True):
            if appended and self.make_ready(request_id, decide, before):
                sequence = self.ledger.sequence(request_id)
                if sequence.computed == sequence.num_tokens - 1:  # else a copy failed, and this is computed again from further back
                    self._write(sequence, before, sequence.computed)
        return True

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """The call alone. Of several tokens that it appends to a beam, all but the newest are drafts that are written now."""
        before = self._takes()
        pictured = pictures(self.ledger)
        for request_id in ids:
            self.note_leaving(request_id)
        self.ledger.append_step(ids, tokens)
        for picture in pictured:
            picture.check(set())
        self.taken = [now - then for now, then in zip(self._takes(), before, strict=True)]
        self.tiers.fetch()
        for request_id, appended in zip(ids, tokens, strict=True):
            self.lives[request_id].append(appended)

    def rewind(self, request_id: int, num_tokens: int) -> None:
        self.ledger.rewind(request_id, num_tokens)
        self.lives[request_id].rewind(num_tokens)
        self.tiers.fetch()

    def reorder(self, request_id: int, parents: Sequence[int]) -> None:
        """Between computing the newest tokens and appending the next ones."""
        self.ledger.reorder_beams(request_id, parents)
        life = self.lives[request_id]
        life.beams = [list(life.beams[parent]) for parent in parents]
        self.tiers.fetch()

    def note_stored(self, request_id: int, computed: int = 0) -> None:
        sequence = self.ledger.sequence(request_id)
        storable = max(sequence.storable_tokens(), min(computed, sequence.num_tokens - 1) if self.ledger.is_chunked else 0)
        self.ever_stored.update(self.lives[request_id].beams[0][:storable])

    def note_leaving(self, request_id: int) -> None:
        """An append stores what leaves a window, and counts everything before it as computed."""
        if self.ledger.has_window:
            life = self.lives[request_id]
            self.ever_stored.update(life.beams[0][:life.num_tokens - 1])

    def store_context(self, request_id: int) -> None:
        storable = self.ledger.sequence(request_id).storable_tokens()
        self.ever_stored.update(self.lives[request_id].beams[0][:storable - storable % self.ledger.tokens_per_block])
        self.ledger.store_context(request_id)

    def store_and_pin(self, request_id: int) -> Lease:
        self.note_stored(request_id)
        return self.ledger.store_and_pin(request_id)

    def remove(self, request_id: int, store: bool) -> None:
        if store:
            self.note_stored(request_id)
        self.ledger.remove_sequence(request_id, store)
        del self.lives[request_id]
        self.tiers.fetch()

    def release(self, request_id: int, *appended: int) -> None:
        """Prefill, append, and remove with storing: what the known-answer cases call "release"."""
        assert self.compute(request_id)
        for token in appended:
            assert self.append([request_id], [[token]])
        assert self.compute(request_id)
        self.remove(request_id, True)

    def refresh(self, now: float) -> None:
        self.ledger.refresh(now)
        self.tiers.fetch()

    # -- checks

    def check_sequence(self, request_id: int, num_tokens: int | None = None) -> None:
        """Never a wrong byte, and everything that the next token reads is there."""
        sequence = self.ledger.sequence(request_id)
        life = self.lives[request_id]
        assert sequence.valid <= sequence.computed
        assert sequence.num_tokens == life.num_tokens
        computed = sequence.computed if num_tokens is None else min(num_tokens, sequence.computed)
        for row in sequence.rows:
            for beam in self._computing(sequence):
                self._check_row(row, beam, life.beams[beam], computed, f"request {request_id}, group {row.group}, beam {beam}")
            if self.ledger.groups[row.group].kind == CROSS and life.is_encoded:
                for beam in range(sequence.request.beam_width):
                    cells = [cell for block in row.beam(beam) for cell in self._cells(row.group, block)]
                    assert cells[:len(life.encoder)] == life.encoder, f"request {request_id}: wrong encoder output"

    def _check_row(self, row: SequenceRow, beam: int, cells: list[Cell], computed: int, name: str) -> None:
        group = self.ledger.groups[row.group]
        blocks = row.beam(beam)
        tokens_per_block = self.ledger.tokens_per_block
        if group.kind == RECURRENT:
            if computed:
                assert self._cells(row.group, blocks[-1])[0] == cells[computed - 1], f"{name}: not the state after {computed} tokens"
            for position, block in enumerate(blocks[:-1]):
                end = (position + 1) * tokens_per_block
                if block.id >= 0 and end <= computed:
                    assert self._cells(row.group, block)[0] == cells[end - 1], f"{name}: not the state after {end} tokens"
        elif group.kind != CROSS:
            for position in range(computed):
                number, offset = self._place(row.group, position)
                block = blocks[number]
                if block.id < 0:
                    assert group.kind == WINDOW, f"{name}: nothing at token {position}"
                    is_read = position < group.sinks or position > computed - (group.window - group.sinks)
                    assert not is_read, f"{name}: token {position} is gone and still read by token {computed}"
                else:
                    assert level_of(block.index) == PRIMARY
                    assert self._cells(row.group, block)[offset] == cells[position], f"{name}: wrong bytes at token {position}"

    def check(self) -> None:
        """Everything that holds between any two calls."""
        verify(self.ledger)
        for tier in self.tiers.groups:
            tier.check_contents()
        for request_id, sequence in self.ledger.sequences.items():
            if not sequence.must_preempt and self.tiers.is_settled(sequence):
                self.check_sequence(request_id)

    def check_estimates(self) -> None:
        """No sequence that keeps to what it asked for holds more than was said that it would hold at most."""
        for sequence in self.ledger.sequences.values():
            asked = sequence.request
            end = asked.num_tokens + asked.max_new_tokens
            if self.last_place(sequence) <= end:
                for group in range(len(self.ledger.groups)):
                    assert held_blocks(sequence, group) <= most_blocks(self.ledger, asked, end, group), f"request {asked.id}, group {group}"

    def last_place(self, sequence: ActiveSequence) -> int:
        """Up to where a sequence needs blocks."""
        return sequence.num_tokens

    def check_writing_ends(self, now: float) -> None:
        """Left alone, the tier stops moving blocks: there is nothing that two of them could want in turns."""
        for _ in range(2 + sum(sum(group.num_blocks) for group in self.ledger.groups)):
            self.tiers.settle()
            before = self.tiers.num_carried_out
            self.refresh(now)
            self.tiers.settle()
            if self.tiers.num_carried_out == before:
                return
        raise AssertionError("write-ahead goes on for ever")

    def check_idle(self) -> None:
        """Everything that holds once all requests have ended and all Moves have been reported."""
        self.tiers.settle()
        self.check()
        assert not self.ledger.sequences
        assert not self.ledger.leases
        for tier, allocator in zip(self.tiers.groups, self.ledger.allocators, strict=True):
            tier.check_rows()
            free = allocator.queues.free
            assert all(block.ref_count == 0 for block in allocator.blocks)
            assert free[PRIMARY] == allocator.num_blocks[PRIMARY]
            assert free[SECONDARY] == allocator.num_blocks[SECONDARY]
            assert free[NVME] == allocator.num_blocks[NVME] - len(allocator.quarantined)

    def free_primary(self) -> list[int]:
        return [allocator.queues.free[PRIMARY] for allocator in self.ledger.allocators]

    # -- inside

    def _takes(self) -> list[int]:
        return [sum(holder.generation for holder in allocator.holders[PRIMARY]) for allocator in self.ledger.allocators]

    def _cells(self, group: int, block: Block) -> list[Cell]:
        return self.tiers.groups[group].cells[place(block.index)]

    def _place(self, group: int, position: int) -> tuple[int, int]:
        """Block and offset of a token: those behind the sinks start at a block of their own."""
        sinks = self.ledger.groups[group].sinks
        if position >= sinks:
            position += -sinks % self.ledger.tokens_per_block
        return divmod(position, self.ledger.tokens_per_block)

    def _computing(self, sequence: ActiveSequence) -> Iterable[int]:
        """The prompt is computed once, in the first beam; all that comes behind it by every beam."""
        return range(sequence.request.beam_width) if sequence.num_tokens > sequence.request.num_tokens else range(1)

    def _write(self, sequence: ActiveSequence, start: int, end: int) -> None:
        life = self.lives[sequence.id]
        tokens_per_block = self.ledger.tokens_per_block
        for row in sequence.rows:
            kind = self.ledger.groups[row.group].kind
            if kind == CROSS:
                if not life.is_encoded and start < end:
                    for position, cell in enumerate(life.encoder):
                        block = row.blocks[position // tokens_per_block]
                        self._check_writable(sequence, row, block, lambda _beam: True)
                        self._cells(row.group, block)[position % tokens_per_block] = cell
                continue
            for beam in self._computing(sequence):
                for position in range(start, end):
                    number, offset = self._place(row.group, position)
                    if kind == RECURRENT:
                        self._write_cell(sequence, row, beam, len(row.blocks) - 1, 0, position)
                        passed = (position + 1) % tokens_per_block == 0 and number < len(row.blocks) - 1
                        if passed and row.beam(beam)[number].id >= 0:
                            self._write_cell(sequence, row, beam, number, 0, position)
                    else:
                        assert kind in (FULL, WINDOW)
                        self._write_cell(sequence, row, beam, number, offset, position)
        life.is_encoded = life.is_encoded or start < end

    def _write_cell(self, sequence: ActiveSequence, row: SequenceRow, beam: int, number: int, offset: int, position: int) -> None:
        life = self.lives[sequence.id]
        block = row.beam(beam)[number]
        assert block.id >= 0, f"request {sequence.id}, group {row.group}: no block for token {position}"
        cell = life.beams[beam][position]
        self._check_writable(sequence, row, block, lambda other: life.beams[other][position] == cell, offset)
        self._cells(row.group, block)[offset] = cell

    def _check_writable(self, sequence: ActiveSequence, row: SequenceRow, block: Block, is_same: Callable[[int], bool],
                        offset: int = 0) -> None:
        """Nobody else holds the block but beams that would write the same, and what is written there is not stored. The newest token
        of a sequence goes behind the partial tail that was stored of it."""
        name = f"request {sequence.id}, group {row.group}, block {block.id}"
        assert level_of(block.index) == PRIMARY
        assert block.node is None or offset >= block.num_tokens, f"{name}: written while it is stored"
        for other in self.ledger.sequences.values():
            if other is not sequence:
                assert block not in blocks_of(other.rows[row.group]), f"{name}: written while request {other.id} holds it"
        for beam in range(sequence.request.beam_width):
            assert block not in row.beam(beam) or is_same(beam), f"{name}: written while beam {beam} holds it"


def snapshot(ledger: Ledger) -> object:
    """All that a refused call must leave as it was."""

    def name(block: Block | None) -> int:
        return -1 if block is None else block.id

    blocks = [[(block.id, block.index, block.ref_count, block.queue, block.priority, block.duration, block.expires_at, block.num_tokens,
                block.warm_key, name(block.secondary_backing), name(block.nvme_backing), name(block.owner),
                b"" if block.node is None else block.node.chain_key(block.position)) for block in allocator.blocks]
              for allocator in ledger.allocators]
    queues = [[record.id for record in allocator.queues.members(level) if isinstance(record, Block)]
              for allocator in ledger.allocators for level in range(NUM_LEVELS)]
    sequences = [(sequence.id, [([[block.id for block in row.beam(beam)] for beam in range(len(row.other_beams) + 1)],
                                 [list(departed) for departed in row.departed_ids]) for row in sequence.rows],
                  sequence.num_tokens, sequence.computed, sequence.valid, sequence.must_report)
                 for sequence in ledger.sequences.values()]
    counters = (ledger.counters.values(), list(ledger.counters.hit_tokens), list(ledger.counters.hit_blocks))
    return blocks, queues, sequences, sorted(ledger.leases), counters, ledger.moves.next_number, ledger.tree.num_nodes()


def refused(ledger: Ledger, error: type[KVTierError], call: Callable[[], object]) -> KVTierError:
    """The call raises this error and leaves everything as it was."""
    before = snapshot(ledger)
    try:
        call()
    except error as raised:
        assert snapshot(ledger) == before
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


def no_room(ledger: Ledger, call: Callable[[], object]) -> CapacityError:
    error = refused(ledger, CapacityError, call)
    assert isinstance(error, CapacityError)
    return error

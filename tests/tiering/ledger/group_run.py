"""Several groups run by hand: an engine with beams, windows, running states and encoders on pretend bytes.

A *history* is a number that stands for everything a model has read so far; keys and values of a token, and the running state behind
it, are written as its history. Two histories are equal exactly when a model would have computed the same. Every Move is carried out at
once, in order, and fails where :attr:`GroupRun.fails` says so. Every call is followed by ``verify()`` and by a look at every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from kvtier.errors import CapacityError, KVTierError
from kvtier.pools.pool_index import NUM_LEVELS, NVME, PRIMARY, level_of, slot_of
from kvtier.tiering.ledger import ledger as ledger_module
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Created, Removed, Stored, Updated
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.key import Namespace
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence, SequenceRow

interpreted = pytest.mark.skipif(not str(ledger_module.__file__).endswith(".py"), reason="compiled, types are checked by mypyc")
GARBAGE = -1
UNWRITTEN = -2


def full(primary: int, secondary: int = 0, nvme: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), FULL)


def window(size: int, primary: int, secondary: int = 0, nvme: int = 0, *, sinks: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), WINDOW, window=size, sinks=sinks)


def recurrent(interval: int, primary: int, secondary: int = 0, nvme: int = 0) -> GroupSpec:
    return GroupSpec((primary, secondary, nvme), RECURRENT, snapshot_interval=interval)


def cross(primary: int) -> GroupSpec:
    return GroupSpec((primary, 0, 0), CROSS)


def never(_move: Move) -> bool:
    return False


class GroupRun:
    """One ledger with its engine and its bytes."""

    def __init__(self, *groups: GroupSpec, tokens_per_block: int = 4, **rules: Any) -> None:
        settings: dict[str, Any] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30} | rules
        self.ledger = Ledger(groups, tokens_per_block, LedgerRules(**settings))
        self.fails: Callable[[Move], bool] = never
        self.moves: list[Move] = []
        self._histories: dict[tuple[object, object], int] = {}
        self._cells: dict[tuple[int, int, int], list[int]] = {}
        self._failed: dict[tuple[int, int, int], int] = {}
        self._beams: dict[int, list[list[int]]] = {}  # the engine's own idea of each sequence's tokens
        self._encoded: set[int] = set()  # by order of admission: sequences whose encoder has run
        self._next_id = 1000
        for number, group in enumerate(self.ledger.groups):
            for level in range(NUM_LEVELS):
                for slot in range(group.num_blocks[level]):
                    self._cells[number, level, slot] = [UNWRITTEN] * tokens_per_block
        self.check()

    # -- calls, each followed by every check

    def request(self, tokens: Iterable[int], *, id: int | None = None, **keywords: Any) -> Request:
        self._next_id += 1
        return Request(self._next_id if id is None else id, list(tokens), **keywords)

    def add(self, tokens: Iterable[int], **keywords: Any) -> ActiveSequence:
        return self.add_all(self.request(tokens, **keywords))[0]

    def add_all(self, *requests: Request) -> list[ActiveSequence]:
        sequences = self.ledger.add_sequences(list(requests))
        for request in requests:
            tokens = list(memoryview(request.token_bytes).cast("i"))
            self._beams[request.id] = [list(tokens) for _ in range(request.beam_width)]
        self.settle()
        return sequences

    def compute(self, sequence: ActiveSequence, num_tokens: int | None = None) -> bool:
        """Compute up to ``num_tokens`` (all by default). False when the sequence has to be pre-empted, or stays paused."""
        self.settle()
        if sequence.must_preempt:
            return False
        self.ledger.deliver(sequence)
        end = sequence.num_tokens if num_tokens is None else num_tokens
        while self.ledger.is_chunked and sequence.covered < end:
            if self.ledger.is_paused(sequence.id):
                if not self.ledger.extend_prefill(sequence.id):
                    self.settle()
                    return False
                self.settle()
            if sequence.covered >= end:
                break
            self._forward(sequence, sequence.computed, sequence.covered)
            self.ledger.mark_computed(sequence.id, sequence.covered)
            self.settle()
        self._forward(sequence, sequence.computed, end)
        self.ledger.mark_computed(sequence.id, end)
        self.settle()  # the next chunk's blocks may have pushed others down
        return True

    def append(self, sequence: ActiveSequence, *steps: int | Sequence[int]) -> None:
        """One step each: a token, or one for each beam, or several tokens of the only beam."""
        for step in steps:
            self.append_all([sequence], [[step] if isinstance(step, int) else list(step)])

    def append_all(self, sequences: Sequence[ActiveSequence], tokens: Sequence[Sequence[int]]) -> None:
        for sequence in sequences:
            if sequence.computed < sequence.num_tokens:
                assert self.compute(sequence)
        self.ledger.append_step([sequence.id for sequence in sequences], tokens)
        for sequence, appended in zip(sequences, tokens, strict=True):
            beams = self._beams[sequence.id]
            if len(beams) == 1:
                beams[0].extend(appended)
            else:
                for beam, token in zip(beams, appended, strict=True):
                    beam.append(token)
        self._carry_out_all()
        for sequence, appended in zip(sequences, tokens, strict=True):
            if len(self._beams[sequence.id]) == 1 and len(appended) > 1 and not sequence.must_report:  # drafts are written now
                self._forward(sequence, sequence.num_tokens - len(appended), sequence.computed)
        self.check()

    def rewind(self, sequence: ActiveSequence, num_tokens: int) -> None:
        self.ledger.rewind(sequence.id, num_tokens)
        for beam in self._beams[sequence.id]:
            del beam[len(beam) - num_tokens:]
        self.settle()

    def reorder(self, sequence: ActiveSequence, parents: Sequence[int]) -> None:
        if sequence.computed < sequence.num_tokens:  # the step that chose the parents
            assert self.compute(sequence)
        self.ledger.reorder_beams(sequence.id, parents)
        beams = self._beams[sequence.id]
        self._beams[sequence.id] = [list(beams[parent]) for parent in parents]
        self.settle()

    def store(self, sequence: ActiveSequence) -> None:
        """Prefill complete, then the full blocks enter the tree."""
        if sequence.computed < sequence.num_tokens:
            assert self.compute(sequence)
        self.ledger.store_context(sequence.id)
        self.check()

    def release(self, *sequences: ActiveSequence) -> None:
        """Compute what is missing, then end with storing."""
        for sequence in sequences:
            if sequence.computed < sequence.num_tokens:
                assert self.compute(sequence)
            self.ledger.remove_sequence(sequence.id, True)
            self.settle()

    def drop(self, *sequences: ActiveSequence) -> None:
        for sequence in sequences:
            self.ledger.remove_sequence(sequence.id, False)
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
        self._carry_out_all()
        self.check()

    def refused(self, error: type[KVTierError], call: Callable[[], object]) -> KVTierError:
        """The call raises this error, with nothing changed."""
        before = self.snapshot()
        try:
            call()
        except error as raised:
            assert self.snapshot() == before
            self.settle()
            return raised
        raise AssertionError(f"{error.__name__} was not raised")

    def no_room(self, call: Callable[[], object]) -> CapacityError:
        error = self.refused(CapacityError, call)
        assert isinstance(error, CapacityError)
        return error

    def finish(self) -> None:
        """End what is active; nothing may be left over."""
        self.drop(*list(self.ledger.sequences.values()))
        assert not self.ledger.leases
        for number, allocator in enumerate(self.ledger.allocators):
            assert self.free(number) == allocator.num_blocks[PRIMARY]
            assert all(block.ref_count == 0 for block in allocator.blocks)
            assert allocator.placeholder.ref_count == 0

    # -- looking

    def free(self, group: int = 0, level: int = PRIMARY) -> int:
        return self.ledger.allocators[group].queues.num_free(level)

    def ids(self, sequence: ActiveSequence, group: int = 0, beam: int = 0) -> list[int]:
        """Block ids by position, negative where the group has no block."""
        row = sequence.rows[group]
        return [block.id for block in (row.beam(beam) if beam <= len(row.other_beams) else row.blocks)]

    def real_ids(self, sequence: ActiveSequence, group: int = 0) -> set[int]:
        """Ids of all blocks that a sequence holds in a group, over its beams."""
        row = sequence.rows[group]
        return {block.id for beam in range(len(row.other_beams) + 1) for block in row.beam(beam) if block.id >= 0}

    def events(self) -> list[tuple[int, Created | Stored | Removed | Updated]]:
        """(group, data) of each event since the last call."""
        return [(event.group, event.data) for event in self.ledger.events.flush()]

    def snapshot(self) -> object:
        """All that a refused call must leave as it was."""
        ledger = self.ledger
        blocks = [[(block.id, block.index, block.ref_count, block.queue, block.priority, block.duration, block.expires_at, block.num_tokens,
                    None if block.node is None else block.node.chain_key(block.position)) for block in allocator.blocks]
                  for allocator in ledger.allocators]
        queues = [[[record.id for record in allocator.queues.members(level) if isinstance(record, Block)] for level in range(NUM_LEVELS)]
                  for allocator in ledger.allocators]
        sequences = [(sequence.id, sequence.num_tokens, sequence.computed, sequence.valid, sequence.must_report,
                      [([[block.id for block in row.beam(beam)] for beam in range(len(row.other_beams) + 1)], row.departed_ids)
                       for row in sequence.rows]) for sequence in ledger.sequences.values()]
        return repr((blocks, queues, sequences, sorted(ledger.leases), ledger.counters.values(), ledger.moves.next_number,
                     ledger.tree.num_nodes()))

    def check(self) -> None:
        """Everything that holds between any two calls."""
        verify(self.ledger)
        for number in range(len(self.ledger.groups)):
            self._check_tree(number)
        for sequence in self.ledger.sequences.values():
            if not sequence.must_preempt:
                self._check_sequence(sequence)

    # -- inside

    def _history(self, before: object, element: object) -> int:
        return self._histories.setdefault((before, element), len(self._histories))

    def _path(self, start: object, tokens: Iterable[int]) -> list[int]:
        path: list[int] = []
        before = start
        for token in tokens:
            before = self._history(before, token)
            path.append(before)
        return path

    def _start(self, request: Request) -> object:
        encoder = request.encoder_digest or request.id if request.encoder_length else None
        return Namespace(self.ledger.rules.namespace_seed, request).identity, encoder

    def _at(self, group: int, block: Block) -> list[int]:
        return self._cells[group, level_of(block.index), slot_of(block.index)]

    def _carry_out_all(self) -> None:
        records = self.ledger.moves.take()
        while records:
            for record in records:
                if isinstance(record, Move):
                    self.moves.append(record)
                    self.ledger.finish(record, self._carry_out(record))
            records = self.ledger.moves.take()

    def _carry_out(self, move: Move) -> bool:
        source = (move.group, level_of(move.source), slot_of(move.source))
        target = (move.group, level_of(move.destination), slot_of(move.destination))
        failed = self.fails(move) or self._failed.get(source) == move.source_generation
        count = move.num_tokens or self.ledger.tokens_per_block
        if failed:
            self._failed[target] = move.destination_generation
            self._cells[target][:count] = [GARBAGE] * count
        else:
            self._failed.pop(target, None)
            self._cells[target][:count] = self._cells[source][:count]
        return failed

    def _forward(self, sequence: ActiveSequence, start: int, end: int) -> None:
        """Compute tokens ``start`` to ``end - 1`` of every beam, in every group. The prompt is computed once, for all beams."""
        is_prompt = sequence.num_tokens == sequence.request.num_tokens
        for row in sequence.rows:
            kind = self.ledger.groups[row.group].kind
            if kind == CROSS:
                if sequence.order not in self._encoded:
                    for block in row.blocks:
                        self._at(row.group, block)[:] = [self._encoder_of(sequence)] * self.ledger.tokens_per_block
                continue
            for beam in range(1 if is_prompt else len(row.other_beams) + 1):
                path = self._path(self._start(sequence.request), self._beams[sequence.id][beam])
                if kind == RECURRENT:
                    self._run_state(sequence, row, beam, path, start, end)
                else:
                    for position in range(start, end):
                        self._check_reads(sequence, row, beam, path, position)
                        self._write(sequence, row, beam, position, path[position], is_prompt)
        self._encoded.add(sequence.order)

    def _encoder_of(self, sequence: ActiveSequence) -> int:
        return self._history(self._start(sequence.request), "encoder")

    def _write(self, sequence: ActiveSequence, row: SequenceRow, beam: int, position: int, cell: int, is_prompt: bool) -> None:
        place = self._place(row.group, position)
        block = row.beam(beam)[place // self.ledger.tokens_per_block]
        if not is_prompt and beam > 0 and block is row.blocks[place // self.ledger.tokens_per_block]:
            assert self._at(row.group, block)[place % self.ledger.tokens_per_block] == cell, "beams write different tokens into one block"
            return
        self._require_writable(sequence, row.group, block, place % self.ledger.tokens_per_block)
        self._at(row.group, block)[place % self.ledger.tokens_per_block] = cell

    def _require_writable(self, sequence: ActiveSequence, group: int, block: Block, offset: int = 0) -> None:
        """Nobody else holds the block, and nothing is stored of it from ``offset`` on: a prefill may go on behind a stored tail."""
        assert block.id >= 0, f"request {sequence.id} writes where it has no block"
        assert block.node is None or block.num_tokens <= offset, f"request {sequence.id} writes into block {block.id}, which is stored"
        holders = [other.id for other in self.ledger.sequences.values()
                   for beam in range(len(other.rows[group].other_beams) + 1) if block in other.rows[group].beam(beam)]
        assert set(holders) == {sequence.id}, f"request {sequence.id} writes into block {block.id} of {holders}"

    def _run_state(self, sequence: ActiveSequence, row: SequenceRow, beam: int, path: list[int], start: int, end: int) -> None:
        """The state behind token ``start - 1`` is carried on to ``end - 1``; a real block on the way keeps the state at its end."""
        if start == end:
            return
        running = row.beam(beam)[-1]
        if start > 0:
            assert self._at(row.group, running)[0] == path[start - 1], f"request {sequence.id}: the running state is another one"
        tokens_per_block = self.ledger.tokens_per_block
        for position in range(start, end):
            kept = row.beam(beam)[position // tokens_per_block]
            if (position + 1) % tokens_per_block == 0 and kept.id >= 0 and kept is not running:
                self._require_writable(sequence, row.group, kept)
                self._at(row.group, kept)[:] = [path[position]] * tokens_per_block
        self._require_writable(sequence, row.group, running)
        self._at(row.group, running)[:] = [path[end - 1]] * tokens_per_block

    def _place(self, group: int, position: int) -> int:
        geometry = self.ledger.geometries[group]
        return position + (geometry.bubble if position >= geometry.sinks else 0)

    def _check_reads(self, sequence: ActiveSequence, row: SequenceRow, beam: int, path: list[int], position: int) -> None:
        """What the token at ``position`` attends to is there: all before it, or its sinks and its window."""
        spec = self.ledger.groups[row.group]
        first = max(position + 1 - (spec.window - spec.sinks), 0) if spec.kind == WINDOW else 0
        for read in (*range(min(spec.sinks, first, position)), *range(first, position)):
            place = self._place(row.group, read)
            block = row.beam(beam)[place // self.ledger.tokens_per_block]
            assert block.id >= 0, f"request {sequence.id}, group {row.group}: token {position} reads token {read}, which has no block"
            actual = self._at(row.group, block)[place % self.ledger.tokens_per_block]
            assert actual == path[read], f"request {sequence.id}, group {row.group}, beam {beam}: other bytes at token {read}"

    def _check_sequence(self, sequence: ActiveSequence) -> None:
        is_prompt = sequence.num_tokens == sequence.request.num_tokens
        for row in sequence.rows:
            kind = self.ledger.groups[row.group].kind
            if kind == CROSS:
                if sequence.order in self._encoded:
                    expected = self._encoder_of(sequence)
                    assert all(self._at(row.group, block)[0] == expected for block in row.blocks), "encoder blocks were overwritten"
                continue
            for beam in range(1 if is_prompt else len(row.other_beams) + 1):
                path = self._path(self._start(sequence.request), self._beams[sequence.id][beam])
                if kind != RECURRENT:
                    self._check_reads(sequence, row, beam, path, sequence.computed)

    def _check_tree(self, group: int) -> None:
        """Every handle in the tree has the bytes that its place in the tree stands for."""
        tokens_per_block = self.ledger.tokens_per_block
        for identity, root in self.ledger.tree.roots.items():
            digest = identity[-1] if len(identity) > 5 else None
            stack: list[tuple[Any, object]] = [(root, (identity, digest))]
            while stack:
                node, before = stack.pop()
                for position in range(node.length):
                    key = node.block_key(position)
                    path = self._path(before, [token for (token,) in struct.iter_unpack("<i", key)])
                    before = path[-1]
                    block = node.values[group][position]
                    if block is None:
                        continue
                    if self.ledger.groups[group].kind == RECURRENT:
                        path = [path[-1]] * tokens_per_block
                    assert level_of(block.index) == NVME or self._at(group, block)[:len(path)] == path, \
                        f"group {group}: block {block.id} has other bytes than it stands for"
                stack.extend((child, before) for child in node.children.values())

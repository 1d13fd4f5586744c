"""A toy engine for models of several groups: windows, running states, encoders, beams, and what lies beside keys and values.

As in ``toy_engine`` the bytes of a token follow from everything before it. Each group's pages are found through its own block table
and compared byte by byte: what the next token reads, and nothing else, has to be right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from toy_engine import MASK, PATIENCE, ToyModel, WrongBytes

from kvtier import KVCacheManager, KVLayout, LayerSpec, Request

attention, mla, recurrent, cross = LayerSpec.attention, LayerSpec.mla, LayerSpec.recurrent, LayerSpec.cross

LAYOUTS: dict[str, KVLayout] = {name: KVLayout(layers, "float32", 4) for name, layers in {
    "window and full": [attention(1, 8, window=8), attention(1, 8), attention(1, 8, window=8)],
    "windows of other heads and types": [attention(1, 8, window=5), attention(4, 8, window=12, dtype="bfloat16"),
                                         attention(2, 16, dtype="float8_e4m3fn")],
    "sinks": [attention(2, 8, window=8, sinks=4), attention(1, 8)],
    "mla": [mla(16, 8), mla(16, 8, indexer_bytes=12)],
    "states": [attention(1, 8), recurrent(40, 8), attention(1, 8), recurrent(40, 8)],
    "states and a window": [attention(1, 8, window=8), attention(1, 8), recurrent(24, 4)],
    "encoder": [attention(1, 8), cross(2, 8), attention(1, 8, window=8)],
    "values of another width": [attention(2, 16, value_dim=8), attention(2, 8, value_dim=16, window=8)],
    "side data": [attention(2, 16, dtype="uint8", scale_bytes=2, indexer_bytes=20), attention(1, 8, window=8, scale_bytes=3),
                  mla(8, 8, scale_bytes=1)],
}.items()}
DIGEST = b"\x01" * 32


class GroupPages:
    """One group's memory as an engine sees it.

    Attributes:
        parts: of groups that keep something for each token: uint8 views ``[blocks, fields, heads, tokens, bytes]``, of all layers.
        states: of recurrent groups: uint8 views ``[blocks, bytes]``, of all layers.
    """

    def __init__(self, cache: KVCacheManager, number: int) -> None:
        self.group = cache.layout.groups[number]
        primary = cache.pool(number).primary
        spec = self.group.spec
        self.states: list[np.ndarray] = []
        self.parts: list[np.ndarray] = []
        for position, layer in enumerate(self.group.layers):
            if spec.kind == "recurrent":
                self.states.append(cache.layer_buffer(layer).numpy())
                continue
            if spec.is_split:
                found = [primary.key_buffer(position).unsqueeze(1), primary.value_buffer(position).unsqueeze(1)]
            else:
                found = [cache.layer_buffer(layer)]
            if spec.scale_bytes:
                found.append(primary.scale_buffer(position))
            if spec.indexer_bytes:
                found.append(primary.indexer_buffer(position).permute(0, 2, 1, 3).unsqueeze(1))
            self.parts.extend(pages.view(torch.uint8).numpy() for pages in found)
        generator = np.random.default_rng(number)
        shapes = [(*part.shape[1:3], part.shape[4]) for part in self.parts] or [(1, 1, state.shape[1]) for state in self.states]
        self.salts = [generator.integers(0, 1 << 63, (*shape[:2], -(-shape[2] // 8)), dtype=np.uint64) for shape in shapes]
        self.widths = [shape[2] for shape in shapes]
        self.pages_per_block = self.group.table_layers * self.group.table_factor

    def content(self, part: int, states: Sequence[int]) -> np.ndarray:
        """What a part holds of these tokens: uint8 ``[fields, heads, tokens, bytes]``."""
        words = np.asarray(states, dtype=np.uint64)[:, None] ^ self.salts[part][..., None, :]
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(31)
        return words.view(np.uint8)[..., :self.widths[part]]

    def slots(self, row: np.ndarray) -> np.ndarray:
        """Slots by block position, negative without one. The table's second row names the values' pages."""
        keys, values = row
        assert ((values == keys + self.group.table_factor - 1) | ((keys < 0) & (values < 0))).all()
        return np.where(keys >= 0, keys // self.pages_per_block, -1)


class GroupSequence:
    """What the engine knows of one request. ``beams``: each beam's tokens; ``computed``: tokens whose bytes are there, or promised."""

    def __init__(self, request: Request, computed: int) -> None:
        self.request = request
        tokens: list[int] = np.frombuffer(request.token_bytes, dtype=np.int32).tolist()
        self.beams = [list(tokens) for _ in range(request.beam_width)]
        encoder = (request.encoder_digest or request.id) if request.encoder_length else None
        self.start = hash((request.lora_id, request.cache_salt, encoder)) & MASK
        self.computed = computed
        self.is_encoded = False

    def states(self, beam: int) -> list[int]:
        states = [self.start]
        for token in self.beams[beam]:
            states.append(ToyModel.advance(states[-1], token))
        return states[1:]

    def encoded(self) -> list[int]:
        return [ToyModel.advance(self.start, -1 - position) for position in range(self.request.encoder_length)]

    @property
    def num_tokens(self) -> int:
        return len(self.beams[0])

    @property
    def is_prompt(self) -> bool:
        return self.num_tokens == self.request.num_tokens


class GroupEngine:
    """Drives a cache of any layout, and checks every byte that a step reads. ``guard``: see ``ToyEngine``."""

    def __init__(self, cache: KVCacheManager, guard: contextlib.AbstractContextManager[Any] | None = None) -> None:
        self.cache = cache
        self.sequences: dict[int, GroupSequence] = {}
        self.pages = [GroupPages(cache, group.number) for group in cache.layout.groups]
        self.has_cross = any(group.kind == "cross" for group in cache.layout.groups)
        self.checked = 0  # tokens, over all groups
        self._guard = guard or contextlib.nullcontext()

    # -- the life of a request -----------------------------------------------------------------------------------------------

    def request(self, request_id: int, tokens: Sequence[int], **keywords: Any) -> Request:
        """With an encoder where the model has one."""
        if self.has_cross:
            keywords = {"encoder_length": 6, "encoder_digest": DIGEST} | keywords
        return Request(request_id, tokens, **keywords)

    def admit(self, *requests: Request) -> list[Any]:
        admissions = self.cache.add_sequences(requests)
        for request, admission in zip(requests, admissions, strict=True):
            self.sequences[request.id] = GroupSequence(request, admission.prepopulated_tokens)
        return admissions

    def learn(self, request_id: int) -> int:
        sequence = self.sequences[request_id]
        valid = self.cache.wait_ready(request_id, timeout=PATIENCE)
        sequence.computed = min(sequence.computed, valid)
        return valid

    def forward(self, ids: Iterable[int], chunk: int | None = None) -> list[int]:
        """One step: check what is read, compute the next ``chunk`` tokens (all by default). Returns who took part."""
        with self.cache.step(None, ids=list(ids)) as ready:
            tables: list[np.ndarray] = []
            for group in range(len(self.pages)):
                with self._guard:
                    tables.append(self.cache.block_table(ready, group).numpy().copy())
            first = 0
            for request_id in ready:
                sequence = self.sequences[request_id]
                end = sequence.num_tokens if chunk is None else min(sequence.num_tokens, sequence.computed + chunk)
                if self.cache.config.chunk_size:  # chunks end at its multiples
                    end = min(end, (sequence.computed // self.cache.config.chunk_size + 1) * self.cache.config.chunk_size)
                for beam in range(1 if sequence.is_prompt else len(sequence.beams)):  # a prompt is computed once, for all beams
                    self._forward_beam(sequence, beam, [table[first + beam] for table in tables], end)
                sequence.is_encoded = True
                sequence.computed = end
                first += len(sequence.beams)
        for request_id in ready:
            sequence = self.sequences[request_id]
            self.cache.mark_computed(request_id, sequence.computed)
            if sequence.is_prompt and sequence.computed == sequence.num_tokens:
                self.cache.store_context(request_id)  # now: what leaves a window without being stored is lost to others
        return ready

    def sample(self, request_id: int) -> None:
        """Append a token to each beam; each follows from all before it, and from the beam's number."""
        sequence = self.sequences[request_id]
        tokens = [(sequence.states(beam)[-1] + beam) % 61 for beam in range(len(sequence.beams))]
        self.cache.append_tokens(request_id, tokens)
        for beam, token in zip(sequence.beams, tokens, strict=True):
            beam.append(token)

    def reorder(self, request_id: int, parents: Sequence[int]) -> None:
        sequence = self.sequences[request_id]
        self.cache.reorder_beams(request_id, parents)
        sequence.beams = [list(sequence.beams[parent]) for parent in parents]

    def rewind(self, request_id: int, num_tokens: int) -> None:
        sequence = self.sequences[request_id]
        self.cache.rewind(request_id, num_tokens)
        for beam in sequence.beams:
            del beam[len(beam) - num_tokens:]
        sequence.computed = min(sequence.computed, sequence.num_tokens)

    def remove(self, request_id: int, store: bool = True) -> None:
        self.cache.remove_sequence(request_id, store=store)
        del self.sequences[request_id]

    def serve(self, request: Request, answer: int = 0, chunk: int | None = None, store: bool = True) -> int:
        """A whole request by itself. Returns how many tokens were really reused."""
        self.admit(request)
        valid = self.learn(request.id)
        sequence = self.sequences[request.id]
        for step in range(answer + 1):
            while sequence.computed < sequence.num_tokens:
                assert self.forward([request.id], chunk) == [request.id]
            if step < answer:
                self.sample(request.id)
        self.remove(request.id, store)
        self.cache.verify()
        self.cache.refresh()
        return valid

    # -- bytes -----------------------------------------------------------------------------------------------------------------

    def _forward_beam(self, sequence: GroupSequence, beam: int, rows: list[np.ndarray], end: int) -> None:
        states = sequence.states(beam)
        for pages, row in zip(self.pages, rows, strict=True):
            where = f"request {sequence.request.id}, beam {beam}, group {pages.group.number} ({pages.group.describe()})"
            slots = pages.slots(row)
            if pages.group.kind == "cross":
                encoded = sequence.encoded()
                if sequence.is_encoded:
                    self._check(pages, slots, encoded, range(len(encoded)), where)
                else:
                    self._write(pages, slots, encoded, range(len(encoded)))
            elif pages.group.kind == "recurrent":
                self._run_state(pages, slots, sequence, states, end, where)
            else:
                read = self._read_positions(pages, sequence.computed)
                self._check(pages, slots, [states[position] for position in read], read, where)
                self._write(pages, slots, states[sequence.computed:end], range(sequence.computed, end))

    def _read_positions(self, pages: GroupPages, position: int) -> Sequence[int]:
        """What the token at ``position`` attends to, itself left out."""
        window, sinks = pages.group.window, pages.group.sinks
        first = 0 if window is None else max(position + 1 - (window - sinks), 0)
        return [*range(min(sinks, first, position)), *range(first, position)]

    def _check(self, pages: GroupPages, slots: np.ndarray, states: Sequence[int], positions: Sequence[int], where: str) -> None:
        if not positions:
            return
        blocks, offsets = _places(pages, slots, positions)
        if (blocks < 0).any():
            raise WrongBytes(f"{where}: no block for token {positions[int((blocks < 0).argmax())]}")
        for part, memory in enumerate(pages.parts):
            found = memory[blocks, :, :, offsets].transpose(1, 2, 0, 3)
            expected = pages.content(part, states)
            if not np.array_equal(found, expected):
                wrong = np.flatnonzero((found != expected).any(axis=(0, 1, 3)))
                raise WrongBytes(f"{where}, part {part}: other bytes at tokens {[positions[i] for i in wrong]}, slots {blocks.tolist()}")
        self.checked += len(positions)

    def _write(self, pages: GroupPages, slots: np.ndarray, states: Sequence[int], positions: Sequence[int]) -> None:
        if not positions:
            return
        blocks, offsets = _places(pages, slots, positions)
        written = blocks >= 0  # what nobody will read any more has no block
        for part, memory in enumerate(pages.parts):
            content = pages.content(part, states).transpose(2, 0, 1, 3)
            memory[blocks[written], :, :, offsets[written]] = content[written]

    def _run_state(self, pages: GroupPages, slots: np.ndarray, sequence: GroupSequence, states: Sequence[int], end: int,
                   where: str) -> None:
        """The state runs in the block of the last position; blocks on the way keep it as it is at their end."""
        tokens_per_block = pages.group.tokens_per_block
        running = int(slots[(sequence.num_tokens - 1) // tokens_per_block])
        if running < 0:
            raise WrongBytes(f"{where}: no running state")
        for part, memory in enumerate(pages.states):
            if sequence.computed and not np.array_equal(memory[running], pages.content(part, [states[sequence.computed - 1]]).ravel()):
                raise WrongBytes(f"{where}: the running state is another one than after token {sequence.computed - 1}")
            for position in range(sequence.computed, end):
                content = pages.content(part, [states[position]]).ravel()
                kept = int(slots[position // tokens_per_block])
                if (position + 1) % tokens_per_block == 0 and kept >= 0 and kept != running:
                    memory[kept] = content
                memory[running] = content
        self.checked += 1 if sequence.computed else 0


def _places(pages: GroupPages, slots: np.ndarray, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Slot, negative without a block, and place inside the block of each token."""
    group = pages.group
    tokens = np.asarray(positions)
    places = tokens + np.where(tokens >= group.sinks, group.sink_bubble, 0)
    return slots[places // group.tokens_per_block], places % group.tokens_per_block

"""A toy engine: keys and values that depend on every token before them, so that one wrong byte anywhere is seen.

"Computing" token t at position p writes bytes derived from a running hash over all tokens up to p, the layer, keys or values, and
the head. "Attending" compares every byte of every valid token with what it must be.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier import CapacityError, KVCacheManager, KVLayout, Request
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule
from kvtier.pools.nvme_geometry import HEADER_BYTES, NvmeGeometry

MakeCache = Callable[..., KVCacheManager]  # the fixtures of these names
WarmCache = Callable[..., KVCacheManager]

MASK = (1 << 64) - 1
PATIENCE = 30.0  # seconds; a test that waits longer hangs


class WrongBytes(AssertionError):
    """Attention read bytes that no computation of these tokens has written."""


class ToyModel:
    """What the bytes of each token must be."""

    def __init__(self, layout: KVLayout) -> None:
        group = layout.groups[0]
        layers, fields, heads, _tokens, _dim = group.block_shape
        self.head_bytes = group.page_bytes // (heads * group.tokens_per_block)
        words = -(-self.head_bytes // 8)
        self.salts = np.random.default_rng(20).integers(0, 1 << 63, size=(layers, fields, heads, words), dtype=np.uint64)

    @staticmethod
    def start(request: Request) -> int:
        """The state before the first token: adapter and salt change every key and value."""
        return hash((request.lora_id, request.cache_salt)) & MASK

    @staticmethod
    def advance(state: int, token: int) -> int:
        state = (state ^ (token & 0xFFFFFFFF)) * 0x9E3779B97F4A7C15 & MASK
        return state ^ state >> 29

    def bytes_of(self, states: Sequence[int], layer: int | slice = slice(None)) -> np.ndarray:
        """uint8 ``[layers, fields, heads, tokens, head_bytes]``; of one layer without the first dimension."""
        words = np.asarray(states, dtype=np.uint64)[:, None] ^ self.salts[layer][..., None, :]
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(31)
        return words.view(np.uint8)[..., :self.head_bytes]


class ToySequence:
    """What the engine knows of one request."""

    def __init__(self, request: Request, model: ToyModel) -> None:
        self.request = request
        self.tokens = np.frombuffer(request.token_bytes, dtype=np.int32).tolist()
        self.states: list[int] = []
        self.state = model.start(request)
        self.computed = 0
        self.is_told = False  # knows how many tokens are really there

    def extend_states(self, model: ToyModel) -> None:
        while len(self.states) < len(self.tokens):
            self.state = model.advance(self.state, self.tokens[len(self.states)])
            self.states.append(self.state)


class ToyEngine:
    """Drives a cache as an engine does, and checks every byte in each step.

    ``guard`` is held around the use of the block table: engines that share a cache share the table. ``layered``: each step begins when its
    first layer has arrived and waits for the others one by one.
    """

    def __init__(self, cache: KVCacheManager, guard: contextlib.AbstractContextManager[Any] | None = None, layered: bool = False) -> None:
        self.cache = cache
        self.model = ToyModel(cache.layout)
        self.sequences: dict[int, ToySequence] = {}
        self.checked_tokens = 0
        self.preemptions = 0
        self.lost_tokens = 0
        self.lost_in_step = 0
        self._first_layer = 0 if layered else None
        self._guard = guard or contextlib.nullcontext()
        self._layers = [cache.layer_buffer(layer).view(torch.uint8).numpy() for layer in range(len(cache.layout.layers))]
        group = cache.layout.groups[0]
        self._pages_per_block = group.num_layers * group.kv_factor

    # -- the life of a request -------------------------------------------------------------------------------------------

    def admit(self, *requests: Request) -> list[Any]:
        admissions = self.cache.add_sequences(requests)
        for request in requests:
            self.sequences[request.id] = ToySequence(request, self.model)
        return admissions

    def learn(self, request_id: int, timeout: float | None = PATIENCE) -> int:
        """Ask how many tokens are really there, and go on from them."""
        sequence = self.sequences[request_id]
        valid = self.cache.wait_ready(request_id, layer=self._first_layer, timeout=timeout)
        if sequence.is_told or sequence.computed:
            self.lost_tokens += sequence.computed - min(sequence.computed, valid)
            sequence.computed = min(sequence.computed, valid)
        else:
            sequence.computed = valid
        sequence.is_told = True
        return valid

    def forward(self, ids: Iterable[int], chunk: int | None = None) -> list[int]:
        """One step: attend to all that is computed, compute the next ``chunk`` tokens. Returns who took part."""
        with self.cache.step(None, list(ids), self._first_layer) as step:
            with self._guard:
                table = self.cache.block_table(step).numpy().copy()
            lost: list[int] = []
            ends: dict[int, int] = {}
            for layer in range(len(self._layers)):
                if self._first_layer is not None:
                    lost = step.wait_layer(layer)
                for row, request_id in zip(table, step, strict=True):
                    sequence = self.sequences[request_id]
                    sequence.extend_states(self.model)
                    ends[request_id] = len(sequence.tokens) if chunk is None else min(len(sequence.tokens), sequence.computed + chunk)
                    if request_id not in lost:
                        self._attend(request_id, sequence, row, layer)
                    self._compute(sequence, row, ends[request_id], layer)
        ready = [request_id for request_id in step if request_id not in lost]
        self.lost_in_step += len(lost)
        for request_id in ready:
            self.checked_tokens += self.sequences[request_id].computed
            self.sequences[request_id].computed = ends[request_id]
            self.cache.mark_computed(request_id, ends[request_id])
        return ready

    def sample(self, request_id: int) -> int:
        """Append the next token, which follows from all before it."""
        sequence = self.sequences[request_id]
        token = sequence.states[-1] % 61
        self.cache.append_tokens(request_id, [token])
        sequence.tokens.append(token)
        return token

    def remove(self, request_id: int, store: bool = True) -> None:
        self.cache.remove_sequence(request_id, store=store)
        del self.sequences[request_id]

    def serve(self, request: Request, answer: int = 0, store: bool = True) -> int:
        """A whole request by itself. Returns how many tokens were really reused."""
        self.admit(request)
        valid = self.learn(request.id)
        for _ in range(answer):
            assert self.forward([request.id]) == [request.id]
            self.sample(request.id)
        assert self.forward([request.id]) == [request.id]
        self.remove(request.id, store=store)
        self.cache.refresh()
        return valid

    def run(self, requests: Sequence[Request], answer: int = 0, chunk: int | None = None, verify: bool = True, batch: int = 4) -> None:
        """Serve requests together, as far as they fit, and pre-empt as the cache says."""
        waiting = deque(requests)
        length = {request.id: request.num_tokens + answer for request in requests}
        deadline = time.monotonic() + PATIENCE
        while waiting or self.sequences:
            assert time.monotonic() < deadline, f"no end: {len(waiting)} wait, {list(self.sequences)} run"
            self.cache.refresh()
            self._admit_some(waiting, batch)
            told = [request_id for request_id in list(self.sequences) if self._told(request_id, waiting)]
            ready = self.forward(told, chunk) if told else []
            for request_id in set(told) - set(ready):
                self.sequences[request_id].is_told = False
            for request_id in ready:
                if request_id in self.sequences:  # otherwise pre-empted for one before it
                    self._go_on(request_id, length[request_id], waiting)
            if verify:
                self.cache.verify()
            if not ready:
                time.sleep(0.0005)

    def _admit_some(self, waiting: deque[Request], batch: int) -> None:
        while waiting and len(self.sequences) < batch:
            try:
                self.admit(waiting[0])
            except CapacityError as error:
                if error.needed > self.cache.stats().primary.max_blocks:
                    raise
                return  # until others end, or reads of those that ended are over
            waiting.popleft()

    def _told(self, request_id: int, waiting: deque[Request]) -> bool:
        if not self.sequences[request_id].is_told and self.cache.is_ready(request_id, self._first_layer):
            try:
                self.learn(request_id)
            except CapacityError as error:
                if list(error.preempt) != [request_id]:
                    raise
                self.preempt(request_id, waiting)
                return False
        return self.sequences[request_id].is_told

    def _go_on(self, request_id: int, length: int, waiting: deque[Request]) -> None:
        sequence = self.sequences[request_id]
        if sequence.computed < len(sequence.tokens):
            return  # the prompt is not done
        if len(sequence.tokens) >= length:
            self.remove(request_id)
            return
        try:
            self.sample(request_id)
        except CapacityError as error:
            if not error.preempt:
                raise  # it would not even fit an empty pool
            for victim in error.preempt:
                self.preempt(victim, waiting)
            if request_id not in error.preempt:
                self.sample(request_id)  # now it fits, or the names were wrong

    def preempt(self, request_id: int, waiting: deque[Request]) -> None:
        """Give up a sequence's blocks; it is admitted again with all its tokens."""
        sequence = self.sequences[request_id]
        self.remove(request_id)
        asked = sequence.request
        waiting.append(Request(request_id, sequence.tokens, lora_id=asked.lora_id, cache_salt=asked.cache_salt,
                               retention=asked.retention))
        self.preemptions += 1

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def _slots(self, row: np.ndarray, num_tokens: int) -> np.ndarray:
        tokens_per_block = self.cache.layout.tokens_per_block
        entries = row[0, :-(-num_tokens // tokens_per_block)]
        assert (entries >= 0).all()
        return entries // self._pages_per_block

    def _attend(self, request_id: int, sequence: ToySequence, row: np.ndarray, layer: int) -> None:
        count = sequence.computed
        if count == 0:
            return
        expected = self.model.bytes_of(sequence.states[:count], layer)
        slots = self._slots(row, count)
        pages = self._layers[layer][slots]  # [blocks, fields, heads, tokens, head_bytes]
        found = pages.transpose(1, 2, 0, 3, 4).reshape(*expected.shape[:2], -1, expected.shape[-1])[:, :, :count]
        if not np.array_equal(found, expected):
            wrong = np.argwhere((found != expected).any(axis=-1))
            positions = sorted({int(position) for _field, _head, position in wrong})
            raise WrongBytes(f"request {request_id}, layer {layer}: positions {positions} of {count} computed, slots {slots.tolist()}")

    def _compute(self, sequence: ToySequence, row: np.ndarray, end: int, layer: int) -> None:
        start = sequence.computed
        if start >= end:
            return
        tokens_per_block = self.cache.layout.tokens_per_block
        new = self.model.bytes_of(sequence.states[start:end], layer)
        slots = self._slots(row, end)
        for position in range(start, end):
            self._layers[layer][slots[position // tokens_per_block], :, :, position % tokens_per_block] = new[:, :, position - start]


def tokens_of(seed: int, count: int) -> list[int]:
    """A prompt that starts like no other seed's."""
    return [seed * 1000 + number for number in range(count)]


PROMPT = tokens_of(1, 13)  # three full blocks, and the token that is always computed
OTHER = tokens_of(2, 13)


def fails(operation: FaultOperation, count: int = 1, number: int = errno.EIO) -> FaultRule:
    return FaultRule(FaultKind.FAILURE, operation, count=count, errno=number)


def delays(operation: FaultOperation, seconds: float, count: int | None = None) -> FaultRule:
    return FaultRule(FaultKind.DELAY, operation, seconds=seconds, count=count)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def flip_stored_bit(directory: Path, layout: KVLayout, slot: int, where: str = "payload", group: int = 0) -> None:
    """Turn one bit over inside a slot of a group's slab file."""
    geometry = NvmeGeometry(layout.groups[group].block_bytes, slot + 1)
    offset = geometry.offset(slot) + (HEADER_BYTES + min(77, geometry.block_bytes - 1) if where == "payload" else 77)
    with (directory / f"group-{group}.slab").open("r+b") as slab:
        slab.seek(offset)
        byte = slab.read(1)[0]
        slab.seek(offset)
        slab.write(bytes([byte ^ 0x10]))

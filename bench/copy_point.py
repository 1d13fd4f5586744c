"""One point of ``kvtier bench copy``: pools, pairs of slots, ours and libc's memcpy over them, and the comparison of every byte."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvtier.bench.measure import Interleaved, Spread
from kvtier.errors import TransferError
from kvtier.io.copiers import typed_blocks
from kvtier.io.cpu_stream import CpuStream
from kvtier.io.device import open_device
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena, anonymous_memory
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import LEVEL_NAMES, PRIMARY, SECONDARY, pool_index
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager

Rows = npt.NDArray[np.uint8]
Pairs = list[tuple[int, int]]

PATIENCE: Final = 120.0
"""Seconds until a round of copies counts as hanging."""


@dataclass(frozen=True)
class Route:
    """What a row copies.

    Attributes:
        source, destination: levels.
        slots: "host" - host slots follow one another, as they are handed out, and primary slots are scattered; "scattered" - both
            are; "runs" - neighbours on both sides.
        layer_first: how the primary pool lies.
        num_tokens: 0 for whole blocks.
        both_ways: half of the blocks go back at the same time, on the other stream; the limit then has two threads.
    """

    source: int
    destination: int
    slots: str = "host"
    layer_first: bool = False
    num_tokens: int = 0
    both_ways: bool = False

    @property
    def direction(self) -> str:
        return "both-directions" if self.both_ways else f"{LEVEL_NAMES[self.source]}->{LEVEL_NAMES[self.destination]}"

    @property
    def suffix(self) -> str:
        """What distinguishes the row from the main one of its direction."""
        if self.num_tokens:
            return "partial"
        if self.layer_first:
            return "layers"
        return "" if self.slots == "host" or self.source == self.destination else self.slots


class Stage:
    """Two pools of one shape, the transfer manager on them, and the limit's two buffers and threads."""

    def __init__(self, group: LayerGroup, num_blocks: int, layer_first: bool) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self.pools = GroupPools(group, PrimaryPool(group, num_blocks, "cpu", layer_first),
                                HostArena(num_blocks, group.block_bytes, pin=False))
        self.transfers = TransferManager(open_device("cpu"), [self.pools], None)
        self.plain_source = _plain_rows(num_blocks, group.block_bytes)
        self.plain_destination = _plain_rows(num_blocks, group.block_bytes)
        self.plain_streams = [CpuStream("plain-there"), CpuStream("plain-back")]
        self._next_number = 0
        pattern = np.random.default_rng(7).integers(0, 256, group.block_bytes, dtype=np.uint8)
        layers = pattern.reshape(group.num_layers, -1)
        for level in (PRIMARY, SECONDARY):
            self.layers(level)[:] = layers  # touches every page, so that no timed part meets a fresh one
        self.plain_source[:] = self.plain_destination[:] = pattern

    def layers(self, level: int) -> Rows:
        """The blocks of a level, uint8 ``[blocks, layers, bytes of one layer]``, strided where the pool is layer-first."""
        count = self.group.num_layers
        if level == SECONDARY:
            assert self.pools.secondary is not None
            return self.pools.secondary.padded_rows[:, :self.group.block_bytes].reshape(self.num_blocks, count, -1)
        rows: Rows = self.pools.primary.sections[0].rows.numpy()
        if self.pools.primary.layer_first:
            return rows.reshape(count, self.num_blocks, -1).transpose(1, 0, 2)
        return rows.reshape(self.num_blocks, count, -1)

    def tokens(self, level: int, num_tokens: int) -> torch.Tensor:
        """The first tokens of all blocks, as bytes: in the blocks' own dtype a NaN would differ from itself."""
        memory = self.pools.primary if level == PRIMARY else self.pools.secondary
        assert memory is not None
        return typed_blocks(memory, self.group).view(torch.uint8)[..., :num_tokens, :]

    def moves(self, source: int, destination: int, pairs: Pairs, num_tokens: int) -> list[Move]:
        """The Moves that a ledger would have decided on."""
        made = [Move(self._next_number + position, 0, from_slot, pool_index(source, from_slot), 0, pool_index(destination, to_slot), 0,
                     num_tokens=num_tokens) for position, (from_slot, to_slot) in enumerate(pairs)]
        self._next_number += len(made)
        return made

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.plain_streams:
            stream.close(PATIENCE)
        if self.transfers.close(PATIENCE):
            self.pools.close()


class Point:
    """One row: the alternatives over the same pairs of slots."""

    def __init__(self, stage: Stage, route: Route, batch_blocks: int, seed: int) -> None:
        group = stage.group
        self._stage = stage
        self._route = route
        self._batch_blocks = batch_blocks
        self._random = np.random.default_rng(seed)
        self._memcpy = _load_memcpy()
        # Inside one pool, and both ways, the lower half is copied to the upper half.
        self._is_halved = route.source == route.destination or route.both_ways
        self._count = stage.num_blocks // 2 if self._is_halved else stage.num_blocks
        self._copied_bytes = group.block_bytes
        if route.num_tokens:
            self._copied_bytes = group.block_bytes // group.tokens_per_block * route.num_tokens
        self._legs: list[tuple[int, int, Pairs]] = []
        self._batches: list[list[Move]] = []
        self._submit: list[float] = []
        self.failure = ""
        # Two blocks are equal only if they are the same one: the first bytes of every page carry the slot.
        tags = np.random.default_rng(seed + 100)
        for level in {route.source, route.destination} if route.both_ways else {route.source}:
            layers = stage.layers(level)
            for start in range(0, layers.shape[2], group.page_bytes):
                layers[:, :, start:start + 8] = tags.integers(0, 256, (*layers.shape[:2], 8), dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that one turn moves."""
        return self._count * self._copied_bytes * (2 if self._route.both_ways else 1)

    def choose_pairs(self) -> None:
        """New pairs of slots, for the turn that follows."""
        route = self._route
        offset = self._count if self._is_halved else 0
        self._legs = [(route.source, route.destination, self._new_pairs(route.source, route.destination, offset))]
        if route.both_ways:
            self._legs.append((route.destination, route.source, self._new_pairs(route.destination, route.source, offset)))
        legs = [self._stage.moves(source, destination, pairs, route.num_tokens) for source, destination, pairs in self._legs]
        size = self._batch_blocks
        self._batches = [leg[start:start + size] for start in range(0, len(legs[0]), size) for leg in legs]

    def _new_pairs(self, source: int, destination: int, offset: int) -> Pairs:
        slots = np.arange(self._count)
        sources, destinations = self._random.permutation(slots), self._random.permutation(slots)
        if self._route.slots == "runs":
            sources = destinations = np.roll(slots, int(self._random.integers(1, self._count)))
        elif self._route.slots == "host" and source != destination:
            in_a_row = np.roll(slots, int(self._random.integers(1, self._count)))
            if source == SECONDARY:
                sources = in_a_row
            else:
                destinations = in_a_row
        return [(int(from_slot), int(to_slot) + offset) for from_slot, to_slot in zip(sources, destinations, strict=True)]

    def copy_plainly(self) -> float:
        """The limit: one memcpy per block, one thread for each direction. Returns the seconds that the copies took.

        Threads that sleep until then, as ours do: on a machine that others use too, one core may copy a sixth faster than the next for
        many seconds, and who copies in the calling thread is always on the other core than who does not. Waking up is not the limit's.
        """
        there, back = self._stage.plain_source, self._stage.plain_destination
        ways = [(there, back), (back, there)]
        spans: list[tuple[float, float]] = []
        events = [stream.submit(partial(self._copy_leg, pairs, *way, spans))
                  for stream, (_, _, pairs), way in zip(self._stage.plain_streams, self._legs, ways, strict=False)]
        for event in events:
            if not event.wait(PATIENCE) or event.error is not None:
                raise TransferError(f"memcpy did not copy: {event.error or f'not over after {PATIENCE:.0f} s'}")
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def _copy_leg(self, pairs: Sequence[tuple[int, int]], source: Rows, destination: Rows, spans: list[tuple[float, float]]) -> None:
        memcpy, num_bytes = self._memcpy, self._copied_bytes
        from_address, to_address, stride = source.ctypes.data, destination.ctypes.data, source.shape[1]
        start = time.perf_counter()
        for from_slot, to_slot in pairs:
            memcpy(to_address + to_slot * stride, from_address + from_slot * stride, num_bytes)
        spans.append((start, time.perf_counter()))

    def move(self) -> None:
        """Ours: issue the Moves in batches and wait until all of them are over."""
        transfers = self._stage.transfers
        start = time.perf_counter()
        for batch in self._batches:
            transfers.issue(batch)
            transfers.let_begin()
        self._submit.append(time.perf_counter() - start)
        if not transfers.idle(PATIENCE):
            raise TransferError(f"copies hang: not over after {PATIENCE:.0f} s")

    def verify(self) -> None:
        """Every Move was reported without an error, and every byte is where it belongs. Keeps the first failure."""
        results = self._stage.transfers.drain()
        issued = sum(len(pairs) for _, _, pairs in self._legs)
        errors = [result for result in results if result.error is not None]
        if errors:
            self._fail(f"{errors[0].move}: {errors[0].error}")
        elif len(results) != issued:
            self._fail(f"{issued} Moves were issued, {len(results)} were reported")
        for source, destination, pairs in self._legs:
            if self.failure:
                return
            if self._route.num_tokens:
                self._compare_tokens(source, destination, pairs)
            else:
                self._compare_blocks(self._stage.layers(source), self._stage.layers(destination), pairs)

    def _compare_blocks(self, sources: Rows, destinations: Rows, pairs: Pairs) -> None:
        for from_slot, to_slot in pairs:
            if not np.array_equal(sources[from_slot], destinations[to_slot]):
                self._fail(_difference(sources[from_slot].ravel(), destinations[to_slot].ravel(), to_slot))

    def _compare_tokens(self, source: int, destination: int, pairs: Pairs) -> None:
        tokens = self._route.num_tokens
        sources, destinations = self._stage.tokens(source, tokens), self._stage.tokens(destination, tokens)
        for from_slot, to_slot in pairs:
            if not torch.equal(sources[from_slot], destinations[to_slot]):
                self._fail(f"slot {to_slot}: the first {tokens} tokens are not those of slot {from_slot}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def submit_per_block(self, measured: Interleaved) -> Spread:
        """Microseconds that the calling thread spends in ``issue`` for each block, in the recorded rounds."""
        count = sum(len(pairs) for _, _, pairs in self._legs)
        return Spread.of([seconds * 1e6 / count for seconds in self._submit[-measured.rounds:]])


def _difference(expected: Rows, found: Rows, slot: int) -> str:
    position = int(np.flatnonzero(expected != found)[0])
    return f"slot {slot}: byte {position} is {found[position]} instead of {expected[position]}"


def _plain_rows(num_blocks: int, block_bytes: int) -> Rows:
    """Memory for the limit, uint8 [blocks, block_bytes], with huge pages where the kernel has them."""
    return np.frombuffer(anonymous_memory(num_blocks * block_bytes), np.uint8, num_blocks * block_bytes).reshape(num_blocks, block_bytes)


def _load_memcpy() -> Callable[[int, int, int], object]:
    """libc's ``memcpy(destination, source, bytes)`` on addresses. ctypes gives the GIL back while it runs."""
    function = ctypes.CDLL(None).memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    memcpy: Callable[[int, int, int], object] = function
    return memcpy

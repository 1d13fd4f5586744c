"""``kvtier bench copy``: block copies through the real transfer manager, beside libc's memcpy of the same blocks.

The limit works on memory of its own that is laid out as well as the machine allows (huge pages), with one thread, block by
block. Ours issues Moves and waits for them: bookkeeping, stream, events and copiers are inside the timed part. The pairs of
slots change from round to round, so after each one every byte of the destination is known to be new, and is compared.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvtier.bench.measure import Alternative, Interleaved, Spread, interleave
from kvtier.bench.report import Report, check_writable, last_level_cache_bytes, require_memory, size_name, spread_row, throughput_row
from kvtier.errors import ConfigError, TransferError
from kvtier.io.copiers import host_rows, typed_blocks
from kvtier.io.device import open_device
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.pool_index import LEVEL_NAMES, PRIMARY, SECONDARY, pool_index
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager

Rows = npt.NDArray[np.uint8]
Pairs = list[tuple[int, int]]

LIMIT: Final = "libc memcpy"
OURS: Final = "kvtier"
_PATIENCE: Final = 120.0
"""Seconds until a round of copies counts as hanging."""


def two_mebibyte_group() -> LayerGroup:
    """32 layers of 8 heads of 128 in bfloat16, 16 tokens per block: 64 pages of 32 KiB, 2 MiB per block."""
    return KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16).groups[0]


@dataclass(frozen=True)
class CopyPlan:
    """How much is measured.

    Attributes:
        num_blocks: blocks of each of the two pools; each end of a copy should be larger than the last-level cache.
        batch_blocks: Moves per call of ``issue``.
        rounds: recorded per row.
        group: shape of the blocks.
    """

    num_blocks: int
    batch_blocks: int
    rounds: int
    group: LayerGroup = field(default_factory=two_mebibyte_group)

    @classmethod
    def for_this_machine(cls, quick: bool) -> CopyPlan:
        """Pools of 8 times the last-level cache (quick: 4 times, at least 256 MiB); copies inside a pool use halves."""
        group = two_mebibyte_group()
        cache_blocks = last_level_cache_bytes() // group.block_bytes
        if quick:
            return cls(num_blocks=max(128, 4 * cache_blocks), batch_blocks=32, rounds=9, group=group)
        return cls(num_blocks=max(256, 8 * cache_blocks), batch_blocks=32, rounds=21, group=group)

    @property
    def needed_bytes(self) -> int:
        """Both pools and the limit's two buffers."""
        return 4 * self.num_blocks * self.group.block_bytes


@dataclass(frozen=True)
class _Route:
    """One row: from where to where, which slots, how much of each block."""

    source: int
    destination: int
    suffix: str = ""
    neighbours: bool = False
    num_tokens: int = 0

    @property
    def direction(self) -> str:
        return f"{LEVEL_NAMES[self.source]}->{LEVEL_NAMES[self.destination]}"


def run_copy(json_file: Path | None = None, quick: bool = False, *, plan: CopyPlan | None = None) -> int:
    """Measure, print a table, write the JSON.

    Args:
        json_file: where the figures go; None writes none.
        quick: smaller pools and fewer rounds, a few seconds in all.
        plan: sizes; chosen for this machine when None.

    Returns:
        0, or 1 when a copy failed or bytes differed.

    Raises:
        ConfigError: ``json_file`` cannot be written, or the pools do not fit into free memory.
    """
    if json_file is not None:
        check_writable(json_file)
    if plan is None:
        plan = CopyPlan.for_this_machine(quick)
    if plan.num_blocks < 4 or plan.batch_blocks < 1 or plan.rounds < 1:
        raise ConfigError(f"{plan.num_blocks} blocks, batches of {plan.batch_blocks}, {plan.rounds} rounds: a copy benchmark needs "
                          "at least 4 blocks, 1 and 1")
    require_memory("kvtier bench copy", plan.needed_bytes,
                   "end other programs" if quick else "end other programs, or use --quick, which needs less")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # partial copies are torch's: with its default they would run on more threads than the limit
    try:
        return _measure(plan, quick, json_file)
    finally:
        torch.set_num_threads(threads)


def _measure(plan: CopyPlan, quick: bool, json_file: Path | None) -> int:
    group = plan.group
    report = Report("kvtier bench copy", {
        "command": "copy", "quick": quick, "device": "cpu", "block_bytes": group.block_bytes, "num_blocks": plan.num_blocks,
        "batch_blocks": plan.batch_blocks, "rounds": plan.rounds, "page_bytes": group.page_bytes, "copy_threads": 1,
        "torch_threads": torch.get_num_threads(), "layout": "block-first"})
    report.note("CPU figures: the primary pool is ordinary memory here, nothing crosses PCIe.")
    half = group.tokens_per_block // 2
    report.note(f"Slots are scattered; in the row called runs they follow one another; partial is the first {half} of "
                f"{group.tokens_per_block} tokens of every page. {LIMIT}: one thread, one call for each block, the same slots and "
                "bytes, its own buffers of the same size. submit: what the calling thread spends, apart from the copy.")
    routes = [_Route(PRIMARY, SECONDARY), _Route(SECONDARY, PRIMARY), _Route(PRIMARY, PRIMARY),
              _Route(PRIMARY, SECONDARY, "runs", neighbours=True),
              _Route(PRIMARY, PRIMARY, "partial", num_tokens=half)]
    with _Stage(plan) as stage:
        for number, route in enumerate(routes):
            name = "/".join(filter(None, ("copy", route.direction, size_name(group.block_bytes), route.suffix)))
            report.say(f"measuring {name}")
            point = _Point(stage, route, seed=number)
            measured = interleave([Alternative(LIMIT, point.copy_plainly, point.choose_pairs),
                                   Alternative(OURS, point.move, point.choose_pairs, point.verify)], plan.rounds)
            if point.failure:
                report.reject(name, point.failure)
                continue
            report.add(throughput_row(name, measured, OURS, LIMIT, point.num_bytes))
            if not route.suffix:
                report.add(spread_row(f"{name}/submit", "us/block", point.submit_per_block(measured)))
    return report.finish(json_file)


class _Stage:
    """The pools, the transfer manager on them, and the limit's two buffers."""

    def __init__(self, plan: CopyPlan) -> None:
        group = plan.group
        self.plan = plan
        self.pools = GroupPools(group, PrimaryPool(group, plan.num_blocks, "cpu"), HostArena(plan.num_blocks, group.block_bytes, pin=False))
        self.transfers = TransferManager(open_device("cpu"), [self.pools], None)
        self.plain_source = _huge_rows(plan.num_blocks, group.block_bytes)
        self.plain_destination = _huge_rows(plan.num_blocks, group.block_bytes)
        self._next_number = 0
        pattern = np.random.default_rng(7).integers(0, 256, group.block_bytes, dtype=np.uint8)
        for rows in (self.rows(PRIMARY), self.rows(SECONDARY), self.plain_source, self.plain_destination):
            rows[:] = pattern  # touches every page, so that no timed part meets a fresh one

    def rows(self, level: int) -> Rows:
        """Blocks of a level, uint8 [blocks, block_bytes]."""
        return host_rows(self._memory(level))

    def blocks(self, level: int) -> torch.Tensor:
        """Blocks of a level in their full shape."""
        return typed_blocks(self._memory(level), self.pools.group)

    def _memory(self, level: int) -> PrimaryPool | HostArena:
        memory = self.pools.primary if level == PRIMARY else self.pools.secondary
        assert memory is not None
        return memory

    def number_moves(self, route: _Route, pairs: Pairs) -> list[Move]:
        """The Moves that a ledger would have decided on."""
        moves = [Move(self._next_number + position, 0, source, pool_index(route.source, source), 0,
                      pool_index(route.destination, destination), 0, num_tokens=route.num_tokens)
                 for position, (source, destination) in enumerate(pairs)]
        self._next_number += len(moves)
        return moves

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        if self.transfers.close(_PATIENCE):
            self.pools.close()


class _Point:
    """One row: the two alternatives over the same pairs of slots, and the comparison of every byte."""

    def __init__(self, stage: _Stage, route: _Route, seed: int) -> None:
        group = stage.plan.group
        self._stage = stage
        self._route = route
        self._group = group
        self._random = np.random.default_rng(seed)
        self._source = stage.rows(route.source)
        self._memcpy = _load_memcpy()
        # Inside one pool the lower half is copied to the upper half.
        self._inside = route.source == route.destination
        self._count = stage.plan.num_blocks // 2 if self._inside else stage.plan.num_blocks
        self._copied_bytes = group.block_bytes
        if route.num_tokens:
            self._copied_bytes = group.block_bytes // group.tokens_per_block * route.num_tokens
        self._pairs: Pairs = []
        self._batches: list[list[Move]] = []
        self._submit: list[float] = []
        self.failure = ""
        # Two blocks are equal only if they are the same one: the first bytes of every page carry the slot.
        tags = np.random.default_rng(seed + 100)
        for page in range(0, group.block_bytes, group.page_bytes):
            self._source[:, page:page + 8] = tags.integers(0, 256, (stage.plan.num_blocks, 8), dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that one turn moves."""
        return self._count * self._copied_bytes

    def choose_pairs(self) -> None:
        """New pairs of slots, for the turn that follows."""
        sources, destinations = self._random.permutation(self._count), self._random.permutation(self._count)
        if self._route.neighbours:
            sources = destinations = np.roll(np.arange(self._count), int(self._random.integers(1, self._count)))
        offset = self._count if self._inside else 0
        self._pairs = [(int(source), int(destination) + offset) for source, destination in zip(sources, destinations, strict=True)]
        moves = self._stage.number_moves(self._route, self._pairs)
        size = self._stage.plan.batch_blocks
        self._batches = [moves[start:start + size] for start in range(0, len(moves), size)]

    def copy_plainly(self) -> None:
        """The limit: one memcpy per block."""
        memcpy, num_bytes = self._memcpy, self._copied_bytes
        source, destination = self._stage.plain_source, self._stage.plain_destination
        from_address, to_address, stride = source.ctypes.data, destination.ctypes.data, source.shape[1]
        for from_slot, to_slot in self._pairs:
            memcpy(to_address + to_slot * stride, from_address + from_slot * stride, num_bytes)

    def move(self) -> None:
        """Ours: issue the Moves in batches and wait until all of them are over."""
        transfers = self._stage.transfers
        start = time.perf_counter()
        for batch in self._batches:
            transfers.issue(batch)
        self._submit.append(time.perf_counter() - start)
        if not transfers.idle(_PATIENCE):
            raise TransferError(f"copies hang: not over after {_PATIENCE:.0f} s")

    def verify(self) -> None:
        """Every Move was reported without an error, and every byte is where it belongs. Keeps the first failure."""
        results = self._stage.transfers.drain()
        errors = [result for result in results if result.error is not None]
        if errors:
            self._fail(f"{errors[0].move}: {errors[0].error}")
        elif len(results) != len(self._pairs):
            self._fail(f"{len(self._pairs)} Moves were issued, {len(results)} were reported")
        elif self._route.num_tokens:
            self._compare_tokens()
        else:
            destination = self._stage.rows(self._route.destination)
            for source_slot, destination_slot in self._pairs:
                if not np.array_equal(self._source[source_slot], destination[destination_slot]):
                    self._fail(_difference(self._source[source_slot], destination[destination_slot], destination_slot))

    def _compare_tokens(self) -> None:
        """As bytes: in the blocks' own dtype a NaN would differ from itself."""
        tokens = self._route.num_tokens
        sources, destinations = (self._stage.blocks(level).view(torch.uint8)[..., :tokens, :]
                                 for level in (self._route.source, self._route.destination))
        for source_slot, destination_slot in self._pairs:
            if not torch.equal(sources[source_slot], destinations[destination_slot]):
                self._fail(f"slot {destination_slot}: the first {tokens} tokens are not those of slot {source_slot}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def submit_per_block(self, measured: Interleaved) -> Spread:
        """Microseconds that the calling thread spends in ``issue`` for each block, in the recorded rounds."""
        return Spread.of([seconds * 1e6 / self._count for seconds in self._submit[-measured.rounds:]])


def _difference(expected: Rows, found: Rows, slot: int) -> str:
    position = int(np.flatnonzero(expected != found)[0])
    return f"slot {slot}: byte {position} is {found[position]} instead of {expected[position]}"


def _huge_rows(num_blocks: int, block_bytes: int) -> Rows:
    """Memory for the limit, uint8 [blocks, block_bytes], with huge pages where the kernel has them."""
    memory = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages: then the pools have none either
    return np.frombuffer(memory, np.uint8).reshape(num_blocks, block_bytes)


def _load_memcpy() -> Callable[[int, int, int], object]:
    """libc's ``memcpy(destination, source, bytes)`` on addresses. ctypes gives the GIL back while it runs."""
    function = ctypes.CDLL(None).memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    memcpy: Callable[[int, int, int], object] = function
    return memcpy

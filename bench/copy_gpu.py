"""Block copies on a GPU through the real transfer manager, beside one large pinned ``cudaMemcpyAsync`` (part of ``make test-gpu``).

Both are timed as an engine sees them: from the call until the engine's stream has got past them. The limit is a single copy of
the same number of bytes, so what blocks cost (a call for each, bookkeeping, events) is the difference. The pairs of slots change
from round to round, so after each one every byte of the destination is known to be new, and is compared on the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from kvtier.bench.copy import two_mebibyte_group
from kvtier.bench.gpu import WARM_UP, open_gpu_report
from kvtier.bench.measure import Alternative, Spread, interleave
from kvtier.bench.report import Report, require_memory, size_name, spread_row, throughput_row
from kvtier.errors import ConfigError, TransferError
from kvtier.io.copy_paths import Direction
from kvtier.io.copy_tools import copy_tools
from kvtier.io.cuda_stream import load_cuda
from kvtier.io.device import open_device
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import LEVEL_NAMES, PRIMARY, SECONDARY, PoolIndex, pool_index
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager

OURS: Final = "kvtier"
_PATIENCE: Final = 120.0
"""Seconds until a round of copies counts as hanging."""

_Direction = tuple[int, int]  # (source level, destination level)


@dataclass(frozen=True)
class GpuCopyPlan:
    """How much is measured.

    Attributes:
        num_blocks: blocks of each pool. Together they are what one round moves: 1 GiB with the default group.
        batch_blocks: Moves per call of ``issue``.
        rounds: recorded per row, at least 5.
        group: shape of the blocks.
    """

    num_blocks: int = 512
    batch_blocks: int = 64
    rounds: int = 9
    group: LayerGroup = field(default_factory=two_mebibyte_group)

    @classmethod
    def usual(cls, quick: bool) -> GpuCopyPlan:
        """The whole, or a quarter of the bytes in 5 rounds."""
        return cls(128, 32, 5) if quick else cls()


def measure_gpu_copies(plan: GpuCopyPlan | None = None, device: str = "cuda") -> Report:
    """Measure each direction, both at once, and copies within the device.

    Args:
        plan: sizes; the defaults when None.
        device: "cuda" or "cuda:N". With "cpu" everything runs and says nothing about a GPU: that is for tests.

    Returns:
        A report that has not been printed. Its config says which rows did not hold, under "invalid".

    Raises:
        ConfigError: a plan too small to mean anything, no such device, or too little memory.
    """
    plan = plan if plan is not None else GpuCopyPlan()
    if plan.num_blocks < 4 or plan.batch_blocks < 1:
        raise ConfigError(f"{plan.num_blocks} blocks, batches of {plan.batch_blocks}: a GPU copy benchmark needs at least 4 blocks, and 1")
    num_bytes = plan.num_blocks * plan.group.block_bytes
    require_memory("the GPU copy benchmark", 2 * num_bytes, "end other programs")
    report = open_gpu_report("copy", device, plan.rounds, {
        "block_bytes": plan.group.block_bytes, "num_blocks": plan.num_blocks, "batch_blocks": plan.batch_blocks, "layout": "block-first"})
    with _Stage(plan, device) as stage:
        for number, directions in enumerate([[(PRIMARY, SECONDARY)], [(SECONDARY, PRIMARY)], [(PRIMARY, PRIMARY)],
                                             [(PRIMARY, SECONDARY), (SECONDARY, PRIMARY)]]):
            _measure(stage, report, directions, seed=number)
        # Afterwards: a way that fails is given up.
        report.note(f"Slots are scattered. Blocks go {stage.ways()}. The limit is one call for all of them, on memory of its own. "
                    "submit: what the calling thread spends in issue.")
    return report


def _measure(stage: _Stage, report: Report, directions: Sequence[_Direction], seed: int) -> None:
    label = "both" if len(directions) > 1 else "->".join(LEVEL_NAMES[level] for level in directions[0])
    name = f"copy/{label}/{size_name(stage.plan.group.block_bytes)}"
    point = _Point(stage, directions, seed)
    limit = f"cudaMemcpyAsync of {point.num_bytes // len(directions) / (1 << 30):g} GiB"
    if directions[0] != (PRIMARY, PRIMARY):
        limit += ", pinned" + (", in each direction at once" if len(directions) > 1 else "")
    measured = interleave([Alternative(limit, point.copy_plainly),
                           Alternative(OURS, point.move, point.choose_pairs, point.verify)], stage.plan.rounds, warm_up=WARM_UP)
    if point.failure:
        report.reject(name, point.failure)
        return
    report.add(throughput_row(name, measured, OURS, limit, point.num_bytes))
    report.add(spread_row(f"{name}/submit", "us/block",
                          Spread.of([1e6 * seconds / point.num_moves for seconds in point.submit[-measured.rounds:]])))


class _Stage:
    """The pools, the transfer manager on them, the engine's streams, and the limit's buffers."""

    def __init__(self, plan: GpuCopyPlan, device: str) -> None:
        group, num_blocks = plan.group, plan.num_blocks
        self.plan = plan
        self._on_gpu = device != "cpu"
        with contextlib.ExitStack() as undo:
            opened = open_device(device)
            self._device = opened.name
            self.pools = GroupPools(group, PrimaryPool(group, num_blocks, opened.name),
                                    HostArena(num_blocks, group.block_bytes, pin=self._on_gpu))
            undo.callback(self.pools.close)
            self.transfers = TransferManager(opened, [self.pools], None)
            undo.callback(self.transfers.close, 1.0)
            # Two of each: one for each direction, and so that a copy within the device has both ends.
            size = num_blocks * group.block_bytes
            self.on_device = torch.zeros(2, size, dtype=torch.uint8, device=opened.name)
            self.on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)
            new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
            self.engine, *self.others = (new_stream(opened.name) if self._on_gpu else None for _ in range(3))
            undo.pop_all()
        self._next_number = 0

    @property
    def primary(self) -> torch.Tensor:
        """Primary blocks, uint8 [blocks, block_bytes] on the device."""
        return self.pools.primary.rows

    @property
    def secondary(self) -> torch.Tensor:
        """Secondary blocks, uint8 [blocks, block_bytes] on the host."""
        assert self.pools.secondary is not None
        return torch.from_numpy(self.pools.secondary.rows)

    def move(self, source: PoolIndex, destination: PoolIndex) -> Move:
        """A Move that a ledger would have decided on."""
        self._next_number += 1
        return Move(self._next_number, 0, self._next_number, source, 0, destination, 0)

    def ways(self) -> str:
        """How blocks are copied, by direction."""
        if not self._on_gpu:
            return "by the host"
        tools = copy_tools(load_cuda(), self._device)
        return ", ".join(f"{direction.value}: {tools.path(direction, self.plan.group.block_bytes).value}" for direction in Direction)

    def finish(self) -> None:
        """Wait on the host for everything the device was given."""
        if self._on_gpu:
            torch.cuda.synchronize(self.on_device.device)

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        if self.transfers.close(_PATIENCE):
            self.pools.close()


class _Point:
    """One row: the limit and ours over the same number of bytes, and the comparison of every byte."""

    def __init__(self, stage: _Stage, directions: Sequence[_Direction], seed: int) -> None:
        plan = stage.plan
        self._stage = stage
        self._directions = directions
        self._random = np.random.default_rng(seed)
        # Where both ends are in one pool, or each pool is source and destination, half of it is copied to or from.
        self._halves = len(directions) > 1 or directions[0][0] == directions[0][1]
        self._count = plan.num_blocks // 2 if self._halves else plan.num_blocks
        self._moves: list[Move] = []
        self._pairs: list[tuple[_Direction, list[int], list[int]]] = []
        self.submit: list[float] = []
        self.failure = ""
        generator = torch.Generator(stage.primary.device).manual_seed(seed)
        stage.primary.random_(0, 256, generator=generator)
        stage.secondary.copy_(stage.primary.flip(0))
        stage.primary.random_(0, 256, generator=generator)
        stage.finish()

    @property
    def num_moves(self) -> int:
        return self._count * len(self._directions)

    @property
    def num_bytes(self) -> int:
        """Bytes that one turn moves."""
        return self.num_moves * self._stage.plan.group.block_bytes

    def choose_pairs(self) -> None:
        """New pairs of slots. Sources are never destinations, so what is compared afterwards is still there."""
        self._moves, self._pairs = [], []
        for number, (source, destination) in enumerate(self._directions):
            # primary->secondary uses the lower halves and secondary->primary the upper ones; inside a pool it is lower to upper.
            lower = number * self._count
            upper = self._count if source == destination else lower
            from_slots = [int(slot) + lower for slot in self._random.permutation(self._count)]
            to_slots = [int(slot) + upper for slot in self._random.permutation(self._count)]
            self._pairs.append(((source, destination), from_slots, to_slots))
        for turn in range(self._count):
            for (source, destination), from_slots, to_slots in self._pairs:
                self._moves.append(self._stage.move(pool_index(source, from_slots[turn]), pool_index(destination, to_slots[turn])))

    def copy_plainly(self) -> None:
        """The limit: one copy for each direction, each on a stream of its own."""
        stage = self._stage
        size = self.num_bytes // len(self._directions)
        used = stage.others[:len(self._directions)]
        for number, ((source, destination), stream) in enumerate(zip(self._directions, used, strict=True)):
            host = stage.on_host[number * size:(number + 1) * size]
            ends = {SECONDARY: host, PRIMARY: stage.on_device[number, :size]}
            to = stage.on_device[1, :size] if source == destination else ends[destination]
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                to.copy_(ends[source], non_blocking=True)
        for stream in used:
            if stream is not None:
                stream.synchronize()

    def move(self) -> None:
        """Ours: issue the Moves, let the engine's stream wait for them, and wait for that stream."""
        stage, size = self._stage, self._stage.plan.batch_blocks
        start = time.perf_counter()
        for first in range(0, len(self._moves), size):
            stage.transfers.issue(self._moves[first:first + size])
        self.submit.append(time.perf_counter() - start)
        destinations = [move.destination for move in self._moves]
        if not stage.transfers.order_before_engine(stage.engine, 0, destinations, _PATIENCE):
            raise TransferError(f"copies hang: not over after {_PATIENCE:.0f} s")
        if stage.engine is not None:
            stage.engine.synchronize()

    def verify(self) -> None:
        """Every Move was reported without an error, and every byte is where it belongs. Keeps the first failure."""
        stage = self._stage
        if not stage.transfers.idle(_PATIENCE):
            raise TransferError(f"copies hang: not reported after {_PATIENCE:.0f} s")
        results = stage.transfers.drain()
        errors = [result for result in results if result.error is not None]
        if errors:
            self._fail(f"{errors[0].move}: {errors[0].error}")
        elif len(results) != len(self._moves):
            self._fail(f"{len(self._moves)} Moves were issued, {len(results)} were reported")
        else:
            blocks = {PRIMARY: stage.primary, SECONDARY: stage.secondary.to(stage.primary.device)}
            for (source, destination), from_slots, to_slots in self._pairs:
                same = (blocks[source][from_slots] == blocks[destination][to_slots]).all(dim=1)
                if not bool(same.all()):
                    wrong = int((~same).nonzero()[0])
                    self._fail(f"{LEVEL_NAMES[destination]} slot {to_slots[wrong]} does not hold the bytes of "
                               f"{LEVEL_NAMES[source]} slot {from_slots[wrong]}")
        stage.finish()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

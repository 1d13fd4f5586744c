"""``kvtier bench load``: time to first token of a prefix on NVMe, with the tier deciding, beside always computing and always loading.

Over a grid of block sizes, prefix lengths and engine speeds. The store is a real one; the engine is a busy wait of known length
(``load_engine``), so that the same drive meets engines of every speed. All three take turns in one cache on one store; before each turn
the prefix is on NVMe and nowhere else. Every reused byte is compared after each turn.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kvtier.bench.build import compiled
from kvtier.bench.load_engine import TimedEngine, block_content
from kvtier.bench.measure import LEAST_ROUNDS, Alternative, Interleaved
from kvtier.bench.nvme import working_folder
from kvtier.bench.report import Limit, Report, ResultRow, require_memory, size_name
from kvtier.errors import ConfigError, TransferError
from kvtier.io.store_directory import expand
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, PRIMARY, level_of, slot_of
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager

OURS: Final = "kvtier"
RECOMPUTE: Final = "always recompute"
LOAD: Final = "always load"
GRID: Final = "load/grid"
TOKENS_PER_BLOCK: Final = 32
LEARNING_ROUNDS: Final = 3
"""Rounds in which the tier gets to know drive and engine; not counted."""

SPARE_BLOCKS: Final = 2  # for the last, unfilled block of a prompt
_PATIENCE: Final = 120.0


@dataclass(frozen=True)
class LoadPlan:
    """The grid, and how much is measured at each point.

    Attributes:
        block_bytes: of a block of 32 tokens.
        num_blocks: of the stored prefix.
        tokens_per_second: of the engine.
        rounds: recorded at each point; fewer, but at least five, when ``seconds`` per point are over before.
    """

    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]
    tokens_per_second: tuple[float, ...]
    rounds: int
    seconds: float

    @classmethod
    def usual(cls, quick: bool) -> LoadPlan:
        """18 points of 7 rounds, or 4 of 5."""
        if quick:
            return cls((256 << 10, 2 << 20), (16,), (5e3, 5e5), 5, 5.0)
        return cls((64 << 10, 512 << 10, 2 << 20), (16, 64), (5e3, 5e4, 5e5), 7, 30.0)

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        if (self.rounds < 1 or min(self.num_blocks, default=0) < 1 or min(self.tokens_per_second, default=0.0) <= 0.0
                or any(size < 4096 or size % 4096 for size in self.block_bytes) or not self.block_bytes):
            raise ConfigError(f"{self}: needs at least 1 round and 1 block, engines of a positive speed, and blocks of whole pages")


def measure_load(directory: Path | None = None, quick: bool = False, *, plan: LoadPlan | None = None) -> Report:
    """Measure.

    Args:
        directory: a folder on the drive to measure; the current folder when None. What is written there is removed again.
        quick: fewer points and rounds.
        plan: grid and rounds; the usual ones when None.

    Returns:
        A report that has not been printed. Its config says under "invalid" where bytes differed or could not be read.

    Raises:
        ConfigError: the directory cannot be used, or there is too little memory.
    """
    plan = plan if plan is not None else LoadPlan.usual(quick)
    plan.check()
    parent = expand(directory) if directory is not None else Path.cwd()
    largest = max(plan.block_bytes) * (2 * max(plan.num_blocks) + SPARE_BLOCKS + 4)
    require_memory("kvtier bench load", largest, "end other programs, or use --quick")
    decisions: dict[str, list[str]] = {}
    report = Report("kvtier bench load", {
        "command": "load", "quick": quick, "compiled": compiled(), "block_bytes": list(plan.block_bytes),
        "num_blocks": list(plan.num_blocks), "tokens_per_block": TOKENS_PER_BLOCK, "tokens_per_second": list(plan.tokens_per_second),
        "rounds": plan.rounds, "learning_rounds": LEARNING_ROUNDS, "engine": "busy wait: 1 ms, a part per token, a part per attended pair",
        "decisions": decisions}, parent)
    report.baselines = (RECOMPUTE, LOAD)
    ratios: list[float] = []
    best: list[float] = []
    with working_folder(parent) as folder, report.interruptible():
        for block_bytes in plan.block_bytes:
            for num_blocks in plan.num_blocks:
                with ExitStack() as undo:
                    store = undo.enter_context(_Store(folder / f"{block_bytes}-{num_blocks}", block_bytes, num_blocks))
                    for speed in plan.tokens_per_second:
                        name = f"load/{size_name(block_bytes)}/{num_blocks}x{TOKENS_PER_BLOCK}/{speed:g}"
                        report.say(f"measuring {name} tokens/s")
                        try:
                            measured = store.measure(TimedEngine(speed), plan)
                        except TransferError as error:
                            report.reject(name, str(error))
                            continue
                        report.add(_row(name, measured))
                        decisions[name] = store.kinds
                        ratios.append(measured.speed_ratio(OURS, RECOMPUTE))
                        best.append(min(measured.speed_ratio(OURS, RECOMPUTE), measured.speed_ratio(OURS, LOAD)))
    if ratios:
        report.add(ResultRow(GRID, "x", statistics.median(ratios), min(ratios), max(ratios), Limit(RECOMPUTE, 1.0),
                             statistics.median(ratios), {"the better of both": statistics.median(best)}))
        report.note("Ratios: how many times as soon the first token is there; load/grid is the median over the points. The tier that "
                    "decides knows drive and engine from the turns of all three, also where its own would have shown it one of them "
                    "only: it is one that has run for a while.")
    return report


def _row(name: str, measured: Interleaved) -> ResultRow:
    ours = measured.seconds(OURS)
    return ResultRow(name, "ms", 1e3 * ours.median, 1e3 * ours.low, 1e3 * ours.high,
                     Limit(RECOMPUTE, 1e3 * measured.seconds(RECOMPUTE).median), measured.speed_ratio(OURS, RECOMPUTE),
                     {LOAD: measured.speed_ratio(OURS, LOAD)})


class _Store:
    """A cache with one prefix on NVMe.

    ``kinds``: what was decided in the recorded rounds of the last :meth:`measure`.
    """

    def __init__(self, directory: Path, block_bytes: int, num_blocks: int) -> None:
        self.directory = directory
        self.kinds: list[str] = []
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        # One layer, one head: [2, 1, 32, dim] float32 is 256 bytes for each element of dim.
        self._layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=block_bytes // (2 * TOKENS_PER_BLOCK * 4), dtype="float32",
                                        tokens_per_block=TOKENS_PER_BLOCK)
        self._prompt = [(7 * number) % 50_000 for number in range(num_blocks * TOKENS_PER_BLOCK + 1)]
        self._contents = [block_content(self._prompt[number * TOKENS_PER_BLOCK:(number + 1) * TOKENS_PER_BLOCK], block_bytes)
                          for number in range(num_blocks)]
        self._next_id = 0
        self._valid = 0
        self._found = 0

    def __enter__(self) -> _Store:
        self._cache = self._open()
        self._next_id += 1
        self._cache.add_sequence(Request(self._next_id, self._prompt))
        self._write_blocks(self._next_id, 0)
        self._cache.mark_computed(self._next_id, len(self._prompt))
        self._cache.remove_sequence(self._next_id)
        if not self._cache.flush(_PATIENCE):
            self._cache.close()
            raise ConfigError(f"{self.directory}: the prefix could not be stored within {_PATIENCE:.0f} s; name another drive")
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()

    def _open(self) -> KVCacheManager:
        config = TierConfig(primary=f"{self._num_blocks + SPARE_BLOCKS} blocks", secondary="2 blocks",
                            nvme=f"{self._num_blocks + SPARE_BLOCKS + 2} blocks", nvme_directory=self.directory,
                            nvme_free_space_reserve="1MiB", max_seq_len=len(self._prompt) + TOKENS_PER_BLOCK, max_batch_size=1)
        return KVCacheManager(self._layout, config, model="kvtier bench load@1:0")

    def measure(self, engine: TimedEngine, plan: LoadPlan) -> Interleaved:
        """The three ways in turns. A new cache on the same store, so that nothing is known of another engine.

        Raises:
            TransferError: reused bytes were wrong, or the prefix was not where it was to be.
        """
        self._cache.close()
        self._cache = self._open()
        self.kinds = []
        with self._cache.locked() as ledger:
            decider = ledger.loading
        measured = Interleaved()

        def turn(way: str) -> Alternative:
            def prepare() -> None:
                self._to_nvme()
                self._found = self._cache.stats().hit_tokens.nvme
                with self._cache.locked() as ledger:
                    ledger.loading = decider if way == OURS else None
            return Alternative(way, lambda: self._first_token(engine, way), prepare, lambda: self._verify(way))

        ways = [turn(way) for way in (RECOMPUTE, LOAD, OURS)]
        for _ in range(LEARNING_ROUNDS):
            measured.round(ways, warm_up=True)
        begun = time.monotonic()
        while measured.rounds < plan.rounds and (measured.rounds < LEAST_ROUNDS or time.monotonic() - begun < plan.seconds):
            measured.round(ways)
            last = self._cache.stats().loading.last
            self.kinds.append(last.kind if last is not None else "")
        return measured

    def _first_token(self, engine: TimedEngine, way: str) -> None:
        """Admission to first token: what is loaded, then the computation of the rest."""
        self._next_id += 1
        is_alone = way == RECOMPUTE  # neither finds nor leaves anything
        self._cache.add_sequence(Request(self._next_id, self._prompt, skip_read=is_alone, skip_write=is_alone))
        self._valid = self._cache.wait_ready(self._next_id, timeout=_PATIENCE)
        seconds = engine.prefill(self._valid, len(self._prompt))
        self._cache.report_prefill(range(self._valid, len(self._prompt)), seconds)

    def _verify(self, way: str) -> None:
        """Compare what was reused and where it came from; then put in place what a real engine would have computed, and end the sequence.
        Not timed."""
        request_id, valid = self._next_id, self._valid
        loaded = self._cache.stats().hit_tokens.nvme - self._found
        if loaded != {RECOMPUTE: 0, LOAD: self._num_blocks * TOKENS_PER_BLOCK}.get(way, valid) or loaded != valid:
            raise TransferError(f"{way}: {loaded} tokens came from NVMe and {valid} were reused")
        pool = self._cache.pool().primary
        for number, block_id in enumerate(self._cache.block_ids(request_id)[:valid // TOKENS_PER_BLOCK]):
            slot = self._cache.block(block_id).slot
            if not torch.equal(pool.read_block(slot), torch.from_numpy(self._contents[number].copy())):
                raise TransferError(f"block {number} of the prefix has other bytes than were stored")
        self._write_blocks(request_id, valid // TOKENS_PER_BLOCK)
        self._cache.mark_computed(request_id, len(self._prompt))
        self._cache.remove_sequence(request_id)

    def _write_blocks(self, request_id: int, first: int) -> None:
        pool = self._cache.pool().primary
        for number, block_id in enumerate(self._cache.block_ids(request_id)[first:self._num_blocks], start=first):
            pool.write_block(self._cache.block(block_id).slot, torch.from_numpy(self._contents[number].copy()))

    def _to_nvme(self) -> None:
        """Every block of the prefix goes back to its copy on NVMe."""
        if not self._cache.transfers.idle(_PATIENCE):
            raise TransferError(f"transfers did not end within {_PATIENCE:.0f} s")
        with self._cache.locked() as ledger:
            walk = ledger.follow(Request(0, self._prompt), self._num_blocks * TOKENS_PER_BLOCK).walk
            found = [] if walk is None else [block for node in walk.nodes for block in node.values[0] if block is not None]
        for block in found:
            if level_of(block.index) == PRIMARY:
                self._cache.offload(block.id)
        where = self._cache.match(Request(0, self._prompt)).tokens_by_level
        if where[NVME] != self._num_blocks * TOKENS_PER_BLOCK:
            raise TransferError(f"the prefix is not on NVMe alone before a turn: tokens by level {where}, slots "
                                f"{[slot_of(block.index) for block in found][:4]}")

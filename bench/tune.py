"""From a trace to sizes (``kvtier tune``): what is reused with how much memory, and from where on more of it buys next to nothing.

A level is worth loading from where a block comes faster than it is computed. Sizes are where the curve of what default eviction finds ends
to rise: the LRU curve, which costs one pass for all sizes, and which is what the default policy finds. The sizes found are then
replayed through the real ledger, for the writes that NVMe would see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.bench.replay import ReplayResult
from kvtier.bench.trace import Trace
from kvtier.errors import ConfigError
from kvtier.policies.curves import HitCurve, NextUses, Prompts, knee, lru_curve, sample, sampling_error

MOST_USES: Final = 50_000_000  # block uses of a trace whose curve is exact
LEAST_GAIN: Final = 0.01       # of the input tokens: what twice the memory must add to be recommended
POINTS: Final = 40
SECONDS_PER_DAY: Final = 86_400
_MEASURING: Final = {"secondary": ("--measure", "copy"), "nvme": ("--measure --nvme-directory DIR", "nvme")}
"""What measures how fast a level is: options of ``kvtier tune``, and a benchmark."""


@dataclass(frozen=True)
class Speeds:
    """What this machine does, in bytes/s, and where the figures are from. A level that was not measured is None."""

    copy: float | None
    nvme_read: float | None
    nvme_write: float | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One capacity: shares of the input tokens that are reused."""

    blocks: int
    lru: float
    optimum: float


@dataclass(frozen=True)
class Curve:
    """What is reused by capacity.

    Attributes:
        points: by ascending capacity.
        rate: share of the blocks looked at; 1 where the curve is exact.
        error: two standard errors of a share, at most; 0 where it is exact.
    """

    points: list[Point]
    rate: float
    error: float

    def at(self, blocks: int) -> float:
        """What LRU reuses with so many blocks, between the points on a line."""
        before = Point(0, 0.0, 0.0)
        for point in self.points:
            if point.blocks >= blocks:
                part = (blocks - before.blocks) / max(point.blocks - before.blocks, 1)
                return before.lru + part * (point.lru - before.lru)
            before = point
        return before.lru


@dataclass(frozen=True)
class Purchase:
    """One level's recommended size, and what it buys.

    Attributes:
        level: "secondary" or "nvme".
        blocks: 0: not worth having.
        reused: share of input tokens reused with this level and those above it; added: of it, what this level adds.
        next_bytes, next_gain: what as much again would cost, and add.
        seconds_saved: per request: computing what it adds, less loading it.
        reason: in words, why this much.
        measured: False where nobody knows how fast the level is: then it has no size, and the figures say nothing.
    """

    level: str
    blocks: int
    reused: float
    added: float
    next_bytes: int
    next_gain: float
    seconds_saved: float
    reason: str
    measured: bool = True


@dataclass(frozen=True)
class Wear:
    """What the NVMe level would be written.

    Attributes:
        bytes_per_day: as the trace goes on day and night.
        writes_per_hit: blocks written for each block found there.
        size_per_day: how many times its own size that is.
        days: until ``endurance`` bytes are written; None where that is not known.
    """

    bytes_per_day: float
    writes_per_hit: float | None
    size_per_day: float
    days: float | None


def curve_of(trace: Trace, rate: float | None = None) -> Curve:
    """The curves of a trace: exact, or of a sample where it is large or ``rate`` says so. ConfigError for a rate outside 0..1."""
    if rate is not None and not 0.0 < rate <= 1.0:
        raise ConfigError(f"--sample={rate}: a share of the blocks, more than 0 and at most 1")
    prompts = trace.reusable_prompts()
    num_ids = trace.num_unique
    chosen = min(1.0, MOST_USES / max(len(trace.ids), 1)) if rate is None else rate
    capacities = capacities_of(num_ids)
    curve = lru_curve(prompts, num_ids, chosen)
    optimum = _optimum(prompts, num_ids, chosen)
    tokens = trace.input_tokens
    points = [Point(blocks, curve.at(blocks - 1) * trace.block / tokens, _optimum_at(optimum, curve, blocks) * trace.block / tokens)
              for blocks in capacities]
    error = 0.0
    if chosen < 1.0:
        uses = sum(len(prompt) for prompt in prompts)
        error = sampling_error(prompts, num_ids, chosen, capacities) * uses * trace.block / tokens
    return Curve(points, chosen, error)


def capacities_of(num_unique: int) -> list[int]:
    """Capacities from about a thousandth of the trace to all of it, evenly on a logarithmic scale."""
    least = max(1, num_unique // 1000)
    steps = (num_unique / least) ** (1 / (POINTS - 1))
    return sorted({min(num_unique, max(1, round(least * steps ** number))) for number in range(POINTS)} | {num_unique})


def _optimum(prompts: Prompts, num_ids: int, rate: float) -> NextUses:
    return NextUses(prompts if rate == 1.0 else sample(prompts, num_ids, rate), num_ids)


def _optimum_at(uses: NextUses, curve: HitCurve, blocks: int) -> float:
    return max((uses.optimum(int(blocks * curve.rate)) + curve.missing) / curve.rate, 0.0)


def recommend(curve: Curve, trace: Trace, block_bytes: int, primary: int, host_limit: int, nvme_limit: int, speeds: Speeds,
              prefill_rate: float) -> list[Purchase]:
    """Sizes of the secondary and the NVMe level.

    Args:
        primary: its blocks. host_limit, nvme_limit: most blocks of the other levels.
        prefill_rate: tokens per second that the engine computes.
    """
    compute = trace.block / prefill_rate
    tokens = trace.input_tokens / trace.num_requests
    found: list[Purchase] = []
    above = primary
    for level, limit, speed in (("secondary", host_limit, speeds.copy), ("nvme", nvme_limit, speeds.nvme_read)):
        before = curve.at(above)
        if limit < 1:
            found.append(Purchase(level, 0, before, 0.0, 0, 0.0, 0.0, "there is no room for it"))
            continue
        if speed is None:
            options, benchmark = _MEASURING[level]
            why = (f"its speed was not measured; measure it here with {options}, or give --measured FILE, which kvtier bench {benchmark} "
                   "--json FILE writes")
            found.append(Purchase(level, 0, before, 0.0, 0, 0.0, 0.0, why, measured=False))
            continue
        load = block_bytes / speed
        if load >= compute:
            found.append(Purchase(level, 0, before, 0.0, 0, 0.0, 0.0,
                                  f"loading a block takes {load * 1000:.1f} ms, computing it {compute * 1000:.1f} ms"))
            continue
        sizes = _sizes_up_to(limit, curve)
        reused = [curve.at(above + size) for size in sizes]
        if level == "nvme" and found and found[0].blocks == 0:
            found.append(Purchase(level, 0, before, 0.0, 0, 0.0, 0.0, "it needs a secondary level above it"))
            continue
        chosen = knee(sizes, reused, LEAST_GAIN)
        if reused[-1] - before < LEAST_GAIN:
            found.append(Purchase(level, 0, before, 0.0, 0, 0.0, 0.0, f"it would add {100 * (reused[-1] - before):.1f} %"))
            continue
        blocks = sizes[chosen]
        added = reused[chosen] - before
        more = curve.at(above + 2 * blocks) - reused[chosen]
        reason = "all there is room for" if chosen == len(sizes) - 1 and more >= LEAST_GAIN else \
            f"twice as much would add less than {100 * LEAST_GAIN:.0f} % of the input tokens"
        found.append(Purchase(level, blocks, reused[chosen], added, blocks * block_bytes, more,
                              added * tokens / trace.block * (compute - load), reason))
        above += blocks
    return found


def _sizes_up_to(limit: int, curve: Curve) -> list[int]:
    most = min(limit, curve.points[-1].blocks)
    sizes = {max(1, round(most * 2 ** (-number / 4))) for number in range(40)}
    return sorted(sizes)


def wear_of(result: ReplayResult, trace: Trace, block_bytes: int, nvme_blocks: int, endurance: int | None) -> Wear:
    """NVMe wear from a replay of the recommended sizes."""
    written = result.nvme_writes * block_bytes
    per_day = written / max(trace.seconds, 1.0) * SECONDS_PER_DAY
    return Wear(per_day, result.writes_per_hit, per_day / (nvme_blocks * block_bytes) if nvme_blocks else 0.0,
                endurance / per_day if endurance is not None and per_day else None)


def speeds_from(files: Sequence[Path]) -> Speeds:
    """Speeds out of the JSON of ``kvtier bench copy`` and ``kvtier bench nvme``, of 2 MiB blocks.

    Raises:
        ConfigError: a file that cannot be read, or has none of their rows.
    """
    found: dict[str, float] = {}
    sources: list[str] = []
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            rows = {row["name"]: float(row["median"]) * 1e9 for row in document["results"] if row["unit"] == "GB/s"}
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}); write it with kvtier bench copy --json or "
                              "kvtier bench nvme --json") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: not the figures of a benchmark ({type(error).__name__}: {error}); write them with "
                              "kvtier bench copy --json or kvtier bench nvme --json") from error
        wanted = {name: rows[name] for name in ("copy/secondary->primary/2MiB", "nvme/read/2MiB", "nvme/write/2MiB") if name in rows}
        if not wanted:
            raise ConfigError(f"{file}: has neither copy/secondary->primary/2MiB nor nvme/read/2MiB; write it with kvtier bench copy "
                              "--json or kvtier bench nvme --json")
        found |= wanted
        sources += [f"{name} {value / 1e9:.2f} GB/s ({file.name})" for name, value in wanted.items()]
    return Speeds(found.get("copy/secondary->primary/2MiB"), found.get("nvme/read/2MiB"), found.get("nvme/write/2MiB"), tuple(sources))

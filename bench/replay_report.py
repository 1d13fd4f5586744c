"""What ``kvtier replay`` takes and says: sizes for a trace's blocks, rows, time lines, pictures."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvtier.bench import slow_stages
from kvtier.bench.model_sizes import DEFAULT_MODEL, find_model
from kvtier.bench.plot import check_plot
from kvtier.bench.replay import Direction, Moment, ReplayResult, ReplaySettings, replay
from kvtier.bench.report import FINE, Report, ResultRow, check_writable, write_json, write_whole
from kvtier.bench.trace import DEFAULT_BLOCK, Trace, read_trace
from kvtier.bench.trace import Progress as Told
from kvtier.bench.trace_text import read_chats
from kvtier.bench.whole_table import print_whole
from kvtier.errors import ConfigError
from kvtier.policies.named import POLICIES
from kvtier.pools.pool_index import LEVEL_NAMES, NUM_LEVELS, NVME, PRIMARY, SECONDARY
from kvtier.pools.rate import parse_rate
from kvtier.pools.sizing import SizeKind, format_bytes, parse_size, shown
from kvtier.tiering.ledger.rules import LedgerRules

MOST_BLOCKS: Final = 1 << 24
"""Of a level: the books of more would take gigabytes of memory, and minutes to open."""

TEXT_BLOCK: Final = 16
"""Tokens of a block of text chats, whose length is not given by the file."""


@dataclass(frozen=True)
class ReplayOptions:
    """What the command line was given; see its help for each."""

    trace: Path
    primary: str
    secondary: str = "0 blocks"
    nvme: str = "0 blocks"
    policy: str = "default"
    block: int | None = None
    tokenizer: str | None = None
    model: str = DEFAULT_MODEL
    dtype: str = "bfloat16"
    keep_backing: bool = True
    write_ahead_share: float = 0.25
    nvme_min_uses: int = 0
    nvme_max_depth: int = 0
    copy_bandwidth: str | None = None
    nvme_bandwidth: str | None = None
    json_file: Path | None = None
    plot_file: Path | None = None


def run_replay(options: ReplayOptions, console: Console | None = None) -> int:
    """Replay, print, write. Returns the exit code."""
    if options.json_file is not None:
        check_writable(options.json_file)
    check_plot(options.plot_file)
    token_bytes = find_model(options.model).token_bytes(options.dtype)
    _check_sizes_and_rates(options)
    rules = replay_rules(options)
    trace = read_any_trace(options.trace, options.block, options.tokenizer)
    block_bytes = token_bytes * trace.block
    num_blocks = blocks_of_levels((options.primary, options.secondary, options.nvme), trace, block_bytes)
    settings = ReplaySettings(num_blocks, rules, _seconds(options, block_bytes))
    with progress_bar("replay", "requests") as told:
        result = replay(trace, settings, told)
    config: dict[str, object] = {"trace": trace.name, "requests": trace.num_requests, "unique_blocks": trace.num_unique,
                                 "tokens_per_block": trace.block, "block_bytes": block_bytes, "model": options.model,
                                 "blocks": dict(zip(LEVEL_NAMES, num_blocks, strict=True)), "policy": options.policy,
                                 "keep_backing": options.keep_backing, "write_ahead_share": options.write_ahead_share,
                                 "nvme_min_uses": options.nvme_min_uses, "nvme_max_depth": options.nvme_max_depth,
                                 "copy_bandwidth": options.copy_bandwidth, "nvme_bandwidth": options.nvme_bandwidth}
    report = Report(f"kvtier replay {trace.name}", config, console=console)
    for row in replay_rows(result, block_bytes):
        report.add(row)
    if result.cut:
        report.note(f"{result.cut} requests have more blocks than the primary level and were cut to it")
    if options.plot_file is not None:
        write_whole(options.plot_file, replay_picture(result, num_blocks, options.plot_file.suffix[1:] or "png"))
    print_whole(console or Console(),
                levels_table(f"kvtier replay {trace.name}, policy {options.policy}", result, num_blocks, block_bytes))
    for line in [traffic_line(result, block_bytes), *report.notes]:
        report.say(line)
    if options.json_file is not None:
        write_json(options.json_file, report.as_json() | {"timeline": [asdict(moment) for moment in result.moments]})
    for file in (options.json_file, options.plot_file):
        if file is not None:
            report.say(f"wrote {file}")
    return FINE


def replay_rules(options: ReplayOptions) -> LedgerRules:
    """The ledger's rules for what the command line was given. ConfigError for a policy that there is not, or a share outside 0..1."""
    if not 0.0 <= options.write_ahead_share <= 1.0:
        raise ConfigError(f"--write-ahead-share={options.write_ahead_share}: a share from 0 to 1")
    if options.policy not in POLICIES:
        raise ConfigError(f"--policy={shown(options.policy)}: unknown; use one of {', '.join(POLICIES)}")
    return LedgerRules(max_events=0, policy=options.policy, keep_backing=options.keep_backing,
                       write_ahead_share=options.write_ahead_share, nvme_min_uses=options.nvme_min_uses,
                       nvme_max_depth=options.nvme_max_depth)


def _check_sizes_and_rates(options: ReplayOptions) -> None:
    """What can be known before the trace is read. ConfigError names the option."""
    primary, secondary, nvme = (parse_size(getattr(options, name), f"--{name}") for name in LEVEL_NAMES)
    if not primary.amount:
        raise ConfigError(f"--primary={shown(primary.text)}: the primary level needs at least 1 block")
    if nvme.amount and not secondary.amount:
        raise ConfigError(f"--nvme={shown(nvme.text)}: blocks reach NVMe through the secondary level; give --secondary at least 1 block")
    _seconds(options, 1)


def read_any_trace(path: Path, block: int | None, tokenizer: str | None) -> Trace:
    """A trace of ids or, with a tokenizer, text chats. ConfigError for what cannot be read."""
    with progress_bar(f"read {path.name}", "bytes") as told:
        if tokenizer is not None:
            return read_chats(path, tokenizer, TEXT_BLOCK if block is None else block, told)
        return read_trace(path, DEFAULT_BLOCK if block is None else block, told)


def blocks_of_levels(sizes: tuple[str, str, str], trace: Trace, block_bytes: int) -> tuple[int, int, int]:
    """Sizes as blocks: "4096 blocks", "64GiB", or "5%" of the trace's unique blocks."""
    found = [_blocks(text, name, trace.num_unique, block_bytes) for text, name in zip(sizes, LEVEL_NAMES, strict=True)]
    return found[PRIMARY], found[SECONDARY], found[NVME]


def _blocks(text: str, name: str, num_unique: int, block_bytes: int) -> int:
    size = parse_size(text, f"--{name}")
    if size.kind is SizeKind.BLOCKS:
        return _countable(int(size.amount), text, name, num_unique)
    if size.kind is SizeKind.SHARE:
        blocks = int(size.amount * num_unique)
        if size.amount and not blocks:
            raise ConfigError(f"--{name}={shown(text)}: less than one of the trace's {num_unique} different blocks; give it more")
        return blocks
    blocks = int(size.amount // block_bytes)
    if size.amount and not blocks:
        raise ConfigError(f"--{name}={shown(text)}: less than one block of {format_bytes(block_bytes)}; give it more, or a smaller model")
    return _countable(blocks, text, name, num_unique)


def _countable(blocks: int, text: str, name: str, num_unique: int) -> int:
    """Refuse a level far larger than a trace's content, whose books alone would fill this machine's memory."""
    if blocks > max(MOST_BLOCKS, num_unique):
        raise ConfigError(f"--{name}={shown(text)}: {blocks} blocks, more than the {MOST_BLOCKS} that can be replayed, and than the "
                          f"{num_unique} different ones of the trace; \"100%\" holds all of those")
    return blocks


def _seconds(options: ReplayOptions, block_bytes: int) -> dict[Direction, float]:
    seconds: dict[Direction, float] = {}
    if options.copy_bandwidth is not None:
        each = block_bytes / parse_rate(options.copy_bandwidth, "--copy-bandwidth")
        seconds |= {(PRIMARY, SECONDARY): each, (SECONDARY, PRIMARY): each}
    if options.nvme_bandwidth is not None:
        each = block_bytes / parse_rate(options.nvme_bandwidth, "--nvme-bandwidth")
        seconds |= {(SECONDARY, NVME): each, (PRIMARY, NVME): each, (NVME, PRIMARY): each, (NVME, SECONDARY): each}
    return seconds


def replay_rows(result: ReplayResult, block_bytes: int) -> list[ResultRow]:
    """One row for each figure; a replay is exact, so low and high are the figure itself."""
    rows = [_row("hit_token_ratio", "ratio", result.hit_ratio)]
    rows += [_row(f"hit_token_ratio/{name}", "ratio", tokens / result.input_tokens)
             for name, tokens in zip(LEVEL_NAMES, result.hit_tokens, strict=True)]
    rows += [_row(f"hit_tokens/{name}", "tokens", tokens) for name, tokens in zip(LEVEL_NAMES, result.hit_tokens, strict=True)]
    rows += [_row(f"moved/{LEVEL_NAMES[source]}->{LEVEL_NAMES[target]}", "GB", count * block_bytes / 1e9)
             for (source, target), count in result.moves.items()]
    for level in range(NUM_LEVELS):
        written = sum(count for (_, target), count in result.moves.items() if target == level)
        rows.append(_row(f"written/{LEVEL_NAMES[level]}", "GB", written * block_bytes / 1e9))
    if result.writes_per_hit is not None:
        rows.append(_row("nvme_writes_per_hit", "blocks/block", result.writes_per_hit))
    rows += [_row("evictions", "blocks", result.dropped), _row("evictions/secondary", "blocks", result.host_dropped)]
    if result.load_seconds:
        rows.append(_row("load_seconds", "s/request", result.load_seconds / result.num_requests))
    return rows


def levels_table(title: str, result: ReplayResult, num_blocks: tuple[int, int, int], block_bytes: int) -> Table:
    """Levels with their sizes, hits, and what was written to and read from each."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("level", "blocks", "size", "reused", "written", "read"):
        table.add_column(heading, justify="left" if heading == "level" else "right", no_wrap=True)
    for level, name in enumerate(LEVEL_NAMES):
        if num_blocks[level]:
            written = sum(count for (_, target), count in result.moves.items() if target == level)
            read = sum(count for (source, _), count in result.moves.items() if source == level)
            table.add_row(name, str(num_blocks[level]), short_bytes(num_blocks[level] * block_bytes),
                          f"{100 * result.hit_tokens[level] / result.input_tokens:.2f} %", short_bytes(written * block_bytes),
                          short_bytes(read * block_bytes))
    total = sum(num_blocks)
    table.add_row("all", str(total), short_bytes(total * block_bytes), f"{100 * result.hit_ratio:.2f} %", "", "")
    return table


def traffic_line(result: ReplayResult, block_bytes: int) -> str:
    """Bytes by direction and evictions, for people."""
    ways = [f"{LEVEL_NAMES[source]}->{LEVEL_NAMES[target]} {short_bytes(count * block_bytes)}"
            for (source, target), count in result.moves.items()]
    per_hit = [] if result.writes_per_hit is None else [f"{result.writes_per_hit:.2f} NVMe blocks written per NVMe hit"]
    lost = f"{result.dropped} blocks evicted for good, {result.host_dropped} of them from the secondary level"
    return "; ".join([*ways, *per_hit, lost])


def short_bytes(num_bytes: float) -> str:
    """Bytes with three digits: "1.16 TiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB" if num_bytes < 1000 else f"{num_bytes:.0f} TiB"


def replay_picture(result: ReplayResult, num_blocks: tuple[int, int, int], kind: str) -> bytes:
    """Time lines: hits by level, blocks written to NVMe and dropped, content by level.

    Raises:
        ConfigError: matplotlib does not know the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    moments: list[Moment] = result.moments
    seconds = [moment.seconds for moment in moments]
    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    hits, flow, content = figure.subplots(3, 1)
    hits.stackplot(seconds, [[100 * moment.hit_tokens[level] / max(moment.input_tokens, 1) for moment in moments]
                             for level in range(NUM_LEVELS)], labels=LEVEL_NAMES)
    hits.set_ylabel("reused, % of input tokens")
    hits.set_ylim(0, 100)
    flow.plot(seconds, [moment.nvme_writes for moment in moments], label="written to NVMe")
    flow.plot(seconds, [moment.dropped for moment in moments], label="evicted for good")
    flow.set_ylabel("blocks")
    for level, name in enumerate(LEVEL_NAMES):
        if num_blocks[level]:
            content.plot(seconds, [100 * moment.content[level] / num_blocks[level] for moment in moments], label=name)
    content.set_ylabel("filled, %")
    content.set_xlabel("seconds of the trace")
    for axes in (hits, flow, content):
        axes.legend(fontsize=8)
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=kind)
    except ValueError as error:
        raise ConfigError(f"--plot: {error}") from error
    return picture.getvalue()


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Told]:
    """A bar on the standard error where somebody is looking; it is gone when the work is done. Elsewhere a line now and then."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(),
                   console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)

        told = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - told >= slow_stages.EVERY:
                told = time.monotonic()
                slow_stages.to_stderr(f"kvtier: {what}: {done} of {total} {unit}")

        yield tell


def _row(name: str, unit: str, value: float) -> ResultRow:
    return ResultRow(name, unit, value, value, value)

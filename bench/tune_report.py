"""``kvtier tune``: measure or read speeds, find sizes, replay them, and write it down: a table, a page, figures, a configuration."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvtier.bench.model_sizes import DEFAULT_MODEL, find_model
from kvtier.bench.replay import ReplayResult, ReplaySettings, replay
from kvtier.bench.replay_report import blocks_of_levels, progress_bar, read_any_trace, short_bytes
from kvtier.bench.report import FINE, Report, ResultRow, check_writable, write_json, write_whole
from kvtier.bench.trace import Trace
from kvtier.bench.tune import Curve, Purchase, Speeds, Wear, curve_of, recommend, speeds_from, wear_of
from kvtier.bench.tune_page import Table, curve_picture, page
from kvtier.bench.whole_table import print_whole
from kvtier.errors import ConfigError
from kvtier.pools.host_memory import free_disk_bytes, host_memory
from kvtier.pools.sizing import SizeKind, parse_size, shown
from kvtier.tiering.ledger.rules import LedgerRules

HOST_SHARE: Final = 0.8  # of what is free that may be recommended where no limit is given
DISK_SHARE: Final = 0.9
LEAST_DAYS: Final = 5 * 365  # that a drive should last
_SPARING: Final = "nvme_min_uses keeps what is asked for only once off the drive, nvme_write_bandwidth limits how fast it is written"
_SHOWN: Final = 12       # points of the curve in tables


@dataclass(frozen=True)
class TuneOptions:
    """What the command line was given; see its help for each."""

    trace: Path
    primary: str = "40GiB"
    host_limit: str | None = None
    nvme_limit: str | None = None
    nvme_directory: Path | None = None
    prefill_rate: float = 5000.0
    measured: Sequence[Path] = ()
    measure: bool = False
    endurance: str | None = None
    sample: float | None = None
    block: int | None = None
    tokenizer: str | None = None
    model: str = DEFAULT_MODEL
    dtype: str = "bfloat16"
    json_file: Path | None = None
    html_file: Path | None = None
    config_file: Path | None = None


@dataclass(frozen=True)
class Tuned:
    """All that was found."""

    trace: Trace
    curve: Curve
    speeds: Speeds
    block_bytes: int
    primary: int
    purchases: list[Purchase]
    replayed: ReplayResult
    wear: Wear
    sparing: tuple[ReplayResult, Wear] | None
    """The same sizes with ``nvme_min_uses=1``, where the drive would not last long without."""


def run_tune(options: TuneOptions, console: Console | None = None) -> int:
    """Find sizes, print them, write what was asked for. Returns the exit code."""
    _check(options)
    token_bytes = find_model(options.model).token_bytes(options.dtype)
    endurance = None if options.endurance is None else _bytes(options.endurance, "--endurance", least=1)
    parse_size(options.primary, "--primary")
    host_limit = _limit(options.host_limit, "--host-limit", host_memory().available_bytes * HOST_SHARE)
    nvme_limit = _limit(options.nvme_limit, "--nvme-limit", free_disk_bytes(options.nvme_directory or Path.cwd()) * DISK_SHARE)
    given = speeds_from(options.measured)
    trace = read_any_trace(options.trace, options.block, options.tokenizer)
    speeds = measured_speeds(options.nvme_directory) if options.measure else given
    block_bytes = token_bytes * trace.block
    primary = max(1, blocks_of_levels((options.primary, "0 blocks", "0 blocks"), trace, block_bytes)[0])
    curve = curve_of(trace, options.sample)
    purchases = recommend(curve, trace, block_bytes, primary, host_limit // block_bytes, nvme_limit // block_bytes, speeds,
                          options.prefill_rate)
    secondary, nvme = (purchase.blocks for purchase in purchases)

    def replayed_with(nvme_min_uses: int) -> tuple[ReplayResult, Wear]:
        with progress_bar("replay", "requests") as told:
            result = replay(trace, ReplaySettings((primary, secondary, nvme), LedgerRules(max_events=0, nvme_min_uses=nvme_min_uses)), told)
        return result, wear_of(result, trace, block_bytes, nvme, endurance)

    replayed, wear = replayed_with(0)
    sparing = replayed_with(1) if wear.days is not None and wear.days < LEAST_DAYS else None
    found = Tuned(trace, curve, speeds, block_bytes, primary, purchases, replayed, wear, sparing)
    _write(options, found, console or Console())
    return FINE


def _check(options: TuneOptions) -> None:
    """Refuse what cannot be done before minutes are spent on it."""
    for file in (options.json_file, options.html_file, options.config_file):
        if file is not None:
            check_writable(file)
    if options.html_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--html {options.html_file}: matplotlib is not installed; pip install 'kvtier[bench]', or leave --html out")
    if options.config_file is not None and options.config_file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config {options.config_file}: name a .yaml file")
    if not 0.0 < options.prefill_rate < 1e12:
        raise ConfigError(f"--prefill-rate={options.prefill_rate}: tokens per second that the engine computes, more than 0")
    if options.nvme_directory is not None and options.nvme_directory.exists() and not options.nvme_directory.is_dir():
        raise ConfigError(f"--nvme-directory {options.nvme_directory}: not a folder; name a folder, which need not exist yet")
    if options.measure and options.nvme_directory is not None and not options.nvme_directory.exists():
        raise ConfigError(f"--nvme-directory {options.nvme_directory}: does not exist, and --measure would measure there; make it, or "
                          "leave one of the two out")
    if options.sample is not None and not 0.0 < options.sample <= 1.0:
        raise ConfigError(f"--sample={options.sample}: a share of the blocks, more than 0 and at most 1")


def measured_speeds(directory: Path | None) -> Speeds:
    """Short runs of ``kvtier bench copy`` and, where there is a folder for it, of ``kvtier bench nvme``."""
    from kvtier.bench.copy import measure_copy
    from kvtier.bench.nvme import measure_nvme
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "copy.json"]
        measure_copy(quick=True).finish(files[0])
        if directory is not None:
            files.append(Path(folder) / "nvme.json")
            measure_nvme(directory, quick=True).finish(files[1])
        return speeds_from(files)


def _bytes(text: str, name: str, least: int = 0) -> int:
    if text.strip().replace(".", "", 1).isdecimal():  # parse_size would also suggest blocks and percents
        raise ConfigError(f'{name}={shown(text)}: a size needs a unit; write for example "{text.strip():.20}GB"')
    size = parse_size(text, name)
    if size.kind is not SizeKind.BYTES:
        raise ConfigError(f'{name}={shown(text)}: must be a size in bytes, for example "600TB"')
    if size.amount < least:
        raise ConfigError(f"{name}={shown(text)}: must be at least {least} byte")
    return int(size.amount)


def _limit(text: str | None, name: str, otherwise: float) -> int:
    return int(otherwise) if text is None else _bytes(text, name)


def headline(found: Tuned) -> str:
    """What the sizes found are worth: not the curve that they were chosen by, but the replay of the trace with them."""
    return f"{100 * found.replayed.hit_ratio:.1f} % of input tokens reused, replayed with these sizes"


def sentences_of(found: Tuned, options: TuneOptions) -> list[str]:
    """What was found, a sentence for each thing to know."""
    trace, curve = found.trace, found.curve
    said = [(f"{trace.name}: {trace.num_requests} requests in {trace.seconds:.0f} s, {trace.input_tokens} input tokens, "
             f"{trace.num_unique} different blocks of {trace.block} tokens; a block of {options.model} is "
             f"{short_bytes(found.block_bytes)}"),
            f"{headline(found)} (the curve is of one LRU cache as large as all levels together)",
            f"primary {short_bytes(found.primary * found.block_bytes)}: {100 * curve.at(found.primary):.1f} % on the curve"]
    for purchase in found.purchases:
        if purchase.blocks:
            said.append(f"{purchase.level} {_size(found, purchase)}: {100 * purchase.reused:.1f} % on the curve, "
                        f"{100 * purchase.added:.1f} % more, saves {purchase.seconds_saved:.2f} s per request; the next "
                        f"{short_bytes(purchase.next_bytes)} buy {100 * purchase.next_gain:.1f} % ({purchase.reason})")
        else:
            said.append(f"{purchase.level}: {'none; ' if purchase.measured else ''}{purchase.reason}")
    kind = "exact" if curve.rate == 1.0 else f"of {100 * curve.rate:.2g} % of the blocks, +- {100 * curve.error:.1f} %"
    said.append(f"the curve is {kind}; with all blocks kept {100 * curve.points[-1].lru:.1f} % are reused")
    wear = found.wear
    if found.purchases[1].blocks:
        hits = "" if wear.writes_per_hit is None else f", {wear.writes_per_hit:.2f} blocks for each found there"
        said.append(f"NVMe: {short_bytes(wear.bytes_per_day)} written a day{hits}; that is {_plain(wear.size_per_day)} times "
                    "the level's size")
        if wear.days is not None:
            said.append(f"an endurance of {options.endurance} lasts about {_lifetime(wear.days)}"
                        + (f"; {_SPARING}" if wear.days < LEAST_DAYS else ""))
    if found.sparing is not None:
        said.append(_spared(found))
    said.append(f"the engine is taken to compute {options.prefill_rate:g} tokens/s (--prefill-rate)")
    return [*said, *found.speeds.sources]


def _spared(found: Tuned) -> str:
    assert found.sparing is not None
    result, wear = found.sparing
    lasts = "never wears out" if wear.days is None else f"lasts about {_lifetime(wear.days)}"
    return (f"with nvme_min_uses: 1 the drive {lasts}, and {100 * result.hit_ratio:.1f} % are reused instead of "
            f"{100 * found.replayed.hit_ratio:.1f} %")


def _plain(number: float) -> str:
    """Two digits that count, never as a power of ten."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _lifetime(days: float) -> str:
    """A time in the unit that fits it."""
    return f"{_plain(days / 365)} years" if days >= 2 * 365 else f"{_plain(days / 30)} months" if days >= 60 else f"{_plain(days)} days"


def config_text(found: Tuned, options: TuneOptions) -> str:
    """A configuration that ``TierConfig.from_file`` reads."""
    secondary, nvme = found.purchases
    lines = [f"# kvtier tune {found.trace.name}, model {options.model}; sizes are of one rank's whole cache.",
             f'primary: "{written_size(found.primary, found.block_bytes)}"']
    lines += [f"# {secondary.reason}", f'secondary: "{written_size(secondary.blocks, found.block_bytes)}"', f"# {nvme.reason}",
              f'nvme: "{written_size(nvme.blocks, found.block_bytes)}"']
    if nvme.blocks:
        directory = (options.nvme_directory or Path("/mnt/nvme/kvtier")).absolute()  # the engine may start elsewhere
        remark = "" if options.nvme_directory is not None else "  # change this: a folder on the drive"
        lines.append(f"nvme_directory: {json.dumps(str(directory), ensure_ascii=False)}{remark}")  # YAML reads it, whatever is in the name
    lines += ["policy: default", "keep_backing: true", "secondary_offload_min_priority: 35", "nvme_offload_min_priority: 35"]
    if found.wear.days is not None and found.sparing is not None:  # what it costs is for its owner to weigh
        lines += [f"# The drive would last about {_lifetime(found.wear.days)}; {_spared(found)}:", "# nvme_min_uses: 1"]
    return "\n".join(lines) + "\n"


def written_size(blocks: int, block_bytes: int) -> str:
    """Exactly these bytes, in the largest unit of which they are a whole number."""
    num_bytes = blocks * block_bytes
    if num_bytes == 0:
        return "0 blocks"
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes % (1 << exponent) == 0:
            return f"{num_bytes >> exponent}{unit}"
    return f"{num_bytes} B"


def purchases_table(found: Tuned) -> Table:
    rows = [("primary", short_bytes(found.primary * found.block_bytes), f"{100 * found.curve.at(found.primary):.1f} %", "", "")]
    for purchase in found.purchases:
        bought = (f"{100 * purchase.reused:.1f} %", f"{100 * purchase.added:.1f} %", f"{purchase.seconds_saved:.2f} s")
        rows.append((purchase.level, _size(found, purchase), *(bought if purchase.measured else ("", "", ""))))
    return ("level", "size", "reused (LRU curve)", "it adds", "saves per request"), rows


def _size(found: Tuned, purchase: Purchase) -> str:
    if not purchase.measured:
        return "not measured"
    return short_bytes(purchase.blocks * found.block_bytes) if purchase.blocks else "none"


def curve_table(found: Tuned) -> Table:
    points = found.curve.points
    some = points[::max(1, len(points) // _SHOWN)]
    return ("capacity", "blocks", "LRU", "optimum"), [
        (short_bytes(point.blocks * found.block_bytes), str(point.blocks), f"{100 * point.lru:.1f} %", f"{100 * point.optimum:.1f} %")
        for point in some]


def tune_rows(found: Tuned) -> list[ResultRow]:
    """The figures under stable names."""
    rows = [("tune/primary", "bytes", found.primary * found.block_bytes), ("tune/hit_token_ratio", "ratio", found.replayed.hit_ratio)]
    for purchase in (each for each in found.purchases if each.measured):
        rows += [(f"tune/{purchase.level}", "bytes", purchase.blocks * found.block_bytes),
                 (f"tune/{purchase.level}/added", "ratio", purchase.added),
                 (f"tune/{purchase.level}/saved", "s/request", purchase.seconds_saved)]
    if found.purchases[1].measured:
        rows.append(("tune/nvme/written", "bytes/day", found.wear.bytes_per_day))
    if found.wear.writes_per_hit is not None:
        rows.append(("tune/nvme/writes_per_hit", "blocks/block", found.wear.writes_per_hit))
    return [ResultRow(name, unit, value, value, value) for name, unit, value in rows]


def _write(options: TuneOptions, found: Tuned, console: Console) -> None:
    title = f"kvtier tune {found.trace.name}"
    sentences = sentences_of(found, options)
    config = config_text(found, options)
    report = Report(title, {"trace": found.trace.name, "model": options.model, "block_bytes": found.block_bytes,
                            "tokens_per_block": found.trace.block, "prefill_rate": options.prefill_rate, "sample_rate": found.curve.rate,
                            "sample_error": found.curve.error}, console=console)
    report.rows += tune_rows(found)
    report.notes += sentences
    picture = ""
    if options.html_file is not None:
        above = 0
        marks = []
        for name, blocks in [("primary", found.primary), *((purchase.level, purchase.blocks) for purchase in found.purchases)]:
            above += blocks
            if blocks:
                marks.append((f"up to {name}", above))
        picture = page(title, sentences, curve_picture(found.curve, found.block_bytes, marks),
                       [(f"Levels: {headline(found)}", purchases_table(found)), ("Curve", curve_table(found))], config)
    for heading, table in ((f"{title}\n{headline(found)}", purchases_table(found)), ("reuse by capacity", curve_table(found))):
        print_whole(console, _rich(heading, table))
    for text in sentences:
        report.say(text)
    if options.json_file is not None:
        write_json(options.json_file, report.as_json() | {
            "curve": [asdict(point) for point in found.curve.points], "purchases": [asdict(purchase) for purchase in found.purchases],
            "wear": asdict(found.wear)})
    if options.html_file is not None:
        write_whole(options.html_file, picture.encode())
    if options.config_file is not None:
        write_whole(options.config_file, config.encode())
    for file in (options.json_file, options.html_file, options.config_file):
        if file is not None:
            report.say(f"wrote {file}")


def _rich(heading: str, table: Table) -> RichTable:
    names, rows = table
    drawn = RichTable(title=Text(heading), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(names):
        drawn.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn

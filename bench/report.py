"""What every benchmark reports: the machine, rows beside their limits, one table, one JSON file (design: public names).

The JSON is ``{"kvtier", "machine", "config", "results"}``. Remarks that a reader needs and rows that did not hold stand in
``config`` under "notes" and "invalid".
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import kvtier
from kvtier.bench.measure import Interleaved, Spread
from kvtier.bench.whole_table import print_whole
from kvtier.errors import ConfigError
from kvtier.pools.host_memory import free_disk_bytes, host_memory, mount_of, usable_cpus
from kvtier.pools.sizing import format_bytes

FINE: Final = 0
CHECK_FAILED: Final = 1

_GIGA: Final = 1e9


@dataclass(frozen=True)
class Limit:
    """What a row is held against: its name, and its value in the unit of the row."""

    name: str
    value: float

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value}


@dataclass(frozen=True)
class ResultRow:
    """One figure.

    Attributes:
        name: stable, such as "copy/primary->secondary/2MiB".
        unit: of median, low, high and the limit.
        median, low, high: over the rounds.
        limit: None where there is none.
        ratio: how much of the limit was reached, the median of paired ratios; larger is better. None without a limit.
        peers: the same ratio against others, by their names.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    limit: Limit | None = None
    ratio: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The row with the keys that the design fixes."""
        return {"name": self.name, "unit": self.unit, "median": self.median, "low": self.low, "high": self.high,
                "limit": self.limit.as_json() if self.limit is not None else None, "ratio": self.ratio,
                "peers": dict(self.peers)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ResultRow:
        """A row that was written. Raises KeyError, TypeError or ValueError for what is none."""
        limit = row["limit"]
        return cls(str(row["name"]), str(row["unit"]), float(row["median"]), float(row["low"]), float(row["high"]),
                   None if limit is None else Limit(str(limit["name"]), float(limit["value"])),
                   None if row["ratio"] is None else float(row["ratio"]), {str(name): float(each) for name, each in row["peers"].items()})


def losses(rows: Sequence[ResultRow], baselines: Sequence[str]) -> list[str]:
    """In words, each row that is worse than one of the baselines, which are limits or peers whose names begin so."""
    found = []
    for row in rows:
        others = dict(row.peers)
        if row.limit is not None and row.ratio is not None:
            others = {row.limit.name: row.ratio} | others
        found += [f"{row.name} LOSES to {name}: {_less_than_one(ratio)}" for name, ratio in others.items()
                  if ratio < 1.0 and name.startswith(tuple(baselines))]
    return found


def _less_than_one(ratio: float) -> str:
    """With two digits, or as many more as it takes not to say 1."""
    return next(text for text in (f"{ratio:.{digits}f}" for digits in range(2, 17)) if float(text) < 1.0)


def throughput_row(name: str, measured: Interleaved, ours: str, limit: str, num_bytes: int,
                   peers: Mapping[str, str] | None = None) -> ResultRow:
    """A row in GB/s (10^9 bytes) out of interleaved times.

    Args:
        name: of the row.
        measured: times of turns that move ``num_bytes`` each.
        ours, limit: names of the two alternatives; the limit's name goes into the row.
        num_bytes: bytes per turn.
        peers: further alternatives to compare with: name in the row to name in ``measured``.
    """
    rate = measured.rate(ours, num_bytes / _GIGA)
    return ResultRow(name, "GB/s", rate.median, rate.low, rate.high,
                     Limit(limit, measured.rate(limit, num_bytes / _GIGA).median), measured.speed_ratio(ours, limit),
                     {peer: measured.speed_ratio(ours, timed) for peer, timed in (peers or {}).items()})


def spread_row(name: str, unit: str, spread: Spread) -> ResultRow:
    """A row without a limit."""
    return ResultRow(name, unit, spread.median, spread.low, spread.high)


def noise_row(name: str, measured: Interleaved, again: str, limit: str) -> ResultRow:
    """How far two measurements of the same thing differ, which no ratio is more exact than: ``again`` is the limit once more."""
    return spread_row(name, "x", measured.speed_ratios(again, limit))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, and the report as far as it had come."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


class Report:
    """Collects what a benchmark found, shows it and writes it.

    Args:
        title: above the table.
        config: how it was measured; plain values.
        directory: folder whose mount belongs to the machine's description; None where no file is involved.
        console: where the table goes; the standard output when None.

    Attributes:
        table: shown instead of the rows, by a benchmark whose rows say less than a table of its own.
        incomplete: it was ended before everything was measured.
        baselines: names of limits and peers that a user could have instead of the tier; where a row loses to one, a line says so.
    """

    def __init__(self, title: str, config: Mapping[str, object], directory: Path | None = None,
                 console: Console | None = None) -> None:
        self.title = title
        self.rows: list[ResultRow] = []
        self.notes: list[str] = []
        self.invalid: dict[str, str] = {}
        self.machine = describe_machine(directory)
        self.table: RenderableType | None = None
        self.incomplete = False
        self.baselines: tuple[str, ...] = ()
        self._config = dict(config)
        self._console = console if console is not None else Console()

    def say(self, text: str) -> None:
        """Print a line about what happens now. Never from inside a timed part."""
        self._console.print(Text(text))

    def show(self, table: RenderableType) -> None:
        """Print a further table."""
        print_whole(self._console, table)

    def note(self, text: str) -> None:
        """Keep a remark without which the figures would be misread; it stands below the table and in the JSON."""
        self.notes.append(text)

    def add(self, row: ResultRow) -> None:
        """Take a row in."""
        self.rows.append(row)

    def reject(self, name: str, reason: str) -> None:
        """A row's check failed: there is no figure, and the exit code says so."""
        self.invalid[name] = reason

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where the measuring is done: if it is interrupted after a row, what is raised is :class:`Interrupted` with this report."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if not self.rows:
                raise
            self.incomplete = True
            raise Interrupted(self) from interrupt

    def take(self, other: Report) -> None:
        """Everything that another report has found goes on in this one."""
        self.rows += other.rows
        self.notes += other.notes
        self.invalid |= other.invalid
        self.baselines = tuple(dict.fromkeys((*self.baselines, *other.baselines)))

    def as_json(self) -> dict[str, object]:
        """The whole report as plain values."""
        config: dict[str, object] = self._config | {"notes": list(self.notes),
                                 "invalid": [{"name": name, "reason": reason} for name, reason in self.invalid.items()]}
        if self.incomplete:
            config["incomplete"] = True
        if self.baselines:
            config["losses"] = losses(self.rows, self.baselines)
        return {"kvtier": kvtier.__version__, "machine": self.machine, "config": config,
                "results": [row.as_json() for row in self.rows]}

    def finish(self, json_file: Path | None) -> int:
        """Print the table, write the JSON and return the exit code: 1 when a row's check failed, else 0."""
        limits = limit_lines(self.rows) if self.table is None else []
        self.show(result_table(self.title, self.rows, self.invalid) if self.table is None else self.table)
        machine = machine_line(self.machine, self._config.get("compiled", False))
        for line in [machine, *limits, *self.notes, *losses(self.rows, self.baselines)]:
            self.say(line)
        return self.write(json_file)

    def write(self, json_file: Path | None) -> int:
        """Say which rows did not hold, write the JSON and return the exit code."""
        for name, reason in self.invalid.items():
            self.say(f"INVALID {name}: {reason}")
        if self.incomplete:
            self.say("INCOMPLETE: it was ended before everything was measured")
        if json_file is not None:
            write_json(json_file, self.as_json())
            self.say(f"wrote {json_file}")
        return CHECK_FAILED if self.invalid else FINE


def result_table(title: str, rows: Sequence[ResultRow], invalid: Mapping[str, str]) -> Table:
    """The rows as a table that fits 80 columns: the limit in the same line, and how much of it was reached."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("what", "median", "low-high", "limit", "ratio"):
        table.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row.name), f"{figure(row.median)} {row.unit}", f"{figure(row.low)}-{figure(row.high)}",
                      figure(row.limit.value) if row.limit is not None else "-",
                      f"{row.ratio:.2f}" if row.ratio is not None else "-")
        for peer, ratio in row.peers.items():
            table.add_row(Text(f"  against {peer}"), "", "", "", f"{ratio:.2f}")
    for name in invalid:
        table.add_row(Text(name), "INVALID", "", "", "")
    return table


def limit_lines(rows: Sequence[ResultRow]) -> list[str]:
    """What the limits in the table are: one line when they are all the same, else one for each row."""
    names = {row.name: row.limit.name for row in rows if row.limit is not None}
    if len(set(names.values())) == 1:
        return [f"limit: {next(iter(names.values()))}"]
    return [f"limit of {row}: {limit}" for row, limit in names.items()]


def describe_machine(directory: Path | None = None, root: Path = Path("/")) -> dict[str, object]:
    """What the figures depend on: CPU, memory, kernel (its number), GPU, and the mount of ``directory``. ``root`` is for tests."""
    machine: dict[str, object] = {
        "cpu": _cpu_model(root), "cores": usable_cpus(), "last_level_cache_bytes": last_level_cache_bytes(root),
        "memory_bytes": host_memory().total_bytes, "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(), "gpu": _gpu_model(root)}
    if directory is not None:
        kind, mount = mount_of(directory)
        machine |= {"directory": str(directory.resolve()), "mount": mount, "file_system": kind,
                    "free_disk_bytes": free_disk_bytes(directory)}
    return machine


def machine_line(machine: Mapping[str, object], compiled: object) -> str:
    """The machine in one line for people, and whether the compiled build was measured, or what of it."""
    build = f", compiled{'' if compiled is True else f' ({compiled})'}" if compiled else ""
    line = f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}, GPU: {machine['gpu']}{build}"
    if "mount" in machine:
        line += f"; {machine['file_system']} mounted at {machine['mount']}"
    return line


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache of the first CPU; 0 where the kernel does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = 0
    for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            found = max(found, int(text[:-1]) * units[text[-1]])
    return found


def size_name(num_bytes: int) -> str:
    """A block size as row names carry it: "2MiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def require_memory(what: str, num_bytes: int, remedy: str) -> None:
    """Check that a benchmark's buffers fit into what is free now.

    Raises:
        ConfigError: names what is wanted, what is available and ``remedy``.
    """
    memory = host_memory()
    if num_bytes > memory.available_bytes:
        raise ConfigError(f"{what} wants {format_bytes(num_bytes)} of host memory, available are "
                          f"{format_bytes(memory.available_bytes)} ({memory.limited_by}); {remedy}")


def check_writable(path: Path) -> None:
    """Make sure that ``write_json`` can write ``path``, before anything is measured. Changes nothing.

    Raises:
        ConfigError: it is a folder, or its folder is missing or cannot be written.
    """
    try:
        if str(path) == "-":
            raise ConfigError(f"{path}: the table goes to the standard output; name a file, or /dev/stdout for the figures after it")
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file for the figures")
        if _is_special(path):
            with open(path, "ab"):
                return
        partial = _partial_of(path)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        partial.unlink()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be written ({reason}); name a file in a folder that exists and that this user may "
                          "write to") from error


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a report as :func:`write_whole` does. ConfigError when it cannot be written."""
    write_whole(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all: a reader never meets half of one.

    What is no ordinary file (a terminal, a pipe) is written in place.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        partial = _partial_of(path)
        try:
            with open(partial, "xb") as file:
                file.write(content)
            os.replace(partial, path.resolve())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); free some space, or name another file") from error


def _is_special(path: Path) -> bool:
    """A device or pipe, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def _partial_of(path: Path) -> Path:
    """Where a report is written before it takes its name. A link stays a link: its target is replaced."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def _cpu_model(root: Path) -> str:
    """The CPU by the kernel's name for it; the architecture where it has none (some ARM machines)."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names and names[0] else platform.machine()


def _gpu_model(root: Path) -> str:
    """GPUs by the driver's own files: asking CUDA would need a working torch or cupy."""
    models = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        models += [value.strip() for key, _, value in (line.partition(":") for line in file.read_text().splitlines())
                   if key.strip() == "Model"]
    if models:
        return ", ".join(models)
    devices = len(list((root / "dev").glob("nvidia[0-9]*")))
    return f"{devices} NVIDIA device(s), model not known" if devices else "none"

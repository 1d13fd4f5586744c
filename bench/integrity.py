"""``kvtier bench integrity``: what crashes and damage cost, and that no wrong byte is served (design: NVMe rules).

The matrix: a process killed at each point of the write path and at any moment; one flipped bit in a block, a slot header, the
manifest and its log; a torn write; a misdirected write; a full drive. After each, the store is started again and every block
is read and compared.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.bench.build import compiled
from kvtier.bench.integrity_child import POINTS
from kvtier.bench.integrity_crash import ANY_MOMENT, CrashHistory
from kvtier.bench.integrity_damage import DamagedStore
from kvtier.bench.integrity_outcome import GEOMETRIES, Outcome
from kvtier.bench.measure import Spread
from kvtier.bench.nvme import working_folder
from kvtier.bench.report import Limit, Report, ResultRow, spread_row
from kvtier.errors import KVTierError
from kvtier.io.store_directory import expand

LEAST_KEPT: Final = 0.99
"""Of what had been committed, after a process was killed."""

_KILL: Final = "kill"
_LEGEND: Final = ("blocks: committed when it happened; lost: of these, those that are not served any more; again: blocks given up before "
                  "that are served again, with right bytes, since a rebuilt manifest cannot know; wrong: blocks served with wrong "
                  "bytes; start: median seconds until the store can serve (full-drive: until it stores again, by its own clock)")
_SEED: Final = 7


@dataclass(frozen=True)
class IntegrityPlan:
    """How often each thing is tried.

    Attributes:
        kills_per_point, kills_at_any_moment: processes that are killed.
        flips: flipped bits in each of block, header, manifest and log.
        writes: torn writes, and misdirected ones.
        full_drives: times that the drive is full.
    """

    kills_per_point: int
    kills_at_any_moment: int
    flips: int
    writes: int
    full_drives: int

    @classmethod
    def usual(cls, quick: bool) -> IntegrityPlan:
        """Five or ten of each, or 200 kills and 1,000 flipped bits."""
        return cls(5, 5, 10, 5, 5) if quick else cls(12, 200 - 12 * len(POINTS), 250, 100, 20)


@dataclass(frozen=True)
class Case:
    """A line of the matrix: its name and what became of its trials."""

    name: str
    outcomes: tuple[Outcome, ...]

    def total(self, what: Callable[[Outcome], int]) -> int:
        """The sum over the trials."""
        return sum(map(what, self.outcomes))

    def failure(self) -> str:
        """What must not have happened, in words; empty when all is well."""
        committed, lost = self.total(lambda one: one.committed), self.total(lambda one: one.lost)
        wrong, unexplained = self.total(lambda one: one.wrong), self.total(lambda one: one.unexplained)
        silent = self.total(lambda one: one.silent)
        # A header that does not match its row is damage, never routine: no kill may leave one behind.
        unfit = self.total(lambda one: 0 if one.rebuilt else one.quarantined)
        reasons = [f"{wrong} blocks were served with wrong bytes"] * (wrong > 0)
        reasons += [f"{unexplained} blocks were served that nobody could expect there"] * (unexplained > 0)
        reasons += [f"{silent} blocks vanished without a word"] * (silent > 0 and not self.name.startswith(_KILL))
        reasons += [f"{unfit} slots did not hold what the manifest says"] * (self.name.startswith(_KILL) and unfit > 0)
        reasons += [f"{lost} of {committed} committed blocks were lost"] * (
            self.name.startswith(_KILL) and lost > (1.0 - LEAST_KEPT) * committed)
        return "; ".join(reasons)

    def rows(self) -> Iterator[ResultRow]:
        """Its figures in the form of all benchmarks."""
        name = f"integrity/{self.name}"
        wrong = float(self.total(lambda one: one.wrong))
        yield ResultRow(f"{name}/wrong", "blocks", wrong, wrong, wrong, Limit("allowed", 0.0))
        yield spread_row(f"{name}/lost", "blocks", Spread.of([one.lost for one in self.outcomes]))
        yield spread_row(f"{name}/recover", "s", Spread.of([one.seconds for one in self.outcomes]))

    def as_json(self) -> dict[str, object]:
        """Its totals."""
        return {"name": self.name, "trials": len(self.outcomes), "rebuilt": self.total(lambda one: one.rebuilt),
                "committed": self.total(lambda one: one.committed), "lost": self.total(lambda one: one.lost),
                "silent": self.total(lambda one: one.silent), "wrong": self.total(lambda one: one.wrong),
                "unexplained": self.total(lambda one: one.unexplained), "came_back": self.total(lambda one: one.came_back),
                "quarantined": self.total(lambda one: one.quarantined)}


def measure_integrity(directory: Path | None = None, quick: bool = False, *, plan: IntegrityPlan | None = None) -> Report:
    """Try everything.

    Args:
        directory: a folder on the drive to work on; the current folder when None. What is written there is removed again.
        quick: five or ten of each, under a minute.
        plan: how often; the usual when None.

    Returns:
        A report that has not been printed, with the matrix as its table. Its config says under "invalid" where a wrong byte was served,
        damage shortened the index without a word, or a kill cost more than 1 %.

    Raises:
        ConfigError: the directory cannot be used.
    """
    plan = plan if plan is not None else IntegrityPlan.usual(quick)
    parent = expand(directory) if directory is not None else Path.cwd()
    config: dict[str, object] = {
        "command": "integrity", "quick": quick, "compiled": compiled(), "seed": _SEED, "kills_per_point": plan.kills_per_point,
        "kills_at_any_moment": plan.kills_at_any_moment, "flips": plan.flips, "writes": plan.writes,
        "full_drives": plan.full_drives, "block_bytes": [geometry.block_bytes for geometry in GEOMETRIES],
        "num_slots": [geometry.num_slots for geometry in GEOMETRIES], "sync": False}
    console = Console()
    cases: list[Case] = []
    invalid: dict[str, str] = {}
    with working_folder(parent) as folder, _quiet():
        for name, trial, count in _trials(folder, plan):
            if count == 0:
                continue
            console.print(Text(f"{name}, {count} times"))
            try:
                case = Case(name, tuple(trial() for _ in range(count)))
            except KVTierError as error:
                invalid[name] = str(error)
                continue
            cases.append(case)
            if case.failure():
                invalid[name] = case.failure()
    report = Report("kvtier bench integrity", config | {"matrix": [case.as_json() for case in cases]}, parent, console)
    for case in cases:
        for row in case.rows():
            report.add(row)
    for name, reason in invalid.items():
        report.reject(f"integrity/{name}", reason)
    report.note(_LEGEND)
    report.table = matrix(cases)
    return report


def matrix(cases: Sequence[Case]) -> Table:
    """One line for each case; fits 80 columns."""
    table = Table(title=Text("crashes and damage"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("case", "trials", "rebuilt", "blocks", "lost", "again", "wrong", "start"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for case in cases:
        totals = case.as_json()
        table.add_row(Text(case.name), *(str(totals[what]) for what in ("trials", "rebuilt", "committed", "lost", "came_back", "wrong")),
                      f"{Spread.of([one.seconds for one in case.outcomes]).median:.3g}")
    return table


def _trials(folder: Path, plan: IntegrityPlan) -> Iterator[tuple[str, Callable[[], Outcome], int]]:
    """Name, one trial, how often."""
    history = CrashHistory(folder / "killed", _SEED)
    for point in POINTS:
        yield f"{_KILL}/{point}", partial(history.kill, point), plan.kills_per_point
    yield f"{_KILL}/{ANY_MOMENT}", partial(history.kill, ANY_MOMENT), plan.kills_at_any_moment
    damaged = DamagedStore(folder, _SEED)
    yield "flip/payload", damaged.flip_in_payload, plan.flips
    yield "flip/header", damaged.flip_in_header, plan.flips
    yield "flip/index", damaged.flip_in_index, plan.flips
    yield "flip/log", damaged.flip_in_log, plan.flips
    yield "torn-write", damaged.torn_write, plan.writes
    yield "misdirected-write", damaged.misdirected_write, plan.writes
    yield "full-drive", damaged.no_room, plan.full_drives


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The store says aloud what is damaged: hundreds of lines here, which the matrix counts."""
    log = logging.getLogger("kvtier.io")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)

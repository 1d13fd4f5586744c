"""Two runs of a benchmark on the same machine, row by row: what has become worse beyond noise (``--compare``).

A row is worse or better when the ranges of both runs do not touch *and* the medians differ by more than 5 % of the larger one, or by more
than the limit differs from itself in one of the two runs (the row's ``noise``), whichever is more. Where both runs measured the row beside
one limit, its ratio to that must have moved the same way by as much: otherwise the machine was busier or freer, not the code slower or
faster. Ratios (unit x) are not judged: what they are made of is. Pure: documents in, a verdict for each row out.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.bench.report import ResultRow, figure
from kvtier.errors import ConfigError

LEAST_CHANGE: Final = 0.05
"""Of the larger median: a smaller change is none, however narrow the ranges."""

LARGER_IS_BETTER: Final = {"GB/s": True, "tokens/s": True, "tokens": True, "us": False, "us/block": False, "ms": False, "s": False,
                           "B": False, "blocks": False}
"""By unit; rows of other units are not judged."""

SAME_WORK: Final = ("quick", "device", "compiled", "direct_io")
"""Settings without which two figures of one name are figures of two things."""

_BOTH_ALIKE: Final = {"compiled": ": with the compiled build (make bench, or PYTHONPATH=build/compiled), or without it"}
"""How, where the setting does not say it by itself."""

_BY_LIBRARY_CALLS: Final = ("copy", "kernels")
"""Whose figures on a CPU are of library calls where they do not say whether they were compiled: there was nothing else then."""

_SAME_MACHINE: Final = ("cpu", "cores", "last_level_cache_bytes", "memory_bytes", "gpu", "file_system", "mount")
_MEMORY_SHARE: Final = 0.01  # the kernel takes a little more or less of it from start to start
_SOFTWARE: Final = ("kernel", "python")
_OUTCOMES: Final = frozenset({"notes", "invalid", "decisions", "matrix", "hit_tokens", "losses", "sections", "command"})  # no settings


class Verdict(enum.StrEnum):
    """What became of a row."""

    SAME = "same"
    BETTER = "better"
    WORSE = "WORSE"
    INVALID = "INVALID"
    NEW = "new"
    MISSING = "missing"
    MACHINE = "machine"
    NOT_JUDGED = "not judged"


MACHINE_MEANS: Final = ("machine: beside its limit, measured in the same run, the row is as it was, or moved the other way; so what "
                        "changed is how busy the machine was")
"""Below a table that has such rows."""


@dataclass(frozen=True)
class Figures:
    """One file of figures.

    Attributes:
        name: of the file, for messages.
        version: of kvtier.
        machine: as ``describe_machine`` says it.
        configs: settings by command: one benchmark's, or each one's of ``kvtier bench all``.
        rows: by name. invalid: reasons by name.
    """

    name: str
    version: str
    machine: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, ResultRow]
    invalid: Mapping[str, str]

    @classmethod
    def of(cls, document: Mapping[str, Any], name: str) -> Figures:
        """Raises ConfigError for a document that no benchmark has written."""
        try:
            config = document["config"]
            configs = config["sections"] if "sections" in config else {str(config["command"]): config}
            rows = [ResultRow.from_json(row) for row in document["results"]]
            return cls(name, str(document["kvtier"]), dict(document["machine"]), {key: dict(each) for key, each in configs.items()},
                       {row.name: row for row in rows}, {str(row["name"]): str(row["reason"]) for row in config.get("invalid", ())})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{name}: these are not figures of kvtier bench; name a file that "
                              "kvtier bench ... --json has written") from error

    def only(self, commands: Sequence[str]) -> Figures:
        """Of these benchmarks alone. ConfigError where there are none of them."""
        found = {command: config for command, config in self.configs.items() if command in commands}
        if not found:
            raise ConfigError(f"{self.name}: has figures of {', '.join(self.configs)}, none of {', '.join(commands)}; name a file of the "
                              "same benchmark")
        marks = tuple(f"{command}/" for command in found)
        return Figures(self.name, self.version, self.machine, found,
                       {name: row for name, row in self.rows.items() if name.startswith(marks)},
                       {name: reason for name, reason in self.invalid.items() if name.startswith(marks)})


@dataclass(frozen=True)
class Change:
    """What became of one row. ``old`` and ``new`` are None where there is no figure."""

    name: str
    old: ResultRow | None
    new: ResultRow | None
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All rows, and remarks about what else differs."""

    old: str
    changes: tuple[Change, ...]
    remarks: tuple[str, ...]

    @property
    def regressions(self) -> list[Change]:
        """Rows that became worse, or have no valid figure any more."""
        return [change for change in self.changes if change.verdict in (Verdict.WORSE, Verdict.INVALID)]

    def shown(self) -> Iterator[RenderableType]:
        """What a person reads: everything that is not as it was, as far as there is something, then a count of all, then the remarks."""
        changed = [change for change in self.changes if change.verdict not in (Verdict.SAME, Verdict.NOT_JUDGED)]
        if changed:
            yield self._table(changed)
        yield from map(Text, self.lines())

    def lines(self) -> Iterator[str]:
        """Below the table."""
        counts = {verdict: sum(change.verdict is verdict for change in self.changes) for verdict in Verdict}
        others = [f"{count} {verdict}" for verdict, count in counts.items() if count and verdict is not Verdict.SAME]
        rows = _rows(counts[Verdict.SAME])
        if len(self.changes) == counts[Verdict.SAME] + counts[Verdict.NOT_JUDGED]:
            yield ", ".join([f"compared with {self.old}: nothing differs beyond noise, over {rows}", *others])
        else:
            yield ", ".join([f"{rows} within noise", *others])
        if counts[Verdict.MACHINE]:
            yield MACHINE_MEANS
        yield from self.remarks

    def _table(self, changed: Sequence[Change]) -> Table:
        table = Table(title=Text(f"compared with {self.old}"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("what", "before", "now", "change", "limit", ""):
            table.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=True)
        for change in changed:
            old, new = change.old, change.new
            limits = "" if old is None or new is None or old.limit is None or new.limit is None else \
                _percent(old.limit.value, new.limit.value)
            table.add_row(Text(change.name), *("-" if row is None else f"{figure(row.median)} {row.unit}" for row in (old, new)),
                          _percent(old.median, new.median) if old is not None and new is not None else "", limits, change.verdict)
        return table


def compare(old: Figures, new: Figures) -> Comparison:
    """Each row of either run, in the order of the new one; rows that are gone come last.

    Raises:
        ConfigError: another machine, another benchmark, or settings under which one name means two things.
    """
    old = old.only(tuple(new.configs))
    new = new.only(tuple(old.configs))
    check_comparable(old, new)
    names = [*new.rows, *(name for name in new.invalid if name not in new.rows), *(name for name in old.rows if name not in new.rows
                                                                                  and name not in new.invalid)]
    return Comparison(old.name, tuple(Change(name, old.rows.get(name), new.rows.get(name), _verdict(name, old, new)) for name in names),
                      tuple(_remarks(old, new)))


def check_comparable(old: Figures, new: Figures) -> None:
    """Raise ConfigError unless both were measured on one machine and with settings that give the same meaning to a row."""
    machines = [f"{key} {old.machine[key]} there, {new.machine[key]} here" for key in _SAME_MACHINE
                if key in old.machine and key in new.machine and not _is_same(key, old.machine[key], new.machine[key])]
    if machines:
        raise ConfigError(f"{old.name} is of another machine than {new.name}: {'; '.join(machines)}. Figures of two machines do not "
                          "compare; measure both on one")
    for command, config in new.configs.items():
        before, now = _work(command, old.configs.get(command, {})), _work(command, config)
        for key in SAME_WORK:
            if key in before and key in now and before[key] != now[key]:
                raise ConfigError(f"{old.name}: {command} was measured with {key}={before[key]}, {new.name} with {key}={now[key]}; "
                                  f"measure both alike{_BOTH_ALIKE.get(key, '')}")


def judge(old: ResultRow, new: ResultRow, noise: float = 0.0) -> Verdict:
    """The rule above for one row; ``noise``: how far the limit was from itself, as a share."""
    larger_is_better = LARGER_IS_BETTER.get(old.unit)
    if larger_is_better is None or old.unit != new.unit:
        return Verdict.NOT_JUDGED
    least = max(LEAST_CHANGE, noise)
    is_apart = new.low > old.high or new.high < old.low
    if not is_apart or not _differ(old.median, new.median, least):
        return Verdict.SAME
    is_better = (new.median > old.median) is larger_is_better
    ratios = _ratios(old, new)
    if ratios is not None and not (_differ(*ratios, least) and (ratios[1] > ratios[0]) is is_better):
        return Verdict.MACHINE
    return Verdict.BETTER if is_better else Verdict.WORSE


def read_figures(path: Path) -> Figures:
    """A file that a benchmark has written. ConfigError where it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that kvtier bench ... --json has written") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); name a file that kvtier bench ... --json has written") from error
    return Figures.of(document, str(path))


def _work(command: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, with what those of an older kvtier do not say but can only have been."""
    is_known = command in _BY_LIBRARY_CALLS and config.get("device") == "cpu"
    return {"compiled": False, **config} if is_known else config


def _verdict(name: str, old: Figures, new: Figures) -> Verdict:
    before, now = old.rows.get(name), new.rows.get(name)
    if before is not None and now is not None:
        noises = [run.rows[f"{name}/noise"].median for run in (old, new) if f"{name}/noise" in run.rows]
        return judge(before, now, max((abs(1.0 - noise) for noise in noises), default=0.0))
    if now is not None:
        return Verdict.NEW
    # A point that did not hold takes all its rows along: "serve/vllm/none/1" those of "serve/vllm/none/1/...".
    return Verdict.INVALID if any(name == bad or name.startswith(f"{bad}/") for bad in new.invalid) else Verdict.MISSING


def _differ(old: float, new: float, least: float) -> bool:
    return abs(new - old) > least * max(abs(old), abs(new))


def _ratios(old: ResultRow, new: ResultRow) -> tuple[float, float] | None:
    """To the limit of both rows, larger is better; None where they were not measured beside the same one."""
    if old.limit is None or new.limit is None or old.limit.name != new.limit.name or old.ratio is None or new.ratio is None:
        return None
    return old.ratio, new.ratio


def _remarks(old: Figures, new: Figures) -> Iterator[str]:
    yield from (f"INVALID now, {name}: {reason}" for name, reason in new.invalid.items())
    yield from (f"was INVALID before, {name}: {reason}" for name, reason in old.invalid.items())
    changed = [("kvtier", old.version, new.version), *((key, old.machine.get(key), new.machine.get(key)) for key in _SOFTWARE)]
    for command, config in new.configs.items():
        before = old.configs.get(command, {})
        changed += [(f"{command}: {key}", before.get(key), config.get(key)) for key in dict.fromkeys((*before, *config))
                    if key not in _OUTCOMES]
    yield from (f"{what} was {_short(before)}, is {_short(now)}" for what, before, now in changed if before != now)


def _is_same(key: str, old: Any, new: Any) -> bool:
    if key == "memory_bytes" and isinstance(old, int) and isinstance(new, int):
        return abs(old - new) <= _MEMORY_SHARE * max(old, new)
    return bool(old == new)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _percent(old: float, new: float) -> str:
    return f"{100 * (new / old - 1):+.0f}%" if old else "-"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."

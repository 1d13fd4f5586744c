"""What every benchmark does with its figures: JSON, a picture, a comparison with an earlier run. Checked before anything is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import kvtier
from kvtier.bench.compare import Figures, check_comparable, compare, read_figures
from kvtier.bench.plot import check_plot, plot_report
from kvtier.bench.report import CHECK_FAILED, FINE, Interrupted, Report, check_writable, describe_machine
from kvtier.bench.whole_table import print_whole
from kvtier.io.direct_file import refuses_direct


@dataclass(frozen=True)
class Outputs:
    """Where figures go.

    Attributes:
        json_file: written as a whole; None writes none.
        plot_file: the picture, in a format that matplotlib writes.
        compare_with: the JSON of an earlier run on this machine.
    """

    json_file: Path | None = None
    plot_file: Path | None = None
    compare_with: Path | None = None

    def check(self, command: str, settings: Mapping[str, object], directory: Path | None = None) -> None:
        """Make sure, before minutes are spent, that everything can be done afterwards. Changes nothing.

        Args:
            command: the benchmark's name in its figures.
            settings: of the run that is about to begin, as far as its report will have them.
            directory: the folder that will be measured.

        Raises:
            ConfigError: a file that cannot be written, no matplotlib, figures that cannot be read or are of another machine.
        """
        if self.json_file is not None:
            check_writable(self.json_file)
        check_plot(self.plot_file)
        if self.compare_with is not None:
            old = read_figures(self.compare_with)
            commands = tuple(old.configs) if command == "all" else (command,)
            place = directory if directory is not None and directory.is_dir() else None  # a missing one is the benchmark's to refuse
            if place is not None and any("direct_io" in config for config in old.configs.values()):
                settings = {**settings, **_direct_io(place)}
            check_comparable(old.only(commands), Figures("this run", kvtier.__version__, describe_machine(place),
                                                         dict.fromkeys(commands, settings), {}, {}))

    def run(self, measure: Callable[[], Report]) -> int:
        """Measure and :meth:`finish`. What an interrupt leaves of a report is finished too before it goes on its way."""
        try:
            report = measure()
        except Interrupted as interrupt:
            self.finish(interrupt.report)
            raise
        return self.finish(report)

    def finish(self, report: Report, show: bool = True) -> int:
        """Show everything (unless that has been done) and write it. Returns the exit code: 1 when a row did not hold or has become worse,
        else 0."""
        old = None if self.compare_with is None else read_figures(self.compare_with)  # before it is written over, if it is the same file
        code = report.finish(self.json_file) if show else report.write(self.json_file)
        if self.plot_file is not None:
            self._draw(report)
        if old is None:
            return code
        comparison = compare(old, Figures.of(report.as_json(), "this run"))
        for part in comparison.shown():
            report.show(part)
        return CHECK_FAILED if comparison.regressions else code

    def of(self, part: str) -> Outputs:
        """For one benchmark of several: a picture of its own, ``NAME-part.svg``, and nothing else."""
        plot = self.plot_file
        return Outputs(plot_file=None if plot is None else plot.with_name(f"{plot.stem}-{part}{plot.suffix}"))

    def _draw(self, report: Report) -> None:
        assert self.plot_file is not None
        drawn = plot_report(self.plot_file, report.title, report.rows)
        report.say(f"wrote {self.plot_file}" if drawn else f"{self.plot_file} was not drawn: no row can be")


def _direct_io(directory: Path) -> dict[str, object]:
    """Whether it takes direct I/O, as a report will say it; nothing where the benchmark will say that the folder cannot be used."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as folder:
            return {"direct_io": refuses_direct(Path(folder)) is None}
    except OSError:
        return {}


def compare_files(old: Path, new: Path) -> int:
    """Show what became of each row between two files. Returns 1 where one has become worse, else 0; raises ConfigError as ``compare``."""
    comparison = compare(read_figures(old), read_figures(new))
    console = Console()
    for part in comparison.shown():
        print_whole(console, part)
    return CHECK_FAILED if comparison.regressions else FINE

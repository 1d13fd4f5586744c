"""Pictures of benchmark rows: throughput by block size, ours beside the limit (``--plot``). matplotlib draws them, and only then is
it needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.bench.report import ResultRow, check_writable
from kvtier.errors import ConfigError

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def check_plot(file: Path | None) -> None:
    """Make sure, before anything is measured, that ``plot_rows`` can draw.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {file}: matplotlib is not installed; pip install 'kvtier[bench]', or leave --plot out")
    check_writable(file)


def plot_rows(file: Path, title: str, rows: Sequence[ResultRow]) -> None:
    """Draw every row that is a throughput with a limit: one panel for each thing measured, block sizes from left to right.

    Args:
        file: the ending says the format (png, svg, pdf).
        title: above all panels.
        rows: named ``what/direction/SIZE[/variant]``; others are left out.

    Raises:
        ConfigError: there is nothing to draw, or matplotlib does not know the format.
    """
    # Without a display, and without leaving its choice of one behind in the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    panels = panels_of(rows)
    if not panels:
        raise ConfigError(f"--plot {file}: no row has a limit, so there is nothing to draw")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, (name, points) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        sizes = [size for size, _ in points]
        axes.errorbar(sizes, [row.median for _, row in points], marker="o", capsize=3, label="kvtier",
                      yerr=[[row.median - row.low for _, row in points], [row.high - row.median for _, row in points]])
        axes.plot(sizes, [row.limit.value for _, row in points if row.limit is not None], "k--", marker="_", label="limit")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_size_of(row.name)[1] for _, row in points])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_ylabel(points[0][1].unit)
        axes.set_title(name, fontsize=10)
        axes.legend(fontsize=8)
    try:
        figure.savefig(file)
    except ValueError as error:  # an ending that is no format
        raise ConfigError(f"--plot {file}: {error}") from error


def panels_of(rows: Sequence[ResultRow]) -> dict[str, list[tuple[int, ResultRow]]]:
    """(block bytes, row) by ascending size, for each name without its size."""
    panels: dict[str, list[tuple[int, ResultRow]]] = {}
    for row in rows:
        num_bytes, size = _size_of(row.name)
        if row.limit is not None and row.unit == "GB/s" and num_bytes:
            panels.setdefault("/".join(part for part in row.name.split("/") if part != size), []).append((num_bytes, row))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in panels.items()}


def _size_of(name: str) -> tuple[int, str]:
    """The block size in a row's name, in bytes and as it is written; (0, "") when there is none."""
    for part in name.split("/"):
        digits = part.rstrip("BKMi")
        if digits.isdigit() and part[len(digits):] in _UNITS:
            return int(digits) * _UNITS[part[len(digits):]], part
    return 0, ""

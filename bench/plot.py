"""Pictures of benchmark rows, ours beside the limit (``--plot``). matplotlib draws them, and only then is it needed.

Throughput over block sizes is a line for each thing measured; a served workload has bars by requests at once; everything else is one bar
for each row, a panel for each unit.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.bench.report import ResultRow, check_writable, write_whole
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_BAR_UNITS: Final = ("us", "us/block", "ms", "s", "GB/s", "tokens/s", "B", "blocks")


def check_plot(file: Path | None) -> None:
    """Make sure, before anything is measured, that a picture can be drawn there.

    Raises:
        ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {file}: matplotlib is not installed; pip install 'kvtier[bench]', or leave --plot out")
    from matplotlib.backend_bases import FigureCanvasBase
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {file}: {file.suffix or 'no ending'} is no format of matplotlib; use one of {', '.join(sorted(known))}")
    check_writable(file)


def plot_report(file: Path, title: str, rows: Sequence[ResultRow]) -> bool:
    """Draw what can be drawn of these rows, as a whole or not at all; False where that is nothing. The ending says the format."""
    from kvtier.bench.serve_plot import draw_serve, serve_panels
    panels, bars = panels_of(rows), bars_of(rows)
    served = serve_panels(rows)
    if not panels and not bars and not served:
        return False
    if served:
        figure = draw_serve(served)
    else:
        figure = new_figure(4.5 * 3, sum(_heights(panels, bars)))
        parts: Any = figure.subfigures(2, 1, height_ratios=_heights(panels, bars)) if panels and bars else (figure, figure)
        above, below = parts
        if panels:
            _draw_panels(above, panels)
        if bars:
            _draw_bars(below, bars)
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix[1:].lower())
    write_whole(file, picture.getvalue())
    return True


def new_figure(width: float, height: float) -> Figure:
    """Inches; without a display, and without leaving matplotlib's choice of one behind in the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels_of(rows: Sequence[ResultRow]) -> dict[str, list[tuple[int, ResultRow]]]:
    """Throughput with a limit, measured at two sizes or more: (block bytes, row) by ascending size, for each name without its size."""
    panels: dict[str, list[tuple[int, ResultRow]]] = {}
    for row in rows:
        num_bytes, size = _size_of(row.name)
        if row.limit is not None and row.unit == "GB/s" and num_bytes:
            panels.setdefault("/".join(part for part in row.name.split("/") if part != size), []).append((num_bytes, row))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in panels.items() if len(points) > 1}


def bars_of(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """By unit, rows that are in no line of :func:`panels_of`."""
    on_lines = {row.name for points in panels_of(rows).values() for _, row in points}
    return {unit: found for unit in _BAR_UNITS if (found := [row for row in rows if row.unit == unit and row.name not in on_lines])}


def _heights(panels: dict[str, Any], bars: dict[str, list[ResultRow]]) -> tuple[float, float]:
    return 3.2 * -(-len(panels) // 3), sum(1.2 + 0.22 * len(found) for found in bars.values())


def _draw_panels(figure: Any, panels: dict[str, list[tuple[int, ResultRow]]]) -> None:
    for number, (name, points) in enumerate(panels.items()):
        axes = figure.add_subplot(-(-len(panels) // 3), 3, number + 1)
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


def _draw_bars(figure: Any, bars: dict[str, list[ResultRow]]) -> None:
    """Medians from the top down, with their ranges; a black mark is the limit. Times span decades, so their scale is logarithmic."""
    all_axes = figure.subplots(len(bars), 1, height_ratios=[1.2 + 0.22 * len(found) for found in bars.values()], squeeze=False)
    for (unit, found), axes in zip(bars.items(), all_axes[:, 0], strict=True):
        places = range(len(found))
        axes.barh(places, [row.median for row in found], color="C0", capsize=2,
                  xerr=[[row.median - row.low for row in found], [row.high - row.median for row in found]])
        limits = [(place, row.limit.value) for place, row in zip(places, found, strict=True) if row.limit is not None]
        axes.plot([value for _, value in limits], [place for place, _ in limits], "k|", markersize=10)
        axes.set_yticks(list(places), [row.name for row in found], fontsize=7)
        axes.invert_yaxis()
        if unit not in ("GB/s", "tokens/s", "blocks") and min(row.low for row in found) > 0.0:
            axes.set_xscale("log")
        axes.set_xlabel(unit)


def _size_of(name: str) -> tuple[int, str]:
    """The block size in a row's name, in bytes and as it is written; (0, "") when there is none."""
    for part in name.split("/"):
        digits = part.rstrip("BKMi")
        if digits.isdigit() and part[len(digits):] in _UNITS:
            return int(digits) * _UNITS[part[len(digits):]], part
    return 0, ""

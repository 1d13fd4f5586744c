"""The picture of ``kvtier bench serve``: each figure with the tier beside the engine alone, by requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvtier.bench.plot import new_figure
from kvtier.bench.report import ResultRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN: Final = {"ttft_p50": "time to first token, median", "ttft_p90": "time to first token, 90 %", "throughput": "throughput"}


def draw_serve(panels: dict[tuple[str, str], list[tuple[int, ResultRow]]]) -> Figure:
    """A line of panels for each kind of point, one for each of ``SHOWN``; ``panels`` as :func:`serve_panels` finds them."""
    kinds = list(dict.fromkeys(kind for kind, _ in panels))
    picture = new_figure(4.2 * len(SHOWN), 3.0 * len(kinds))
    for (kind, figure), points in panels.items():
        axes = picture.add_subplot(len(kinds), len(SHOWN), kinds.index(kind) * len(SHOWN) + list(SHOWN).index(figure) + 1)
        places = range(len(points))
        found = [row for _, row in points]
        axes.bar([place - 0.2 for place in places], [row.limit.value for row in found if row.limit], 0.4, label="engine alone", color="0.7")
        axes.bar([place + 0.2 for place in places], [row.median for row in found], 0.4, label="with kvtier",
                 yerr=[[row.median - row.low for row in found], [row.high - row.median for row in found]], capsize=3)
        axes.set_xticks(list(places), [f"{at_once} at once" for at_once, _ in points])
        axes.set_ylabel(found[0].unit)
        axes.set_title(f"{kind}: {SHOWN[figure]}", fontsize=9)
        axes.legend(fontsize=7)
    return picture


def serve_panels(rows: Sequence[ResultRow]) -> dict[tuple[str, str], list[tuple[int, ResultRow]]]:
    """(requests at once, row) by kind of point and figure."""
    panels: dict[tuple[str, str], list[tuple[int, ResultRow]]] = {}
    for row in rows:
        parts = row.name.split("/")
        if len(parts) == 5 and parts[0] == "serve" and parts[4] in SHOWN and row.limit is not None:
            panels.setdefault((parts[2], parts[4]), []).append((int(parts[3]), row))
    return {key: sorted(points, key=lambda point: point[0]) for key, points in panels.items()}

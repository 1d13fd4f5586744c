"""The report of ``kvtier tune`` as one HTML page that needs nothing else, and the curve in it."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

from kvtier.bench.tune import Curve

_STYLE = ("body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
          "table{border-collapse:collapse;margin:1rem 0}td,th{border-bottom:1px solid #ccc;padding:.3rem .8rem;text-align:right}"
          "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}pre{background:#f4f4f4;padding:1rem;overflow:auto}")

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


def curve_picture(curve: Curve, block_bytes: int, marks: Sequence[tuple[str, int]]) -> str:
    """What is reused by capacity, as an SVG element.

    Args:
        marks: (name, blocks) of capacities to point out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [point.blocks * block_bytes / (1 << 30) for point in curve.points]
    lru = [100 * point.lru for point in curve.points]
    axes.plot(sizes, [100 * point.optimum for point in curve.points], "k--", label="optimum (knows the future)")
    axes.plot(sizes, lru, label="LRU")
    if curve.error:
        axes.fill_between(sizes, [value - 100 * curve.error for value in lru], [value + 100 * curve.error for value in lru], alpha=0.2)
    for number, (name, blocks) in enumerate(marks):
        axes.axvline(max(blocks, 1) * block_bytes / (1 << 30), color=f"C{number + 1}", linewidth=1, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, GiB")
    axes.set_ylabel("reused, % of input tokens")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    return text[text.index("<svg"):]


def page(title: str, sentences: Sequence[str], picture: str, tables: Sequence[tuple[str, Table]], config: str) -> str:
    """A whole page. Everything but ``picture`` is plain text."""
    parts = ['<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
             f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>",
             f"<body><h1>{html.escape(title)}</h1>", "<ul>", *(f"<li>{html.escape(text)}</li>" for text in sentences), "</ul>",
             "<h2>Reuse by capacity</h2>", picture]
    for heading, (names, rows) in tables:
        parts += [f"<h2>{html.escape(heading)}</h2><table><tr>", *(f"<th>{html.escape(name)}</th>" for name in names), "</tr>"]
        parts += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        parts.append("</table>")
    parts += ["<h2>Configuration</h2>", f"<pre>{html.escape(config)}</pre>", "</body></html>\n"]
    return "\n".join(parts)

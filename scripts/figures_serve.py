"""The table of ``kvtier bench serve`` for docs/performance.md: one line for each point, where the general table has one for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def serve_table(document: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown from what ``--json`` has written; rows that are not of a served point are left out.

    Each cell has the median with kvtier, that of the engine alone, and how many times as good that is in the same round.
    """
    points: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in document["results"]:
        parts = str(row["name"]).split("/", 4)
        if len(parts) == 5 and parts[0] == "serve":
            points.setdefault("/".join(parts[1:4]), {})[parts[4]] = row
    hits = document["config"].get("hit_tokens", {})
    heads = ("engine, point, at once", "throughput, tokens/s", "engine alone against itself", "first token, median, ms",
             "first token, 90 %, ms", "tokens from device, host, NVMe")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, rows in points.items():
        found = hits.get(f"serve/{name}", {})
        cells = [_against(rows.get("throughput")), _noise(rows.get("noise")), _against(rows.get("ttft_p50")),
                 _against(rows.get("ttft_p90")), ", ".join(str(found[level]) for level in ("device", "host", "nvme")) if found else ""]
        lines.append(f"| {name.replace('/', ', ')} | {' | '.join(cells)} |")
    return lines


def _against(row: Mapping[str, Any] | None) -> str:
    if row is None or row["limit"] is None or row["ratio"] is None:
        return ""
    others: Sequence[str] = [f"{name} x{ratio:.2f}" for name, ratio in row["peers"].items()]
    return f"{row['median']:.4g}, alone {row['limit']['value']:.4g}: x{row['ratio']:.3f}" + (f" ({', '.join(others)})" if others else "")


def _noise(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['low']:.3f} to {row['high']:.3f}"

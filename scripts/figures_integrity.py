"""The table of ``kvtier bench integrity`` for docs/performance.md: one line for each kind of crash and damage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integrity_table(document: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown from what ``--json`` has written: counts over all trials, and the median seconds until the store serves again."""
    seconds = {str(row["name"]).split("/", 1)[1]: row["median"] for row in document["results"]}
    heads = ("case", "trials", "blocks committed", "not served any more", "wrong bytes served", "manifests rebuilt", "seconds")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in document["config"].get("matrix", []):
        recovered = seconds.get(f"{case['name']}/recover")
        cells = (f"`{case['name']}`", *(str(case[key]) for key in ("trials", "committed", "lost", "wrong", "rebuilt")),
                 "" if recovered is None else f"{recovered:.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines

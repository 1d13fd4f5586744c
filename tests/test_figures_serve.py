"""The table of served points: one line for each, and nothing that was not measured."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

TABLE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "figures_serve.py"))["serve_table"]


def row(name: str, median: float, alone: float | None = None, **peers: float) -> dict[str, Any]:
    return {"name": name, "unit": "x", "median": median, "low": median - 0.1, "high": median + 0.1,
            "limit": None if alone is None else {"name": "engine alone", "value": alone},
            "ratio": None if alone is None else median / alone, "peers": peers}


def test_a_point_is_one_line_with_the_engine_alone_beside_it() -> None:
    rows = [row("serve/vllm/returning/4/throughput", 120.0, 100.0, recompute=1.5), row("serve/vllm/returning/4/noise", 1.0),
            row("serve/vllm/returning/4/ttft_p50", 50.0, 100.0), row("serve/vllm/returning/4/hit_tokens/host", 5.0),
            row("serve/vllm/none/1/throughput", 99.0, 100.0), row("copy/host/2MiB", 1.0)]
    hits = {"serve/vllm/returning/4": {"device": 1, "host": 2, "nvme": 3}}
    lines = TABLE({"results": rows, "config": {"hit_tokens": hits}})
    assert lines[2:] == [
        "| vllm, returning, 4 | 120, alone 100: x1.200 (recompute x1.50) | 0.900 to 1.100 | 50, alone 100: x0.500 |  | 1, 2, 3 |",
        "| vllm, none, 1 | 99, alone 100: x0.990 |  |  |  |  |"]
    assert {line.count("|") for line in lines} == {7}


def test_without_served_points_there_is_a_head_and_nothing_else() -> None:
    assert len(TABLE({"results": [], "config": {}})) == 2

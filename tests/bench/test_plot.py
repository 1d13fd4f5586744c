"""Pictures of benchmark rows: what belongs in them, and that a file comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.plot import check_plot, panels_of, plot_rows
from kvtier.bench.report import Limit, ResultRow
from kvtier.errors import ConfigError


def row(name: str, unit: str = "GB/s", limit: Limit | None = Limit("memcpy", 3.0)) -> ResultRow:
    return ResultRow(name, unit, 2.0, 1.5, 2.5, limit, 0.7)


ROWS = [row("copy/a->b/2MiB"), row("copy/a->b/256KiB"), row("copy/a->b/2MiB/scattered"), row("copy/a->b/2MiB/submit", "us/block", None),
        row("copy/a->b/2MiB/noise", "x", None), row("ledger/W1"), row("nvme/first-token", "s")]


def test_one_panel_for_each_thing_measured_with_its_sizes_in_order() -> None:
    assert {name: [num_bytes for num_bytes, _ in points] for name, points in panels_of(ROWS).items()} == {
        "copy/a->b": [256 << 10, 2 << 20], "copy/a->b/scattered": [2 << 20]}


def test_a_file_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="name a file in a folder that exists"):
        check_plot(tmp_path / "missing" / "plot.png")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{kind}"
    plot_rows(file, "title", ROWS)
    assert file.stat().st_size > 1000


def test_what_cannot_be_drawn_is_a_config_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_rows(tmp_path / "plot.png", "title", [row("ledger/W1")])
    with pytest.raises(ConfigError, match="nonsense"):
        plot_rows(tmp_path / "plot.nonsense", "title", ROWS)

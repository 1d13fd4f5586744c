"""Pictures of benchmark rows: what belongs in them, and that a file comes out, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.plot import bars_of, check_plot, panels_of, plot_report
from kvtier.bench.report import Limit, ResultRow
from kvtier.errors import ConfigError


def row(name: str, unit: str = "GB/s", limit: Limit | None = Limit("memcpy", 3.0)) -> ResultRow:
    return ResultRow(name, unit, 2.0, 1.5, 2.5, limit, 0.7)


ROWS = [row("copy/a->b/2MiB"), row("copy/a->b/256KiB"), row("copy/a->b/2MiB/scattered"), row("copy/a->b/2MiB/submit", "us/block", None),
        row("copy/a->b/2MiB/noise", "x", None), row("ledger/W1", "us"), row("nvme/first-token", "s")]


def test_what_has_several_sizes_is_a_line_with_its_sizes_in_order() -> None:
    assert {name: [num_bytes for num_bytes, _ in points] for name, points in panels_of(ROWS).items()} == {"copy/a->b": [256 << 10, 2 << 20]}


def test_everything_else_but_ratios_is_a_bar_among_those_of_its_unit() -> None:
    assert {unit: [each.name for each in found] for unit, found in bars_of(ROWS).items()} == {
        "us": ["ledger/W1"], "us/block": ["copy/a->b/2MiB/submit"], "s": ["nvme/first-token"], "GB/s": ["copy/a->b/2MiB/scattered"]}


def test_a_file_that_cannot_be_written_or_has_no_format_is_refused_early(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="name a file in a folder that exists"):
        check_plot(tmp_path / "missing" / "plot.png")
    for name in ("plot.nonsense", "plot"):
        with pytest.raises(ConfigError, match=r"is no format of matplotlib; use one of .*png"):
            check_plot(tmp_path / name)
    check_plot(tmp_path / "plot.SVG")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[5:], [row("serve/vllm/none/4/throughput", "tokens/s")]],
                         ids=["both", "lines", "bars", "served"])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, kind: str, rows: list[ResultRow]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{kind}"
    assert plot_report(file, "title", rows)
    assert file.stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_to_draw_leaves_an_older_picture_alone(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    file.write_text("older")
    assert not plot_report(file, "title", [row("copy/noise", "x")])
    assert file.read_text() == "older"

"""On a console that is too narrow a table keeps its figures."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.bench.replay_report import ReplayOptions, run_replay
from kvtier.bench.trace_synthetic import write_synthetic
from kvtier.bench.whole_table import print_whole


def table() -> Table:
    made = Table("a long heading", "figures")
    made.add_row("serve/vllm/returning/16/throughput", "1,234.56 tokens/s")
    return made


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_cell_is_cut_short(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_whole(console, table())
    said = console.export_text()
    assert "serve/vllm/returning/16/throughput" in said
    assert "1,234.56 tokens/s" in said
    assert "…" not in said


def test_text_is_broken_into_lines_as_ever() -> None:
    console = Console(width=10, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_whole(console, Text("one two three four"))
    assert console.export_text().splitlines() == ["one two ", "three four"]


def test_a_replays_figures_are_whole_in_forty_columns(tmp_path_factory: pytest.TempPathFactory) -> None:
    trace = tmp_path_factory.mktemp("trace") / "chats.jsonl"
    write_synthetic(trace, "chats", 60)
    said = []
    for width in (40, 200):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        run_replay(ReplayOptions(trace, "20 blocks", "30 blocks"), console)
        said.append({line.split()[0]: line.split() for line in console.export_text().splitlines() if line.startswith(" ") and line.strip()})
    assert said[0] == said[1]
    assert {"primary", "secondary"} <= set(said[0])

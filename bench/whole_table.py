"""Tables on a terminal that is too narrow, or in a pipe, which counts as one of 80 columns: no cell is cut short."""

from __future__ import annotations

from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

_WIDEST: Final = 10_000


def print_whole(console: Console, shown: RenderableType) -> None:
    """Print something. A table is as wide as what it holds: where that is too wide the terminal breaks its lines, but every figure is
    there."""
    console.print(_Whole(shown) if isinstance(shown, Table) else shown, crop=False)


class _Whole:
    """A table that does not fit itself to the console."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = console.measure(self._table, options=options.update(width=_WIDEST)).maximum
        yield from console.render(self._table, options.update(width=max(options.max_width, needed)))

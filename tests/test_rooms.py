"""The house: imports only go down the table of rooms, ``import kvtier`` is light, and a file is one idea."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUND = {"errors", "types"}
MAY_IMPORT = {
    "policies": set(), "pools": set(), "kernels": {"pools"}, "io": {"pools", "kernels"},
    "tiering": {"policies", "pools", "kernels", "io"}, "bench": {"policies", "pools", "kernels", "io", "tiering"},
}
MODULES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
LONGEST = 490  # "about 450": a file that grows past this is two ideas, demo texts aside


def imported(path: Path) -> set[str]:
    """First name below ``kvtier`` of each import, wherever in the file it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "kvtier" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("kvtier.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down_the_table_of_rooms(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[room] | GROUND | {room} | ({"__version__"} if room in ("bench", "tiering") else set())
    assert imported(path) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_the_ledger_uses_no_torch_file_thread_or_lock() -> None:
    for path in [*(ROOT / "tiering" / "ledger").glob("*.py"), *(ROOT / "policies").glob("*.py")]:
        names = {alias.name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)
                 for alias in node.names}
        names |= {node.module.split(".")[0] for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.ImportFrom) and node.module}
        assert not names & {"torch", "numpy", "threading", "asyncio", "os", "pathlib", "io", "sqlite3", "time"}, path

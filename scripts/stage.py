"""Lay the rooms out under their package path, so that mypy and mypyc see ``kvtier.io`` and not the standard library's ``io``.

``build/typed/kvtier`` has a symbolic link for each room, for ``make types``. ``build/pure/kvtier`` has the pure modules
alone, for the compiled build: mypyc then need not read torch, and an import of anything that is not pure is an error.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOMS = ("tiering", "pools", "kernels", "io", "policies", "bench")

COMPILED = ("pools/pool_index.py", "pools/sequence_blocks.py", "policies/*.py", "tiering/ledger/*.py")
"""The modules that import neither torch nor io and start no thread."""

INTERPRETED = ("policies/retention.py",)
"""Pure too, but users make these dataclasses: compiled code would take a bool for an int and answer a wrong type with TypeError."""

BESIDE_COMPILED = ("errors.py", "types.py")
"""What they import and what stays interpreted, from the front door."""


def stage(root: Path) -> Path:
    """Create ``build/typed`` under ``root`` and return it."""
    package = root / "build" / "typed" / "kvtier"
    package.mkdir(parents=True, exist_ok=True)
    front_door = [path for path in (root / "src" / "kvtier").iterdir() if path.name != "__pycache__"]
    for name, target in ({room: root / room for room in ROOMS} | {path.name: path for path in front_door}).items():
        link = package / name
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return package.parent


def stage_pure(root: Path) -> list[Path]:
    """Create ``build/pure`` anew under ``root`` and return the modules to compile, without the ``__init__`` files."""
    package = root / "build" / "pure" / "kvtier"
    shutil.rmtree(package, ignore_errors=True)
    sources = {path.relative_to(root): path for pattern in COMPILED for path in sorted(root.glob(pattern))}
    for folder in {parent for relative in sources for parent in relative.parents if parent.name}:
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in BESIDE_COMPILED:
        (package / name).symlink_to(root / "src" / "kvtier" / name)
    modules = [relative for relative in sources if relative.name != "__init__.py"]
    for relative in modules:
        (package / relative).symlink_to(sources[relative])
    return [package / relative for relative in modules if relative.as_posix() not in INTERPRETED]


if __name__ == "__main__":
    print(stage(Path(__file__).resolve().parent.parent))

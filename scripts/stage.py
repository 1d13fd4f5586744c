"""Lay the rooms out under their package path, so that mypy and mypyc see ``kvtier.io`` and not the standard library's ``io``.

Makes ``build/typed/kvtier`` with a symbolic link for each room. Used by ``make types`` and by the compiled build.
"""

from __future__ import annotations

from pathlib import Path

ROOMS = ("tiering", "pools", "kernels", "io", "policies", "bench")


def stage(root: Path) -> Path:
    """Create the staging folder under ``root`` and return it."""
    package = root / "build" / "typed" / "kvtier"
    package.mkdir(parents=True, exist_ok=True)
    links = {room: root / room for room in ROOMS} | {path.name: path for path in (root / "src" / "kvtier").iterdir() if path.name != "__pycache__"}
    for name, target in links.items():
        link = package / name
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return package.parent


if __name__ == "__main__":
    print(stage(Path(__file__).resolve().parent.parent))

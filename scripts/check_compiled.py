"""Check that a compiled build is one: each pure module, and what is written in C, comes out of the folder given as an extension module.

Usage: PYTHONPATH=build/compiled python scripts/check_compiled.py build/compiled
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from stage import INTERPRETED

FOLDERS = ("kvtier/policies", "kvtier/tiering/ledger")
MODULES = ("kvtier.pools.pool_index", "kvtier.kernels.host_copy")


def main(folder: Path) -> int:
    names = [*MODULES, *(f"{part.replace('/', '.')}.{path.stem}" for part in FOLDERS
                         for path in sorted((folder / part).glob("*.py")) if path.stem != "__init__"
                         and f"{part.removeprefix('kvtier/')}/{path.name}" not in INTERPRETED)]
    wrong = 0
    for name in names:
        file = Path(str(importlib.import_module(name).__file__)).resolve()
        if file.suffix != ".so" or folder not in file.parents:
            print(f"not compiled: {name} comes from {file}", file=sys.stderr)
            wrong += 1
    print(f"{len(names) - wrong} of {len(names)} modules are compiled")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))

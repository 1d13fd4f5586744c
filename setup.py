"""Build script: pure Python unless ``KVTIER_COMPILE=1``, which compiles the pure rooms with mypyc, and the one module in C. All else is in
pyproject.toml.

mypyc takes a module's name from the folders above it, and the rooms lie at the top of the repository: they are staged under
their package path first (scripts/stage.py), otherwise the extensions would land outside ``kvtier``.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """The extension modules to build: none unless asked for."""
    if os.environ.get("KVTIER_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    root = Path(__file__).resolve().parent
    modules = runpy.run_path(str(root / "scripts" / "stage.py"))["stage_pure"](root)
    compiled = mypycify([str(module.relative_to(root)) for module in modules], target_dir=str(root / "build" / "mypyc"))
    return [*compiled, Extension("kvtier.kernels.host_copy", ["kernels/host_copy.c"])]


setup(ext_modules=extensions())

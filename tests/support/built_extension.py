"""The module in C, also where the plain build is tested: from the compiled build, or built for the tests by the machine's compiler."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "kvtier.kernels.host_copy"


def c_compiler(header: str, *options: str) -> str:
    """The machine's compiler. Skips the test where there is none, or it does not find this header."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    tried = subprocess.run([compiler, *options, "-fsyntax-only", "-x", "c", "-"], input=f"#include <{header}>\n", capture_output=True,
                           text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"the C compiler does not find {header}, or what that needs (Debian: libc6-dev, python3-dev): {tried.stderr[-300:]}")
    return compiler


@cache
def host_copy() -> ModuleType:
    """``kvtier.kernels.host_copy``. Skips the test where it is not compiled and cannot be."""
    try:
        return importlib.import_module(NAME)
    except ImportError:
        pass
    headers = f"-I{sysconfig.get_path('include')}"
    compiler = c_compiler("Python.h", headers)
    with TemporaryDirectory() as folder:
        library = Path(folder) / f"host_copy{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", headers, "-o", library, ROOT / "kernels" / "host_copy.c"],
                       check=True, timeout=60)
        spec = importlib.util.spec_from_file_location(NAME, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

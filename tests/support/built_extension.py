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


@cache
def host_copy() -> ModuleType:
    """``kvtier.kernels.host_copy``. Skips the test where it is not compiled and cannot be."""
    try:
        return importlib.import_module(NAME)
    except ImportError:
        pass
    compiler, headers = shutil.which("cc") or shutil.which("gcc"), sysconfig.get_path("include")
    if compiler is None or not Path(headers, "Python.h").exists():
        pytest.skip("no C compiler, or no Python headers")
    with TemporaryDirectory() as folder:
        library = Path(folder) / f"host_copy{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", f"-I{headers}", "-o", library,
                        ROOT / "kernels" / "host_copy.c"], check=True, timeout=60)
        spec = importlib.util.spec_from_file_location(NAME, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

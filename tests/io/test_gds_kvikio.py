"""The real KvikIO on host buffers, where there is no GPU: its own reads and writes, not GPUDirect.

A stand-in for the CUDA driver is compiled and put where KvikIO looks for it, in a process of its own, which runs
``nvme/kvikio_checks.py`` and ``../tiering/kvikio_checks.py``. Without kvikio (``make venv`` installs it) or a C compiler it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from built_extension import c_compiler

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def host_kvikio_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the real KvikIO moves host buffers."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed; make venv installs it, for this test without its CUDA libraries")
    compiler = c_compiler("stdlib.h")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"),
                    str(HERE / "libcuda_stand_in.c")], check=True, timeout=60)
    # Never another mode: with OFF cuFile's driver spins for ever where there is no GPU.
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "KVIKIO_COMPAT_MODE": "ON", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_the_real_kvikio_moves_blocks_between_slabs_and_host_buffers(host_kvikio_environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "nvme" / "kvikio_checks.py"),
                           str(HERE.parent / "tiering" / "kvikio_checks.py")],
                          env=host_kvikio_environment, capture_output=True, text=True, timeout=240, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "9 passed" in done.stdout

"""The write path's Triton kernels without a GPU: interpreted, they leave the bytes of the torch paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")


def test_interpreted_they_leave_the_same_bytes_as_the_torch_paths():
    """In a process of its own: the interpreter has to be chosen before triton is imported."""
    script = Path(__file__).with_name("interpreted_write.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.removesuffix(": same").split()[0] for line in done.stdout.splitlines()]
    assert {name: names.count(name) for name in names} == {
        "append": 10, "fused": 7, "value": 9, "scatter": 2, "copy": 4, "offsets": 4, "gather": 4, "nvfp4": 5,
    }

"""The Triton append without a GPU: interpreted against the torch path, compiled for every GPU we support."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from kvtier.kernels import compile_check
from kvtier.kernels.dispatch import kernel_paths


@pytest.fixture(autouse=True)
def fresh_triton_cache(tmp_path, monkeypatch):
    """Kernels are compiled here, not taken from an earlier run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_interpreted_it_leaves_the_same_bytes_as_the_torch_path():
    script = Path(__file__).with_name("interpreted_append.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": same") == 5


def test_it_compiles_for_every_gpu_without_spilling():
    results = list(compile_check.compile_all())
    assert {result.architecture for result in results} == {80, 90, 100}
    assert len(results) == 27
    for result in results:
        assert result.error is None, str(result)
        assert result.cubin_bytes > 0
        assert result.registers is not None
        assert result.registers > 0
        assert result.spilled_bytes == 0


def test_no_offset_is_multiplied_in_32_bits():
    """Triton passes a stride below 2**31 as 32 bits; page * stride would then overflow in a pool of a few GiB."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvtier.kernels.triton_append import compile_cases

    case = next(compile_cases())
    signature = {name: "i32" if kind == "i64" else kind for name, kind in case.signature.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants))
    products = re.findall(r"arith\.muli .*: (\S+)", triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"])
    assert len(products) > 5
    assert [product for product in products if "i32" in product] == []


def test_the_check_prints_a_line_per_kernel_and_gpu(capsys):
    assert compile_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 27
    assert all(re.search(r"^(append|checksum|rows)/\S+ +sm_\d+ +ok: \d+ registers, 0 bytes spilled", line) for line in lines)


def test_the_check_fails_when_a_kernel_does_not_compile(capsys, monkeypatch):
    from kvtier.kernels import triton_append

    good = next(triton_append.compile_cases())
    monkeypatch.setattr(triton_append, "compile_cases", lambda: [replace(good, signature=dict(good.signature) | {"positions": "i32"})])
    assert compile_check.main() == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_check_refuses_to_run_interpreted(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_check.main() == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_the_check_says_when_triton_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(compile_check.importlib.util, "find_spec", lambda name: None)
    assert compile_check.main() == 2
    assert "triton is not installed" in capsys.readouterr().err


def test_a_cuda_pool_is_written_by_the_triton_kernel_and_a_cpu_pool_is_not():
    assert kernel_paths("cuda").append.__module__ == "kvtier.kernels.triton_append"
    assert kernel_paths("cpu").append.__module__ == "kvtier.kernels.append"


def test_the_kernels_are_imported_without_triton():
    code = """
import sys
from kvtier.kernels.dispatch import kernel_paths
kernel_paths("cpu")
assert "kvtier.kernels.triton_append" not in sys.modules
assert "triton.language" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""The Triton attention kernels without a GPU: interpreted against plain float64. What they compile to: test_compile_check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from kvtier.kernels.dispatch import kernel_paths


def test_interpreted_they_are_attention():
    script = Path(__file__).with_name("interpreted_attention.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": agrees") == 21


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Triton's own form of a case, by name, with numbers of 64 bits as these."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvtier.kernels import triton_decode, triton_prefill

    def compile_case(name, whole="i64"):
        case = next(case for case in (*triton_decode.compile_cases(), *triton_prefill.compile_cases()) if case.name == name)
        signature = {name: whole if kind == "i64" else kind for name, kind in case.signature.items()}
        source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants))
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(case.options)).asm["ttir"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return compile_case


@pytest.mark.parametrize("name", ["decode/fp16/71x64/window", "prefill/bf16/71x64/drafts"])
def test_no_stride_is_multiplied_in_32_bits(compiled, name):
    """Triton passes a stride below 2**31 as 32 bits; page * stride would then overflow in a pool of a few GiB."""
    body = compiled(name, "i32").partition("{")[2].splitlines()
    uses = [line for line in body if re.search(r"= .*%\w+_stride\b", line)]
    assert len(uses) > 8
    assert [line for line in uses if "arith.extsi" not in line] == []


def test_a_score_that_is_not_a_number_is_none_under_a_cap(compiled):
    """A GPU takes the smaller of two numbers for the one that is a number; the interpreter does not."""
    found = compiled("decode/fp16/71x64/window")
    assert "arith.minimumf" in found
    assert "arith.minnumf" not in found


def test_a_cuda_pool_is_read_by_the_triton_kernels_and_a_cpu_pool_is_not():
    cuda, cpu = kernel_paths("cuda"), kernel_paths("cpu")
    assert (cuda.decode.__module__, cuda.prefill.__module__) == ("kvtier.kernels.triton_decode", "kvtier.kernels.triton_prefill")
    assert (cpu.decode.__module__, cpu.prefill.__module__) == ("kvtier.kernels.decode_cpu", "kvtier.kernels.prefill_cpu")

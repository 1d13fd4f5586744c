"""Triton kernels without a GPU: compiled for every one that we support, and imported by none that has no use for them."""

from __future__ import annotations

import importlib
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


def cases():
    return [case for module in compile_check._TRITON_MODULES for case in importlib.import_module(module).compile_cases()]


def assert_compiled_without_spilling(results):
    for result in results:
        assert result.error is None, str(result)
        assert result.cubin_bytes > 0
        assert result.registers is not None
        assert result.registers > 0
        assert result.spilled_bytes == 0, str(result)


def test_every_kernel_compiles_without_spilling():
    """One case of each, for each GPU in turn; ``python -m kvtier.kernels.compile_check`` does all, and so does CI."""
    tried = list({case.kernel: case for case in cases()}.values())
    assert_compiled_without_spilling(compile_check.compile_case(case, case.architectures[number % len(case.architectures)])
                                     for number, case in enumerate(tried))


@pytest.mark.slow
def test_every_kernel_compiles_for_every_gpu_without_spilling():
    results = list(compile_check.compile_all())
    assert {result.architecture for result in results} == {80, 90, 100}
    assert_compiled_without_spilling(results)


def test_every_module_with_a_kernel_is_compiled_and_every_kernel_for_every_gpu():
    """A kernel with two variants, with and without the e4m3 instructions of newer GPUs, has a case for each."""
    folder = Path(compile_check.__file__).parent
    kernels = {path.stem for path in folder.glob("triton_*.py") if "def compile_cases" in path.read_text()}
    assert {name.removeprefix("kvtier.kernels.") for name in compile_check._TRITON_MODULES} == kernels
    compiled = {id(case.kernel) for case in cases()}
    for path in folder.glob("triton_*.py"):
        for name, kernel in vars(importlib.import_module(f"kvtier.kernels.{path.stem}")).items():
            assert not name.endswith("_kernel") or name.startswith("_") or id(kernel) in compiled, f"{path.stem}.{name}"
    architectures = {}
    for case in cases():
        architectures.setdefault(case.kernel, set()).update(case.architectures)
        assert not (case.constants.get("NATIVE") and 80 in case.architectures), case.name
    assert all(found == {80, 90, 100} for found in architectures.values())


@pytest.mark.parametrize("name", ["triton_append", "triton_block_offsets", "triton_fused_write", "triton_nvfp4", "triton_partial_copy",
                                  "triton_scatter", "triton_value_tail"])
def test_a_kernel_is_not_compiled_anew_for_another_batch_or_layer(name):
    for case in importlib.import_module(f"kvtier.kernels.{name}").compile_cases():
        numbers = [argument for argument, kind in case.signature.items() if kind in ("i32", "i64")]
        counts = [argument for argument in numbers if not argument.endswith("_stride")]
        assert counts, case.name
        assert set(counts) <= set(case.kernel.do_not_specialize), case.name


@pytest.mark.parametrize("name", ["append/nvfp4/8x128", "append/bf16/1x512+64", "value_tail/bf16/8x128", "fused_write/nvfp4/32+8x128",
                                  "indexer_scatter/128", "gather/bf16/8x128", "partial_copy/i16/128", "block_offsets/scratch"])
def test_no_offset_is_multiplied_in_32_bits(name):
    """Triton passes a stride below 2**31 as 32 bits; page * stride would then overflow in a pool of a few GiB."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = next(case for case in cases() if case.name == name and 90 in case.architectures)
    signature = {name: "i32" if kind == "i64" else kind for name, kind in case.signature.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants))
    products = re.findall(r"arith\.muli .*: (\S+)", triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"])
    assert len(products) > 3
    assert [product for product in products if "i32" in product] == []


def test_the_check_prints_a_line_per_kernel_and_gpu(capsys, monkeypatch):
    monkeypatch.setattr(compile_check, "_TRITON_MODULES", ("kvtier.kernels.triton_checksum",))
    assert compile_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(re.search(r"^checksum/\S+ +sm_\d+ +ok: \d+ registers, 0 bytes spilled", line) for line in lines)


def test_the_check_fails_when_a_kernel_does_not_compile(capsys, monkeypatch):
    from kvtier.kernels import triton_append

    good = next(triton_append.compile_cases())
    monkeypatch.setattr(compile_check, "_TRITON_MODULES", ("kvtier.kernels.triton_append",))
    monkeypatch.setattr(triton_append, "compile_cases", lambda: [replace(good, signature=dict(good.signature) | {"positions": "i32"})])
    assert compile_check.main() == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_kernel_that_wants_more_shared_memory_than_there_is_fails(monkeypatch):
    """It compiles all the same, and Triton would say so at its first launch."""
    case = next(case for case in cases() if case.name == "decode/join/bf16/128")
    good = compile_check.compile_case(case, 90)
    assert good.error is None
    monkeypatch.setitem(compile_check.SHARED_BYTES, 90, good.shared_bytes - 1)
    assert f"{good.shared_bytes} bytes of shared memory: there are {good.shared_bytes - 1}" in str(compile_check.compile_case(case, 90))


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

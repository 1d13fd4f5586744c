"""What Triton is told at a launch, as it would be on a GPU. The interpreter knows nothing of it, and ``compile_check`` supposes it."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from launches import binder_of

from kvtier.kernels import compile_check


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def kernels():
    found = {case.kernel: case.name for module in compile_check._TRITON_MODULES for case in importlib.import_module(module).compile_cases()}
    return [pytest.param(kernel, id=name) for kernel, name in found.items() if any(name.endswith("_stride") for name in kernel.arg_names)]


def types_of(kernel, stride):
    """Of the strides that are specialised, when all of them are ``stride``."""
    arguments = [stride if name.endswith("_stride") else 2 for name in kernel.arg_names]
    _, specialised, _ = binder_of(kernel)(*arguments)
    return {kind for name, (kind, _) in zip(kernel.arg_names, specialised, strict=True)
            if name.endswith("_stride") and name not in kernel.do_not_specialize}


@pytest.mark.parametrize("kernel", kernels())
def test_a_stride_is_taken_for_what_it_is(kernel):
    """Annotated as ``int``, it would be cut to 32 bits, which is another address in a large layer-first pool; and one that is 1 would not
    be known, so that numbers were loaded one by one, which no GPU's memory is made for."""
    assert types_of(kernel, 2**31) <= {"i64"}
    assert types_of(kernel, 1) <= {"constexpr"}

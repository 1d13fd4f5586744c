"""``python -m kvtier.kernels.compile_check``: compile every Triton kernel for every GPU we support, without a GPU.

Prints a line for each kernel and architecture with what ptxas says about registers and spills. Exit code 0 when all of them
compile, 1 when one fails, 2 when it cannot be done here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may have at most, by architecture. Triton finds out when a kernel is launched for the first time."""

ARCHITECTURES: Final = tuple(SHARED_BYTES)
"""A100, H100 and H200, B200."""

_TRITON_MODULES: Final = (
    "kvtier.kernels.triton_append",
    "kvtier.kernels.triton_block_offsets",
    "kvtier.kernels.triton_checksum",
    "kvtier.kernels.triton_decode",
    "kvtier.kernels.triton_fused_write",
    "kvtier.kernels.triton_gather",
    "kvtier.kernels.triton_nvfp4",
    "kvtier.kernels.triton_partial_copy",
    "kvtier.kernels.triton_prefill",
    "kvtier.kernels.triton_row_moves",
    "kvtier.kernels.triton_scatter",
    "kvtier.kernels.triton_value_tail",
)


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types and constants it is launched with."""

    name: str
    kernel: object                        #: what ``triton.jit`` returned
    signature: Mapping[str, str]          #: argument name to Triton's type name ("*bf16", "i64", "constexpr")
    constants: Mapping[str, int | bool]   #: value of every constexpr
    architectures: tuple[int, ...] = ARCHITECTURES  #: those it is for: below sm_89 there are no instructions for e4m3
    aligned: frozenset[str] = frozenset() #: arguments that are multiples of 16, which Triton sees at the launch and loads wider then
    options: Mapping[str, int] = field(default_factory=dict)   #: of the launch: "num_warps", "num_stages"


@dataclass(frozen=True)
class CompileResult:
    """How one case fared on one architecture. ``error`` is None when it compiled."""

    name: str
    architecture: int
    cubin_bytes: int = 0
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int = 0
    error: str | None = None

    def __str__(self) -> str:
        place = f"{self.name:28} sm_{self.architecture:<4}"
        if self.error is not None:
            return f"{place}FAILED: {self.error}"
        usage = "registers not known" if self.registers is None else f"{self.registers} registers, {self.spilled_bytes} bytes spilled"
        return f"{place}ok: {usage}, {self.shared_bytes} bytes shared, cubin of {self.cubin_bytes} bytes"


def compile_all(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[CompileResult]:
    """Compile every case for every architecture; a failure is a result, not an exception."""
    for module in _TRITON_MODULES:
        for case in importlib.import_module(module).compile_cases():
            for architecture in sorted(set(architectures) & set(case.architectures)):
                yield compile_case(case, architecture)


def compile_case(case: CompileCase, architecture: int) -> CompileResult:
    """Compile one case for one architecture (90 means sm_90)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(case.signature) if name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=dict(case.signature), constexprs=dict(case.constants), attrs=attributes)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(case.options))
    except Exception as error:   # Triton raises many types, and all of them mean the same here
        text = str(error).strip() or repr(error)
        return CompileResult(case.name, architecture, error=text.splitlines()[-1])
    shared = int(compiled.metadata.shared)
    if shared > SHARED_BYTES[architecture]:
        return CompileResult(case.name, architecture, error=f"{shared} bytes of shared memory: there are {SHARED_BYTES[architecture]}")
    registers, spilled = _usage(compiled.asm["ptx"], architecture)
    return CompileResult(case.name, architecture, len(compiled.asm["cubin"]), registers, spilled, shared)


def _usage(ptx: str, architecture: int) -> tuple[int | None, int | None]:
    """Registers and spilled bytes, from the verbose output of the ptxas that Triton brings along; None where it says nothing."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    if target is None:
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(get_ptxas(architecture).path), "-v", f"--gpu-name={target.group(1)}", str(path),
                   "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    if registers is None or spilled is None:
        return None, None
    return int(registers.group(1)), int(spilled.group(1))


def main() -> int:
    """Print a line for each kernel and architecture and return the exit code."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: kernels are interpreted then and cannot be compiled. Unset it.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: pip install 'kvtier[dev]'", file=sys.stderr)
        return 2
    failed = 0
    for result in compile_all():
        print(result, flush=True)
        failed += result.error is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

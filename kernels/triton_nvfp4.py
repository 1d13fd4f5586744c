"""NVFP4 for GPUs, in Triton: the same bits as :func:`kvtier.kernels.nvfp4.quantise_nvfp4_torch` and its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.triton_numbers import e2m1_to_float, e4m3_to_float, has_e4m3_instructions
from kvtier.kernels.triton_rows import encode_nvfp4, jit

_GROUPS: Final = 64  # of one program


def _quantise_kernel(numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, num_groups: int, global_scale: float,
                     NATIVE: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """``GROUPS`` groups of contiguous numbers. Grid: (groups / GROUPS)."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    mask = group < num_groups
    rows = tl.load(numbers + group * 16 + tl.arange(0, 16)[None, :], mask=mask, other=0.0)
    found, block_scales = encode_nvfp4(rows.to(tl.float32), global_scale, NATIVE, GROUPS, 16)
    tl.store(codes + group * 8 + tl.arange(0, 8)[None, :], found, mask=mask)
    tl.store(scales + group, block_scales, mask=mask)


def _dequantise_kernel(codes: torch.Tensor, scales: torch.Tensor, numbers: tl.tensor, num_groups: int, global_scale: float,
                       NATIVE: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """``GROUPS`` groups of contiguous numbers. Grid: (groups / GROUPS)."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    mask = group < num_groups
    found = tl.load(codes + group * 8 + tl.arange(0, 8)[None, :], mask=mask, other=0)
    step = e4m3_to_float(tl.load(scales + group, mask=mask, other=0), NATIVE) * global_scale
    rows = tl.join(e2m1_to_float(found & 15) * step, e2m1_to_float(found >> 4) * step)
    rows = tl.reshape(rows, (GROUPS, 16)).to(numbers.dtype.element_ty)
    tl.store(numbers + group * 16 + tl.arange(0, 16)[None, :], rows, mask=mask)


# Applied as functions: as decorators they would take the kernels' types away from the type checker.
quantise_kernel = jit(_quantise_kernel)
dequantise_kernel = jit(_dequantise_kernel)


def quantise_nvfp4_triton(numbers: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The path for CUDA tensors (and, interpreted, for CPU tensors)."""
    numbers = numbers.contiguous()
    codes = numbers.new_empty((*numbers.shape[:-1], numbers.shape[-1] // 2), dtype=torch.uint8)
    scales = numbers.new_empty((*numbers.shape[:-1], numbers.shape[-1] // 16), dtype=torch.uint8)
    if scales.numel():
        with torch.cuda.device(numbers.get_device()):
            quantise_kernel[(triton.cdiv(scales.numel(), _GROUPS),)](numbers, codes, scales, scales.numel(), global_scale,
                                                                    NATIVE=has_e4m3_instructions(numbers), GROUPS=_GROUPS)
    return codes, scales


def dequantise_nvfp4_triton(codes: torch.Tensor, scales: torch.Tensor, global_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The path for CUDA tensors (and, interpreted, for CPU tensors)."""
    numbers = codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype)
    if scales.numel():
        with torch.cuda.device(codes.get_device()):
            dequantise_kernel[(triton.cdiv(scales.numel(), _GROUPS),)](codes.contiguous(), scales.contiguous(), numbers, scales.numel(),
                                                                      global_scale, NATIVE=has_e4m3_instructions(codes), GROUPS=_GROUPS)
    return numbers


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles."""
    for kernel, name in ((quantise_kernel, "quantise"), (dequantise_kernel, "dequantise")):
        for native, architectures in ((False, (80,)), (True, (90, 100))):
            constants = {"NATIVE": native, "GROUPS": _GROUPS}
            signature = {argument: "constexpr" if argument in constants else "*u8" for argument in kernel.arg_names}
            signature |= {"numbers": "*bf16", "num_groups": "i64", "global_scale": "fp32"}
            yield CompileCase(f"nvfp4/{name}", kernel, signature, constants, architectures)

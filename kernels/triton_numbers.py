"""Stored numbers in Triton: e4m3, e2m1 and 8-bit integers from float32 and back, on blocks of any shape.

Where the GPU has instructions for e4m3 (sm_89 and later) they are used; below, and in the interpreter, whose own cast does not
round, the same bits come from integer arithmetic. Everything here rounds to nearest, ties to even, and saturates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def has_e4m3_instructions(tensor: torch.Tensor) -> bool:
    """The ``NATIVE`` of the functions below for kernels on this tensor's device."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)


def _with_sign_of(magnitude: tl.tensor, sign: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """A float32 that is not negative with an int32 bit as its sign. Triton takes -x for 0 - x, in which -0 becomes 0."""
    return (magnitude.to(tl.int32, bitcast=True) | (sign << SHIFT)).to(tl.float32, bitcast=True)


def _float_to_e4m3(number: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Float32 to the bits of e4m3 as uint8, saturated at 448; NaN stays NaN."""
    if NATIVE:
        return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    magnitude = tl.minimum(tl.abs(number), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)   # three bits of mantissa; a carry goes to the exponent
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in units of 2**-9, the last place of 16384
    rounded = tl.where(magnitude < 0.015625, small, normal)
    rounded = tl.where(number != number, 0x7F, rounded)
    return (rounded | ((number.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


def _e4m3_to_float(stored: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """The bits of e4m3 as uint8 to float32, exact."""
    if NATIVE:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = stored.to(tl.int32)
    rest = bits & 0x7F
    magnitude = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    magnitude = tl.where(rest == 0x7F, float("nan"), magnitude)
    return with_sign_of(magnitude, bits & 0x80, 24)


def _float_to_e2m1(number: tl.tensor) -> tl.tensor:
    """Float32 to a code of 4 bits as int32, saturated at 6. The places between two codes are ties, and the even one takes them."""
    magnitude = tl.abs(number)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((number.to(tl.int32, bitcast=True) >> 28) & 8)


def _e2m1_to_float(code: tl.tensor) -> tl.tensor:
    """A code of 4 bits (any integer type) to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from 8 on, the same negative."""
    bits = code.to(tl.int32)
    rest = bits & 7
    magnitude = tl.where(rest < 2, rest.to(tl.float32) * 0.5, ((rest << 22) + (126 << 23)).to(tl.float32, bitcast=True))
    return with_sign_of(magnitude, bits & 8, 28)


def _float_to_int8(number: tl.tensor) -> tl.tensor:
    """Float32 to int8, saturated at -128 and 127; NaN becomes 0."""
    clamped = tl.minimum(tl.maximum(number, -128.0), 127.0)
    clamped = tl.where(number != number, 0.0, clamped)
    # Beside 1.5 * 2**23 the last place of a float32 is 1, so the sum is rounded, half to even.
    return ((clamped + 12582912.0) - 12582912.0).to(tl.int8)


# Applied as functions: as decorators they would take the types away from the type checker.
with_sign_of = triton.jit(_with_sign_of)
float_to_e4m3 = triton.jit(_float_to_e4m3)
e4m3_to_float = triton.jit(_e4m3_to_float)
float_to_e2m1 = triton.jit(_float_to_e2m1)
e2m1_to_float = triton.jit(_e2m1_to_float)
float_to_int8 = triton.jit(_float_to_int8)

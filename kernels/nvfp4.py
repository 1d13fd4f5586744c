"""NVFP4 in torch: 4-bit numbers with a scale for every 16 and one for the tensor (spec: write path, NVFP4).

NVIDIA's format, in the layout that its libraries keep in a KV cache. A group of 16 neighbours along the last axis has a scale in
e4m3; the tensor has a *global* scale in float32. Real number = e2m1 * (group scale * global scale).
"""

from __future__ import annotations

import math
from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import FLOAT_TYPES, check_dtype, check_finite, check_plain
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.quantise import LARGEST_E4M3, divisor

GROUP: Final = 16
"""Elements that share a scale."""

LARGEST_E2M1: Final = 6.0
_LARGEST_SCALE: Final = torch.finfo(torch.float32).max
VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; 8 to 15 are the same, negative."""


def quantise_nvfp4(numbers: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of 16.

    Group scale = largest magnitude / (6 * global scale), rounded to e4m3 and **read back**, so that decoding reproduces what the
    codes were made for: code = e2m1(number / (group scale * global scale)). Nearest, ties to even, saturated at 6 and 448. A group
    whose stored scale is 0, and every group where the global scale is 0, has codes of 0; one with a NaN in it has the scale NaN.

    A second round trip changes no bit wherever the group's scale is a normal number of e4m3 (2**-6 or more). Below, e4m3 has so few
    places that the smallest scales may shrink once more.

    Args:
        numbers: ``[..., dim]``, a floating-point dtype; ``dim`` is a multiple of 16.
        global_scale: finite, 0 or more. To use the whole range: largest magnitude of the tensor / (6 * 448).

    Returns:
        Codes uint8 ``[..., dim / 2]``, element 2i in the low nibble of byte i; scales uint8 ``[..., dim / 16]``, bits of e4m3.

    Raises:
        RequestError: a dtype, a dim or a scale other than these.
    """
    check_plain("quantise_nvfp4", "numbers", numbers)
    check_dtype("quantise_nvfp4", "numbers", numbers, FLOAT_TYPES)
    _check("quantise_nvfp4", global_scale, "numbers", numbers, GROUP)
    return kernel_paths(numbers.device.type).quantise_nvfp4(numbers.detach(), global_scale)


def dequantise_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: float,
                     dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers again, in float32 and then in ``dtype``: the exact inverse of the encoding.

    Args:
        codes, scales: as :func:`quantise_nvfp4` gives them.
        global_scale: the same as there.
        dtype: a floating-point dtype.

    Returns:
        ``[..., dim]``.

    Raises:
        RequestError: shapes or dtypes that do not fit together, or a scale that is negative or not finite.
    """
    kernel = "dequantise_nvfp4"
    for name, stored in (("codes", codes), ("scales", scales)):
        check_plain(kernel, name, stored)
        check_dtype(kernel, name, stored, (torch.uint8,))
    if dtype not in FLOAT_TYPES:
        raise RequestError(f"{kernel}: dtype={dtype}: pass a floating-point dtype of 16 bits or more, or the numbers would be cut")
    _check(kernel, global_scale, "codes", codes, GROUP // 2)
    if scales.shape != (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP) or scales.device != codes.device:
        raise RequestError(f"{kernel}: scales has shape {tuple(scales.shape)} on {scales.device} and codes {tuple(codes.shape)} on "
                           f"{codes.device}: pass one scale for every {GROUP // 2} bytes of codes, on their device")
    return kernel_paths(codes.device.type).dequantise_nvfp4(codes, scales, global_scale, dtype)


def _check(kernel: str, global_scale: float, name: str, tensor: torch.Tensor, unit: int) -> None:
    remedy = "a finite number, 0 or more, in float32"
    check_finite(kernel, "global_scale", global_scale, remedy)
    if not 0 <= global_scale <= _LARGEST_SCALE:
        raise RequestError(f"{kernel}: global_scale={global_scale}: pass {remedy}")
    if not tensor.dim() or tensor.shape[-1] % unit or not tensor.shape[-1]:
        raise RequestError(f"{kernel}: {name} has shape {tuple(tensor.shape)}: its last axis must be a multiple of {unit} "
                           f"(groups of {GROUP} elements)")


def quantise_nvfp4_torch(numbers: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The path in torch operations, in float32 throughout."""
    groups = numbers.float().reshape(*numbers.shape[:-1], numbers.shape[-1] // GROUP, GROUP)
    amax = groups.abs().amax(-1)
    one = divisor(numbers, global_scale)
    scales = (amax / (LARGEST_E2M1 * one)).clamp_(max=LARGEST_E4M3)
    scales = torch.where((one == 0) & ~amax.isnan(), 0.0, scales).to(torch.float8_e4m3fn)
    step = (scales.float() * one)[..., None]
    codes = encode_e2m1(groups / step)
    codes = torch.where(step > 0, codes, 0).to(torch.uint8).flatten(-2)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales.view(torch.uint8)


def dequantise_nvfp4_torch(codes: torch.Tensor, scales: torch.Tensor, global_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The path in torch operations: a table of 16 values, then one product for each element."""
    step = scales.view(torch.float8_e4m3fn).float() * divisor(codes, global_scale)
    values = torch.tensor(VALUES + tuple(-value for value in VALUES), device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).int().view(*scales.shape, GROUP)
    return (values[nibbles] * step[..., None]).flatten(-2).to(dtype)


def encode_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, int32: nearest, ties to the even code, saturated at 6."""
    magnitude = numbers.abs()
    code = (magnitude > 0.25).int() + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75)
    code += (magnitude > 2.5).int() + (magnitude >= 3.5) + (magnitude > 5.0)
    return code + 8 * numbers.signbit().int()


def quantise_nvfp4_reference(numbers: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, group by group and number by number in Python, to be read and compared with."""
    rows = numbers.float().reshape(-1, GROUP)
    codes, scales = [], []
    one = divisor(rows, global_scale)
    for row in rows:
        amax = row.abs().amax()
        scale = torch.zeros(1, device=row.device)
        if amax > 0 and global_scale > 0:
            scale = (amax / (LARGEST_E2M1 * one)).clamp(max=LARGEST_E4M3)
        elif amax.isnan():
            scale = amax[None]
        stored = scale.to(torch.float8_e4m3fn)
        step = stored.float() * one
        scales.append(stored)
        codes.append([_nearest_code(number) for number in (row / step).tolist()] if step > 0 else [0] * GROUP)
    nibbles = torch.tensor(codes, dtype=torch.uint8, device=numbers.device).view(*numbers.shape[:-1], numbers.shape[-1])
    stored_scales = torch.cat(scales).view(torch.uint8) if scales else nibbles.new_empty(0)
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4), stored_scales.view(*numbers.shape[:-1], numbers.shape[-1] // GROUP)


def _nearest_code(number: float) -> int:
    """The code whose value is nearest, of two the even one."""
    code = min(range(8), key=lambda code: (abs(VALUES[code] - min(abs(number), LARGEST_E2M1)), code % 2))
    return code + 8 * (math.copysign(1.0, number) < 0)


def dequantise_nvfp4_reference(codes: torch.Tensor, scales: torch.Tensor, global_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The same, element by element, in float32."""
    rows = codes.reshape(-1, GROUP // 2)
    steps = (scales.reshape(-1).view(torch.float8_e4m3fn).float() * divisor(codes, global_scale)).cpu()
    out = torch.empty(len(rows), GROUP, dtype=torch.float32)
    for number, row in enumerate(rows.tolist()):
        for place in range(GROUP):
            code = row[place // 2] >> (4 * (place % 2)) & 15
            value = VALUES[code & 7]
            out[number, place] = torch.tensor(-value if code & 8 else value) * steps[number]
    return out.view(*codes.shape[:-1], codes.shape[-1] * 2).to(device=codes.device, dtype=dtype)

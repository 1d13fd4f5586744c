"""Stored numbers of 8 bits with one scale for a tensor, in torch: FP8 e4m3 and INT8 (spec: write path, storage).

A scale is what a stored number is multiplied by to be the real one again. Both directions are computed in float32.
"""

from __future__ import annotations

from typing import Final

import torch

LARGEST_E4M3: Final = 448.0


def to_storage(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Quantise: ``numbers / scale`` rounded to nearest, ties to even, and saturated.

    Args:
        numbers: any shape, a floating-point dtype.
        dtype: ``torch.float8_e4m3fn`` (limits -448 and 448; NaN stays NaN) or ``torch.int8`` (-128 and 127; NaN becomes 0).
        scale: finite and greater than 0.

    Returns:
        The same shape in ``dtype``.
    """
    scaled = numbers.float() / divisor(numbers, scale)
    if dtype == torch.int8:
        return scaled.nan_to_num_(0.0).clamp_(-128, 127).round_().to(torch.int8)
    assert dtype == torch.float8_e4m3fn, dtype
    return scaled.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(dtype)   # older torch makes NaN of what is larger


def from_storage(stored: torch.Tensor, scale: float) -> torch.Tensor:
    """``stored * scale`` in float32."""
    return stored.float() * scale


def divisor(like: torch.Tensor, scale: float) -> torch.Tensor:
    """A scale as a tensor: by a plain number some devices multiply with its rounded inverse instead."""
    return torch.full((1,), scale, dtype=torch.float32, device=like.device)

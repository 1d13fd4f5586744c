"""Rotary position embedding with given cosines and sines, in torch (spec: fused write).

RoPE of Su et al. (RoFormer, 2021). The two numbers of a pair lie half a rotation apart (GPT-NeoX, Llama) or side by side (GPT-J); the
rest of a head, behind ``rotary_dim``, is not rotated. Whatever scaling a model has (linear, YaRN, ...) is in its cosines and sines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import check_dtype, check_same_device, check_shape


class RotaryStyle(IntEnum):
    """Which numbers of a head make a pair. The numbers are what the Triton kernel is told."""

    HALF_SPLIT = 0    #: i and i + rotary_dim / 2 (NeoX)
    INTERLEAVED = 1   #: 2i and 2i + 1 (GPT-J)


@dataclass(frozen=True)
class Rotary:
    """A model's rotation.

    Args:
        cos, sin: float32 ``[max_positions, rotary_dim / 2]``, contiguous: of each position and pair.
        style: which numbers make a pair.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    style: RotaryStyle = RotaryStyle.HALF_SPLIT

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return 2 * self.cos.shape[1]

    def check(self, kernel: str, like: torch.Tensor, head_dim: int) -> None:
        """RequestError unless cosines and sines fit together and to heads of ``head_dim`` on the device of ``like``."""
        check_shape(kernel, "rotary.cos", self.cos, (None, None), "max_positions, rotary_dim / 2")
        check_shape(kernel, "rotary.sin", self.sin, tuple(self.cos.shape), "max_positions, rotary_dim / 2")
        for name, table in (("rotary.cos", self.cos), ("rotary.sin", self.sin)):
            check_dtype(kernel, name, table, (torch.float32,))
            if not table.is_contiguous():
                raise RequestError(f"{kernel}: {name} has strides {table.stride()}: pass a contiguous tensor")
        check_same_device(kernel, like, **{"rotary.cos": self.cos, "rotary.sin": self.sin})
        if not 0 < self.rotary_dim <= head_dim or not self.cos.shape[0]:
            raise RequestError(f"{kernel}: rotary.cos has shape {tuple(self.cos.shape)}: rotary_dim is {self.rotary_dim} (allowed: 2 to "
                               f"{head_dim}, the head_dim), with one position at least")

    def check_positions(self, kernel: str, positions: torch.Tensor) -> None:
        """RequestError for the first position without a row of cosines."""
        wrong = (positions < 0) | (positions >= self.cos.shape[0])
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise RequestError(f"{kernel}: rotary position {int(positions[token])} of token {token}: cos and sin have rows 0 to "
                               f"{self.cos.shape[0] - 1}; make them for longer sequences")

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate float32 ``[tokens, heads, head_dim]``, each token by its position; a new tensor.

        A position without a row of cosines is taken as the nearest that has one.
        """
        rows = positions.clamp(0, self.cos.shape[0] - 1).long()
        cos, sin = self.cos.detach()[rows, None], self.sin.detach()[rows, None]
        rotated = heads.clone()
        half, width = self.cos.shape[1], self.rotary_dim
        first, second = (slice(0, half), slice(half, width)) if self.style is RotaryStyle.HALF_SPLIT else (slice(0, width, 2),
                                                                                                           slice(1, width, 2))
        rotated[..., first] = heads[..., first] * cos + -heads[..., second] * sin
        rotated[..., second] = heads[..., second] * cos + heads[..., first] * sin
        return rotated

    def rotate_reference(self, head: list[float], position: int) -> list[float]:
        """One head, pair by pair as complex numbers, in Python's float64: to be read and compared with."""
        out = list(head)
        half = self.cos.shape[1]
        for pair in range(half):
            one, other = (pair, pair + half) if self.style is RotaryStyle.HALF_SPLIT else (2 * pair, 2 * pair + 1)
            turned = complex(head[one], head[other]) * complex(float(self.cos[position, pair]), float(self.sin[position, pair]))
            out[one], out[other] = turned.real, turned.imag
        return out

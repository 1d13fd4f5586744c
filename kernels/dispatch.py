"""The one place where a tensor's device decides which kernel runs (spec: paged kernels).

A path gets arguments that its public function has checked, and ``layer_offset`` = layer * kv_factor, already a number
of pages. Imports are local to the choice: the Triton kernels must not be imported on a machine that has no use for
them, and the kernel modules themselves import this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.kernels.row_moves import RowPlaces


class AppendPath(Protocol):
    """Writes the tokens that have a place and leaves out the others, whole: :func:`kvtier.kernels.append.write_kv`."""

    def __call__(self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
                 sequence_of_token: torch.Tensor, positions: torch.Tensor, layer_offset: int) -> None: ...


class PrefillPath(Protocol):
    """A chunk of queries of one sequence: :func:`kvtier.kernels.attention.attention_prefill`."""

    def __call__(self, query: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int,
                 layer_offset: int, scale: float) -> torch.Tensor: ...


class DecodePath(Protocol):
    """One query for each sequence of a batch: :func:`kvtier.kernels.attention.attention_decode`."""

    def __call__(self, query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
                 layer_offset: int, scale: float) -> torch.Tensor: ...


class RowsPath(Protocol):
    """Rows of bytes from and to anywhere: :func:`kvtier.kernels.row_moves.move_rows`."""

    def __call__(self, destination: RowPlaces, source: RowPlaces, pairs: torch.Tensor, num_layers: int, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class KernelPaths:
    """The paths of one kind of device."""

    append: AppendPath
    prefill: PrefillPath
    decode: DecodePath
    rows: RowsPath


@cache
def kernel_paths(device_type: str) -> KernelPaths:
    """The paths for tensors on ``device_type`` ("cpu" or "cuda").

    Raises:
        ConfigError: there are no kernels for this kind of device.
    """
    from kvtier.kernels.append import append_torch
    from kvtier.kernels.attention import decode_torch, prefill_torch
    from kvtier.kernels.row_moves import move_rows_host

    if device_type == "cpu":
        return KernelPaths(append_torch, prefill_torch, decode_torch, move_rows_host)
    if device_type == "cuda":
        from kvtier.kernels.triton_append import append_triton
        from kvtier.kernels.triton_rows import move_rows_triton

        # Attention's torch paths are made of operations that every device has: right on a GPU, not fast.
        return KernelPaths(append_triton, prefill_torch, decode_torch, move_rows_triton)
    raise ConfigError(f"device type {device_type!r}: there are kernels for 'cpu' and 'cuda'; put the pool on one of these")

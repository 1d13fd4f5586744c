"""Row moves: rows of bytes gathered from anywhere and scattered to anywhere, by one launch (spec: moving and tables).

What a copy engine does with a descriptor for each row, a kernel does with a program for each: below some tens of KiB a row, DMA spends
its time on descriptors. SGLang's HiCache and vLLM's offloading move small pages this way. On a GPU rows may lie in its own memory or
in pinned memory of the host, which it reads and writes over the bus.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import check_dtype, check_shape, check_whole
from kvtier.kernels.dispatch import kernel_paths

_KERNEL = "move_rows"


class RowPlaces(NamedTuple):
    """Where rows lie: byte b of layer l of row r is at ``address + r * stride + l * layer_stride + b``."""

    address: int
    stride: int
    layer_stride: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowPlaces:
        """Of a uint8 tensor ``[rows, layers, bytes]``, its last dimension contiguous."""
        return cls(rows.data_ptr(), rows.stride(0), rows.stride(1))


def move_rows(destination: RowPlaces, source: RowPlaces, pairs: torch.Tensor, num_layers: int, num_bytes: int) -> None:
    """Copy ``num_layers`` times ``num_bytes`` bytes of row ``pairs[i, 0]`` of the source to row ``pairs[i, 1]`` of the destination.

    The caller answers for the addresses: every row named must be there, no destination row may occur twice or be a source, and on a
    GPU host memory must be registered with CUDA and stay as it is until the kernel is over.

    Args:
        destination, source: places of rows.
        pairs: int64 ``[n, 2]``, contiguous, on the device that copies. On a GPU the kernel goes to torch's current stream.
        num_layers, num_bytes: at least 1.

    Raises:
        RequestError: pairs of another shape or dtype, or nothing to copy. Nothing has been copied then.
    """
    check_shape(_KERNEL, "pairs", pairs, (None, 2), "n, 2")
    check_dtype(_KERNEL, "pairs", pairs, (torch.int64,))
    num_layers, num_bytes = check_whole(_KERNEL, num_layers=num_layers, num_bytes=num_bytes)
    if num_layers < 1 or num_bytes < 1:
        raise RequestError(f"{_KERNEL}: num_layers={num_layers}, num_bytes={num_bytes}: both must be at least 1")
    if pairs.shape[0]:
        kernel_paths(pairs.device.type).rows(destination, source, pairs.contiguous(), num_layers, num_bytes)


def move_rows_host(destination: RowPlaces, source: RowPlaces, pairs: torch.Tensor, num_layers: int, num_bytes: int) -> None:
    """The CPU path. Whole blocks of the levels are copied by ``kvtier.io.row_copier`` there, with fewer calls."""
    for from_row, to_row in pairs.tolist():
        for layer in range(num_layers):
            ctypes.memmove(destination.address + to_row * destination.stride + layer * destination.layer_stride,
                           source.address + from_row * source.stride + layer * source.layer_stride, num_bytes)


def move_rows_reference(destination: torch.Tensor, source: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """What the destination holds afterwards. ``destination``, ``source``: uint8 ``[rows, layers, bytes]``. For tests."""
    moved = destination.clone()
    moved[pairs[:, 1]] = source[pairs[:, 0]]
    return moved

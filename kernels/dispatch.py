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
    from kvtier.kernels.attention_context import PagedContext
    from kvtier.kernels.attention_plan import DecodePlan, PrefillPlan


class AppendPath(Protocol):
    """Writes the tokens that have a place and leaves out the others, whole: :func:`kvtier.kernels.append.write_kv`."""

    def __call__(self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor,
                 sequence_of_token: torch.Tensor, positions: torch.Tensor, layer_offset: int) -> None: ...


class PrefillPath(Protocol):
    """Chunks of queries: :func:`kvtier.kernels.attention.attention_prefill_batch`."""

    def __call__(self, query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None) -> torch.Tensor: ...


class DecodePath(Protocol):
    """One query for each sequence of a batch: :func:`kvtier.kernels.attention.attention_decode`."""

    def __call__(self, query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor: ...


@dataclass(frozen=True)
class KernelPaths:
    """The paths of one kind of device."""

    append: AppendPath
    prefill: PrefillPath
    decode: DecodePath


@cache
def kernel_paths(device_type: str) -> KernelPaths:
    """The paths for tensors on ``device_type`` ("cpu" or "cuda").

    Raises:
        ConfigError: there are no kernels for this kind of device.
    """
    from kvtier.kernels.append import append_torch
    from kvtier.kernels.decode_cpu import decode_torch
    from kvtier.kernels.prefill_cpu import prefill_torch

    if device_type == "cpu":
        return KernelPaths(append_torch, prefill_torch, decode_torch)
    if device_type == "cuda":
        from kvtier.kernels.triton_append import append_triton
        from kvtier.kernels.triton_decode import decode_triton
        from kvtier.kernels.triton_prefill import prefill_triton

        return KernelPaths(append_triton, prefill_triton, decode_triton)
    raise ConfigError(f"device type {device_type!r}: there are kernels for 'cpu' and 'cuda'; put the pool on one of these")

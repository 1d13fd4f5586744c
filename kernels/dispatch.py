"""The one place where a tensor's device decides which kernel runs (spec: paged kernels).

A path gets arguments that its public function has checked, and ``layer_offset`` = layer * kv_factor, already a number
of pages. Imports are local to the choice: the Triton kernels must not be imported on a machine that has no use for
them, and the kernel modules themselves import this one.

To debug an engine, :func:`use_reference` makes every kernel run its reference, on any device, with all values checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import checks

if TYPE_CHECKING:
    from kvtier.kernels.attention_context import PagedContext
    from kvtier.kernels.attention_plan import DecodePlan, PrefillPlan
    from kvtier.kernels.block_offsets import ScratchWindow
    from kvtier.kernels.places import TokenPlaces
    from kvtier.kernels.rotary import Rotary
    from kvtier.kernels.row_moves import RowPlaces
    from kvtier.kernels.storage import StoredPages


class AppendPath(Protocol):
    """Writes the tokens that have a place and leaves out the others, whole: :func:`kvtier.kernels.append.write_kv`."""

    def __call__(self, stored: StoredPages, key: torch.Tensor, value: torch.Tensor | None, places: TokenPlaces,
                 layer_offset: int) -> None: ...


class FusedWritePath(Protocol):
    """Queries to ``out``; with ``stored``, keys and values to their places: :func:`kvtier.kernels.fused_write.fused_write`."""

    def __call__(self, qkv: torch.Tensor, bias: torch.Tensor | None, rotary: Rotary | None, rotary_positions: torch.Tensor,
                 out: torch.Tensor, query_scale: float, stored: StoredPages | None, places: TokenPlaces, kv_heads: int,
                 layer_offset: int) -> None: ...


class ZeroTailPath(Protocol):
    """Zeroes rows behind the sequences' ends: :func:`kvtier.kernels.value_tail.zero_value_tail`."""

    def __call__(self, values: torch.Tensor, block_scales: torch.Tensor | None, table: torch.Tensor, lengths: torch.Tensor,
                 layer_offsets: range) -> None: ...


class ScatterPath(Protocol):
    """Writes bytes to flat places of a strided tensor: :func:`kvtier.kernels.indexer_scatter.scatter_indexer_keys`."""

    def __call__(self, cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor,
                 scale_slots: torch.Tensor) -> None: ...


class QuantiseNvfp4Path(Protocol):
    """Numbers to codes and block scales: :func:`kvtier.kernels.nvfp4.quantise_nvfp4`."""

    def __call__(self, numbers: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]: ...


class DequantiseNvfp4Path(Protocol):
    """The inverse: :func:`kvtier.kernels.nvfp4.dequantise_nvfp4`."""

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, global_scale: float, dtype: torch.dtype) -> torch.Tensor: ...


class PartialCopyPath(Protocol):
    """The first ``tokens`` tokens of pairs of blocks: :func:`kvtier.kernels.partial_copy.copy_partial_blocks`."""

    def __call__(self, destination: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]], tokens: int) -> None: ...


class FillOffsetsPath(Protocol):
    """Slots to table entries, over the whole of ``tables``: :func:`kvtier.kernels.block_offsets.fill_block_offsets`."""

    def __call__(self, tables: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor, pages_per_block: tuple[int, ...],
                 value_fields: tuple[int, ...], num_blocks: int, scratch: ScratchWindow | None) -> None: ...


class PrefillPath(Protocol):
    """Chunks of queries: :func:`kvtier.kernels.attention.attention_prefill_batch`."""

    def __call__(self, query: torch.Tensor, context: PagedContext, plan: PrefillPlan, draft_mask: torch.Tensor | None) -> torch.Tensor: ...


class DecodePath(Protocol):
    """One query for each sequence of a batch: :func:`kvtier.kernels.attention.attention_decode`."""

    def __call__(self, query: torch.Tensor, context: PagedContext, lengths: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor: ...


class GatherPath(Protocol):
    """Rows of single tokens out of their pages, ``[n, heads, dim]``: :func:`kvtier.kernels.gather.gather_tokens`.

    ``page_of_token``, ``inside``: int64 ``[n]``; a negative page is none, and its rows are 0.
    """

    def __call__(self, pages: torch.Tensor, page_of_token: torch.Tensor, inside: torch.Tensor) -> torch.Tensor: ...


class RowsPath(Protocol):
    """Rows of bytes from and to anywhere: :func:`kvtier.kernels.row_moves.move_rows`."""

    def __call__(self, destination: RowPlaces, source: RowPlaces, pairs: torch.Tensor, num_layers: int, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class KernelPaths:
    """The paths of one kind of device."""

    append: AppendPath
    fused_write: FusedWritePath
    zero_tail: ZeroTailPath
    scatter: ScatterPath
    quantise_nvfp4: QuantiseNvfp4Path
    dequantise_nvfp4: DequantiseNvfp4Path
    partial_copy: PartialCopyPath
    fill_offsets: FillOffsetsPath
    prefill: PrefillPath
    decode: DecodePath
    gather: GatherPath
    rows: RowsPath


def use_reference(enabled: bool) -> None:
    """From now on run references with all checks (True), or the kernels of each device again (False). For the whole process.

    Slow, and on a GPU the host waits: for debugging an engine. A bad page becomes an error at the call that passed it.
    """
    checks.set_always_check(enabled)


def kernel_paths(device_type: str) -> KernelPaths:
    """The paths for tensors on ``device_type`` ("cpu" or "cuda").

    Raises:
        ConfigError: there are no kernels for this kind of device.
    """
    return _references(device_type) if checks.always_checks() else _paths_of(device_type)


@cache
def _paths_of(device_type: str) -> KernelPaths:
    if device_type == "cpu":
        from kvtier.kernels.append import append_host
        from kvtier.kernels.block_offsets import fill_offsets_host
        from kvtier.kernels.decode_cpu import decode_torch
        from kvtier.kernels.fused_write import fused_write_torch
        from kvtier.kernels.gather import gather_torch
        from kvtier.kernels.indexer_scatter import scatter_torch
        from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch, quantise_nvfp4_torch
        from kvtier.kernels.partial_copy import partial_copy_torch
        from kvtier.kernels.prefill_cpu import prefill_torch
        from kvtier.kernels.row_moves import move_rows_host
        from kvtier.kernels.value_tail import zero_tail_torch

        return KernelPaths(
            append=append_host, fused_write=fused_write_torch, zero_tail=zero_tail_torch, scatter=scatter_torch,
            quantise_nvfp4=quantise_nvfp4_torch, dequantise_nvfp4=dequantise_nvfp4_torch,
            partial_copy=partial_copy_torch, fill_offsets=fill_offsets_host,
            prefill=prefill_torch, decode=decode_torch, gather=gather_torch, rows=move_rows_host)
    if device_type == "cuda":
        from kvtier.kernels.triton_append import append_triton
        from kvtier.kernels.triton_block_offsets import fill_offsets_triton
        from kvtier.kernels.triton_decode import decode_triton
        from kvtier.kernels.triton_fused_write import fused_write_triton
        from kvtier.kernels.triton_gather import gather_triton
        from kvtier.kernels.triton_nvfp4 import dequantise_nvfp4_triton, quantise_nvfp4_triton
        from kvtier.kernels.triton_partial_copy import partial_copy_triton
        from kvtier.kernels.triton_prefill import prefill_triton
        from kvtier.kernels.triton_row_moves import move_rows_triton
        from kvtier.kernels.triton_scatter import scatter_triton
        from kvtier.kernels.triton_value_tail import zero_tail_triton

        return KernelPaths(
            append=append_triton, fused_write=fused_write_triton, zero_tail=zero_tail_triton, scatter=scatter_triton,
            quantise_nvfp4=quantise_nvfp4_triton, dequantise_nvfp4=dequantise_nvfp4_triton,
            partial_copy=partial_copy_triton, fill_offsets=fill_offsets_triton,
            prefill=prefill_triton, decode=decode_triton, gather=gather_triton, rows=move_rows_triton)
    raise ConfigError(f"device type {device_type!r}: there are kernels for 'cpu' and 'cuda'; put the pool on one of these")


@cache
def _references(device_type: str) -> KernelPaths:
    from kvtier.kernels.append import append_reference
    from kvtier.kernels.attention_reference import decode_reference, prefill_reference
    from kvtier.kernels.block_offsets import fill_offsets_reference
    from kvtier.kernels.fused_write import fused_write_reference
    from kvtier.kernels.gather import gather_reference
    from kvtier.kernels.indexer_scatter import scatter_reference
    from kvtier.kernels.nvfp4 import dequantise_nvfp4_reference, quantise_nvfp4_reference
    from kvtier.kernels.partial_copy import partial_copy_reference
    from kvtier.kernels.value_tail import zero_tail_reference

    # Places of rows are addresses, and the host cannot follow a GPU's: its own path moves them.
    return KernelPaths(
        append=append_reference, fused_write=fused_write_reference, zero_tail=zero_tail_reference, scatter=scatter_reference,
        quantise_nvfp4=quantise_nvfp4_reference, dequantise_nvfp4=dequantise_nvfp4_reference,
        partial_copy=partial_copy_reference, fill_offsets=fill_offsets_reference,
        prefill=prefill_reference, decode=decode_reference, gather=gather_reference, rows=_paths_of(device_type).rows)

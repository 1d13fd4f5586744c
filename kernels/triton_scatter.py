"""Indexer-K scatter for GPUs, in Triton: the same as :func:`kvtier.kernels.indexer_scatter.scatter_torch`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.triton_rows import jit


def _scatter_kernel(
    cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor, scale_slots: torch.Tensor, num_elements: int,
    size_b: int, size_c: int, size_d: int, a_stride: int, b_stride: int, c_stride: int, d_stride: int,
    key_token_stride: int, key_byte_stride: int, scale_token_stride: int, scale_byte_stride: int,
    KEY_BYTES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """One program writes one token's key and scale, byte by byte: a key may lie across the ends of rows. Grid: (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    key_slot = tl.load(key_slots + token).to(tl.int64)
    scale_slot = tl.load(scale_slots + token).to(tl.int64)
    is_there = (key_slot >= 0) & (scale_slot >= 0) & (key_slot <= num_elements - KEY_BYTES) & (scale_slot <= num_elements - 4)
    byte = tl.arange(0, BLOCK).to(tl.int64)
    flat = key_slot + byte
    mask = (byte < KEY_BYTES) & is_there
    data = tl.load(keys + token * key_token_stride + byte * key_byte_stride, mask=mask, other=0)
    row, table = flat // size_d, flat // size_d // size_c
    place = flat % size_d * d_stride + row % size_c * c_stride + table % size_b * b_stride + table // size_b * a_stride
    tl.store(cache + place, data, mask=mask)
    byte = tl.arange(0, 4).to(tl.int64)
    flat = scale_slot + byte
    data = tl.load(scales + token * scale_token_stride + byte * scale_byte_stride, mask=is_there, other=0)
    row, table = flat // size_d, flat // size_d // size_c
    place = flat % size_d * d_stride + row % size_c * c_stride + table % size_b * b_stride + table // size_b * a_stride
    tl.store(cache + place, data, mask=is_there)


# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
scatter_kernel = jit(_scatter_kernel)


def scatter_triton(cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor,
                   scale_slots: torch.Tensor) -> None:
    """The path for CUDA tensors (and, interpreted, for CPU tensors). A token that has no place is left out, whole."""
    with torch.cuda.device(cache.get_device()):
        scatter_kernel[(keys.shape[0],)](
            cache, keys, scales, key_slots.contiguous(), scale_slots.contiguous(), cache.numel(), *cache.shape[1:], *cache.stride(),
            *keys.stride(), *scales.stride(), KEY_BYTES=keys.shape[1], BLOCK=int(triton.next_power_of_2(keys.shape[1])), num_warps=1)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles."""
    constants = {"KEY_BYTES": 128, "BLOCK": 128}
    signature = {name: "constexpr" if name in constants else "i64" for name in scatter_kernel.arg_names}
    signature |= dict.fromkeys(("cache", "keys", "scales"), "*u8") | dict.fromkeys(("key_slots", "scale_slots"), "*i32")
    yield CompileCase("indexer_scatter/128", scatter_kernel, signature, constants)

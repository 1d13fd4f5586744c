"""The parallel part of XXH3-128 in Triton: a block's bytes to the eight lanes that :func:`kvtier.kernels.page_checksum.finish` takes.

Two kernels. The first sums up each chunk of 1,024 bytes to 64, which reads all bytes and has as many programs as there are
chunks. The second goes over those sums in order, one scrambling after the other, and takes the last stripes itself; its loads do
not depend on what it computes, so that they run ahead of it.

Imported only when a CUDA tensor asks for it; ``TRITON_INTERPRET=1`` (set before triton is imported) runs it on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase
from kvtier.kernels.page_checksum import CHUNK_BYTES, number_of_chunks

_CHUNKS: Final = 4    # of one program of the first kernel
_UNROLLED: Final = 16  # loads that the second kernel has under way


def _contribution(words: tl.tensor, swapped: tl.tensor, secret: tl.tensor) -> tl.tensor:
    """What stripes add to the lanes: all unsigned, 64 bits, wrapping around."""
    keyed = words ^ secret
    return swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32)


contribution = triton.jit(_contribution)


def _chunk_kernel(block: torch.Tensor, secret: torch.Tensor, sums: torch.Tensor, num_chunks: int, CHUNKS: tl.constexpr) -> None:
    """Sum up ``CHUNKS`` chunks of 16 stripes of 8 words each. Grid: (chunks / CHUNKS)."""
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)[:, None, None]
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    is_there = chunk < num_chunks
    place = chunk * 128 + stripe * 8
    words = tl.load(block + place + lane, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    swapped = tl.load(block + place + (lane ^ 1), mask=is_there, other=0).to(tl.uint64, bitcast=True)
    key = tl.load(secret + stripe + lane).to(tl.uint64, bitcast=True)
    total = tl.sum(contribution(words, swapped, key).to(tl.int64, bitcast=True), axis=1)
    row = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)[:, None]
    tl.store(sums + row * 8 + tl.arange(0, 8)[None, :], total, mask=row < num_chunks)


def _lane_kernel(block: torch.Tensor, secret: torch.Tensor, sums: torch.Tensor, lanes: torch.Tensor, num_chunks: int, num_words: int,
                 num_stripes: int, UNROLLED: tl.constexpr) -> None:
    """The eight lanes after all chunks and the ``num_stripes`` stripes behind them. One program."""
    lane = tl.arange(0, 8)
    state = tl.load(secret + 32 + lane).to(tl.uint64, bitcast=True)
    key = tl.load(secret + 16 + lane).to(tl.uint64, bitcast=True)
    whole = num_chunks // UNROLLED * UNROLLED
    for first in range(0, whole, UNROLLED):
        for step in tl.static_range(UNROLLED):
            state += tl.load(sums + (first + step) * 8 + lane).to(tl.uint64, bitcast=True)
            state = (state ^ (state >> 47) ^ key) * 0x9E3779B1
    for chunk in range(whole, num_chunks):
        state += tl.load(sums + chunk * 8 + lane).to(tl.uint64, bitcast=True)
        state = (state ^ (state >> 47) ^ key) * 0x9E3779B1
    stripe = tl.arange(0, 16)[:, None]
    column = lane[None, :]
    is_there = stripe < num_stripes
    place = num_chunks * 128 + stripe * 8
    words = tl.load(block + place + column, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    swapped = tl.load(block + place + (column ^ 1), mask=is_there, other=0).to(tl.uint64, bitcast=True)
    rest = contribution(words, swapped, tl.load(secret + stripe + column).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    state += tl.sum(tl.where(is_there, rest, 0), axis=0).to(tl.uint64, bitcast=True)
    last = num_words - 8
    words = tl.load(block + last + lane).to(tl.uint64, bitcast=True)
    swapped = tl.load(block + last + (lane ^ 1)).to(tl.uint64, bitcast=True)
    state += contribution(words, swapped, tl.load(secret + 24 + lane).to(tl.uint64, bitcast=True))
    tl.store(lanes + lane, state.to(tl.int64, bitcast=True))


# Applied as functions: as decorators they would take the kernels' types away from the type checker.
chunk_kernel = triton.jit(_chunk_kernel)
lane_kernel = triton.jit(_lane_kernel)


def sum_up(block: torch.Tensor, secret: torch.Tensor, sums: torch.Tensor, lanes: torch.Tensor) -> None:
    """Enqueue both kernels on the current stream.

    Args:
        block: uint8 ``[bytes]``, contiguous, on an 8-byte boundary; a multiple of 8 bytes, 248 or more, less than 16 GiB.
        secret: int64 [40], as ``secret_words`` gives it.
        sums: int64 [chunks, 8], scratch.
        lanes: int64 [8], the result.
    """
    num_bytes = block.numel()
    num_chunks = number_of_chunks(num_bytes)
    words = block.view(torch.int64)
    with torch.cuda.device(block.get_device()):  # Triton launches on the current device; a CPU tensor's is -1, which changes nothing
        if num_chunks:
            chunk_kernel[(triton.cdiv(num_chunks, _CHUNKS),)](words, secret, sums, num_chunks, CHUNKS=_CHUNKS)
        num_stripes = (num_bytes - 1 - num_chunks * CHUNK_BYTES) // 64
        lane_kernel[(1,)](words, secret, sums, lanes, num_chunks, num_bytes // 8, num_stripes, UNROLLED=_UNROLLED, num_warps=1)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles."""
    kernels = (("checksum/chunks", chunk_kernel, {"CHUNKS": _CHUNKS}), ("checksum/lanes", lane_kernel, {"UNROLLED": _UNROLLED}))
    for name, kernel, constants in kernels:
        signature = {argument: "constexpr" if argument in constants else "i64" for argument in kernel.arg_names}
        signature |= dict.fromkeys({"block", "secret", "sums", "lanes"} & set(kernel.arg_names), "*i64")
        yield CompileCase(name, kernel, signature, constants)

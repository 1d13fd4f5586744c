"""Row moves for GPUs, in Triton: the same bytes as :func:`kvtier.kernels.row_moves.move_rows_host`.

Addresses come as numbers, not as tensors: a row may lie in registered host memory, which Triton would not take for a pointer of the
device, and a copier that held tensors would keep a pool's memory alive. Imported only when a CUDA tensor asks for it;
``TRITON_INTERPRET=1`` (set before triton is imported) runs it on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.compile_check import CompileCase

if TYPE_CHECKING:
    from kvtier.kernels.row_moves import RowPlaces

_PROGRAM_BYTES: Final = 8192
"""Bytes of one program: enough loads on their way to hide the bus, few enough that small rows still make many programs."""


def _rows_kernel(
    destination: int, source: int, pairs: torch.Tensor, num_layers: int, num_words: int,
    destination_stride: int, destination_layer_stride: int, source_stride: int, source_layer_stride: int,
    WORD_BYTES: tl.constexpr, WORDS: tl.constexpr,
) -> None:
    """One program copies ``WORDS`` words of one layer of one row. Grid: (rows * layers, parts of a layer)."""
    row = tl.program_id(0) // num_layers
    layer = (tl.program_id(0) % num_layers).to(tl.int64)
    from_row = tl.load(pairs + row * 2)
    to_row = tl.load(pairs + row * 2 + 1)
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < num_words
    from_address = source + from_row * source_stride + layer * source_layer_stride
    to_address = destination + to_row * destination_stride + layer * destination_layer_stride
    if WORD_BYTES == 8:
        values = tl.load(from_address.to(tl.pointer_type(tl.int64)) + word, mask=mask)
        tl.store(to_address.to(tl.pointer_type(tl.int64)) + word, values, mask=mask)
    elif WORD_BYTES == 4:
        halves = tl.load(from_address.to(tl.pointer_type(tl.int32)) + word, mask=mask)
        tl.store(to_address.to(tl.pointer_type(tl.int32)) + word, halves, mask=mask)
    else:
        bytes_ = tl.load(from_address.to(tl.pointer_type(tl.int8)) + word, mask=mask)
        tl.store(to_address.to(tl.pointer_type(tl.int8)) + word, bytes_, mask=mask)


# One kernel for each width of a word: made for every shape of its numbers, it would be compiled anew in the middle of serving.
_NUMBERS: Final = [name for name, kind in _rows_kernel.__annotations__.items() if kind == "int"]
_rows_kernel.__annotations__.update(dict.fromkeys(_NUMBERS, "i64"))
# Applied as a function: as a decorator it would take the kernel's types away from the type checker.
rows_kernel = triton.jit(_rows_kernel, do_not_specialize=_NUMBERS)


def move_rows_triton(destination: RowPlaces, source: RowPlaces, pairs: torch.Tensor, num_layers: int, num_bytes: int) -> None:
    """The path for CUDA (and, interpreted, for the host)."""
    word_bytes = _word_bytes(*destination, *source, num_bytes)
    words = _PROGRAM_BYTES // word_bytes
    num_words = num_bytes // word_bytes
    with torch.cuda.device(pairs.get_device()):  # Triton launches on the current device; a CPU tensor's is -1, which changes nothing
        rows_kernel[(pairs.shape[0] * num_layers, triton.cdiv(num_words, words))](
            destination.address, source.address, pairs, num_layers, num_words,
            destination.stride, destination.layer_stride, source.stride, source.layer_stride, WORD_BYTES=word_bytes, WORDS=words)


def _word_bytes(*numbers: int) -> int:
    """The widest word that divides all addresses, strides and sizes."""
    return next((size for size in (8, 4) if all(number % size == 0 for number in numbers)), 1)


def compile_cases() -> Iterator[CompileCase]:
    """What ``compile_check`` compiles: each width of a word."""
    for size in (8, 4, 1):
        constants = {"WORD_BYTES": size, "WORDS": _PROGRAM_BYTES // size}
        signature = {name: "constexpr" if name in constants else "i64" for name in rows_kernel.arg_names}
        yield CompileCase(f"rows/{size * 8}-bit", rows_kernel, signature | {"pairs": "*i64"}, constants)

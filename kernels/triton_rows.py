"""Rows of numbers into pages, in Triton: what :func:`kvtier.kernels.stored_rows.write_rows` does, for one token in one program.

The part that every kernel of the write path ends with. ``STORAGE`` is a number of :class:`kvtier.kernels.storage.Storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvtier.kernels.storage import Storage
from kvtier.kernels.triton_numbers import e4m3_to_float, float_to_e2m1, float_to_e4m3, float_to_int8


def _encode_nvfp4(rows: tl.tensor, scale: tl.tensor, NATIVE: tl.constexpr, ROWS: tl.constexpr,
                  DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Float32 ``[ROWS, DIM]`` to codes uint8 ``[ROWS, DIM / 2]`` and block scales uint8 ``[ROWS, DIM / 16]``."""
    groups = tl.reshape(rows, (ROWS, DIM // 16, 16))
    # Products and quotients are rounded as torch rounds them, so that codes are the same to the bit.
    quotient = tl.div_rn(tl.max(tl.abs(groups), axis=2), tl.maximum(scale, 0.0) * 6.0 + tl.zeros((ROWS, DIM // 16), tl.float32))
    has_nan = (tl.max((groups != groups).to(tl.int32), axis=2) > 0) | ((quotient != quotient) & (scale > 0.0))
    block_scales = float_to_e4m3(tl.where(scale > 0.0, tl.minimum(quotient, 448.0), 0.0), NATIVE)
    block_scales = tl.where(has_nan, 0x7F, block_scales.to(tl.int32)).to(tl.uint8)
    step = tl.where(has_nan, 0.0, e4m3_to_float(tl.where(has_nan, 0, block_scales.to(tl.int32)).to(tl.uint8), NATIVE) * scale)
    is_used = step > 0.0
    divisor = tl.where(is_used, step, 1.0)[:, :, None] + tl.zeros((ROWS, DIM // 16, 16), tl.float32)
    codes = tl.where(is_used[:, :, None], float_to_e2m1(tl.div_rn(groups, divisor)), 0)
    low, high = tl.split(tl.reshape(codes, (ROWS, DIM // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), block_scales


encode_nvfp4 = triton.jit(_encode_nvfp4)


def _store_rows(
    rows: tl.tensor, head: tl.tensor, is_written: tl.tensor, page: tl.tensor, inside: tl.tensor, scale: tl.tensor,
    pages: tl.tensor, page_stride: tl.tensor, head_stride: tl.tensor, token_stride: tl.tensor, dim_stride: tl.tensor,
    block_scales: tl.tensor, scale_page_stride: tl.tensor, scale_head_stride: tl.tensor, scale_token_stride: tl.tensor,
    scale_dim_stride: tl.tensor,
    STORAGE: tl.constexpr, NATIVE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """Store ``rows [ROWS, BLOCK_DIM]``, of heads ``head [ROWS, 1]`` (int64), at entry ``inside`` of ``page`` (int64), if ``is_written``.

    Elements at ``DIM`` and beyond must be 0. 64 bits in every product: a pool has more than 2**31 elements, and a small stride comes in as
    32 bits.
    """
    mask = (head < HEADS) & is_written
    place = pages + page * page_stride + head * head_stride + inside * token_stride
    if STORAGE == 3:
        codes, found = encode_nvfp4(rows.to(tl.float32), scale, NATIVE, ROWS, BLOCK_DIM)
        half = tl.arange(0, BLOCK_DIM // 2).to(tl.int64)[None, :]
        tl.store(place + half * dim_stride, codes, mask=mask & (half < DIM // 2))
        group = tl.arange(0, BLOCK_DIM // 16).to(tl.int64)[None, :]
        place = block_scales + page * scale_page_stride + head * scale_head_stride + inside * scale_token_stride
        tl.store(place + group * scale_dim_stride, found, mask=mask & (group < DIM // 16))
    else:
        dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
        mask = mask & (dim < DIM)
        if STORAGE == 0:
            tl.store(place + dim * dim_stride, rows.to(pages.dtype.element_ty), mask=mask)
        else:
            scaled = tl.div_rn(rows.to(tl.float32), scale + tl.zeros((ROWS, BLOCK_DIM), tl.float32))
            if STORAGE == 1:
                tl.store(place + dim * dim_stride, float_to_e4m3(scaled, NATIVE), mask=mask)
            else:
                tl.store(place + dim * dim_stride, float_to_int8(scaled).to(tl.uint8, bitcast=True), mask=mask)


store_rows = triton.jit(_store_rows)


_OF_A_BATCH: Final = (
    "table", "table_sequence_stride", "table_field_stride", "sequence_of_token", "positions", "first_writable", "rotary_positions",
    "lengths", "sequences", "tiles", "source_rows", "source_stride", "draft_mask", "draft_stride", "draft_depths", "page_of_token",
    "inside", "key_slots", "scale_slots", "indptr", "slots", "scratch_begin", "scratch_end", "scratch_slots", "scratch_row_stride")
"""Arguments that say where things lie, by the names that they have in all kernels. Each batch may have them at another place, and as wide
as it needs them."""


def jit(kernel: Callable[..., None]) -> Any:
    """``kernel`` as it is launched.

    Triton would take ``int`` for 32 bits: it would cut a larger stride, and not see that one is 1, which is what makes loads wide. So it
    does not get to see these annotations, and judges each number by its value.

    It compiles anew for a number that is 1 or a multiple of 16, and for memory that begins at a multiple of 16 bytes. Of what is moved
    that makes wide loads and stores. Of whole numbers that are no strides (sizes of a batch, numbers of layers) and of what says where
    things lie it would only stop serving for a second, or break the capture of a graph, whenever the batch changes.
    """
    numbers = [name for name, kind in kernel.__annotations__.items() if kind == "int"]
    names = [name for name in kernel.__annotations__ if name in _OF_A_BATCH]
    for name in numbers:
        del kernel.__annotations__[name]
    return triton.jit(kernel, do_not_specialize=[name for name in numbers if name in names or not name.endswith("_stride")],
                      do_not_specialize_on_alignment=[name for name in names if name not in numbers])


def page_arguments(pages: torch.Tensor, block_scales: torch.Tensor | None) -> tuple[object, ...]:
    """A page tensor, its strides, its block scales and theirs, as the kernels take them: bytes wherever elements are bytes."""
    data = pages.view(torch.uint8) if pages.element_size() == 1 else pages
    scales = data if block_scales is None else block_scales
    return data, *data.stride(), scales, *scales.stride()


def block_shape(heads: int, dim: int) -> tuple[int, int]:
    """Heads and dimensions of one program: powers of two, about 1,024 elements, a whole row of a head at least."""
    block_dim = max(16, int(triton.next_power_of_2(dim)))
    return max(1, min(int(triton.next_power_of_2(heads)), 1024 // block_dim)), block_dim


def unit_strides(names: Iterable[str]) -> dict[str, int]:
    """For ``compile_check``: strides that are 1 in practice, as Triton sees them at a launch."""
    return {name: 1 for name in names if name.endswith("dim_stride") or name == "table_block_stride"}


def aligned_arguments(signature: Mapping[str, str]) -> frozenset[str]:
    """For ``compile_check``: addresses, and strides of whole rows, are multiples of 16."""
    return frozenset(name for name, kind in signature.items() if kind[0] == "*" or (kind == "i64" and name.endswith("_stride")))


def storage_cases() -> Iterator[tuple[Storage, bool, str, tuple[int, ...]]]:
    """What ``compile_check`` tries of storage: (storage, NATIVE, Triton's name of the pages' type, architectures)."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield Storage.SAME, False, dtype, (80, 90, 100)
    for storage in (Storage.FP8, Storage.NVFP4):
        yield storage, False, "u8", (80,)
        yield storage, True, "u8", (90, 100)
    yield Storage.INT8, False, "u8", (80, 90, 100)



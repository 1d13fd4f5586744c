"""What the Triton attention kernels share: which tokens a program reads, where they lie, and their stored numbers as numbers.

Everything that is multiplied by a stride has 64 bits: a pool has more than 2**31 elements, and Triton passes a small stride as 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.triton_numbers import e2m1_to_float, e4m3_to_float


def _num_left_out(lowest: tl.tensor, SINKS: tl.constexpr, REACH: tl.constexpr, BLOCK_TOKENS: tl.constexpr) -> tl.tensor:
    """Tokens between the sinks and the first block of tokens that a query at position ``lowest`` sees: a multiple of the block.

    Blocks thus begin at the same tokens for every query, and what a query does not see of its first block adds exactly nothing.
    """
    if REACH == 0:
        return lowest * 0
    return tl.maximum(lowest - REACH + 1 - SINKS, 0) // BLOCK_TOKENS * BLOCK_TOKENS


def _place_of(token: tl.tensor, SINKS: tl.constexpr, BUBBLE: tl.constexpr, RING: tl.constexpr) -> tl.tensor:
    """The map of :class:`kvtier.kernels.visibility.Visibility`: a line (``RING`` 0) or a ring."""
    behind = token - SINKS
    if RING > 0:
        behind = behind % RING
    return tl.where(token < SINKS, token, behind + SINKS + BUBBLE)


def _pages_of(table: tl.tensor, source_rows: tl.tensor, sequence: tl.tensor, token: tl.tensor, place: tl.tensor, wanted: tl.tensor,
              field: tl.constexpr, num_pages: tl.tensor, max_blocks: tl.tensor, layer_offset: tl.tensor, table_sequence_stride: tl.tensor,
              table_field_stride: tl.tensor, table_block_stride: tl.tensor, source_stride: tl.tensor, TOKENS_PER_BLOCK: tl.constexpr,
              HAS_SOURCE: tl.constexpr) -> tl.tensor:
    """The page of each wanted token's field, int64; negative where the table has none."""
    row = sequence + token * 0
    if HAS_SOURCE:
        source = tl.load(source_rows + sequence * source_stride + token, mask=wanted, other=-1).to(tl.int64)
        row = tl.where(source < 0, row, source)
    block = place // TOKENS_PER_BLOCK
    address = row * table_sequence_stride + field * table_field_stride + block * table_block_stride
    entry = tl.load(table + address, mask=wanted & (block < max_blocks), other=-1).to(tl.int64)
    # Compared before the layer is added: -1 plus an offset would be somebody else's page.
    return tl.where((entry >= 0) & (entry + layer_offset < num_pages), entry + layer_offset, -1)


def _read_rows(pages: tl.tensor, scales: tl.tensor, page: tl.tensor, head: tl.tensor, inside: tl.tensor, page_stride: tl.tensor,
               head_stride: tl.tensor, token_stride: tl.tensor, dim_stride: tl.tensor, scale_page_stride: tl.tensor,
               scale_head_stride: tl.tensor, scale_token_stride: tl.tensor, scale_dim_stride: tl.tensor, FIRST: tl.constexpr,
               WIDTH: tl.constexpr, DIM: tl.constexpr, STORAGE: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Numbers ``FIRST`` to ``FIRST + WIDTH`` of the rows ``[tokens]``, without the tensor's scale. 0 where there is no page or number."""
    row = page * page_stride + head * head_stride + inside * token_stride
    has_page = (page >= 0)[:, None]
    if STORAGE == 3:   # whole bytes and whole scales are loaded, and then taken apart: an address for each number would cost too much
        byte = FIRST // 2 + tl.arange(0, WIDTH // 2).to(tl.int64)
        packed = tl.load(pages + row[:, None] + (byte * dim_stride)[None, :], mask=has_page & (byte < DIM // 2)[None, :], other=0)
        codes = tl.interleave(e2m1_to_float(packed & 15), e2m1_to_float(packed >> 4))
        group = FIRST // 16 + tl.arange(0, WIDTH // 16).to(tl.int64)
        scale_row = page * scale_page_stride + head * scale_head_stride + inside * scale_token_stride
        scale = tl.load(scales + scale_row[:, None] + (group * scale_dim_stride)[None, :], mask=has_page & (group < DIM // 16)[None, :],
                        other=0)
        groups = tl.reshape(codes, [codes.shape[0], WIDTH // 16, 16]) * e4m3_to_float(scale, NATIVE)[:, :, None]
        numbers = tl.reshape(groups, [codes.shape[0], WIDTH])
    else:
        dim = FIRST + tl.arange(0, WIDTH).to(tl.int64)
        stored = tl.load(pages + row[:, None] + (dim * dim_stride)[None, :], mask=has_page & (dim < DIM)[None, :], other=0)
        numbers = e4m3_to_float(stored, NATIVE) if STORAGE == 1 else stored
    return numbers


def _capped(scores: tl.tensor, soft_cap: tl.tensor) -> tl.tensor:
    """``soft_cap * tanh(scores / soft_cap)``; by a series near 0, where the difference of two exponentials would lose its digits."""
    x = scores / soft_cap
    square = x * x
    near = x * (1 + square * (-0.33333333333 + square * (0.13333333333 + square * (-0.05396825397 + square * 0.02186948854))))
    # NaN stays NaN. On a GPU the smaller of it and 20 would be 20, and the score that of the best key.
    far = 1 - 2 / (tl.exp2(tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL) * 2.885390081777927) + 1)
    return soft_cap * tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


# Applied as functions: as decorators they would take the types away from the type checker.
num_left_out = triton.jit(_num_left_out)
place_of = triton.jit(_place_of)
pages_of = triton.jit(_pages_of)
read_rows = triton.jit(_read_rows)
capped = triton.jit(_capped)

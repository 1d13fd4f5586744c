"""Run by test_triton_write in a process of its own: the write path's Triton kernels, interpreted, against the torch paths, bit by bit.

TRITON_INTERPRET must be set before triton is imported, and it then holds for the whole process. A program takes about 0.6 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from kvtier.kernels.append import append_host
from kvtier.kernels.block_offsets import ScratchWindow, fill_offsets_host
from kvtier.kernels.fused_write import fused_write_torch
from kvtier.kernels.gather import gather_torch
from kvtier.kernels.indexer_scatter import scatter_torch
from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch, quantise_nvfp4_torch
from kvtier.kernels.partial_copy import partial_copy_torch
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.rotary import Rotary, RotaryStyle
from kvtier.kernels.storage import Storage, StoredPages
from kvtier.kernels.triton_append import append_triton
from kvtier.kernels.triton_block_offsets import fill_offsets_triton
from kvtier.kernels.triton_fused_write import fused_write_triton
from kvtier.kernels.triton_gather import gather_triton
from kvtier.kernels.triton_nvfp4 import dequantise_nvfp4_triton, quantise_nvfp4_triton
from kvtier.kernels.triton_partial_copy import partial_copy_triton
from kvtier.kernels.triton_scatter import scatter_triton
from kvtier.kernels.triton_value_tail import zero_tail_triton
from kvtier.kernels.value_tail import zero_tail_torch

LAYERS, SEQUENCES, MAX_BLOCKS, BLOCKS = 2, 3, 3, 12
STORED = {Storage.SAME: None, Storage.FP8: torch.float8_e4m3fn, Storage.INT8: torch.int8, Storage.NVFP4: torch.uint8}


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if tensor is None else tensor.contiguous().view(torch.uint8)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, tokens_first: bool = False) -> torch.Tensor:
    """Bytes of 0xFF: NaN in every floating-point dtype. ``[pages, heads, tokens, dim]``, or the same with tokens before heads."""
    if tokens_first:
        return poisoned((shape[0], shape[2], shape[1], shape[3]), dtype).transpose(1, 2)
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)


def make_pages(storage: Storage, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int, tokens: int, kv_factor: int,
               tokens_first: bool) -> StoredPages:
    """Poisoned pages; values have a tensor of their own where their width differs."""
    stored_dtype = STORED[storage] or dtype
    num_pages = BLOCKS * LAYERS * kv_factor

    def make(dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = poisoned((num_pages, heads, tokens, dim // 16), torch.uint8, tokens_first) if storage is Storage.NVFP4 else None
        return poisoned((num_pages, heads, tokens, storage.stored_dim(dim)), stored_dtype, tokens_first), scales

    keys, key_scales = make(key_dim)
    values, value_scales = (keys, key_scales) if value_dim == key_dim else make(value_dim)
    scales = (1.0, 1.0) if storage is Storage.SAME else (0.037, 0.011) if storage is not Storage.NVFP4 else (0.0021, 0.0007)
    return StoredPages(storage, keys, values, key_scales, value_scales, *scales)


def make_table(kv_factor: int, generator: torch.Generator) -> torch.Tensor:
    slots = torch.randperm(BLOCKS, generator=generator)[:SEQUENCES * MAX_BLOCKS].view(SEQUENCES, MAX_BLOCKS)
    table = torch.stack([slots, slots], dim=1).int() * (LAYERS * kv_factor)
    table[:, 1] += kv_factor - 1
    return table


def copies(stored: StoredPages) -> StoredPages:
    """The same pages once more. ``clone`` keeps the strides."""
    keys = stored.keys.clone()
    key_scales = None if stored.key_block_scales is None else stored.key_block_scales.clone()
    if stored.values is stored.keys:
        return StoredPages(stored.storage, keys, keys, key_scales, key_scales, stored.key_scale, stored.value_scale)
    value_scales = None if stored.value_block_scales is None else stored.value_block_scales.clone()
    return StoredPages(stored.storage, keys, stored.values.clone(), key_scales, value_scales, stored.key_scale, stored.value_scale)


def same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    """Equal to the bit, but for the last place of bfloat16: the interpreter cuts what a GPU, and torch, round."""
    if found is not None and wanted is not None and found.dtype == torch.bfloat16:
        one, other = found.contiguous().view(torch.int16).int(), wanted.contiguous().view(torch.int16).int()
        return bool((((one - other).abs() <= 1) & ((one == -1) == (other == -1))).all())
    return torch.equal(bits(found), bits(wanted))


def same_pages(one: StoredPages, other: StoredPages) -> bool:
    pairs = ((one.keys, other.keys), (one.values, other.values), (one.key_block_scales, other.key_block_scales),
             (one.value_block_scales, other.value_block_scales))
    return all(same(found, wanted) for found, wanted in pairs)


def append_cases() -> Iterator[tuple[str, bool]]:
    """Random calls with skipped, shared and bad tokens among the good ones."""
    cases = (
        (Storage.SAME, torch.float32, 3, 64, 64, 4, 2, False), (Storage.SAME, torch.bfloat16, 3, 20, 20, 2, 2, True),
        (Storage.SAME, torch.float16, 1, 8, 8, 16, 2, False), (Storage.SAME, torch.bfloat16, 1, 48, None, 4, 1, False),
        (Storage.SAME, torch.float32, 9, 256, 72, 4, 1, True), (Storage.FP8, torch.float32, 2, 20, 20, 4, 2, True),
        (Storage.FP8, torch.bfloat16, 1, 64, 16, 4, 1, False), (Storage.INT8, torch.float16, 3, 24, 24, 2, 2, False),
        (Storage.NVFP4, torch.float32, 2, 48, 48, 4, 2, True), (Storage.NVFP4, torch.bfloat16, 1, 64, 16, 4, 1, False))
    for seed, (storage, dtype, heads, key_dim, value_dim, tokens, kv_factor, tokens_first) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        stored = make_pages(storage, dtype, heads, key_dim, value_dim or key_dim, tokens, kv_factor, tokens_first)
        table = make_table(kv_factor, generator)
        table[0, 1, 2] = -1                                  # null values: a page again once the layer is added
        table[1, 0, 1] = -1                                  # null keys
        table[1, 0, 2] = BLOCKS * LAYERS * kv_factor - 1     # beyond the pool once the layer is added
        table[2, :, 2] = 2**31 - 1
        # A token for every block, so that each entry is tried; then some that must be left out.
        sequence, block = torch.arange(SEQUENCES).repeat_interleave(MAX_BLOCKS), torch.arange(MAX_BLOCKS).repeat(SEQUENCES)
        position = block * tokens + torch.randint(tokens, block.shape, generator=generator)
        sequence = torch.cat([sequence, torch.tensor([-1, 3, 0, 0, -5])])
        position = torch.cat([position, torch.tensor([0, 0, -1, MAX_BLOCKS * tokens, 0])])

        def draw(dim: int, dtype: torch.dtype = dtype, heads: int = heads, count: int = len(sequence),
                 generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(heads, count, dim, generator=generator).to(dtype).transpose(0, 1)

        key, value = draw(key_dim), None if value_dim is None else draw(value_dim)
        key[0, 0, 0], key[1, -1] = float("nan"), 0.0
        first = torch.tensor([0, 0, tokens]) if seed % 2 else None
        places = TokenPlaces(table, sequence.int() if seed % 2 else sequence, position, first)
        wanted, found = copies(stored), copies(stored)
        append_host(wanted, key, value, places, kv_factor)
        append_triton(found, key, value, places, kv_factor)
        yield (f"append {storage.name} {dtype} heads={heads} dims={key_dim},{value_dim} tokens_first={tokens_first}",
               same_pages(found, wanted) and not same_pages(wanted, stored))


def fused_cases() -> Iterator[tuple[str, bool]]:
    """Both styles, partial rotation, none, odd numbers of heads, two widths, FP8 queries, tokens that are not written, no update."""
    half, inter = RotaryStyle.HALF_SPLIT, RotaryStyle.INTERLEAVED
    cases = (
        (Storage.SAME, torch.float32, 3, 1, 16, 16, half, 16, True), (Storage.SAME, torch.bfloat16, 5, 5, 20, 20, inter, 12, True),
        (Storage.SAME, torch.float16, 1, 1, 24, 8, half, 10, False), (Storage.FP8, torch.bfloat16, 2, 2, 16, 16, inter, 16, True),
        (Storage.INT8, torch.float32, 4, 2, 16, 32, half, 0, False), (Storage.NVFP4, torch.bfloat16, 3, 1, 32, 32, half, 32, True),
        (None, torch.float32, 3, 1, 16, 16, inter, 16, True))
    for seed, (storage, dtype, query_heads, kv_heads, dim, value_dim, style, rotary_dim, has_bias) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        kv_factor = 2 if dim == value_dim else 1
        stored = make_pages(storage or Storage.SAME, dtype, kv_heads, dim, value_dim, 4, kv_factor, seed % 2 == 1)
        table = make_table(kv_factor, generator)
        table[1, 0, 1] = -1
        sequence, position = torch.tensor([0, 0, 1, 2, -1]).int(), torch.tensor([5, 11, 4, 2, 0])
        places = TokenPlaces(table, sequence, position, torch.tensor([6, 0, 0]) if seed % 2 else None)
        columns = (query_heads + kv_heads) * dim + kv_heads * value_dim
        qkv, bias = torch.randn(5, columns, generator=generator).to(dtype), torch.randn(columns, generator=generator).to(dtype)
        angles = torch.randn(20, rotary_dim // 2, generator=generator)
        rotary = Rotary(angles.cos(), angles.sin(), style) if rotary_dim else None
        query_dtype = torch.float8_e4m3fn if storage is Storage.FP8 else dtype
        results = []
        for run in (fused_write_torch, fused_write_triton):
            pages, out = copies(stored), poisoned((5, query_heads, dim), query_dtype)
            run(qkv, bias if has_bias else None, rotary, torch.tensor([5, 11, 4, 19, 0]), out, 1.0 if query_dtype == dtype else 0.02,
                pages if storage is not None else None, places, kv_heads, kv_factor)
            results.append((pages, out))
        (wanted, queries), (found, found_queries) = results
        agrees = same_pages(found, wanted) and same(found_queries, queries) and bool(queries.float().isfinite().all())
        yield f"fused {storage} {dtype} {style.name}", agrees and same_pages(wanted, stored) == (storage is None)


def tail_cases() -> Iterator[tuple[str, bool]]:
    """Lengths with and without a tail, a null entry, one beyond the pool and a length beyond the table."""
    for seed, (storage, dtype) in enumerate(((Storage.SAME, torch.bfloat16), (Storage.NVFP4, torch.float32), (Storage.FP8, torch.float32))):
        kv_factor = 1 if storage is Storage.FP8 else 2
        stored = make_pages(storage, dtype, 3, 32, 32, 4, kv_factor, seed == 1)
        table = make_table(kv_factor, torch.Generator().manual_seed(seed))
        for lengths in ([6, 8, 1], [11, 0, 13], [13, -2, 3]):   # 13: what lies behind the row is the next one's
            wanted, found = copies(stored), copies(stored)
            if lengths[0] == 11:
                table[0, 1, 2] = -1
            offsets = range(0, LAYERS * kv_factor, kv_factor) if seed else range(kv_factor, 2 * kv_factor, kv_factor)
            zero_tail_torch(wanted.values, wanted.value_block_scales, table, torch.tensor(lengths), offsets)
            zero_tail_triton(found.values, found.value_block_scales, table, torch.tensor(lengths).int(), offsets)
            changed = not same_pages(wanted, stored)
            yield f"value tail {storage.name} {lengths}", same_pages(found, wanted) and changed == (lengths[0] != 11)


def scatter_cases() -> Iterator[tuple[str, bool]]:
    for seed, key_bytes in enumerate((20, 32)):
        generator = torch.Generator().manual_seed(seed)
        memory = torch.full((5, 3, 8, 2, key_bytes + 4), 0xFF, dtype=torch.uint8)
        keys = torch.randint(0, 256, (7, key_bytes), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0, 256, (7, 4), dtype=torch.uint8, generator=generator)
        order = torch.randperm(12, generator=generator)[:7]
        key_slots, scale_slots = order * key_bytes + 3, 400 + order * 4
        key_slots[1], scale_slots[2], key_slots[3] = -1, -9, 10**9
        wanted, found = memory.clone(), memory.clone()
        for target, scatter in ((wanted, scatter_torch), (found, scatter_triton)):
            cache = target[:, 1] if seed else target[:, 1].transpose(1, 2)
            scatter(cache, keys, scales, key_slots.int() if seed else key_slots, scale_slots)
        yield f"scatter {key_bytes}", torch.equal(wanted, found) and not torch.equal(wanted, memory)


def copy_cases() -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(1)
    for dtype, tokens_first, tokens in ((torch.bfloat16, False, 3), (torch.float32, True, 4), (torch.uint8, False, 1),
                                        (torch.float64, True, 2)):
        shape = (4, 2, 2, *((4, 3) if tokens_first else (3, 4)), 12 * dtype.itemsize)
        memory = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype) for _ in range(2)]
        source, destination = (tensor.transpose(3, 4) if tokens_first else tensor for tensor in memory)
        wanted, found = destination.clone(), destination.clone()
        for target, copy in ((wanted, partial_copy_torch), (found, partial_copy_triton)):
            copy(target, source[:3], [(2, 0), (0, 3)], tokens)
        yield f"copy {dtype} {tokens}", torch.equal(bits(found), bits(wanted)) and not torch.equal(bits(wanted), bits(destination))


def offset_cases() -> Iterator[tuple[str, bool]]:
    indptr, slots = torch.tensor([0, 3, 3, 8]), torch.tensor([4, -1, 9, 0, 19, 25, 7, 3])
    scratch = ScratchWindow(torch.tensor([1, 0, 2]).int(), torch.tensor([3, 0, 4]).int(), torch.tensor([[5, 6], [1, 1], [8, 25]]).int())
    for has_scratch in (False, True):
        for width, dtype in ((5, torch.int32), (300, torch.int64)):
            wanted, found = (torch.full((2, 5, 2, width + 3), 77, dtype=torch.int32)[:, :4, :, :width] for _ in range(2))
            for tables, fill in ((wanted, fill_offsets_host), (found, fill_offsets_triton)):
                fill(tables, indptr.to(dtype), slots.to(dtype), (6, 1), (1, 0), 20, scratch if has_scratch else None)
            yield f"offsets {width} {has_scratch}", torch.equal(found, wanted) and not bool((wanted == 77).any())


def gather_cases() -> Iterator[tuple[str, bool]]:
    """Tokens of scattered pages, some of which are not there; strides with gaps, more heads than one program has, odd widths."""
    for seed, (dtype, heads, dim) in enumerate(((torch.bfloat16, 3, 20), (torch.float32, 17, 128), (torch.uint8, 1, 576),
                                                (torch.float16, 2, 5))):
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randint(0, 256, (6, 4, heads + 1, (dim + 3) * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
        pages = memory[:, :, 1:, 3:].transpose(1, 2)   # [pages, heads, tokens, dim]
        page, inside = torch.randint(-1, 6, (2, 11), generator=generator)
        page[4] = -1
        wanted, found = gather_torch(pages, page, inside.clamp(0, 3)), gather_triton(pages, page, inside.clamp(0, 3))
        yield f"gather {dtype}", torch.equal(bits(found), bits(wanted)) and not bool(wanted[page < 0].any()) and bool(wanted.any())


def nvfp4_cases() -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(40, 3, 32, generator=generator) * torch.exp2(torch.randint(-14, 12, (40, 3, 1), generator=generator))
    numbers[0, 0, 3], numbers[0, 1, :], numbers[1, 0, 5], numbers[1, 1, 7] = float("nan"), -0.0, float("inf"), 1e-30
    for dtype, scale in ((torch.float32, 0.013), (torch.bfloat16, 0.5), (torch.float16, 0.0), (torch.float32, 1.0)):
        wanted, found = quantise_nvfp4_torch(numbers.to(dtype), scale), quantise_nvfp4_triton(numbers.to(dtype), scale)
        back = [run(*wanted, scale, dtype).nan_to_num(99.0) for run in (dequantise_nvfp4_torch, dequantise_nvfp4_triton)]
        yield f"nvfp4 {dtype} {scale}", all(map(torch.equal, found, wanted)) and torch.equal(*map(bits, back))
    scales, codes = torch.arange(256, dtype=torch.uint8), torch.randint(0, 256, (256, 8), dtype=torch.uint8, generator=generator)
    back = [run(codes, scales[:, None], 0.37, torch.float32) for run in (dequantise_nvfp4_torch, dequantise_nvfp4_triton)]
    yield "nvfp4 every scale", torch.equal(*(bits(numbers.nan_to_num(99.0)) for numbers in back))


def main() -> int:
    """Exit code 0 when every case agrees."""
    failed = 0
    for cases in (append_cases, fused_cases, tail_cases, scatter_cases, copy_cases, offset_cases, gather_cases, nvfp4_cases):
        for name, agrees in cases():   # all of them, also after one has failed
            print(f"{name}: {'same' if agrees else 'DIFFERENT'}")
            failed += not agrees
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""MLA append: latent and rotary part lie one behind the other in one row, written once, in every storage type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.mla_append import append_mla
from kvtier.kernels.nvfp4 import quantise_nvfp4
from kvtier.kernels.quantise import to_storage

LAYERS, BLOCKS, TOKENS = 2, 6, 16


def make_table():
    slots = torch.tensor([[4, 0], [5, 2]])
    return torch.stack([slots, slots], 1).int() * LAYERS


def place_of(sequence, position):
    return int(make_table()[sequence, 0, position // TOKENS]) + 1, position % TOKENS


@examples(40)
@given(storage=st.sampled_from(["float32", "bfloat16", "fp8", "nvfp4"]), latent=st.sampled_from([64, 512]), rope=st.sampled_from([16, 64]),
       lengths=st.tuples(st.integers(0, 32), st.integers(0, 32)), seed=st.integers(0, 1000))
def test_both_parts_become_one_row_and_nothing_else_changes(poison, same_bits, storage, latent, rope, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    dim, packed = latent + rope, 2 if storage == "nvfp4" else 1
    dtype = {"fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}.get(storage) or getattr(torch, storage)
    pages = poison((BLOCKS * LAYERS, 1, TOKENS, dim // packed), dtype)
    scales = poison((BLOCKS * LAYERS, 1, TOKENS, dim // 16), torch.uint8) if packed == 2 else None
    expected, expected_scales = pages.clone(), None if scales is None else scales.clone()
    sequences = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.randn(len(positions), dim, generator=generator).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    scale = 0.02 if storage in ("fp8", "nvfp4") else 1.0
    append_mla(pages, rows[:, :latent], rows[:, latent:], make_table(), sequences, positions, layer=1, num_layers=LAYERS,
               scale_pages=scales, scale=scale)
    for token, (sequence, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        page, inside = place_of(sequence, position)
        if packed == 2:
            expected[page, 0, inside], expected_scales[page, 0, inside] = quantise_nvfp4(rows[token], scale)
        else:
            row = to_storage(rows[token], dtype, scale) if storage == "fp8" else rows[token]
            expected.view(torch.uint8)[page, 0, inside] = row.view(torch.uint8)
    assert same_bits(pages, expected)
    assert scales is None or same_bits(scales, expected_scales)


@pytest.mark.parametrize(("change", "message"), [
    ({"kpe": torch.zeros(3, 15)}, "tokens_per_block, latent_dim + rope_dim] = [any, 1, any, 79]"),
    ({"kpe": torch.zeros(2, 16)}, "kpe has shape (2, 16): pass [nnz, rope_dim] = [3, any]"),
    ({"ckv": torch.zeros(3, 1, 64)}, "ckv has shape (3, 1, 64)"),
    ({"pages": torch.zeros(12, 2, 16, 80)}, "pages has shape (12, 2, 16, 80)"),
    ({"positions": torch.tensor([0, 1, 32])}, "positions[2]=32 (sequence 0)"),
    ({"first_writable": torch.tensor([1, 0])}, "positions[0]=0 (sequence 0) lies in a block that others share"),
    ({"scale": 2.0}, "key_scale=2.0 with a floating-point dtype"),
    ({"pages": torch.zeros(12, 1, 16, 40, dtype=torch.uint8), "scale_pages": torch.zeros(12, 1, 16, 4, dtype=torch.uint8)},
     "scale_pages has shape (12, 1, 16, 4): pass [pages, 1, tokens_per_block, dim / 16] = [12, 1, 16, 5]"),
    ({"pages": torch.zeros(12, 1, 16, 40, dtype=torch.uint8), "scale_pages": torch.zeros(12, 1, 16, 5, dtype=torch.uint8),
      "ckv": torch.zeros(3, 56), "kpe": torch.zeros(3, 24)}, "latent_dim=56: with NVFP4 a multiple of 16"),
])
def test_a_bad_call_is_refused_before_anything_is_written(poison, same_bits, change, message):
    call = {"pages": poison((BLOCKS * LAYERS, 1, TOKENS, 80), torch.float32), "ckv": torch.zeros(3, 64), "kpe": torch.zeros(3, 16),
            "table": make_table(), "sequence_of_token": torch.zeros(3, dtype=torch.int64), "positions": torch.arange(3),
            "layer": 1, "num_layers": LAYERS} | change
    before = call["pages"].clone()
    with pytest.raises(RequestError) as caught:
        append_mla(**call)
    assert message in str(caught.value)
    assert same_bits(call["pages"], before)

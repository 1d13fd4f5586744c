"""Attention over 8-bit and 4-bit pages as the write path leaves them: dequantised on load, keys and values with scales of their own."""

from __future__ import annotations

import pytest
import torch
from attention_batch import NVFP4, AttentionBatch, relative_error

from kvtier.errors import RequestError
from kvtier.kernels import attention_decode, attention_prefill, write_kv
from kvtier.kernels.attention_reference import attention_reference

QUANTISED = [torch.float8_e4m3fn, torch.int8, NVFP4]
COARSENESS = {torch.float8_e4m3fn: 0.06, torch.int8: 0.03, NVFP4: 0.2}
"""How far a result may be from the one over what was written: measured, on normal numbers, and rounded up."""


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_the_write_path_stores_is_what_attention_reads(dtype):
    """Written by write_kv, read by attention: as far from exact attention as the storage is coarse, and no farther."""
    scales = {torch.float8_e4m3fn: (0.01, 0.02), torch.int8: (0.03, 0.05), NVFP4: (0.002, 0.004)}[dtype]
    batch = AttentionBatch([70], tokens_per_block=16, key_dim=64, value_dim=64, dtype=dtype, scales=scales)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(70, 2, 64, generator=generator), torch.randn(70, 2, 64, generator=generator) * 1.3
    tokens = torch.arange(70)
    storage = {name: value for name, value in batch.how.items() if name != "visibility"}
    write_kv(batch.pages, keys, values, batch.table, torch.zeros_like(tokens), tokens, **storage)
    query = batch.queries(9)
    out = attention_prefill(query, batch.pages, batch.table[0], 61, **batch.how)
    exact = AttentionBatch([70], tokens_per_block=16, key_dim=64, value_dim=64)
    exact.keys, exact.values = [keys.double()], [values.double()]
    assert relative_error(out, exact.expected(0, query, range(61, 70))) < COARSENESS[dtype]
    reference = attention_reference(query, batch.pages, batch.table[0], 61, **batch.how)
    assert relative_error(out, reference) < 1e-5


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_scale_of_keys_is_not_that_of_values(dtype):
    """The mistake that gives no error: each scale matters, and each at its own place."""
    batch = AttentionBatch([30], dtype=dtype, scales=(0.03, 0.01))
    query, lengths = batch.queries(1) * 3, torch.tensor([30])
    expected = batch.expected(0, query, [29])
    for key_scale, value_scale in ((0.01, 0.01), (0.03, 0.03), (0.01, 0.03)):
        how = batch.how | {"key_scale": key_scale, "value_scale": value_scale}
        assert relative_error(attention_decode(query, batch.pages, batch.table, lengths, **how), expected) > 0.1
    assert relative_error(attention_decode(query, batch.pages, batch.table, lengths, **batch.how), expected) < 1e-5


def test_block_scales_are_found_page_for_page_beside_the_numbers():
    """Scales of another layer, or of another page, are another result."""
    batch = AttentionBatch([30], dtype=NVFP4, scales=(0.03, 0.01))
    query, lengths = batch.queries(1), torch.tensor([30])
    expected = batch.expected(0, query, [29])
    shifted = batch.how | {"scale_pages": batch.scale_pages.roll(1, dims=0)}
    out = attention_decode(query, batch.pages, batch.table, lengths, **shifted)
    assert not relative_error(out, expected) < 0.1
    assert relative_error(attention_decode(query, batch.pages, batch.table, lengths, **batch.how), expected) < 1e-5


def test_values_in_a_pool_of_their_own_have_block_scales_of_their_own():
    """As wide as the keys' are, so that the keys' would be taken without an error."""
    batch = AttentionBatch([30], dtype=NVFP4, scales=(0.03, 0.01))
    query = batch.queries(1)
    apart = batch.how | {"kv_factor": 1, "value_pages": batch.pages[1::2], "scale_pages": batch.scale_pages[::2],
                         "value_scale_pages": batch.scale_pages[1::2]}
    out = attention_decode(query, batch.pages[::2], batch.table // 2, torch.tensor([30]), **apart)
    assert relative_error(out, batch.expected(0, query, [29])) < 1e-5


def test_a_group_of_nan_reaches_those_who_see_it_and_nobody_else():
    batch = AttentionBatch([20], window=8, dtype=NVFP4, scales=(0.03, 0.01), first=[0])
    page = int(batch.table[0, 1, 1]) + 2   # the layer's values of tokens 4 to 7
    batch.scale_pages[page, 0, 1] = 0x7F
    lengths = torch.arange(1, 21)
    out = attention_decode(batch.queries(20), batch.pages, batch.table.expand(20, -1, -1), lengths, **batch.how)
    is_nan = out[:, :2].isnan().flatten(1).any(1)
    assert is_nan.nonzero().flatten().tolist() == list(range(5, 13)), "token 5 is seen from positions 5 to 12"
    assert not out[:, 2:].isnan().any()


@pytest.mark.parametrize(("change", "message"), [
    ({"scale_pages": None}, "pages has dtype uint8: pass scale_pages with them"),
    ({"key_scale": float("nan")}, "key_scale=nan: must be finite"),
    ({"value_scale": -1.0}, "value_scale=-1.0"),
    ({"value_dim": 8}, "value_dim=8: the pages hold values of 16 numbers; pass 1 to 16, a multiple of 16"),
    ({"value_dim": 32}, "value_dim=32"),
    ({"soft_cap": 0.0}, "soft_cap=0.0: pass a finite number greater than 0"),
    ({"soft_cap": float("inf")}, "soft_cap=inf"),
    ({"value_pages": torch.zeros(3, 2, 4, 8, dtype=torch.uint8)}, "value_pages with kv_factor=2"),
])
def test_storage_that_does_not_fit_is_refused(change, message):
    batch = AttentionBatch([9], dtype=NVFP4)
    with pytest.raises(RequestError) as caught:
        attention_decode(batch.queries(1), batch.pages, batch.table, torch.tensor([9]), **(batch.how | change))
    assert message in str(caught.value)

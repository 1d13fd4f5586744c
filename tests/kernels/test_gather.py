"""Gather: what lies in a sequence's pages, for debugging. A view of one page, zeros where there is none."""

from __future__ import annotations

import pytest
import torch
from attention_batch import NVFP4, AttentionBatch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels import gather_tokens


@examples(60)
@given(length=st.integers(0, 40), wanted=st.integers(0, 40), window=st.none() | st.integers(1, 50), sinks=st.integers(0, 9),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, NVFP4]), value_dim=st.sampled_from([16, 32]),
       tokens_first=st.booleans(), is_reference=st.booleans())
def test_the_first_tokens_are_what_was_written(reference_switch, length, wanted, window, sinks, dtype, value_dim, tokens_first,
                                               is_reference):
    scales = (1.0, 1.0) if dtype.is_floating_point and dtype.itemsize > 1 else (0.03, 0.01)
    batch = AttentionBatch([length], first=[0], window=window, sinks=0 if window is None else min(sinks, window - 1), dtype=dtype,
                           value_dim=value_dim, tokens_first=tokens_first, scales=scales)
    for is_value, rows in enumerate((batch.keys[0], batch.values[0])):
        with reference_switch(is_reference):
            found = gather_tokens(batch.pages, batch.table[0], min(wanted, length), is_value=bool(is_value), **batch.how)
        assert found.shape == rows[:wanted].shape
        assert torch.allclose(found.double(), rows[:wanted], rtol=1e-6, atol=0)   # 8 and 4 bits come out in float32


def test_one_page_is_a_view_and_no_copy():
    batch = AttentionBatch([9], tokens_per_block=4)
    found = gather_tokens(batch.pages, batch.table[0], 3, **batch.how)
    page = int(batch.table[0, 0, 0]) + 2
    assert found.shape == (3, 2, 16)
    assert found.data_ptr() == batch.pages[page].data_ptr()
    batch.pages[page, 1, 2, 5] = 7.0
    assert found[2, 1, 5] == 7.0
    assert gather_tokens(batch.pages, batch.table[0], 5, **batch.how).data_ptr() != found.data_ptr()


def test_a_null_page_is_zeros():
    batch = AttentionBatch([61], window=9, sinks=2)
    found = gather_tokens(batch.pages, batch.table[0], 61, **batch.how)
    assert torch.equal(found[:2].double(), batch.keys[0][:2])
    assert torch.equal(found[2:46], torch.zeros(44, 2, 16))
    assert torch.equal(found[54:].double(), batch.keys[0][54:])
    batch.table[0, 0, 0] = -1
    assert torch.equal(gather_tokens(batch.pages, batch.table[0], 2, **batch.how), torch.zeros(2, 2, 16))
    short = AttentionBatch([3])   # would be a view
    short.table[0, 0, 0] = -1
    assert torch.equal(gather_tokens(short.pages, short.table[0], 3, **short.how), torch.zeros(3, 2, 16))


def test_a_ring_has_its_last_tokens_and_zeros_before_them():
    batch = AttentionBatch([30], first=[0], window=9, sinks=2, ring=False)
    found = gather_tokens(batch.pages, batch.table[0], 30, **batch.how).double()
    assert torch.equal(found[:2], batch.keys[0][:2])
    assert torch.equal(found[23:], batch.keys[0][23:])
    assert not found[2:23].any()


@pytest.mark.parametrize(("tokens", "entry", "message"), [
    (-1, 0, "num_tokens=-1: the table's 5 blocks of 4 tokens hold 0 to 20"), (21, 0, "num_tokens=21"),
    (9, 10**6, r"table\[0, 0, 1\]=1000000 .*outside the pool"), (9, 1, r"table\[0, 0, 1\]=1 .*not the first page of this field"),
])
def test_what_cannot_be_gathered_is_refused(tokens, entry, message):
    batch = AttentionBatch([9])
    batch.table[0, 0, 1] = entry
    with pytest.raises(RequestError, match=message):
        gather_tokens(batch.pages, batch.table[0], tokens, **batch.how)

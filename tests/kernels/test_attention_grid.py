"""Paged attention over a drawn grid of models, storages and visibilities, against attention worked out in plain float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from attention_batch import NVFP4, AttentionBatch, relative_error
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.kernels import PrefillPlan, attention_decode, attention_prefill, attention_prefill_batch, page_reader
from kvtier.kernels.attention_reference import attention_reference
from kvtier.kernels.dispatch import kernel_paths

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
STORAGES = (*TOLERANCE, torch.float8_e4m3fn, torch.int8, NVFP4)


def tolerance(dtype: torch.dtype, query: torch.Tensor) -> float:
    """Of the coarser of the two; 8 and 4 bits are compared with what they stand for."""
    return max(TOLERANCE.get(dtype, 1e-5), TOLERANCE[query.dtype])


@st.composite
def models(draw):
    """Keywords of an AttentionBatch, without lengths."""
    dtype = draw(st.sampled_from(STORAGES))
    multiple = 16 if dtype == NVFP4 else 1
    widths = st.sampled_from([16, 32, 48] if multiple > 1 else [5, 8, 16, 24])
    key_dim, latent = draw(widths), draw(st.booleans())
    value_dim = draw(st.sampled_from([dim for dim in (5, 16, 24, 32, key_dim) if dim % multiple == 0 and (not latent or dim <= key_dim)]))
    window = draw(st.none() | st.integers(1, 20))
    return {
        "heads": 1 if latent else draw(st.integers(1, 3)), "group": draw(st.sampled_from([1, 2, 3, 7])), "key_dim": key_dim,
        "value_dim": value_dim, "latent": latent, "tokens_per_block": draw(st.sampled_from([1, 4, 16])), "window": window,
        "sinks": 0 if window is None else draw(st.integers(0, window - 1)), "dtype": dtype, "tokens_first": draw(st.booleans()),
        "scales": (1.0, 1.0) if dtype in TOLERANCE else (0.03, 0.03 if latent else 0.01), "seed": draw(st.integers(0, 1000))}


QUERIES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
CAPS = st.none() | st.sampled_from([0.5, 3.0])


@examples(120)
@given(model=models(), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3), queries=QUERIES, soft_cap=CAPS,
       in_place=st.booleans())
def test_decode_is_attention_over_what_is_visible(model, lengths, queries, soft_cap, in_place):
    """Pages brought together, or read where they lie; reading changes nothing in the pool."""
    batch = AttentionBatch(lengths, ring=None if model["seed"] % 3 else bool(model["seed"] % 2), **model)
    query = batch.queries(len(lengths), queries)
    before = batch.pages.clone()
    with mock.patch.object(page_reader, "PAGE_NUMBERS", 1 if in_place else 1 << 30):
        out = attention_decode(query, batch.pages, batch.table, torch.tensor(lengths), soft_cap=soft_cap, **batch.how)
    assert torch.equal(batch.pages.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))
    assert (out.dtype, out.shape) == (queries, (len(lengths), batch.heads * batch.group, batch.value_dim))
    for row, length in enumerate(lengths):
        expected = batch.expected(row, query[row:row + 1], [length - 1], soft_cap=soft_cap)
        assert relative_error(out[row:row + 1], expected) < tolerance(batch.dtype, query)


@examples(120)
@given(model=models(), chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=2), queries=QUERIES,
       soft_cap=CAPS)
def test_prefill_is_causal_attention_over_what_was_there_and_the_chunk(model, chunks, queries, soft_cap):
    lengths = [past + tokens for past, tokens in chunks]
    batch = AttentionBatch(lengths, first=[past for past, _ in chunks], **model)
    query = batch.queries(sum(tokens for _, tokens in chunks), queries)
    indptr = [0]
    for _, tokens in chunks:
        indptr.append(indptr[-1] + tokens)
    plan = PrefillPlan(indptr, [past for past, _ in chunks])
    out = attention_prefill_batch(query, batch.pages, batch.table, plan, soft_cap=soft_cap, **batch.how)
    assert out.shape == (*query.shape[:2], batch.value_dim)
    for row, (past, tokens) in enumerate(chunks):
        rows = slice(indptr[row], indptr[row + 1])
        expected = batch.expected(row, query[rows], range(past, past + tokens), soft_cap=soft_cap)
        assert relative_error(out[rows], expected) < tolerance(batch.dtype, query)


@examples(40)
@given(model=models(), past=st.integers(0, 12), tokens=st.integers(1, 4), soft_cap=CAPS)
def test_the_reference_says_the_same(model, past, tokens, soft_cap):
    batch = AttentionBatch([past + tokens], first=[past], **model)
    query = batch.queries(tokens)
    reference = attention_reference(query, batch.pages, batch.table[0], past, soft_cap=soft_cap, **batch.how)
    assert relative_error(reference, batch.expected(0, query, range(past, past + tokens), soft_cap=soft_cap)) < 1e-6


@pytest.mark.parametrize("group", [*range(1, 17), 71])
def test_any_ratio_of_heads(group):
    batch = AttentionBatch([37, 70], heads=2 if group < 71 else 1, group=group, tokens_per_block=16, key_dim=64, value_dim=64)
    query = batch.queries(33)
    out = attention_decode(query[:2], batch.pages, batch.table, torch.tensor([37, 70]), **batch.how)
    for row, length in enumerate((37, 70)):
        assert relative_error(out[row:row + 1], batch.expected(row, query[row:row + 1], [length - 1])) < 1e-5
    out = attention_prefill(query, batch.pages, batch.table[1], 37, **batch.how)
    assert relative_error(out, batch.expected(1, query, range(37, 70))) < 1e-5


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256),
                                                    (64, 256)])
@pytest.mark.parametrize("tokens_per_block", [16, 32, 64, 128])
def test_any_usual_head_and_page(key_dim, value_dim, tokens_per_block):
    batch = AttentionBatch([150], group=3, heads=1, tokens_per_block=tokens_per_block, key_dim=key_dim, value_dim=value_dim,
                           dtype=torch.bfloat16)
    query = batch.queries(21, torch.bfloat16)
    out = attention_prefill(query, batch.pages, batch.table[0], 129, **batch.how)
    assert relative_error(out, batch.expected(0, query, range(129, 150))) < 1e-2
    out = attention_decode(query[:1], batch.pages, batch.table, torch.tensor([150]), **batch.how)
    assert relative_error(out, batch.expected(0, query[:1], [149])) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_context_is_read_piece_by_piece(monkeypatch, dtype):
    """Pieces of 16 tokens: windows, sinks and ends that lie across them."""
    from kvtier.kernels import decode_cpu, prefill_cpu

    for module in (decode_cpu, prefill_cpu):
        monkeypatch.setattr(module, "tokens_per_piece", lambda *_: 16)
    for window, sinks in ((None, 0), (40, 0), (40, 5), (17, 16), (3, 1)):
        batch = AttentionBatch([201, 150, 3], first=[170, 149, 0], window=window, sinks=sinks, dtype=dtype)
        query = batch.queries(31, dtype)
        out = attention_prefill(query, batch.pages, batch.table[0], 170, **batch.how)
        assert relative_error(out, batch.expected(0, query, range(170, 201))) < TOLERANCE[dtype]
        lengths = torch.tensor([201, 150, 3])
        out = attention_decode(query[:3], batch.pages, batch.table, lengths, **batch.how)
        for row, length in enumerate(lengths.tolist()):
            assert relative_error(out[row:row + 1], batch.expected(row, query[row:row + 1], [length - 1])) < TOLERANCE[dtype]


def test_cross_attention_sees_all_keys_whatever_the_position():
    from kvtier.kernels import Visibility

    batch = AttentionBatch([50, 9, 0], tokens_per_block=8)
    query, everything = batch.queries(40), Visibility(is_causal=False)
    how = batch.how | {"visibility": everything}
    out = attention_prefill(query, batch.pages, batch.table[0], 50, **how)
    assert relative_error(out, batch.expected(0, query, range(40), is_causal=False)) < 1e-5
    out = attention_decode(query[:3], batch.pages, batch.table, torch.tensor([50, 9, 0]), **how)
    for row in range(3):
        assert relative_error(out[row:row + 1], batch.expected(row, query[row:row + 1], [0], is_causal=False)) < 1e-5
    plan = PrefillPlan([0, 30, 40, 40], [50, 9, 0], is_causal=False)
    out = attention_prefill_batch(query, batch.pages, batch.table, plan, **how)
    assert relative_error(out[30:], batch.expected(1, query[30:], range(10), is_causal=False)) < 1e-5
    assert relative_error(attention_reference(query[:3], batch.pages, batch.table[1], 9, **how),
                          batch.expected(1, query[:3], range(3), is_causal=False)) < 1e-6


def test_a_query_that_sees_no_key_gives_zeros_in_any_path(reference_kernels):
    batch = AttentionBatch([0, 3])
    assert kernel_paths("cpu").decode.__name__ == "decode_reference"
    out = attention_decode(batch.queries(2), batch.pages, batch.table, torch.tensor([0, 3]), **batch.how)
    assert torch.equal(out[0], torch.zeros(4, 16))
    assert out[1].abs().sum() > 0


def test_several_pools_in_one_model():
    """Layers of other shapes have pools, tables and windows of their own."""
    models = [AttentionBatch([30], window=9, sinks=2), AttentionBatch([30], heads=1, group=4, key_dim=32, value_dim=24),
              AttentionBatch([30], latent=True, heads=1, group=5, key_dim=24, value_dim=16)]
    for batch in models:
        query = batch.queries(1)
        out = attention_decode(query, batch.pages, batch.table, torch.tensor([30]), **batch.how)
        assert relative_error(out, batch.expected(0, query, [29])) < 1e-5


@pytest.mark.parametrize("gap", [0, 1])
def test_a_pool_beyond_the_32nd_bit_of_an_offset(gap):
    """The pages lie far apart in a file of zeros that takes no memory until it is touched: element numbers beyond 2**31. With a gap
    behind each page they are no multiples of anything, and so what pages are counted in."""
    import mmap

    elements, unit, dim = (1 << 31) + (1 << 20), 16, 64
    memory = mmap.mmap(-1, elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    numbers, size = torch.frombuffer(memory, dtype=torch.int8), unit * dim + gap
    pages = numbers[:elements // size * size].view(-1, size)[:, :unit * dim].unflatten(1, (1, unit, dim))
    last = pages.shape[0] - 2
    assert last * size > 2**31
    small = torch.randint(-127, 127, (4, 1, unit, dim), dtype=torch.int8)
    pages[last:] = small[2:]
    pages[:2] = small[:2]
    query = torch.randn(1, 2, dim)
    how = {"layer": 0, "key_scale": 0.02, "value_scale": 0.01}
    far = torch.tensor([[[0, last], [1, last + 1]]], dtype=torch.int32)
    near = torch.tensor([[[0, 2], [1, 3]]], dtype=torch.int32)
    out = attention_decode(query, pages, far, torch.tensor([30]), **how)
    assert torch.equal(out, attention_decode(query, small, near, torch.tensor([30]), **how))

"""Paged attention against a float64 reference and torch's own attention; poisoned pools; the mistakes that give no error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch.nn.functional import scaled_dot_product_attention

from kvtier.errors import RequestError
from kvtier.kernels import attention_decode, attention_prefill, write_kv
from kvtier.kernels.attention_reference import attention_reference
from kvtier.kernels.prefill_cpu import TILE

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SHAPES = {
    "heads": st.integers(1, 3), "tokens_per_block": st.sampled_from([1, 4, 16, 64]), "head_dim": st.sampled_from([5, 8, 64]),
    "layer": st.integers(0, 2), "dtype": st.sampled_from(list(TOLERANCE)), "tokens_first": st.booleans(), "seed": st.integers(0, 1000),
}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN when anything is NaN, and NaN is below no limit."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


@examples(100)
@given(past=st.integers(0, 70), tokens=st.integers(1, 9), group=st.integers(1, 4), **SHAPES)
def test_prefill_matches_the_reference(paged, past, tokens, group, dtype, **shape):
    batch = paged([past + tokens], dtype=dtype, **shape).write_without_kernel()
    query = batch.queries(tokens, group * batch.heads)
    out = attention_prefill(query, batch.pages, batch.table[0], past, **batch.address)
    assert out.dtype == dtype
    assert out.shape == query.shape
    reference = attention_reference(query, batch.pages, batch.table[0], past, layer=batch.layer)
    assert relative_error(out, reference) < TOLERANCE[dtype]


@examples(100)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3), group=st.integers(1, 4), **SHAPES)
def test_decode_matches_the_reference(paged, lengths, group, dtype, **shape):
    batch = paged(lengths, dtype=dtype, **shape).write_without_kernel()
    query = batch.queries(len(lengths), group * batch.heads)
    out = attention_decode(query, batch.pages, batch.table, torch.tensor(lengths), **batch.address)
    assert out.dtype == dtype
    reference = torch.cat([attention_reference(query[i:i + 1], batch.pages, batch.table[i], length - 1, layer=batch.layer)
                           for i, length in enumerate(lengths)])
    assert relative_error(out, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("past", "tokens"), [(0, 200), (160, 40), (333, 1), (31, 65)])
def test_prefill_agrees_with_torchs_own_attention(paged, dtype, past, tokens):
    batch = paged([past + tokens], heads=3, tokens_per_block=32, head_dim=64, dtype=dtype).write_without_kernel()
    query = batch.queries(tokens, 9)
    visible = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    keys, values = (rows.double().repeat_interleave(3, dim=1).transpose(0, 1) for rows in (batch.keys[0], batch.values[0]))
    expected = scaled_dot_product_attention(query.double().transpose(0, 1), keys, values, attn_mask=visible).transpose(0, 1)
    out = attention_prefill(query, batch.pages, batch.table[0], past, **batch.address)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_agrees_with_torchs_own_attention_over_a_long_context(paged, dtype):
    lengths = [1500, 1, 32, 777]
    batch = paged(lengths, heads=3, tokens_per_block=32, head_dim=64, dtype=dtype).write_without_kernel()
    query = batch.queries(4, 9)
    out = attention_decode(query, batch.pages, batch.table, torch.tensor(lengths, dtype=torch.int32), **batch.address)
    for i in range(4):
        keys, values = (rows.double().repeat_interleave(3, dim=1).transpose(0, 1) for rows in (batch.keys[i], batch.values[i]))
        expected = scaled_dot_product_attention(query[i, :, None].double(), keys, values)[:, 0]
        assert relative_error(out[i], expected) < TOLERANCE[dtype]


def test_written_in_chunks_and_read_back_is_causal_attention_over_the_whole_text(paged):
    batch = paged([90], heads=2, tokens_per_block=16, head_dim=16)
    query = batch.queries(90, 4)
    rows = []
    for begin, end in ((0, 40), (40, 64), (64, 87), (87, 88), (88, 89), (89, 90)):
        write_kv(batch.pages, *batch.chunk(begin, end), **batch.address)
        if end - begin > 1:
            rows.append(attention_prefill(query[begin:end], batch.pages, batch.table[0], begin, **batch.address))
        else:
            rows.append(attention_decode(query[begin:end], batch.pages, batch.table, torch.tensor([end]), **batch.address))
    keys, values = (rows.double().repeat_interleave(2, dim=1).transpose(0, 1) for rows in (batch.keys[0], batch.values[0]))
    expected = scaled_dot_product_attention(query.double().transpose(0, 1), keys, values, is_causal=True).transpose(0, 1)
    assert relative_error(torch.cat(rows), expected) < 1e-5


# What a result may not depend on. All of it to the last bit: reuse must not change a model's answers.

BITWISE = {"heads": 3, "tokens_per_block": 32, "head_dim": 64}


@pytest.mark.parametrize(("whole", "parts"), [((512, 768), [(736, 768)]), ((0, 300), [(0, 256), (256, 300)]),
                                              ((0, 300), [(0, 7), (7, 100), (100, 101), (101, 290), (290, 300)])])
def test_a_row_does_not_depend_on_the_chunk_it_comes_in(paged, whole, parts):
    """736 to 768 is what is left of the chunk 512 to 768 after 736 tokens were reused."""
    begin, end = whole
    batch = paged([end], **BITWISE).write_without_kernel()
    query = batch.queries(end, 9)
    reference = attention_prefill(query[begin:end], batch.pages, batch.table[0], begin, **batch.address)
    for first, last in parts:
        part = attention_prefill(query[first:last], batch.pages, batch.table[0], first, **batch.address)
        assert torch.equal(part, reference[first - begin:last - begin])


def test_a_row_does_not_depend_on_what_is_written_behind_it(paged):
    """The first chunk is computed before the second is there, and again when it is."""
    batch, before = paged([200], **BITWISE).write_without_kernel(), paged([200], **BITWISE).write_without_kernel()
    for slot in before.slots[0][4:]:
        before.blocks[slot] = float("nan")
    query = batch.queries(100, 9)
    assert torch.equal(attention_prefill(query, batch.pages, batch.table[0], 0, **batch.address),
                       attention_prefill(query, before.pages, before.table[0], 0, **before.address))


@pytest.mark.parametrize("tokens_per_block", [4, 32, 128])
def test_a_row_does_not_depend_on_slots_table_width_or_strides(paged, tokens_per_block):
    shape = BITWISE | {"tokens_per_block": tokens_per_block}
    one = paged([333], **shape).write_without_kernel()
    query = one.queries(77, 9)
    prefill = attention_prefill(query, one.pages, one.table[0], 256, **one.address)
    decode = attention_decode(query[:1], one.pages, one.table, torch.tensor([333]), **one.address)
    for seed, extra_blocks, tokens_first in ((1, 0, False), (2, 500, False), (3, 7, True)):
        other = paged([333, 900], seed=seed, extra_blocks=extra_blocks, tokens_first=tokens_first, **shape)
        other.keys[0], other.values[0] = one.keys[0], one.values[0]
        other.write_without_kernel()
        assert other.slots[0] != one.slots[0]
        assert torch.equal(prefill, attention_prefill(query, other.pages, other.table[0], 256, **other.address))
        assert torch.equal(decode, attention_decode(query[:1], other.pages, other.table[:1], torch.tensor([333]), **other.address))


def test_a_batch_of_eight_gives_what_each_gives_alone(paged):
    lengths = [1, 32, 33, 100, 256, 511, 1000, 1500]
    batch = paged(lengths, **BITWISE).write_without_kernel()
    query = batch.queries(8, 9)
    together = attention_decode(query, batch.pages, batch.table, torch.tensor(lengths), **batch.address)
    for i, length in enumerate(lengths):
        alone = attention_decode(query[i:i + 1], batch.pages, batch.table[i:i + 1], torch.tensor([length]), **batch.address)
        assert torch.equal(together[i:i + 1], alone)


# Mistakes that give no error.

def test_the_chunk_offset_counts(paged):
    """Without ``past`` a second chunk would see the first keys only."""
    batch = paged([40]).write_without_kernel()
    query = batch.queries(10, 4)
    reference = attention_reference(query, batch.pages, batch.table[0], 30, layer=batch.layer)
    assert relative_error(attention_prefill(query, batch.pages, batch.table[0], 30, **batch.address), reference) < 1e-5
    assert relative_error(attention_prefill(query, batch.pages, batch.table[0], 0, **batch.address), reference) > 0.1


def test_each_sequence_reads_its_own_pages(paged):
    batch = paged([17, 17, 17]).write_without_kernel()
    query = batch.queries(1, 4).expand(3, 4, 8)
    out = attention_decode(query, batch.pages, batch.table, torch.tensor([17, 17, 17]), **batch.address)
    for i in range(3):
        expected = attention_reference(query[:1], batch.pages, batch.table[i], 16, layer=batch.layer)[0]
        assert relative_error(out[i], expected) < 1e-5
        assert relative_error(out[(i + 1) % 3], expected) > 0.1


def test_keys_and_values_are_not_exchanged(paged):
    batch = paged([12]).write_without_kernel()
    query = batch.queries(3, 2)
    good = attention_prefill(query, batch.pages, batch.table[0], 9, **batch.address)
    exchanged = attention_prefill(query, batch.pages, batch.table[0].flip(0), 9, layer=batch.layer)
    assert relative_error(exchanged, good) > 0.1
    with pytest.raises(RequestError, match="not the first page of this field"):
        attention_prefill(query, batch.pages, batch.table[0].flip(0), 9, **batch.address)


def test_another_layer_is_another_result(paged):
    batch = paged([12]).write_without_kernel()
    query = batch.queries(1, 2)
    assert attention_decode(query, batch.pages, batch.table, torch.tensor([12]), layer=1).isfinite().all()
    assert attention_decode(query, batch.pages, batch.table, torch.tensor([12]), layer=0).isnan().all()   # that layer is poisoned


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 33])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_that_nobody_wrote_never_reach_the_result(paged, length, poison):
    batch = paged([length])
    batch.blocks.fill_(poison)
    batch.write_without_kernel()
    query = batch.queries(1, 4)
    for out in (attention_prefill(query, batch.pages, batch.table[0], length - 1, **batch.address),
                attention_decode(query, batch.pages, batch.table, torch.tensor([length]), **batch.address)):
        assert out.isfinite().all()


def test_a_query_that_sees_no_key_gives_zeros(paged):
    batch = paged([0, 9, 0]).write_without_kernel()
    query = batch.queries(3, 4)
    out = attention_decode(query, batch.pages, batch.table, torch.tensor([0, 9, 0]), **batch.address)
    assert torch.equal(out[0], torch.zeros(4, 8))
    assert torch.equal(out[2], torch.zeros(4, 8))
    assert out[1].abs().sum() > 0
    assert torch.equal(attention_decode(query, batch.pages, batch.table, torch.tensor([0, 0, 0]), **batch.address), torch.zeros(3, 4, 8))


def test_scores_beyond_the_range_of_exp_stay_finite(paged):
    batch = paged([40]).write_without_kernel()
    query = batch.queries(8, 2) * 1e6
    out = attention_prefill(query, batch.pages, batch.table[0], 32, **batch.address)
    assert relative_error(out, attention_reference(query, batch.pages, batch.table[0], 32, layer=batch.layer)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_result_is_rounded_to_half_precision(paged, dtype):
    """Scores, weights and sums are float32: but for ties of rounding, the result is the exact one in half precision. (A cap keeps
    decode from torch's own attention.)"""
    batch = paged([300], tokens_per_block=32, head_dim=64, dtype=dtype).write_without_kernel()
    query = batch.queries(1, 16)
    exact = attention_reference(query, batch.pages, batch.table[0], 299, layer=batch.layer).to(dtype)
    for out in (attention_prefill(query, batch.pages, batch.table[0], 299, **batch.address),
                attention_decode(query, batch.pages, batch.table, torch.tensor([300]), soft_cap=1e6, **batch.address)):
        assert (out == exact).double().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [5, 300, 5000], ids=["one piece", "one piece of some pages", "pieces"])
def test_weights_in_half_precision_cost_no_more_than_rounding_the_result(paged, dtype, tokens):
    """Parts are joined in float32: their number makes no difference."""
    batch = paged([tokens], tokens_per_block=32, head_dim=64, dtype=dtype).write_without_kernel()
    query = batch.queries(1, 16)
    exact = attention_reference(query, batch.pages, batch.table[0], tokens - 1, layer=batch.layer)
    found = attention_decode(query, batch.pages, batch.table, torch.tensor([tokens]), **batch.address)
    assert relative_error(found, exact) < 3 * relative_error(exact.to(dtype), exact)


@pytest.mark.parametrize("gap", [0, 1, 7, 24])
def test_pages_may_lie_apart_in_memory(paged, gap):
    """A pool whose rows are padded: the distance of two pages need not be a multiple of the distance of two heads."""
    batch = paged([20], layers=1, layer=0, kv_factor=1).write_without_kernel()
    count, *page = batch.pages.shape
    padded = torch.full((count, batch.pages[0].numel() + gap), math.nan)
    pages = padded[:, :batch.pages[0].numel()].unflatten(1, page)
    pages.copy_(batch.pages)
    query = batch.queries(5, 4)
    assert torch.equal(attention_prefill(query, pages, batch.table[0], 15, **batch.address),
                       attention_prefill(query, batch.pages, batch.table[0], 15, **batch.address))


def test_the_scale_can_be_given(paged):
    batch = paged([20]).write_without_kernel()
    query = batch.queries(5, 2)
    out = attention_prefill(query, batch.pages, batch.table[0], 15, scale=0.7, **batch.address)
    assert relative_error(out, attention_reference(query, batch.pages, batch.table[0], 15, layer=batch.layer, scale=0.7)) < 1e-5
    one = attention_decode(query[4:], batch.pages, batch.table, torch.tensor([20]), scale=0.7, **batch.address)
    assert relative_error(one, out[4:]) < 1e-5


def test_a_latent_row_is_key_and_value(paged):
    batch = paged([40], heads=1, kv_factor=1).write_without_kernel()
    query = batch.queries(10, 4)
    out = attention_prefill(query, batch.pages, batch.table[0], 30, **batch.address)
    reference = attention_reference(query, batch.pages, batch.table[0], 30, layer=batch.layer, kv_factor=1)
    assert relative_error(out, reference) < 1e-5


def test_the_query_may_be_wider_than_the_pool(paged):
    batch = paged([40], dtype=torch.bfloat16).write_without_kernel()
    query = batch.queries(10, 4, torch.float32)
    out = attention_prefill(query, batch.pages, batch.table[0], 30, **batch.address)
    assert out.dtype == torch.float32
    assert relative_error(out, attention_reference(query, batch.pages, batch.table[0], 30, layer=batch.layer)) < 1e-5


def test_a_query_that_asks_for_gradients_is_computed_without_them(paged):
    batch = paged([40]).write_without_kernel()
    query = batch.queries(1, 4).requires_grad_()
    assert not attention_prefill(query, batch.pages, batch.table[0], 39, **batch.address).requires_grad
    assert not attention_decode(query, batch.pages, batch.table, torch.tensor([40]), **batch.address).requires_grad


def test_no_queries_give_no_rows(paged):
    batch = paged([TILE]).write_without_kernel()
    assert attention_prefill(batch.queries(0, 4), batch.pages, batch.table[0], TILE, **batch.address).shape == (0, 4, 8)
    empty = torch.empty(0, dtype=torch.int64)
    assert attention_decode(batch.queries(0, 4), batch.pages, batch.table[:0], empty, **batch.address).shape == (0, 4, 8)


def prefill_call(batch):
    return dict(query=batch.queries(3, 4), pages=batch.pages, table_row=batch.table[0].clone(), past=6, **batch.address)


def decode_call(batch):
    return dict(query=batch.queries(2, 4), pages=batch.pages, table=batch.table.clone(), lengths=torch.tensor([9, 5]), **batch.address)


@pytest.mark.parametrize(("change", "message"), [
    ({"query": torch.zeros(3, 3, 8)}, "query has 3 heads: pass a multiple of the pool's 2 KV heads"),
    ({"query": torch.zeros(3, 0, 8)}, "query has 0 heads"),
    ({"query": torch.zeros(3, 4, 16)}, "query has shape (3, 4, 16): pass [tokens, query_heads, head_dim] = [any, any, 8]"),
    ({"query": torch.zeros(3, 4, 8, dtype=torch.int32)}, "query has dtype int32"),
    ({"query": torch.zeros(3, 4, 8, device="meta")}, "query is on meta"),
    ({"pages": torch.zeros(54, 2, 4, 8, dtype=torch.int16)}, "pages has dtype int16: pass float32 or bfloat16 or float16 or float64"),
    ({"past": -1}, "past=-1 and 3 queries: the table's 6 blocks of 4 tokens allow positions 0 to 23"),
    ({"past": 22}, "past=22"),
    ({"past": 20}, "table[0, 0, 3]=-1 (sequence 0, keys of positions 12 to 15): null"),
    ({"table_row": torch.zeros(1, 2, 6, dtype=torch.int32)}, "table_row has shape (1, 2, 6)"),
    ({"table_row": torch.full((2, 6), 10**6, dtype=torch.int32)}, "table[0, 0, 0]=1000000"),
    ({"layer": 3}, "layer=3"),
    ({"past": 2.0}, "past=2.0: pass a whole number"),
    ({"past": "2"}, "past='2': pass a whole number"),
    ({"layer": 1.0}, "layer=1.0: pass a whole number"),
])
def test_a_prefill_that_cannot_be_right_is_refused(paged, change, message):
    batch = paged([9, 5]).write_without_kernel()
    with pytest.raises(RequestError) as caught:
        attention_prefill(**(prefill_call(batch) | change))
    assert message in str(caught.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"query": torch.zeros(2, 5, 8)}, "query has 5 heads"),
    ({"query": torch.zeros(3, 4, 8)}, "query has shape (3, 4, 8): pass [sequences, query_heads, head_dim] = [2, any, any]"),
    ({"lengths": torch.tensor([9])}, "lengths has shape (1,)"),
    ({"lengths": torch.tensor([9.0, 5.0])}, "lengths has dtype float32"),
    ({"lengths": torch.tensor([9, -1])}, "lengths[1]=-1 (sequence 1): the table's 6 blocks of 4 tokens allow 0 to 24"),
    ({"lengths": torch.tensor([25, 5])}, "lengths[0]=25"),
    ({"lengths": torch.tensor([9, 9])}, "table[1, 0, 2]=-1 (sequence 1, keys of positions 8 to 11): null"),
    ({"table": torch.zeros(2, 2, 6)}, "table has dtype float32: pass int32"),
])
def test_a_decode_that_cannot_be_right_is_refused(paged, change, message):
    batch = paged([9, 5]).write_without_kernel()
    with pytest.raises(RequestError) as caught:
        attention_decode(**(decode_call(batch) | change))
    assert message in str(caught.value)


def test_pages_that_are_a_parameter_are_read_and_written_as_any_others(paged):
    batch = paged([6]).write_without_kernel()
    query, pages = batch.queries(1, batch.heads), torch.nn.Parameter(batch.pages.clone())
    out = attention_decode(query, pages, batch.table, torch.tensor([6]), **batch.address)
    assert torch.equal(out, attention_decode(query, batch.pages, batch.table, torch.tensor([6]), **batch.address))
    assert torch.equal(attention_prefill(query, pages, batch.table[0], 5, **batch.address),
                       attention_prefill(query, batch.pages, batch.table[0], 5, **batch.address))
    token, rows = torch.tensor([0]), torch.randn(1, batch.heads, batch.head_dim)
    for target in (pages, batch.pages):
        write_kv(target, rows, rows, batch.table, token, token, **batch.address)
    assert torch.equal(pages.detach().nan_to_num(), batch.pages.nan_to_num())


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused(paged, scale):
    batch = paged([6])
    with pytest.raises(RequestError, match=f"scale={scale}: pass a finite number"):
        attention_prefill(batch.queries(1, batch.heads), batch.pages, batch.table[0], 5, scale=scale, **batch.address)

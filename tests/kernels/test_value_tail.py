"""V tail zeroing: without it attention over whole pages is NaN; with it only rows that nobody wrote become 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.value_tail import zero_value_tail


def expect(batch, layers):
    """Row by row: value rows behind each sequence's end, in its last page."""
    out = batch.blocks.clone()
    for length, slots in zip(batch.lengths, batch.slots, strict=True):
        for inside in range(length % batch.tokens_per_block or batch.tokens_per_block, batch.tokens_per_block):
            for layer in layers:
                out[slots[-1], layer, batch.kv_factor - 1, :, inside] = 0
    return out


@examples(60)
@given(lengths=st.lists(st.integers(0, 21), min_size=1, max_size=4), layers=st.sampled_from([None, range(1, 2), range(0, 3, 2), range(0)]),
       index_dtype=st.sampled_from([torch.int32, torch.int64]),
       shape=st.fixed_dictionaries({
           "heads": st.integers(1, 3), "tokens_per_block": st.sampled_from([1, 4, 16]), "head_dim": st.sampled_from([5, 64]),
           "dtype": st.sampled_from([torch.float32, torch.bfloat16]), "tokens_first": st.booleans(), "kv_factor": st.sampled_from([1, 2]),
           "seed": st.integers(0, 1000)}))
def test_only_value_rows_behind_the_end_become_zero(paged, same_bits, lengths, layers, index_dtype, shape):
    batch = paged(lengths, **shape)
    wanted = expect(batch, range(3) if layers is None else layers)
    zero_value_tail(batch.pages, batch.table, torch.tensor(lengths, dtype=index_dtype), num_layers=3, layers=layers,
                    kv_factor=batch.kv_factor)
    assert same_bits(batch.blocks, wanted)


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_the_reference_does_the_same(paged, same_bits, dtype):
    batch = paged([6, 8, 1, 0])
    batch.blocks = torch.full(batch.blocks.shape, 7, dtype=torch.uint8).view(torch.int8).to(torch.float32).to(dtype)
    wanted = expect(batch, range(3))
    zero_value_tail(batch.pages, batch.table, torch.tensor(batch.lengths), num_layers=3)
    assert same_bits(batch.blocks, wanted)


def test_attention_over_whole_pages_is_nan_without_it_and_right_with_it(paged):
    """The mistake that gives no error: weights of masked rows are 0, and 0 * NaN is NaN."""
    batch = paged([6]).write_without_kernel()
    weights = torch.zeros(8)
    weights[:6] = torch.softmax(torch.randn(6, generator=torch.Generator().manual_seed(0)), 0)

    def attend():
        rows = torch.cat([batch.page_of(slot, 1) for slot in batch.slots[0]], dim=1)
        return torch.einsum("t,htd->hd", weights, rows)

    assert bool(attend().isnan().any())
    zero_value_tail(batch.pages, batch.table, torch.tensor([6]), num_layers=3)
    wanted = torch.einsum("t,thd->hd", weights[:6].double(), batch.values[0].double())
    assert float((attend().double() - wanted).norm() / wanted.norm()) < 1e-5
    keys = torch.cat([batch.page_of(slot, 0) for slot in batch.slots[0]], dim=1)
    assert bool(keys[:, 6:].isnan().all())   # keys need none


def test_codes_and_block_scales_are_zeroed_together(poison, same_bits):
    pages, scales = poison((12, 2, 16, 16), torch.uint8), poison((12, 2, 16, 2), torch.uint8)
    wanted = pages.clone(), scales.clone()
    table = torch.tensor([[[8, 4], [9, 5]]], dtype=torch.int32)
    zero_value_tail(pages, table, torch.tensor([21]), num_layers=2, layers=range(1, 2), scale_pages=scales)
    for tensor in wanted:
        tensor[7, :, 5:] = 0
    assert same_bits(pages, wanted[0])
    assert same_bits(scales, wanted[1])


def test_values_in_a_tensor_of_their_own_are_zeroed_there(poison, same_bits):
    keys, values = poison((6, 2, 4, 8), torch.float32), poison((6, 2, 4, 5), torch.float32)
    before, wanted = keys.clone(), values.clone()
    zero_value_tail(keys, torch.tensor([[[2], [2]]], dtype=torch.int32), torch.tensor([3]), num_layers=2, kv_factor=1, value_pages=values)
    wanted[2:4, :, 3:] = 0
    assert same_bits(keys, before)
    assert same_bits(values, wanted)


def length_beyond_the_table(call):
    call["lengths"][1] = 25
    return "lengths[1]=25 (sequence 1): the table's 6 blocks of 4 tokens allow 0 to 24"


def negative_length(call):
    call["lengths"][0] = -1
    return "lengths[0]=-1 (sequence 0)"


def null_last_page(call):
    call["table"][1, 1, 0] = -1
    return "table[1, 1, 0]=-1 (sequence 1, values of positions 0 to 3): null"


def last_page_beyond_the_pool(call):
    call["table"][0, 1, 2] = 47
    return "table[0, 1, 2]=47 (sequence 0, values of positions 8 to 11): outside the pool"


def page_of_another_sequence(call):
    call["table"][1, :, 0] = call["table"][0, :, 2]
    return "sequences 0 and 1 share the page of entry"


def page_that_another_sequence_has_filled(call):
    """Its sequence has no tail there, but its values would be gone."""
    call["table"][1, :, 0] = call["table"][0, :, 1]
    return "table[1, 1, 0]: sequences 0 and 1 share the page of entry"


BAD = [length_beyond_the_table, negative_length, null_last_page, last_page_beyond_the_pool, page_of_another_sequence,
       page_that_another_sequence_has_filled]


def bad_call(batch):
    return {"pages": batch.pages, "table": batch.table.clone(), "lengths": torch.tensor([9, 3]), "num_layers": 3}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_bad_value_is_refused_before_anything_is_zeroed(paged, same_bits, spoil):
    batch, untouched = paged([9, 3]), paged([9, 3])
    call = bad_call(batch)
    message = spoil(call)
    with pytest.raises(RequestError) as caught:
        zero_value_tail(**call)
    assert message in str(caught.value)
    assert same_bits(batch.blocks, untouched.blocks)


@pytest.mark.parametrize("spoil", BAD[:-2], ids=lambda spoil: spoil.__name__)
def test_unchecked_what_names_no_page_is_left_out(paged, same_bits, spoil):
    batch = paged([9, 3])
    call = bad_call(batch)
    spoil(call)
    call |= {"layers": range(1, 3), "check_values": False}
    touched = batch.blocks.isnan().logical_not().any()
    zero_value_tail(**call)
    changed = {int(slot) for slot in batch.blocks.isnan().logical_not().flatten(1).any(1).nonzero()}
    assert not touched
    good = batch.slots[0 if spoil in (length_beyond_the_table, null_last_page) else 1][-1]
    assert changed == {good}


def test_beams_may_share_their_last_page_where_they_end_together(paged, same_bits):
    batch = paged([9])
    table = batch.table.expand(2, -1, -1).contiguous()
    wanted = expect(batch, range(3))
    zero_value_tail(batch.pages, table, torch.tensor([9, 9]), num_layers=3)
    assert same_bits(batch.blocks, wanted)


@pytest.mark.parametrize(("change", "message"), [
    ({"lengths": torch.tensor([9.0, 3.0])}, "lengths has dtype float32"), ({"lengths": torch.tensor([9])}, "lengths has shape (1,)"),
    ({"layers": range(2, 4)}, "layer=3: the pool's blocks have layers 0 to 2"), ({"num_layers": 5}, "num_layers=5"),
    ({"layers": range(-1, 2)}, "layer=-1"),
    ({"table": torch.zeros(2, 2, 6, dtype=torch.int64)}, "table has dtype int64"),
])
def test_a_call_that_does_not_fit_together_is_refused(paged, change, message):
    with pytest.raises(RequestError) as caught:
        zero_value_tail(**(bad_call(paged([9, 3])) | change))
    assert message in str(caught.value)

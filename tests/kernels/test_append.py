"""write_kv: where tokens land, what is left alone, and what is refused before a byte is written."""

from __future__ import annotations

import mmap
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels import gather_tokens, write_kv, zero_value_tail
from kvtier.kernels.append import append_reference
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.storage import StoredPages


def all_tokens(batch, index_dtype=torch.int64):
    """Keys, values, sequences and positions of every token of a batch, shuffled: order must not matter."""
    sequences = torch.cat([torch.full((length,), number) for number, length in enumerate(batch.lengths)])
    positions = torch.cat([torch.arange(length) for length in batch.lengths])
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(batch.seed))
    return (torch.cat(batch.keys)[order], torch.cat(batch.values)[order],
            sequences[order].to(index_dtype), positions[order].to(index_dtype))


@examples(100)
@given(lengths=st.lists(st.integers(0, 21), min_size=1, max_size=4), index_dtype=st.sampled_from([torch.int32, torch.int64]),
       shape=st.fixed_dictionaries({
           "heads": st.integers(1, 3), "tokens_per_block": st.sampled_from([1, 4, 16]), "head_dim": st.sampled_from([5, 8, 64]),
           "layer": st.integers(0, 2), "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
           "tokens_first": st.booleans(), "seed": st.integers(0, 1000)}))
def test_every_token_lands_in_its_own_page_and_nothing_else_changes(paged, same_bits, lengths, index_dtype, shape):
    batch = paged(lengths, **shape)
    key, value, sequences, positions = all_tokens(batch, index_dtype)
    write_kv(batch.pages, key, value, batch.table, sequences, positions, **batch.address)
    assert same_bits(batch.blocks, paged(lengths, **shape).write_without_kernel().blocks)


@pytest.mark.usefixtures("reference_kernels")
def test_the_reference_does_the_same(paged, same_bits):
    batch, expected = paged([9, 4, 1]), paged([9, 4, 1]).write_without_kernel()
    key, value, sequences, positions = all_tokens(batch)
    sequences[3] = -1
    write_kv(batch.pages, key, value, batch.table, sequences, positions, **batch.address)
    assert not same_bits(batch.blocks, expected.blocks)
    write_kv(batch.pages, key, value, batch.table, *all_tokens(batch)[2:], **batch.address)
    assert same_bits(batch.blocks, expected.blocks)


def test_a_second_chunk_does_not_overwrite_the_first(paged, same_bits):
    batch, expected = paged([11]), paged([11]).write_without_kernel()
    for begin, end in ((0, 6), (6, 11)):
        write_kv(batch.pages, *batch.chunk(begin, end), **batch.address)
    assert same_bits(batch.blocks, expected.blocks)


def test_keys_with_heads_in_front_are_written_as_they_are(paged, same_bits):
    batch, expected = paged([7]), paged([7]).write_without_kernel()
    heads_first = [rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (batch.keys[0], batch.values[0])]
    assert not heads_first[0].is_contiguous()
    write_kv(batch.pages, *heads_first, batch.table, torch.zeros(7, dtype=torch.int32), torch.arange(7), **batch.address)
    assert same_bits(batch.blocks, expected.blocks)


@pytest.mark.parametrize("head_dim", [3, 8])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (3, 1, 0, 2), (2, 0, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_pages_may_lie_in_memory_in_any_order(paged, same_bits, head_dim, order, dtype):
    batch, expected = paged([7, 2], head_dim=head_dim), paged([7, 2], head_dim=head_dim).write_without_kernel()
    shape = batch.pages.shape
    memory = torch.full([shape[axis] for axis in order], float("nan"), dtype=torch.float16).to(dtype)
    pages = memory.permute([order.index(axis) for axis in range(4)])
    key, value, sequences, positions = all_tokens(batch)
    key, value = key.to(torch.float16), value.to(torch.float16)
    write_kv(pages, key, value, batch.table, sequences, positions, **batch.address)
    assert same_bits(pages.contiguous(), expected.pages.to(torch.float16).to(dtype))


def test_pages_may_have_gaps_between_the_numbers_of_a_row(paged, same_bits):
    batch, expected = paged([7, 2]), paged([7, 2]).write_without_kernel()
    memory = torch.full((*batch.pages.shape[:3], 16), float("nan"))
    key, value, sequences, positions = all_tokens(batch)
    write_kv(memory[..., ::2], key, value, batch.table, sequences, positions, **batch.address)
    assert same_bits(memory[..., ::2], expected.pages)
    assert bool(memory[..., 1::2].isnan().all())


@pytest.mark.parametrize("num_bytes", [1, 2, 8])
@pytest.mark.parametrize("moved", ["pages", "rows"])
def test_memory_that_is_not_torchs_own_may_begin_anywhere(paged, same_bits, moved, num_bytes):
    """An array's slice, a mapped file: its storage begins there, and its offset says nothing."""
    def moved_by(numbers):
        array = torch.empty(numbers.nbytes + 64, dtype=torch.uint8).numpy()
        begin = -array.ctypes.data % 64 + num_bytes
        return torch.from_numpy(array[begin:begin + numbers.nbytes]).view(numbers.dtype).view(numbers.shape).copy_(numbers)

    shape = {"dtype": torch.float16, "heads": 1, "head_dim": 8, "tokens_per_block": 16}   # a row is one element of 16 bytes
    batch, expected = paged([600], **shape), paged([600], **shape).write_without_kernel()
    key, value, sequences, positions = all_tokens(batch)
    pages = moved_by(batch.pages) if moved == "pages" else batch.pages
    if moved == "rows":
        key, value = moved_by(key), moved_by(value)
    write_kv(pages, key, value, batch.table, sequences, positions, **batch.address)
    assert same_bits(pages, expected.pages)


def test_a_token_of_no_sequence_is_skipped(paged, same_bits):
    batch, expected = paged([3, 2]), paged([3, 2]).write_without_kernel()
    key, value, sequences, positions = all_tokens(batch)
    extra = torch.full((2, 2, 8), 7.0)
    write_kv(batch.pages, torch.cat([extra, key]), torch.cat([extra, value]), batch.table,
             torch.cat([torch.tensor([-1, -1]), sequences]), torch.cat([torch.tensor([0, 10**6]), positions]), **batch.address)
    assert same_bits(batch.blocks, expected.blocks)


def test_nothing_to_write_is_no_error(paged, same_bits):
    batch, untouched = paged([3]), paged([3])
    none = torch.empty(0, dtype=torch.int64)
    write_kv(batch.pages, batch.keys[0][:0], batch.values[0][:0], batch.table, none, none, **batch.address)
    write_kv(batch.pages, batch.keys[0], batch.values[0], batch.table, torch.full((3,), -1), torch.arange(3), **batch.address)
    assert same_bits(batch.blocks, untouched.blocks)


def test_a_latent_row_is_written_once(paged, same_bits):
    batch = paged([6], kv_factor=1, heads=1)
    write_kv(batch.pages, batch.keys[0], None, batch.table, torch.zeros(6, dtype=torch.int64), torch.arange(6), **batch.address)
    assert same_bits(batch.blocks, paged([6], kv_factor=1, heads=1).write_without_kernel().blocks)


def wrong_sequence(call):
    call["sequence_of_token"][4] = 2
    return "sequence_of_token[4]=2: the table has 2 sequences"


def wrong_negative_sequence(call):
    call["sequence_of_token"][4] = -2
    return "sequence_of_token[4]=-2"


def position_beyond_the_table(call):
    call["positions"][5] = 24
    return r"positions[5]=24 (sequence 1): the table's 6 blocks of 4 tokens hold positions 0 to 23"


def negative_position(call):
    call["positions"][5] = -1
    return "positions[5]=-1 (sequence 1)"


def position_without_a_block(call):
    call["positions"][5] = 23
    return "table[1, 0, 5]=-1 (sequence 1, keys of positions 20 to 23): null"


def null_value_entry(call):
    call["table"][1, 1, 0] = -1
    return "table[1, 1, 0]=-1 (sequence 1, values of positions 0 to 3): null"


def null_key_entry(call):
    call["table"][1, 0, 0] = -1
    return "table[1, 0, 0]=-1 (sequence 1, keys of positions 0 to 3): null"


def null_entry_beside_a_skipped_token(call):
    call["sequence_of_token"][1] = -1
    return null_value_entry(call)


def entry_beyond_the_pool(call):
    call["table"][0, 0, 1] = 48
    return "table[0, 0, 1]=48 (sequence 0, keys of positions 4 to 7): outside the pool (allowed: 0 to 45"


def entry_whose_layer_is_beyond_the_pool(call):
    call["num_layers"] = None
    call["table"][0, 0, 1] = 46
    return "table[0, 0, 1]=46"


def entry_below_null(call):
    call["table"][0, 1, 1] = -7
    return "table[0, 1, 1]=-7"


def position_in_a_reused_block(call):
    call["first_writable"] = torch.tensor([0, 2], dtype=torch.int32)
    return "positions[4]=0 (sequence 1) lies in a block that others share (allowed: 2 to 23)"


def swapped_fields(call):
    call["table"][:] = call["table"].flip(1)
    return "not the first page of this field of a block (allowed: slot * 6 + 0)"


def table_of_another_layer_count(call):
    call["table"][0, :, 0] += 2
    return "not the first page of this field"


NO_PAGE = [wrong_sequence, wrong_negative_sequence, position_beyond_the_table, negative_position, position_without_a_block,
           null_key_entry, null_value_entry, null_entry_beside_a_skipped_token, entry_beyond_the_pool,
           entry_whose_layer_is_beyond_the_pool, entry_below_null,
           position_in_a_reused_block]
WRONG_PAGE = [swapped_fields, table_of_another_layer_count]   # seen only when num_layers is given


def bad_call(batch):
    """A good call of two sequences of 9 and 3 tokens, to be spoilt: tokens 4 to 6 are those of the second."""
    return {
        "pages": batch.pages, "key": torch.cat(batch.keys), "value": torch.cat(batch.values), "table": batch.table.clone(),
        "sequence_of_token": torch.tensor([0] * 9 + [1] * 3).roll(-5),
        "positions": torch.cat([torch.arange(9), torch.arange(3)]).roll(-5), **batch.address,
    }


@pytest.mark.parametrize("spoil", NO_PAGE + WRONG_PAGE, ids=lambda spoil: spoil.__name__)
def test_a_bad_value_is_refused_before_anything_is_written(paged, same_bits, spoil):
    batch, untouched = paged([9, 3]), paged([9, 3])
    call = bad_call(batch)
    message = spoil(call)
    with pytest.raises(RequestError) as caught:
        write_kv(**call)
    assert message in str(caught.value)
    assert same_bits(batch.blocks, untouched.blocks)


@pytest.mark.parametrize("spoil", NO_PAGE, ids=lambda spoil: spoil.__name__)
def test_the_reference_refuses_the_same(paged, same_bits, spoil):
    batch, untouched = paged([9, 3]), paged([9, 3])
    call = bad_call(batch)
    spoil(call)
    places = TokenPlaces(call["table"], call["sequence_of_token"], call["positions"], call.get("first_writable"))
    with pytest.raises(RequestError):
        append_reference(StoredPages.of("test", batch.pages), call["key"], call["value"], places, 2)
    assert same_bits(batch.blocks, untouched.blocks)


@pytest.mark.usefixtures("reference_kernels")
def test_while_an_engine_is_debugged_values_are_checked_whatever_was_asked(paged, same_bits):
    batch, untouched = paged([9, 3]), paged([9, 3])
    call = bad_call(batch)
    null_value_entry(call)
    with pytest.raises(RequestError, match="null"):
        write_kv(**call, check_values=False)
    assert same_bits(batch.blocks, untouched.blocks)
    assert kernel_paths("cuda").append is append_reference


@pytest.mark.parametrize("spoil", NO_PAGE, ids=lambda spoil: spoil.__name__)
def test_unchecked_a_token_without_a_page_is_left_out_whole(paged, same_bits, spoil):
    batch, expected = paged([9, 3]), paged([9, 3])
    call = bad_call(batch)
    spoil(call)
    write_kv(**call, check_values=False)
    table, num_pages = call["table"], len(batch.pages)
    for token, (sequence, position) in enumerate(zip(call["sequence_of_token"].tolist(), call["positions"].tolist(), strict=True)):
        if not 0 <= sequence < 2 or not 0 <= position < 24 or position < call.get("first_writable", [0, 0])[sequence]:
            continue
        entries = [int(table[sequence, kv_field, position // 4]) for kv_field in (0, 1)]
        if all(entry >= 0 and entry + 2 < num_pages for entry in entries):
            for entry, source in zip(entries, (call["key"], call["value"]), strict=True):
                expected.pages[entry + 2, :, position % 4] = source[token]
    assert same_bits(batch.blocks, expected.blocks)


def test_what_is_reused_is_left_out_and_the_rest_is_written(paged, same_bits):
    """An engine may pass all tokens of a chunk: those in the reused prefix must not be written again into blocks that others read."""
    batch, expected = paged([10]), paged([10]).write_without_kernel()
    keys, values = batch.keys[0].clone(), batch.values[0].clone()
    write_kv(batch.pages, *batch.chunk(0, 8), **batch.address)
    keys[:8], values[:8] = 7.0, 7.0
    first = torch.tensor([8])
    call = (batch.pages, keys, values, batch.table, torch.zeros(10, dtype=torch.int64), torch.arange(10))
    with pytest.raises(RequestError, match="others share"):
        write_kv(*call, **batch.address, first_writable=first)
    write_kv(*call, **batch.address, first_writable=first, check_values=False)
    assert same_bits(batch.blocks, expected.blocks)


def test_a_null_entry_plus_the_layer_offset_is_not_a_page(paged, same_bits):
    """-1 + layer * kv_factor would be a valid page of another block."""
    batch, untouched = paged([4], layer=2), paged([4], layer=2)
    batch.table[0, :, 0] = -1
    call = (batch.pages, batch.keys[0], batch.values[0], batch.table, torch.zeros(4, dtype=torch.int64), torch.arange(4))
    with pytest.raises(RequestError, match="null"):
        write_kv(*call, layer=2)
    write_kv(*call, layer=2, check_values=False)
    assert same_bits(batch.blocks, untouched.blocks)


@pytest.mark.parametrize(("change", "message"), [
    ({"key": torch.zeros(12, 3, 8)}, "key has shape (12, 3, 8): pass [nnz, heads, head_dim] = [12, 2, 8]"),
    ({"value": torch.zeros(11, 2, 8)}, "value has shape (11, 2, 8)"),
    ({"key": torch.zeros(12, 2, 8, dtype=torch.float16)}, "key has dtype float16: pass float32"),
    ({"value": torch.zeros(12, 2, 8, dtype=torch.float64)}, "value has dtype float64"),
    ({"value": None}, "value is None with kv_factor=2"),
    ({"kv_factor": 1}, "value is a tensor with kv_factor=1"),
    ({"first_writable": torch.zeros(3, dtype=torch.int32)}, "first_writable has shape (3,): pass [sequences] = [2]"),
    ({"first_writable": torch.zeros(2)}, "first_writable has dtype float32"),
    ({"kv_factor": 3}, "kv_factor=3"),
    ({"table": torch.zeros(2, 2, 6, dtype=torch.int64)}, "table has dtype int64: pass int32"),
    ({"table": torch.zeros(2, 6, dtype=torch.int32)}, "table has shape (2, 6)"),
    ({"positions": torch.zeros(12)}, "positions has dtype float32: pass int32 or int64"),
    ({"positions": torch.zeros(11, dtype=torch.int64)}, "positions has shape (11,)"),
    ({"sequence_of_token": torch.zeros(13, dtype=torch.int32)}, "sequence_of_token has shape (13,)"),
    ({"layer": 3}, "layer=3: the pool's blocks have layers 0 to 2"),
    ({"layer": -1}, "layer=-1"),
    ({"num_layers": 5}, "num_layers=5 and kv_factor=2 do not divide the pool's 48 pages"),
    ({"pages": torch.zeros(4, 2, 8)}, "pages has shape (4, 2, 8)"),
    ({"pages": torch.zeros(1, 2, 4, 8).expand(54, 2, 4, 8)}, "pages has strides (0, 32, 8, 1) for shape (54, 2, 4, 8)"),
    ({"pages": torch.zeros(54, 2, 3, 8)}, "tokens_per_block must be a power of two"),
    ({"pages": torch.zeros(0, 2, 4, 8)}, "no axis may be empty"),
    ({"key": torch.zeros(12, 2, 8, device="meta")}, "key is on meta, the pages are on cpu"),
])
def test_a_call_that_does_not_fit_together_is_refused(paged, same_bits, change, message):
    batch, untouched = paged([9, 3]), paged([9, 3])
    with pytest.raises(RequestError) as caught:
        write_kv(**(bad_call(batch) | change))
    assert message in str(caught.value)
    assert same_bits(batch.blocks, untouched.blocks)


@pytest.mark.parametrize("entry", [-1, -7, 10**6])
@pytest.mark.parametrize(("sequence", "field", "block"), [(0, 0, 4), (1, 1, 0), (1, 0, 3)])
def test_a_bad_entry_of_a_long_prompt_is_refused_before_anything_is_written(paged, same_bits, sequence, field, block, entry):
    """More tokens than the table has entries, of several requests."""
    batch, untouched = paged([20, 16]), paged([20, 16])
    rows = torch.tensor([0] * 20 + [1] * 16)
    positions = torch.cat([torch.arange(20), torch.arange(16)])
    table = batch.table[:, :, :5].clone()
    assert table.shape[0] * table.shape[2] < len(rows)
    table[sequence, field, block] = entry
    with pytest.raises(RequestError, match=re.escape(f"table[{sequence}, {field}, {block}]={entry} (sequence {sequence}, ")):
        write_kv(batch.pages, torch.cat(batch.keys), torch.cat(batch.values), table, rows, positions, **batch.address)
    assert same_bits(batch.blocks, untouched.blocks)


def test_a_pool_beyond_the_32nd_bit_of_an_offset(reference_switch, same_bits):
    """Pages lie far apart in memory that is none until it is touched: element numbers beyond 2**31 are written and read back."""
    elements, heads, unit, dim = (1 << 31) + (1 << 20), 2, 16, 32
    memory = mmap.mmap(-1, elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    pages = torch.frombuffer(memory, dtype=torch.int8).view(-1, heads, unit, dim)
    last = pages.shape[0] - 4
    assert last * heads * unit * dim > 2**31
    rows = torch.randn(30, heads, dim)
    table = torch.tensor([[[last, 0], [last + 1, 1]], [[2, last + 2], [3, last + 3]]], dtype=torch.int32)
    where = table, torch.arange(30) % 2, torch.arange(30)
    how = {"layer": 0, "key_scale": 0.03, "value_scale": 0.02}
    near, names = torch.zeros(8, heads, unit, dim, dtype=torch.int8), {last: 4, last + 1: 5, last + 2: 6, last + 3: 7}
    small = table.clone().apply_(lambda page: names.get(page, page))
    for is_reference in (False, True):
        with reference_switch(is_reference):
            pages[:4], pages[last:] = 0, 1
            near[:4], near[4:] = 0, 1
            write_kv(pages, rows, -rows, *where, **how)
            write_kv(near, rows, -rows, small, *where[1:], **how)
            zero_value_tail(pages, table, torch.tensor([9, 30]), num_layers=1)
            zero_value_tail(near, small, torch.tensor([9, 30]), num_layers=1)
        assert same_bits(torch.cat([pages[:4], pages[last:]]), near)
        assert near.count_nonzero() > near.numel() / 2
    keys = gather_tokens(pages, table[1], 30, layer=0, key_scale=0.03, value_scale=0.02)
    assert torch.equal(keys, gather_tokens(near, small[1], 30, layer=0, key_scale=0.03, value_scale=0.02))


def test_a_device_without_kernels_is_named():
    pages = torch.zeros(4, 1, 4, 8, device="meta")
    key, index = torch.zeros(1, 1, 8, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(ConfigError, match="'meta'"):
        write_kv(pages, key, key, torch.zeros(1, 2, 1, dtype=torch.int32, device="meta"), index, index, layer=0)

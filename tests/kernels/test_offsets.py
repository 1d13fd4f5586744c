"""The offset table: entries, null, the fixed address, and what is refused without a change."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels import NULL_ENTRY, OffsetTable, write_kv
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, pool_index
from kvtier.pools.primary import PrimaryPool


def make(**changes):
    return OffsetTable(**({"max_rows": 4, "max_blocks": 5, "num_layers": 3, "kv_factor": 2, "num_blocks": 10} | changes))


@examples(100)
@given(rows=st.lists(st.lists(st.one_of(st.integers(0, 9), st.none(), st.integers(-9, -1)), max_size=5), max_size=4),
       before=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4), layers=st.integers(1, 40), kv_factor=st.sampled_from([1, 2]))
def test_an_entry_is_the_first_page_of_its_field_and_the_rest_is_null(rows, before, layers, kv_factor):
    table = make(num_layers=layers, kv_factor=kv_factor)
    table.fill(before)
    view = table.fill(rows)
    assert table.tensor[len(rows):].eq(NULL_ENTRY).all()
    assert view.dtype == torch.int32
    assert view.shape == (len(rows), 2, 5)
    # The page id of (slot, layer, field) is that of a pool [blocks, layers, kv_factor, ...] with the first three axes joined.
    numbers = torch.arange(10 * layers * kv_factor).view(10, layers, kv_factor)
    for row, slots in enumerate(rows):
        for field in (0, 1):
            expected = [NULL_ENTRY if slot is None or slot < 0 else int(numbers[slot, 0, field if kv_factor == 2 else 0])
                        for slot in slots] + [NULL_ENTRY] * (5 - len(slots))
            assert view[row, field].tolist() == expected


def test_null_is_all_ones():
    view = make().fill([[]])
    assert view.view(torch.uint8).eq(0xFF).all()


def test_the_address_never_changes():
    table = make()
    address = table.tensor.data_ptr()
    for rows in ([[1]], [[1, 2], [3], [4]], []):
        view = table.fill(rows)
        assert table.tensor.data_ptr() == address
        assert not rows or view.data_ptr() == address


def test_rows_of_ended_sequences_become_null():
    table = make()
    table.fill([[1, 2, 3], [4, 5], [6]])
    table.fill([[7]])
    assert table.tensor[0].tolist() == [[42, -1, -1, -1, -1], [43, -1, -1, -1, -1]]
    assert table.tensor[1:].eq(NULL_ENTRY).all()


@pytest.mark.parametrize(("rows", "message"), [
    ([[0]] * 5, "5 rows: the table was made for 4"),
    ([[0], [0, 1, 2, 3, 4, 5]], "row 1 has 6 blocks: the table was made for 5"),
    ([[0], [3, 10]], "row 1 names slot 10: the primary pool has slots 0 to 9"),
    ([[0], [], [None, 2**31]], "row 2 names slot 2147483648"),
])
def test_a_batch_that_does_not_fit_changes_nothing(rows, message):
    table = make()
    before = table.fill([[1], [2]]).clone()
    with pytest.raises(RequestError) as caught:
        table.fill(rows)
    assert message in str(caught.value)
    assert torch.equal(table.tensor[:2], before)
    assert table.tensor[2:].eq(NULL_ENTRY).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"max_rows": 0}, "max_rows=0"), ({"max_blocks": -1}, "max_blocks=-1"), ({"num_layers": 0}, "num_layers=0"),
    ({"num_blocks": 0}, "num_blocks=0"), ({"kv_factor": 3}, "kv_factor=3"),
    ({"num_blocks": 2**24, "num_layers": 64}, "2147483648 pages: an entry counts to 2147483647"),
])
def test_a_table_that_cannot_be_made_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_the_last_page_that_fits_int32_is_right():
    table = make(num_blocks=2**24, num_layers=127, kv_factor=1)
    assert table.fill([[2**24 - 1]])[0, 0, 0] == (2**24 - 1) * 127


@pytest.mark.parametrize("kind", [list, tuple, lambda row: array("i", row), lambda row: array("q", row), lambda row: array("I", row),
                                  lambda row: np.array(row, np.int32), lambda row: np.array(row, np.int64)])
def test_any_sequence_of_whole_numbers_is_a_row(kind):
    expected = make().fill([[1, 2, 3], [4], [5, 6]]).clone()
    assert torch.equal(make().fill([kind(row) for row in ([1, 2, 3], [4], [5, 6])]), expected)
    assert torch.equal(make().fill([[1, 2, 3], kind([4]), kind([5, 6])]), expected)


@examples(50)
@given(rows=st.lists(st.lists(st.one_of(st.integers(0, 9), st.none(), st.just(-1)), max_size=5), max_size=4))
def test_pool_indices_of_the_primary_level_give_the_table_of_their_slots(rows):
    indices = [[pool_index(PRIMARY, slot) if slot is not None and slot >= 0 else slot for slot in row] for row in rows]
    assert torch.equal(make().fill_indices(indices), make().fill(rows))


@pytest.mark.parametrize(("level", "name"), [(SECONDARY, "secondary"), (NVME, "nvme")])
def test_a_block_of_a_lower_level_is_refused_by_name_and_nothing_changes(level, name):
    table = make()
    before = table.fill([[1, 2], [3]]).clone()
    with pytest.raises(RequestError, match=rf"row 2 names at block 1 slot 7 of the {name} level"):
        table.fill_indices([[pool_index(PRIMARY, 5)] * 3, [], [None, pool_index(level, 7)]])
    with pytest.raises(RequestError, match="names slot 10"):
        table.fill_indices([[pool_index(PRIMARY, 10)]])
    assert torch.equal(table.tensor[:2], before)


def test_a_row_for_each_beam_is_an_ordinary_row():
    table = make(max_rows=6)  # three sequences of two beams
    view = table.fill([[1, 2], [1, 3], [4], [4], [], []])
    assert view.shape == (6, 2, 5)
    assert view[0, 0, 0] == view[1, 0, 0]
    assert view[0, 0, 1] != view[1, 0, 1]


LAYOUT = KVLayout([LayerSpec.attention(2, 8, window=8), LayerSpec.attention(2, 8), LayerSpec.attention(2, 8), LayerSpec.mla(8, 4),
                   LayerSpec.mla(8, 4), LayerSpec.recurrent(24, 8), LayerSpec.recurrent(24, 8), LayerSpec.cross(1, 8),
                   LayerSpec.attention(2, 8, value_dim=4), LayerSpec.attention(2, 8, value_dim=4)], "float32", 4)
KINDS = {(group.kind, group.window, group.is_split): group for group in LAYOUT.groups}


def group_table(group, blocks=6):
    return PrimaryPool(group, blocks, "cpu"), OffsetTable.for_group(group, max_rows=2, max_blocks=3, num_blocks=blocks)


@pytest.mark.parametrize("kind", [("attention", 8, False), ("attention", None, False), ("cross", None, False), ("mla", None, False),
                                  ("attention", None, True)])
def test_in_every_kind_of_group_an_entry_leads_to_the_layers_page(kind):
    group = KINDS[kind]
    pool, table = group_table(group)
    view = table.fill([[4, None, 1], [2]])
    for position in range(group.num_layers):
        for row, column, slot in ((0, 0, 4), (0, 2, 1), (1, 0, 2)):
            keys, values = view[row, :, column].tolist()
            shift = position * group.table_factor
            assert pool.key_pages[keys + shift].data_ptr() == pool.key_buffer(position)[slot].data_ptr()
            assert pool.value_pages[values + shift].data_ptr() == pool.value_buffer(position)[slot].data_ptr()
    assert view[0, :, 1].tolist() == [NULL_ENTRY, NULL_ENTRY]


def test_of_a_recurrent_group_an_entry_is_the_slot_in_each_layers_states():
    pool, table = group_table(KINDS["recurrent", None, False])
    view = table.fill([[-1, 5], [3]])
    assert view.tolist() == [[[-1, 5, -1]] * 2, [[3, -1, -1]] * 2]
    assert pool.layer_buffer(1)[5].data_ptr() == pool.rows[5, 24:].data_ptr()


def test_keys_and_values_of_different_widths_are_written_through_one_table():
    group = KINDS["attention", None, True]
    pool, table = group_table(group)
    view = table.fill([[4, 1]])
    keys, values = torch.randn(7, 2, 8), torch.randn(7, 2, 4)
    where = {"layer": 1, "num_layers": group.table_layers, "kv_factor": group.table_factor}
    for pages, rows in ((pool.key_pages, keys), (pool.value_pages, values)):
        write_kv(pages, rows, None, view, torch.zeros(7, dtype=torch.int32), torch.arange(7), **where)
    for token in range(7):
        slot, place = ((4, 1)[token // 4], token % 4)
        assert torch.equal(pool.key_buffer(1)[slot, :, place], keys[token])
        assert torch.equal(pool.value_buffer(1)[slot, :, place], values[token])
    assert not pool.key_buffer(0).any()
    assert not pool.value_buffer(0).any()

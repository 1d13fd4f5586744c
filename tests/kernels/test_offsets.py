"""The offset table: entries, null, the fixed address, and what is refused without a change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels import NULL_ENTRY, OffsetTable


def make(**changes):
    return OffsetTable(**({"max_rows": 4, "max_blocks": 5, "num_layers": 3, "kv_factor": 2, "num_blocks": 10} | changes))


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4), layers=st.integers(1, 40), kv_factor=st.sampled_from([1, 2]))
def test_an_entry_is_the_first_page_of_its_field_and_the_rest_is_null(rows, layers, kv_factor):
    table = make(num_layers=layers, kv_factor=kv_factor)
    table.tensor.fill_(77)
    view = table.fill(rows)
    assert view.dtype == torch.int32
    assert view.shape == (len(rows), 2, 5)
    # The page id of (slot, layer, field) is that of a pool [blocks, layers, kv_factor, ...] with the first three axes joined.
    numbers = torch.arange(10 * layers * kv_factor).view(10, layers, kv_factor)
    for row, slots in enumerate(rows):
        for field in (0, 1):
            expected = [int(numbers[slot, 0, field if kv_factor == 2 else 0]) for slot in slots] + [NULL_ENTRY] * (5 - len(slots))
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
    ([[0], [3, -1]], "row 1 names slot -1"),
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

"""fill_block_offsets: entries of every pool, null rows, scratch pages in a window, and what is refused without a change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.block_offsets import ScratchWindow, fill_block_offsets

BLOCKS = 20
ROWS = st.lists(st.lists(st.integers(-2, BLOCKS - 1), max_size=5), max_size=4)


def joined(rows, dtype=torch.int32):
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    return torch.tensor(starts, dtype=dtype), torch.tensor([slot for row in rows for slot in row], dtype=dtype)


def window(ranges, slots):
    begin, end = (torch.tensor([pair[place] for pair in ranges], dtype=torch.int32) for place in (0, 1))
    return ScratchWindow(begin, end, torch.tensor(slots, dtype=torch.int32))


def expect(rows, pools, ranges=(), scratch=()):
    out = torch.full((len(pools), 4, 2, 5), -1, dtype=torch.int32)
    for row, slots in enumerate(rows):
        for position, slot in enumerate(slots):
            if ranges and ranges[row][0] <= position < ranges[row][1]:
                slot = scratch[row][position - ranges[row][0]]
            for pool, (pages, field) in enumerate(pools):
                if slot >= 0:
                    out[pool, row, :, position] = torch.tensor([slot * pages, slot * pages + field])
    return out


@pytest.mark.parametrize("is_reference", [False, True])
@examples(60)
@given(rows=ROWS, dtype=st.sampled_from([torch.int32, torch.int64]),
       pools=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=3), data=st.data())
def test_each_pools_entries_are_its_pages_and_the_rest_is_null(reference_switch, is_reference, rows, dtype, pools, data):
    ranges, scratch = [], []
    for row in rows:
        begin = data.draw(st.integers(0, len(row)))
        ranges.append((begin, data.draw(st.integers(begin, len(row)))))
        scratch.append(data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=5, max_size=5)))
    indptr, slots = joined(rows, dtype)
    for redirected in (False, True) if rows else (False,):
        tables = torch.full((len(pools), 4, 2, 5), 77, dtype=torch.int32)
        with reference_switch(is_reference):
            fill_block_offsets(tables, indptr, slots, pages_per_block=[pages for pages, _ in pools],
                               value_fields=[field for _, field in pools], num_blocks=BLOCKS,
                               scratch=window(ranges, scratch) if redirected else None)
        assert torch.equal(tables, expect(rows, pools, ranges, scratch) if redirected else expect(rows, pools))


def test_slots_are_not_changed_by_a_redirection():
    indptr, slots = joined([[1, 2, 3]])
    before = slots.clone()
    tables = torch.zeros(1, 4, 2, 5, dtype=torch.int32)
    fill_block_offsets(tables, indptr, slots, pages_per_block=[2], value_fields=[1], num_blocks=BLOCKS, scratch=window([(1, 3)], [[9, 8]]))
    assert tables[0, 0].tolist() == [[2, 18, 16, -1, -1], [3, 19, 17, -1, -1]]
    assert torch.equal(slots, before)


def test_unchecked_a_slot_outside_is_null():
    tables = torch.zeros(1, 1, 2, 3, dtype=torch.int32)
    fill_block_offsets(tables, *joined([[BLOCKS, 3, -5]]), pages_per_block=[2], value_fields=[1], num_blocks=BLOCKS, check_values=False)
    assert tables[0, 0].tolist() == [[-1, 6, -1], [-1, 7, -1]]


@pytest.mark.parametrize(("change", "message"), [
    ({"indptr": torch.tensor([0, 3, 2, 5]).int()}, "indptr[1:3]=[3, 2]: pointers begin at 0, never fall, and end at"),
    ({"indptr": torch.tensor([1, 3, 5]).int()}, "pointers begin at 0"), ({"indptr": torch.tensor([0, 3, 4]).int()}, "pointers begin at 0"),
    ({"slots": torch.tensor([1, 2, 3, 20, 5]).int()}, "slots[3]=20 (row 1, block 0): allowed are 0 to 19"),
    ({"tables": torch.zeros(1, 4, 2, 2, dtype=torch.int32)}, "row 0 has 3 blocks: the tables were made for 2"),
    ({"tables": torch.zeros(1, 1, 2, 5, dtype=torch.int32)}, "indptr has 3 numbers, so 2 rows: the tables have 1"),
    ({"tables": torch.zeros(2, 4, 2, 5, dtype=torch.int32)}, "tables has shape (2, 4, 2, 5)"),
    ({"tables": torch.zeros(1, 4, 2, 5)}, "tables has dtype float32"), ({"slots": torch.zeros(5)}, "slots has dtype float32"),
    ({"indptr": torch.zeros(0, dtype=torch.int32)}, "so -1 rows"),
    ({"pages_per_block": [0]}, "pool 0: pages_per_block=0"), ({"value_fields": [2]}, "value_field=2"),
    ({"value_fields": []}, "0 value_fields"),
    ({"pages_per_block": [2**27]}, "with 20 blocks: allowed are at least 1, 0 or 1, and 2147483647 pages"),
    ({"scratch": window([(0, 3), (0, 1)], [[1, 2], [3, 4]])}, "scratch range 0 to 3 of row 0: allowed are block positions 0 to 3, and 2"),
    ({"scratch": window([(0, 1), (1, 3)], [[1, 2], [3, 4]])}, "scratch range 1 to 3 of row 1: allowed are block positions 0 to 2"),
    ({"scratch": window([(0, 1), (0, 0)], [[20, 2], [3, 4]])}, "scratch.slots[0] names slots [20]: allowed are 0 to 19"),
    ({"scratch": window([(0, 1)], [[1, 2]])}, "scratch.slots has shape (1, 2)"),
])
def test_a_batch_that_does_not_fit_changes_nothing(change, message):
    indptr, slots = joined([[1, 2, 3], [4, 5]])
    call = {"tables": torch.full((1, 4, 2, 5), 7, dtype=torch.int32), "indptr": indptr, "slots": slots, "pages_per_block": [2],
            "value_fields": [1], "num_blocks": BLOCKS} | change
    before = call["tables"].clone()
    with pytest.raises(RequestError) as caught:
        fill_block_offsets(**call)
    assert message in str(caught.value)
    assert torch.equal(call["tables"], before)

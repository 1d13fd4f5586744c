"""Runs of tokens: how tokens are cut, and that whole prefills, cut into runs, land where single tokens would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels import write_kv
from kvtier.kernels.places import TokenRuns, spread

pieces = st.tuples(st.integers(-1, 2), st.integers(-5, 60), st.integers(1, 40))   # row, first position, tokens


@examples(200)
@given(pieces=st.lists(pieces, max_size=9), tokens_per_block=st.sampled_from([1, 4, 16]), dtype=st.sampled_from([np.int32, np.int64]))
def test_a_run_is_a_stretch_of_one_block_and_all_runs_are_all_tokens(pieces, tokens_per_block, dtype):
    rows = np.array([row for row, _, count in pieces for _ in range(count)], dtype)
    positions = np.array([first + number for _, first, count in pieces for number in range(count)], dtype)
    runs = TokenRuns.of(rows, positions, tokens_per_block)
    tokens = spread(runs.starts, runs.lengths, len(rows))
    assert tokens.tolist() == list(range(len(rows)))
    assert rows.tolist() == np.repeat(runs.rows, runs.lengths).tolist()
    assert positions.tolist() == spread(runs.positions, runs.lengths, len(rows)).tolist()
    assert (positions // tokens_per_block).tolist() == np.repeat(runs.blocks, runs.lengths).tolist()
    if len(rows) >= 64:
        ends = [(row, position + length) for row, position, length in zip(runs.rows, runs.positions, runs.lengths, strict=True)]
        begins = list(zip(runs.rows, runs.positions, strict=True))
        assert all(begin != end or begin[1] % tokens_per_block == 0 for end, begin in zip(ends, begins[1:], strict=False))


class Restless(np.ndarray):
    """Numbers that another thread counts up, as it seems, whenever somebody has looked at them."""

    def __getitem__(self, place):
        found = np.array(super().__getitem__(place))
        np.add(self.view(np.ndarray), 1, out=self.view(np.ndarray))
        return found


def test_positions_that_change_meanwhile_make_no_run_that_leads_out_of_its_block():
    positions = np.arange(100).view(Restless)
    runs = TokenRuns.of(np.zeros(100, np.int64), positions, 16)
    assert positions.tolist() == list(range(100))
    assert ((runs.positions % 16) + runs.lengths <= 16).all()


@pytest.mark.parametrize("lengths", [[90, 45], [700]], ids=["two-requests", "long"])
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-first", "tokens-first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 5])
@pytest.mark.parametrize("is_sliced", [False, True], ids=["rows", "slices"])
def test_a_prefill_lands_where_single_tokens_would(paged, same_bits, lengths, tokens_first, dtype, head_dim, is_sliced):
    """Sliced: keys and values as columns of one projection, at odd distances."""
    shape = {"tokens_first": tokens_first, "dtype": dtype, "head_dim": head_dim, "tokens_per_block": 16}
    batch, expected = paged(lengths, **shape), paged(lengths, **shape).write_without_kernel()
    rows = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    key, value = torch.cat(batch.keys), torch.cat(batch.values)
    if is_sliced:
        columns = torch.cat([key.flatten(1), torch.zeros(len(key), 3, dtype=dtype), value.flatten(1)], 1)
        key, value = columns[:, :key[0].numel()].view(key.shape), columns[:, -value[0].numel():].view(value.shape)
        assert not key.is_contiguous()
    write_kv(batch.pages, key, value, batch.table, rows, positions, **batch.address)
    assert same_bits(batch.blocks, expected.blocks)


def test_within_a_run_only_what_is_shared_is_left_out(paged, same_bits):
    """The boundary lies within a block, and padding in the middle of the batch."""
    batch, expected = paged([80], tokens_per_block=16), paged([80], tokens_per_block=16).write_without_kernel()
    for position in range(21):
        expected.page_of(expected.slots[0][position // 16], 0)[:, position % 16] = float("nan")
        expected.page_of(expected.slots[0][position // 16], 1)[:, position % 16] = float("nan")
    rows, positions = torch.zeros(90, dtype=torch.int64), torch.cat([torch.arange(40), torch.arange(10), torch.arange(40, 80)])
    rows[40:50] = -1
    key, value = batch.keys[0][positions], batch.values[0][positions]
    call = (batch.pages, key, value, batch.table, rows, positions)
    with pytest.raises(RequestError, match=r"positions\[0\]=0 \(sequence 0\) lies in a block that others share \(allowed: 21 to"):
        write_kv(*call, **batch.address, first_writable=torch.tensor([21]))
    write_kv(*call, **batch.address, first_writable=torch.tensor([21]), check_values=False)
    assert same_bits(batch.blocks, expected.blocks)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("first", "written"), [("min", 80), ("max", 0)])
def test_nothing_and_everything_may_be_shared_whatever_number_says_so(paged, same_bits, dtype, first, written):
    batch, expected = paged([80], tokens_per_block=16), paged([80], tokens_per_block=16)
    if written:
        expected.write_without_kernel()
    first_writable = torch.tensor([getattr(torch.iinfo(dtype), first)], dtype=dtype)
    write_kv(batch.pages, batch.keys[0], batch.values[0], batch.table, torch.zeros(80, dtype=dtype), torch.arange(80, dtype=dtype),
             **batch.address, first_writable=first_writable, check_values=False)
    assert same_bits(batch.blocks, expected.blocks)


@pytest.mark.parametrize(("name", "token", "number", "message"), [
    ("rows", 70, 3, "sequence_of_token[70]=3: the table has 1 sequences"),
    ("positions", 70, 10**6, "positions[70]=1000000 (sequence 0)"),
    ("positions", 70, -2, "positions[70]=-2 (sequence 0)"),
    ("table", 4, -1, "table[0, 1, 4]=-1 (sequence 0, values of positions 64 to 79): null"),
])
def test_in_a_long_prefill_too_the_first_bad_token_is_named_and_nothing_written(paged, same_bits, name, token, number, message):
    batch, untouched = paged([100], tokens_per_block=16), paged([100], tokens_per_block=16)
    call = {"rows": torch.zeros(100, dtype=torch.int32), "positions": torch.arange(100, dtype=torch.int32), "table": batch.table.clone()}
    call[name][(0, 1, token) if name == "table" else token] = number
    with pytest.raises(RequestError) as caught:
        write_kv(batch.pages, batch.keys[0], batch.values[0], call["table"], call["rows"], call["positions"], **batch.address)
    assert message in str(caught.value)
    assert same_bits(batch.blocks, untouched.blocks)

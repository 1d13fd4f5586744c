"""Partial block copy: the first n tokens of each head, in every layer and field, to the bit; the rest keeps its bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels import copy_partial_blocks

SHAPE = (6, 3, 2, 2, 4, 5)   # blocks, layers, kv_factor, heads, tokens_per_block, head_dim


def random_blocks(shape=SHAPE, dtype=torch.float32, tokens_first=False, padding=0, seed=0):
    """Random bytes seen as blocks, so that NaN patterns are among them; strided as asked."""
    generator = torch.Generator().manual_seed(seed)
    blocks, *rest = shape
    if tokens_first:
        rest[2], rest[3] = rest[3], rest[2]
    count = int(torch.tensor(rest).prod())
    rows = torch.randint(0, 256, (blocks, (count + padding) * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    tensor = rows[:, :count].unflatten(1, rest)
    return tensor.transpose(3, 4) if tokens_first else tensor


def expected_copy(destination, source, pairs, tokens):
    """Token by token; tokens is already a true count."""
    out = destination.clone()
    for source_slot, destination_slot in pairs:
        for token in range(tokens):
            out[destination_slot, :, :, :, token] = source[source_slot, :, :, :, token]
    return out


@examples(100)
@given(tokens=st.integers(-1, 6), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), tokens_first=st.booleans(),
       padding=st.sampled_from([0, 24]), kv_factor=st.sampled_from([1, 2]), seed=st.integers(0, 1000),
       pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=4, unique_by=lambda pair: pair[1]))
def test_the_first_tokens_of_every_head_are_copied_and_nothing_else(same_bits, tokens, dtype, tokens_first, padding, kv_factor, seed,
                                                                    pairs):
    shape = (6, 3, kv_factor, *SHAPE[3:])
    destination = random_blocks(shape, dtype, tokens_first, padding, seed)
    source = random_blocks((9, *shape[1:]), dtype, False, 0, seed + 1)   # the other level may have other strides
    expected = expected_copy(destination, source, pairs, tokens if 0 < tokens < 4 else 4)
    before = source.clone()
    copy_partial_blocks(destination, source, pairs, tokens)
    assert same_bits(destination, expected)
    assert same_bits(source, before)


@pytest.mark.parametrize(("num_tokens", "copied"), [(-3, 4), (0, 4), (1, 1), (3, 3), (4, 4), (5, 4), (10**9, 4)])
def test_no_tokens_or_too_many_mean_the_whole_block(same_bits, num_tokens, copied):
    destination, source = random_blocks(seed=1), random_blocks(seed=2)
    expected = expected_copy(destination, source, [(0, 5)], copied)
    copy_partial_blocks(destination, source, [(0, 5)], num_tokens)
    assert same_bits(destination, expected)


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_the_reference_does_the_same(same_bits, num_tokens):
    destination, source = random_blocks(tokens_first=True, seed=1), random_blocks(seed=2)
    expected = expected_copy(destination, source, [(0, 5), (3, 1)], num_tokens or 4)
    copy_partial_blocks(destination, source, [(0, 5), (3, 1)], num_tokens)
    assert same_bits(destination, expected)


def test_blocks_of_one_pool_are_copied_to_others(same_bits):
    pool = random_blocks()
    expected = expected_copy(pool, pool.clone(), [(0, 1), (0, 2), (3, 4)], 2)
    copy_partial_blocks(pool, pool, [(0, 1), (0, 2), (3, 4)], 2)
    assert same_bits(pool, expected)


@pytest.mark.parametrize(("pairs", "message"), [
    ([(6, 0)], "source slot 6: the tensor has slots 0 to 5"), ([(-1, 0)], "source slot -1"),
    ([(0, 6)], "destination slot 6"), ([(0, -1)], "destination slot -1"),
    ([(0, 1), (2, 1)], "slot 1 is written 2 times in one call"),
    ([(0, 1), (1, 2)], "slot 1 is both read and written"), ([(3, 3)], "slot 3 is both read and written"),
])
def test_bad_pairs_are_refused_before_anything_is_copied(same_bits, pairs, message):
    pool = random_blocks()
    before = pool.clone()
    with pytest.raises(RequestError) as caught:
        copy_partial_blocks(pool, pool, [(4, 5), *pairs], 2)
    assert message in str(caught.value)
    assert same_bits(pool, before)


def test_equal_slots_of_two_pools_are_no_conflict(same_bits):
    destination, source = random_blocks(seed=1), random_blocks(seed=2)
    copy_partial_blocks(destination, source, [(0, 1), (1, 0), (2, 2)], 0)
    assert same_bits(destination[:3], source[[1, 0, 2]])


@pytest.mark.parametrize(("views", "pairs", "is_refused"), [
    (lambda pool: (pool[1:], pool[:-1]), [(0, 1)], True),       # the same block
    (lambda pool: (pool[1:], pool[:-1]), [(1, 1)], False),      # neighbours
    (lambda pool: (pool[:3], pool[3:]), [(0, 2), (2, 0)], False),
    (lambda pool: (pool[:, 1:], pool[:, :-1]), [(2, 2)], True),   # layer 1 of the block is read and written
    (lambda pool: (pool[:, 1:], pool[:, :-1]), [(2, 3)], False),
    (lambda pool: (pool[:, :1], pool[:, 1:2]), [(2, 2)], False),  # two layers of one block, interleaved with other blocks
    (lambda pool: (pool[..., 1:, :], pool[..., :-1, :]), [(2, 2)], True),
], ids=["same-block", "neighbours", "exchange", "same-layer", "other-block", "other-layers", "same-tokens"])
def test_views_of_one_pool_are_copied_where_they_do_not_overlap(same_bits, views, pairs, is_refused):
    pool = random_blocks()
    before = pool.clone()
    source, destination = views(pool)
    if is_refused:
        with pytest.raises(RequestError, match="are the same memory"):
            copy_partial_blocks(destination, source, pairs, 2)
        assert same_bits(pool, before)
        return
    expected_source, expected_destination = views(before)
    expected = expected_copy(expected_destination, expected_source, pairs, 2)
    copy_partial_blocks(destination, source, pairs, 2)
    assert same_bits(destination, expected)


def test_a_destination_whose_blocks_are_one_memory_is_refused():
    with pytest.raises(RequestError, match="numbers share memory"):
        copy_partial_blocks(torch.zeros(1, *SHAPE[1:]).expand(SHAPE), torch.zeros(SHAPE), [(0, 1)], 2)


@pytest.mark.parametrize(("pairs", "num_tokens", "message"), [
    ([(0, 1)], 2.0, r"num_tokens=2.0: pass a whole number"), ([(0.0, 1)], 2, r"pairs\[0\]=\(0.0, 1\): pass pairs"),
    ([(1, 0), (0, 1.5)], 2, r"pairs\[1\]=\(0, 1.5\)"), ([(0,)], 2, r"pairs\[0\]=\(0,\)"), (None, 2, "pairs=None")])
def test_what_is_no_whole_number_is_refused(pairs, num_tokens, message):
    with pytest.raises(RequestError, match=message):
        copy_partial_blocks(torch.zeros(SHAPE), torch.zeros(SHAPE), pairs, num_tokens)


@pytest.mark.parametrize(("source", "message"), [
    (torch.zeros(6, 3, 2, 2, 4, 6), "source has shape (6, 3, 2, 2, 4, 6)"),
    (torch.zeros(6, 3, 2, 2, 20), "source has shape (6, 3, 2, 2, 20)"),
    (torch.zeros(SHAPE, dtype=torch.float16), "a copy does not convert"),
])
def test_blocks_of_another_shape_or_dtype_are_refused(source, message):
    with pytest.raises(RequestError) as caught:
        copy_partial_blocks(torch.zeros(SHAPE), source, [(0, 1)], 2)
    assert message in str(caught.value)

"""Indexer-K scatter: bytes of keys and scales at flat places of a pool that may be strided; the rest keeps its bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.indexer_scatter import scatter_indexer_keys
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.primary import PrimaryPool


def strided_cache(shape, order, layers=2):
    """A view of larger memory with its axes in another order: [layers, ...] as an engine keeps several layers in one pool."""
    memory = torch.full((*(shape[axis] for axis in order[:2]), layers, *(shape[axis] for axis in order[2:])), 0xAA, dtype=torch.uint8)
    return memory, memory.select(2, layers - 1).permute([order.index(axis) for axis in range(4)])


@examples(60)
@given(blocks=st.integers(2, 4), tokens_per_block=st.sampled_from([4, 8]), key_bytes=st.sampled_from([1, 16, 20]),
       order=st.permutations(range(4)), dtype=st.sampled_from([torch.uint8, torch.int8, torch.float8_e4m3fn]),
       index_dtype=st.sampled_from([torch.int32, torch.int64]), tokens=st.integers(0, 8), seed=st.integers(0, 1000),
       as_float=st.booleans())
def test_every_byte_lands_at_its_flat_place(same_bits, blocks, tokens_per_block, key_bytes, order, dtype, index_dtype, tokens, seed,
                                            as_float):
    """The layout of the engines that have it: in each block first all keys, then all scales, across the ends of rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, tokens_per_block, 1, key_bytes + 4)
    memory, cache = strided_cache(shape, order)
    block_bytes = tokens_per_block * (key_bytes + 4)
    place = torch.randperm(blocks * tokens_per_block, generator=generator)[:tokens]
    key_slots = place // tokens_per_block * block_bytes + place % tokens_per_block * key_bytes
    scale_slots = place // tokens_per_block * block_bytes + tokens_per_block * key_bytes + place % tokens_per_block * 4
    skipped = torch.rand(tokens, generator=generator) < 0.2
    is_key = torch.rand(tokens, generator=generator) < 0.5   # whichever slot says so, both are skipped
    key_slots[skipped & is_key] = -1
    scale_slots[skipped & ~is_key] = -7
    keys = torch.randint(0, 256, (tokens, key_bytes), dtype=torch.uint8, generator=generator)
    scales = torch.randn(tokens, generator=generator)
    flat = cache.flatten().clone()
    for token in range(tokens):
        if not skipped[token]:
            flat[key_slots[token]:key_slots[token] + key_bytes] = keys[token]
            flat[scale_slots[token]:scale_slots[token] + 4] = scales[token:token + 1].view(torch.uint8)
    wanted = memory.clone()
    wanted_view = wanted.select(2, 1).permute([order.index(axis) for axis in range(4)])
    wanted_view.copy_(flat.view(shape))
    scatter_indexer_keys(cache, keys.view(dtype), scales if as_float else scales.view(torch.uint8).view(tokens, 4),
                         key_slots.to(index_dtype), scale_slots.to(index_dtype))
    assert same_bits(memory, wanted)


@pytest.mark.parametrize("is_reference", [False, True])
def test_it_writes_into_a_pools_indexer_buffer(request, is_reference):
    if is_reference:
        request.getfixturevalue("reference_kernels")
    layout = KVLayout([LayerSpec.attention(1, 8, indexer_bytes=20)] * 2, "float32", 4)
    cache = PrimaryPool(layout.groups[0], 3, "cpu").indexer_buffer(1)
    assert cache.shape == (3, 4, 1, 20)
    assert not cache.is_contiguous()
    keys, scales = torch.arange(32, dtype=torch.uint8).view(2, 16), torch.tensor([1.5, -2.0])
    rows = torch.tensor([5, 11])   # block 1, token 1 and block 2, token 3
    scatter_indexer_keys(cache, keys, scales, rows * 20, rows * 20 + 16)
    for token, (block, inside) in enumerate(((1, 1), (2, 3))):
        assert torch.equal(cache[block, inside, 0, :16], keys[token])
        assert cache[block, inside, 0, 16:].contiguous().view(torch.float32).item() == scales[token]
    assert int(cache.count_nonzero()) == int(keys.count_nonzero() + scales.view(torch.uint8).count_nonzero())


def good_call():
    return {"cache": torch.zeros(2, 4, 1, 20, dtype=torch.uint8), "keys": torch.ones(3, 16, dtype=torch.uint8), "scales": torch.ones(3),
            "key_slots": torch.tensor([0, 20, 40]), "scale_slots": torch.tensor([16, 36, 56])}


@pytest.mark.parametrize(("change", "message"), [
    ({"key_slots": torch.tensor([0, 145, 40])}, "key_slots[1]=145: the cache has 160 elements, and 16 go there (allowed: 0 to 144"),
    ({"scale_slots": torch.tensor([16, 36, 157])}, "scale_slots[2]=157: the cache has 160 elements, and 4 go there"),
    ({"key_slots": torch.zeros(2, dtype=torch.int32)}, "key_slots has shape (2,)"),
    ({"scale_slots": torch.zeros(3)}, "scale_slots has dtype float32"),
    ({"cache": torch.zeros(2, 4, 20, dtype=torch.uint8)}, "cache has shape (2, 4, 20)"),
    ({"cache": torch.zeros(2, 4, 1, 20)}, "cache has dtype float32: pass uint8"),
    ({"keys": torch.ones(3, 16)}, "keys has dtype float32"),
    ({"scales": torch.ones(2)}, "scales has shape (2,)"),
    ({"scales": torch.ones(3, 2, dtype=torch.uint8)}, "scales has shape (3, 2): pass [tokens, 4 bytes]"),
    ({"scales": torch.ones(3, dtype=torch.float16)}, "scales has dtype float16: pass uint8 or float32"),
])
def test_a_bad_call_is_refused_before_anything_is_written(change, message):
    call = good_call() | change
    with pytest.raises(RequestError) as caught:
        scatter_indexer_keys(**call)
    assert message in str(caught.value)
    assert not call["cache"].any()


def test_unchecked_a_token_outside_is_left_out_whole():
    call = good_call()
    call["key_slots"][1], call["scale_slots"][2] = 10**9, 10**9
    scatter_indexer_keys(**call, check_values=False)
    assert call["cache"].count_nonzero() == 16 + 2   # 1.0 as float32 has two bytes that are not 0

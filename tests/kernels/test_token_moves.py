"""Token moves: to the bit what a loop does that moves one token after the other, in every layer; everything else keeps its bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.token_moves import move_tokens, move_tokens_reference

TOKENS_PER_BLOCK = 4
SLOTS = [5, 0, 3, 6]   # of one sequence; the pool's other blocks are somebody else's
PLACES = len(SLOTS) * TOKENS_PER_BLOCK


def pool(fields=2, dtype=torch.float32, tokens_first=False, seed=0):
    """Random bytes seen as seven blocks of three layers and two heads, NaN patterns among them."""
    generator = torch.Generator().manual_seed(seed)
    heads, tokens = (TOKENS_PER_BLOCK, 2) if tokens_first else (2, TOKENS_PER_BLOCK)
    tensor = torch.randint(0, 256, (7, 3, fields, heads, tokens, 6 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    return tensor.transpose(3, 4) if tokens_first else tensor


places = st.integers(0, PLACES - 1)


@examples(150)
@given(moves=st.lists(st.tuples(places, places), max_size=12), fields=st.sampled_from([1, 2]), tokens_first=st.booleans(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float64]), seed=st.integers(0, 99))
def test_moves_that_overlap_have_the_result_of_one_after_the_other(same_bits, moves, fields, tokens_first, dtype, seed):
    blocks = pool(fields, dtype, tokens_first, seed)
    expected = blocks.clone()
    move_tokens_reference(expected, SLOTS, moves)
    move_tokens(blocks, SLOTS, moves)
    assert same_bits(blocks.contiguous(), expected.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [1, 2])
def test_a_path_moves_to_the_places_behind_the_sequence(same_bits, fields, dtype):
    blocks = pool(fields, dtype)
    before = blocks.clone()
    move_tokens(blocks, SLOTS, [(8, 6), (11, 7), (13, 8)])
    for source, destination in ((8, 6), (11, 7), (13, 8)):
        moved = blocks[SLOTS[destination // 4], :, :, :, destination % 4]
        assert same_bits(moved, before[SLOTS[source // 4], :, :, :, source % 4])
    changed = {(SLOTS[place // 4], place % 4) for place in (6, 7, 8)}
    for slot in range(7):
        for token in range(TOKENS_PER_BLOCK):
            if (slot, token) not in changed:
                assert same_bits(blocks[slot, :, :, :, token], before[slot, :, :, :, token])


def test_a_chain_hands_on_what_the_move_before_has_written():
    blocks = torch.arange(PLACES, dtype=torch.float32).view(4, 1, 1, 1, TOKENS_PER_BLOCK, 1).clone()
    move_tokens(blocks, [0, 1, 2, 3], [(1, 2), (2, 9), (9, 1), (5, 2)])
    assert blocks.flatten()[[1, 2, 9]].tolist() == [1.0, 5.0, 1.0]


@pytest.mark.parametrize(("slots", "moves", "message"), [
    (SLOTS, [(16, 0)], "source place 16"), (SLOTS, [(0, -1)], "destination place -1"),
    ([5, -1], [(0, 4)], "destination place 4 lies in slot -1"), ([5, 7], [(5, 0)], "source place 5 lies in slot 7"),
    ([], [], "0 blocks of 4 tokens"),
])
def test_a_place_without_a_block_is_refused_before_anything_moves(same_bits, slots, moves, message):
    blocks = pool()
    before = blocks.clone()
    with pytest.raises(RequestError, match="move_tokens") as caught:
        move_tokens(blocks, slots, [(1, 0), *moves])
    assert message in str(caught.value)
    assert same_bits(blocks, before)


@pytest.mark.parametrize("blocks", [torch.zeros(2, 2, 4, 5), torch.zeros(1, 1, 1, 1, 4, 2, dtype=torch.complex128)])
def test_a_tensor_of_another_form_is_refused(blocks):
    with pytest.raises(RequestError, match="blocks has shape"):
        move_tokens(blocks, [0], [])


def test_no_moves_move_nothing(same_bits):
    blocks = pool()
    before = blocks.clone()
    move_tokens(blocks, SLOTS, [])
    move_tokens(blocks, SLOTS, [(3, 3)])
    assert same_bits(blocks, before)

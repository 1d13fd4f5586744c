"""Which pages decode reads where they lie, and how many tokens it brings together otherwise: by shapes and types alone."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.page_reader import is_read_in_place, tokens_per_piece


def context(heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> PagedContext:
    return PagedContext.of("test", None, torch.zeros(2, heads, tokens, dim, dtype=dtype), torch.zeros(1, 2, 1, dtype=torch.int32), layer=0)


@pytest.mark.parametrize(("heads", "tokens", "in_place"), [
    (8, 16, (False, False)), (8, 128, (False, False)), (16, 128, (True, True)), (8, 256, (True, True)),
    (2, 128, (False, False)), (2, 256, (True, False)), (4, 256, (True, True)), (1, 256, (False, False))])
def test_pages_are_read_where_they_lie_when_a_product_with_one_is_worth_its_start(heads, tokens, in_place):
    read = tuple(is_read_in_place(context(heads, tokens, 128), is_half) for is_half in (False, True))
    assert read == in_place


@pytest.mark.parametrize(("dtype", "once_as", "tokens"), [
    (torch.float32, torch.float32, 512), (torch.bfloat16, torch.bfloat16, 1024), (torch.float32, None, 256),
    (torch.bfloat16, torch.float32, 256), (torch.float8_e4m3fn, torch.bfloat16, 256)])
def test_a_piece_that_is_used_once_as_it_is_stored_has_more_tokens(dtype, once_as, tokens):
    assert tokens_per_piece(context(8, 16, 128, dtype), once_as) == tokens


def test_a_piece_is_at_least_a_page_and_no_more_than_scores_allow():
    assert tokens_per_piece(context(64, 128, 256), None) == 128
    assert tokens_per_piece(context(1, 16, 64), torch.float32) == 1024

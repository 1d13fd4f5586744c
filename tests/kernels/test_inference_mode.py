"""Pools made by a model server, inside ``torch.inference_mode``, are written outside of it like any others (and the other way round)."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels import (
    append_mla,
    copy_partial_blocks,
    fused_write,
    move_tokens,
    plan_write,
    scatter_indexer_keys,
    write_kv,
    zero_value_tail,
)

TABLE = torch.tensor([[[0, 2], [1, 3]]], dtype=torch.int32)
LENGTHS = torch.tensor([6])


def append(pages):
    rows = torch.arange(48.0).view(6, 2, 4)
    write_kv(pages, rows, -rows, TABLE, torch.zeros(6, dtype=torch.int64), torch.arange(6), layer=0)


def fused(pages):
    fused_write(torch.arange(144.0).view(6, 24), pages, TABLE, plan_write(LENGTHS, LENGTHS, 6), query_heads=2, layer=0)


def latent(pages):
    append_mla(pages[:, :1], torch.ones(6, 3), torch.zeros(6, 1), torch.tensor([[[0, 1]] * 2], dtype=torch.int32),
               torch.zeros(6, dtype=torch.int64), torch.arange(6), layer=0)


def tail(pages):
    zero_value_tail(pages, TABLE, LENGTHS, num_layers=1)


def copy_blocks(pages):
    blocks = pages.view(2, 1, 2, 2, 4, 4)
    copy_partial_blocks(blocks, blocks, [(0, 1)], 3)


def tokens(pages):
    move_tokens(pages.view(2, 1, 2, 2, 4, 4), [0, 1], [(5, 1)])


def scatter(pages):
    scatter_indexer_keys(pages.view(torch.uint8), torch.ones(2, 8, dtype=torch.uint8), torch.ones(2), torch.tensor([0, 32]),
                         torch.tensor([16, 48]))


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("write", [append, fused, latent, tail, copy_blocks, tokens, scatter])
def test_where_pages_were_made_makes_no_difference(same_bits, reference_switch, write, is_reference):
    numbers = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    plain, inside = numbers.clone(), numbers.clone()
    with torch.inference_mode():
        made_inside = numbers.clone()
    with reference_switch(is_reference):
        write(plain)
        write(made_inside)
        with torch.inference_mode():
            write(inside)
    assert not same_bits(plain, numbers), "something is written"
    assert same_bits(made_inside, plain)
    assert same_bits(inside, plain)

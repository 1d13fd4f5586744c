"""Drafts that branch, and beams that share pages: who sees whom, and in whose pages it lies. Batches of chunks."""

from __future__ import annotations

import pytest
import torch
from attention_batch import AttentionBatch, relative_error
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels import PrefillPlan, attention_decode, attention_prefill, attention_prefill_batch, mask_of_parents, mask_of_places
from kvtier.kernels.attention_reference import attention_reference


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def expected_of(batch: AttentionBatch, sequence: int, query: torch.Tensor, past: int, parents: list[int]) -> torch.Tensor:
    """Each draft alone at the end of its own path."""
    positions = [past + depth for depth in depths_of(parents)]
    hidden = []
    for node in range(len(parents)):
        path, ancestor = set(), node
        while ancestor >= 0:
            path.add(past + ancestor)
            ancestor = parents[ancestor]
        hidden.append([past + other for other in range(len(parents)) if past + other not in path])
    return batch.expected(sequence, query, positions, hidden=hidden, key_positions=[*range(past), *positions])


@st.composite
def trees(draw):
    return [draw(st.integers(-1, token - 1)) for token in range(draw(st.integers(1, 12)))]


@examples(60)
@given(first=trees(), second=trees(), pasts=st.tuples(st.integers(0, 40), st.integers(0, 40)), window=st.none() | st.integers(2, 20),
       sinks=st.integers(0, 4), group=st.sampled_from([1, 3]), seed=st.integers(0, 100))
def test_a_draft_sees_its_path_and_what_is_before_the_drafts(first, second, pasts, window, sinks, group, seed):
    model = {"window": window, "sinks": 0 if window is None else min(sinks, window - 1), "group": group, "seed": seed}
    batch = AttentionBatch([pasts[0] + len(first), pasts[1] + len(second)], first=pasts, **model)
    query = batch.queries(len(first) + len(second))
    longest = max(len(first), len(second))
    mask = torch.zeros(len(query), longest + 2, dtype=torch.bool)
    mask[:len(first), :len(first)] = mask_of_parents(first)
    mask[len(first):, :len(second)] = mask_of_parents(second)
    plan = PrefillPlan([0, len(first), len(query)], pasts)
    out = attention_prefill_batch(query, batch.pages, batch.table, plan, draft_mask=mask, **batch.how)
    assert relative_error(out[:len(first)], expected_of(batch, 0, query[:len(first)], pasts[0], first)) < 1e-5
    assert relative_error(out[len(first):], expected_of(batch, 1, query[len(first):], pasts[1], second)) < 1e-5
    reference = attention_reference(query[:len(first)], batch.pages, batch.table[0], pasts[0], draft_mask=mask_of_parents(first),
                                    **batch.how)
    assert relative_error(reference, expected_of(batch, 0, query[:len(first)], pasts[0], first)) < 1e-6


def test_a_draft_that_sees_nothing_gives_zeros():
    """Not even itself, and nothing before it: such rows pad a batch of drafts."""
    batch = AttentionBatch([3], first=[0])
    query, mask = batch.queries(3), mask_of_parents([-1, 0, 0])
    mask[1] = False
    out = attention_prefill(query, batch.pages, batch.table[0], 0, draft_mask=mask, **batch.how)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert relative_error(out[:1], batch.expected(0, query[:1], [0])) < 1e-5
    assert relative_error(out[2:], batch.expected(0, query[2:], [1], hidden=[[1]], key_positions=[0, 1, 1])) < 1e-5


def test_a_line_of_drafts_is_an_ordinary_chunk():
    batch = AttentionBatch([30], first=[20], window=15, sinks=3)
    query = batch.queries(10)
    mask = mask_of_parents(list(range(-1, 9)))
    assert torch.equal(mask, torch.ones(10, 10, dtype=torch.bool).tril())
    out = attention_prefill(query, batch.pages, batch.table[0], 20, draft_mask=mask, **batch.how)
    assert relative_error(out, attention_prefill(query, batch.pages, batch.table[0], 20, **batch.how)) < 1e-6


def test_a_mask_from_the_places_on_paths_is_the_one_from_parents():
    """``KVCacheManager.draft_table`` gives places; the example of docs/drafts.md."""
    places = torch.tensor([[6, -1], [7, -1], [6, 8], [7, 9]], dtype=torch.int32)
    assert torch.equal(mask_of_places(places, 6), mask_of_parents([-1, -1, 0, 1]))
    with pytest.raises(RequestError, match=r"places\[3, 1\]=9: 4 drafts behind 5 tokens lie at 5 to 8"):
        mask_of_places(places, 5)
    with pytest.raises(RequestError, match=r"parents\[1\]=1: a token continues an earlier one \(allowed: -1 to 0\)"):
        mask_of_parents([-1, 1])


@examples(60)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4), window=st.none() | st.integers(1, 20), seed=st.integers(0, 1000))
def test_beams_read_tokens_from_the_pages_of_other_rows(lengths, window, seed):
    batch = AttentionBatch(lengths, first=[0] * len(lengths), window=window, seed=seed, group=1)
    generator = torch.Generator().manual_seed(seed)
    shortest = min(lengths)
    source = torch.randint(-1, len(lengths), (len(lengths), max(lengths) + 2), generator=generator, dtype=torch.int32)
    source[:, shortest:] = -1   # what only one has is its own
    query = batch.queries(len(lengths))
    out = attention_decode(query, batch.pages, batch.table, torch.tensor(lengths), source_rows=source, **batch.how)
    for row, length in enumerate(lengths):
        mixed = AttentionBatch([length], window=window, group=1)
        owners = [row if owner < 0 else owner for owner in source[row].tolist()]
        mixed.keys = [torch.stack([batch.keys[owners[token]][token] for token in range(length)])]
        mixed.values = [torch.stack([batch.values[owners[token]][token] for token in range(length)])]
        assert relative_error(out[row:row + 1], mixed.expected(0, query[row:row + 1], [length - 1])) < 1e-5


def test_beams_without_an_indirection_read_their_own():
    batch = AttentionBatch([9, 9])
    query, lengths = batch.queries(1).repeat(2, 1, 1), torch.tensor([9, 9])
    own = torch.full((2, 9), -1, dtype=torch.int32)
    plain = attention_decode(query, batch.pages, batch.table, lengths, **batch.how)
    assert relative_error(attention_decode(query, batch.pages, batch.table, lengths, source_rows=own, **batch.how), plain) < 1e-6
    exchanged = torch.tensor([[1] * 9, [0] * 9], dtype=torch.int32)
    out = attention_decode(query, batch.pages, batch.table, lengths, source_rows=exchanged, **batch.how)
    assert relative_error(out, plain.flip(0)) < 1e-6
    assert relative_error(out, plain) > 0.1


@pytest.mark.parametrize(("source", "message"), [
    (torch.full((2, 8), -1, dtype=torch.int32), r"source_rows has 8 tokens for lengths\[0\]=9"),
    (torch.full((2, 9), 2, dtype=torch.int32), r"source_rows\[0, 0\]=2: the table has 2 rows \(allowed: 0 to 1"),
    (torch.full((2, 9), -2, dtype=torch.int32), r"source_rows\[0, 0\]=-2"),
    (torch.tensor([[1] * 9, [-1] * 9], dtype=torch.int32), r"table\[1, 0, 2\]=-1 \(sequence 1, keys of positions 8 to 11\): null"),
    (torch.zeros(2, 9), "source_rows has dtype float32"),
    (torch.zeros(3, 9, dtype=torch.int32), r"source_rows has shape \(3, 9\)"),
])
def test_an_indirection_that_leads_nowhere_is_refused(source, message):
    batch = AttentionBatch([9, 5])
    with pytest.raises(RequestError, match=message):
        attention_decode(batch.queries(2), batch.pages, batch.table, torch.tensor([9, 5]), source_rows=source, **batch.how)


def test_the_reference_follows_the_indirection(reference_kernels):
    batch = AttentionBatch([6, 6])
    query, lengths = batch.queries(1).repeat(2, 1, 1), torch.tensor([6, 6])
    plain = attention_decode(query, batch.pages, batch.table, lengths, **batch.how)
    exchanged = torch.tensor([[1] * 6, [0] * 6], dtype=torch.int32)
    assert torch.equal(attention_decode(query, batch.pages, batch.table, lengths, source_rows=exchanged, **batch.how), plain.flip(0))


@pytest.mark.parametrize(("mask", "message"), [
    (torch.ones(3, 2, dtype=torch.bool), r"draft_mask has shape \(3, 2\): the longest chunk has 3 tokens"),
    (torch.ones(2, 3, dtype=torch.bool), r"draft_mask has shape \(2, 3\)"),
    (torch.ones(3, 3), "draft_mask has dtype float32: pass bool"),
])
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    batch = AttentionBatch([9])
    with pytest.raises(RequestError, match=message):
        attention_prefill(batch.queries(3), batch.pages, batch.table[0], 6, draft_mask=mask, **batch.how)

"""Plans: what they refuse, how decode is split, and that batches of chunks are checked sequence by sequence."""

from __future__ import annotations

import math

import pytest
import torch
from attention_batch import AttentionBatch

from kvtier.errors import RequestError
from kvtier.kernels import DecodePlan, PrefillPlan, attention_decode, attention_prefill_batch
from kvtier.kernels.attention_plan import is_same_device
from kvtier.kernels.split_kv import join_parts

SIZES = {"max_sequences": 4, "max_tokens": 100_000, "query_heads": 8, "kv_heads": 2, "value_dim": 64}


@pytest.mark.parametrize(("indptr", "past", "message"), [
    ([0, 3], [1, 2], "query_indptr has 2 numbers for 2 sequences: pass one more than sequences"),
    ([1, 3], [0], r"query_indptr\[0\]=1"),
    ([0, 5, 3], [0, 0], r"query_indptr\[2\]=3 \(sequence 1\) is less than query_indptr\[1\]=5: pointers never descend"),
    ([0, 5, 7], [0, 2.0], r"past\[1\]=2.0: pass a whole number"), ([0, 5.0], [0], r"query_indptr\[1\]=5.0: pass a whole number"),
    ([0, 5, 7], [0, -1], r"past\[1\]=-1 \(sequence 1\)"),
])
def test_pointers_that_descend_are_refused(indptr, past, message):
    with pytest.raises(RequestError, match=message):
        PrefillPlan(indptr, past)


def test_a_tile_is_rows_of_one_sequence_and_the_late_ones_come_first():
    plan = PrefillPlan([0, 5, 5, 6], [10, 7, 0])
    assert plan.tiles(16, 8).tolist() == [[2, 0], [0, 32], [0, 16], [0, 0]]
    assert plan.tiles(16, 8) is plan.tiles(16, 8), "made once for all layers"
    assert plan.sequences().tolist() == [[0, 5, 10, 15], [0, 0, 0, 0], [5, 6, 0, 1]]


@pytest.mark.parametrize(("max_sequences", "max_tokens", "programs", "split_tokens", "num_splits"), [
    (1, 100_000, 264, 768, 131),      # one long sequence: its parts over two heads fill the device
    (1, 100, 264, 256, 1),            # short: a part below 256 tokens is not worth it
    (512, 100_000, 264, 4096, 25),    # many: a part is still bounded, so that a long one among short ones is shared out
    (64, 4000, 264, 1536, 3),
])
def test_the_fewer_sequences_the_more_parts(max_sequences, max_tokens, programs, split_tokens, num_splits):
    plan = DecodePlan(**SIZES | {"max_sequences": max_sequences, "max_tokens": max_tokens, "num_programs": programs})
    assert (plan.split_tokens, plan.num_splits) == (split_tokens, num_splits)
    assert plan.split_tokens * plan.num_splits >= max_tokens
    rows, sums = plan.parts()
    assert (rows.shape, sums.shape) == ((max_sequences, num_splits, 8, 64), (max_sequences, num_splits, 8))
    assert plan.parts()[0] is rows, "a captured graph finds the same buffer"


@pytest.mark.parametrize(("change", "message"), [
    ({"max_sequences": 1}, "2 sequences: the plan was made for 1; raise max_sequences"),
    ({"max_tokens": 19}, None), ({"max_tokens": 16}, "the table holds 20 tokens of a sequence: the plan was made for 16; raise max_tokens"),
    ({"query_heads": 8}, "the plan was made for 8 query heads and values of 16, this is 4 and 16"),
    ({"value_dim": 8}, "the plan was made for 4 query heads and values of 8"),
    ({"device": "meta"}, "the plan is on meta, the query on cpu"),
])
def test_a_plan_for_other_sizes_is_refused(change, message):
    batch = AttentionBatch([9, 5])
    plan = DecodePlan(**{"max_sequences": 2, "max_tokens": 20, "query_heads": 4, "kv_heads": 2, "value_dim": 16} | change)
    call = (batch.queries(2), batch.pages, batch.table, torch.tensor([9, 5]))
    if message is None:
        assert attention_decode(*call, plan=plan, **batch.how).isfinite().all()
        return
    with pytest.raises(RequestError) as caught:
        attention_decode(*call, plan=plan, **batch.how)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", list(SIZES))
def test_a_plan_for_nothing_is_refused(name):
    with pytest.raises(RequestError, match=f"DecodePlan: {name}=0: must be at least 1"):
        DecodePlan(**SIZES | {name: 0})


@pytest.mark.parametrize(("indptr", "past", "message"), [
    ([0, 3, 7], [6, 1], None),
    ([0, 3, 7], [6, 2], r"table[1, 0, 1]=-1"),
    ([0, 3, 7], [6, 30], "past=30 and 4 queries of sequence 1: the table's 5 blocks of 4 tokens allow positions 0 to 19"),
    ([0, 3, 6], [6, 1], "the plan was made for 6 queries of 2 sequences, this is 7 queries and a table of 2"),
    ([0, 7], [6], "the plan was made for 7 queries of 1 sequences"),
])
def test_a_batch_of_chunks_is_checked_sequence_by_sequence(indptr, past, message):
    """Among several requests one whose pages are missing or that is too long for its row."""
    batch = AttentionBatch([9, 5])
    if message is not None and "table[" in message:
        batch.table[1, :, 1] = -1
    query = batch.queries(7)
    if message is None:
        assert attention_prefill_batch(query, batch.pages, batch.table, PrefillPlan(indptr, past), **batch.how).isfinite().all()
        return
    with pytest.raises(RequestError) as caught:
        attention_prefill_batch(query, batch.pages, batch.table, PrefillPlan(indptr, past), **batch.how)
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [10**6, 2**31 - 1, -5])
def test_an_entry_outside_the_pool_is_found_in_any_sequence(bad):
    """The mistake that gives no error: among several requests one whose table leads outside the pool."""
    batch = AttentionBatch([9, 9, 9])
    batch.table[1, 1, 2] = bad
    with pytest.raises(RequestError, match=rf"table\[1, 1, 2\]={bad} \(sequence 1, values of positions 8 to 11\): outside the pool"):
        attention_decode(batch.queries(3), batch.pages, batch.table, torch.tensor([9, 9, 9]), **batch.how)
    out = attention_decode(batch.queries(3), batch.pages, batch.table, torch.tensor([9, 8, 9]), **batch.how)
    assert out.isfinite().all(), "behind a sequence's end nobody looks"


def test_a_plan_of_another_device_is_refused():
    batch = AttentionBatch([9])
    with pytest.raises(RequestError, match="the plan is on meta, the query on cpu"):
        attention_prefill_batch(batch.queries(3), batch.pages, batch.table, PrefillPlan([0, 3], [6], device="meta"), **batch.how)


def test_causality_is_the_same_in_plan_and_visibility():
    batch = AttentionBatch([9])
    with pytest.raises(RequestError, match=r"a plan with is_causal=False and visibility\.is_causal=True"):
        attention_prefill_batch(batch.queries(3), batch.pages, batch.table, PrefillPlan([0, 3], [9], is_causal=False), **batch.how)


def test_parts_are_joined_by_their_log_sums_in_any_number_and_order():
    """Parts of random sizes, some of them empty, joined at once and in two steps."""
    torch.manual_seed(4)
    scores, values = torch.randn(3, 2, 40, dtype=torch.float64), torch.randn(40, 2, 8, dtype=torch.float64)
    bounds = [0, 1, 1, 17, 39, 40]
    parts, sums = torch.zeros(3, 5, 2, 8, dtype=torch.float64), torch.full((3, 5, 2), float("-inf"), dtype=torch.float64)
    for part in range(5):
        piece = scores[..., bounds[part]:bounds[part + 1]]
        if piece.shape[2]:
            parts[:, part] = torch.einsum("nhk,khd->nhd", torch.softmax(piece, -1), values[bounds[part]:bounds[part + 1]])
            sums[:, part] = torch.logsumexp(piece, -1) / math.log(2)
    expected = torch.einsum("nhk,khd->nhd", torch.softmax(scores, -1), values)
    joined, log_sum = join_parts(parts, sums)
    assert torch.allclose(joined, expected)
    assert torch.allclose(log_sum * math.log(2), torch.logsumexp(scores, -1))
    steps = [join_parts(parts[:, places], sums[:, places]) for places in ([4, 0], [1], [3, 2])]
    assert torch.allclose(join_parts(*(torch.stack(field, dim=1) for field in zip(*steps, strict=True)))[0], expected)
    nothing, log_sum = join_parts(parts[:, 1:2], sums[:, 1:2])
    assert torch.equal(nothing, torch.zeros(3, 2, 8, dtype=torch.float64))
    assert (log_sum == -math.inf).all()


def test_the_reference_names_what_the_kernels_would_trust(reference_kernels):
    """Switched on to debug an engine: it checks even where checks were left out, and sees what nobody wrote."""
    batch = AttentionBatch([9, 9])
    query, lengths = batch.queries(2), torch.tensor([9, 9])
    good = attention_decode(query, batch.pages, batch.table, lengths, check_values=False, **batch.how)
    assert good.isfinite().all()
    with pytest.raises(RequestError, match=r"token 9 of sequence 1: NaN in its key or value \(page entry 1 of block 2\)"):
        attention_decode(query, batch.pages, batch.table, torch.tensor([9, 10]), check_values=False, **batch.how)
    batch.table[1, 1, 0] = -1
    with pytest.raises(RequestError, match=r"table\[1, 1, 0\]=-1 \(sequence 1, values of positions 0 to 3\): null"):
        attention_decode(query, batch.pages, batch.table, lengths, check_values=False, **batch.how)
    batch.table[1, 1, 0] = 10**6
    with pytest.raises(RequestError, match="outside the pool"):
        attention_prefill_batch(batch.queries(1), batch.pages, batch.table, PrefillPlan([0, 0, 1], [0, 8]), check_values=False, **batch.how)


def test_a_plan_for_one_gpu_does_not_serve_another(monkeypatch):
    assert is_same_device(torch.device("cuda:1"), torch.device("cuda:1"))
    assert not is_same_device(torch.device("cuda:0"), torch.device("cuda:1"))
    assert is_same_device(torch.device("cpu:0"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert PrefillPlan([0], [], device="cuda").device == torch.device("cuda:3")

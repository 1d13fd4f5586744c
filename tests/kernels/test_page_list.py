"""Page lists in compressed rows become block tables; what is wrong in them is named."""

from __future__ import annotations

import pytest
import torch
from attention_batch import LAYERS, AttentionBatch, relative_error

from kvtier.errors import RequestError
from kvtier.kernels import attention_decode, table_of_page_list

LIST = {"indptr": torch.tensor([0, 3, 3, 4]), "indices": torch.tensor([5, 0, 2, 7]), "last_page_len": torch.tensor([1, 0, 4])}
POOL = {"tokens_per_block": 4, "num_blocks": 8, "num_layers": 3}


def test_a_list_is_a_table_and_lengths():
    table, lengths = table_of_page_list(**LIST, **POOL)
    assert table.tolist() == [[[30, 0, 12], [31, 1, 13]], [[-1] * 3] * 2, [[42, -1, -1], [43, -1, -1]]]
    assert lengths.tolist() == [9, 0, 4]
    latent, _ = table_of_page_list(**LIST, **POOL, kv_factor=1)
    assert latent[0].tolist() == [[15, 0, 6]] * 2
    nothing, _ = table_of_page_list(torch.tensor([0]), torch.tensor([], dtype=torch.int32), torch.tensor([], dtype=torch.int32), **POOL)
    assert nothing.shape == (0, 2, 0)


def test_attention_reads_what_a_list_names():
    lengths = [9, 4, 17]
    batch = AttentionBatch(lengths)
    pages = [row[row >= 0] // (2 * LAYERS) for row in batch.table[:, 0]]
    indptr = torch.tensor([0, *torch.tensor([len(row) for row in pages]).cumsum(0).tolist()])
    table, found = table_of_page_list(indptr, torch.cat(pages), torch.tensor([1, 4, 1]), tokens_per_block=4, num_blocks=100,
                                      num_layers=LAYERS)
    assert found.tolist() == lengths
    query = batch.queries(3)
    out = attention_decode(query, batch.pages, table, found, **batch.how)
    assert relative_error(out, attention_decode(query, batch.pages, batch.table, found, **batch.how)) < 1e-6


@pytest.mark.parametrize("change", [{"num_blocks": 2**30, "num_layers": 2, "kv_factor": 1}, {"num_layers": 0}, {"kv_factor": 3}])
def test_pages_that_an_entry_cannot_count_are_refused(change):
    """Block 2**30 - 1 of two layers would be a negative number, and another one somebody else's page."""
    with pytest.raises(RequestError, match="allowed are at least one layer, a factor of 1 or 2, and 2147483647 pages"):
        table_of_page_list(**LIST, **(POOL | change))


@pytest.mark.parametrize(("change", "message"), [
    ({"indptr": torch.tensor([1, 3, 3, 4])}, r"indptr begins with \[1\]"),
    ({"indptr": torch.tensor([0, 3, 2, 4])}, r"indptr\[2\]=2 \(sequence 1\) is less than indptr\[1\]=3: pointers never fall"),
    ({"indptr": torch.tensor([0, 3, 3, 5])}, "indptr ends with 5: there are 4 indices"),
    ({"last_page_len": torch.tensor([0, 0, 4])}, r"last_page_len\[0\]=0 \(sequence 0\): allowed: 1 to 4"),
    ({"last_page_len": torch.tensor([1, 0, 5])}, r"last_page_len\[2\]=5 \(sequence 2\): allowed: 1 to 4"),
    ({"last_page_len": torch.tensor([1, 1, 4])}, r"last_page_len\[1\]=1 \(sequence 1\): allowed: 0, it has no pages"),
    ({"indices": torch.tensor([5, 0, 2, 8])}, r"indices\[3\]=8 \(sequence 2\): the pool has blocks 0 to 7"),
    ({"indices": torch.tensor([5, -1, 2, 7])}, r"indices\[1\]=-1 \(sequence 0\)"),
    ({"indices": torch.tensor([5.0, 0, 2, 7])}, "indices has dtype float32"),
    ({"last_page_len": torch.tensor([1, 0])}, r"last_page_len has shape \(2,\)"),
])
def test_a_list_that_cannot_be_is_refused(change, message):
    with pytest.raises(RequestError, match=message):
        table_of_page_list(**(LIST | change), **POOL)

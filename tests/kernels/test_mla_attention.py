"""Attention over latent pages: the same as attention over the keys and values that the model would project from them."""

from __future__ import annotations

import pytest
import torch
from attention_batch import LAYER, LAYERS, AttentionBatch, relative_error
from torch.nn.functional import scaled_dot_product_attention

from kvtier.errors import RequestError
from kvtier.kernels import Visibility, append_mla, mla_decode, mla_prefill

HEADS, LATENT, ROPE, NOPE, VALUE = 5, 32, 8, 16, 24
SCALE = (NOPE + ROPE) ** -0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_absorbed_projections_give_what_projected_keys_and_values_give(dtype):
    """The latent row is written by append_mla; torch's own attention gets full keys and values, head by head."""
    torch.manual_seed(1)
    tokens, past = 50, 43
    up_key, up_value = torch.randn(HEADS, NOPE, LATENT) / 4, torch.randn(HEADS, VALUE, LATENT) / 4
    latent, rope = torch.randn(tokens, LATENT).to(dtype).double(), torch.randn(tokens, ROPE).to(dtype).double()
    query_nope, query_rope = torch.randn(tokens - past, HEADS, NOPE).double(), torch.randn(tokens - past, HEADS, ROPE).double()
    batch = AttentionBatch([tokens], heads=1, group=HEADS, key_dim=LATENT + ROPE, value_dim=LATENT, latent=True, dtype=dtype)
    positions = torch.arange(tokens)
    append_mla(batch.pages, latent.to(dtype), rope.to(dtype), batch.table, torch.zeros_like(positions), positions, layer=LAYER,
               num_layers=LAYERS)

    keys = torch.cat([torch.einsum("hnl,tl->htn", up_key.double(), latent), rope.expand(HEADS, tokens, ROPE)], dim=2)
    values = torch.einsum("hvl,tl->htv", up_value.double(), latent)
    queries = torch.cat([query_nope, query_rope], dim=2).transpose(0, 1)
    visible = torch.ones(tokens - past, tokens, dtype=torch.bool).tril(past)
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=SCALE).transpose(0, 1)

    absorbed = torch.einsum("thn,hnl->thl", query_nope, up_key.double()).to(dtype)
    where = {"layer": LAYER, "num_layers": LAYERS, "scale": SCALE}
    out = mla_prefill(absorbed, query_rope.to(dtype), batch.pages, batch.table[0], past, **where)
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]   # queries are rounded too
    assert relative_error(torch.einsum("thl,hvl->thv", out.double(), up_value.double()), expected) < limit
    out = mla_decode(absorbed[-1:], query_rope[-1:].to(dtype), batch.pages, batch.table, torch.tensor([tokens]), **where)
    assert relative_error(torch.einsum("thl,hvl->thv", out.double(), up_value.double()), expected[-1:]) < limit


def test_a_window_over_latent_pages():
    batch = AttentionBatch([40], first=[30], heads=1, group=3, key_dim=24, value_dim=16, latent=True, window=9, sinks=2)
    query = batch.queries(10)
    where = {"layer": LAYER, "num_layers": LAYERS, "scale": 0.3, "visibility": Visibility(9, 2)}
    out = mla_prefill(query[..., :16], query[..., 16:], batch.pages, batch.table[0], 30, **where)
    assert relative_error(out, batch.expected(0, query, range(30, 40), scale=0.3)) < 1e-5


def test_a_row_that_is_key_and_value_has_one_scale():
    """A forgotten value_scale would give a result of the wrong size, and no error."""
    batch = AttentionBatch([9], heads=1, group=3, key_dim=24, value_dim=16, latent=True, dtype=torch.int8, scales=(0.02, 0.02))
    query = batch.queries(1)
    where = {"layer": LAYER, "num_layers": LAYERS, "scale": 0.3, "key_scale": 0.02}
    with pytest.raises(RequestError, match=r"key_scale=0.02 and value_scale=1.0: one row is key and value"):
        mla_decode(query[..., :16], query[..., 16:], batch.pages, batch.table, torch.tensor([9]), **where)
    out = mla_decode(query[..., :16], query[..., 16:], batch.pages, batch.table, torch.tensor([9]), value_scale=0.02, **where)
    assert relative_error(out, batch.expected(0, query, [8], scale=0.3)) < 1e-5


@pytest.mark.parametrize(("latent", "rope", "pages", "scale", "message"), [
    ((1, 3, 16), (1, 3, 8), (8, 1, 4, 24), None, "scale=None: pass the model's factor"),
    ((1, 3, 16), (1, 2, 8), (8, 1, 4, 24), 1.0, r"query_rope has shape \(1, 2, 8\)"),
    ((1, 3, 0), (1, 3, 24), (8, 1, 4, 24), 1.0, "the latent part is empty"),
    ((1, 3, 16), (1, 3, 16), (8, 1, 4, 24), 1.0, r"query has shape \(1, 3, 32\)"),
    ((1, 3, 16), (1, 3, 8), (8, 2, 4, 24), 1.0, r"pages has shape \(8, 2, 4, 24\): pass \[pages, 1 head"),
])
def test_parts_that_make_no_row_are_refused(latent, rope, pages, scale, message):
    table = torch.zeros(1, 2, 2, dtype=torch.int32)
    with pytest.raises(RequestError, match=message):
        mla_decode(torch.zeros(latent), torch.zeros(rope), torch.zeros(pages), table, torch.tensor([3]), layer=0, scale=scale)


def test_parts_on_two_devices_are_refused():
    with pytest.raises(RequestError, match="query_rope is on meta, the pages are on cpu"):
        mla_decode(torch.zeros(1, 3, 16), torch.zeros(1, 3, 8, device="meta"), torch.zeros(8, 1, 4, 24),
                   torch.zeros(1, 2, 1, dtype=torch.int32), torch.tensor([1]), layer=0, scale=1.0)

"""Paged attention on a real device: the Triton kernels against float64, over the models of the CPU's grid; a captured step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy", reason="make test-gpu tests the CUDA twin as a whole, which needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("triton", reason="the attention kernels for GPUs need Triton")

import torch

sys.path.append(str(Path(__file__).parent.parent / "kernels"))  # for attention_batch: importlib mode puts no folder there
from attention_batch import NVFP4, AttentionBatch, relative_error

from kvtier.errors import RequestError
from kvtier.kernels import DecodePlan, PrefillPlan, Visibility, attention_decode, attention_prefill_batch, mask_of_parents, use_reference

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
QUANTISED = {"scales": (0.03, 0.01)}
MODELS: dict[str, dict[str, Any]] = {
    "usual": {"heads": 8, "group": 4, "key_dim": 128, "value_dim": 128, "tokens_per_block": 32},
    "token first": {"heads": 3, "group": 5, "key_dim": 96, "value_dim": 96, "tokens_per_block": 16, "tokens_first": True},
    "one head for 71": {"heads": 1, "group": 71, "key_dim": 64, "value_dim": 64, "tokens_per_block": 128},
    "widths": {"heads": 4, "group": 3, "key_dim": 192, "value_dim": 128, "tokens_per_block": 64},
    "wide": {"heads": 2, "group": 8, "key_dim": 256, "value_dim": 256, "tokens_per_block": 16},
    "odd": {"heads": 2, "group": 7, "key_dim": 80, "value_dim": 80, "tokens_per_block": 16},
    "window": {"heads": 2, "group": 2, "key_dim": 64, "value_dim": 64, "tokens_per_block": 16, "window": 300, "sinks": 5},
    "latent": {"heads": 1, "group": 16, "key_dim": 576, "value_dim": 512, "tokens_per_block": 64, "latent": True},
}


def on_device(batch: AttentionBatch) -> dict[str, Any]:
    """The keywords of a call, pages on the device with the strides that they have."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        moved.view(torch.uint8).copy_(tensor.view(torch.uint8))
        return moved

    how = {name: move(value) if isinstance(value, torch.Tensor) else value for name, value in batch.how.items()}
    return {"pages": move(batch.pages), "table": batch.table.cuda(), **how}


def expected_decode(batch: AttentionBatch, query: torch.Tensor) -> torch.Tensor:
    return torch.cat([batch.expected(row, query[row:row + 1], [length - 1]) for row, length in enumerate(batch.lengths)])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(MODELS))
def test_decode_is_attention(name: str, dtype: torch.dtype) -> None:
    batch = AttentionBatch([1500, 1, 0, 257, 64], dtype=dtype, **MODELS[name])
    query = batch.queries(5, dtype)
    out = attention_decode(query.cuda(), lengths=torch.tensor(batch.lengths).cuda(), **on_device(batch))
    assert relative_error(out.cpu(), expected_decode(batch, query)) < TOLERANCE[dtype]
    assert not out[2].any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(MODELS))
def test_prefill_is_attention(name: str, dtype: torch.dtype) -> None:
    chunks = [(700, 90), (0, 33), (511, 1), (5, 0)]
    batch = AttentionBatch([past + tokens for past, tokens in chunks], first=[past for past, _ in chunks], dtype=dtype, **MODELS[name])
    query = batch.queries(124, dtype)
    plan = PrefillPlan([0, 90, 123, 124, 124], [past for past, _ in chunks], device="cuda")
    out = attention_prefill_batch(query.cuda(), plan=plan, **on_device(batch)).cpu()
    expected = torch.cat([batch.expected(0, query[:90], range(700, 790)), batch.expected(1, query[90:123], range(33)),
                          batch.expected(2, query[123:], [511])])
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, NVFP4])
@pytest.mark.parametrize("name", ["usual", "widths", "odd", "latent"])
def test_stored_numbers_become_numbers_on_load(name: str, dtype: torch.dtype) -> None:
    scales = (0.03, 0.03) if name == "latent" else (0.03, 0.01)
    batch = AttentionBatch([300, 77], dtype=dtype, scales=scales, **MODELS[name])
    for queries in (torch.float32, torch.bfloat16):
        query = batch.queries(2, queries)
        out = attention_decode(query.cuda(), lengths=torch.tensor(batch.lengths).cuda(), **on_device(batch))
        assert relative_error(out.cpu(), expected_decode(batch, query)) < TOLERANCE[queries]


def test_drafts_and_cross_attention() -> None:
    parents = [-1, 0, 0, 1, 2, 3, 3]
    positions = [40 + depth for depth in (0, 1, 1, 2, 2, 3, 3)]
    batch = AttentionBatch([47], first=[40], group=3, key_dim=64, value_dim=64, tokens_per_block=16)
    query, mask = batch.queries(7), mask_of_parents(parents)
    hidden = [[40 + other for other in range(7) if not mask[row, other]] for row in range(7)]
    plan = PrefillPlan([0, 7], [40], device="cuda")
    out = attention_prefill_batch(query.cuda(), plan=plan, draft_mask=mask.cuda(), **on_device(batch))
    assert relative_error(out.cpu(), batch.expected(0, query, positions, hidden=hidden, key_positions=[*range(40), *positions])) < 1e-5
    how = on_device(batch) | {"visibility": Visibility(is_causal=False)}
    plan = PrefillPlan([0, 7], [47], is_causal=False, device="cuda")
    out = attention_prefill_batch(query.cuda(), plan=plan, **how)
    assert relative_error(out.cpu(), batch.expected(0, query, range(7), is_causal=False)) < 1e-5


def test_a_sequence_alone_and_in_a_batch_give_the_same_bits() -> None:
    batch = AttentionBatch([3000, 17, 800], dtype=torch.bfloat16, **MODELS["usual"])
    query, how = batch.queries(3, torch.bfloat16).cuda(), on_device(batch)
    lengths, table = torch.tensor(batch.lengths).cuda(), how.pop("table")
    plan = DecodePlan(max_sequences=8, max_tokens=4096, query_heads=32, kv_heads=8, value_dim=128, device="cuda")
    together = attention_decode(query, table=table, lengths=lengths, plan=plan, **how)
    for row in range(3):
        alone = attention_decode(query[row:row + 1], table=table[row:row + 1], lengths=lengths[row:row + 1], plan=plan, **how)
        assert torch.equal(alone, together[row:row + 1])


def test_a_captured_step_follows_lengths_and_tables_that_change() -> None:
    """Decode has no work on the host between two replays: it reads lengths and table where they are."""
    batch = AttentionBatch([900, 400], first=[0, 0], dtype=torch.bfloat16, **MODELS["usual"])
    query, how = batch.queries(2, torch.bfloat16), on_device(batch)
    target, lengths = query.cuda(), torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    plan = DecodePlan(max_sequences=2, max_tokens=how["table"].shape[2] * 32, query_heads=32, kv_heads=8, value_dim=128, device="cuda")
    attention_decode(target, lengths=lengths, plan=plan, **how)   # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode(target, lengths=lengths, plan=plan, **how)
    for first, second in ((900, 400), (1, 333), (512, 0)):
        lengths.copy_(torch.tensor([first, second]))
        out.fill_(float("nan"))
        graph.replay()
        for row, length in enumerate((first, second)):
            expected = batch.expected(row, query[row:row + 1], [length - 1])
            assert relative_error(out[row:row + 1].cpu(), expected) < 1e-2
    how["table"].copy_(how["table"].flip(0))
    lengths.copy_(torch.tensor([400, 900]))
    graph.replay()
    assert relative_error(out.cpu(), torch.cat([batch.expected(1, query[:1], [399]), batch.expected(0, query[1:], [899])])) < 1e-2


def test_null_entries_and_entries_outside_the_pool_are_not_read() -> None:
    batch = AttentionBatch([128], key_dim=64, value_dim=64, tokens_per_block=16)
    how = on_device(batch)
    how["table"][0, 1, 1] = -1
    how["table"][0, 0, 3] = 2**31 - 1
    query = batch.queries(1)
    out = attention_decode(query.cuda(), lengths=torch.tensor([128]).cuda(), **how)
    assert relative_error(out.cpu(), batch.expected(0, query, [127], hidden=[[*range(16, 32), *range(48, 64)]])) < 1e-5
    with pytest.raises(RequestError, match=r"table\[0, 0, 3\]=2147483647"):
        attention_decode(query.cuda(), lengths=torch.tensor([128]).cuda(), check_values=True, **how)


def test_the_reference_can_take_the_kernels_place() -> None:
    batch = AttentionBatch([30, 5])
    query, how = batch.queries(2), on_device(batch)
    lengths = torch.tensor([30, 5]).cuda()
    try:
        use_reference(True)
        reference = attention_decode(query.cuda(), lengths=lengths, **how)
    finally:
        use_reference(False)
    assert relative_error(reference.cpu(), attention_decode(query.cuda(), lengths=lengths, **how).cpu()) < 1e-5


def test_a_pool_beyond_the_32nd_bit_of_an_offset() -> None:
    pages = torch.zeros((1 << 31) // (32 * 128) + 64, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
    last = pages.shape[0] - 4
    pages[last:] = torch.randn(4, 1, 32, 128)
    query = torch.randn(1, 4, 128, dtype=torch.bfloat16, device="cuda")
    far = torch.tensor([[[last, last + 2], [last + 1, last + 3]]], dtype=torch.int32, device="cuda")
    out = attention_decode(query, pages, far, torch.tensor([60], device="cuda"), layer=0)
    near = attention_decode(query, pages[last:].clone(), far - last, torch.tensor([60], device="cuda"), layer=0)
    assert torch.equal(out, near)
    assert out.any()

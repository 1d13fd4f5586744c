"""Run by test_triton_attention in a process of its own: the Triton attention kernels, interpreted, against plain float64.

TRITON_INTERPRET must be set before triton is imported, and it then holds for the whole process.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from attention_batch import NVFP4, AttentionBatch, relative_error

from kvtier.kernels import DecodePlan, PrefillPlan, Visibility, mask_of_parents
from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.triton_decode import decode_triton
from kvtier.kernels.triton_prefill import prefill_triton

QUARTERS = {"scales": (0.03, 0.01)}
"""Scales of keys and of values that differ."""


def context_of(batch: AttentionBatch, query: torch.Tensor, **more: Any) -> PagedContext:
    return PagedContext.of("interpreted", query, batch.pages, batch.table, **(batch.how | more))


def decode_error(model: dict[str, Any], lengths: list[int], split: int | None, soft_cap: float | None) -> float:
    batch = AttentionBatch(lengths, **model)
    query = batch.queries(len(lengths))
    context = context_of(batch, query, soft_cap=soft_cap)
    plan = None
    if split is not None:
        plan = DecodePlan(max_sequences=len(lengths) + 1, max_tokens=context.capacity, query_heads=query.shape[1], kv_heads=batch.heads,
                          value_dim=batch.value_dim)
        plan.split_tokens, plan.num_splits = split, -(-context.capacity // split)
        for buffer in plan.parts():
            buffer.fill_(float("nan"))
    out = decode_triton(query, context, torch.tensor(lengths), plan)
    expected = torch.cat([batch.expected(row, query[row:row + 1], [length - 1], soft_cap=soft_cap) for row, length in enumerate(lengths)])
    return relative_error(out, expected)


def prefill_error(model: dict[str, Any], chunks: list[tuple[int, int]], is_split: bool, soft_cap: float | None) -> float:
    batch = AttentionBatch([past + tokens for past, tokens in chunks], first=[past for past, _ in chunks], **model)
    query = batch.queries(sum(tokens for _, tokens in chunks))
    indptr = [0]
    for _, tokens in chunks:
        indptr.append(indptr[-1] + tokens)
    plan = PrefillPlan(indptr, [past for past, _ in chunks])
    if is_split:
        plan.split_tokens = lambda programs: 32   # type: ignore[method-assign]
    out = prefill_triton(query, context_of(batch, query, soft_cap=soft_cap), plan, None)
    expected = torch.cat([batch.expected(row, query[indptr[row]:indptr[row + 1]], range(past, past + tokens), soft_cap=soft_cap)
                          for row, (past, tokens) in enumerate(chunks)])
    return relative_error(out, expected)


def drafts_error() -> float:
    """Two paths behind a past, in a window, and a shorter chunk of another sequence, in whose rows the mask goes on with nonsense. The
    mask is column by column."""
    parents = [-1, 0, 0, 1, 2, 3]
    depths = [0, 1, 1, 2, 2, 3]
    batch = AttentionBatch([17 + len(parents), 11], first=[17, 9], window=9, sinks=2, group=3)
    query, mask = batch.queries(len(parents) + 2), torch.ones(len(parents), len(parents) + 2, dtype=torch.bool).t()
    mask[:len(parents)], mask[len(parents):, :2] = mask_of_parents(parents), mask_of_parents([-1, 0])
    out = prefill_triton(query, context_of(batch, query), PrefillPlan([0, len(parents), len(parents) + 2], [17, 9]), mask)
    hidden = [[17 + other for other in range(len(parents)) if not mask[row, other]] for row in range(len(parents))]
    positions = [17 + depth for depth in depths]
    paths = batch.expected(0, query[:len(parents)], positions, hidden=hidden, key_positions=[*range(17), *positions])
    return relative_error(out, torch.cat([paths, batch.expected(1, query[len(parents):], [9, 10])]))


def sources_error() -> float:
    """Three beams: tokens from the pages of others. Sources and lengths are columns of something."""
    batch = AttentionBatch([21, 21, 21], group=1)
    query = batch.queries(3)
    source = torch.randint(-1, 3, (24, 3), generator=torch.Generator().manual_seed(5), dtype=torch.int32).t()
    lengths = torch.tensor([[21, 3], [21, 4], [21, 5]])[:, 0]
    out = decode_triton(query, replace(context_of(batch, query), source_rows=source), lengths, None)
    expected = []
    for row in range(3):
        owners = [row if owner < 0 else owner for owner in source[row].tolist()[:21]]
        mixed = AttentionBatch([21], group=1)
        mixed.keys = [torch.stack([batch.keys[owner][token] for token, owner in enumerate(owners)])]
        mixed.values = [torch.stack([batch.values[owner][token] for token, owner in enumerate(owners)])]
        expected.append(mixed.expected(0, query[row:row + 1], [20]))
    return relative_error(out, torch.cat(expected))


def cross_error() -> float:
    batch = AttentionBatch([19, 5])
    query = batch.queries(9)
    context = context_of(batch, query, visibility=Visibility(is_causal=False))
    out = prefill_triton(query, context, PrefillPlan([0, 4, 9], [19, 5], is_causal=False), None)
    return relative_error(out, torch.cat([batch.expected(0, query[:4], range(4), is_causal=False),
                                          batch.expected(1, query[4:], range(5), is_causal=False)]))


def null_error() -> float:
    """With checks off a null entry, or one outside the pool, is not read: the token is as if it were not there."""
    batch = AttentionBatch([16])
    query = batch.queries(1)
    batch.table[0, 1, 1] = -1
    batch.table[0, 0, 2] = 2**31 - 1
    out = decode_triton(query, context_of(batch, query), torch.tensor([16]), None)
    return relative_error(out, batch.expected(0, query, [15], hidden=[range(4, 12)]))


def main() -> int:
    """Exit code 0 when every case agrees."""
    torch.manual_seed(0)
    found = {
        "decode plain": decode_error({"tokens_per_block": 16}, [70, 0, 3], None, None),
        "decode split window": decode_error({"window": 60, "sinks": 5, "heads": 1, "group": 3}, [130, 33, 4], 64, None),
        "decode split 71 cap": decode_error({"heads": 1, "group": 71, "tokens_first": True, "key_dim": 24, "value_dim": 40}, [90], 64, 2.0),
        "decode ring": decode_error({"window": 20, "sinks": 3, "ring": True}, [61, 9], None, None),
        # More tokens from the first block that is seen than the ring has places: no part may leave out the newest.
        "decode ring one part": decode_error({"window": 20, "ring": False}, [61, 9], 32, None),
        "decode bf16": decode_error({"dtype": torch.bfloat16, "key_dim": 80, "value_dim": 80}, [20], None, None),
        "decode fp8": decode_error({"dtype": torch.float8_e4m3fn, "value_dim": 32} | QUARTERS, [20], None, None),
        "decode int8": decode_error({"dtype": torch.int8} | QUARTERS, [20], None, None),
        "decode nvfp4": decode_error({"dtype": NVFP4, "key_dim": 48, "value_dim": 48} | QUARTERS, [20], None, None),
        "decode nvfp4 widths": decode_error({"dtype": NVFP4, "key_dim": 48, "value_dim": 32} | QUARTERS, [20], None, None),
        "decode latent": decode_error({"latent": True, "heads": 1, "group": 5, "key_dim": 40, "value_dim": 32}, [37], 32, None),
        "decode latent odd": decode_error({"latent": True, "heads": 1, "group": 5, "key_dim": 40, "value_dim": 24}, [37], None, None),
        "prefill plain": prefill_error({"group": 3}, [(11, 9), (0, 5), (3, 1)], False, None),
        "prefill split window": prefill_error({"window": 30, "sinks": 2, "heads": 1}, [(60, 7)], True, 1.5),
        "prefill 71": prefill_error({"heads": 1, "group": 71}, [(5, 2)], False, None),
        "prefill nvfp4": prefill_error({"dtype": NVFP4, "heads": 1} | QUARTERS, [(6, 4)], False, None),
        "prefill latent": prefill_error({"latent": True, "heads": 1, "group": 4, "key_dim": 48, "value_dim": 32}, [(6, 4)], False, None),
        "drafts": drafts_error(), "sources": sources_error(), "cross": cross_error(), "null": null_error()}
    for name, error in found.items():
        print(f"{name}: {'agrees' if error < 1e-5 else 'DIFFERS'} ({error:.1e})")
    return 0 if all(error < 1e-5 for error in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

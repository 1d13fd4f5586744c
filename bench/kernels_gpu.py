"""Paged decode on a GPU beside a copy within the device (part of ``make test-gpu``).

Decode reads keys and values once and does little else, so the memory's bandwidth is its limit. A copy of half as many bytes reads and
writes as many in all. The pages are scattered; the result is compared with torch's attention over the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.bench.gpu import DEVICE_COPY, WARM_UP, open_gpu_report, until_done
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.report import Report, size_name, throughput_row
from kvtier.errors import ConfigError
from kvtier.kernels import DecodePlan, attention_decode

OURS: Final = "kvtier"


@dataclass(frozen=True)
class GpuDecodePlan:
    """What is measured, in bfloat16.

    Attributes:
        sequences, tokens: of the batch.
        heads, head_dim: KV heads and their width.
        groups: query heads for each KV head.
        page_tokens: page sizes.
        rounds: recorded per row.
    """

    sequences: int = 64
    tokens: int = 8192
    heads: int = 8
    head_dim: int = 128
    groups: tuple[int, ...] = (4, 8)
    page_tokens: tuple[int, ...] = (16, 32, 64, 128)
    rounds: int = 9

    @classmethod
    def usual(cls, quick: bool) -> GpuDecodePlan:
        """The whole, or a smaller batch and two page sizes in 5 rounds."""
        return cls(16, 2048, page_tokens=(16, 64), rounds=5) if quick else cls()


def measure_gpu_decode(plan: GpuDecodePlan | None = None, device: str = "cuda") -> Report:
    """Measure each page size and ratio of heads.

    Args:
        plan: sizes; the defaults when None.
        device: "cuda" or "cuda:N". With "cpu" everything runs and says nothing about a GPU: that is for tests.

    Returns:
        A report that has not been printed. Its config says which rows did not hold, under "invalid".

    Raises:
        ConfigError: a plan without work.
    """
    plan = GpuDecodePlan() if plan is None else plan
    if min(plan.sequences, plan.tokens) < 1 or any(plan.tokens % tokens for tokens in plan.page_tokens):
        raise ConfigError(f"{plan.sequences} sequences of {plan.tokens} tokens: a decode benchmark needs at least 1 of each, and whole "
                          f"pages of {plan.page_tokens}")
    report = open_gpu_report("kernels", device, plan.rounds, {
        "sequences": plan.sequences, "tokens": plan.tokens, "kv_heads": plan.heads, "head_dim": plan.head_dim})
    report.note(f"decode: {plan.sequences} sequences of {plan.tokens} tokens over {plan.heads} KV heads of {plan.head_dim}; GB/s of keys "
                "and values read, from the call until the device is done. The size in a row's name is one page of keys; r is how many "
                "query heads a KV head has.")
    for page_tokens in plan.page_tokens:
        for group in plan.groups:
            _measure(report, plan, device, page_tokens, group)
    return report


def _measure(report: Report, plan: GpuDecodePlan, device: str, page_tokens: int, group: int) -> None:
    name = f"kernels/decode/bfloat16/{size_name(page_tokens * plan.heads * plan.head_dim * 2)}/r{group}"
    blocks = plan.tokens // page_tokens
    pages = torch.randn(plan.sequences * blocks * 2, plan.heads, page_tokens, plan.head_dim, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(plan.sequences * blocks).view(plan.sequences, 1, blocks).to(device, torch.int32)
    table = torch.cat([slots * 2, slots * 2 + 1], dim=1)
    query = torch.randn(plan.sequences, plan.heads * group, plan.head_dim, dtype=torch.bfloat16, device=device)
    lengths = torch.full((plan.sequences,), plan.tokens, dtype=torch.int32, device=device)
    decode_plan = DecodePlan(max_sequences=plan.sequences, max_tokens=plan.tokens, query_heads=plan.heads * group, kv_heads=plan.heads,
                             value_dim=plan.head_dim, device=device)
    source = pages[:len(pages) // 2]
    target = torch.empty_like(source)
    results: list[torch.Tensor] = []

    def decode() -> None:
        results.append(attention_decode(query, pages, table, lengths, layer=0, num_layers=1, plan=decode_plan, check_values=False))

    measured = interleave([Alternative(DEVICE_COPY, until_done(device, lambda: target.copy_(source))),
                           Alternative(OURS, until_done(device, decode))], plan.rounds, warm_up=WARM_UP)
    for sequence in {0, plan.sequences - 1}:
        keys, values = (pages[table[sequence, field].long()].transpose(0, 1).reshape(plan.heads, -1, plan.head_dim).float()
                        for field in (0, 1))
        rows = query[sequence].view(plan.heads, group, plan.head_dim).float()
        expected = scaled_dot_product_attention(rows, keys, values).view(-1, plan.head_dim).double()
        error = max(float((result[sequence].double() - expected).norm() / expected.norm()) for result in results)
        if not error < 1e-2:
            report.reject(name, f"sequence {sequence} differs from torch's attention by {error:.1e} (allowed: 0.01)")
            return
    report.add(throughput_row(name, measured, OURS, DEVICE_COPY, pages.numel() * pages.element_size()))

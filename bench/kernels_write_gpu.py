"""The write path on a GPU beside a copy within the device (part of ``make test-gpu``).

Each of these kernels reads its input once and writes its output once, so the memory's bandwidth is its limit: a copy that moves as many
bytes in all. Pages are scattered, and every result is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.bench.gpu import DEVICE_COPY, WARM_UP, open_gpu_report, until_done
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.report import Report, size_name, throughput_row
from kvtier.errors import ConfigError
from kvtier.kernels import (
    Rotary,
    copy_partial_blocks,
    dequantise_nvfp4,
    fused_write,
    plan_write,
    quantise_nvfp4,
    write_kv,
)

OURS: Final = "kvtier"


@dataclass(frozen=True)
class GpuWritePlan:
    """What is measured, in bfloat16.

    Attributes:
        tokens: of one prefill.
        heads, head_dim: KV heads and their width.
        group: query heads for each KV head, in the fused write.
        page_tokens: page sizes.
        rounds: recorded per row.
    """

    tokens: int = 131072
    heads: int = 8
    head_dim: int = 128
    group: int = 4
    page_tokens: tuple[int, ...] = (16, 32, 64, 128)
    rounds: int = 9

    @classmethod
    def usual(cls, quick: bool) -> GpuWritePlan:
        """The whole, or an eighth of the tokens and two page sizes in 5 rounds."""
        return cls(16384, page_tokens=(16, 64), rounds=5) if quick else cls()


def measure_gpu_write(plan: GpuWritePlan | None = None, device: str = "cuda") -> Report:
    """Measure append, fused write and partial copy for each page size, and NVFP4 both ways.

    Args:
        plan: sizes; the defaults when None.
        device: "cuda" or "cuda:N". With "cpu" everything runs and says nothing about a GPU: that is for tests.

    Returns:
        A report that has not been printed. Its config says which rows did not hold, under "invalid".

    Raises:
        ConfigError: a plan without work.
    """
    plan = GpuWritePlan() if plan is None else plan
    if plan.tokens < 1 or any(plan.tokens % tokens for tokens in plan.page_tokens):
        raise ConfigError(f"{plan.tokens} tokens: a benchmark of writes needs at least 1, and whole pages of {plan.page_tokens}")
    report = open_gpu_report("kernels, write path", device, plan.rounds, {
        "tokens": plan.tokens, "kv_heads": plan.heads, "head_dim": plan.head_dim, "query_heads": plan.heads * plan.group})
    report.note(f"writes: {plan.tokens} tokens of one sequence, {plan.heads} KV heads of {plan.head_dim}; GB/s of bytes read and written, "
                "from the call until the device is done. The size in a row's name is one page of keys. partial_copy: one call for half of "
                "the blocks, which first checks a Python list of them.")
    for page_tokens in plan.page_tokens:
        _measure_pages(report, plan, device, page_tokens)
    _measure_nvfp4(report, plan, device)
    return report


def _measure_pages(report: Report, plan: GpuWritePlan, device: str, page_tokens: int) -> None:
    heads, dim, blocks = plan.heads, plan.head_dim, plan.tokens // page_tokens
    size = size_name(page_tokens * heads * dim * 2)
    pages = torch.zeros(blocks * 2, heads, page_tokens, dim, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(blocks, device=device).int()
    table = torch.stack([slots * 2, slots * 2 + 1])[None]
    positions = torch.arange(plan.tokens, device=device)
    sequence = torch.zeros_like(positions)
    qkv = torch.randn(plan.tokens, (plan.group + 2) * heads * dim, device=device).bfloat16()
    key, value = (qkv[:, first * heads * dim:(first + 1) * heads * dim].reshape(-1, heads, dim) for first in (plan.group, plan.group + 1))

    def in_pages(field: int) -> torch.Tensor:
        return pages[table[0, field].long()].transpose(1, 2).reshape(-1, heads, dim)

    def append() -> None:
        write_kv(pages, key, value, table, sequence, positions, layer=0, num_layers=1, check_values=False)

    def check_append() -> str | None:
        return None if torch.equal(in_pages(0), key) and torch.equal(in_pages(1), value) else "wrong bytes in the pages"

    _measure(report, plan, device, f"kernels/append/bfloat16/{size}", append, 4 * key.numel() * 2, check_append)

    pages.zero_()
    angles = torch.zeros(plan.tokens, dim // 2, device=device)   # a rotation by nothing costs the same and is checked to the bit
    rotary = Rotary(angles.cos(), angles.sin())
    length = torch.tensor([plan.tokens], device=device)
    write_plan = plan_write(length, length, plan.tokens)
    out = torch.empty(plan.tokens, plan.group * heads, dim, dtype=torch.bfloat16, device=device)

    def fused() -> None:
        fused_write(qkv, pages, table, write_plan, query_heads=plan.group * heads, layer=0, num_layers=1, rotary=rotary, out=out,
                    check_values=False)

    def check_fused() -> str | None:
        queries = qkv[:, :plan.group * heads * dim].view_as(out)
        return check_append() if torch.equal(out, queries) else "wrong queries"

    _measure(report, plan, device, f"kernels/fused_write/bfloat16/{size}", fused,
             2 * qkv.numel() * 2 + 2 * angles.numel() * 4, check_fused)

    if page_tokens < 2:
        return
    blocks_of_pool = pages.view(blocks, 1, 2, heads, page_tokens, dim)
    half, tokens = blocks // 2, page_tokens // 2
    order = slots.tolist()
    pairs = list(zip(order[:half], order[half:2 * half], strict=True))

    def copy_blocks() -> None:
        copy_partial_blocks(blocks_of_pool, blocks_of_pool, pairs, tokens)

    def check_copy() -> str | None:
        source, target = (torch.tensor(part, device=device) for part in (order[:half], order[half:2 * half]))
        same = torch.equal(blocks_of_pool[target, :, :, :, :tokens], blocks_of_pool[source, :, :, :, :tokens])
        return None if same else "wrong bytes in the copied blocks"

    if pairs:
        _measure(report, plan, device, f"kernels/partial_copy/bfloat16/{size}", copy_blocks, 2 * half * 2 * heads * tokens * dim * 2,
                 check_copy)


def _measure_nvfp4(report: Report, plan: GpuWritePlan, device: str) -> None:
    numbers = torch.randn(plan.tokens, plan.heads, plan.head_dim, device=device).bfloat16()
    scale = float(numbers.abs().max()) / (6 * 448)
    packed = quantise_nvfp4(numbers, scale)
    num_bytes = numbers.numel() * 2 + sum(part.numel() for part in packed)

    def check() -> str | None:
        back = dequantise_nvfp4(*packed, scale)
        error = float((back - numbers.float()).norm() / numbers.float().norm())
        return None if error < 0.12 else f"a round trip changes the numbers by {error:.2f} (allowed: 0.12)"

    name = f"bfloat16/{plan.heads}x{plan.head_dim}"
    _measure(report, plan, device, f"kernels/nvfp4/quantise/{name}", lambda: quantise_nvfp4(numbers, scale), num_bytes, check)
    _measure(report, plan, device, f"kernels/nvfp4/dequantise/{name}", lambda: dequantise_nvfp4(*packed, scale, torch.bfloat16), num_bytes,
             check)


def _measure(report: Report, plan: GpuWritePlan, device: str, name: str, run: Callable[[], object], num_bytes: int,
             check: Callable[[], str | None]) -> None:
    """A row of ``run``, which reads and writes ``num_bytes`` in all, beside a copy that does."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    measured = interleave([Alternative(DEVICE_COPY, until_done(device, lambda: target.copy_(source))),
                           Alternative(OURS, until_done(device, run))], plan.rounds, warm_up=WARM_UP)
    wrong = check()
    if wrong is not None:
        report.reject(name, wrong)
        return
    report.add(throughput_row(name, measured, OURS, DEVICE_COPY, num_bytes))

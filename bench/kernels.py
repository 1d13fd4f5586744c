"""``kvtier bench kernels``: paged decode attention and append on a CPU, beside what they would cost without pages.

The limit of decode is torch's own attention over keys and values that lie contiguously already; of append, a plain copy of the same
bytes. Every result is compared: decode's with torch's, append's byte by byte. The pages are scattered over the pool.

A plain copy is as fast as the memory that it gets. On one virtual machine the same copy ran at 17 or at 27 GB/s, depending on which
memory an allocation was given, and at 44 when its target was in the cache. So the copy has the append's sources and the append's
target: it writes them one after the other into the pool's own memory, which both find zeroed. A turn is several layers, as in a
forward pass, so that what the cache still holds of the zeros is little of it, and a thread that wakes late costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.bench.build import compiled
from kvtier.bench.measure import Alternative, interleave
from kvtier.bench.openmp_waiting import openmp_waiting
from kvtier.bench.report import Report, noise_row, require_memory, size_name, throughput_row
from kvtier.errors import ConfigError
from kvtier.kernels import OffsetTable, attention_decode, write_kv
from kvtier.kernels.compiled_copy import copy_runs
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.primary import TORCH_DTYPES, PrimaryPool

ROWS: Final = "torch sdpa, contiguous"
GQA: Final = "torch sdpa, contiguous, enable_gqa"
COPY: Final = "torch copy"
OURS: Final = "kvtier"
AGAIN: Final = "the limit again"

_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


@dataclass(frozen=True)
class KernelsPlan:
    """What is measured.

    Attributes:
        sequences, tokens: of the decode batch, and what each has in pages.
        heads, group, head_dim: KV heads, query heads for each of them, and their width.
        dtypes: of pages and queries, by torch's names.
        page_tokens: page sizes.
        append_tokens: tokens of one append, as in a prefill.
        append_layers: appends of one turn.
        rounds: recorded per row.
    """

    sequences: int
    tokens: int
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    page_tokens: tuple[int, ...] = (16, 32, 64, 128)
    append_tokens: int = 8192
    append_layers: int = 4
    rounds: int = 9

    @classmethod
    def for_this_machine(cls, quick: bool) -> KernelsPlan:
        """32 sequences of 4,096 tokens; quick: 8 of 1,024, two page sizes."""
        return cls(8, 1024, page_tokens=(16, 64), append_tokens=4096, rounds=5) if quick else cls(32, 4096)

    def group_of(self, dtype: str, tokens: int, layers: int = 1) -> LayerGroup:
        """Layers with this page size."""
        return KVLayout.uniform(num_layers=layers, num_kv_heads=self.heads, head_dim=self.head_dim, dtype=dtype,
                                tokens_per_block=tokens).groups[0]

    def context_bytes(self, dtype: str) -> int:
        """Keys and values of the whole batch."""
        return 2 * self.sequences * self.tokens * self.heads * self.head_dim * TORCH_DTYPES[dtype].itemsize

    def append_bytes(self, dtype: str) -> int:
        """Keys and values of one turn of appends."""
        return 2 * self.append_layers * self.append_tokens * self.heads * self.head_dim * TORCH_DTYPES[dtype].itemsize


def measure_kernels(quick: bool = False, *, plan: KernelsPlan | None = None) -> Report:
    """Measure.

    Args:
        quick: a smaller batch and fewer page sizes, some seconds in all.
        plan: sizes; chosen when None.

    Returns:
        A report that has not been printed. Its config says under "invalid" where a result was wrong.

    Raises:
        ConfigError: the pages do not fit into free memory.
    """
    plan = KernelsPlan.for_this_machine(quick) if plan is None else plan
    if min(plan.sequences, plan.tokens, plan.append_tokens, plan.append_layers, plan.rounds) < 1:
        raise ConfigError(f"{plan.sequences} sequences of {plan.tokens} tokens, {plan.append_tokens} to append in {plan.append_layers} "
                          f"layers, {plan.rounds} rounds: a kernel benchmark needs at least 1 of each")
    most = max(max(plan.context_bytes(dtype), plan.append_bytes(dtype)) for dtype in plan.dtypes)
    require_memory("kvtier bench kernels", 2 * most + (256 << 20),
                   "end other programs" if quick else "end other programs, or use --quick, which needs less")
    report = Report("kvtier bench kernels", {
        "command": "kernels", "quick": quick, "device": "cpu", "compiled": compiled(),
        "sequences": plan.sequences, "tokens": plan.tokens, "kv_heads": plan.heads,
        "query_heads": plan.heads * plan.group, "head_dim": plan.head_dim, "page_tokens": list(plan.page_tokens),
        "append_tokens": plan.append_tokens, "append_layers": plan.append_layers, "rounds": plan.rounds,
        "torch_threads": torch.get_num_threads(), "openmp_waiting": openmp_waiting(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability()})
    report.note(f"decode: {plan.sequences} sequences of {plan.tokens} tokens, one query each with {plan.heads * plan.group} heads over "
                f"{plan.heads}; GB/s of keys and values read. {ROWS}: the query heads of a KV head as rows, the fastest form it has. "
                f"append: {plan.append_tokens} tokens of one sequence in {plan.append_layers} layers, one after the other; GB/s of keys "
                f"and values written. {COPY}: the same rows to the same pool, side by side. The size in a row's name is one "
                f"page of keys: {', '.join(_page_names(plan))}. Pages are scattered. noise: the limit against itself, in the same rounds. "
                "While other programs are busy small operations wait for their threads, and decode's rows say nothing.")
    if copy_runs is None:
        report.note("Rows are written by library calls here; the compiled build is faster (make compiled, then PYTHONPATH=build/compiled).")
    with torch.inference_mode(), report.interruptible():
        for dtype in plan.dtypes:
            for page_tokens in plan.page_tokens:
                _measure_decode(report, plan, dtype, page_tokens)
                _measure_append(report, plan, dtype, page_tokens)
    return report


def _page_names(plan: KernelsPlan) -> list[str]:
    return [f"{size_name(_page_bytes(plan, dtype, tokens))} is {tokens} tokens in {dtype}" for dtype in plan.dtypes
            for tokens in plan.page_tokens]


def _page_bytes(plan: KernelsPlan, dtype: str, tokens: int) -> int:
    return tokens * plan.heads * plan.head_dim * TORCH_DTYPES[dtype].itemsize


def _scattered_pool(group: LayerGroup, sequences: int, blocks: int) -> tuple[PrimaryPool, torch.Tensor]:
    """A pool of exactly these blocks, and a table that gives them to the sequences in any order."""
    pool = PrimaryPool(group, sequences * blocks, "cpu")
    slots = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(6)).view(sequences, blocks).tolist()
    table = OffsetTable.for_group(group, max_rows=sequences, max_blocks=blocks, num_blocks=sequences * blocks).fill(slots)
    return pool, table


class _Context:
    """Contiguous keys and values ``[sequences, heads, tokens, head_dim]``, and a pool in whose scattered pages they lie as well."""

    def __init__(self, plan: KernelsPlan, dtype: str, page_tokens: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.keys, self.values = (
            torch.empty(plan.sequences, plan.heads, plan.tokens, plan.head_dim, dtype=TORCH_DTYPES[dtype]).normal_(generator=generator)
            for _ in range(2))
        self.pool, self.table = _scattered_pool(plan.group_of(dtype, page_tokens), plan.sequences, -(-plan.tokens // page_tokens))
        positions = torch.arange(plan.tokens)
        for sequence in range(plan.sequences):
            write_kv(self.pool.pages, self.keys[sequence].transpose(0, 1), self.values[sequence].transpose(0, 1),
                     self.table[sequence:sequence + 1], torch.zeros_like(positions), positions, layer=0, num_layers=1)


def _measure_decode(report: Report, plan: KernelsPlan, dtype: str, page_tokens: int) -> None:
    name = f"kernels/decode/{dtype}/{size_name(_page_bytes(plan, dtype, page_tokens))}"
    report.say(f"measuring {name}")
    context = _Context(plan, dtype, page_tokens)
    generator = torch.Generator().manual_seed(8)
    query = torch.randn(plan.sequences, plan.heads * plan.group, plan.head_dim, generator=generator).to(context.keys.dtype)
    lengths = torch.full((plan.sequences,), plan.tokens)
    rows = query.view(plan.sequences, plan.heads, plan.group, plan.head_dim)
    results: dict[str, torch.Tensor] = {}

    def attend_rows() -> None:
        results[ROWS] = scaled_dot_product_attention(rows, context.keys, context.values).view_as(query)

    def attend_gqa() -> None:
        results[GQA] = scaled_dot_product_attention(query[:, :, None], context.keys, context.values, enable_gqa=True).view_as(query)

    def attend_pages() -> None:
        results[OURS] = attention_decode(query, context.pool.pages, context.table, lengths, layer=0, num_layers=1)

    attend_rows()
    expected, failures = results[ROWS].double(), []

    def check() -> None:
        error = float((results[OURS].double() - expected).norm() / expected.norm())
        if not error < _TOLERANCE[dtype]:
            failures.append(f"differs from torch's attention by {error:.1e} (allowed: {_TOLERANCE[dtype]})")

    measured = interleave([Alternative(ROWS, attend_rows), Alternative(OURS, attend_pages, check=check), Alternative(GQA, attend_gqa),
                           Alternative(AGAIN, attend_rows)], plan.rounds)
    if failures:
        report.reject(name, failures[0])
        return
    report.add(throughput_row(name, measured, OURS, ROWS, plan.context_bytes(dtype), {"enable_gqa": GQA}))
    report.add(noise_row(f"{name}/noise", measured, AGAIN, ROWS))


def _measure_append(report: Report, plan: KernelsPlan, dtype: str, page_tokens: int) -> None:
    name = f"kernels/append/{dtype}/{size_name(_page_bytes(plan, dtype, page_tokens))}"
    report.say(f"measuring {name}")
    layers, tokens = plan.append_layers, plan.append_tokens
    pool, table = _scattered_pool(plan.group_of(dtype, page_tokens, layers), 1, -(-tokens // page_tokens))
    # As a model hands them over: [tokens, heads, head_dim], contiguous.
    rows = torch.empty(layers, 2, tokens, plan.heads, plan.head_dim, dtype=TORCH_DTYPES[dtype])
    rows.normal_(generator=torch.Generator().manual_seed(9))
    targets = pool.pages.view(-1)[:rows.numel()].view_as(rows)
    sequence, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    failures: list[str] = []

    def copy() -> None:
        for layer in range(layers):
            for field in range(2):
                targets[layer, field].copy_(rows[layer, field])

    def append() -> None:
        for layer in range(layers):
            write_kv(pool.pages, rows[layer, 0], rows[layer, 1], table, sequence, positions, layer=layer, num_layers=layers)

    def clear() -> None:
        pool.pages.zero_()

    def check() -> None:
        for layer in range(layers):
            for field in range(2):
                pages = pool.pages[table[0, field].long() + 2 * layer]   # [blocks, heads, tokens, head_dim]
                found = pages.transpose(1, 2).reshape(-1, plan.heads, plan.head_dim)[:tokens]
                if not torch.equal(found, rows[layer, field]):
                    failures.append(f"wrong {('keys', 'values')[field]} in the pages of layer {layer}")

    measured = interleave([Alternative(COPY, copy, clear), Alternative(OURS, append, clear, check), Alternative(AGAIN, copy, clear)],
                          plan.rounds)
    if failures:
        report.reject(name, failures[0])
        return
    report.add(throughput_row(name, measured, OURS, COPY, plan.append_bytes(dtype)))
    report.add(noise_row(f"{name}/noise", measured, AGAIN, COPY))

"""Paged pools for the kernel tests: everything that no sequence owns is NaN, so whoever reads or leaves it there is seen."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvtier.kernels import OffsetTable
from kvtier.kernels.dispatch import use_reference

sys.path.append(str(Path(__file__).parent))  # so that test modules can import attention_batch: importlib mode puts no folder there

@dataclass
class PagedBatch:
    """Sequences whose keys and values are known, and a pool in which they may lie. Built here from plain torch tensors."""

    lengths: Sequence[int]
    heads: int = 2
    tokens_per_block: int = 4
    head_dim: int = 8
    layers: int = 3
    layer: int = 1
    dtype: torch.dtype = torch.float32
    kv_factor: int = 2
    tokens_first: bool = False   # NHD: the same numbers with other strides
    extra_blocks: int = 3        # width of the table beyond the longest sequence
    seed: int = 0
    blocks: torch.Tensor = field(init=False)   # [blocks, layers, kv_factor, heads, tokens_per_block, head_dim]
    slots: list[list[int]] = field(init=False)
    table: torch.Tensor = field(init=False)
    keys: list[torch.Tensor] = field(init=False)     # per sequence [length, heads, head_dim]
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.tokens_per_block) for length in self.lengths]
        num_blocks = sum(counts) + 4
        order = random.Random(self.seed).sample(range(num_blocks), sum(counts))
        self.slots = [[order.pop() for _ in range(count)] for count in counts]
        head, token = (self.tokens_per_block, self.heads) if self.tokens_first else (self.heads, self.tokens_per_block)
        shape = (num_blocks, self.layers, self.kv_factor, head, token, self.head_dim)
        self.blocks = torch.full(shape, float("nan"), dtype=self.dtype)
        if self.tokens_first:
            self.blocks = self.blocks.transpose(3, 4)
        offsets = OffsetTable(max_rows=max(1, len(self.lengths)), max_blocks=max(counts, default=0) + self.extra_blocks,
                              num_layers=self.layers, kv_factor=self.kv_factor, num_blocks=num_blocks)
        self.table = offsets.fill(self.slots)

        def draw(length: int) -> torch.Tensor:
            return torch.randn(length, self.heads, self.head_dim, generator=generator).to(self.dtype)

        self.keys = [draw(length) for length in self.lengths]
        self.values = self.keys if self.kv_factor == 1 else [draw(length) for length in self.lengths]

    @property
    def pages(self) -> torch.Tensor:
        """``[num_pages, heads, tokens_per_block, head_dim]``, a view of ``blocks``."""
        return self.blocks.flatten(0, 2)

    def page_of(self, slot: int, kv_field: int) -> torch.Tensor:
        """One page of this batch's layer, found without a table."""
        return self.blocks[slot, self.layer, kv_field]

    def write_without_kernel(self) -> PagedBatch:
        """Put every token where it belongs, by slots and not by the table."""
        for slots, keys, values in zip(self.slots, self.keys, self.values, strict=True):
            for position in range(len(keys)):
                block, inside = divmod(position, self.tokens_per_block)
                for kv_field, source in enumerate((keys, values)[:self.kv_factor]):
                    self.page_of(slots[block], kv_field)[:, inside] = source[position]
        return self

    def chunk(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``write_kv`` takes after the pages, for tokens ``begin`` to ``end`` of the first sequence."""
        positions = torch.arange(begin, end)
        return self.keys[0][begin:end], self.values[0][begin:end], self.table, torch.zeros_like(positions), positions

    def queries(self, count: int, query_heads: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random queries ``[count, query_heads, head_dim]``."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(count, query_heads, self.head_dim, generator=generator).to(dtype or self.dtype)

    @property
    def address(self) -> dict[str, int]:
        """The keywords that say where this batch's layer is."""
        return {"layer": self.layer, "num_layers": self.layers, "kv_factor": self.kv_factor}


@pytest.fixture(scope="session")
def paged() -> Callable[..., PagedBatch]:
    """Makes a :class:`PagedBatch`."""
    return PagedBatch


@pytest.fixture(scope="session")
def same_bits() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Equality of tensors in which NaN equals NaN."""

    def compare(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

    return compare


@contextmanager
def reference_or_not(enabled: bool) -> Iterator[None]:
    use_reference(enabled)
    try:
        yield
    finally:
        use_reference(False)


@pytest.fixture(scope="session")
def reference_switch() -> Callable[[bool], AbstractContextManager[None]]:
    """``with reference_switch(True):`` every kernel is its reference, with all checks on."""
    return reference_or_not


@pytest.fixture
def reference_kernels() -> Iterator[None]:
    """Within a test every kernel is its reference, with all checks on."""
    with reference_or_not(True):
        yield


@pytest.fixture(scope="session")
def poison() -> Callable[..., torch.Tensor]:
    """Makes a tensor whose bytes are all 0xFF: NaN in every floating-point dtype, e4m3 too, and the last code elsewhere."""

    def make(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)

    return make

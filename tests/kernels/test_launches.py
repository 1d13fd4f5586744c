"""What Triton is told at a launch, as it would be on a GPU. The interpreter knows nothing of it, and ``compile_check`` supposes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from launches import binder_of, launches

from kvtier.kernels import (
    DecodePlan,
    RingMap,
    Visibility,
    attention,
    attention_decode,
    attention_plan,
    attention_prefill,
    block_offsets,
    compile_check,
    copy_partial_blocks,
    dispatch,
    fill_block_offsets,
    partial_copy,
    row_moves,
)
from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.block_offsets import ScratchWindow
from kvtier.kernels.places import TokenPlaces
from kvtier.kernels.rotary import Rotary
from kvtier.kernels.row_moves import RowPlaces, move_rows
from kvtier.kernels.storage import StoredPages
from kvtier.kernels.triton_append import append_triton
from kvtier.kernels.triton_block_offsets import fill_offsets_triton
from kvtier.kernels.triton_decode import decode_triton
from kvtier.kernels.triton_fused_write import fused_write_triton
from kvtier.kernels.triton_gather import gather_triton
from kvtier.kernels.triton_partial_copy import partial_copy_triton
from kvtier.kernels.triton_scatter import scatter_triton
from kvtier.kernels.triton_value_tail import zero_tail_triton

HEADS, UNIT, DIM, PAGES = 2, 16, 32, 64


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def kernels():
    found = {case.kernel: case.name for module in compile_check._TRITON_MODULES for case in importlib.import_module(module).compile_cases()}
    return [pytest.param(kernel, id=name) for kernel, name in found.items() if any(name.endswith("_stride") for name in kernel.arg_names)]


def types_of(kernel, stride):
    """Of the strides that are specialised, when all of them are ``stride``."""
    arguments = [stride if name.endswith("_stride") else 2 for name in kernel.arg_names]
    _, specialised, _ = binder_of(kernel)(*arguments)
    return {kind for name, (kind, _) in zip(kernel.arg_names, specialised, strict=True)
            if name.endswith("_stride") and name not in kernel.do_not_specialize}


@pytest.mark.parametrize("kernel", kernels())
def test_a_stride_is_taken_for_what_it_is(kernel):
    """Annotated as ``int``, it would be cut to 32 bits, which is another address in a large layer-first pool; and one that is 1 would not
    be known, so that numbers were loaded one by one, which no GPU's memory is made for."""
    assert types_of(kernel, 2**31) <= {"i64"}
    assert types_of(kernel, 1) <= {"constexpr"}


class Batch:
    """``rows`` tokens, one of each sequence, in a table of ``width`` blocks. Indices begin at ``first`` in memory of a larger batch, as
    where an engine takes a part of its buffers."""

    pages = torch.zeros(PAGES, HEADS, UNIT, DIM, dtype=torch.bfloat16)
    stored = StoredPages.of("test", pages)
    cache = torch.zeros(8, UNIT, 1, 132, dtype=torch.uint8)

    def __init__(self, rows: int, width: int, first: int) -> None:
        def index(*shape: int) -> torch.Tensor:
            size = torch.Size(shape).numel()
            return torch.zeros(size + first, dtype=torch.int32)[first:].view(shape)

        self.index, self.rows = index, rows
        self.table, self.lengths = index(rows, 2, width), index(rows)
        self.places = TokenPlaces(self.table, index(rows), index(rows), index(rows))
        self.numbers = torch.zeros(rows, HEADS, DIM, dtype=torch.bfloat16)

    def launch_everything(self) -> None:
        rows, numbers, index = self.rows, self.numbers, self.index
        append_triton(self.stored, numbers, numbers, self.places, 0)
        rotary = Rotary(*(torch.zeros(8, DIM // 2) for _ in range(2)))
        fused_write_triton(numbers.repeat(1, 3, 1).flatten(1), None, rotary, index(rows), torch.zeros_like(numbers), 1.0, self.stored,
                           self.places, HEADS, 0)
        zero_tail_triton(self.pages, None, self.table, self.lengths, range(2))
        gather_triton(self.pages, index(rows), index(rows))
        keys, scales = (torch.zeros(rows, width, dtype=torch.uint8) for width in (128, 4))
        scatter_triton(self.cache, keys, scales, index(rows), index(rows))
        context = PagedContext.of("test", numbers, self.pages, self.table, layer=0)
        plan = DecodePlan(max_sequences=40, max_tokens=4096, query_heads=HEADS, kv_heads=HEADS, value_dim=DIM,
                          num_programs=1000)
        decode_triton(numbers, context, self.lengths, plan)


BATCHES = [(1, 1, 0), (2, 3, 1), (7, 16, 2), (16, 32, 0), (33, 5, 3)]


def test_another_batch_compiles_no_new_kernel():
    """In the middle of serving that takes a second, and it may end the capture of a graph."""
    with launches() as found:
        for batch in BATCHES:
            Batch(*batch).launch_everything()
    assert len(found) == 7
    assert {kernel.__name__: len(variants) for kernel, variants in found.items() if len(variants) > 1} == {}


@pytest.mark.parametrize("has_scratch", [False, True])
def test_a_block_table_of_another_batch_compiles_no_new_kernel(has_scratch):
    """It has as many slots as its rows have blocks, behind as many pointers as there are rows: any number, at any place."""
    tables, staged = torch.zeros(1, 40, 2, 32, dtype=torch.int32), torch.zeros(2000, dtype=torch.int32)
    with launches() as found:
        for rows, width, count in BATCHES:
            size = rows + 1 + rows * width
            scratch = ScratchWindow(*(staged[count:][:rows] for _ in range(2)), staged[count:][:rows * count].view(rows, count))
            fill_offsets_triton(tables[:, :rows, :, :width], staged[:rows + 1], staged[rows + 1:size], (4,), (1,), 8,
                                scratch if has_scratch else None)
    assert [len(variants) for variants in found.values()] == [1]


def test_another_number_of_tokens_to_copy_compiles_no_new_kernel():
    blocks = torch.zeros(4, 2, 2, HEADS, UNIT, DIM)
    with launches() as found:
        for tokens in range(1, UNIT + 1):
            partial_copy_triton(blocks, blocks, [(0, 1)], tokens)
    assert [len(variants) for variants in found.values()] == [1]


@pytest.mark.parametrize("number", [np.int32, torch.tensor], ids=["numpy", "element of a tensor"])
def test_whole_numbers_of_any_kind_come_to_a_launch_as_pythons(monkeypatch, number):
    """Triton refuses others, and takes an element of a tensor for its address; on a CPU both are numbers like any other."""
    monkeypatch.setattr(dispatch, "kernel_paths", kernel_paths := lambda kind, paths=dispatch._paths_of("cuda"): paths)
    for module in (attention, block_offsets, partial_copy, row_moves):
        monkeypatch.setattr(module, "kernel_paths", kernel_paths)
    monkeypatch.setattr(attention_plan, "_programs_of", lambda device: 16)
    pages, table = torch.zeros(64, HEADS, UNIT, DIM), torch.zeros(1, 2, 64, dtype=torch.int32)
    blocks = torch.zeros(4, 2, 2, HEADS, UNIT, DIM)
    query = torch.zeros(1, HEADS, DIM)

    def launch_everything(number: Callable[[int], Any]) -> None:
        attention_prefill(query, pages, table[0], number(1000), layer=number(0), check_values=False)
        plan = DecodePlan(max_sequences=number(1), max_tokens=number(3000), query_heads=number(HEADS), kv_heads=number(HEADS),
                          value_dim=number(DIM), num_programs=number(7))
        window = Visibility(number(8), number(2), RingMap(number(8), number(2), number(UNIT)))
        attention_decode(query, pages, table, torch.tensor([40]), layer=0, plan=plan, visibility=window, check_values=False)
        copy_partial_blocks(blocks, blocks, [(0, 1)], number(3))
        fill_block_offsets(torch.zeros(1, 4, 2, 8, dtype=torch.int32), torch.tensor([0, 2]), torch.tensor([1, 2]),
                           pages_per_block=[number(4)], value_fields=[number(1)], num_blocks=number(8))
        move_rows(RowPlaces(4096, 8, 8), RowPlaces(8192, 8, 8), torch.tensor([[0, 1]]), number(1), number(8))

    with launches() as expected:
        launch_everything(int)
    with launches() as found:
        launch_everything(number)
    assert found == expected
